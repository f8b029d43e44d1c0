"""Provide the cells and masks that the tables share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError, first_line
from tools.coverage import architectures as zoo

Row = tuple[str, str, str, str]
"""A line of ``docs/data/deployment.csv``: the table, the row, the column and the cell."""

TINY = {**zoo.GROUPED_EXPLICIT, "num_hidden_layers": 3}
LAGUNA = {
    **TINY, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
GEMMA4 = {
    **TINY, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": zoo.VOCABULARY,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
BY_LAYER = tuple(
    zoo.Architecture(name, "ForCausalLM", config, kinds={"decoder": 12}, kv_heads=2, generates=True)
    for name, config in (("Laguna", LAGUNA), ("Gemma4", GEMMA4))
)
"""Families whose classes read numbers by layer: of heads (Laguna), of key/value heads by type of layer (Gemma 4)."""


def cell(run: Callable[[], str], *packages: str) -> str:
    """Return what ``run`` returns, ``no`` with its error, or ``not tried`` if a package is missing."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        return f"not tried: {', '.join(missing)} not installed"
    try:
        return run()
    except GateError as error:
        return f"no: {first_line(error)}"
    except Exception as error:  # of any library; the table shows the message
        return f"no: {type(error).__name__}: {first_line(error)}"


def differs(found: Tensor, expected: Tensor) -> str:
    """Return the largest difference relative to the largest expected value."""
    return f"differs by {float((found - expected).abs().max() / expected.abs().max()):.1g}"


def tokens(rows: int = 1, vocabulary: int = zoo.VOCABULARY, length: int = 8) -> Tensor:
    """Return random token ids ``[rows, length]``."""
    return torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


def written(model: PreTrainedModel, ids: Tensor, new: int, **options: object) -> Tensor:
    """Generate exactly ``new`` tokens greedily; return texts and new tokens ``[rows, length + new]``."""
    length = {"max_new_tokens": new, "min_new_tokens": new}
    text: Tensor = model.generate(ids, **length, do_sample=False, **options)  # type: ignore[operator]
    return text


def dense(heads: Sequence[int]) -> Tensor:
    """Return the mask of all heads."""
    return torch.ones(sum(heads))


def even(heads: Sequence[int]) -> Tensor:
    """Return the mask of the first half of the heads of every site."""
    return torch.cat([(torch.arange(count) < max(1, count // 2)).float() for count in heads])


def uneven(heads: Sequence[int]) -> Tensor:
    """Return the same mask with only one head in the first site."""
    mask = even(heads)
    mask[1 : heads[0]] = 0.0
    return mask


def unpadded(architecture: zoo.Architecture, heads: Sequence[int]) -> Tensor:
    """Return an uneven mask whose numbers the family reads by layer: for Gemma 4 those of key/value heads."""
    if architecture.model != "Gemma4":
        return uneven(heads)
    mask = even(heads).view(len(heads), -1)
    mask[1] = mask[1].roll(1)  # one head of each of two groups
    return mask.flatten()
