"""``head-gates summary DIRECTORY...``: results as a Markdown table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jsonargparse import Namespace

from gates.errors import GateError
from training.cli.command_line import CommandLine
from training.commands.preflight import check_no_others
from training.config.comparison import STAGES, split_methods
from training.runs.directory import CONFIG
from training.runs.resume import FREE_WHEN_RESUMED, is_among, read_options, same_value
from training.runs.stored import read_json, read_table, read_text
from training.stats.numbers import CACHE, counted, kinds_kept, scale, shown
from training.truth.tables import COLUMNS, OF_FACTS, by_facts, by_method, by_program

# Check that directories whose results are averaged differ only in their seeds.

CELL = ["stage", "method", "heads", "kinds"]
"""The columns whose values a mean has in common."""
IN_THE_CELL = (
    "seed", "seeds", "data.init_args.seed", "budgets", "methods", "stages", "model.budget", "model.gate", "model.swaps",
    "model.refit", "model.pipelined",
)  # fmt: skip
"""Seeds, and options that the columns of a mean show, for example in the name of a method."""
WITHOUT_EFFECT = (
    "experiments", "list_methods", "launcher", "ray_", "data.init_args.eval_batch_size", "trainer.accelerator",
)  # fmt: skip
FREE = {*FREE_WHEN_RESUMED, *IN_THE_CELL, *WITHOUT_EFFECT} - {"ckpt_path", "from_scratch_epochs", "from_scratch_learning_rate"}
"""Those that may change when a run is resumed count if they change results."""


def check_comparable(paths: Sequence[Path], tables: Sequence[pd.DataFrame]) -> None:
    """Check the options of directories that have results in one mean.

    Directories without a configuration, and options that only one of two configurations has, are not compared.
    """
    known: list[tuple[Path, set[tuple[Any, ...]], dict[str, Any]]] = []
    for path, table in zip(paths, tables, strict=True):
        if len(paths) == 1 or not (path / CONFIG).is_file():
            continue
        cells = set(table[CELL].itertuples(index=False, name=None))
        options = read_options(path / CONFIG, mend="start the command that wrote it again")
        for other, its_cells, its_options in known:
            if cells & its_cells:
                _check_options(other, its_options, path, options)
        known.append((path, cells, options))


def _check_options(one: Path, options: dict[str, Any], other: Path, others: dict[str, Any]) -> None:
    for name in sorted(options.keys() & others.keys()):
        first, second = options[name], others[name]
        own = name == "ckpt_path" and first is not None and second is not None  # each seed may continue from its own
        if not own and not is_among(name, FREE) and not same_value(first, second):
            raise GateError(
                f"{str(one)!r} and {str(other)!r} differ in more than their seeds: {name} is {first!r} in the first and "
                f"{second!r} in the second; a mean is taken over seeds of one experiment, so make a table of each"
            )


# What methods cost, as columns of a table: examples that pass the model, to select heads and to retrain with them.

DIRECTIONS = ("forward", "backward")
COST_COLUMNS = [f"{work}, {direction}" for work in ("selection", "retraining") for direction in DIRECTIONS]
NOTE = (
    "Costs are thousands of examples that pass the model forwards and backwards, means over seeds; where budgets differ, from "
    "the most heads to the fewest"
)


def split_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the examples of each row by work and direction, ``[rows]`` in :data:`COST_COLUMNS`; NaN where not counted."""
    found: dict[str, pd.Series] = {}
    for direction in DIRECTIONS:
        names = (f"{direction}_examples", f"selection_{direction}_examples")
        total, selection = (rows[name].astype(float) if name in rows else pd.Series(float("nan"), rows.index) for name in names)
        found |= {f"selection, {direction}": selection, f"retraining, {direction}": total - selection}
    return pd.DataFrame(found)[COST_COLUMNS]


def cost_cells(rows: pd.DataFrame, order: list[Any]) -> pd.DataFrame:
    """Return means over seeds as text, ``[stages and methods, columns]``; columns of retraining only if there was any."""
    means = rows.groupby(["stage", "method", "heads", "kinds"])[COST_COLUMNS].mean()
    if means.isna().all(axis=None):
        raise GateError(
            "--costs is given, but these directories do not say what selecting heads took: their comparison.csv has no column "
            "selection_forward_examples; remove the option"
        )
    if not (means[COST_COLUMNS[2:]] > 0).any(axis=None):
        means = means[COST_COLUMNS[:2]]

    def text(costs: pd.Series) -> str:
        texts = [f"{cost / 1000:,.1f}" for cost in costs.droplevel(["stage", "method"]).reindex(order).dropna()]
        return " / ".join(texts if len(set(texts)) > 1 else texts[:1])

    return means.groupby(level=["stage", "method"], sort=False).agg(text)


