"""Steer gates in training to their final number, by a budget or a price, and make the mask that they leave."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gates.attention.sites import KINDS, Kind
from gates.gating.budget import Budget, parse_prices
from gates.gating.families import TopKGates
from gates.gating.hard_concrete import Stretch
from gates.gating.head_gates import HeadGates
from gates.gating.price import l0_penalty
from gates.gating.schedule import BudgetController, PaidPrices, set_apart_
from gates.options import TOP_K_FAMILIES
from training.config import PrunerOptions


def kinds_to_prune(options: PrunerOptions, known: Collection[Kind]) -> list[Kind] | None:
    """Return the kinds of attention with a budget, or without a budget with a price; None for all.

    The others stay whole and are not drawn, so they are trained as they will be used.
    """
    budget, price = options.budget, options.price
    if isinstance(budget, Mapping):
        return [kind for kind in known if kind in budget]
    if budget is None and isinstance(price, Mapping):
        return [kind for kind in known if price.get(kind)]
    return None


def new_gates(options: PrunerOptions, backbone: nn.Module, kinds: list[Kind] | None) -> HeadGates:
    """Return gates for a backbone as the options have them, not attached."""
    return HeadGates(
        backbone,
        options.unit,
        stretch=Stretch(options.temperature),
        initial_log_alpha=options.initial_log_alpha,
        straight_through=options.straight_through,
        draw_per=options.draw_per,
        anneal=options.anneal,
        straight_through_from=options.straight_through_from,
        family=options.gate,
        budget=options.budget if options.gate in TOP_K_FAMILIES and not isinstance(options.budget, str) else None,
        kinds=kinds,
    )


class GateController:
    """Steers the gates of a run. It changes ``log_alpha`` in place.

    Args:
        gates: The gates of its model, as their family starts them.
        kinds: The kinds of attention that are pruned; None for all.

    Attributes:
        budget: The budget; None where a price decides.

    Raises:
        GateError: For a budget or prices that the model cannot have.
    """

    def __init__(self, options: PrunerOptions, gates: HeadGates, kinds: list[Kind] | None) -> None:
        self.options, self.gates, self.kinds = options, gates, kinds
        heads = gates.kind_sizes()
        assert options.price is not None  # the options have put a default in its place
        self.prices = parse_prices(options.price, heads)[gates.kind_index().cpu()]
        if gates.is_learned is not None:
            self.prices *= gates.is_learned.cpu()  # gates that are not learned cost nothing
        self.budget_controller: BudgetController | None = None
        if options.budget is not None:
            self.budget_controller = BudgetController(gates, options.budget, minimum_per_layer=options.minimum_per_layer)
        self.budget = None if self.budget_controller is None else self.budget_controller.budget
        self._paid: list[list[float]] = []
        self._paid_on_device: list[PaidPrices] = []

    @property
    def is_enforced(self) -> bool:
        """Whether gates are held to the budget after every step."""
        return self.budget_controller is not None and self.budget_controller.is_enforced

    @property
    def paid(self) -> list[list[float]]:
        """The prices of the steps since the schedule has reached the budget, of all gates or of each budgeted kind."""
        for prices in self._paid_on_device:
            self._paid.append(prices.on_host() or (self._paid[-1] if self._paid else [0.0] * len(prices.paid)))
        self._paid_on_device.clear()
        return self._paid

    @property
    def starts_apart(self) -> bool:
        """Whether a score sets the gates apart when the prune phase begins."""
        return (self.is_enforced or self.options.gate in TOP_K_FAMILIES) and self.options.init_spread != 0

    @torch.no_grad()
    def set_apart_(self, scores: Tensor) -> None:
        """Set the gates apart by scores ``[gates]``; the first step brings their sum to the schedule."""
        assert self.options.init_spread is not None  # the options have put a default in its place
        set_apart_(self.gates, scores, self.options.init_spread)

    def penalty(self, ramp: float) -> Tensor:
        """Return the penalty of the loss: a given price, or 0 where :meth:`enforce_` applies the price after the step.

        It is times 0 outside the prune phase, so that every parameter has a gradient in every process.

        Args:
            ramp: The progress of the schedule or the price, 0 to 1; 0 outside the prune phase.
        """
        if self.budget is None or self.options.gate == "clamped-linear":
            probability = self.gates.open_probability()
            return ramp * l0_penalty(probability, self.prices.to(probability))
        return 0.0 * self.gates.log_alpha.sum()

    @torch.no_grad()
    def enforce_(self, ramp: float, optimizer: Optimizer) -> None:
        """Hold the expected number of open heads to the schedule after a step of the optimiser, in the whole model or in each
        budgeted kind; gates pay the price for it. Gates without a budget are only kept within their limits."""
        if not self.is_enforced:
            self.gates.learned.clamp_()
            return
        assert self.budget_controller is not None
        self.budget_controller.enforce_(ramp, optimizer)
        if ramp == 1 and self.budget_controller.last_paid is not None:
            self._paid_on_device.append(self.budget_controller.last_paid)

    def goals(self, ramp: float) -> list[float]:
        """Return the target number of open gates, in all or of each budgeted kind; none without a budget of gates."""
        if self.budget_controller is None or self.budget is None or self.budget_controller.time is not None:
            return []
        budget, learned = self.budget, self.gates.learned
        if self.gates.mode != "masked":
            if self.is_enforced:
                return self.budget_controller.goals(ramp)
            if self.gates.mode == "open":
                return [float(count) for count in self.budget_controller.schedule.heads]
            if isinstance(learned, TopKGates):
                budget = learned.current_budget()
        return list(budget.per_kind.values()) or [budget.total]

    @torch.no_grad()
    def milliseconds(self, ramp: float) -> dict[str, float]:
        """Return the ``expected`` milliseconds and the ``target`` while gates are held to a budget in time; else nothing."""
        if self.budget_controller is None or self.budget_controller.time is None or self.gates.mode != "stochastic":
            return {}
        probability = self.gates.open_probability()
        expected = self.budget_controller.time.to_(probability.device).time(probability)
        return {"expected": float(expected), "target": self.budget_controller.goals(ramp)[0]}

    def prices_paid(self) -> dict[str, Any]:
        """Return the last price and those since the schedule has reached the budget, for a checkpoint."""
        return {
            "last": [] if self.budget_controller is None else list(self.budget_controller.price),
            "at_budget": list(self.paid),
        }

    def restore_prices_(self, found: Mapping[str, Any]) -> None:
        """Restore the prices of :meth:`prices_paid`; no price has been paid yet where they are empty."""
        self._paid, self._paid_on_device = list(found.get("at_budget", [])), []
        if self.budget_controller is not None:
            self.budget_controller.price = list(found.get("last", [])) or [0.0] * len(self.budget_controller.price)

    def price_by_kind(self, ramp: float) -> dict[Kind, float]:
        """Return the price of an expected open gate in units of the loss: a given price, or the one of the last step.

        Under a budget in time, it is the price of an expected millisecond.
        """
        sizes = self.gates.kind_sizes()
        present = [kind for kind in KINDS if kind in sizes]
        if self.budget is None:
            kinds = self.gates.kind_index().cpu()
            return {kind: ramp * float(self.prices[kinds == KINDS.index(kind)].max()) for kind in present}
        if self.budget_controller is None or not self.is_enforced:
            return {}
        quotas = {kind: self.budget_controller.quota_of(kind) for kind in present}
        return {
            kind: self.budget_controller.price[quota] if ramp > 0 else 0.0
            for kind, quota in quotas.items()
            if quota is not None
        }

    def logged_prices(self, ramp: float) -> dict[str, float]:
        """Return the prices of :meth:`price_by_kind` for logs: ``price``, the highest, and ``price/KIND`` if there are several
        kinds; none without a prune phase."""
        by_kind = self.price_by_kind(ramp) if self.options.prune > 0 else {}
        highest = {"price": max(by_kind.values())} if by_kind else {}
        return highest | {f"price/{kind}": price for kind, price in by_kind.items() if len(by_kind) > 1}

    @torch.no_grad()
    def solved_penalty(self, ramp: float) -> Tensor:
        """Return the penalty at the price of the last step, for logs: after the step, gates go down its gradient."""
        probability, kinds = self.gates.open_probability(), self.gates.kind_index()
        if self.budget is None:
            return probability.new_zeros(())
        if self.budget_controller is not None and self.budget_controller.time is not None:
            price = self.budget_controller.price[0] if ramp > 0 else 0.0
            return price * self.budget_controller.time.to_(probability.device).time(probability).to(probability)
        parts = [price * probability[kinds == KINDS.index(kind)].sum() for kind, price in self.price_by_kind(ramp).items()]
        return sum(parts, probability.new_zeros(()))

    def mask_within(self, scores: Tensor, budget: Budget) -> Tensor:
        """Return the 0/1 mask ``[gates]`` of the highest scores: exactly the budget, with the minimum per layer.

        Raises:
            GateError: If the minimum does not fit into the budget.
        """
        return self.gates.mask_of(scores, budget, minimum_per_layer=self.options.minimum_per_layer)

    def learned_mask(self) -> Tensor:
        """Return the mask of the present log_alpha: the highest within the budget, or without one every gate above 0."""
        log_alpha = self.gates.log_alpha.detach()
        if self.budget_controller is not None:
            return self.budget_controller.mask()
        is_open = self._values_in_evaluation() > 0
        minimum = self.options.minimum_per_layer
        least = [min(minimum, size) for size in self.gates.sizes]
        if self.kinds is None:
            return self.mask_within(log_alpha, Budget(max(int(is_open.sum()), sum(least)), {}))
        counts: dict[str, int | float] = {}
        for kind in self.kinds:
            minimum = sum(count for count, site in zip(least, self.gates.sites, strict=True) if site.kind == kind)
            counts[kind] = max(self._open_of(kind, is_open), minimum)
        return self.mask_within(log_alpha, Budget.parse(counts, self.gates.kind_sizes()))

    def learned(self) -> dict[str, Any]:
        """Return the state of the gates as JSON: log_alpha and their own mask, each ``[gates]``; the number of gates that this
        mask closes, and of those that are closed in evaluation without it; and the median price since the schedule has reached
        the budget, in all or of each budgeted kind."""
        mask = self.learned_mask()
        closed = mask == 0
        is_closed = self._values_in_evaluation() <= 0
        price = [round(median(of_kind), 8) for of_kind in zip(*self.paid, strict=True)]
        return {
            "log_alpha": self.gates.log_alpha.tolist(),
            "mask": mask.tolist(),
            "closed": int(closed.sum()),
            "closed_by_gates": int((closed & is_closed).sum()),
            "price": price,
        }

    def budget_of(self, mask: Tensor) -> Budget:
        """Return the run's budget; with a price in its place, the budget that a mask ``[gates]`` fills.

        With prices per kind it has a number for each of these kinds, and other kinds stay whole.
        """
        if self.budget is not None:
            return self.budget
        if self.kinds is None:
            return Budget(int(mask.sum()), {})
        return Budget.parse({kind: self._open_of(kind, mask) for kind in self.kinds}, self.gates.kind_sizes())

    @torch.no_grad()
    def _values_in_evaluation(self) -> Tensor:
        """Return the gates ``[gates]`` that log_alpha makes, whatever mask is fixed."""
        before, self.gates.mode = self.gates.mode, "stochastic"
        try:
            return self.gates.values()
        finally:
            self.gates.mode = before

    def _open_of(self, kind: Kind, mask: Tensor) -> int:
        return int(mask[(self.gates.kind_index() == KINDS.index(kind)).to(mask.device)].sum())
