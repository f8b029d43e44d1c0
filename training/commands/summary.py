"""``python -m training summary DIRECTORY...``: results as a Markdown table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jsonargparse import Namespace

from gates.errors import GateError
from training.cli.line import CommandLine
from training.commands.comparable import check_comparable
from training.commands.costs import NOTE, cost_cells, split_costs
from training.commands.unused import check_no_others
from training.config.comparison import split_methods
from training.config.stages import STAGES
from training.runs.stored import read_json, read_table, read_text
from training.stats.numbers import CACHE, counted, kinds_kept, shown, unit
from training.truth.tables import COLUMNS, OF_FACTS, by_facts, by_method, by_program

ALONE = {
    "--verdict": ("--truth", "--metric", "--methods", "--costs"),
    "--truth": ("--metric", "--stage", "--costs"),
}
"""The options that each of these options does not use."""


def read_runs(paths: Sequence[Path]) -> pd.DataFrame:
    """The rows of all ``comparison.csv`` files.

    Raises:
        GateError: for a directory without a finished comparison, and if two have results of the same seed, or of other options.
    """
    if not paths:
        raise GateError("no directory is given; name some that training.fit or training compare wrote")
    tables = []
    for path in paths:
        try:
            metrics: Any = read_json(path / "metrics.json", object)
            table = read_table(path / "comparison.csv", needed=("seed", "stage", "method", "budget", "heads"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise GateError(f"{str(path)!r} does not hold a finished run: metrics.json or comparison.csv is missing") from error
        try:
            known = {int(budget): kinds_kept(kinds) for budget, kinds in metrics.get("budgets_by_kind", {}).items()}
            within = {int(budget): time for budget, time in metrics.get("within", {}).items()}
            known |= {budget: f"at most, within {time}" for budget, time in within.items()}
            kinds = [known.get(budget, "") for budget in table["budget"]]
            of_time = table["budget"].isin(list(within))
            tables.append(
                table[["seed", "stage", "method", "heads"]]
                .assign(heads=table["heads"].mask(of_time, table["budget"]))  # within a time each mask has its own number
                .join(table.filter(regex=f"^(select|test)_|_examples$|^{CACHE}$"))
                .assign(kinds=kinds)
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise GateError(
                f"metrics.json or comparison.csv in {str(path)!r} is not as training.fit or training compare writes it"
            ) from error
    check_comparable(paths, tables)
    rows = pd.concat(tables, ignore_index=True)
    rows = rows.drop_duplicates([name for name in rows if not str(name).endswith("_examples")])
    cell = ["seed", "stage", "method", "heads", "kinds"]
    if (double := rows[rows.duplicated(cell)]).any(axis=None):
        seed, stage, method, heads, _ = double.iloc[0][cell]
        raise GateError(
            f"there are two results of {method}, {stage}, {heads} heads, seed {seed}, and not the same one; "
            "a mean is taken over seeds of one experiment, so make a table of each"
        )
    return rows


def summarise(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Mean and standard deviation over seeds: one row per stage and method, one column per number of heads with their kinds, as
    text. Where a cell has not all seeds, since the others ended with other numbers of heads, it says how many.

    Raises:
        GateError: for a metric that some row lacks, such as that of another task, or a column that is none.
    """
    names = [str(name) for name in rows if str(name).startswith(("select_", "test_", CACHE)) and rows[name].notna().all()]
    if metric not in names:
        have = ", ".join(names) or "there is none"
        raise GateError(f"--metric is {metric!r}; expected one that all of these rows have: {have}")
    values = rows.groupby(["stage", "method", "heads", "kinds"], sort=False)[metric].agg(["mean", "std", "count"]).reset_index()
    for column in ("mean", "std"):
        values[column] = shown(_name(metric), values[column])
    digits, seeds = ",.0f" if metric == CACHE else ".1f", rows["seed"].nunique()
    values["text"] = [
        f"{mean:{digits}}"
        + (f" ± {spread:{digits}}" if count > 1 else "")
        + (f" ({counted(count, 'seed')})" if count < seeds else "")
        for mean, spread, count in zip(values["mean"], values["std"], values["count"], strict=True)
    ]
    table = values.pivot(index=["stage", "method"], columns=["heads", "kinds"], values="text")
    pairs = dict.fromkeys(zip(values["stage"], values["method"], strict=True))
    order = sorted(pairs, key=lambda pair: STAGES.index(pair[0]) if pair[0] in STAGES else len(STAGES))
    return table.reindex(order)[sorted(table.columns, reverse=True)].fillna("")


