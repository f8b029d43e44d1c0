"""Refine a mask by swaps: give up a kept head for a dropped one wherever that lowers the loss. No training.

The gradient of the loss with respect to the gates, at the mask, says to first order what adding each dropped head and
giving up each kept one would do; the most promising pair is tried, and taken if the loss on calibration data falls.
Gradient and loss should come from disjoint examples, so that a swap has to prove itself on data that did not propose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from gates.errors import GateError


@dataclass(frozen=True)
class Refinement:
    """A refined mask and how it came about.

    Args:
        mask: 0/1 ``[gates]``, with as many ones as the mask it came from.
        losses: on the calibration data: of the mask it came from, then after every swap taken; falls strictly.
        swaps: what was swapped, as pairs (added, given up) of gate numbers.
        evaluations: losses that were computed.
    """

    mask: Tensor
    losses: tuple[float, ...]
    swaps: tuple[tuple[int, int], ...]
    evaluations: int


def refine_by_swaps(
    mask: Tensor,
    *,
    loss: Callable[[Tensor], float],
    gradient: Callable[[Tensor], Tensor],
    within: Tensor | None = None,
    layer_index: Tensor | None = None,
    minimum_per_layer: int = 0,
    evaluations: int = 32,
    patience: int = 8,
) -> Refinement:
    """Swap heads while the loss falls.

    Args:
        mask: 0/1 ``[gates]`` to start from.
        loss: of a mask, on calibration data; the same data every time.
        gradient: of the loss with respect to the gates at a mask, ``[gates]``, on other data.
        within: a number per gate, ``[gates]``; only gates with equal numbers are swapped for one another (their kind, where
            each kind has a budget of its own).
        layer_index: layer of each gate ``[gates]``; needed with a minimum per layer.
        minimum_per_layer: a layer with so few heads gives none up, unless for another of its own.
        evaluations: losses to compute at most; what the search costs.
        patience: losses computed in a row without a fall, after which the search ends.

    Raises:
        GateError: for fewer than 2 evaluations: one goes to the mask itself.
    """
    if evaluations < 2:
        raise GateError(f"a search by swaps with {evaluations} evaluations can try nothing; expected at least 2")
    mask = mask.detach().clone()
    groups = torch.zeros_like(mask) if within is None else within.to(mask.device)
    losses, swaps, used = [loss(mask)], [], 1
    found = True
    while found and used < evaluations:
        found = False
        candidates = _candidates(mask, gradient(mask), groups, layer_index, minimum_per_layer)
        for added, dropped in islice(candidates, min(patience, evaluations - used)):
            swapped = mask.clone()
            swapped[added], swapped[dropped] = 1.0, 0.0
            value = loss(swapped)
            used += 1
            if value < losses[-1]:
                mask, found = swapped, True
                losses.append(value)
                swaps.append((added, dropped))
                break
    return Refinement(mask, tuple(losses), tuple(swaps), used)


def _candidates(
    mask: Tensor, gradient: Tensor, groups: Tensor, layer_index: Tensor | None, minimum_per_layer: int
) -> Iterator[tuple[int, int]]:
    """Swaps that should lower the loss to first order, best first; no head to add is proposed twice with the same partner
    worse than one that failed, since pairs of one head fail together: each head takes part at most twice."""
    closed, opened = (mask == 0).nonzero().flatten(), (mask > 0).nonzero().flatten()
    change = gradient[closed].unsqueeze(1) - gradient[opened].unsqueeze(0)  # [closed, open]
    allowed = (groups[closed].unsqueeze(1) == groups[opened].unsqueeze(0)) & (change < 0)
    if minimum_per_layer > 0 and layer_index is not None:
        layers = layer_index.to(mask.device)
        counts = torch.zeros(int(layers.max()) + 1, device=mask.device).index_add(0, layers, mask)
        spare = counts[layers[opened]] > minimum_per_layer
        allowed &= spare.unsqueeze(0) | (layers[closed].unsqueeze(1) == layers[opened].unsqueeze(0))
    tried: dict[int, int] = {}
    for flat in change.masked_fill(~allowed, torch.inf).flatten().argsort(stable=True).tolist():
        row, column = divmod(flat, len(opened))
        if not bool(allowed[row, column]):
            return
        pair = int(closed[row]), int(opened[column])
        if all(tried.get(gate, 0) < 2 for gate in pair):
            for gate in pair:
                tried[gate] = tried.get(gate, 0) + 1
            yield pair
