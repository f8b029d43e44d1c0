"""What a comparison does with every seed, wherever it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.budget import Budget
from training.comparison.cache import ExperimentCache
from training.comparison.experiments import Experiments
from training.comparison.methods import Method
from training.comparison.options import check_budgets
from training.comparison.plan import Planned, plan_of_comparison
from training.comparison.selection import MaskSelector
from training.config import BudgetOption, Setup
from training.setup import open_data


@dataclass(frozen=True)
class Comparison:
    """What a comparison is of.

    Args:
        setup: with any seed.
        methods, budgets, seeds, stages: as they were asked for.
        experiments: where finished experiments lie.
        searches: the further options of :class:`MaskSelector`.
    """

    setup: Setup
    methods: Sequence[Method]
    budgets: Sequence[BudgetOption]
    seeds: Sequence[int]
    stages: Sequence[str]
    experiments: Path
    searches: Mapping[str, Any]

    def plan(self, budgets: Sequence[Budget]) -> list[Planned]:
        """Return what is done for each seed, in the order of the tables.

        Args:
            budgets: The budgets of the model.
        """
        return list(plan_of_comparison(self.methods, budgets, self.stages))

    def of_seed(self, seed: int) -> tuple[Experiments, MaskSelector]:
        """The experiments of a seed on its own data and model, and what chooses masks by them.

        Raises:
            GateError: for budgets that this model cannot have.
        """
        setup = self.setup.with_seed(seed)
        experiments = Experiments(setup, open_data(setup), cache=ExperimentCache(self.experiments))
        selector = MaskSelector(experiments, self.budgets, **self.searches)
        check_budgets(self.budgets, selector.budgets, experiments.pruner.gates.size)
        pruner = experiments.pruner
        for budget in selector.budgets:  # raises where the minimum per layer does not fit
            pruner.steering.mask_within(pruner.gates.log_alpha.detach(), budget)
        return experiments, selector
