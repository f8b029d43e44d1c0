"""The checks of one model type: gates of one change nothing, closed heads are closed, scores are the derivatives, what is
removed, saved and loaded again computes what the gated model did, and the code of its model card runs."""

from __future__ import annotations

import copy
import inspect
import io
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError, first_line
from gates.export.checkpoint import load_pruned, own_auto_class, save_pruned
from gates.export.example_inputs import example_inputs
from gates.export.reloaded import of_dtype
from gates.export.usage import prediction
from gates.head_gates import HeadGates
from gates.hooks.probe import seen_kinds
from gates.hooks.probed_sites import PROBED, probe_attention
from gates.scores.importance import head_gradients
from gates.sites import AttentionSite, describe_kinds, find_attention, is_attention, weight_by_output
from training.coverage.outputs import check_equal, outputs, tensors
from training.coverage.types import NotBuiltError, tiny_models

LENGTH = 8
STEPS = {torch.float64: (1e-3, 1e-4, 1e-5), torch.float32: (2e-2, 5e-3, 1e-3, 3e-4)}
SLOPE = {torch.float64: 1e-2, torch.float32: 5e-2}
"""Changes of a gate for the finite difference, and how far it may be from the derivative, relative to the model's largest. A
long step may cross a place where an expert, or a point that is looked at, is chosen anew."""
REMOVAL = 1e-4
"""How far outputs may be apart once heads are removed, relative to the largest; absolute where that is below 1."""
TEMPORARY = re.compile(r"the weights in '[^']*\.partial-\d+'")
"""What a sentence calls an export that is checked before it has its name."""
TRIED = 12
"""Heads of a model that are closed one at a time, evenly spread over its sites."""

REMOVED = "gated and removed"
UNREACHED = "took no part in the forward pass"


class ScoredInPartError(Exception):
    """Scores are the derivatives, and these are not the slopes, since the model's code leaves a part of its graph out."""


@dataclass(frozen=True)
class TypeRow:
    """What was seen of one model type.

    Args:
        model_type: its name in Transformers.
        outcome: ``gated``, ``scored in part``, ``refused``, ``no attention``, ``no inputs``, ``not built`` or ``FAILED``.
        reason: why it is not gated; empty if it is.
        model: class that was tried.
        heads: heads of each kind.
        scores: ``example``, or ``batch`` where examples cannot be told apart.
        removed: ``yes`` after heads were removed, saved and loaded again; why not otherwise.
    """

    model_type: str
    outcome: str
    reason: str = ""
    model: str = ""
    heads: Mapping[str, int] | None = None
    scores: str = ""
    removed: str = ""

    @property
    def group(self) -> str:
        """Its outcome, with what became of removing heads."""
        return REMOVED if self.outcome == "gated" and self.removed == "yes" else self.outcome


def check_type(model_type: str) -> TypeRow:
    """Build a tiny model of a type and run all checks on it."""
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
        return TypeRow(model_type, "not built", str(error))
    return rows[0]


def check_model(model_type: str, model: PreTrainedModel) -> TypeRow:
    """All checks of one tiny model."""
    row = partial(TypeRow, model_type, model=type(model).__name__)
    refusal = _refusal(model)
    if refusal and not any(map(is_attention, model.modules())):
        return row("no attention", "the tiny model made of its defaults has no attention")
    try:
        inputs = example_inputs(model, batch=2, length=LENGTH)
    except GateError as error:
        return row("refused", refusal) if refusal else row("no inputs", first_line(error))
    try:
        sites = probe_attention(model, inputs) if refusal else find_attention(model)
    except GateError as error:
        return row("refused", first_line(error))
    whole = copy.deepcopy(model)
    model, precise = _precise(model, inputs)
    heads = describe_kinds(sites)
    try:
        scores = _Gated(model, precise, sites).check()
    except GateError as error:
        return row("refused", first_line(error), heads=heads)
    except ScoredInPartError as error:
        return row("scored in part", str(error), heads=heads)
    except Exception as error:  # whatever goes wrong belongs in the table and must not lose the other types
        return row("FAILED", f"{type(error).__name__}: {first_line(error)}", heads=heads)
    if any(site.layout.gate_only == PROBED for site in sites):
        return row("gated", heads=heads, scores=scores, removed=f"no: {PROBED}")
    try:
        check_code(whole)
        removed = _removed(whole, inputs)
    except GateError as error:
        removed = f"no: {TEMPORARY.sub('its export', first_line(error))}"
    except Exception as error:
        return row("FAILED", f"{type(error).__name__}: {first_line(error)}", heads=heads, scores=scores)
    return row("gated", heads=heads, scores=scores, removed=removed)


