"""The tables of a report: what every cell shows, and the number as the files have it, by which the table sorts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from training.report.contents import ReportData, is_dense
from training.stats.numbers import CACHE, CLOSED, NONE, counted, duration, listed, number, shown, signed, slug, unit
from training.stats.significance import SEEDS_FOR_A_CLAIM, SIGNIFICANCE, holm
from training.stats.verdict import regime

CACHE_TITLE = "KV bytes per token"
CLOSED_TITLE = "closed by gates"
MAJORITY = "majority class"
"""Row of the answer that is always the most frequent class: what a model has to be above."""

HOW_TESTED = {
    "one": "Of one seed: paired bootstrap over test examples, so that intervals and p values are for this one seed.",
    "few": f"Of 2 to {SEEDS_FOR_A_CLAIM - 1} seeds: not tested; the least and the most are differences of single seeds.",
    "enough": "Tested over seeds and test examples; an interval is of its pair alone, a corrected p of all pairs.",
}
"""What is said of differences, by how many seeds they are of."""


@dataclass(frozen=True)
class Cell:
    """What a cell shows.

    Args:
        text: shown.
        value: the number as it is in the file; None for text, and for numbers that are not there.
        note: shown small below it.
        exact: ``value`` with all its digits.
    """

    text: str
    value: float | int | None = None
    note: str = ""

    @property
    def exact(self) -> str:
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
        name: unique in its section.
        caption: what the table is, with its result.
        source: the file that its numbers are from.
        columns: in order.
        rows: a cell for each column.
        shown: whether it is open from the start.
        prose: whether its cells are sentences, whose lines break.
    """

    name: str
    caption: str
    source: str
    columns: list[Column]
    rows: list[list[Cell]]
    shown: bool = True
    prose: bool = False


def results_table(contents: ReportData, caption: str) -> Table:
    """The main metric on the test split, with its interval, per stage, method and budget."""
    metric, percent = contents.metric, unit(contents.metric)
    columns = [
        Column("method", "method", numeric=False),
        Column("stage", "stage", numeric=False),
        Column("budget", f"{contents.unit}s"),
        Column("mean", f"test {metric}{percent}"),
        Column("low", "95 % from"),
        Column("high", "to"),
        Column("std", "st. dev."),
        Column("seeds", "seeds"),
        Column(CACHE, CACHE_TITLE),
        Column(CLOSED, CLOSED_TITLE),
    ]
    rows = contents.summary
    if contents.majority is not None:
        rows = pd.concat([rows, pd.DataFrame([{"method": MAJORITY, "stage": NONE, "mean": contents.majority}])])
    return plain_table("results", caption, _source(contents), columns, rows, metric, shown=len(contents.budgets) < 2)


def budget_table(contents: ReportData, stage: str, caption: str) -> Table:
    """A stage's means by method and heads kept, with the ends of their intervals."""
    metric = contents.metric
    rows = contents.summary[contents.summary["stage"] == stage]
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
            held = not math.isnan(row.get("low", math.nan)) and not math.isnan(row.get("high", math.nan))
            note = f"{number(metric, row['low'])} to {number(metric, row['high'])}" if held else ""
            line.append(Cell(number(metric, row["mean"]), float(row["mean"]), note))
        cells.append(line)
    if contents.majority is not None:
        cells.append([Cell(MAJORITY), *([Cell(number(metric, contents.majority), contents.majority)] * len(budgets))])
    return Table(f"by_budget_{slug(stage)}", caption, _source(contents), columns, cells)


def _source(contents: ReportData) -> str:
    return "summary.csv" if {"low", "high"} <= set(contents.summary.columns) else "comparison.csv, means over seeds"


def experiments_table(contents: ReportData, *, shown: bool) -> Table:
    """Every experiment: all that ``comparison.csv`` says."""
    rows, metric = contents.comparison, contents.metric
    first = [Column("method", "method", numeric=False), Column("stage", "stage", numeric=False), Column("heads", "heads")]
    first += [Column(CACHE, CACHE_TITLE), Column(CLOSED, CLOSED_TITLE)]  # where models generate, and gates learn
    if contents.kind == "comparison":
        first += [Column("seed", "seed"), Column("budget", "budget")]
    measured = [str(name) for name in rows.columns if str(name).startswith(("test_", "select_"))]
    order = sorted(measured, key=lambda name: (name.endswith("_loss"), not name.startswith("test_"), not name.endswith(metric)))
    columns = first + [Column(name, name.replace("_", " ") + unit(name.split("_", 1)[1])) for name in order]
    stated = contents.metrics.get("majority")
    if contents.kind == "comparison":
        columns += _costs(rows)  # of a run, the table of costs has the same rows
    if isinstance(stated, dict):
        scored = {f"test_{name}": value for name, value in stated.items() if f"test_{name}" in rows}
        rows = pd.concat([rows, pd.DataFrame([{"method": MAJORITY, "stage": NONE, **scored}])])
    caption = "Every experiment: choices are made on the selection split, results are those of the test split."
    return plain_table("experiments", caption, "comparison.csv", columns, rows, metric, shown=shown)