def markdown(table: pd.DataFrame, costs: pd.DataFrame | None = None) -> str:
    """A summary as a Markdown table.

    Args:
        table: as :func:`summarise` makes it.
        costs: further columns, with a row for each of the table's.
    """
    levels = [table.columns.get_level_values(name) for name in ("heads", "kinds")]
    titles = [f"{heads} heads" + (f" ({kinds})" if kinds else "") for heads, kinds in zip(*levels, strict=True)]
    table = table.set_axis(titles, axis="columns")
    if costs is not None:
        table = table.join(costs)
    lines = ["| stage | method | " + " | ".join(table.columns) + " |", "| --- | --- |" + " --: |" * len(table.columns)]
    for (stage, method), cells in zip(table.index, table.to_numpy(), strict=True):
        lines.append(f"| {stage} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def choose(rows: pd.DataFrame, stage: str | None, methods: Sequence[str] | None) -> pd.DataFrame:
    """The rows of one stage and of some methods, these in the order given.

    Raises:
        GateError: for one that is not there.
    """
    for column, wanted in (("stage", [stage] if stage else []), ("method", methods or [])):
        for name in wanted:
            if wanted.count(name) > 1:
                raise GateError(f"the {column} {name!r} is given twice; give each once")
            if name not in set(rows[column]):
                raise GateError(f"no {column} {name!r} in these runs; they have {', '.join(rows[column].unique())}")
    if stage is not None:
        rows = rows[rows["stage"] == stage]
    if methods is not None:
        rows = pd.concat([rows[rows["method"] == method] for method in methods])
    return rows


def report(options: Namespace) -> str:
    """The table with a line that says what it shows, or the verdict."""
    if options.verdict:
        return "\n\n".join(read_verdict(path, options.stage) for path in map(Path, options.runs))
    runs, methods = [Path(run) for run in options.runs], split_methods(options.methods) if options.methods else None
    if options.truth is not None:
        truth = choose(read_truth(runs, options.truth), None, methods)
        return {"programs": by_program, "methods": by_method, "facts": by_facts}[options.truth](truth)
    rows = read_runs(runs)
    if options.costs:
        rows = rows.join(split_costs(rows))  # of all rows, since one may say what another is made of
    rows = choose(rows, options.stage, methods)
    seeds = sorted(int(seed) for seed in rows["seed"].unique())
    what = f"{options.metric} in percent" if unit(_name(options.metric)) else str(options.metric)
    if len(seeds) > 1:
        what = f"Mean ± standard deviation over {len(seeds)} seeds ({', '.join(map(str, seeds))}), {what}"
    elif seeds:
        what = f"Seed {seeds[0]}, {what}"
    table = summarise(rows, options.metric)
    costs = cost_cells(rows, list(table.columns)) if options.costs else None
    return f"{markdown(table, costs)}\n\n{what}.{f' {NOTE}.' if options.costs else ''}"


def read_truth(paths: Sequence[Path], what: str) -> pd.DataFrame:
    """The rows of ``truth.csv`` in the one directory that is named; of ``interchange.csv`` where facts are asked for.

    Raises:
        GateError: for none or several, or one without known truth.
    """
    if len(paths) != 1:
        raise GateError(f"--truth is of one comparison, but {len(paths)} directories are given; name one")
    facts = what == "facts"
    file, config = ("interchange.csv", "embedded_truth") if facts else ("truth.csv", "known_truth")
    try:
        return read_table(paths[0] / file, needed=OF_FACTS if facts else COLUMNS)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GateError(
            f"{str(paths[0])!r} has no {file}; compare --config configs/{config}.yaml writes one into its directory"
        ) from error


def read_verdict(path: Path, stage: str | None) -> str:
    """What a comparison's ``verdict.md`` says, of one stage or of all, without its headings of first order.

    Raises:
        GateError: if there is no verdict, or none of that stage.
    """
    try:
        text = read_text(path / "verdict.md")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GateError(f"{str(path)!r} does not hold a finished comparison: verdict.md is missing") from error
    if stage is None:
        return re.sub(r"^# .*\n+", "", text).replace("\n## ", "\n#### ").strip()
    found = re.search(
        rf"^## {re.escape(stage)}\n+(.*?)(?=^## |^The mean of the best|\Z)", text, re.DOTALL | re.MULTILINE | re.IGNORECASE
    )
    if found is None:
        raise GateError(f"the verdict in {str(path)!r} says nothing of the stage {stage!r}")
    return found[1].strip()


def _name(column: str) -> str:
    """The metric of a column such as ``test_accuracy``."""
    return column.removeprefix("select_").removeprefix("test_")


def check_unused(given: Sequence[str]) -> None:
    """Raise :class:`GateError` for an option that another one does not use."""
    names = {argument.split("=")[0] for argument in given}
    for option, others in ALONE.items():
        if option in names:
            check_no_others(given, option, others)


def show(line: CommandLine) -> None:
    """Print the table or the verdict."""
    check_unused(line.given)
    print(report(line.options))
