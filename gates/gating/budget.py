"""How many heads to keep, or for how long a model may take, what an open head costs, and the masks that a budget allows."""

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
    """How many heads to keep: in the whole model, of each kind that is named, or as many as a time allows.

    Args:
        total: heads to keep in the model, when ``per_kind`` is empty; with a time, the most that any mask within it has.
        per_kind: heads to keep of each kind; every kind the model has is listed.
        time: that the model may take, by which a mask's number of heads follows from which heads these are.

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
            value: ``18``, ``0.25``, ``{"encoder": 10, "cross": 0.5}`` or a limit in time.
            heads: heads of each kind in the model.

        Raises:
            GateError: out of range, not a number, for a kind the model lacks, or for a text such as ``12ms``, which needs a
                table to become a limit (:meth:`gates.gating.latency.TimeLimit.parse`).
        """
        if isinstance(value, TimeLimit):
            return cls(value.most, {}, value)
        if isinstance(value, str):
            parse_time(value)  # raises for what is no time
            raise GateError(
                f"the budget is {value!r}, but how long this model takes with which heads is not known; measure it first "
                "(python -m training latency), or give a number of heads or a fraction"
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
        """Heads to keep of the kinds that do not stay whole; empty for a budget that is not per kind.

        Args:
            heads: heads of each kind in the model.
        """
        return {kind: kept for kind, kept in self.per_kind.items() if kept < heads[kind]}

    def option(self, heads: Mapping[str, int]) -> int | dict[str, int | float] | TimeLimit:
        """Return the budget as :meth:`parse` reads it.

        Args:
            heads: The heads of each kind in the model.
        """
        pruned: dict[str, int | float] = {**self.pruned(heads)}
        return self.time or pruned or self.total

    @property
    def terms(self) -> list[Any]:
        """As JSON, what a mask has to keep to beside its number of heads: the kinds that have one of their own, or the time."""
        return sorted(self.per_kind) if self.time is None else ["within", self.time.milliseconds, *self.time.terms]

    def is_met(self, mask: Tensor, kind_index: Tensor) -> bool:
        """Whether a 0/1 mask ``[heads]`` keeps just as many heads, in all and of each kind that has a number, or is within the
        time.

        Args:
            mask: of a model.
            kind_index: kind of each head as a position in :data:`gates.attention.sites.KINDS`, ``[heads]``.
        """
        if self.time is not None:
            return self.time.allows(counts_by_site(mask, self.time))
        kept = {kind: int(mask[kind_index == KINDS.index(kind)].sum()) for kind in self.per_kind}
        return int(mask.sum()) == self.total and kept == dict(self.per_kind)


def parse_prices(price: float | Mapping[str, float], heads: Mapping[str, int]) -> Tensor:
    """Read lambda of Voita et al. 2019: one price of an expected open head for all kinds, or one per kind (0 for the others),
    such as ``{"encoder": 0.01, "cross": 0.1}``. Return the prices by the place of a kind in ``KINDS``."""
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
    """Raise :class:`GateError` for what is no mask of so many gates: 0 or 1 for each, ``[gates]``. Of a mask on the meta device
    the shape alone is checked."""
    if not isinstance(mask, Tensor):
        raise GateError(f"the mask is a {type(mask).__name__}; expected a tensor with 0 or 1 for each of {gates} {unit}s")
    if mask.shape != (gates,):
        raise GateError(f"the mask has shape {list(mask.shape)}; this model has {gates} {unit}s to gate")
    if not mask.is_meta and bool((between := (mask != 0) & (mask != 1)).any()):
        place = int(between.nonzero()[0])
        raise GateError(f"the mask has {float(mask[place]):g} for {unit} {place}; expected 0 (removed) or 1 (kept)")


def check_numbers(scores: Tensor) -> None:
    """Raises :class:`GateError` for scores that are NaN, which no order has a place for."""
    if not scores.is_meta and bool(scores.isnan().any()):
        head = int(scores.isnan().nonzero()[0])
        raise GateError(
            f"the score of head {head} is nan, so heads cannot be ranked; look for infinite losses or weights, or compute the "
            "scores in float32"
        )


def top_k_mask(scores: Tensor, budget: Budget, kind_index: Tensor) -> Tensor:
    """The mask of exactly the budgeted number of highest scores; ties go to the earlier head.

    Args:
        scores: scores ``[heads]``; higher is kept first.
        budget: heads to keep, in total or per kind; or a time, see :func:`mask_within`.
        kind_index: kind of each head as a position in :data:`gates.attention.sites.KINDS`, ``[heads]``.

    Returns:
        0/1 mask ``[heads]``, float32.

    Raises:
        GateError: for scores that are not numbers.

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
    """The mask of the highest scores within a time: down the ranking, each head is kept with which the time is not over.

    No other mask within the time has a head that this one lacks before this one has a head that it lacks, and no head can be
    added to it.

    Args:
        scores: ``[heads]``; higher is kept first, ties go to the earlier head.

    Returns:
        0/1 mask ``[heads]``, float32.
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
    """Open heads of each site of a table under a 0/1 mask ``[heads]``."""
    return [int(part.sum()) for part in mask.split([site.gates for site in limit.table.sites])]


def budget_mask(
    scores: Tensor, budget: Budget, *, kind_index: Tensor, layer_index: Tensor, minimum_per_layer: int = 0
) -> Tensor:
    """The mask of the highest scores within a budget.

    Args:
        scores: scores ``[heads]``; higher is kept first.
        budget: heads to keep, in total or per kind, or a time.
        kind_index, layer_index: kind and layer of each head, ``[heads]``.
        minimum_per_layer: number of heads of every layer that are kept first, the best ones, whatever their scores.

    Returns:
        0/1 mask ``[heads]`` with exactly the budgeted number of ones, or within the time.

    Raises:
        GateError: if the minimum does not fit into the budget, or into any layer.

    >>> layer = torch.tensor([0, 0, 1, 1])
    >>> scores = torch.tensor([0.3, 0.9, 0.1, 0.2])
    >>> budget_mask(scores, Budget(2, {}), kind_index=torch.zeros(4), layer_index=layer, minimum_per_layer=1)
    tensor([0., 1., 0., 1.])
    """
    if minimum_per_layer > 0:
        layers, sizes = layer_index.unique(return_counts=True)
        if minimum_per_layer > (most := int(sizes.max())):
            raise GateError(
                f"a minimum of {minimum_per_layer} heads in each layer is more than any layer has; give at most {most}"
            )
        scores = scores.double().clone()
        reserved = torch.zeros_like(scores, dtype=torch.bool)
        for layer in layers:
            members = (layer_index == layer).nonzero().flatten()
            reserved[members[torch.sort(scores[members], descending=True, stable=True).indices[:minimum_per_layer]]] = True
        scores[reserved] = torch.inf
        mask = top_k_mask(scores, budget, kind_index)
        if budget.time is not None and bool((mask[reserved] == 0).any()):
            needed = budget.time.table.time_of(counts_by_site(reserved, budget.time))
            raise GateError(
                f"a minimum of {minimum_per_layer} heads in each layer takes {needed:.4g} ms, more than the budget of "
                f"{budget.time.milliseconds:.4g} ms; lower the minimum or raise the budget"
            )
        if bool((mask[reserved] == 0).any()):
            needs = [("", int(reserved.sum()), budget.total)]
            needs += [
                (f"{kind} ", int(reserved[kind_index == KINDS.index(kind)].sum()), kept)
                for kind, kept in budget.per_kind.items()
            ]
            kind, needed, kept = next(need for need in needs if need[1] > need[2])
            raise GateError(
                f"a minimum of {minimum_per_layer} heads in each layer needs {needed} {kind}heads, "
                f"more than the {kind}budget of {kept}; lower the minimum or raise the budget"
            )
        return mask
    return top_k_mask(scores, budget, kind_index)


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
