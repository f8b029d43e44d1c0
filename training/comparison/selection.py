"""Choose the heads that stay by a method and a budget, for one seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gates.gating.budget import Budget
from gates.search.sampled_masks import spread_ranks
from training.comparison.cache import Experiment
from training.comparison.experiments import Experiments
from training.config import BudgetOption, DrawSearch, PriceOption, RefitOptions, RestartSearch, SwapSearch
from training.runs.cost import NO_COST, Cost, measured
from training.scoring.passes import PASSES, rescale
from training.scoring.scorers import SCORERS, Scores, Work
from training.scoring.subject import ScoringContext

# The heads that a method keeps, and the cost of the choice.


@dataclass(frozen=True)
class Selection:
    """Hold the heads that a method keeps.

    Args:
        values: The gate values ``[gates]``: the mask, or rescaled.
        start: The experiment whose weights retraining starts from: the dense one or a learned one.
        changes: The changes of the options of the module.
        ranking: The scores behind the mask ``[gates]``, higher kept first. None for a search without a ranking.
        alpha: The weight of HIS, for a method that has it.
        refit: The experiment with weights refitted to the mask. None if the weights do not change.
        closed_by_gates: The result of :func:`closed_by_gates`, before any search changed the mask of the gates.
        refits_paid: The masks whose refits are part of the cost.
    """

    mask: Tensor
    values: Tensor
    start: Experiment
    changes: Mapping[str, Any]
    ranking: Tensor | None
    cost: Cost = NO_COST
    alpha: float | None = None
    refit: Experiment | None = None
    closed_by_gates: float | None = None
    refits_paid: frozenset[tuple[float, ...]] = frozenset()

    @property
    def is_refitted(self) -> bool:
        """Whether the weights are refitted to the mask. A refit that is clearly worse than none is not applied."""
        return self.refit is not None and bool(self.refit.result["is_applied"])

    def paid(self, experiment: Experiment) -> Selection:
        """Return the selection with the cost of a further experiment."""
        return replace(self, cost=self.cost.then(Cost.of(experiment.result)))

    def refit_paid(self, mask: Tensor, refit: Experiment) -> Selection:
        """Return the selection with the cost of a refit to a mask, which is paid for once."""
        values = tuple(mask.tolist())
        return self if values in self.refits_paid else replace(self.paid(refit), refits_paid=self.refits_paid | {values})

    def searched(self, experiment: Experiment) -> Selection:
        """Return the selection with the mask of a search, which ranks no heads."""
        mask = torch.tensor(experiment.result["mask"])
        return replace(self.paid(experiment), mask=mask, values=mask, ranking=None)


def closed_by_gates(learned: Mapping[str, Any], mask: Tensor) -> float | None:
    """Return the share of the closed heads that training closed; their rank closed the rest.

    The result is None if the gates were not trained for the budget of this mask.
    """
    if not learned.get("price") or not learned["closed"] or learned["mask"] != mask.tolist():
        return None
    return float(learned["closed_by_gates"] / learned["closed"])


@dataclass(frozen=True)
class PriceRun:
    """Hold the gates that a price leaves open.

    Args:
        price: The price of an open head, or of one of each kind.
        mask: The mask of 0 and 1, ``[gates]``, without regard to a budget.
    """

    method: str
    price: PriceOption
    mask: Tensor


FROM_OBS: dict[str, Any] = {"init_spread": 1.0, "init_score": "obs"}
STARTS: tuple[dict[str, Any], ...] = ({"init_spread": 0.0}, FROM_OBS)
"""The initial gates of the restarts, in turn."""

KNOWN_MASK = {"pipelined": False}
"""The options of retraining with a known mask: the weights need not be frozen first."""


class Chooser(Protocol):
    """A method, as :class:`training.comparison.methods.Method`: its base chooses heads, and its modifiers change the choice."""

    @property
    def modifiers(self) -> frozenset[str]: ...

    @property
    def has_logits(self) -> bool:
        """Whether its ranking are log-weights, whose differences are meaningful."""

    def budget(self, selector: MaskSelector, budget: Budget | None) -> Budget | None:
        """Return the budget of its mask: the given one, unless the method has its own."""

    def choose(self, selector: MaskSelector, budget: Budget | None, distil: Mapping[str, Any]) -> Selection:
        """Return the heads that its base keeps within a budget.

        Args:
            distil: The options of the module for distillation; empty without ``+distil``.
        """


class MaskSelector:
    """Choose the heads that stay. Each choice is made once.

    Args:
        budgets: All budgets of the comparison, as options of the module.
        restarts, draws, swaps: The options of the searches for better masks.
        distil: The options of the module for ``+distil``.
        prices: The prices from which methods with a price choose. Default: the price of the setup.
        as_configured: The learned method that takes the options of the setup, as in a run. Any other learned method takes the
            options of its name.
    """

    def __init__(
        self,
        experiments: Experiments,
        budgets: Sequence[BudgetOption],
        *,
        swaps: SwapSearch | None = None,
        draws: DrawSearch | None = None,
        restarts: RestartSearch | None = None,
        refits: RefitOptions | None = None,
        distil: Mapping[str, float] | None = None,
        prices: Sequence[PriceOption] = (),
        as_configured: str | None = None,
    ) -> None:
        self.experiments, self.swaps, self.draws = experiments, swaps or SwapSearch(), draws or DrawSearch()
        self.restarts, self.refits = restarts or RestartSearch(), refits or RefitOptions()
        self.distil, self.prices, self.as_configured = dict(distil or {}), list(prices), as_configured
        self.price_runs: dict[str, PriceRun] = {}
        self.sizes = experiments.pruner.gates.kind_sizes()
        self.budgets = [Budget.parse(budget, self.sizes) for budget in budgets]
        self.smallest = min(self.budgets, key=lambda budget: budget.total)
        self.minimum = experiments.options.minimum_per_layer

    def select(self, method: Chooser, budget: Budget | None, *, post_hoc: bool = False) -> Selection:
        """Return the heads that a method keeps within a budget.

        Args:
            budget: The budget; None for the dense model and a given mask, which has its own.
            post_hoc: Whether the mask is for the dense model, without training. A search for a better mask then runs on the
                dense weights, and otherwise on those that retraining starts from.
        """
        modifiers, budget = method.modifiers, method.budget(self, budget)
        selection = method.choose(self, budget, self.distil if "distil" in modifiers else {})
        refit = "refit" in modifiers
        if budget is None:  # of the dense model, whose mask nothing changes
            return selection
        if "restarts" in modifiers:
            selection = self._restarted(selection, budget, refit=refit)
        if "draws" in modifiers:
            selection = self._drawn(selection, budget, has_logits=method.has_logits, post_hoc=post_hoc)
        if "swap" in modifiers:
            selection = self._swapped(selection, budget, refit=refit, post_hoc=post_hoc)
        if "rescale" in modifiers:
            selection = self._rescaled(selection)
        if refit:
            selection = self._refitted(selection, post_hoc=post_hoc)
        return selection

    def mask_of(self, ranking: Tensor, budget: Budget) -> Tensor:
        """Return the 0/1 mask ``[gates]`` of the highest scores of a ranking within a budget."""
        return self.experiments.pruner.gates.mask_of(ranking, budget, minimum_per_layer=self.minimum)

    def score(self, base: str, budget: Budget, alpha: float | None) -> Experiment:
        """Return the experiment with the mask of a scored method."""
        seed = self.experiments.seed
        determined_by = {
            "experiment": "score", "dense": self.experiments.dense().key, "method": base,
            "budget": budget.option(self.sizes) if budget.time is None else budget.terms,
            "minimum_per_layer": self.minimum, "alpha": alpha, "seed": seed if base == "random" else None,
        }  # fmt: skip

        def make(folder: Path) -> dict[str, Any]:
            scores = Scores(self.experiments.subject(self.experiments.dense(), {}), self._kept_pass)
            passes = scores.cost_of(base)
            with measured(scores.subject.device, scores.subject.gates, passes) as cost:
                how: dict[str, Any] = {"seed": seed} if alpha is None else {"seed": seed, "alpha": alpha}
                mask = scores.mask(base, budget, minimum_per_layer=self.minimum, **how)
                ranking = scores.ranking(base, **how).tolist() if SCORERS[base].ranks else None
            return cost.as_row() | {"mask": mask.tolist(), "ranking": ranking}

        return self.experiments.do(f"scoring by {base}", determined_by, make)

    def known_scores(self) -> dict[str, Any]:
        """Return every raw score that was needed so far, by name."""
        passes = [self.experiments.cache.get(self._pass_key(name)) for name in PASSES]
        found = {raw: values for one in passes if one is not None for raw, values in one.result["scores"].items()}
        return {raw: found[raw] for raw in sorted(found, key=lambda raw: f"{raw}.")}  # his-batch before his

    def _kept_pass(self, name: str, work: Work) -> dict[str, Any]:
        return self.experiments.do(f"scoring heads: {name}", self._pass_key(name), lambda folder: work()).result

    def _pass_key(self, name: str) -> dict[str, Any]:
        return {"experiment": "pass", "dense": self.experiments.dense().key, "pass": name}

    def best(self, masks: Sequence[Tensor]) -> tuple[int, Cost]:
        """Return the index of the best mask post hoc on the selection split, the first of equals, and the cost.

        A single mask is not evaluated.
        """
        if len(masks) == 1:
            return 0, NO_COST
        task = self.experiments.pruner.task
        tried = [self.experiments.post_hoc(mask, splits=("select",)).result for mask in masks]
        best = max(range(len(masks)), key=lambda index: task.gain(tried[index][f"select_{task.main_metric}"]))
        return best, reduce(Cost.then, map(Cost.of, tried))

    # -- modifiers ---------------------------------------------------------------------------------------------

    def _restarted(self, selection: Selection, budget: Budget, *, refit: bool) -> Selection:
        """Return the best mask of several trainings of the gates, from equal gates and from those of a score in turn.

        The mask of the score itself takes part. The loss on training data decides or, with a refit, the selection split.
        """
        starts = [{**selection.changes, **STARTS[time % len(STARTS)]} for time in range(self.restarts.count)]
        learned = [self.experiments.learn(changes, restart=time) for time, changes in enumerate(starts)]
        masks = [self.mask_of(torch.tensor(experiment.result["log_alpha"]), budget) for experiment in learned]
        if len(learned) > 1:
            learned.append(self.score(FROM_OBS["init_score"], budget, None))
            masks.append(torch.tensor(learned[-1].result["mask"]))
        selection = replace(selection, cost=NO_COST)
        for experiment in learned:
            selection = selection.paid(experiment)
        if refit:
            best, selection = self._best_refit(selection, masks, post_hoc=True)
        else:
            judged = self.experiments.judge(masks, self.restarts)
            best, selection = judged.result["losses"].index(min(judged.result["losses"])), selection.paid(judged)
        closed = closed_by_gates(learned[best].result, masks[best])
        return replace(selection, mask=masks[best], values=masks[best], ranking=None, closed_by_gates=closed)

    def _rescaled(self, selection: Selection) -> Selection:
        """Return the selection with gate values of least squares in place of ones, on the dense model."""
        key = self.experiments.dense().key
        determined_by = {"experiment": "rescale", "dense": key, "mask": selection.mask.tolist()}

        def work(subject: ScoringContext) -> dict[str, Any]:
            return {"values": rescale(subject, selection.mask).tolist()}

        rescaled = self.experiments.measure("rescaling", determined_by, work)
        return replace(selection.paid(rescaled), values=torch.tensor(rescaled.result["values"]))

    def _drawn(self, selection: Selection, budget: Budget, *, has_logits: bool, post_hoc: bool) -> Selection:
        assert selection.ranking is not None
        scores = selection.ranking if has_logits else spread_ranks(selection.ranking)
        start, changes = self._weights(selection, post_hoc)
        drawn = self.experiments.draw(selection.mask, scores, budget, self.draws, start=start, changes=changes)
        return selection.searched(drawn)

    def _swapped(self, selection: Selection, budget: Budget, *, refit: bool, post_hoc: bool) -> Selection:
        """Return the selection refined by swaps; with a refit, only if the refit of the new mask is better."""
        start, changes = self._weights(selection, post_hoc)
        swapped = selection.searched(self.experiments.swap(selection.mask, budget, self.swaps, start=start, changes=changes))
        if not refit:
            return swapped
        masks = [selection.mask, swapped.mask]
        best, swapped = self._best_refit(swapped, masks, post_hoc=post_hoc)
        return replace(swapped, mask=masks[best], values=masks[best])

    def _refitted(self, selection: Selection, *, post_hoc: bool) -> Selection:
        refit = self._refit(selection, selection.mask, post_hoc)
        return replace(selection.refit_paid(selection.mask, refit), refit=refit)

    def _best_refit(self, selection: Selection, masks: Sequence[Tensor], *, post_hoc: bool) -> tuple[int, Selection]:
        """Return the index of the mask with the best refit, the first of equals, and the selection with the cost of all."""
        gains = list[tuple[float, float]]()
        for mask in masks:
            refit = self._refit(selection, mask, post_hoc)
            gains.append(self.goodness(refit.result))
            selection = selection.refit_paid(mask, refit)
        return gains.index(max(gains)), selection

    def goodness(self, refit: Mapping[str, Any]) -> tuple[float, float]:
        """Return the key of a choice among refits: the metric, then the loss, as metrics on small splits are often equal."""
        return self.experiments.pruner.task.gain(refit["reached"]), -refit["loss"]

    def _refit(self, selection: Selection, mask: Tensor, post_hoc: bool) -> Experiment:
        start, changes = (self.experiments.dense(), {}) if post_hoc else (selection.start, selection.changes)
        return self.experiments.refit(mask, self.refits, start=start, changes=changes)

    def _weights(self, selection: Selection, post_hoc: bool) -> tuple[Experiment, Mapping[str, Any]]:
        """Return the experiment whose weights a search uses, and their changes of options.

        Weights that were frozen are those of the dense experiment, so nothing is searched twice.
        """
        on_dense = post_hoc or self.experiments.freezes_weights(selection.changes)
        return (self.experiments.dense(), {}) if on_dense else (selection.start, selection.changes)
