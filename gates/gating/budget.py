"""Budgets of heads or of time, prices of open heads, and the masks that a budget allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gates.attention.sites import KINDS
from gates.errors import GateError
from gates.gating.latency import TimeLimit, parse_time
from gates.options import NO_KIND


@dataclass(frozen=True)
class Budget:
    """Hold the number of heads to keep, in the whole model or of each kind, or the time that the model may take.

    Args:
        total: The number of heads to keep. With a time, the most heads that any mask within it has.
        per_kind: The number of heads to keep of every kind in the model. Empty for one number in all.
        time: The time that the model may take; None for a number of heads.

    >>> Budget.parse(0.25, {"encoder": 72})
    Budget(total=18, per_kind={}, time=None)
    >>> Budget.parse({"encoder": 10}, {"encoder": 48, "decoder": 48}).per_kind
    {'encoder': 10, 'decoder': 48}
    """

    total: int
    per_kind: Mapping[str, int]
    time: TimeLimit | None = None

    @classmethod
    def parse(cls, value: int | float | str | Mapping[str, int | float] | TimeLimit, heads: Mapping[str, int]) -> Budget:
        """Read a budget: a count, a fraction below 1, one of these per kind (other kinds stay whole), or a time.

        Args:
            value: The budget: ``18``, ``0.25``, ``{"encoder": 10, "cross": 0.5}`` or a limit in time.

        Raises:
            GateError: For a value out of range, a kind that the model lacks, or a text. A text such as ``12ms`` needs a
                table to become a limit (:meth:`gates.gating.latency.TimeLimit.parse`).
        """
        if isinstance(value, TimeLimit):
            return cls(value.most, {}, value)
        if isinstance(value, str):
            parse_time(value)  # raises for a text that is no time
            raise GateError(
                f"the budget is {value!r}, but the latency of this model is unknown; measure it first (head-gates "
                "latency), or give a number of heads or a fraction"
            )
        if not isinstance(value, Mapping):
            return cls(_count(value, sum(heads.values()), "budget"), {})
        if not value:
            raise GateError(NO_KIND.format("the budget is", 10))
        for kind in value:
            if kind not in heads:
                raise GateError(
                    f"the budget names kind {kind!r}, but this model has heads of kind {', '.join(map(repr, heads))} only"
                )
        per_kind = {
            kind: _count(value[kind], count, f"{kind} budget") if kind in value else count for kind, count in heads.items()
        }
        return cls(sum(per_kind.values()), per_kind)

    def pruned(self, heads: Mapping[str, int]) -> dict[str, int]:
        """Return the number of heads to keep of each kind that loses some; empty for a budget that is not per kind."""
        return {kind: kept for kind, kept in self.per_kind.items() if kept < heads[kind]}

    def option(self, heads: Mapping[str, int]) -> int | dict[str, int | float] | TimeLimit:
        """Return the budget as :meth:`parse` reads it."""
        pruned: dict[str, int | float] = {**self.pruned(heads)}
        return self.time or pruned or self.total

    @property
    def terms(self) -> list[Any]:
        """Return the conditions on a mask besides its number of heads, as JSON: the kinds with a budget, or the time."""
        return sorted(self.per_kind) if self.time is None else ["within", self.time.milliseconds, *self.time.terms]

    def is_met(self, mask: Tensor, kind_index: Tensor) -> bool:
        """Return whether a 0/1 mask ``[heads]`` keeps exactly the budgeted heads, or is within the time.

        ``kind_index`` has the position of each head's kind in :data:`gates.attention.sites.KINDS`, ``[heads]``.
        """
        if self.time is not None:
            return self.time.allows(counts_by_site(mask, self.time))
        kept = {kind: int(mask[kind_index == KINDS.index(kind)].sum()) for kind in self.per_kind}
        return int(mask.sum()) == self.total and kept == dict(self.per_kind)


def parse_prices(price: float | Mapping[str, float], heads: Mapping[str, int]) -> Tensor:
    """Read lambda of Voita et al. 2019: the price of an expected open head, for all kinds or per kind (0 for the others).

    Return the prices in the order of ``KINDS``.
    """
    prices = dict(price) if isinstance(price, Mapping) else dict.fromkeys(heads, price)
    if not prices:
        raise GateError(NO_KIND.format("the price is", 0.01))
    for kind, value in prices.items():
        if kind not in heads:
            raise GateError(
                f"the price names kind {kind!r}, but this model has heads of kind {', '.join(map(repr, heads))} only"
            )
        if not value >= 0:
            raise GateError(f"the price of {kind} heads is {value!r}; expected a number of at least 0")
    return torch.tensor([float(prices.get(kind, 0.0)) for kind in KINDS])


def check_mask(mask: Tensor, gates: int, unit: str = "head") -> None:
    """Raise :class:`GateError` unless a mask is a tensor ``[gates]`` of 0 and 1; on the meta device, only check its shape."""
    if not isinstance(mask, Tensor):
        raise GateError(f"the mask is a {type(mask).__name__}; expected a tensor with 0 or 1 for each of {gates} {unit}s")
    if mask.shape != (gates,):
        raise GateError(f"the mask has shape {list(mask.shape)}; this model has {gates} {unit}s to gate")
    if not mask.is_meta and bool((between := (mask != 0) & (mask != 1)).any()):
        place = int(between.nonzero()[0])
        raise GateError(f"the mask has {float(mask[place]):g} for {unit} {place}; expected 0 (removed) or 1 (kept)")


def check_numbers(scores: Tensor) -> None:
    """Raise :class:`GateError` for scores that are NaN, because they cannot be ranked."""
    if not scores.is_meta and bool(scores.isnan().any()):
        head = int(scores.isnan().nonzero()[0])
        raise GateError(
            f"the score of head {head} is nan, so heads cannot be ranked; look for infinite losses or weights, or compute the "
            "scores in float32"
        )


def top_k_mask(scores: Tensor, budget: Budget, kind_index: Tensor) -> Tensor:
    """Return the mask of exactly the budgeted number of highest scores; of equal scores the earlier head is kept.

    Args:
        scores: The scores, ``[heads]``. The highest are kept.
        budget: The number of heads to keep, in total or per kind, or a time; see :func:`mask_within`.
        kind_index: The position of each head's kind in :data:`gates.attention.sites.KINDS`, ``[heads]``.

    Returns:
        The 0/1 mask, ``[heads]``, float32. A score that is NaN is an error.

    >>> top_k_mask(torch.tensor([0.3, 0.9, 0.1, 0.5]), Budget(2, {}), kind_index=torch.zeros(4))
    tensor([0., 1., 0., 1.])
    """
    check_numbers(scores)
    if budget.time is not None:
        return mask_within(scores, budget.time)
    mask = torch.zeros(scores.shape[0], device=scores.device)
    quotas: list[tuple[str | None, int]] = [*budget.per_kind.items()] or [(None, budget.total)]
    for kind, count in quotas:
        among = torch.ones_like(mask, dtype=torch.bool) if kind is None else kind_index == KINDS.index(kind)
        masked = scores.double().masked_fill(~among, -torch.inf)
        mask[torch.sort(masked, descending=True, stable=True).indices[:count]] = 1.0
    return mask


def mask_within(scores: Tensor, limit: TimeLimit) -> Tensor:
    """Return the mask of the highest scores within a time: down the ranking, keep each head that still fits.

    Scores and mask are ``[heads]``. Of equal scores the earlier head is kept. The result is the first mask in the order of the
    ranking, and no head can be added to it.
    """
    site_of = [index for index, site in enumerate(limit.table.sites) for _ in range(site.gates)]
    counts, mask = [0] * len(limit.table.sites), torch.zeros(scores.shape[0], device=scores.device)
    for head in torch.sort(scores.double(), descending=True, stable=True).indices.tolist():
        counts[site_of[head]] += 1
        if limit.allows(counts):
            mask[head] = 1.0
        else:
            counts[site_of[head]] -= 1
    return mask


def counts_by_site(mask: Tensor, limit: TimeLimit) -> list[int]:
    """Return the number of open heads at each site of a table under a 0/1 mask ``[heads]``."""
    return [int(part.sum()) for part in mask.split([site.gates for site in limit.table.sites])]


def budget_mask(
    scores: Tensor, budget: Budget, *, kind_index: Tensor, layer_index: Tensor, minimum_per_layer: int = 0
) -> Tensor:
    """Return the mask of the highest scores within a budget.

    Args:
        scores: The scores, ``[heads]``. The highest are kept.
        budget: The number of heads to keep, in total or per kind, or a time.
        kind_index, layer_index: The kind and the layer of each head, ``[heads]``.
        minimum_per_layer: The number of heads that every layer keeps, its best ones, however low their scores are.

    Returns:
        The 0/1 mask, ``[heads]``, with exactly the budgeted number of ones, or within the time.

    Raises:
        GateError: If the minimum does not fit into the budget, or into any layer.

    >>> layer = torch.tensor([0, 0, 1, 1])
    >>> scores = torch.tensor([0.3, 0.9, 0.1, 0.2])
    >>> budget_mask(scores, Budget(2, {}), kind_index=torch.zeros(4), layer_index=layer, minimum_per_layer=1)
    tensor([0., 1., 0., 1.])
    """
    if minimum_per_layer <= 0:
        return top_k_mask(scores, budget, kind_index)
    layers, sizes = layer_index.unique(return_counts=True)
    if minimum_per_layer > (most := int(sizes.max())):
        raise GateError(f"a minimum of {minimum_per_layer} heads in each layer is more than any layer has; give at most {most}")
    scores = scores.double().clone()
    reserved = torch.zeros_like(scores, dtype=torch.bool)
    for layer in layers:
        members = (layer_index == layer).nonzero().flatten()
        reserved[members[torch.sort(scores[members], descending=True, stable=True).indices[:minimum_per_layer]]] = True
    scores[reserved] = torch.inf
    mask = top_k_mask(scores, budget, kind_index)
    if bool((mask[reserved] == 0).any()):
        raise GateError(
            f"a minimum of {minimum_per_layer} heads in each layer {_excess(reserved, budget, kind_index)}; lower the minimum "
            "or raise the budget"
        )
    return mask


def _excess(reserved: Tensor, budget: Budget, kind_index: Tensor) -> str:
    """Say how the reserved heads, bool ``[heads]``, exceed a budget."""
    if budget.time is not None:
        needed = budget.time.table.time_of(counts_by_site(reserved, budget.time))
        return f"takes {needed:.4g} ms, more than the budget of {budget.time.milliseconds:.4g} ms"
    needs = [("", int(reserved.sum()), budget.total)]
    needs += [
        (f"{kind} ", int(reserved[kind_index == KINDS.index(kind)].sum()), kept) for kind, kept in budget.per_kind.items()
    ]
    kind, count, kept = next(need for need in needs if need[1] > need[2])
    return f"needs {count} {kind}heads, more than the {kind}budget of {kept}"


def _count(value: object, heads: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise GateError(
            f"the {name} is {value!r}; expected a number of heads such as {max(1, heads // 4)} or a fraction such as 0.25"
        )
    if isinstance(value, float) and (value == 1 or 0 < value * heads <= 0.5):
        raise GateError(
            f"the {name} is {value!r}; write 1 for one head, {heads} for all of them, or a fraction that keeps at least one"
        )
    count = round(value * heads) if isinstance(value, float) and 0 < value < 1 else value
    if count != int(count) or not 0 <= count <= heads:
        raise GateError(
            f"the {name} is {value!r}; expected a whole number from 0 to {heads} (heads in the model) or a fraction below 1"
        )
    return int(count)
