"""How trained gates come to a budget: what holds them to their schedule after every optimiser step, and the mask they leave.

Whoever trains calls :meth:`BudgetController.enforce_` after each step of the optimiser and takes
:meth:`BudgetController.mask` at the end: a plain loop through :meth:`gates.model.GatedModel.step_`, Hugging Face's Trainer, or
another framework's module.

What is minimised is the task loss plus a price times the expected number of open gates (Voita et al. 2019), and the price is
solved for at every step, so that the expectation follows its schedule. Its part of the step is taken apart from the
optimiser's moments, as AdamW takes weight decay (Loshchilov and Hutter 2019). Adam divides the gradient of every gate by its
own size, so that important and unimportant gates would move alike, and no price could tell them apart:
:func:`rate_of_gates_` lets all gates have one second moment, as Adam-mini has for a block of weights (Zhang et al. 2024).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, distributed
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from gates.attention.sites import KINDS, site_labels
from gates.errors import GateError
from gates.gating.budget import Budget
from gates.gating.hard_concrete import DEFAULT_STRETCH, LOG_ALPHA_LIMIT, HardConcrete, Stretch, open_probability
from gates.gating.head_gates import HeadGates
from gates.gating.latency import TimeLimit
from gates.gating.price import RelaxedTime, l0_gradient, solve_price


class BudgetSchedule:
    """The expected number of open heads on its way from all heads to a budget, in all or of each budgeted kind.

    With ``|log_alpha|`` limited, a lone gate's open probability can be neither 0 nor 1. So the schedule ends at the expectation
    with exactly the budgeted gates at one limit and the others at the other.

    Args:
        start: share of the heads from which the schedule sets out.

    Attributes:
        kinds: that have a budget of their own; none where all heads have one together.
        heads: in the model, in all or of each budgeted kind.
    """

    def __init__(self, budget: Budget, heads: Mapping[str, int], stretch: Stretch, *, start: float = 1.0) -> None:
        self.kinds = list(budget.per_kind)
        self.heads = [heads[kind] for kind in self.kinds] or [sum(heads.values())]
        kept = list(budget.per_kind.values()) or [budget.total]
        closed, opened = open_probability(torch.tensor([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT]), stretch).tolist()
        self._first = [start * count for count in self.heads]
        self._last = [k * opened + (count - k) * closed for k, count in zip(kept, self.heads, strict=True)]

    def goals(self, progress: float) -> list[float]:
        """Expected open heads, linear in the progress, which is brought into 0 to 1."""
        done = min(max(progress, 0.0), 1.0)
        return [first + done * (last - first) for first, last in zip(self._first, self._last, strict=True)]


class TimeSchedule:
    """The expected time of a model on its way from ``first`` milliseconds, what its gates take as they are, to a limit; see
    :class:`BudgetSchedule`. All gates have one limit together."""

    def __init__(self, time: RelaxedTime, first: float) -> None:
        self.kinds: list[str] = []
        self.heads = [len(time.site_index)]
        self._first, self._last = first, time.limit

    def goals(self, progress: float) -> list[float]:
        """Expected milliseconds, linear in the progress, which is brought into 0 to 1."""
        return [self._first + min(max(progress, 0.0), 1.0) * (self._last - self._first)]


class BudgetController:
    """Leads the gates of a model to a budget. It changes ``log_alpha`` in place.

    Hard-Concrete gates pay a price: after every step of the optimiser they go down the gradient of the expected number of open
    gates, as far as brings that number to its schedule. Under a budget in time it is the gradient of the expected time, so that
    a gate pays the price times what it costs in milliseconds. Gates of other families are only kept within their limits: the
    two top-k families keep their budget by themselves, and ``clamped-linear`` ones pay a price that is given.

    Args:
        budget: gates to keep: a count, a fraction or one of these per kind, or a time, see :class:`gates.gating.budget.Budget`.
        ramp: share of the pruning after which the schedule has arrived at the budget; then the choice settles.
        start: open fraction from which the schedule sets out; None for that of the gates now, where they are held to it (their
            limits are below an expectation of all heads), and for 1 elsewhere. A schedule in time sets out from theirs.

    Attributes:
        schedule: of the expected number of open gates, or of the expected time.
        time: that the gates take; None unless the budget is one in time.
        last_paid: prices of the last step, until they are read from the device; None afterwards.

    :attr:`price` is that of an expected open gate, or millisecond, at the last step, of all gates or of each budgeted kind, in
    units of the loss; without the optimiser at hand, the price times the learning rate. 0 where gates pay none.

    Raises:
        GateError: for a budget that the model cannot have, a minimum that does not fit into it, and a time for gates of a
            family that are not held to it.
    """

    def __init__(
        self,
        gates: HeadGates,
        budget: int | float | str | Mapping[str, int | float] | TimeLimit,
        *,
        minimum_per_layer: int = 0,
        ramp: float = 1.0,
        start: float | None = None,
    ) -> None:
        self.gates, self.minimum_per_layer, self.ramp = gates, minimum_per_layer, ramp
        self.budget = Budget.parse(budget, gates.kind_sizes())
        learned = gates.learned
        stretch = learned.first_stretch if isinstance(learned, HardConcrete) else DEFAULT_STRETCH
        self.time: RelaxedTime | None = None
        self.schedule: BudgetSchedule | TimeSchedule
        if isinstance(budget, TimeLimit):
            self._check_time(budget)
            self.time = RelaxedTime(budget, stretch)
            self.schedule = TimeSchedule(self.time, float(self.time.time(learned.open_probability().detach().cpu())))
        else:
            if start is None:
                start = float(learned.open_probability().detach().mean()) if self.is_enforced else 1.0
            self.schedule = BudgetSchedule(self.budget, gates.kind_sizes(), stretch, start=start)
        self.last_paid: PaidPrices | None = None
        self._of_kind: list[Tensor] | None = None
        self._price = [0.0] * len(self.goals(0.0))
        self.mask()  # raises where the minimum does not fit

    def _check_time(self, limit: TimeLimit) -> None:
        gates = self.gates
        limit.table.check_fits(dict(zip(site_labels(gates.sites), gates.sizes, strict=True)), gates.unit)
        if not self.is_enforced or gates.is_learned is not None:
            family = "gates of some kinds alone" if self.is_enforced else gates.family
            raise GateError(
                f"the budget is {limit.milliseconds:.4g} ms, but {family} "
                "are not held to a time; use hard-concrete gates of all kinds, or give a number of heads"
            )

    @property
    def is_enforced(self) -> bool:
        """Whether gates are held to the schedule after every step."""
        return isinstance(self.gates.learned, HardConcrete)

    def quota_of(self, kind: str) -> int | None:
        """Which of the prices and goals a kind of gates has; None for one that the budget leaves whole."""
        if not self.schedule.kinds:
            return 0
        return self.schedule.kinds.index(kind) if kind in self.schedule.kinds else None

    def goals(self, ramp: float) -> list[float]:
        """Return the expected open gates that the schedule asks for at a ramp of 0 to 1, in all or of each budgeted kind."""
        return self.schedule.goals(ramp)

    def step_(self, progress: float, optimizer: Optimizer | None = None) -> None:
        """After an optimiser step, bring the gates to where they are to be; nothing happens once their mask is fixed.

        The two top-k families change on their way: bring them to its beginning with ``step_(0)`` before the loop.

        Args:
            progress: share of the pruning that is done, 0 to 1.
            optimizer: of the gates; see :meth:`enforce_`.

        Raises:
            GateError: for a progress outside 0 to 1.
        """
        if not 0 <= progress <= 1:
            raise GateError(f"progress is {progress}; expected the share of the pruning that is done, from 0 to 1")
        if self.gates.mode != "masked":
            done = ramped(progress, self.ramp)
            self.enforce_(done, optimizer)
            self.gates.learned.progress = done

    @torch.no_grad()
    def enforce_(self, ramp: float, optimizer: Optimizer | None = None) -> None:
        """After an optimiser step, hold the gates to their schedule at a ramp of 0 to 1; at 0 only to their limits. The
        optimiser gets one second moment for all gates; see :func:`rate_of_gates_`."""
        learned = self.gates.learned
        learned.clamp_()
        if not isinstance(learned, HardConcrete) or ramp == 0:
            return
        log_alpha, stretch = self.gates.log_alpha, learned.stretch
        rate = GateRate(1.0) if optimizer is None else rate_of_gates_(optimizer, self.gates)
        gradient, paid = l0_gradient(log_alpha, stretch), []
        for costs, total, expected in self._quotas(self.goals(ramp), stretch):
            paid.append(solve_price(log_alpha, expected, stretch, gradient=gradient, costs=costs, total=total))
            slopes = gradient if costs is None else (gradient * costs).to(gradient)
            log_alpha.addcmul_(slopes, paid[-1], value=-1).clamp_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
        if rate.may_move:  # while it is warmed up, a learning rate may be 0
            self.last_paid = PaidPrices(paid, rate)

    def _quotas(
        self, goals: list[float], stretch: Stretch
    ) -> Iterator[tuple[Tensor | None, Callable[[Tensor], Tensor] | None, float]]:
        """Yield for each price what an open gate costs, ``[gates]``, and what the gates cost together, as :func:`solve_price`
        takes them, and what is expected. Gates without a part in a quota cost nothing."""
        if self.time is not None:
            probability = open_probability(self.gates.log_alpha, stretch)
            yield self.time.to_(probability.device).costs(probability), self.time.time, goals[0]
        elif not self.schedule.kinds:
            yield None, None, goals[0]
        else:
            log_alpha = self.gates.log_alpha
            if self._of_kind is None or self._of_kind[0].device != log_alpha.device:
                kinds = self.gates.kind_index()
                self._of_kind = [(kinds == KINDS.index(kind)).to(log_alpha) for kind in self.schedule.kinds]
            for members, expected in zip(self._of_kind, goals, strict=True):
                yield members, partial(_sum_of, members), expected

    @property
    def price(self) -> list[float]:
        """The prices of the last step. They wait on the device until they are read."""
        if self.last_paid is not None:
            self._price, self.last_paid = self.last_paid.on_host() or self._price, None
        return self._price

    @price.setter
    def price(self, price: list[float]) -> None:
        self._price, self.last_paid = price, None

    def is_arbitrary(self) -> bool:
        """Return whether :meth:`mask` chooses among gates that are all equal, in all or in a kind with a budget of its own."""
        log_alpha, mask = self.gates.log_alpha.detach(), self.mask()
        quotas: list[str | None] = [*self.schedule.kinds] or [None]
        for kind in quotas:
            among = slice(None) if kind is None else self.gates.kind_index() == KINDS.index(kind)
            own, kept = log_alpha[among], mask[among]
            if bool((own == own[0]).all()) and 0 < kept.sum() < len(kept):
                return True
        return False

    def mask(self) -> Tensor:
        """What ``log_alpha`` says now: the 0/1 mask ``[gates]`` of exactly the budget, with the minimum per layer."""
        return self.gates.mask_of(self.gates.log_alpha.detach(), self.budget, minimum_per_layer=self.minimum_per_layer)


WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",
    "LightningOptimizer": "_optimizer",
    "_FabricOptimizer": "_optimizer",
    "_NamedOptimizer": "_optimizer",
    "ZeroRedundancyOptimizer": "optim",
}
"""Optimisers of accelerate, Lightning and PyTorch that hand on their steps, with the attribute of the optimiser inside."""


@dataclass(frozen=True)
class GateRate:
    """How far a steady gradient of 1 moves a gate in one step of the optimiser. It stays on the device until it is read.

    Args:
        learning_rate: The learning rate; in SGD divided by 1 - momentum.
        second: The second moment that all gates share in Adam, a scalar; None where there is none.
        step: The number of Adam's steps.
        beta, eps: Adam's decay of second moments, and what it adds to their root.
    """

    learning_rate: float | Tensor
    second: Tensor | None = None
    step: float | Tensor = 0.0
    beta: float = 0.0
    eps: float = 0.0

    @property
    def may_move(self) -> bool:
        """Whether the rate may be above 0, as far as the host knows."""
        return isinstance(self.learning_rate, Tensor) or self.learning_rate > 0

    def __float__(self) -> float:
        """Return the rate: 0 before Adam's first step, which a gradient scaler may skip."""
        rate, step = float(self.learning_rate), float(self.step)
        if self.second is None:
            return rate
        return rate / (math.sqrt(float(self.second) / (1 - self.beta**step)) + self.eps) if step > 0 else 0.0