def cost_table(contents: ReportData, caption: str) -> Table:
    """Mean cost of an experiment of each stage and method, over seeds and budgets."""
    rows = contents.comparison
    costs = _costs(rows)
    means = rows.groupby(["method", "stage"], sort=False, as_index=False)[[column.name for column in costs]].mean()
    columns = [Column("method", "method", numeric=False), Column("stage", "stage", numeric=False), *costs]
    return plain_table("cost", caption, "comparison.csv (means)", columns, means, contents.metric)


def statistics_table(contents: ReportData) -> Table:
    """Differences between methods: from seed to seed where there are several, and their intervals and p values where there are
    such."""
    tests = contents.statistics
    assert tests is not None
    titles = {
        "method": "method",
        "rival": "rival",
        "stage": "stage",
        "budget": f"{contents.unit}s",
        "seeds": "seeds",
        "difference": f"difference{unit(contents.metric)}",
        "ahead": "seeds ahead",
        "least": "least of a seed",
        "most": "most",
        "low": "95 % from",
        "high": "to",
        "p": "p",
        "p_holm": "p, corrected (Holm)",
    }
    texts, idle = ("method", "rival", "stage"), set()
    if tests["seeds"].max() == 1:
        idle |= {"ahead", "least", "most"}
    if tests["p"].isna().all():
        idle |= {"low", "high", "p", "p_holm"}
    columns = [Column(name, title, numeric=name not in texts) for name, title in titles.items() if name not in idle]
    caption = f"Test {contents.metric} of a method less that of its rival at the same budget. " + " ".join(
        HOW_TESTED[name] for name in dict.fromkeys(map(regime, sorted(set(tests["seeds"]))))
    )
    return plain_table("statistics", caption, "statistics.csv", columns, tests, contents.metric, shown=False)


def agreement_table(contents: ReportData) -> Table:
    """Agreement of masks and of rankings, pair by pair."""
    assert contents.agreement is not None
    titles = {
        "method": "method",
        "other": "other",
        "budget": f"{contents.unit}s",
        "jaccard": "Jaccard",
        "chance_jaccard": "by chance",
        "kendall": "Kendall",
        "spearman": "Spearman",
    }
    columns = [Column(name, title, numeric=name not in ("method", "other")) for name, title in titles.items()]
    caption = "Agreement of masks (Jaccard index, against chance) and of rankings; a method with itself: between seeds."
    source = "agreement.csv" if contents.kind == "comparison" else "masks/*.json"
    return plain_table("agreement", caption, source, columns, contents.agreement, contents.metric, shown=False)


def _costs(rows: pd.DataFrame) -> list[Column]:
    titles = {
        "steps": "steps", "forward_examples": "examples forward", "backward_examples": "examples backward",
        "selection_forward_examples": "to select, forward", "selection_backward_examples": "to select, backward",
        "seconds": "time", "peak_memory_mb": "peak memory, MB",
    }  # fmt: skip
    return [Column(name, title) for name, title in titles.items() if name in rows and rows[name].notna().any()]


def plain_table(
    name: str, caption: str, source: str, columns: list[Column], rows: pd.DataFrame, metric: str, *, shown: bool = True
) -> Table:
    """The columns that the rows have, cell by cell."""
    present = [column for column in columns if column.name in rows and rows[column.name].notna().any()]
    cells = [[_cell(column, value, metric) for column, value in zip(present, row, strict=True)]
             for row in rows[[column.name for column in present]].itertuples(index=False)]  # fmt: skip
    return Table(name, caption, source, present, cells, shown)


def _cell(column: Column, value: object, metric: str) -> Cell:
    if not column.numeric:
        return Cell(str(value))
    if not isinstance(value, (int, float)) or math.isnan(value):
        return Cell(NONE)
    match column.name:
        case "mean" | "low" | "high":
            text = number(metric, value)
        case "std" | "difference" | "least" | "most":
            text = number(metric, value) if column.name == "std" else signed(shown(metric, value), 2)
        case "seconds":
            text = duration(value)
        case "p" | "p_holm" | "bleu_p" | "chrf_p":
            text = f"{value:.3f}" if value >= 0.001 else "< 0.001"
        case "bleu" | "chrf" | "bleu_interval" | "chrf_interval":
            text = number("bleu", value)
        case name if name == CACHE:
            text = f"{value:,.0f}"
        case name if name == CLOSED:
            text = f"{100 * value:.0f} %"
        case "peak_memory_mb" | "steps":
            text = f"{value:.0f}"
        case name if name.endswith("_examples"):
            text = f"{value:,.0f}"
        case name if name.startswith(("test_", "select_")):
            text = number(name.split("_", 1)[1], value) if not name.endswith("_loss") else f"{value:.4f}"
        case _:
            text = str(value) if isinstance(value, int) else f"{value:.2f}" if value % 1 else f"{value:.0f}"
    return Cell(text, value)


