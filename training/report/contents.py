"""What a report shows: the tables of a comparison or of a single run, in one form."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from training.config.comparison import STAGES, is_post_hoc
from training.stats.numbers import budget_label, in_brackets
from training.stats.verdict import are_dense

Kind = Literal["comparison", "run"]
COMBINATION = ["stage", "method", "budget"]
"""Columns that name what a mean over seeds is of."""


@dataclass(frozen=True)
class Site:
    """A row of a heat map: an attention module's label, such as ``encoder.3``, and its gates (heads, unless heads share)."""

    label: str
    gates: int

    @property
    def kind(self) -> str:
        return self.label.split(".")[0]


@dataclass(frozen=True)
class Values:
    """A number per gate, with the sites that the gates belong to.

    Args:
        sites: in the order of ``values``.
        values: ``[gates]``.
    """

    sites: tuple[Site, ...]
    values: np.ndarray

    def grid(self) -> np.ndarray:
        """``[sites, gates]``, filled with NaN where sites have fewer gates than the largest."""
        grid = np.full((len(self.sites), max(site.gates for site in self.sites)), np.nan)
        for row, part in zip(grid, self.by_site(), strict=True):
            row[: len(part)] = part
        return grid

    def by_site(self) -> list[np.ndarray]:
        return np.split(self.values, np.cumsum([site.gates for site in self.sites])[:-1])


@dataclass(frozen=True)
class Course:
    """The gates of a learned method over training, the mean of its seeds.

    Args:
        sites: in the order of gates.
        steps: ``[steps]``.
        values: gate values ``[steps, gates]``.
        open: share of seeds in which the gate is open (its value above 0), ``[steps, gates]``.
        seeds: of the mean.
        ends_in_mask: whether the last step is the mask that was made of the gates.
        expected: number of gates that are expected to be open, ``[steps]``; NaN where it was not logged. None: nowhere.
        prices: of an open gate ``[steps]``, under "", or of one of each kind under its name; NaN where it was not logged.
    """

    sites: tuple[Site, ...]
    steps: np.ndarray
    values: np.ndarray
    open: np.ndarray
    seeds: int = 1
    ends_in_mask: bool = False
    expected: np.ndarray | None = None
    prices: dict[str, np.ndarray] = field(default_factory=dict)

    def ending_in(self, mask: np.ndarray) -> Course:
        """The same with one more step: the mask ``[gates]`` (the mean of the seeds'), of the highest gates of those that are
        open."""
        gap = self.steps[-1] - self.steps[-2] if len(self.steps) > 1 else 1
        return replace(
            self,
            steps=np.append(self.steps, self.steps[-1] + gap),
            values=np.vstack([self.values, mask]),
            open=np.vstack([self.open, mask]),
            ends_in_mask=True,
            expected=None if self.expected is None else np.append(self.expected, np.nan),
            prices={kind: np.append(prices, np.nan) for kind, prices in self.prices.items()},
        )

    @property
    def last_trained(self) -> int:
        """Index of the last step of training; the mask has none of its own."""
        return len(self.steps) - 1 - self.ends_in_mask

    def by_site(self) -> np.ndarray:
        """Open gates of each site, ``[steps, sites]``."""
        starts = np.cumsum([0, *(site.gates for site in self.sites[:-1])])
        return np.add.reduceat(self.open, starts, axis=1)

    def last_soft(self) -> int:
        """Index of the last step at which some gate is neither open nor closed; the last step if there is none."""
        soft = ((self.values > 0) & (self.values < 1) & ((self.open == 0) | (self.open == 1))).any(axis=1)
        return int(np.nonzero(soft)[0][-1]) if soft.any() else len(self.steps) - 1


def by_kind(sites: tuple[Site, ...]) -> tuple[tuple[Site, ...], np.ndarray]:
    """The sites kind after kind, as the first of each comes, and where each of their gates was before, ``[gates]``."""
    kinds = list(dict.fromkeys(site.kind for site in sites))
    order = sorted(range(len(sites)), key=lambda at: kinds.index(sites[at].kind))
    places = np.split(np.arange(sum(site.gates for site in sites)), np.cumsum([site.gates for site in sites])[:-1])
    return tuple(sites[at] for at in order), np.concatenate([places[at] for at in order])