@dataclass(frozen=True)
class PaidPrices:
    """The prices of one step, of all gates or of each budgeted kind, times the rate of the gates."""

    paid: list[Tensor]
    rate: GateRate

    def on_host(self) -> list[float]:
        """Return the prices in units of the loss; none at a rate of 0."""
        rate = float(self.rate)
        return [float(one) / rate for one in self.paid] if rate > 0 else []


@torch.no_grad()
def rate_of_gates_(optimizer: Optimizer, gates: HeadGates) -> GateRate:
    """Let all gates have one second moment in Adam, and say how far a steady gradient of 1 moves a gate in one step.

    The mean of the squared gradients takes the place of each gate's own after the step; in the step itself a gate's own square
    still has a part, which fades (a tenth at the tenth step). Plain gradient descent has no second moments. Where processes
    share the optimiser's state out (ZeRO), one of them has that of the gates, and all learn the moment from it.

    Args:
        optimizer: after a step of it; wrappers (:data:`WRAPPERS`) are taken off.
        gates: that it trains; those that are not learned have no part in the mean.
    """
    log_alpha, shares = gates.log_alpha, None
    while wrapper := next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in WRAPPERS), None):
        shares = optimizer if wrapper == "ZeroRedundancyOptimizer" else shares
        optimizer = getattr(optimizer, WRAPPERS[wrapper])
    known = next((kind for kind in (Adam, AdamW, NAdam, SGD) if _steps_as(optimizer, kind)), None)
    groups = (optimizer if shares is None else shares).param_groups if known else []
    group = next((group for group in groups if any(one is log_alpha for one in group["params"])), None)
    if known is not None and group is None:
        raise GateError("the optimiser does not train the gates; make it of parameter_groups(), or of log_alpha too")
    if group is None or group.get("amsgrad") or group.get("momentum", 0) >= 1:
        raise GateError(
            f"the gates are trained by {type(optimizer).__name__}, and how far its steps move them is not known, so that their "
            "price would be wrong; use torch.optim's Adam, AdamW or NAdam without amsgrad, or SGD with a momentum below 1"
        )
    learning_rate = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
    if known is SGD:
        return GateRate(learning_rate * (1 - group["dampening"] * (group["momentum"] > 0)) / (1 - group["momentum"]))
    state = optimizer.state.get(log_alpha)
    second: Tensor | None = None
    step: float | Tensor = 0.0
    if state:
        own = state["exp_avg_sq"]
        second = _mean_of_learned(own, gates.is_learned)
        own.copy_(second)
        step = state["step"].clone()  # the next step changes it in place
    if shares is not None:
        known_to_one = log_alpha.new_tensor([0.0 if second is None else float(second), float(step)])
        distributed.all_reduce(known_to_one, distributed.ReduceOp.MAX, group=shares.process_group)  # type: ignore[attr-defined]
        second, step = known_to_one.unbind()
    if second is None:
        return GateRate(0.0)
    return GateRate(learning_rate, second, step, group["betas"][1], group["eps"])


