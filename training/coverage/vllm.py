"""A model through vLLM, which another interpreter has: what it says of the next tokens."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError, first_line
from gates.export.checkpoint import Form, save_pruned
from gates.head_gates import HeadGates
from gates.sites import find_attention
from training.coverage import architectures as zoo
from training.coverage.gguf import DIFFER, dense
from training.coverage.markdown import table
from training.coverage.routes import BY_LAYER, even, uneven, unpadded
from training.coverage.vllm_process import Backend, RefusedError, Vllm, loaded
from training.runs import progress

BACKENDS: dict[str, Backend] = {"vLLM's own class": "auto", "its Transformers backend": "transformers"}
NAMES = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "Granite", "Cohere", "Mixtral", "Qwen3Moe",
    "GptOss",
)  # fmt: skip
FAMILIES = (*(zoo.BY_NAME[name] for name in NAMES), *BY_LAYER)
"""Those that have a stock form here and a class in vLLM."""
NEW = 3
"""Tokens that are written and compared."""
HEAD_DIM = 32
"""Features of a head; vLLM's attention on a CPU takes no fewer."""


def vllm_table(vllm: Vllm, families: Sequence[zoo.Architecture] = FAMILIES) -> list[str]:
    """Lines of Markdown: two rows for each family, with what became of its exports."""
    rows: list[list[str]] = []
    for family in progress.track(families, "vLLM", name_of=lambda one: one.name):
        columns = [try_vllm(vllm, family, kind) for kind in KINDS]
        rows += [[f"{family.name}, {name}", *(cells[backend] for cells in columns)] for name, backend in BACKENDS.items()]
    return table(["", *KINDS], rows)


def halved(heads: Sequence[int]) -> Tensor:
    """All heads of the first site and the first half of every other, so that query and key/value heads differ."""
    mask = even(heads)
    mask[: heads[0]] = 1.0
    return mask


def without_first(heads: Sequence[int]) -> Tensor:
    """No head of the first site and the first half of every other."""
    mask = even(heads)
    mask[: heads[0]] = 0.0
    return mask


@dataclass(frozen=True)
class Kind:
    """A column of the table.

    Args:
        heads_kept: the mask, by the numbers of heads of the sites.
        form: of the export; ``stock`` is padded where layers differ.
    """

    heads_kept: Callable[[Sequence[int]], Tensor]
    form: Form = "stock"


KINDS = {
    "dense": Kind(dense),
    "equal layers": Kind(even),
    f"{DIFFER}, padded": Kind(uneven),
    DIFFER: Kind(halved, "pruned"),
    "a layer without heads": Kind(without_first, "pruned"),
}


def try_vllm(vllm: Vllm, family: zoo.Architecture, kind: str) -> dict[Backend, str]:
    """For each backend ``yes`` with how far vLLM is from PyTorch, ``no`` with the message, or why it was not tried.

    Args:
        vllm: what is asked.
        family: of a tiny random model.
        kind: column of the table.
    """
    if vllm.missing:
        return dict.fromkeys(BACKENDS.values(), f"not tried: {vllm.missing}")
    model = zoo.build(wide(family))
    heads = [site.heads for site in find_attention(model)]
    mask, form, pad = KINDS[kind].heads_kept(heads), KINDS[kind].form, KINDS[kind].form == "stock"
    if kind == DIFFER and family in BY_LAYER:
        mask, form, pad = unpadded(family, heads), "stock", False
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "export")
        try:
            save_pruned(copy.deepcopy(model), folder, mask, form=form, pad_heads=pad, tokenizer=None)
        except GateError as error:
            return dict.fromkeys(BACKENDS.values(), f"no: {error}")
        return {backend: _cell(vllm, folder, backend, model, mask) for backend in BACKENDS.values()}


def wide(family: zoo.Architecture) -> zoo.Architecture:
    """The same with heads of :data:`HEAD_DIM` features."""
    names = {"head_dim", "global_head_dim"}.intersection({*family.config, "head_dim"})
    return replace(family, config={**family.config, **dict.fromkeys(names, HEAD_DIM)})


def _cell(vllm: Vllm, folder: Path, backend: Backend, model: PreTrainedModel, mask: Tensor) -> str:
    ids = torch.randint(3, zoo.VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(1))
    try:
        return f"yes, differs by {difference(vllm, folder, backend, model, mask, ids):.1g}"
    except RefusedError as error:
        return f"no: {first_line(error)}"


@torch.no_grad()
def difference(vllm: Vllm, folder: Path, backend: Backend, model: PreTrainedModel, mask: Tensor, ids: Tensor) -> float:
    """Compare the log probabilities of the tokens that come next, by vLLM from an export and by the gated model.

    Args:
        vllm: what is asked.
        folder: of the export.
        backend: of vLLM.
        model: dense.
        mask: heads that the export has ``[heads]``.
        ids: tokens ``[1, sequence]``.

    Returns:
        The largest difference for the first :data:`NEW` tokens that vLLM writes, the later ones from its cache, relative to the
        largest log probability.

    Raises:
        RefusedError: if vLLM does not run it.
    """
    with loaded(vllm, folder, backend) as name:
        answer = vllm.ask(ask=name, texts=ids.tolist(), new=NEW, vocabulary=model.config.get_text_config().vocab_size)
    whole = torch.cat([ids, torch.tensor(answer["tokens"])], dim=1)
    gates = HeadGates(model)
    with gates.attached(), gates.use(mask):
        expected = model(whole).logits[0, -NEW - 1 : -1].log_softmax(-1)
    found = torch.full_like(expected, -torch.inf)
    for step, probabilities in zip(found, answer["probabilities"], strict=True):
        for token, probability in probabilities.items():
            step[int(token)] = probability
    return float((found - expected).abs().max() / expected.abs().max())
