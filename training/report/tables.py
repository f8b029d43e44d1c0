"""The tables of a report: what every cell shows, and the number as the files have it, by which the table sorts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd
from pandas.api.types import is_numeric_dtype

from training.config.comparison import RETRAINED, is_retrained
from training.report import captions
from training.report.contents import ReportData, is_dense
from training.stats.numbers import CACHE, CLOSED, NONE, counted, duration, listed, number, shown, signed, slug, unit
from training.stats.significance import SEEDS_FOR_A_CLAIM, SIGNIFICANCE, holm
from training.stats.verdict import regime

AGAINST_DENSE = "against_dense"
"""The column of the difference to the dense model."""
MAJORITY = "majority class"
"""The row of always answering the most frequent class, which a model has to exceed."""
TITLES = {
    "mean": "test {metric}", "low": "95 % from", "high": "to", "std": "st. dev.", CACHE: "KV bytes per token",
    CLOSED: "closed by gates", AGAINST_DENSE: "- dense",
    "difference": "difference{unit}", "ahead": "seeds ahead", "least": "least of a seed",
    "p_holm": "p, corrected (Holm)", "jaccard": "Jaccard", "chance_jaccard": "by chance", "kendall": "Kendall",
    "spearman": "Spearman", "bleu": "BLEU", "bleu_interval": "± (95 %)", "bleu_p": "p of BLEU", "chrf": "chrF",
    "chrf_interval": "± (95 %)", "chrf_p": "p of chrF", "forward_examples": "examples forward",
    "backward_examples": "examples backward", "selection_forward_examples": "to select, forward",
    "selection_backward_examples": "to select, backward", "seconds": "time", "peak_memory_mb": "peak memory, MB",
}  # fmt: skip
"""Titles of columns whose names do not say it."""
COSTS = (
    "steps", "forward_examples", "backward_examples", "selection_forward_examples", "selection_backward_examples", "seconds",
    "peak_memory_mb",
)  # fmt: skip
HOW_TESTED = {
    "one": "Of one seed: paired bootstrap over test examples, so that intervals and p values are for this one seed.",
    "few": f"Of 2 to {SEEDS_FOR_A_CLAIM - 1} seeds: not tested; the least and the most are differences of single seeds.",
    "enough": "Tested over seeds and test examples; an interval is of its pair alone, a corrected p of all pairs.",
}
"""How differences are tested, by the number of seeds."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        value: The number in the file; None for text, and for missing numbers.
        note: A small text below.
    """

    text: str
    value: float | int | None = None
    note: str = ""

    @property
    def exact(self) -> str:
        """``value`` with all its digits."""
        return "" if self.value is None else repr(self.value)


@dataclass(frozen=True)
class Column:
    """A column: its name in the file, its title, and whether it holds numbers."""

    name: str
    title: str
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Args:
        name: The name, unique in its section.
        shown: Whether it is open from the start.
        prose: Whether its cells are sentences, whose lines break.
    """

    name: str
    caption: str
    source: str
    columns: list[Column]
    rows: list[list[Cell]]
    shown: bool = True
    prose: bool = False


def tables_of(contents: ReportData) -> dict[str, Table]:
    """Return the tables that the contents suffice for, by name."""
    found = []
    if len(contents.budgets) > 1:
        found += [budget_table(contents, stage) for stage in contents.stages_by_weight]
    if len(contents.summary) and contents.kind == "comparison":
        found.append(results_table(contents))
    if len(contents.comparison):
        found += [experiments_table(contents), cost_table(contents)]
    if contents.statistics is not None:
        found.append(statistics_table(contents, contents.statistics))
    if contents.agreement is not None:
        caption = "Agreement of masks (Jaccard index, against chance) and of rankings; a method with itself: between seeds."
        names = ("method", "other", "budget", "jaccard", "chance_jaccard", "kendall", "spearman")
        found.append(make_table(contents, "agreement", caption, "agreement.csv", names, contents.agreement, shown=False))
    if contents.samples is not None and len(contents.samples):
        found.append(samples_table(contents, contents.samples))
    if contents.significance is not None and len(contents.significance):
        found.append(significance_table(contents, contents.significance))
    return {table.name: table for table in found}


