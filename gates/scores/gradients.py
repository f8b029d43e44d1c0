"""The gradients of a batch's losses with respect to the gates, example by example, from one backward pass.

Every row and position of a site has a gate of its own, so that the gradient of an example is the sum over its rows. Which rows
these are is found out by the gradients of some examples' losses: see :mod:`gates.hooks.examples`. What was found for an earlier
batch is checked by one more backward pass, since the same function may pair other rows later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.example_axes import ExampleAxes
from gates.hooks.examples import MIXED, ExampleAxis, axes_of, collect, locate
from gates.hooks.intercept import alone, observing
from gates.sites import join_sites

Place = tuple[int, torch.Size]
"""A site and the shape of its heads, ``[..., heads * head_dim]``."""

RTOL = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""How far a weighted gradient may be from the weight times the plain one, by rounding, relative to the largest of its example.
Neighbouring weights differ by more in batches of up to 360 examples in half precision, and of 5,000 in single."""


@dataclass(frozen=True)
class GateGradients:
    """Gradients of a batch's summed losses.

    Args:
        sites: index of the site of each of the tensors below.
        rows: gradients of its gates, ``[..., gates of the site]`` for every row and position.
        to_examples: functions that sum such rows to examples, ``[examples, gates of the site]``; none where not asked for.
        weights: gradients of the weights that were asked for.
        examples: number of examples.
    """

    sites: list[int]
    rows: list[Tensor]
    to_examples: list[Callable[[Tensor], Tensor]]
    weights: list[Tensor]
    examples: int

    def of_examples(self, *, absolute: bool = False) -> Tensor:
        """``[examples, gates]``, float32, in site order; with the absolute value of each row and position, if asked for."""
        rows = [part.abs() for part in self.rows] if absolute else self.rows
        return self._joined([to_examples(part) for to_examples, part in zip(self.to_examples, rows, strict=True)])

    def of_batch(self) -> Tensor:
        """Their sum over the batch, ``[gates]``, float32, in site order."""
        return self._joined([part.flatten(0, -2).sum(0) for part in self.rows])

    def _joined(self, parts: list[Tensor]) -> Tensor:
        by_site: dict[int, Tensor] = {}
        for site, part in zip(self.sites, parts, strict=True):  # a module that runs on several shapes has several parts
            by_site[site] = by_site[site] + part.float() if site in by_site else part.float()
        return join_sites([by_site[site] for site in sorted(by_site)])


def gate_gradients(
    gates: HeadGates, losses: Callable[[], Tensor], weights: Sequence[Tensor] = (), *, per_example: bool = True
) -> GateGradients:
    """Run a model and differentiate its losses.

    Args:
        gates: gates of the model, attached or not.
        losses: function that runs the model and returns the per-example losses ``[batch]``.
        weights: further tensors to differentiate with respect to, each requiring gradients.
        per_example: whether gradients can be asked for by example.

    Raises:
        GateError: see :func:`gates.scores.importance.head_gradients`.
    """
    with (
        alone(gates.model),
        gates.attached(),
        observing(gates.model, gates.sites),
        gates.probe() as reached,
        torch.enable_grad(),
    ):
        each = losses()
        _check(gates, each, {site for site, _ in reached})
        places = sorted(reached, key=lambda place: place[0])
        leaves = [reached[place] for place in places]
        examples = len(each) if per_example else 1
        known = gates.example_axes.of_losses(_code(losses))
        axes = [known.known(*place, examples) for place in places]
        if examples > 1 and _mixes_modalities(gates.model):
            axes = [None] * len(axes)
        gradients = torch.autograd.grad(each.sum(), [*leaves, *weights], retain_graph=examples > 1, materialize_grads=True)
        rows = gradients[: len(leaves)]
        if examples > 1 and not _still_hold(axes, leaves, rows, each):
            axes = [None] * len(axes)
        to_examples = [_nothing(examples) if axis is None else partial(axis.collect, examples=examples) for axis in axes]
        if any(axis is None and bool((part != 0).any()) for axis, part in zip(axes, rows, strict=True)):
            to_examples = _located(gates, known, places, leaves, each)
    return GateGradients([site for site, _ in places], list(rows), to_examples, list(gradients[len(leaves) :]), len(each))


