"""The best of several masks drawn around a ranking. No training.

Scores perturbed by Gumbel noise and cut at the budget are a draw without replacement from the softmax of the scores over a
temperature (Vieira 2014; Kool, van Hoof and Welling 2019), so that masks differ from the ranking's own where its order is
least certain. They race on calibration data (:mod:`gates.search.successive_halving`); the mask they were drawn around is
one of the finalists.
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
    """The best of several masks.

    Args:
        mask: 0/1 ``[gates]``.
        losses: losses on all calibration data, of the mask to start from and of the best.
        passes: number of passes over the calibration data that it took.
    """

    mask: Tensor
    losses: tuple[float, float]
    passes: float


def spread_ranks(scores: Tensor) -> Tensor:
    """A ranking on the scale of ``log_alpha``, for scores without a scale of their own: ranks ``[gates]`` as evenly spaced
    numbers from minus to plus :data:`gates.gating.hard_concrete.LOG_ALPHA_LIMIT`; ties share their mean."""
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
    """Masks of the highest perturbed scores within a budget.

    Args:
        scores: log-weights ``[gates]``, such as ``log_alpha`` or :func:`spread_ranks`.
        budget, kind_index, layer_index, minimum_per_layer: see :func:`gates.gating.budget.budget_mask`.
        temperature: divisor of the scores, above 0; near 0 every draw is the mask of the ranking.

    Returns:
        0/1 masks ``[gates]``, each once: at most ``count`` of them.
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
    """The mask of the lowest loss on all data among the one to start from, which the others have to beat, and the finalists
    of a race of draws."""
    meter = Metered(loss)
    best, least = start, meter(start, 1.0)
    first = least
    others = [mask for mask in draws if not torch.equal(mask, start)]
    for number in race(others, meter):
        value = meter(others[number], 1.0)
        if value < least:
            best, least = others[number], value
    return BestDraw(best.detach().clone(), (first, least), meter.passes)
