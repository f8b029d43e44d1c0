"""From a method and a budget to the heads that stay, for one seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gates.closing import closing_ranking
from gates.files import replacing
from gates.objective import Budget
from gates.ranking import budget_mask
from training.cache import Cell
from training.cells import Cells
from training.comparison_options import BudgetOption
from training.cost import Cost, measured
from training.methods import Learned, Method
from training.refine import SwapSearch
from training.scorers import SCORERS, Scoring

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Choice:
    """What a method decided.

    Args:
        mask: 0/1 ``[gates]``.
        values: gate values ``[gates]``: the mask, or rescaled.
        start: whose weights settling starts from: the dense cell or a learned one.
        options: of the module, where they differ from the configuration's.
        keep: scores behind the mask ``[gates]``, higher kept first; None for a search without a ranking.
        steps, seconds, peak_memory_mb: what deciding cost.
    """

    mask: Tensor
    values: Tensor
    start: Cell
    options: Mapping[str, Any]
    keep: Tensor | None
    steps: int
    seconds: float
    peak_memory_mb: float | None


class Choices:
    """Decides which heads stay, each decision once.

    Args:
        cells: of the seed.
        budgets: all budgets of the comparison, as options of the module.
        search: how swaps are searched.
        distil: options of the module that ``+distil`` stands for.
    """

    def __init__(self, cells: Cells, budgets: Sequence[BudgetOption], search: SwapSearch, distil: Mapping[str, float]) -> None:
        self.cells, self.search, self.distil = cells, search, dict(distil)
        gates = cells.pruner.gates
        self.sizes = gates.kind_sizes()
        self.smallest = min(budgets, key=lambda value: Budget.parse(value, self.sizes).total)
        self.kinds, self.layers = gates.kind_index().cpu(), gates.layer_index().cpu()
        self.minimum = cells.pruner.hparams["minimum_per_layer"]

    def choose(self, method: Method, budget: BudgetOption) -> Choice:
        """The heads that a method keeps within a budget."""
        options = self.distil if "distil" in method.modifiers else {}
        if method.base == "dense":
            ones = torch.ones(self.cells.pruner.gates.size)
            return Choice(ones, ones, self.cells.dense(), options, None, 0, 0.0, None)
        if method.is_learned:
            choice = self._learned(method.learned, budget, options)
        else:
            choice = self._scored(method.base, budget, options)
        if "swap" in method.modifiers:
            choice = self._swapped(choice, budget)
        if "rescale" in method.modifiers:
            choice = self._rescaled(choice)
        return choice

    def _learned(self, learned: Learned, budget: BudgetOption, options: Mapping[str, Any]) -> Choice:
        trained_for = {"each": budget, "once": self.smallest, "price": None}[learned.decides]
        options = {**learned.options, **options, "budget": trained_for}
        cell = self.cells.learn(options)
        result = cell.result
        keep = torch.tensor(result["log_alpha"])
        if learned.decides == "price":
            keep = closing_ranking(torch.tensor(result["closing_step"]), keep)
        mask, cost = self._mask(keep, budget), [result[name] for name in ("steps", "seconds", "peak_memory_mb")]
        return Choice(mask, mask, cell, options, keep, *cost)

    def _scored(self, base: str, budget: BudgetOption, options: Mapping[str, Any]) -> Choice:
        dense = self.cells.dense()
        alpha, seconds = self._best_alpha(budget) if base == "hies" else (0.5, 0.0)
        cell = self._score_cell(base, budget, alpha)
        mask, keep = torch.tensor(cell.result["mask"]), cell.result["keep"]
        return Choice(
            mask,
            mask,
            dense,
            options,
            None if keep is None else torch.tensor(keep, dtype=torch.float64),
            0,
            cell.result["seconds"] + seconds,
            cell.result["peak_memory_mb"],
        )

    def _score_cell(self, base: str, budget: BudgetOption, alpha: float) -> Cell:
        """The mask of a scored method."""
        dense = self.cells.dense()
        determined_by = {
            "cell": "choose", "dense": dense.key, "method": base, "budget": budget, "minimum_per_layer": self.minimum,
            "alpha": alpha if base == "hies" else None, "seed": self.cells.seed if base == "random" else None,
        }  # fmt: skip

        def make(folder: Path) -> dict[str, Any]:
            scoring = self._scoring()
            passes = scoring.cost_of(base)
            with measured(scoring.device, before=passes) as cost:
                seed = self.cells.seed
                at = Budget.parse(budget, self.sizes)
                mask = scoring.mask(base, at, alpha=alpha, seed=seed, minimum_per_layer=self.minimum)
                keep = scoring.keep(base, alpha=alpha, seed=seed).tolist() if SCORERS[base].ranks else None
            return cost.as_row() | {"mask": mask.tolist(), "keep": keep}

        return self.cells.do(f"scoring by {base}", determined_by, make)

    def _scoring(self) -> Scoring:
        """Scores of the dense model, those known from disk and new ones written there."""
        dense = self.cells.dense()
        pruner = self.cells.with_weights(dense, {})
        known = ScoreFiles(self.cells.cache.path / f"scores-{dense.key}")
        return Scoring(pruner, self.cells.data, self.cells.make_trainer(), known=known)

    def known_scores(self) -> dict[str, Tensor]:
        """Every raw score that was needed so far, by name."""
        return dict(ScoreFiles(self.cells.cache.path / f"scores-{self.cells.dense().key}"))

    def _best_alpha(self, budget: BudgetOption) -> tuple[float, float]:
        """The weight of HIS in ``hies`` with the best post hoc result on the selection split, the first of equals, and the
        seconds that it took to find."""
        metric = f"select_{self.cells.pruner.task.main_metric}"
        tried = {}
        for alpha in ALPHAS:
            mask = torch.tensor(self._score_cell("hies", budget, alpha).result["mask"])
            tried[alpha] = self.cells.post_hoc(mask, splits=("select",)).result
        best = max(ALPHAS, key=lambda alpha: tried[alpha][metric])
        return best, sum(result["seconds"] for result in tried.values())

    def _mask(self, keep: Tensor, budget: BudgetOption) -> Tensor:
        return budget_mask(
            keep,
            Budget.parse(budget, self.sizes),
            kind_index=self.kinds,
            layer_index=self.layers,
            minimum_per_layer=self.minimum,
        )

    def _rescaled(self, choice: Choice) -> Choice:
        """Gate values of least squares in place of ones, on the dense model."""
        determined_by = {"cell": "rescale", "dense": self.cells.dense().key, "mask": choice.mask.tolist()}

        def make(folder: Path) -> dict[str, Any]:
            scoring = self._scoring()
            with measured(scoring.device) as cost:
                values = scoring.rescale(choice.mask)
            return cost.as_row() | {"values": values.tolist()}

        cell = self.cells.do("rescaling", determined_by, make)
        return replace(_with_cost(choice, cell), values=torch.tensor(cell.result["values"]))

    def _swapped(self, choice: Choice, budget: BudgetOption) -> Choice:
        at = Budget.parse(budget, self.sizes)
        cell = self.cells.swap(choice.mask, at, self.search, start=choice.start, options=choice.options)
        mask = torch.tensor(cell.result["mask"])
        return replace(_with_cost(choice, cell), mask=mask, values=mask, keep=None)  # a search ranks no heads


def _with_cost(choice: Choice, cell: Cell) -> Choice:
    """The choice with the cost of a further cell."""
    further = Cost(cell.result["seconds"], cell.result["peak_memory_mb"])
    cost = Cost(choice.seconds, choice.peak_memory_mb).then(further)
    return replace(choice, seconds=cost.seconds, peak_memory_mb=cost.peak_memory_mb)


class ScoreFiles(MutableMapping[str, Tensor]):
    """Scores ``[gates]`` by name, each in a JSON file of its own.

    Args:
        folder: where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Tensor:
        try:
            return torch.tensor(json.loads(self._file(name).read_text(encoding="utf-8")), dtype=torch.float64)
        except FileNotFoundError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, scores: Tensor) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._file(name)) as partial:
            partial.write_text(json.dumps(scores.tolist()), encoding="utf-8")

    def __delitem__(self, name: str) -> None:
        self._file(name).unlink()

    def __iter__(self) -> Iterator[str]:
        return (file.stem for file in sorted(self.folder.glob("*.json")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"
