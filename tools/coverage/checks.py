"""Checks that need nothing but a model and its inputs. They raise an AssertionError where something is wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.attention.inputs import of_dtype
from gates.attention.intercept import DIRECT, INTERFACE, global_names
from gates.attention.sites import KINDS, AttentionSite, weight_by_output
from gates.errors import GateError
from gates.export.checkpoint import load_pruned, save_pruned
from gates.gating.head_gates import HeadGates
from gates.scores.importance import head_gradients

Inputs = Mapping[str, Tensor]
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Largest difference relative to the largest output; some parts of models always compute in float32."""
STEPS = {torch.float64: (1e-3, 1e-4, 1e-5), torch.float32: (2e-2, 5e-3, 1e-3, 3e-4)}
"""Changes of a gate for finite differences. A long step may cross a place where the choice of an expert changes."""
SLOPE = {torch.float64: 1e-2, torch.float32: 5e-2}
"""Largest difference between a slope and a derivative, relative to the largest derivative."""
UNREACHED = "took no part in the forward pass"


class ScoredInPartError(Exception):
    """Scores are derivatives but not slopes, because the model detaches part of its graph."""


def describe_kinds(sites: tuple[AttentionSite, ...]) -> dict[str, int]:
    """Return the number of heads of each kind, such as ``{"encoder": 72}``."""
    return {kind: count for kind in KINDS if (count := sum(site.heads for site in sites if site.kind == kind))}


def entropy_route(sites: tuple[AttentionSite, ...]) -> Literal["fast", "explicit"]:
    """Return how the entropy of these sites is found: ``fast`` in memory linear in the sequence, or from ``explicit`` scores.

    Explicit scores are needed for a bias of the scores (T5, ALiBi), a cap (Gemma 2), the model's own code for attention, and
    eager attention.
    """
    changed = ("has_relative_attention_bias", "attn_logit_softcapping")
    known = [{INTERFACE, DIRECT} & set(global_names(site.core)) for site in sites]
    configs = [getattr(site.core, "config", None) for site in sites]
    slopes = any(getattr(config, "alibi", False) for config in configs)
    eager = any(getattr(config, "_attn_implementation", None) == "eager" for config in configs)
    plain = all(known) and not slopes and not any(getattr(site.core, name, None) for site in sites for name in changed)
    return "fast" if plain and not eager else "explicit"


@torch.no_grad()
def outputs(model: PreTrainedModel, inputs: Inputs) -> list[Tensor]:
    """Return the floating-point tensors among a model's outputs, with the same random numbers each time."""
    torch.manual_seed(0)
    return list(tensors(model(**inputs)))


def tensors(output: Any) -> Iterator[Tensor]:
    """Iterate over the floating-point tensors of an output, without caches and attention matrices."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if not str(name).endswith(("attentions", "past_key_values", "cache")):
                yield from tensors(value)
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from tensors(part)


def masked_outputs(model: PreTrainedModel, inputs: Inputs, values: Tensor, gates: HeadGates | None = None) -> list[Tensor]:
    """Return the outputs under gate values ``[heads]``, by gates that the model has or by new ones."""
    gates = HeadGates(model) if gates is None else gates
    with gates.attached(), gates.use(values):
        return outputs(model, inputs)


def check_equal(found: list[Tensor], expected: list[Tensor], tolerance: float, what: str) -> None:
    """Compare outputs, relative to the largest one or to 1."""
    assert [part.shape for part in found] == [part.shape for part in expected], f"{what} changes the shapes of outputs"
    for one, other in zip(found, expected, strict=True):
        finite = other.isfinite()
        assert torch.equal(one.isfinite(), finite), f"{what} changes which outputs are finite"
        size = float(other[finite].abs().max().clamp(min=1.0)) if bool(finite.any()) else 1.0
        difference = float((one[finite] - other[finite]).abs().max()) / size if bool(finite.any()) else 0.0
        assert difference <= tolerance, f"{what} differs by {difference:.2g}"


def check_reloaded(model: PreTrainedModel, mask: Tensor, inputs: Inputs, **load: Any) -> tuple[PreTrainedModel, list[Tensor]]:
    """Save a model without some heads and load it; return it with the outputs of the gated model."""
    expected = masked_outputs(model, inputs, mask)
    with tempfile.TemporaryDirectory() as folder:
        save_pruned(model, Path(folder) / "export", mask, check_batch=dict(inputs), tokenizer=None)
        return load_pruned(Path(folder) / "export", **load).eval(), expected


def in_float64(model: PreTrainedModel, inputs: Inputs) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Convert a model to float64, unless its outputs differ there.

    Some models insist on float32, and PyTorch misreads a float32 mask with float64 queries (EoMT).
    """
    with suppress(Exception):  # grouped products of experts lack float64
        model.set_experts_implementation("eager")
    try:
        precise, single = of_dtype(inputs, torch.float64), outputs(model, inputs)
        check_equal([part.float() for part in outputs(model.double(), precise)], single, 1e-2, "float64")
        return model, precise
    except Exception:  # a dtype in the model's code
        return model.float(), dict(inputs)