UNUSED_WITH = {
    "--verdict": ("--truth", "--metric", "--methods", "--costs"),
    "--truth": ("--metric", "--stage", "--costs"),
}
"""The options that have no effect with each of these options."""


def read_runs(paths: Sequence[Path]) -> pd.DataFrame:
    """Return the rows of all ``comparison.csv`` files."""
    if not paths:
        raise GateError("no directory is given; name some that head-gates fit or head-gates compare wrote")
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
                f"metrics.json or comparison.csv in {str(path)!r} is not as head-gates fit or compare writes it"
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
    """Return mean and standard deviation over seeds as text: a row per stage and method, a column per heads and kinds.

    A cell that lacks some seeds, since they ended with other numbers of heads, says how many it has.
    """
    names = [str(name) for name in rows if str(name).startswith(("select_", "test_", CACHE)) and rows[name].notna().all()]
    if metric not in names:
        have = ", ".join(names) or "there is none"
        raise GateError(f"--metric is {metric!r}; expected one that all of these rows have: {have}")
    values = rows.groupby(["stage", "method", "heads", "kinds"], sort=False)[metric].agg(["mean", "std", "count"]).reset_index()
    for column in ("mean", "std"):
        values[column] = shown(_name(metric), values[column])
    digits = ",.0f" if metric == CACHE else ".3f" if metric.endswith("loss") else ".1f"
    seeds = rows["seed"].nunique()
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
    """Return a summary as a Markdown table, with the costs as further columns. A single stage is named in the first line."""
    levels = [table.columns.get_level_values(name) for name in ("heads", "kinds")]
    titles = [f"{heads} heads" + (f" ({kinds})" if kinds else "") for heads, kinds in zip(*levels, strict=True)]
    table = table.set_axis(titles, axis="columns")
    if costs is not None:
        table = table.join(costs)
    stages = table.index.unique("stage")
    if len(stages) == 1:
        rows, first = [[method] for method in table.index.get_level_values("method")], [f"method, {stages[0]}"]
    else:
        rows, first = list(map(list, table.index)), ["stage", "method"]
    lines = [[*first, *table.columns], ["---"] * len(first) + ["--:"] * len(table.columns)]
    lines += [[*row, *cells] for row, cells in zip(rows, table.to_numpy(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def choose(rows: pd.DataFrame, stage: str | None, methods: Sequence[str] | None) -> pd.DataFrame:
    """Return the rows of one stage and of some methods, these in the order given."""
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
    """Return the table with a line about its content, or the verdict."""
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
    what = f"{options.metric}{scale(_name(options.metric))}"
    if len(seeds) > 1:
        what = f"Mean ± standard deviation over {len(seeds)} seeds ({', '.join(map(str, seeds))}), {what}"
    elif seeds:
        what = f"Seed {seeds[0]}, {what}"
    table = summarise(rows, options.metric)
    costs = cost_cells(rows, list(table.columns)) if options.costs else None
    return f"{markdown(table, costs)}\n\n{what}.{f' {NOTE}.' if options.costs else ''}"


def read_truth(paths: Sequence[Path], what: str) -> pd.DataFrame:
    """Return the rows of ``truth.csv``, or of ``interchange.csv`` for facts, in the one directory."""
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
    """Return a comparison's ``verdict.md``, of one stage or of all, without its headings of first order."""
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
    """Return the metric of a column such as ``test_accuracy``."""
    return column.removeprefix("select_").removeprefix("test_")


def check_unused(given: Sequence[str]) -> None:
    """Raise :class:`GateError` for an option that another one does not use."""
    for option in UNUSED_WITH.keys() & {argument.split("=")[0] for argument in given}:
        check_no_others(given, option, UNUSED_WITH[option])


def show(line: CommandLine) -> None:
    """Print the table or the verdict."""
    check_unused(line.given)
    print(report(line.options))