# A few translations side by side, and the tests between systems of a run.

SHOWN = 6
"""Sentences in the table; the file has more."""


def tables_of(contents: ReportData) -> list[Table]:
    """The tables that the contents suffice for; none for tasks without translations."""
    found = []
    if contents.samples is not None and len(contents.samples):
        found.append(samples_table(contents, contents.samples))
    if contents.significance is not None and len(contents.significance):
        found.append(significance_table(contents.significance, contents.metric))
    return found


def samples_table(contents: ReportData, samples: pd.DataFrame) -> Table:
    """The first sentences with their references, and what the systems of :func:`systems_shown` made of them."""
    shown, systems = samples.head(SHOWN), systems_shown(contents)
    columns = [Column(name, name, numeric=False) for name in ("source", "reference")]
    columns += [Column(name, method, numeric=False) for method, name in systems.items()]
    rows = [[Cell(text) for text in texts] for texts in shown[[column.name for column in columns]].itertuples(index=False)]
    where = f"{_stage(contents)}, at {contents.focus} heads" if contents.focus else _stage(contents)
    chosen = f" and the translations of {listed(list(systems))} ({where})" if systems else ""
    seed = ", the first seed" if contents.kind == "comparison" else ""
    caption = (
        f"The first {counted(len(rows), 'sentence')} of the test split with their references{chosen}: greedy decoding{seed}."
    )
    return Table("samples", caption, "samples.tsv", columns, rows, prose=True)


def systems_shown(contents: ReportData) -> dict[str, str]:
    """The dense model, the first learned method and the best of its rivals at the middle budget, trained on with their masks
    where there are such: columns of the samples by method, as far as they are there. A run may have left the dense model as it
    was."""
    assert contents.samples is not None
    names, stage = list(contents.samples.columns), _stage(contents)
    dense = [name for at in (stage, "post hoc") for name in names if name.startswith(f"dense.{at}.")]
    chosen = [next((name for name in contents.methods if name.startswith("learned")), ""), _best_rival(contents, stage)]
    found = {"dense" if name.startswith(f"dense.{stage}.") else "dense (post hoc)": name for name in dense[:1]}
    return found | {name: column for name in chosen if (column := f"{name}.{stage}.{contents.focus}") in names}


def _stage(contents: ReportData) -> str:
    return "retrained" if "retrained" in contents.stages or not contents.stages else contents.stages[-1]


def _best_rival(contents: ReportData, stage: str) -> str:
    """The method of the highest mean at the middle budget that is not this project's own; empty if there is none."""
    rows = contents.summary
    if not len(rows):
        return ""
    rows = rows[(rows["stage"] == stage) & (rows["budget"] == contents.focus) & ~is_dense(rows)].dropna(subset=["mean"])
    rows = rows[~rows["method"].isin(contents.ours)]
    return str(rows.set_index("method")["mean"].idxmax()) if len(rows) else ""


def significance_table(rows: pd.DataFrame, metric: str) -> Table:
    """BLEU and chrF of every system with their intervals, and the p values of their differences from the baseline."""
    columns = [Column("system", "system", numeric=False), Column("search", "search", numeric=False)]
    for name, title in (("bleu", "BLEU"), ("chrf", "chrF")):
        columns += [Column(name, title), Column(f"{name}_interval", "± (95 %)"), Column(f"{name}_p", f"p of {title}")]
    parts = []
    for search, of_search in rows.groupby("search", sort=False):
        p = pd.Series(holm(pd.to_numeric(of_search["bleu_p"], errors="coerce").dropna()))
        parts.append(f"{int((p < SIGNIFICANCE).sum())} of {counted(len(p), 'system')} ({search})")
    caption = (
        f"Every system against {listed(sorted(set(map(str, rows['baseline']))))}: paired bootstrap over test sentences (Koehn "
        f"2004), for this one seed. In BLEU p < {SIGNIFICANCE:g} for {' and '.join(parts)} after Holm's correction for their "
        "number; the table has p without it."
    )
    return plain_table("significance", caption, "translations/significance.csv", columns, rows, metric, shown=False)
