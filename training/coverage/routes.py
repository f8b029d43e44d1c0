"""By which route the export of each architecture loads, found out by writing and loading it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.export.checkpoint import Form, own_auto_class, save_pruned
from gates.export.installed import loading_both
from gates.head_gates import HeadGates
from gates.sites import find_attention
from training.coverage import architectures as zoo
from training.coverage.coverage import TOLERANCE
from training.coverage.markdown import table
from training.runs import progress

PACKAGE, REMOTE = "installed package", "remote code"


@dataclass(frozen=True)
class Route:
    """One way to load an export.

    Args:
        name: column of the table.
        form: of the export.
        meaning: for the page.
        is_even: whether all layers of a stack keep equally many heads.
        pad_heads: whether the export is padded.
    """

    name: str
    form: Form
    meaning: str
    is_even: bool = False
    pad_heads: bool = False


ROUTES = (
    Route("stock", "stock", "equally many heads in every layer; Transformers alone", is_even=True),
    Route("by layer", "stock", "different numbers; Transformers alone, whose class reads numbers of heads by layer"),
    Route("padded", "stock", "different numbers; Transformers alone, with `--pad_heads`", pad_heads=True),
    Route(PACKAGE, "pruned", "different numbers; this package after `gates.register()`, no code of the folder"),
    Route(REMOTE, "pruned", "different numbers; `trust_remote_code=True`"),
)
"""From the one that needs least of who loads the export to the one that needs most."""


TINY = {**zoo.GROUPED_EXPLICIT, "num_hidden_layers": 3}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
GEMMA4 = {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": zoo.VOCABULARY}
TYPES = ["full_attention", "sliding_attention", "full_attention"]
BY_LAYER = tuple(
    zoo.Architecture(name, "ForCausalLM", config, kinds={"decoder": 12}, kv_heads=2, generates=True)
    for name, config in (("Laguna", {**TINY, **EXPERTS}), ("Gemma4", {**TINY, **GEMMA4, "layer_types": TYPES}))
)
"""Families whose classes read numbers by layer: of heads (Laguna), of key/value heads by type of layer (Gemma 4)."""


def even(heads: Sequence[int]) -> Tensor:
    """The first half of the heads of every site."""
    return torch.cat([(torch.arange(count) < max(1, count // 2)).float() for count in heads])


def uneven(heads: Sequence[int]) -> Tensor:
    """The same, but for one head alone of the first site, so that the layers of its stack keep different numbers."""
    mask = even(heads)
    mask[1 : heads[0]] = 0.0
    return mask


def uneven_keys(heads: Sequence[int]) -> Tensor:
    """Half of the heads of every site, of one group in every site but the second, where they are of two."""
    mask = even(heads).view(len(heads), -1)
    mask[1] = mask[1].roll(1)
    return mask.flatten()


def unpadded(architecture: zoo.Architecture, heads: Sequence[int]) -> Tensor:
    """A mask that leaves layers different numbers, in what a family that reads numbers by layer reads."""
    return uneven_keys(heads) if architecture.model == "Gemma4" else uneven(heads)


def routes_of(architecture: zoo.Architecture) -> dict[str, str]:
    """For each route ``yes`` once the export of a tiny model loaded by it and computed what the gated model does, or
    ``no`` with the reason."""
    return {route.name: _try(architecture, route) for route in ROUTES}


@torch.no_grad()
def _try(architecture: zoo.Architecture, route: Route) -> str:
    model, batch = zoo.build(architecture), zoo.inputs(architecture)
    heads = [site.heads for site in find_attention(model)]
    mask = even(heads) if route.is_even else unpadded(architecture, heads)
    gates = HeadGates(model)
    with gates.attached(), gates.use(mask):
        expected = model(**batch)[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "export"
        try:
            save_pruned(model, out, mask, form=route.form, pad_heads=route.pad_heads, tokenizer=None, check_batch=batch)
        except GateError as error:
            return f"no: {error}"
        found = _loaded(out, type(model), own_auto_class(model), route.name).eval()(**batch)[0]
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    return "yes" if difference <= TOLERANCE else f"FAILED: differs by {difference:.2g}"


def _loaded(directory: Path, stock: type[PreTrainedModel], auto: str, route: str) -> PreTrainedModel:
    if route == PACKAGE:  # what gates.register() has the Auto class give out, without registering it here
        config = transformers.AutoConfig.from_pretrained(directory)
        return loading_both(stock).from_pretrained(directory, config=config)  # type: ignore[arg-type]
    loaded: PreTrainedModel = getattr(transformers, auto).from_pretrained(directory, trust_remote_code=route == REMOTE)
    return loaded


def route_table(architectures: Sequence[zoo.Architecture]) -> list[str]:
    """Lines of Markdown: a row for each combination of routes, with the architectures that have it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for architecture in progress.track(architectures, "routes", name_of=lambda one: one.name):
        cells = routes_of(architecture)
        found.setdefault(tuple(cell.partition(":")[0] for cell in cells.values()), []).append(architecture.name)
    rows = [[*cells, ", ".join(names)] for cells, names in sorted(found.items(), reverse=True)]
    return table([*(route.name for route in ROUTES), "architectures"], rows)
