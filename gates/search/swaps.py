"""Refine a mask by swaps: replace a kept head by a dropped one where that lowers the loss significantly, without training.

The calibration data is split into two halves with different jobs. On the *proposing* half, the gradient of the loss with
respect to the gates estimates the effect of adding and dropping each head. The most promising pairs race on parts of this half
(:mod:`gates.search.successive_halving`). On the *deciding* half, a finalist is accepted only if a paired test over the examples
is significant. The mean gain, in standard errors, has to exceed the normal quantile of the level, corrected for the number of
tests in the round (Bonferroni). The race needs no correction, because its examples do not decide. The search ends with the
first round without an accepted swap. So a mask that no swap improves stays unchanged with a probability of at least one minus
the level, however long the search.
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
"""The number of swaps in the race of each gradient."""

Swap = tuple[int, int]


class Gain(NamedTuple):
    """Hold the gain of a swap on the deciding examples."""

    mean: float  # The mean over examples of the loss before minus the loss after
    standard_error: float  # The standard error of this mean
    needed: float  # The number of standard errors that the mean has to exceed

    @property
    def is_taken(self) -> bool:
        return self.mean > self.needed * self.standard_error


@dataclass(frozen=True)
class Refinement:
    """Hold a refined mask and the history of the search."""

    mask: Tensor  # The mask of 0 and 1, ``[gates]``, with as many ones as the first mask
    # The mean losses on the deciding half, of the first mask and after each accepted swap. They fall strictly.
    losses: tuple[float, ...]
    swaps: tuple[Swap, ...]  # The accepted pairs (added, dropped) of gate numbers, in order
    gains: tuple[Gain, ...]  # The gains of these swaps, in order
    tested: int  # The number of swaps tested on the deciding half
    passes: float  # The number of forward passes over one half
    gradients: int  # The number of gradients over the proposing half


@dataclass(frozen=True)
class Limits:
    """Describe the swaps that a budget allows."""

    # A number per gate, ``[gates]``, such as its kind. Only gates with equal numbers are swapped. None for no limit.
    within: Tensor | None = None
    layer_index: Tensor | None = None  # The layer of each gate, ``[gates]``. A minimum per layer requires it.
    minimum_per_layer: int = 0  # The number of heads that every layer keeps. A layer with this number only swaps its own heads.
    time: TimeLimit | None = None  # The time limit of the mask after the swap; None for no limit

    def __post_init__(self) -> None:
        if self.minimum_per_layer > 0 and self.layer_index is None:
            raise GateError(
                f"a minimum of {self.minimum_per_layer} heads per layer needs the layer of each gate; give layer_index"
            )

    def allow(self, mask: Tensor) -> Tensor:
        """Return whether each swap is allowed, bool ``[gates to add, gates to drop]``."""
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
    """Return whether the model is within a time after each swap, bool ``[gates to add, gates to drop]``."""
    sizes, counts = [site.gates for site in limit.table.sites], counts_by_site(mask, limit)
    sites = range(len(sizes))

    def allows(added: int, dropped: int) -> bool:
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
    significance: float = 0.05,
) -> Refinement:
    """Swap heads while the loss falls significantly.

    Args:
        mask: The first mask of 0 and 1, ``[gates]``.
        gradient: A function from a mask to the gradient of the loss with respect to the gates, ``[gates]``, on the proposing
            half.
        loss: The loss on the proposing half; see :data:`gates.search.successive_halving.Loss`.
        losses: A function from a mask to the losses ``[examples]`` of the deciding half, with the same order at every call.
            The halves share no example.
        limits: The allowed swaps. Default: any.
        passes: The number of passes over one half after which no new swap is tried. A running race still ends.
        significance: The one-sided level of a round of tests.

    Raises:
        GateError: For fewer than :data:`MIN_SWAP_PASSES`, or a level that is not between 0 and 1.

    >>> cost = torch.tensor([4.0, 3.0, 2.0, 1.0])  # the cost of closing each gate
    >>> def losses(mask):
    ...     return (cost * (1 - mask)).sum() + torch.tensor([-0.1, 0.0, 0.1])
    >>> def loss(mask, share):
    ...     return float(losses(mask).mean())
    >>> refined = refine_by_swaps(torch.tensor([0.0, 0, 1, 1]), gradient=lambda mask: -cost, loss=loss, losses=losses)
    >>> refined.mask.tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    if passes < MIN_SWAP_PASSES:
        raise GateError(f"a search by swaps has {passes} passes; expected at least {MIN_SWAP_PASSES}")
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
    """Return the gain between losses ``[examples]`` before and after. One example has an infinite standard error."""
    difference = before.double() - after.double()
    examples = len(difference)
    error = float(difference.std() / math.sqrt(examples)) if examples > 1 else math.inf
    return Gain(float(difference.mean()), error, needed)


def _promising(gradient: Tensor, allowed: Tensor) -> Iterator[Swap]:
    """Yield allowed swaps that lower the loss to first order, best first. Each head is in at most two of them, because all
    pairs of a head with a misleading gradient fail together."""
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
