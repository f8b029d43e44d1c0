"""From a method and a budget to the heads that stay, for one seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gates.budget import Budget, budget_mask
from gates.families.closing import closing_ranking
from gates.files import replacing
from gates.search.sampled_masks import spread_ranks
from training.comparison.cache import Cell
from training.comparison.experiments import Cells
from training.comparison.methods import Learned, Method
from training.comparison.options import BudgetOption, PriceOption
from training.runs.cost import Cost, measured
from training.scoring.mask_search import DrawSearch, SwapSearch
from training.scoring.scorers import SCORERS, Scoring

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Choice:
    """What a method decided.

    Args:
        mask: 0/1 ``[gates]``.
        values: gate values ``[gates]``: the mask, or rescaled.
        start: whose weights retraining starts from: the dense cell or a learned one.
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


@dataclass(frozen=True)
class Priced:
    """Which gates a price leaves open.

    Args:
        method: that trained with it.
        price: of an open head, or of one of each kind.
        mask: 0/1 ``[gates]``, without regard to a budget.
    """

    method: str
    price: PriceOption
    mask: Tensor


class Choices:
    """Decides which heads stay, each decision once.

    Args:
        cells: of the seed.
        budgets: all budgets of the comparison, as options of the module.
        swaps, draws: how better masks are searched.
        distil: options of the module that ``+distil`` stands for.
        prices: of open heads, from which methods that train with a price choose; by default the configuration's alone.
    """

    def __init__(
        self,
        cells: Cells,
        budgets: Sequence[BudgetOption],
        swaps: SwapSearch,
        draws: DrawSearch,
        distil: Mapping[str, float],
        prices: Sequence[PriceOption] = (),
    ) -> None:
        self.cells, self.swaps, self.draws = cells, swaps, draws
        self.distil, self.prices = dict(distil), list(prices)
        self.priced: dict[str, Priced] = {}
        gates = cells.pruner.gates
        self.sizes = gates.kind_sizes()
        self.smallest = min(budgets, key=lambda value: Budget.parse(value, self.sizes).total)
        self.kinds, self.layers = gates.kind_index().cpu(), gates.layer_index().cpu()
        self.minimum = cells.pruner.hparams["minimum_per_layer"]

    def choose(self, method: Method, budget: BudgetOption, *, post_hoc: bool = False) -> Choice:
        """The heads that a method keeps within a budget.

        Args:
            post_hoc: whether the mask is for the dense model, without training. A search for a better mask runs on the weights
                that the mask is for: the dense ones then, and otherwise those that training goes on from.
        """
        options = self.distil if "distil" in method.modifiers else {}
        if method.base == "dense":
            ones = torch.ones(self.cells.pruner.gates.size)
            return Choice(ones, ones, self.cells.dense(), options, None, 0, 0.0, None)
        if method.is_learned:
            choice = self._learned(method.learned, budget, options)
        else:
            choice = self._scored(method.base, budget, options)
        if "draws" in method.modifiers:
            has_logits = method.is_learned and method.learned.has_logits
            choice = self._drawn(choice, budget, has_logits=has_logits, post_hoc=post_hoc)
        if "swap" in method.modifiers:
            choice = self._swapped(choice, budget, post_hoc=post_hoc)
        if "rescale" in method.modifiers:
            choice = self._rescaled(choice)
        return choice

    def _learned(self, learned: Learned, budget: BudgetOption, options: Mapping[str, Any]) -> Choice:
        if learned.decides == "price":
            return self._priced({**learned.options, **options}, budget)
        options = {**learned.options, **options, "budget": budget if learned.decides == "each" else self.smallest}
        cell = self.cells.learn(options)
        keep = torch.tensor(cell.result["log_alpha"])
        mask = self._mask(keep, budget)
        return Choice(mask, mask, cell, options, keep, *_cost(cell))

    def _priced(self, options: Mapping[str, Any], budget: BudgetOption) -> Choice:
        """Heads rank by when they closed. Of several prices each is trained with, the mask of the best one is taken, and all of
        them are paid for."""
        prices = self.prices or [self.cells.pruner.hparams["price"]]
        if isinstance(budget, Mapping):  # other kinds of heads stay whole, so that nothing trains beside their closing
            prices = [price if isinstance(price, Mapping) else dict.fromkeys(budget, price) for price in prices]
        tried = [{**options, "price": price} for price in prices]
        cells = [self.cells.learn(one) for one in tried]
        name = "lambda+distil" if options.keys() & self.distil.keys() else "lambda"
        for price, cell in zip(prices, cells, strict=True):
            self.priced[cell.key] = Priced(name, price, torch.tensor(cell.result["mask"]))
        keeps = [
            closing_ranking(torch.tensor(cell.result["closing_step"]), torch.tensor(cell.result["log_alpha"])) for cell in cells
        ]
        masks = [self._mask(keep, budget) for keep in keeps]
        best, seconds = self._best(masks)
        choice = Choice(masks[best], masks[best], cells[best], tried[best], keeps[best], 0, seconds, None)
        for cell in cells:
            choice = _with_cost(choice, cell)
        return choice

    def _scored(self, base: str, budget: BudgetOption, options: Mapping[str, Any]) -> Choice:
        dense = self.cells.dense()
        alpha, seconds = 0.5, 0.0
        if base == "hies":
            masks = [torch.tensor(self._score_cell(base, budget, tried).result["mask"]) for tried in ALPHAS]
            best, seconds = self._best(masks)
            alpha = ALPHAS[best]
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

    def _best(self, masks: Sequence[Tensor]) -> tuple[int, float]:
        """Which of several masks has the best post hoc result on the selection split, the first of equals, and the seconds that
        it took to find; a single one is not tried."""
        if len(masks) == 1:
            return 0, 0.0
        metric = f"select_{self.cells.pruner.task.main_metric}"
        tried = [self.cells.post_hoc(mask, splits=("select",)).result for mask in masks]
        best = max(range(len(masks)), key=lambda index: tried[index][metric])
        return best, sum(result["seconds"] for result in tried)

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

    def _drawn(self, choice: Choice, budget: BudgetOption, *, has_logits: bool, post_hoc: bool) -> Choice:
        assert choice.keep is not None
        scores = choice.keep if has_logits else spread_ranks(choice.keep)
        at = Budget.parse(budget, self.sizes)
        start, options = self._weights(choice, post_hoc)
        return _searched(choice, self.cells.draw(choice.mask, scores, at, self.draws, start=start, options=options))

    def _swapped(self, choice: Choice, budget: BudgetOption, *, post_hoc: bool) -> Choice:
        at = Budget.parse(budget, self.sizes)
        start, options = self._weights(choice, post_hoc)
        return _searched(choice, self.cells.swap(choice.mask, at, self.swaps, start=start, options=options))

    def _weights(self, choice: Choice, post_hoc: bool) -> tuple[Cell, Mapping[str, Any]]:
        """Whose weights a search runs on, and the module's options for them."""
        return (self.cells.dense(), {}) if post_hoc else (choice.start, choice.options)


def _searched(choice: Choice, cell: Cell) -> Choice:
    """The choice with the mask of a search, which ranks no heads."""
    mask = torch.tensor(cell.result["mask"])
    return replace(_with_cost(choice, cell), mask=mask, values=mask, keep=None)


def _with_cost(choice: Choice, cell: Cell) -> Choice:
    """The choice with the cost of a further cell."""
    steps, seconds, peak = _cost(cell)
    cost = Cost(choice.seconds, choice.peak_memory_mb).then(Cost(seconds, peak))
    return replace(choice, steps=choice.steps + steps, seconds=cost.seconds, peak_memory_mb=cost.peak_memory_mb)


def _cost(cell: Cell) -> tuple[int, float, float | None]:
    return cell.result["steps"], cell.result["seconds"], cell.result["peak_memory_mb"]


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