def _refusal(model: PreTrainedModel) -> str:
    """Why the table of layouts does not do for a model; empty if it does."""
    try:
        find_attention(model)
    except GateError as error:
        return first_line(error)
    return ""


def _precise(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """In float64, where rounding is far from anything that is checked, unless the model computes something else there: some
    insist on float32, and PyTorch reads a mask of float32 wrongly beside queries of float64 (EoMT)."""
    with suppress(Exception):  # grouped products of experts know no float64
        model.set_experts_implementation("eager")
    try:
        precise, single = of_dtype(inputs, torch.float64), outputs(model, inputs)
        double = outputs(model.double(), precise)
        check_equal([part.float() for part in double], single, torch.float32, "float64", tolerance=1e-2)
        return model, precise
    except Exception:  # a dtype written into the model's code
        pass
    return model.float(), dict(inputs)


class _Gated:
    """Gates and scores of one model."""

    def __init__(self, model: PreTrainedModel, inputs: Mapping[str, Tensor], sites: tuple[AttentionSite, ...]) -> None:
        self.model, self.inputs = model, inputs
        self.gates = HeadGates(model, sites=sites).eval()
        self.dtype = next(iter(model.parameters())).dtype
        self.starts = torch.tensor([0, *(site.heads for site in self.gates.sites)]).cumsum(0).tolist()
        self.in_graph: list[bool] = []

    def check(self) -> str:
        self.ones()
        scores, gradients = self.scores()
        self.slopes(gradients)
        self.zeros()
        self.kinds()
        return scores

    def ones(self) -> None:
        expected = outputs(self.model, self.inputs)
        with self.gates.attached():
            with self.gates.use(torch.ones(self.gates.heads)):
                found = outputs(self.model, self.inputs)
            unreached = [site.name for site in self.gates.sites if site.name in self.gates.unreached()]
        if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
            raise AssertionError("gates of one change its outputs")
        if unreached:
            raise GateError(f"the attention at {unreached[0]!r} (one of {len(unreached)}) {UNREACHED}")

    def zeros(self) -> None:
        """A gate of zero is a block of zeros in the output projection."""
        picked = list(enumerate(self.gates.sites))[:: max(1, len(self.gates.sites) // TRIED)]
        for index, site in picked:
            head = index % site.heads
            values = torch.ones(self.gates.heads)
            values[self.starts[index] + head] = 0.0
            with self.gates.attached(), self.gates.use(values):
                gated = outputs(self.model, self.inputs)
            block = weight_by_output(site.output).detach()[:, site.head_dim * head :][:, : site.head_dim]
            before = block.clone()
            block.zero_()
            zeroed = outputs(self.model, self.inputs)
            block.copy_(before)
            check_equal(gated, zeroed, self.dtype, f"closing head {head} of {site.name!r}")

    def scores(self) -> tuple[str, Tensor]:
        """The derivative of the loss by every gate ``[heads]``, and whether examples can be told apart."""
        total = head_gradients(self.gates, lambda: self.loss().sum()[None], "batch")[0]
        if not bool(total.isfinite().all()):
            raise AssertionError("a gradient is not finite")
        if not bool(total.any()):
            if self.matters():
                raise AssertionError("no gate has a gradient")
            raise GateError(
                "none of its outputs depends on what its heads give, on this device at least, so they have no score"
            )
        try:
            rows = head_gradients(self.gates, self.loss)
        except GateError:
            return "batch", total
        difference = (rows.sum(0) - total).abs().max() / total.abs().max()
        if not float(difference) < 1e-3:
            raise AssertionError(f"gradients of the examples do not add up to that of the batch ({float(difference):.2g})")
        return "example" if len(rows) > 1 else "batch", total

    def matters(self) -> bool:
        """Whether outputs change when all output projections have no weights."""
        expected = outputs(self.model, self.inputs)
        weights = [site.output.weight.detach() for site in self.gates.sites]
        before = [weight.clone() for weight in weights]
        for weight in weights:
            weight.zero_()
        found = outputs(self.model, self.inputs)
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
        return not all(map(torch.equal, found, expected))

    def slopes(self, gradients: Tensor) -> None:
        """Derivatives equal finite differences, for the head with the largest and some others."""
        for head in sorted({int(gradients.abs().argmax()), 0, self.gates.heads // 2, self.gates.heads - 1}):
            found = [self.slope(head, step) for step in STEPS[self.dtype]]
            near = SLOPE[self.dtype] * float(gradients.abs().max())
            if not any(abs(slope - float(gradients[head])) <= near for slope in found):
                with _nothing_detached():
                    whole = head_gradients(self.gates, lambda: self.loss().sum()[None], "batch")[0]
                if not torch.allclose(whole, gradients, rtol=1e-3):
                    raise ScoredInPartError("the model itself stops gradients on their way, and scores leave that way out")
                raise AssertionError(f"the score of head {head} is {float(gradients[head]):.3g}, its slope {found[-1]:.3g}")

    def slope(self, head: int, step: float) -> float:
        found = []
        for change in (step, -step):
            values = torch.ones(self.gates.heads, dtype=torch.float64)
            values[head] += change
            with torch.no_grad(), self.gates.attached(), self.gates.use(values):
                found.append(float(self.loss().sum()))
        return (found[0] - found[1]) / (2 * step)

    def kinds(self) -> None:
        """Sites are of the kind that changed tokens show, where one example alone can be run."""
        one: dict[str, Any] = {name: tensor[:1] for name, tensor in self.inputs.items()}
        if "use_cache" in inspect.signature(self.model.forward).parameters:
            one["use_cache"] = False  # with a cache, FSMT leaves the mask to the length of its input
        shown: list[Any] = [None] * len(self.gates.sites)
        with suppress(Exception):  # patches of several pictures in one row, modules that cannot be called on their own
            shown = list(seen_kinds(self.model, self.gates.sites, lambda: self.model(**one)))
        for site, kind in zip(self.gates.sites, shown, strict=True):
            if kind not in (None, "cross", site.kind):  # tokens of blocks and pools need not see each other
                raise AssertionError(f"{site.name!r} is taken for {site.kind} and behaves as {kind}")

    def loss(self) -> Tensor:
        """A smooth function of all outputs: one number for each example if they have the first axis, else one in all."""
        torch.manual_seed(0)
        found = list(tensors(self.model(**self.inputs)))
        if torch.is_grad_enabled():  # what has no graph has no part in the slope either
            self.in_graph = [part.requires_grad for part in found]
        parts = [part.double() for part, counts in zip(found, self.in_graph, strict=True) if counts]
        parts = [torch.where(part.isfinite(), part, 0.0) for part in parts]
        parts = [(part - 0.5).square() * torch.linspace(0.5, 1.5, part.shape[-1] if part.dim() else 1) for part in parts]
        count = {len(value) for value in self.inputs.values()}
        if len(count) == 1 and all(part.dim() > 1 and len(part) in count for part in parts):
            return torch.stack([part.flatten(1).mean(1) for part in parts]).sum(0)
        return torch.stack([part.mean() for part in parts]).sum()[None]


def _removed(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> str:
    """Heads at random, one site without any: removed, saved, loaded again, the outputs are those of the gated model."""
    gates = HeadGates(model)
    mask = mask_for(gates.sites)
    with gates.attached(), gates.use(mask):
        expected = outputs(model, inputs)
    dtype = next(iter(model.parameters())).dtype
    with tempfile.TemporaryDirectory() as folder:
        save_pruned(model, Path(folder) / "export", mask, check_batch=inputs, tokenizer=None)
        loaded = load_pruned(Path(folder) / "export", model_class=type(model)).eval()
        found = outputs(loaded, inputs)
    check_equal(found, expected, dtype, "removing and loading", tolerance=REMOVAL)
    return "yes"


def check_code(model: PreTrainedModel) -> None:
    """Run the lines of a model card that predict, if there are any.

    Raises:
        AssertionError: if they raise an error or print nothing.
    """
    code, printed = prediction(model, own_auto_class(model)), io.StringIO()
    try:
        with redirect_stdout(printed):
            exec("\n".join(code), {"model": model, "torch": torch})
    except Exception as error:
        raise AssertionError(f"the code of its model card fails: {type(error).__name__}: {first_line(error)}") from error
    if code and not printed.getvalue():
        raise AssertionError("the code of its model card prints nothing")


@contextmanager
def _nothing_detached() -> Iterator[None]:
    """Have ``Tensor.detach`` leave tensors in their graph for a while."""
    detach = Tensor.detach
    setattr(Tensor, "detach", lambda self: self)  # noqa: B010
    try:
        yield
    finally:
        setattr(Tensor, "detach", detach)  # noqa: B010


def mask_for(sites: tuple[AttentionSite, ...], *, seed: int = 2) -> Tensor:
    """A mask ``[heads]`` that leaves some heads of every site and takes some; one of several sites of a class has none."""
    generator = torch.Generator().manual_seed(seed)
    parts = [(torch.rand(site.heads, generator=generator) < 0.5).float() for site in sites]
    for part in parts:
        if len(part) > 1 and part.unique().numel() == 1:
            part[0] = 1 - part[0]
    if [type(site.core) for site in sites].count(type(sites[0].core)) > 1:
        parts[0][:] = 0.0
    return torch.cat(parts)
