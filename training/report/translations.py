"""A few translations side by side, and the tests between systems of a run."""

from __future__ import annotations

import pandas as pd

from training.report.contents import Contents, is_dense
from training.report.tables import Cell, Column, Table, plain_table
from training.stats.numbers import counted, listed
from training.stats.significance import SIGNIFICANCE, holm

SHOWN = 6
"""Sentences in the table; the file has more."""


def tables_of(contents: Contents) -> list[Table]:
    """The tables that the contents suffice for; none for tasks without translations."""
    found = []
    if contents.samples is not None and len(contents.samples):
        found.append(samples_table(contents, contents.samples))
    if contents.significance is not None and len(contents.significance):
        found.append(significance_table(contents.significance, contents.metric))
    return found


def samples_table(contents: Contents, samples: pd.DataFrame) -> Table:
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


def systems_shown(contents: Contents) -> dict[str, str]:
    """The dense model, the first learned method and the best of its rivals at the middle budget, trained on with their masks
    where there are such: columns of the samples by method, as far as they are there. A run may have left the dense model as it
    was."""
    assert contents.samples is not None
    names, stage = list(contents.samples.columns), _stage(contents)
    dense = [name for at in (stage, "post hoc") for name in names if name.startswith(f"dense.{at}.")]
    chosen = [next((name for name in contents.methods if name.startswith("learned")), ""), _best_rival(contents, stage)]
    found = {"dense" if name.startswith(f"dense.{stage}.") else "dense (post hoc)": name for name in dense[:1]}
    return found | {name: column for name in chosen if (column := f"{name}.{stage}.{contents.focus}") in names}


def _stage(contents: Contents) -> str:
    return "retrained" if "retrained" in contents.stages or not contents.stages else contents.stages[-1]


def _best_rival(contents: Contents, stage: str) -> str:
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
