"""By which route the export of each architecture loads."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import Form, own_auto_class, save_pruned
from gates.export.hub import loading_both
from tools.coverage import architectures as zoo
from tools.coverage.checks import masked_outputs
from tools.deployment.cells import BY_LAYER, Row, even, unpadded

PACKAGE, REMOTE = "installed package", "remote code"
ARCHITECTURES = [row for row in (*zoo.ARCHITECTURES, *BY_LAYER) if not row.gate_only]


class Route(NamedTuple):
    """A way to load an export; ``is_even``: with the same number of heads in all layers of a stack."""

    form: Form
    is_even: bool = False
    pad_heads: bool = False


ROUTES = {
    "stock": Route("stock", is_even=True),
    "by layer": Route("stock"),
    "padded": Route("stock", pad_heads=True),
    PACKAGE: Route("pruned"),
    REMOTE: Route("pruned"),
}


def rows() -> Iterator[Row]:
    """Iterate over the table."""
    for architecture in ARCHITECTURES:
        for route in ROUTES:
            yield "routes", architecture.name, route, try_route(architecture, route)


@torch.no_grad()
def try_route(architecture: zoo.Architecture, name: str) -> str:
    """Return ``yes`` if the export of a tiny model loads and has the outputs of the gated model, else the reason."""
    route, model, batch = ROUTES[name], zoo.build(architecture), zoo.inputs(architecture)
    heads = [site.heads for site in find_attention(model)]
    mask = even(heads) if route.is_even else unpadded(architecture, heads)
    expected = masked_outputs(model, batch, mask)[0]
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder) / "export"
        try:
            save_pruned(model, export, mask, form=route.form, pad_heads=route.pad_heads, tokenizer=None, check_batch=batch)
        except GateError as error:
            return f"no: {re.split('[,;]', str(error))[0]}"
        found = _loaded(export, type(model), own_auto_class(model), name).eval()(**batch)[0]
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    return "yes" if difference <= 1e-5 else f"FAILED: differs by {difference:.2g}"


def _loaded(export: Path, stock: type[PreTrainedModel], auto: str, route: str) -> PreTrainedModel:
    if route == PACKAGE:  # the class that gates.register() gives to the Auto class, without registering it here
        config = transformers.AutoConfig.from_pretrained(export)
        return loading_both(stock).from_pretrained(export, config=config)  # type: ignore[arg-type]
    loaded: PreTrainedModel = getattr(transformers, auto).from_pretrained(export, trust_remote_code=route == REMOTE)
    return loaded