def _check(gates: HeadGates, losses: Tensor, ran: set[int]) -> None:
    missing = [site.name for index, site in enumerate(gates.sites) if index not in ran]
    if missing:
        raise GateError(f"the loss does not run through the attention at {missing[0]!r}, so its heads have no score")
    if losses.dim() != 1 or not losses.requires_grad:
        raise GateError(
            f"the losses have shape {list(losses.shape)}{'' if losses.requires_grad else ' and no gradient'}; expected one for "
            "each example, [batch], with a gradient: reduction='none', and no torch.no_grad() around the model"
        )
    if not bool(losses.isfinite().all()):
        example = int((~losses.isfinite()).nonzero()[0])
        raise GateError(
            f"the loss of example {example} is {float(losses[example].detach())}, so no head has a score; look for infinite "
            "weights or inputs, or a learning rate that was too high"
        )


def _still_hold(axes: Sequence[ExampleAxis | None], leaves: list[Tensor], rows: Sequence[Tensor], losses: Tensor) -> bool:
    """Return whether the axes say for every row whose loss depends on it.

    With a weight for each loss, the gradient of a row is that of the plain sum times the weight of its own example.

    Args:
        axes: The axis of each tensor of rows; None where it is unknown, which is not checked.
        leaves: The gates of every row and position, ``[..., gates of the site]``, in the graph of the losses, which is kept.
        rows: The gradients of the summed losses with respect to them.
        losses: The per-example losses ``[batch]``.
    """
    examples = len(losses)
    checked = [(axis, leaf, part) for axis, leaf, part in zip(axes, leaves, rows, strict=True) if axis is not None]
    if not checked:
        return True
    factors = torch.logspace(-8, 8, examples, base=2, device=losses.device, dtype=torch.float32)
    weighted = torch.autograd.grad(
        (losses * factors).sum(), [leaf for _, leaf, _ in checked], retain_graph=True, materialize_grads=True
    )
    for (axis, _, part), other in zip(checked, weighted, strict=True):
        expected = axis.collect(part.abs().float(), examples) * factors.to(part.device)[:, None]
        found = axis.collect(other.abs().float(), examples)
        if bool(((found - expected).abs() > RTOL[part.dtype] * expected.amax(-1, keepdim=True)).any()):
            return False
    return True


def _nothing(examples: int) -> Callable[[Tensor], Tensor]:
    """The sum over examples of rows that are all 0, since the loss does not depend on them."""
    return lambda rows: rows.new_zeros(examples, rows.shape[-1])


def examples_by_losses(losses: Tensor, rows: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """The example whose loss depends on each row: its number ``[...]`` for each tensor ``[..., features]``, or UNKNOWN.

    Args:
        losses: per-example losses ``[batch]`` in a graph, which is kept.
        rows: tensors of this graph.
        names: names of the sites that they belong to.

    Raises:
        GateError: if a row belongs to several examples.
    """

    def touched(group: Tensor) -> list[Tensor]:
        of_group = losses[group.to(losses.device)].sum()
        gradients = torch.autograd.grad(of_group, rows, retain_graph=True, materialize_grads=True)
        return [(gradient != 0).any(-1) for gradient in gradients]

    located = locate(touched, len(losses))
    for name, numbers in zip(names, located, strict=True):
        if bool((numbers == MIXED).any()):
            raise GateError(
                f"the loss of one example depends on the heads of another at {name!r}, so there is no score for each example; "
                "give losses of one example each, or use granularity='batch'"
            )
    return located


def _code(losses: Any) -> Hashable:
    """What functions of losses are known by, since the rows that a loss reads are a matter of the loss, not of the model. It is
    a hint: a function can read other rows at every call."""
    own: Any = losses.func if isinstance(losses, partial) else losses
    return own.__code__ if hasattr(own, "__code__") else str(type(own))


def _located(
    gates: HeadGates, known: ExampleAxes, places: list[Place], leaves: list[Tensor], losses: Tensor
) -> list[Callable[[Tensor], Tensor]]:
    """For every leaf the function that sums its rows to examples."""
    examples = len(losses)
    names = [gates.sites[site].name for site, _ in places]
    to_examples: list[Callable[[Tensor], Tensor]] = []
    for (site, _), numbers in zip(places, examples_by_losses(losses, leaves, names), strict=True):
        known.learn(site, numbers, examples)
        regular = axes_of(numbers, examples)  # several only where they differ in rows that no loss depends on
        to_examples.append(partial(regular[0].collect if regular else partial(collect, numbers=numbers), examples=examples))
    return to_examples


def _mixes_modalities(model: nn.Module) -> bool:
    """Whether a model takes, beside text, images or sounds, so that which example they belong to can change with the batch."""
    modalities = [getattr(module, "input_modalities", "text") for module in model.modules()]
    return any(not isinstance(own, str) and len(own) > 1 for own in modalities)
