"""Hold gates to the schedule of their budget after every optimiser step, and return the mask at the end.

The training loop calls :meth:`BudgetController.step_` after each optimiser step and :meth:`BudgetController.mask` at the end.

Training minimises the task loss plus a price times the expected number of open gates (Voita et al. 2019). The price is solved
for at every step, so that the expectation follows its schedule. The step by the price is separate from the optimiser's moments,
like AdamW's weight decay (Loshchilov and Hutter 2019).

Adam divides the gradient of every gate by its own size. Then important and unimportant gates move equally, and no price can
separate them. So :func:`rate_of_gates_` gives all gates one second moment, like Adam-mini (Zhang et al. 2024).
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


@dataclass(frozen=True)
class BudgetSchedule:
    """Schedule the expected number of open gates, or the expected time, to a budget, in all or for each budgeted kind."""

    kinds: list[str]  # The kinds with a budget; empty where all gates share one
    heads: list[int]  # The number of gates, in all or of each budgeted kind
    first: list[float]  # The expected gates or milliseconds at the start
    last: list[float]  # The expected gates or milliseconds at the end

    @classmethod
    def of_heads(cls, budget: Budget, heads: Mapping[str, int], stretch: Stretch, *, start: float = 1.0) -> BudgetSchedule:
        """Return the schedule to a number of heads.

        ``|log_alpha|`` is limited, so an open probability is never 0 or 1. The schedule ends at the expectation with exactly
        the budgeted gates at the upper limit and the others at the lower. ``start`` is the share of open heads at the start.
        """
        counts = [heads[kind] for kind in budget.per_kind] or [sum(heads.values())]
        kept = list(budget.per_kind.values()) or [budget.total]
        closed, opened = open_probability(torch.tensor([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT]), stretch).tolist()
        last = [k * opened + (count - k) * closed for k, count in zip(kept, counts, strict=True)]
        return cls(list(budget.per_kind), counts, [start * count for count in counts], last)

    def goals(self, progress: float) -> list[float]:
        """Return the expectations, linear in the progress, which is clamped to 0 to 1."""
        done = min(max(progress, 0.0), 1.0)
        return [first + done * (last - first) for first, last in zip(self.first, self.last, strict=True)]


class BudgetController:
    """Lead the gates of a model to a budget, by changes of ``log_alpha`` in place.

    Hard-Concrete gates pay a price. After every optimiser step, they descend along the gradient of the expected number of open
    gates until it meets its schedule. Under a budget in time, they descend along the gradient of the expected time. Gates of
    other families are only clamped to their limits. The two top-k families keep their budget by themselves.

    Args:
        budget: The gates to keep: a count, a fraction, one of these per kind, or a time; see :meth:`Budget.parse`.
        minimum_per_layer: The number of gates that every layer keeps.
        ramp: The share of the pruning after which the schedule reaches the budget. Afterwards the choice settles.
        start: The open fraction at the start of the schedule. None for that of Hard-Concrete gates, and 1 for other families.
            A schedule in time starts from the time of the gates.

    Attributes:
        schedule: The schedule of the expected number of open gates, or of the expected time.
        time: The expected time of gates; None unless the budget is a time.
        last_paid: The prices of the last step, until they are read from the device; None afterwards.
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
        if isinstance(budget, TimeLimit):
            self._check_time(budget)
            self.time = RelaxedTime(budget, stretch)
            first = float(self.time.time(learned.open_probability().detach().cpu()))
            self.schedule = BudgetSchedule([], [gates.size], [first], [self.time.limit])
        else:
            if start is None:
                start = float(learned.open_probability().detach().mean()) if self.is_enforced else 1.0
            self.schedule = BudgetSchedule.of_heads(self.budget, gates.kind_sizes(), stretch, start=start)
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
                f"the budget is {limit.milliseconds:.4g} ms, but {family} are not held to a time; use hard-concrete gates of "
                "all kinds, or give a number of heads"
            )

    @property
    def is_enforced(self) -> bool:
        """Return whether gates are held to the schedule after every step."""
        return isinstance(self.gates.learned, HardConcrete)

    def quota_of(self, kind: str) -> int | None:
        """Return the index of a kind's price and goal; None for a kind that keeps all heads."""
        if not self.schedule.kinds:
            return 0
        return self.schedule.kinds.index(kind) if kind in self.schedule.kinds else None

    def goals(self, ramp: float) -> list[float]:
        """Return the scheduled number of open gates at a ramp from 0 to 1, in all or of each budgeted kind."""
        return self.schedule.goals(ramp)

    def step_(self, progress: float, optimizer: Optimizer | None = None) -> None:
        """Move the gates to their schedule after an optimiser step; do nothing once their mask is fixed.

        The two top-k families change with the progress, so call ``step_(0)`` before the loop.

        Args:
            progress: The finished share of the pruning, from 0 to 1.
            optimizer: The optimiser of the gates; see :meth:`enforce_`.
        """
        if not 0 <= progress <= 1:
            raise GateError(f"progress is {progress}; expected the finished share of the pruning, from 0 to 1")
        if progress > 0 and not self.gates.training:
            raise GateError(
                "the gates are in evaluation mode, in which they learn next to nothing; call train(), or gates.train() to keep "
                "the weights in evaluation mode"
            )
        if self.gates.mode != "masked":
            done = ramped(progress, self.ramp)
            self.enforce_(done, optimizer)
            self.gates.learned.progress = done

    @torch.no_grad()
    def enforce_(self, ramp: float, optimizer: Optimizer | None = None) -> None:
        """Hold the gates to their schedule at a ramp from 0 to 1; at 0, only clamp them to their limits.

        The optimiser gets one second moment for all gates; see :func:`rate_of_gates_`.
        """
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
        if rate.may_move:  # during warmup, a learning rate may be 0
            self.last_paid = PaidPrices(paid, rate)

    def _quotas(
        self, goals: list[float], stretch: Stretch
    ) -> Iterator[tuple[Tensor | None, Callable[[Tensor], Tensor] | None, float]]:
        """Yield the ``costs``, ``total`` and ``expected`` of :func:`solve_price` for each price.

        Gates that do not belong to a quota cost nothing.
        """
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
        """Return the prices of the last step, of all gates or of each budgeted kind, in units of the loss.

        A price is paid for an expected open gate, or for a millisecond. Without an optimiser, it is the price times the
        learning rate. It is 0 where gates pay none. The prices stay on the device until they are read.
        """
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
        """Return the 0/1 mask ``[gates]`` of the highest ``log_alpha`` within the budget, with the minimum per layer."""
        return self.gates.mask_of(self.gates.log_alpha.detach(), self.budget, minimum_per_layer=self.minimum_per_layer)


WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",
    "LightningOptimizer": "_optimizer",
    "_FabricOptimizer": "_optimizer",
    "_NamedOptimizer": "_optimizer",
    "ZeroRedundancyOptimizer": "optim",
}
"""Classes of accelerate, Lightning and PyTorch that wrap an optimiser, and the attribute with the wrapped one."""


@dataclass(frozen=True)
class GateRate:
    """The distance that a constant gradient of 1 moves a gate in one optimiser step, on the device until it is read."""

    learning_rate: float | Tensor  # The learning rate. For SGD, it is divided by 1 - momentum.
    second: Tensor | None = None  # The second moment that all gates share in Adam, a scalar; None without one
    step: float | Tensor = 0.0  # The number of Adam's steps
    # Adam's decay of second moments, and the constant added to their root.
    beta: float = 0.0
    eps: float = 0.0

    @property
    def may_move(self) -> bool:
        """Return whether the rate may be above 0, as far as the host knows."""
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
    """Give all gates one second moment in Adam, and return how far a constant gradient of 1 moves a gate in one step.

    After the step, the mean of the second moments replaces those of the gates. In the step itself, a gate's own square still
    has a part, which fades (a tenth at the tenth step). Under ZeRO, one process has the state of the gates and shares the
    moment with the others.

    Args:
        optimizer: The optimiser after its step. Wrappers (:data:`WRAPPERS`) are removed.
        gates: The gates that it trains. Gates that are not learned do not count in the mean.
    """
    log_alpha, shares = gates.log_alpha, None
    while wrapper := next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in WRAPPERS), None):
        shares = optimizer if wrapper == "ZeroRedundancyOptimizer" else shares
        optimizer = getattr(optimizer, WRAPPERS[wrapper])
    known = next((kind for kind in (Adam, AdamW, NAdam, SGD) if _steps_as(optimizer, kind)), None)
    groups = (optimizer if shares is None else shares).param_groups if known else []
    group = next((group for group in groups if any(one is log_alpha for one in group["params"])), None)
    if known is not None and group is None:
        raise GateError("the optimiser does not train the gates; give it parameter_groups(), or log_alpha too")
    if group is None or group.get("amsgrad") or group.get("momentum", 0) >= 1:
        raise GateError(
            f"the gates are trained by {type(optimizer).__name__}, whose step size is unknown, so their price would be wrong; "
            "use torch.optim's Adam, AdamW or NAdam without amsgrad, or SGD with a momentum below 1"
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
    """Return whether an optimiser is of a class of PyTorch, or of a subclass without its own ``step``."""
    return isinstance(optimizer, kind) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def ramped(done: float, length: float) -> float:
    """Return the finished share of a ramp, from 0 to 1."""
    return min(1.0, done / length) if length > 0 else 1.0


def check_scores(gates: HeadGates, scores: Tensor) -> None:
    """Raise :class:`GateError` for another number of scores than gates, or scores that are negative, infinite or NaN."""
    if scores.shape != gates.mask.shape:
        raise GateError(f"the scores have shape {list(scores.shape)}; expected one for each of {gates.size} {gates.unit}s")
    if bool((impossible := ~scores.isfinite() | (scores < 0)).any()):
        place = int(impossible.nonzero()[0])
        raise GateError(
            f"the score of {gates.unit} {place} is {float(scores[place]):g}; expected finite numbers of at least 0, such as "
            "HIS, because gates are initialised from the logarithm of scores"
        )


@torch.no_grad()
def set_apart_(gates: HeadGates, scores: Tensor, spread: float) -> None:
    """Add to ``log_alpha`` in proportion to the standardised logarithm of scores, to initialise gates.

    Args:
        scores: The score of each gate, ``[gates]``, at least 0 and comparable across layers. Examples are HIS normalised by
            layer (:func:`gates.scores.importance.normalise_by_layer`) and the scores of
            :func:`gates.scores.brain_surgeon.brain_surgeon`.
        spread: The units of ``log_alpha`` per standard deviation of the logarithm.
    """
    check_scores(gates, scores)
    logarithm = scores.clamp(min=1e-6 * float(scores.max())).log() if scores.any() else scores.clone()
    standard = (logarithm - logarithm.mean()) / logarithm.std().clamp(min=1e-6)
    gates.log_alpha.add_(spread * standard.to(gates.log_alpha))
    gates.learned.clamp_()


# The step at which each gate closed for good, which ranks all heads from one run with a price, for any budget.

NOT_CLOSED = -1
"""The closing step of a gate that is open."""


def update_closing_step(closing_step: Tensor, values: Tensor, step: int) -> Tensor:
    """Return the closing steps, int64 ``[gates]``, after one more optimiser step. A gate that opened again has none.

    ``values`` are the evaluation values of the gates after the step, ``[gates]``. A gate is closed at 0.
    """
    is_first = closing_step == NOT_CLOSED
    return closing_step.masked_fill(is_first, step).masked_fill(values > 0, NOT_CLOSED)


def closing_ranking(closing_step: Tensor, log_alpha: Tensor) -> Tensor:
    """Return ranks ``[gates]``, float64, 0 for the gate to remove first, from closing steps and ``log_alpha``.

    Open gates rank highest, then those that closed last. Of equal gates, the higher ``log_alpha`` wins, then the earlier gate.
    """
    lateness = torch.where(closing_step == NOT_CLOSED, torch.iinfo(torch.int64).max, closing_step.long())
    by_log_alpha = torch.sort(log_alpha.double(), descending=True, stable=True).indices
    order = by_log_alpha[torch.sort(lateness[by_log_alpha], descending=True, stable=True).indices]
    ranks = torch.empty(len(order), dtype=torch.float64, device=order.device)
    ranks[order] = torch.arange(len(order) - 1, -1, -1, dtype=torch.float64, device=order.device)
    return ranks
