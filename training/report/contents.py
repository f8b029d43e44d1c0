"""The content of a report: the tables of a comparison or of a single run, in one form."""

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


@dataclass(frozen=True)
class Site:
    """A row of a heat map: an attention module's label, such as ``encoder.3``, and its gates (heads, unless heads share)."""

    label: str
    gates: int

    @property
    def kind(self) -> str:
        return self.label.split(".")[0]


Sites = tuple[Site, ...]


def split_by_site(sites: Sites, values: np.ndarray) -> list[np.ndarray]:
    """Split values ``[gates]`` into those of each site."""
    return np.split(values, np.cumsum([site.gates for site in sites])[:-1])


@dataclass(frozen=True)
class Values:
    """A number per gate, with the sites that the gates belong to.

    Args:
        values: ``[gates]``.
    """

    sites: Sites
    values: np.ndarray

    def grid(self) -> np.ndarray:
        """Return ``[sites, gates]``, filled with NaN where a site has fewer gates than the largest."""
        grid = np.full((len(self.sites), max(site.gates for site in self.sites)), np.nan)
        for row, part in zip(grid, self.by_site(), strict=True):
            row[: len(part)] = part
        return grid

    def by_site(self) -> list[np.ndarray]:
        return split_by_site(self.sites, self.values)


@dataclass(frozen=True)
class GateHistory:
    """The gates of a learned method over training, the mean of its seeds.

    Args:
        open: The share of seeds in which the gate is open (its value above 0), ``[steps, gates]``.
        ends_in_mask: Whether the last step is the mask that was made of the gates.
        expected: The number of gates that are expected to be open, ``[steps]``. None where it is unknown.
        prices: The price of an open gate ``[steps]``, under "" for all kinds or under the name of each kind.
    """

    sites: Sites
    steps: np.ndarray
    values: np.ndarray
    open: np.ndarray
    seeds: int = 1
    ends_in_mask: bool = False
    expected: np.ndarray | None = None
    prices: dict[str, np.ndarray] = field(default_factory=dict)

    def ending_in(self, mask: np.ndarray) -> GateHistory:
        """Return the same with the mask ``[gates]``, the mean over seeds, as one more step."""
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

    def by_site(self) -> np.ndarray:
        """Return the open gates of each site, ``[steps, sites]``."""
        return np.stack([part.sum(axis=0) for part in split_by_site(self.sites, self.open.T)], axis=1)


def by_kind(sites: Sites) -> tuple[Sites, np.ndarray]:
    """Return the sites kind after kind, in the order of their first occurrence, and where each gate was before, ``[gates]``."""
    kinds = list(dict.fromkeys(site.kind for site in sites))
    order = sorted(range(len(sites)), key=lambda at: kinds.index(sites[at].kind))
    places = split_by_site(sites, np.arange(sum(site.gates for site in sites)))
    return tuple(sites[at] for at in order), np.concatenate([places[at] for at in order])


