"""Refine a mask by swaps: give up a kept head for a dropped one wherever that lowers the loss beyond noise. No training.

Two halves of the calibration data have two offices. On the *proposing* half, the gradient of the loss with respect to the
gates, at the mask, says to first order what adding each dropped head and giving up each kept one would do, and the most
promising pairs race on parts of it (:mod:`gates.search.successive_halving`). On the *deciding* half, a swap in front is
taken only if the loss falls significantly, by a paired test over the examples: the mean gain has to exceed its standard
error as often as the normal quantile of the level says, corrected for the number of swaps tested in the round (Bonferroni).
The race needs no correction, since its examples do not decide. A search ends with the first round that takes nothing, so a
mask that no swap improves is left alone with a probability of at least one minus the level, however long the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from gates.errors import GateError
from gates.gating.budget import counts_by_site
from gates.gating.latency import TimeLimit
from gates.options import MIN_SWAP_PASSES
from gates.search.successive_halving import Loss, Metered, race

CANDIDATES = 16
"""Swaps that race for each gradient."""

SIGNIFICANCE = 0.05
"""Level at which a round of swaps is tested."""

Swap = tuple[int, int]


class Gain(NamedTuple):
    """What a swap gains on the deciding examples.

    Args:
        mean: of the loss before less the loss after, over examples.
        standard_error: of this mean, from the differences of single examples.
        needed: standard errors that the mean had to exceed.
    """

    mean: float
    standard_error: float
    needed: float

    @property
    def is_taken(self) -> bool:
        return self.mean > self.needed * self.standard_error


@dataclass(frozen=True)
class Refinement:
    """A refined mask and how it came about.

    Args:
        mask: 0/1 ``[gates]``, with as many ones as the mask it came from.
        losses: mean losses on the deciding half: of the mask it came from, then after every swap taken; falls strictly.
        swaps: pairs (added, given up) of gate numbers, in their order.
        gains: of these swaps, in their order.
        tested: number of swaps that were tested on the deciding half.
        passes: number of forward passes over one half that it took.
        gradients: number of gradients over the proposing half that it took.
    """

    mask: Tensor
    losses: tuple[float, ...]
    swaps: tuple[Swap, ...]
    gains: tuple[Gain, ...]
    tested: int
    passes: float
    gradients: int


@dataclass(frozen=True)
class Limits:
    """Which swaps a budget allows.

    Args:
        within: a number per gate, ``[gates]``; only gates with equal numbers are swapped for one another (their kind, where
            each kind has a budget of its own); None for no such limit.
        layer_index: layer of each gate ``[gates]``; needed with a minimum per layer.
        minimum_per_layer: number of heads that every layer keeps; a layer with so few swaps them only among its own.
        time: that the mask is to be within after the swap; None for no limit.

    Raises:
        GateError: for a minimum per layer without layers.
    """

    within: Tensor | None = None
    layer_index: Tensor | None = None
    minimum_per_layer: int = 0
    time: TimeLimit | None = None

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
        if self.time is not None:
            allowed &= _within(mask, self.time)
        return allowed


def _within(mask: Tensor, limit: TimeLimit) -> Tensor:
    """Whether the model is within a time after each swap, ``[gates to add, gates to give up]``, bool."""
    sizes, counts = [site.gates for site in limit.table.sites], counts_by_site(mask, limit)
    sites = range(len(sizes))

    def allows(added: int, dropped: int) -> bool:
        """Whether sites may change by one gate."""
        after = list(counts)
        after[added] += 1
        after[dropped] -= 1
        return min(after) >= 0 and after[added] <= sizes[added] and limit.allows(after)

    by_site = torch.tensor([[allows(added, dropped) for dropped in sites] for added in sites], device=mask.device)
    site_of = torch.repeat_interleave(torch.tensor(sizes)).to(mask.device)
    return by_site[site_of][:, site_of]


def refine_by_swaps(
    mask: Tensor,
    *,
    gradient: Callable[[Tensor], Tensor],
    loss: Loss,
    losses: Callable[[Tensor], Tensor],
    limits: Limits | None = None,
    passes: float = 40.0,
    significance: float = SIGNIFICANCE,
) -> Refinement:
    """Swap heads while the loss falls by more than chance would have it.

    Args:
        mask: 0/1 ``[gates]`` to start from.
        gradient: function from a mask to the gradient of the loss with respect to the gates there, ``[gates]``, on the
            proposing half.
        loss: see :data:`gates.search.successive_halving.Loss`; on the proposing half.
        losses: function from a mask to the losses ``[examples]`` of the deciding half, which shares no example with the other;
            the same examples in the same order at every call.
        limits: swaps that are allowed; any by default.
        passes: number of passes over one half after which nothing new is tried, though a race that has begun ends; the search
            ends earlier when no proposed swap helps.
        significance: level of a round of tests, one-sided.

    Raises:
        GateError: for fewer than :data:`MIN_SWAP_PASSES`, or a level that is not between 0 and 1.

    >>> cost = torch.tensor([4.0, 3.0, 2.0, 1.0])  # what a closed gate adds to the loss
    >>> def losses(mask):
    ...     return (cost * (1 - mask)).sum() + torch.tensor([-0.1, 0.0, 0.1])
    >>> def loss(mask, share):
    ...     return float(losses(mask).mean())
    >>> refined = refine_by_swaps(torch.tensor([0.0, 0, 1, 1]), gradient=lambda mask: -cost, loss=loss, losses=losses)
    >>> refined.mask.tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    if passes < MIN_SWAP_PASSES:
        raise GateError(f"a search by swaps with {passes} passes can try nothing; expected at least {MIN_SWAP_PASSES}")
    if not 0 < significance < 1:
        raise GateError(f"the significance of swaps is {significance}; expected a level between 0 and 1, such as 0.05")
    limits = Limits() if limits is None else limits
    meter = Metered(loss)
    mask = mask.detach().clone()
    before = losses(mask)
    means, swaps, gains = [float(before.mean())], [], []
    decisions, gradients, found = 1, 0, True
    while found and meter.passes + decisions < passes:
        found = False
        proposed = list(islice(_promising(gradient(mask), limits.allow(mask)), CANDIDATES))
        gradients += 1
        finalists = race([_swapped(mask, *swap) for swap in proposed], meter)
        needed = NormalDist().inv_cdf(1 - significance / max(1, len(finalists)))
        for number in finalists:
            added, dropped = proposed[number]
            if meter.passes + decisions >= passes:
                break
            if not bool(limits.allow(mask)[added, dropped]):  # another swap of this round has taken one of the two
                continue
            after, decisions = losses(swapped := _swapped(mask, added, dropped)), decisions + 1
            gain = paired_gain(before, after, needed=needed)
            if gain.is_taken:
                mask, before, found = swapped, after, True
                means.append(float(after.mean()))
                swaps.append((added, dropped))
                gains.append(gain)
    return Refinement(mask, tuple(means), tuple(swaps), tuple(gains), decisions - 1, meter.passes + decisions, gradients)


def paired_gain(before: Tensor, after: Tensor, *, needed: float) -> Gain:
    """Return what the same examples gain, from losses ``[examples]`` before and after; of a single example nothing is known, so
    its standard error is infinite."""
    difference = before.double() - after.double()
    examples = len(difference)
    error = float(difference.std() / math.sqrt(examples)) if examples > 1 else math.inf
    return Gain(float(difference.mean()), error, needed)


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