def make_table(
    contents: ReportData, name: str, caption: str, source: str, names: Iterable[str], rows: pd.DataFrame, *, shown: bool = True
) -> Table:
    """Make a table of the named columns, without those that have no values."""
    present = [column for column in names if column in rows and rows[column].notna().any()]
    columns = [Column(column, _title(contents, column), is_numeric_dtype(rows[column])) for column in present]
    cells = [
        [_cell(column, value, contents.metric) for column, value in zip(columns, row, strict=True)]
        for row in rows[present].itertuples(index=False)
    ]
    return Table(name, caption, source, columns, cells, shown)


def _title(contents: ReportData, name: str) -> str:
    if name == "budget":
        return f"{contents.unit}s"
    if name.startswith(("test_", "select_")):
        return name.replace("_", " ") + unit(name.split("_", 1)[1])
    percent = unit(contents.metric)
    return TITLES.get(name, name).format(metric=contents.metric + percent, unit=percent)


def _cell(column: Column, value: object, metric: str) -> Cell:
    if not column.numeric:
        return Cell(str(value))
    if not isinstance(value, (int, float)) or math.isnan(value):
        return Cell(NONE)
    match column.name:
        case "mean" | "low" | "high" | "std":
            text = number(metric, value)
        case "difference" | "least" | "most":
            text = signed(shown(metric, value), 2)
        case name if name == AGAINST_DENSE:
            text = signed(shown(metric, value))
        case "seconds":
            text = duration(value)
        case "p" | "p_holm" | "bleu_p" | "chrf_p":
            text = f"{value:.3f}" if value >= 0.001 else "< 0.001"
        case "bleu" | "chrf" | "bleu_interval" | "chrf_interval":
            text = number("bleu", value)
        case "peak_memory_mb" | "steps":
            text = f"{value:.0f}"
        case name if name == CLOSED:
            text = f"{100 * value:.0f} %"
        case name if name == CACHE or name.endswith("_examples"):
            text = f"{value:,.0f}"
        case name if name.startswith(("test_", "select_")):
            text = number(name.split("_", 1)[1], value) if not name.endswith("_loss") else f"{value:.4f}"
        case _:
            text = str(value) if isinstance(value, int) else f"{value:.2f}" if value % 1 else f"{value:.0f}"
    return Cell(text, value)


def results_table(contents: ReportData) -> Table:
    """Return the main metric on the test split, with its interval, per stage, method and budget."""
    names = ("method", "stage", "budget", "mean", "low", "high", AGAINST_DENSE, "std", "seeds", CACHE, CLOSED)
    rows, few = with_difference(contents.summary, "mean", ["stage"]), len(contents.budgets) < 2
    if contents.majority is not None:
        rows = pd.concat([rows, pd.DataFrame([{"method": MAJORITY, "stage": NONE, "mean": contents.majority}])])
    caption = f"Test {contents.metric} per stage, method and {contents.unit}s kept. Column titles sort."
    return make_table(contents, "results", caption, "summary.csv", names, rows, shown=few)


def with_difference(rows: pd.DataFrame, column: str, keys: list[str]) -> pd.DataFrame:
    """Add the difference of a column to the first row of the dense model with the same keys."""
    known = [key for key in keys if key in rows]
    if column not in rows or not known:
        return rows
    dense = rows[rows["method"] == "dense"].drop_duplicates(known).set_index(known)[column].rename("of_dense")
    difference = rows[column] - rows.join(dense, on=known)["of_dense"]
    return rows.assign(**{AGAINST_DENSE: difference.where(~is_dense(rows))})