class GatedModel:
    """A model in evaluation mode with gates; these checks need no knowledge of its architecture.

    ``outputs_of`` returns the tensors of the model's output that the loss depends on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: Inputs,
        sites: tuple[AttentionSite, ...] | None = None,
        outputs_of: Callable[[Any], Iterable[Tensor]] = tensors,
    ) -> None:
        self.model, self.inputs, self.outputs_of = model, inputs, outputs_of
        self.gates = HeadGates(model, sites=sites).eval()
        self.dtype = next(iter(model.parameters())).dtype
        self.places = [(site, head) for site in self.gates.sites for head in range(site.heads)]
        self.in_graph: list[bool] = []

    def ones(self) -> None:
        """Check that gates of one change no bit and that all sites are reached."""
        expected = outputs(self.model, self.inputs)
        with self.gates.attached():
            with self.gates.use(torch.ones(self.gates.heads)):
                found = outputs(self.model, self.inputs)
            unreached = [site.name for site in self.gates.sites if site.name in self.gates.unreached()]
        for these in (found, outputs(self.model, self.inputs)):
            assert len(these) == len(expected), "gates of one change its outputs"
            assert all(map(torch.equal, these, expected)), "gates of one change its outputs"
        if unreached:
            raise GateError(f"the attention at {unreached[0]!r} (one of {len(unreached)}) {UNREACHED}")

    def zeros(self, heads: Iterable[int], tolerance: float | None = None) -> set[int]:
        """Check that a gate of zero equals a block of zeros in the output projection; return the heads without effect."""
        dense, idle = outputs(self.model, self.inputs), set()
        for head in heads:
            site, within = self.places[head]
            values = torch.ones(self.gates.heads)
            values[head] = 0.0
            with self.gates.attached(), self.gates.use(values):
                gated = outputs(self.model, self.inputs)
            block = weight_by_output(site.output).detach()[:, site.head_dim * within :][:, : site.head_dim]
            before = block.clone()
            block.zero_()
            zeroed = outputs(self.model, self.inputs)
            block.copy_(before)
            check_equal(gated, zeroed, tolerance or TOLERANCE[self.dtype], f"closing head {within} of {site.name!r}")
            if all(map(torch.equal, gated, dense)):
                idle.add(head)
        return idle

    def scores(self) -> tuple[Tensor, Tensor]:
        """Return the derivatives of the loss by every gate: per example ``[examples or 1, heads]`` and in total ``[heads]``."""
        total = head_gradients(self.gates, lambda: self.loss().sum()[None], "batch")[0]
        assert bool(total.isfinite().all()), "a gradient is not finite"
        if not bool(total.any()):
            assert not self._matters(), "no gate has a gradient"
            raise GateError(
                "none of its outputs depends on what its heads give, on this device at least, so they have no score"
            )
        try:
            rows = head_gradients(self.gates, self.loss)
        except GateError:
            return total[None], total
        difference = float((rows.sum(0) - total).abs().max() / total.abs().max())
        assert difference < 1e-3, f"gradients of the examples do not add up to that of the batch ({difference:.2g})"
        return rows, total

    def slopes(self, derivatives: Tensor, tolerance: float | None = None) -> None:
        """Check derivatives ``[rows, heads]`` against finite differences, for the head with the largest one and some others.

        There is a row for each example or one for the batch. The tolerance is relative to the largest derivative.
        """
        near = (tolerance or SLOPE[self.dtype]) * float(derivatives.abs().max())
        largest = int(derivatives.abs().amax(0).argmax())
        for head in sorted({largest, 0, self.gates.heads // 2, self.gates.heads - 1}):
            for step in STEPS[self.dtype]:
                slope = self._slope(head, step, len(derivatives))
                if bool(((slope - derivatives[:, head]).abs() <= near).all()):
                    break
            else:
                with _nothing_detached():
                    whole = head_gradients(self.gates, lambda: self.loss().sum()[None], "batch")[0]
                if not torch.allclose(whole, derivatives.sum(0), rtol=1e-3):
                    raise ScoredInPartError("the model itself stops gradients on their way, and scores leave that way out")
                scores = derivatives[:, head].tolist()
                raise AssertionError(f"the score of head {head} is {scores}, its slope {slope.tolist()}")

    def loss(self) -> Tensor:
        """Return a smooth function of all outputs: ``[examples]`` if they have that axis, else ``[1]``."""
        torch.manual_seed(0)
        found = list(self.outputs_of(self.model(**self.inputs)))
        if torch.is_grad_enabled():  # an output without a graph has no part in the slope either
            self.in_graph = [part.requires_grad for part in found]
        parts = [part.double() for part, counts in zip(found, self.in_graph, strict=True) if counts]
        parts = [torch.where(part.isfinite(), part, 0.0) for part in parts]
        parts = [(part - 0.5).square() * torch.linspace(0.5, 1.5, part.shape[-1] if part.dim() else 1) for part in parts]
        count = {len(value) for value in self.inputs.values()}
        if len(count) == 1 and all(part.dim() > 1 and len(part) in count for part in parts):
            return torch.stack([part.flatten(1).mean(1) for part in parts]).sum(0)
        return torch.stack([part.mean() for part in parts]).sum()[None]

    def _matters(self) -> bool:
        """Return whether outputs change when all output projections are zero."""
        expected = outputs(self.model, self.inputs)
        weights = [site.output.weight.detach() for site in self.gates.sites]
        before = [weight.clone() for weight in weights]
        for weight in weights:
            weight.zero_()
        found = outputs(self.model, self.inputs)
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
        return not all(map(torch.equal, found, expected))

    def _slope(self, head: int, step: float, rows: int) -> Tensor:
        found = []
        for change in (step, -step):
            values = torch.ones(self.gates.heads, dtype=torch.float64)
            values[head] += change
            with torch.no_grad(), self.gates.attached(), self.gates.use(values):
                found.append(self.loss().reshape(rows, -1).sum(1))
        return (found[0] - found[1]) / (2 * step)


@contextmanager
def _nothing_detached() -> Iterator[None]:
    """Make ``Tensor.detach`` keep the graph for a while."""
    detach = Tensor.detach
    setattr(Tensor, "detach", lambda self: self)  # noqa: B010
    try:
        yield
    finally:
        setattr(Tensor, "detach", detach)  # noqa: B010