@dataclass
class ReportData:
    """A directory's tables; None or empty for a table that it lacks, with a sentence in ``missing``.

    Args:
        kind: Whether ``training compare`` or ``training.fit`` wrote it.
        kinds: By budget, the heads to keep of the kinds that a budget per kind prunes.
        summary: A row per stage, method and budget: seeds, mean, low and high of the main metric on the test split.
        curve: The quality of a run at other budgets, post hoc, on the selection split.
        scores: A row per seed and gate, with the columns ``label``, ``his``, ``entropy`` and others.
        masks: The masks of each method and budget, ``[seeds, gates]``.
        searched_again: Methods and budgets whose post hoc masks were searched on the dense weights and differ from ``masks``.
        histories: The gates of each learned method and budget over training.
        prices: A row per seed, method and price: the gates ``open`` in all and in each site.
        samples: Translations: ``source``, ``reference`` and a column METHOD.STAGE.BUDGET for each system.
        truth: What each method found of known necessary heads (:func:`training.report.figures.recoveries`).
        significance: The paired bootstrap of a run's translations against the dense model's.
        attention: The attention of the heads in a few sentences, as JSON (:func:`training.report.reading.read_attention`).
        missing: The missing parts of the report, each with its reason.
    """

    path: Path
    kind: Literal["comparison", "run"]
    metrics: dict[str, Any] = field(default_factory=dict)
    metric: str = "accuracy"
    kinds: dict[int, dict[str, int]] = field(default_factory=dict)
    comparison: pd.DataFrame = field(default_factory=pd.DataFrame)
    summary: pd.DataFrame = field(default_factory=pd.DataFrame)
    statistics: pd.DataFrame | None = None
    agreement: pd.DataFrame | None = None
    curve: pd.DataFrame | None = None
    scores: pd.DataFrame | None = None
    masks: dict[tuple[str, int], tuple[Sites, np.ndarray]] = field(default_factory=dict)
    searched_again: set[tuple[str, int]] = field(default_factory=set)
    histories: dict[tuple[str, int], GateHistory] = field(default_factory=dict)
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
        return bool(self.metrics.get("lower_is_better", False))

    def best_first(self, rows: pd.DataFrame, column: str = "mean") -> pd.DataFrame:
        """Sort rows by a column of the main metric; ties keep their order."""
        return rows.sort_values(column, ascending=self.lower_is_better, kind="stable")

    def ranked(self, stage: str) -> pd.DataFrame:
        """Return the rows of a stage at the middle budget without the dense model, the best first."""
        if not len(self.summary):
            return self.summary
        rows = self.summary[(self.summary["stage"] == stage) & (self.summary["budget"] == self.focus)]
        return self.best_first(rows[~is_dense(rows)].dropna(subset=["mean"]))

    @property
    def majority(self) -> float | None:
        """The score of always answering the most frequent class of the test split; None for other tasks."""
        return self.metrics.get("majority", {}).get(self.metric)

    @property
    def size(self) -> int | None:
        """The size of the dense model, in the unit of budgets."""
        dense = self.summary[is_dense(self.summary)] if len(self.summary) else self.summary
        return self.metrics.get("gates") or (int(dense["budget"].max()) if len(dense) else None)

    def label(self, budget: int) -> str:
        """Return a budget in words: ``18 heads``, ``106 heads (encoder 10)``, ``18 heads at most, within 12 ms``."""
        within = self.metrics.get("within") or {}
        return budget_label(budget, self.kinds.get(budget, {}), self.unit, within.get(str(budget), ""))

    def of_kinds(self, budget: int) -> str:
        """Return the kinds of a budget in brackets, after a space; empty for budgets of all kinds together."""
        return in_brackets(self.kinds.get(budget, {}))

    def axis(self, budgets: list[int]) -> tuple[list[str], str]:
        """Return ticks for budgets and the title of their axis: heads kept of the one kind that they all prune, or in all."""
        kinds = {tuple(self.kinds.get(budget, ())) for budget in budgets}
        named = kinds.pop() if len(kinds) == 1 else ()
        if len(named) != 1:
            return [str(budget) for budget in budgets], f"{self.unit}s kept"
        return [str(self.kinds[budget][named[0]]) for budget in budgets], f"{named[0]} {self.unit}s kept (the others stay)"

    @property
    def methods(self) -> list[str]:
        """All methods but the dense model, in the order of the table."""
        if not len(self.comparison):
            return list(dict.fromkeys(method for method, _ in self.masks))
        return list(dict.fromkeys(self.comparison.loc[~is_dense(self.comparison), "method"]))

    @property
    def ours(self) -> list[str]:
        """This project's own methods; the others are the rivals. Without ``metrics.json`` their names tell."""
        return self.metrics.get("ours") or [name for name in self.methods if name.startswith("learned")]

    @property
    def budgets(self) -> list[int]:
        """The budgets of all methods but the dense model, largest first."""
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
        """The stages, those with training first."""
        return sorted(self.stages, key=is_post_hoc)

    def mean_score(self, name: str) -> Values | None:
        """Return a raw score of every gate, the mean over seeds; None if some gate has none."""
        if self.scores is None or name not in self.scores or not self.scores[name].notna().all():
            return None
        by_seed = self.scores.pivot(index="seed", columns="gate", values=name)
        if by_seed.isna().any(axis=None):
            return None
        sites, order = by_kind(group_labels(self.scores["label"].iloc[: by_seed.shape[1]]))
        return Values(sites, by_seed.to_numpy(dtype=float).mean(axis=0)[order])

    def kept(self, method: str, budget: int) -> Values | None:
        """Return the share of seeds in which a method keeps each head, 0 to 1."""
        if (method, budget) not in self.masks:
            return None
        sites, masks = self.masks[method, budget]
        return Values(sites, (masks > 0).mean(axis=0))

    def kept_at(self, budget: int) -> dict[str, Values]:
        """Return the same for every method that has masks of a budget."""
        return {method: values for method, at in self.masks if at == budget and (values := self.kept(method, at)) is not None}


def is_dense(rows: pd.DataFrame) -> pd.Series:
    """Return which rows are of a model with all its heads: ``dense``, ``dense+distil``."""
    return are_dense(rows["method"])


def group_labels(labels: pd.Series | list[str]) -> Sites:
    """Return the sites of consecutive gates with equal labels."""
    return tuple(Site(label, len(list(gates))) for label, gates in groupby(labels))