def budget_table(contents: ReportData, stage: str) -> Table:
    """Return a stage's means by method and heads kept, with the ends of their intervals."""
    metric = contents.metric
    rows = with_difference(contents.summary[contents.summary["stage"] == stage], "mean", ["stage"])
    budgets = sorted({int(budget) for budget in rows["budget"]}, reverse=True)
    columns = [Column("method", "method", numeric=False)]
    columns += [Column(f"mean:{budget}", contents.label(budget)) for budget in budgets]
    found = {(row["method"], int(row["budget"])): row for _, row in rows.iterrows()}
    cells = []
    for method in dict.fromkeys(rows["method"]):
        line = [Cell(str(method))]
        for budget in budgets:
            row = found.get((method, budget))
            if row is None or math.isnan(row["mean"]):
                line.append(Cell(""))
                continue
            has_interval = not math.isnan(row["low"]) and not math.isnan(row["high"])
            note = [f"{number(metric, row['low'])} to {number(metric, row['high'])}"] if has_interval else []
            note += [] if math.isnan(row[AGAINST_DENSE]) else [signed(shown(metric, row[AGAINST_DENSE]))]
            line.append(Cell(number(metric, row["mean"]), float(row["mean"]), "; ".join(note)))
        cells.append(line)
    if contents.majority is not None:
        cells.append([Cell(MAJORITY), *([Cell(number(metric, contents.majority), contents.majority)] * len(budgets))])
    words = f"{captions.words_of(stage)}: test {metric}{unit(metric)}"
    below = ", below it the 95 % interval of the mean" if rows[["low", "high"]].notna().all(axis=None) else ""
    if rows[AGAINST_DENSE].notna().any():
        below += f"{' and' if below else ', below it'} the difference to the dense model"
    caption = f"{words}{below}, by {contents.unit}s kept."
    return Table(f"by_budget_{slug(stage)}", caption, "summary.csv", columns, cells)


def experiments_table(contents: ReportData) -> Table:
    """Return every experiment with all that ``comparison.csv`` says."""
    rows, metric, of_run = contents.comparison, contents.metric, contents.kind == "run"
    measured = [str(name) for name in rows.columns if str(name).startswith(("test_", "select_"))]
    measured.sort(key=lambda name: (name.endswith("_loss"), not name.startswith("test_"), not name.endswith(metric)))
    is_budget = not of_run and "heads" in rows and rows["heads"].equals(rows["budget"])
    counts = [] if is_budget else ["heads"]
    names = ["method", "stage", *counts, CACHE, CLOSED, *([] if of_run else ["seed", "budget"]), *measured]
    names.insert(names.index(f"test_{metric}") + 1 if f"test_{metric}" in names else len(names), AGAINST_DENSE)
    names += [] if of_run else COSTS  # of a run, the table of costs has the same rows
    rows = with_difference(rows, f"test_{metric}", ["stage", "seed"])
    if of_run and AGAINST_DENSE in rows:  # whose dense model may not be retrained
        post_hoc = with_difference(contents.comparison, f"test_{metric}", ["seed"])[AGAINST_DENSE]
        rows = rows.assign(**{AGAINST_DENSE: rows[AGAINST_DENSE].fillna(post_hoc)})
    if stated := contents.metrics.get("majority"):
        scored = {f"test_{name}": value for name, value in stated.items() if f"test_{name}" in rows}
        rows = pd.concat([rows, pd.DataFrame([{"method": MAJORITY, "stage": NONE, **scored}])])
    caption = "Every experiment: choices are made on the selection split, results are those of the test split."
    return make_table(contents, "experiments", caption, "comparison.csv", names, rows, shown=of_run)


def cost_table(contents: ReportData) -> Table:
    """Return the mean cost of an experiment of each stage and method, over seeds and budgets."""
    known = [name for name in COSTS if name in contents.comparison]
    means = contents.comparison.groupby(["method", "stage"], sort=False, as_index=False)[known].mean()
    names = ("method", "stage", *known)
    return make_table(contents, "cost", "The mean cost of an experiment.", "comparison.csv (means)", names, means)


