"""Assign roles to heads: shares against thresholds and baselines, corrected for the number of heads and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.attention.sites import AttentionSite
from gates.roles.shares import Shares
from gates.scores.attention import AttentionMetric, distribution_blocks
from gates.scores.observe import observe_attention

SIGNIFICANCE = 0.05
LEAST_COUNT = 30
"""The minimum number of opportunities, such as arcs of a relation, for a test."""
TWO_SIDED = 1.959964
"""The standard errors on each side of a 95 % interval."""


@dataclass(frozen=True)
class Rule:
    """Describe when a head has a role."""

    name: str
    least: float = 0.0  # The minimum share
    margin: float = 0.0  # The minimum difference of the share from the best baseline
    specialised: bool = True  # Whether a head with this role is specialised. Sinks and broad heads are background.


POSITIONAL = Rule("positional", least=0.9)
SYNTACTIC = Rule("syntactic", margin=0.1)
RARE = Rule("rare", least=0.5, margin=0.1)
COREFERENCE = Rule("coreference", margin=0.1)
INDUCTION = Rule("induction", margin=0.1)
DUPLICATE = Rule("duplicate", margin=0.1)
SEPARATOR = Rule("separator", least=0.5, specialised=False)
FIRST_TOKEN = Rule("first-token", least=0.5, specialised=False)
BROAD = Rule("broad", least=0.9, specialised=False)
RULES = (POSITIONAL, SYNTACTIC, RARE, COREFERENCE, INDUCTION, DUPLICATE, SEPARATOR, FIRST_TOKEN, BROAD)


@dataclass(frozen=True)
class Role:
    """Hold one role for every head; NaN where it is undefined, such as for later separators of causal heads."""

    rule: Rule
    holds: Tensor  # Whether a head has the role, ``[heads]``
    column: list[str]  # The name of the best column for each head, such as a relation
    strength: Tensor  # The share of that column, ``[heads]``
    # The 95 % interval of the strength over sentences, ``[heads]``.
    low: Tensor
    high: Tensor
    baseline: Tensor  # The share of the best baseline, ``[heads]``; NaN if there is none
    which: Tensor  # The number of that baseline, ``[heads]``
    # The p-value of the strength against the baseline, corrected by Holm's method, ``[heads]``; NaN without a baseline.
    p: Tensor
    passing: Tensor  # The columns by which a head has the role, ``[heads, columns]``


def p_values(shares: Shares) -> Tensor:
    """Return one-sided normal p-values of every share against its baseline, ``[heads, columns]``.

    The standard error is that of the bootstrapped difference, but at least one opportunity. The p-value is NaN without a
    baseline or with too few opportunities.
    """
    error = torch.maximum(shares.difference_error, 1 / shares.count.clamp(min=1))
    z = (shares.value - shares.baseline) / error
    p = torch.special.erfc(z / 2**0.5) / 2
    return torch.where(shares.count >= LEAST_COUNT, p, torch.nan)


def holm(p: Tensor) -> Tensor:
    """Correct p-values for their number by Holm's step-down method (1979); NaN counts as no test."""
    tested = p.isfinite()
    ordered, order = p[tested].sort(stable=True)
    factors = torch.arange(len(ordered), 0, -1, dtype=p.dtype, device=p.device)
    stepped = (ordered * factors).clamp(max=1)
    corrected, found = p.clone(), torch.empty_like(ordered)
    if len(ordered):
        found[order] = stepped.cummax(0).values
    corrected[tested] = found
    return corrected


def assign(rule: Rule, shares: Shares, names: Sequence[str]) -> Role:
    """Return the role of every head by one rule.

    A head has the role by every column whose share satisfies the rule and is above the baseline. Significance is p < 0.05 after
    Holm's correction over heads and columns. The numbers of a head are those of its best such column, by the distance from the
    baseline. Without one they are those of the best column of all.
    """
    p = holm(p_values(shares))
    without = shares.baseline.isnan()
    known = (shares.count >= LEAST_COUNT) & shares.value.isfinite()
    above = torch.where(without, 0.0, shares.value - shares.baseline)
    passing = known & (shares.value >= rule.least) & (above >= rule.margin) & (without | (p < SIGNIFICANCE))
    rank = above if rule.margin else shares.value
    best = torch.where(passing, rank + 2, torch.where(known, rank, -torch.inf)).nan_to_num(-torch.inf).argmax(-1)

    def of_best(values: Tensor) -> Tensor:
        chosen = values.gather(1, best.unsqueeze(1)).squeeze(1)
        return torch.where(known.any(-1), chosen, torch.nan)

    strength, error = of_best(shares.value), of_best(shares.error)
    return Role(
        rule=rule,
        holds=passing.any(-1),
        column=[names[int(place)] if bool(some) else "" for place, some in zip(best, known.any(-1), strict=True)],
        strength=strength,
        low=(strength - TWO_SIDED * error).clamp(min=0),
        high=(strength + TWO_SIDED * error).clamp(max=1),
        baseline=of_best(shares.baseline),
        which=shares.which.gather(1, best.unsqueeze(1)).squeeze(1),
        p=of_best(p),
        passing=passing,
    )


def specialised(roles: Sequence[Role]) -> Tensor:
    """Return which heads have a role that is not background, ``[heads]``."""
    return torch.stack([role.holds for role in roles if role.rule.specialised]).any(0)


Take = Callable[[int, Tensor], None]
"""A function of the index of a site and its weights ``[batch, heads, query, key]``, called whenever the site runs."""


@contextmanager
def observe_weights(model: PreTrainedModel, sites: tuple[AttentionSite, ...], take: Take) -> Iterator[None]:
    """Pass the attention weights of every forward pass to ``take``, one site at a time, without keeping them.

    They are the weights before dropout and gates. See :func:`gates.scores.observe.observe_attention`.
    """
    with observe_attention(model, sites, [_Weights(sites, take)], {}):
        yield


class _Weights(AttentionMetric):
    """Pass on whole distributions instead of measuring them."""

    def __init__(self, sites: tuple[AttentionSite, ...], take: Take) -> None:
        super().__init__(sites)
        self._take = take

    def from_scores(self, query: Tensor, key: Tensor, scale: float, mask: Tensor | None, **more: Any) -> Tensor:
        """Return weights ``[batch, heads, query, key]`` without the share of a sink; zeros for queries that see no key."""
        blocks = distribution_blocks(query, key, scale, mask, **more)
        return torch.cat([(scores - whole.unsqueeze(-1)).exp().nan_to_num(0.0) for scores, whole in blocks], dim=2)

    def from_matrix(self, weights: Tensor) -> Tensor:
        return weights

    def update(self, site: int, values: Tensor, visible: Any, valid: Any = None) -> None:
        self._take(site, values)
