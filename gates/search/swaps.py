"""Refine a mask by swaps: give up a kept head for a dropped one wherever that lowers the loss. No training.

The gradient of the loss with respect to the gates, at the mask, says to first order what adding each dropped head and
giving up each kept one would do. The most promising pairs race on parts of the calibration data
(:mod:`gates.search.successive_halving`), and those in front are taken if the loss on all of it falls. Gradient and loss should
come from disjoint examples, so that a swap has to prove itself on data that did not propose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from gates.errors import GateError
from gates.options import LEAST_PASSES
from gates.search.successive_halving import Loss, Metered, race

CANDIDATES = 16
"""Swaps that race for each gradient."""

Swap = tuple[int, int]


@dataclass(frozen=True)
class Refinement:
    """A refined mask and how it came about.

    Args:
        mask: 0/1 ``[gates]``, with as many ones as the mask it came from.
        losses: losses on the calibration data: of the mask it came from, then after every swap taken; falls strictly.
        swaps: pairs (added, given up) of gate numbers, in their order.
        passes: number of passes over the calibration data that it took.
    """

    mask: Tensor
    losses: tuple[float, ...]
    swaps: tuple[Swap, ...]
    passes: float


@dataclass(frozen=True)
class Limits:
    """Which swaps a budget allows.

    Args:
        within: a number per gate, ``[gates]``; only gates with equal numbers are swapped for one another (their kind, where
            each kind has a budget of its own); None for no such limit.
        layer_index: layer of each gate ``[gates]``; needed with a minimum per layer.
        minimum_per_layer: number of heads that every layer keeps; a layer with so few swaps them only among its own.

    Raises:
        GateError: for a minimum per layer without layers.
    """

    within: Tensor | None = None
    layer_index: Tensor | None = None
    minimum_per_layer: int = 0

    def __post_init__(self) -> None:
        if self.minimum_per_layer > 0 and self.layer_index is None:
            raise GateError(
                f"a minimum of {self.minimum_per_layer} heads per layer needs the layer of each gate; give layer_index"
            )

    def allow(self, mask: Tensor) -> Tensor:
        """Whether each swap may be made, ``[gates to add, gates to give up]``, bool."""
        allowed = (mask == 0).unsqueeze(1) & (mask > 0).unsqueeze(0)
        if self.within is not None:
            within = self.within.to(mask.device)
            allowed &= within.unsqueeze(1) == within.unsqueeze(0)
        if self.layer_index is not None:
            layers = self.layer_index.to(mask.device)
            counts = torch.zeros(int(layers.max()) + 1, device=mask.device).index_add(0, layers, (mask > 0).float())
            spare = counts[layers] > self.minimum_per_layer
            allowed &= spare.unsqueeze(0) | (layers.unsqueeze(1) == layers.unsqueeze(0))
        return allowed


def refine_by_swaps(
    mask: Tensor,
    *,
    loss: Loss,
    gradient: Callable[[Tensor], Tensor],
    limits: Limits | None = None,
    passes: float = 40.0,
) -> Refinement:
    """Swap heads while the loss falls.

    Args:
        mask: 0/1 ``[gates]`` to start from.
        loss: see :data:`gates.search.successive_halving.Loss`.
        gradient: function from a mask to the gradient of the loss with respect to the gates there, ``[gates]``, on other data.
        limits: swaps that are allowed; any by default.
        passes: number of passes over the calibration data after which nothing new is tried, though a race that has begun
            ends; the search ends earlier when no proposed swap helps.

    Raises:
        GateError: for fewer than :data:`LEAST_PASSES`.

    >>> cost = torch.tensor([4.0, 3.0, 2.0, 1.0])  # what a closed gate adds to the loss
    >>> def loss(mask, share):
    ...     return float((cost * (1 - mask)).sum())
    >>> refined = refine_by_swaps(torch.tensor([0.0, 0, 1, 1]), loss=loss, gradient=lambda mask: -cost)
    >>> refined.mask.tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    if passes < LEAST_PASSES:
        raise GateError(f"a search by swaps with {passes} passes can try nothing; expected at least {LEAST_PASSES}")
    limits = Limits() if limits is None else limits
    meter = Metered(loss)
    mask = mask.detach().clone()
    losses, swaps = [meter(mask, 1.0)], []
    found = True
    while found and meter.passes < passes:
        found = False
        proposed = list(islice(_promising(gradient(mask), limits.allow(mask)), CANDIDATES))
        for number in race([_swapped(mask, *swap) for swap in proposed], meter):
            added, dropped = proposed[number]
            if meter.passes >= passes:
                break
            if not bool(limits.allow(mask)[added, dropped]):  # another swap of this round has taken one of the two
                continue
            value = meter(swapped := _swapped(mask, added, dropped), 1.0)
            if value < losses[-1]:
                mask, found = swapped, True
                losses.append(value)
                swaps.append((added, dropped))
    return Refinement(mask, tuple(losses), tuple(swaps), meter.passes)


def _promising(gradient: Tensor, allowed: Tensor) -> Iterator[Swap]:
    """Allowed swaps that lower the loss to first order, best first; no head takes part in more than two, since the pairs of
    a head whose gradient misleads fail together."""
    change = gradient.unsqueeze(1) - gradient.unsqueeze(0)
    promising = allowed & (change < 0)
    order = change.masked_fill(~promising, torch.inf).flatten().argsort(stable=True)
    seen: dict[int, int] = {}
    for flat in order[: int(promising.sum())].tolist():
        pair = divmod(flat, len(gradient))
        if all(seen.get(gate, 0) < 2 for gate in pair):
            for gate in pair:
                seen[gate] = seen.get(gate, 0) + 1
            yield pair


def _swapped(mask: Tensor, added: int, dropped: int) -> Tensor:
    swapped = mask.clone()
    swapped[added], swapped[dropped] = 1.0, 0.0
    return swapped
