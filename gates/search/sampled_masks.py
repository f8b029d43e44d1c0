"""Draw masks around a ranking and select the best, without training.

Scores with Gumbel noise, cut at the budget, are a draw without replacement from the softmax of the scores over a temperature
(Vieira 2014; Kool, van Hoof and Welling 2019). So masks differ from the ranking's mask where its order is least certain. They
race on calibration data (:mod:`gates.search.successive_halving`), and the ranking's mask is one of the finalists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gates.errors import GateError
from gates.gating.budget import Budget, budget_mask
from gates.gating.hard_concrete import LOG_ALPHA_LIMIT
from gates.scores.ranking import ranks
from gates.search.successive_halving import Loss, Metered, race


@dataclass(frozen=True)
class BestDraw:
    """Hold the best of several masks."""

    mask: Tensor  # The mask of 0 and 1, ``[gates]``
    losses: tuple[float, float]  # The losses of the first and the best mask on all calibration data
    passes: float  # The number of passes over the calibration data


def spread_ranks(scores: Tensor) -> Tensor:
    """Return the ranks of scores ``[gates]`` on the scale of ``log_alpha``: evenly spaced numbers from minus to plus
    :data:`gates.gating.hard_concrete.LOG_ALPHA_LIMIT`. Ties share their mean."""
    last = max(1, len(scores) - 1)
    return LOG_ALPHA_LIMIT * (2 * ranks(scores).double() / last - 1)


def draw_masks(
    scores: Tensor,
    budget: Budget,
    *,
    kind_index: Tensor,
    layer_index: Tensor,
    minimum_per_layer: int = 0,
    count: int,
    temperature: float,
    seed: int,
) -> list[Tensor]:
    """Return at most ``count`` different masks ``[gates]`` of the highest perturbed scores within a budget.

    Args:
        scores: The log-weights ``[gates]``, such as ``log_alpha`` or :func:`spread_ranks`.
        budget, kind_index, layer_index, minimum_per_layer: The budget; see :func:`gates.gating.budget.budget_mask`.
        temperature: The divisor of the scores. Must be above 0; near 0 every draw is the mask of the ranking.
    """
    if not temperature > 0:
        raise GateError(f"the temperature of draws is {temperature}; expected a number above 0")
    generator = torch.Generator().manual_seed(seed)
    shape = (count, len(scores))
    noise = -torch.empty(shape, dtype=torch.float64).exponential_(generator=generator).log()
    perturbed = scores.detach().double().cpu() / temperature + noise
    drawn = [
        budget_mask(
            one,
            budget,
            kind_index=kind_index.cpu(),
            layer_index=layer_index.cpu(),
            minimum_per_layer=minimum_per_layer,
        )
        for one in perturbed
    ]
    return list({tuple(mask.tolist()): mask.to(scores.device) for mask in drawn}.values())


def best_draw(start: Tensor, draws: Sequence[Tensor], *, loss: Loss) -> BestDraw:
    """Return the mask with the lowest loss on all data: the first mask or a better finalist of a race of draws."""
    meter = Metered(loss)
    best, least = start, meter(start, 1.0)
    first = least
    others = [mask for mask in draws if not torch.equal(mask, start)]
    for number in race(others, meter):
        value = meter(others[number], 1.0)
        if value < least:
            best, least = others[number], value
    return BestDraw(best.detach().clone(), (first, least), meter.passes)
