"""The checks of one model type of Transformers, on a tiny model made of the defaults of its configuration.

Gates of one change nothing, closed heads are closed, and scores are derivatives. A model without some heads, saved and loaded,
has the outputs of the gated model, and the code of its model card runs.
"""

from __future__ import annotations

import copy
import inspect
import io
import re
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.attention.inputs import example_inputs
from gates.attention.probing import PROBED, probe_attention
from gates.attention.sites import AttentionSite, find_attention, is_attention
from gates.errors import GateError, first_line
from gates.export.card import prediction
from gates.export.checkpoint import own_auto_class
from tests.gates.kinds import seen_kinds
from tools.coverage.checks import (
    TOLERANCE,
    UNREACHED,
    GatedModel,
    ScoredInPartError,
    check_equal,
    check_reloaded,
    describe_kinds,
    in_float64,
    outputs,
)
from tools.coverage.tiny import NotBuiltError, tiny_models

REMOVED = "gated and removed"


@dataclass(frozen=True)
class TypeRow:
    """Hold the result of one model type, a line of the table.

    The outcome is a key of :data:`tools.coverage.__main__.MEANINGS`. The reason says why heads are not removed.
    """

    model_type: str
    outcome: str
    model_class: str = ""
    attention: str = ""
    reason: str = ""


def check_type(model_type: str) -> TypeRow:
    """Build tiny models of a type and run all checks on the first that has inputs and attention."""
    rows: list[TypeRow] = []
    try:
        for model in tiny_models(model_type):
            row = check_model(model_type, model)
            if row.outcome not in ("no inputs", "no attention") and not row.reason.endswith(UNREACHED):
                return row
            rows.append(row)
            if len(rows) == 3:
                break
    except NotBuiltError as error:
        return TypeRow(model_type, "not built", reason=str(error))
    return rows[0]


def check_model(model_type: str, model: PreTrainedModel) -> TypeRow:
    """Run all checks of one tiny model."""
    row = partial(TypeRow, model_type, model_class=type(model).__name__)
    refusal = ""
    try:
        sites = find_attention(model)
    except GateError as error:
        refusal = first_line(error)
    if refusal and not any(map(is_attention, model.modules())):
        return row("no attention", reason="the tiny model made of its defaults has no attention")
    try:
        inputs = example_inputs(model, batch=2, length=8)
    except GateError as error:
        return row("refused", reason=refusal) if refusal else row("no inputs", reason=first_line(error))
    try:
        sites = probe_attention(model, inputs) if refusal else sites
    except GateError as error:
        return row("refused", reason=first_line(error))
    row = partial(row, attention=" ".join(describe_kinds(sites)))
    whole = copy.deepcopy(model)
    try:
        _check_gates(GatedModel(*in_float64(model, inputs), sites))
    except GateError as error:
        return row("refused", reason=first_line(error))
    except ScoredInPartError as error:
        return row("scored in part", reason=str(error))
    except Exception as error:  # the other types must not be lost
        return row("FAILED", reason=f"{type(error).__name__}: {first_line(error)}")
    if any(site.layout.gate_only == PROBED for site in sites):
        return row("gated", reason=PROBED)
    try:
        check_code(whole)
        loaded, expected = check_reloaded(whole, mask_for(find_attention(whole)), inputs, model_class=type(whole))
        check_equal(outputs(loaded, inputs), expected, TOLERANCE[torch.float32], "removing and loading")
    except GateError as error:
        return row("gated", reason=re.sub(r"the weights in '[^']*\.partial-\d+'", "its export", first_line(error)))
    except Exception as error:
        return row("FAILED", reason=f"{type(error).__name__}: {first_line(error)}")
    return row(REMOVED)


def _check_gates(gated: GatedModel) -> None:
    gated.ones()
    _, total = gated.scores()
    gated.slopes(total[None])
    sites = gated.gates.sites
    starts = torch.tensor([0, *(site.heads for site in sites)]).cumsum(0).tolist()
    gated.zeros([starts[index] + index % sites[index].heads for index in range(0, len(sites), max(1, len(sites) // 12))])
    _check_kinds(gated)


def _check_kinds(gated: GatedModel) -> None:
    """Check that sites are of the kind that changed tokens show, where one example can run alone."""
    one: dict[str, Any] = {name: tensor[:1] for name, tensor in gated.inputs.items()}
    if "use_cache" in inspect.signature(gated.model.forward).parameters:
        one["use_cache"] = False  # with a cache, FSMT leaves the mask to the length of its input
    shown: list[Any] = [None] * len(gated.gates.sites)
    with suppress(Exception):  # patches of several pictures in one row, modules that cannot be called on their own
        shown = list(seen_kinds(gated.gates.sites, lambda: gated.model(**one)))
    for site, kind in zip(gated.gates.sites, shown, strict=True):  # tokens of blocks and pools need not see each other
        assert kind in (None, "cross", site.kind), f"{site.name!r} is taken for {site.kind} and behaves as {kind}"


def check_code(model: PreTrainedModel) -> None:
    """Check that the lines of a model card that predict, if there are any, run and print something."""
    code, printed = prediction(model, own_auto_class(model)), io.StringIO()
    try:
        with redirect_stdout(printed):
            exec("\n".join(code), {"model": model, "torch": torch})
    except Exception as error:
        raise AssertionError(f"the code of its model card fails: {type(error).__name__}: {first_line(error)}") from error
    assert printed.getvalue() or not code, "the code of its model card prints nothing"


def mask_for(sites: tuple[AttentionSite, ...]) -> Tensor:
    """Return a mask ``[heads]`` that removes some heads of every site, and all of one site where its class has several."""
    generator = torch.Generator().manual_seed(2)
    parts = [(torch.rand(site.heads, generator=generator) < 0.5).float() for site in sites]
    for part in parts:
        if len(part) > 1 and part.unique().numel() == 1:
            part[0] = 1 - part[0]
    if [type(site.core) for site in sites].count(type(sites[0].core)) > 1:
        parts[0][:] = 0.0
    return torch.cat(parts)
