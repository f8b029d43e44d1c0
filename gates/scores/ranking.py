"""Turn scores into rankings, and measure the agreement of two masks.

Scores are flat, ``[heads]`` in site order. Heads with higher scores are kept first.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from gates.errors import GateError
from gates.scores.importance import normalise_by_layer

RankingName = Literal["his", "entropy-low-first", "entropy-high-first", "hies", "rank-sum", "random", "his-inverted"]
RANKINGS: tuple[RankingName, ...] = get_args(RankingName)
"""``entropy-low-first`` removes the heads of lowest entropy first, ``entropy-high-first`` those of highest."""


def ranking_scores(
    name: RankingName, *, his: Tensor, entropy: Tensor, layer_index: Tensor, alpha: float = 0.5, seed: int = 0
) -> Tensor:
    """Return the scores of a named ranking, ``[heads]``; higher is kept first.

    Args:
        his: The raw HIS, ``[heads]``, which this function normalises by layer.
        entropy: The mean normalised attention entropy, ``[heads]``.
        alpha: The weight of HIS in ``hies``. Choose it on a selection split.
        seed: The seed of ``random``.

    >>> his, entropy, layer = torch.tensor([3.0, 4.0, 1.0]), torch.tensor([0.9, 0.2, 0.5]), torch.tensor([0, 0, 1])
    >>> [round(score, 2) for score in ranking_scores("his", his=his, entropy=entropy, layer_index=layer).tolist()]
    [0.6, 0.8, 1.0]
    """
    his = normalise_by_layer(his.double(), layer_index)
    entropy = entropy.double()
    match name:
        case "his":
            return his
        case "his-inverted":
            return -his
        case "entropy-low-first":
            return entropy
        case "entropy-high-first":
            return -entropy
        case "hies":
            return hies(his, entropy, alpha)
        case "rank-sum":
            return ranks(his) + ranks(-entropy)
        case "random":
            generator = torch.Generator().manual_seed(seed)
            return torch.rand(his.shape, dtype=torch.float64, generator=generator).to(his.device)
    raise GateError(f"unknown ranking {name!r}; expected one of {', '.join(RANKINGS)}")


def hies(his: Tensor, entropy: Tensor, alpha: float) -> Tensor:
    """Combine HIS and entropy (Choi et al. 2025): ``alpha * minmax(HIS) + (1 - alpha) * (1 - minmax(H))``.

    >>> hies(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.2, 0.2, 0.8]), alpha=0.5).tolist()
    [0.5, 0.75, 0.5]
    """
    if not 0 <= alpha <= 1:
        raise GateError(f"alpha is {alpha}; expected a number from 0 (entropy alone) to 1 (HIS alone)")
    return alpha * _minmax(his) + (1 - alpha) * (1 - _minmax(entropy))


def layer_leaders_first(scores: Tensor, layer_index: Tensor) -> Tensor:
    """Return ranks of scores, with the best head of every layer before all others.

    A budget of at least one head per layer keeps one head in each, as ``minimum_per_layer=1`` of
    :func:`gates.gating.budget.budget_mask` does. A smaller one keeps the best of these.

    >>> layer_leaders_first(torch.tensor([0.3, 0.9, 0.1, 0.2]), torch.tensor([0, 0, 1, 1])).tolist()
    [2.0, 7.0, 0.0, 5.0]
    """
    leads = torch.zeros_like(scores, dtype=torch.bool)
    for layer in layer_index.unique():
        members = (layer_index == layer).nonzero().flatten()
        leads[members[torch.sort(scores[members], descending=True, stable=True).indices[0]]] = True
    return ranks(scores) + len(scores) * leads


def ranks(scores: Tensor) -> Tensor:
    """Return the rank of each entry, 0 for the lowest; ties share their mean rank."""
    less = (scores.unsqueeze(0) < scores.unsqueeze(1)).sum(1)
    ties = (scores.unsqueeze(0) == scores.unsqueeze(1)).sum(1)
    return less + (ties - 1) / 2


def _minmax(scores: Tensor) -> Tensor:
    low, high = scores.min(), scores.max()
    return torch.zeros_like(scores) if high == low else (scores - low) / (high - low)


def jaccard(mask: Tensor, other: Tensor) -> float:
    """Return the heads in both masks over the heads in either; 1 for two empty masks."""
    both, either = (mask * other).sum(), torch.maximum(mask, other).sum()
    return float(both / either) if either > 0 else 1.0