def _sum_of(members: Tensor, probability: Tensor) -> Tensor:
    """Return the sums ``[n]`` of probabilities ``[n, gates]`` over the gates whose entry of ``[gates]`` is 1."""
    return probability @ members


def _mean_of_learned(values: Tensor, is_learned: Tensor | None) -> Tensor:
    return values.mean() if is_learned is None else (values * is_learned).sum() / is_learned.sum()


def _steps_as(optimizer: object, kind: type[Optimizer]) -> bool:
    """Whether an optimiser is of a class of PyTorch, or of a subclass that has no ``step`` of its own."""
    return isinstance(optimizer, kind) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def ramped(done: float, length: float) -> float:
    """Return how far a ramp has gone, 0 to 1."""
    return min(1.0, done / length) if length > 0 else 1.0


def check_scores(gates: HeadGates, scores: Tensor) -> None:
    """Raises :class:`GateError` for another number of scores than gates, or scores that are negative, infinite or NaN."""
    if scores.shape != gates.mask.shape:
        raise GateError(f"the scores have shape {list(scores.shape)}; expected one for each of {gates.size} {gates.unit}s")
    if bool((impossible := ~scores.isfinite() | (scores < 0)).any()):
        place = int(impossible.nonzero()[0])
        raise GateError(
            f"the score of {gates.unit} {place} is {float(scores[place]):g}; gates start apart by the logarithm of scores, so "
            "expected finite numbers of at least 0, such as HIS"
        )