def statistics_table(contents: ReportData, tests: pd.DataFrame) -> Table:
    """Return the differences between methods, of single seeds where there are several, and their tests where there are any."""
    names = ["method", "rival", "stage", "budget", "seeds", "difference"]
    names += ["ahead", "least", "most"] if tests["seeds"].max() > 1 else []
    names += ["low", "high", "p", "p_holm"] if tests["p"].notna().any() else []
    caption = f"Test {contents.metric} of a method less that of its rival at the same budget. " + " ".join(
        HOW_TESTED[name] for name in dict.fromkeys(map(regime, sorted(set(tests["seeds"]))))
    )
    return make_table(contents, "statistics", caption, "statistics.csv", names, tests, shown=False)


# A few translations side by side, and the tests between systems of a run.


def samples_table(contents: ReportData, samples: pd.DataFrame) -> Table:
    """Return the first six sentences with their references, and the translations of :func:`systems_shown`."""
    rows, systems = samples.head(6), systems_shown(contents, samples)
    columns = [Column(name, name, numeric=False) for name in ("source", "reference")]
    columns += [Column(name, method, numeric=False) for method, name in systems.items()]
    cells = [[Cell(text) for text in texts] for texts in rows[[column.name for column in columns]].itertuples(index=False)]
    where = f"{_stage(contents)}, at {contents.focus} heads" if contents.focus else _stage(contents)
    chosen = f" and the translations of {listed(list(systems))} ({where})" if systems else ""
    seed = ", the first seed" if contents.kind == "comparison" else ""
    count = counted(len(rows), "sentence")
    caption = f"The first {count} of the test split with their references{chosen}: greedy decoding{seed}."
    return Table("samples", caption, "samples.tsv", columns, cells, prose=True)


def systems_shown(contents: ReportData, samples: pd.DataFrame) -> dict[str, str]:
    """Return columns of the samples by method: the dense model, the first learned method and its best rival.

    The methods are those of the middle budget, retrained if there are such. A run may have no retrained dense model.
    """
    names, stage = list(samples.columns), _stage(contents)
    dense = [name for at in (stage, "post hoc") for name in names if name.startswith(f"dense.{at}.")]
    found = {"dense" if name.startswith(f"dense.{stage}.") else "dense (post hoc)": name for name in dense[:1]}
    ranked = contents.ranked(stage)
    rivals = [str(name) for name in ranked.get("method", ()) if name not in contents.ours]
    chosen = [*[name for name in contents.methods if name.startswith("learned")][:1], *rivals[:1]]
    return found | {name: column for name in chosen if (column := f"{name}.{stage}.{contents.focus}") in names}


def _stage(contents: ReportData) -> str:
    return next(filter(is_retrained, contents.stages), contents.stages[-1] if contents.stages else RETRAINED)


def significance_table(contents: ReportData, rows: pd.DataFrame) -> Table:
    """Return BLEU and chrF of every system with their intervals, and the p values of their differences from the baseline."""
    names = ("system", "search", "bleu", "bleu_interval", "bleu_p", "chrf", "chrf_interval", "chrf_p")
    parts = []
    for search, of_search in rows.groupby("search", sort=False):
        p = pd.Series(holm(pd.to_numeric(of_search["bleu_p"], errors="coerce").dropna()))
        parts.append(f"{int((p < SIGNIFICANCE).sum())} of {counted(len(p), 'system')} ({search})")
    caption = (
        f"Every system against {listed(sorted(set(map(str, rows['baseline']))))}: paired bootstrap over test sentences (Koehn "
        f"2004), for this one seed. In BLEU p < {SIGNIFICANCE:g} for {' and '.join(parts)} after Holm's correction for their "
        "number; the table has p without it."
    )
    return make_table(contents, "significance", caption, "translations/significance.csv", names, rows, shown=False)