@dataclass
class ReportData:
    """A directory's tables; None or empty for what it does not hold, with a sentence in ``missing``.

    Args:
        path: the directory.
        kind: whether ``training compare`` or ``training.fit`` wrote it.
        metrics: its ``metrics.json``.
        metric: the main metric, such as ``accuracy``.
        kinds: heads to keep of the kinds that a budget per kind prunes, by budget; none for budgets of all kinds together.
        comparison: a row per seed, stage, method and budget (heads that were asked for).
        summary: a row per stage, method and budget: seeds, mean, low and high of the main metric on the test split.
        curve: of a run, quality at other budgets, post hoc, on the selection split.
        scores: a row per seed and gate, with the columns ``label``, ``his``, ``entropy`` and others.
        masks: of each method and budget ``[seeds, gates]``.
        searched_again: methods and budgets whose masks without training are other ones, found by a search on the dense weights.
        courses: of each learned method and budget its gates over training.
        prices: of a comparison with prices, a row per seed, method and price: the gates ``open`` in all and in each site.
        samples: for translation the first sentences: ``source``, ``reference`` and, as METHOD.STAGE.BUDGET, what each system
            made of them.
        truth: where the necessary heads are known, what each method found of them (:mod:`training.report.figures`).
        significance: of a run, the paired bootstrap of its translations against the dense model's.
        roles: what each head attends to, a row for each, with its ``kind`` (:func:`training.report.reading.read_roles`).
        attention: of the heads in a few sentences, for a page (:func:`training.report.reading.read_attention`).
        signatures: settings and version of sacrebleu for each of its metrics.
        missing: what the report leaves out and why.
    """

    path: Path
    kind: Kind
    metrics: dict[str, Any] = field(default_factory=dict)
    metric: str = "accuracy"
    kinds: dict[int, dict[str, int]] = field(default_factory=dict)
    comparison: pd.DataFrame = field(default_factory=pd.DataFrame)
    summary: pd.DataFrame = field(default_factory=pd.DataFrame)
    statistics: pd.DataFrame | None = None
    agreement: pd.DataFrame | None = None
    curve: pd.DataFrame | None = None
    scores: pd.DataFrame | None = None
    masks: dict[tuple[str, int], tuple[tuple[Site, ...], np.ndarray]] = field(default_factory=dict)
    searched_again: set[tuple[str, int]] = field(default_factory=set)
    courses: dict[tuple[str, int], Course] = field(default_factory=dict)
    prices: pd.DataFrame | None = None
    samples: pd.DataFrame | None = None
    truth: pd.DataFrame | None = None
    significance: pd.DataFrame | None = None
    roles: pd.DataFrame | None = None
    attention: str | None = None
    signatures: dict[str, str] = field(default_factory=dict)
    verdict: str | None = None
    config: str | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.metrics.get("name") or self.path.resolve().name)

    @property
    def unit(self) -> str:
        """What budgets count: heads, or groups of heads that share keys and values."""
        return str(self.metrics.get("unit") or "head")

    @property
    def lower_is_better(self) -> bool:
        """Whether the best of the main metric is its lowest value."""
        return bool(self.metrics.get("lower_is_better", False))

    @property
    def best_and_worst(self) -> tuple[str, str]:
        """``highest`` and ``lowest``, in the order of what is better."""
        return ("lowest", "highest") if self.lower_is_better else ("highest", "lowest")

    def best_first(self, rows: pd.DataFrame, column: str = "mean") -> pd.DataFrame:
        """Rows by a column of the main metric, equals in their order."""
        return rows.sort_values(column, ascending=self.lower_is_better, kind="stable")

    @property
    def majority(self) -> float | None:
        """What always answering the most frequent class of the test split would score; None for other tasks, and where an
        earlier version wrote the results."""
        stated = self.metrics.get("majority")
        value = stated.get(self.metric) if isinstance(stated, dict) else None
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def size(self) -> int | None:
        """Of the dense model, in the unit of budgets."""
        stated = self.metrics.get("gates", self.metrics.get("heads"))
        dense = self.summary[is_dense(self.summary)] if len(self.summary) else self.summary
        return int(stated) if stated is not None else int(dense["budget"].max()) if len(dense) else None

    def label(self, budget: int) -> str:
        """A budget in words: ``18 heads``, ``106 heads (encoder 10)``, ``18 heads at most, within 12 ms``."""
        within = self.metrics.get("within") or {}
        return budget_label(budget, self.kinds.get(budget, {}), self.unit, within.get(str(budget), ""))

    def of_kinds(self, budget: int) -> str:
        """What a budget says of kinds, in brackets after a space; empty for budgets of all kinds together."""
        return in_brackets(self.kinds.get(budget, {}))

    def axis(self, budgets: list[int]) -> tuple[list[str], str]:
        """Ticks for budgets and the title of their axis: the heads kept of the one kind that all of them prune, or in all."""
        kinds = {tuple(self.kinds.get(budget, ())) for budget in budgets}
        named = kinds.pop() if len(kinds) == 1 else ()
        if len(named) != 1:
            return [str(budget) for budget in budgets], f"{self.unit}s kept"
        return [str(self.kinds[budget][named[0]]) for budget in budgets], f"{named[0]} {self.unit}s kept (the others stay)"

    def prunes(self, site: Site, budget: int) -> bool:
        """Whether heads of a site can go within a budget: under a budget per kind, other kinds stay whole."""
        return not self.kinds.get(budget) or site.kind in self.kinds[budget]

    @property
    def methods(self) -> list[str]:
        """All methods but the dense model, in the order of the table."""
        if not len(self.comparison):
            return list(dict.fromkeys(method for method, _ in self.masks))
        return list(dict.fromkeys(self.comparison.loc[~is_dense(self.comparison), "method"]))

    @property
    def ours(self) -> list[str]:
        """This project's own methods; the others are the rivals."""
        stated = self.metrics.get("ours")
        return (
            list(map(str, stated))
            if isinstance(stated, list)
            else [name for name in self.methods if name.startswith("learned")]
        )

    @property
    def budgets(self) -> list[int]:
        """Budgets of all methods but the dense model, largest first."""
        rows = self.comparison[~is_dense(self.comparison)] if len(self.comparison) else self.comparison
        found = set(rows["budget"]) if len(rows) else {budget for _, budget in self.masks}
        return sorted((int(budget) for budget in found), reverse=True)

    @property
    def focus(self) -> int | None:
        """The middle budget, where pictures of a single budget are drawn."""
        return self.budgets[len(self.budgets) // 2] if self.budgets else None

    @property
    def stages(self) -> list[str]:
        found = set(self.summary["stage"]) if len(self.summary) else set()
        return [stage for stage in STAGES if stage in found] + sorted(found - set(STAGES))

    @property
    def stages_by_weight(self) -> list[str]:
        """The stages of models that were trained on first."""
        return sorted(self.stages, key=is_post_hoc)

    def mean_score(self, name: str) -> Values | None:
        """A raw score of every gate, the mean over seeds; None if it is not there."""
        if self.scores is None or name not in self.scores or not self.scores[name].notna().all():
            return None
        first = self.scores[self.scores["seed"] == self.scores["seed"].iloc[0]]
        by_seed = [rows[name].to_numpy(dtype=float) for _, rows in self.scores.groupby("seed", sort=False)]
        if len({len(values) for values in by_seed}) > 1:
            return None
        sites, order = by_kind(group_labels(first["label"]))
        return Values(sites, np.mean(by_seed, axis=0)[order])

    def kept(self, method: str, budget: int) -> Values | None:
        """Share of seeds in which a method keeps each head, 0 to 1."""
        if (method, budget) not in self.masks:
            return None
        sites, masks = self.masks[method, budget]
        return Values(sites, (masks > 0).mean(axis=0))


def is_dense(rows: pd.DataFrame) -> pd.Series:
    """Which rows are of the model with all its heads: ``dense``, ``dense+distil``."""
    return are_dense(rows["method"])


def group_labels(labels: pd.Series | list[str]) -> tuple[Site, ...]:
    """Sites of consecutive gates with equal labels."""
    return tuple(Site(label, len(list(gates))) for label, gates in groupby(labels))