@torch.no_grad()
def set_apart_(gates: HeadGates, scores: Tensor, spread: float) -> None:
    """Let the gates start apart from each other, by the logarithm of a head's score.

    Args:
        scores: of each gate, ``[gates]``, at least 0 and comparable across layers: HIS normalised by layer
            (:func:`gates.scores.importance.normalise_by_layer`), or what removal costs an optimal brain surgeon
            (:func:`gates.scores.brain_surgeon.brain_surgeon_scores`).
        spread: units of ``log_alpha`` for each standard deviation of the logarithm.

    Raises:
        GateError: for another number of scores than gates, or scores that are negative, infinite or NaN.
    """
    check_scores(gates, scores)
    logarithm = scores.clamp(min=1e-6 * float(scores.max())).log() if scores.any() else scores.clone()
    standard = (logarithm - logarithm.mean()) / logarithm.std().clamp(min=1e-6)
    gates.log_alpha.add_(spread * standard.to(gates.log_alpha))
    gates.learned.clamp_()


# When each gate closed for good: a ranking of all heads from one run with a price, for any budget.

NOT_CLOSED = -1
"""The closing step of a gate that is open."""


def update_closing_step(closing_step: Tensor, values: Tensor, step: int) -> Tensor:
    """Closing steps after one more optimiser step.

    Args:
        closing_step: state before the step, int64 ``[gates]``: the step since which a gate has been closed,
            :data:`NOT_CLOSED` if it is open.
        values: values of the gates in evaluation after the step, ``[gates]``; a gate is closed at 0.

    Returns:
        ``[gates]``. A gate that opened again has its closing step taken back.
    """
    is_first = closing_step == NOT_CLOSED
    return closing_step.masked_fill(is_first, step).masked_fill(values > 0, NOT_CLOSED)


def closing_ranking(closing_step: Tensor, log_alpha: Tensor) -> Tensor:
    """Return ranks ``[gates]``, float64, 0 for the gate to give up first, from closing steps and ``log_alpha``: open gates are
    kept first, then those that closed last; of equals the higher ``log_alpha``, then the earlier."""
    lateness = torch.where(closing_step == NOT_CLOSED, torch.iinfo(torch.int64).max, closing_step.long())
    by_log_alpha = torch.sort(log_alpha.double(), descending=True, stable=True).indices
    order = by_log_alpha[torch.sort(lateness[by_log_alpha], descending=True, stable=True).indices]
    ranks = torch.empty(len(order), dtype=torch.float64, device=order.device)
    ranks[order] = torch.arange(len(order) - 1, -1, -1, dtype=torch.float64, device=order.device)
    return ranks
