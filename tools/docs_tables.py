"""``python -m tools.docs_tables PAGE...``: update the tables of results in documents, or the verdicts of stored comparisons.

A page says between two comments which command makes a table::

    <!-- python -m training summary notebooks/results/sst2_seeds --stage "post hoc" -->
    ...
    <!-- end -->

A table over several tasks has ``python -m tools.docs_tables --tasks FOLDER=NAME... --methods NAMES`` in its comment. The method
``best of three`` in it stands for the refitted heads that ``fit`` keeps.

``--rewrite FOLDER...`` writes ``summary.csv`` and ``verdict.md`` of finished comparisons again, from their rows and the tests
that they have.
"""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gates.errors import GateError
from gates.files import replacing
from training.cli.command_line import parse
from training.commands.options import summary_parser
from training.commands.summary import check_unused, read_runs, report
from training.commands.summary import summarise as cells_of
from training.comparison.methods import CHEAP_RIVALS
from training.config.comparison import split_methods
from training.runs.directory import only_writer
from training.runs.stored import CHECKSUMS, read_json, read_table, remove_checksums, write_checksums
from training.stats.tables import TEST_COLUMNS, rank_methods, summarise
from training.stats.verdict import verdict

BEST = "best of three"
TABLE = re.compile(r"(<!-- python -m (training summary|tools\.docs_tables) ([^\n]*?) -->)\r?\n.*?<!-- end -->", re.DOTALL)


def parser_of() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m tools.docs_tables", description="Update the tables of results in documents.")
    parser.add_argument("pages", type=Path, nargs="*", metavar="PAGE", help="documents to update")
    parser.add_argument("--rewrite", type=Path, nargs="+", default=[], metavar="FOLDER", help="comparisons to write again")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="FOLDER=NAME", help="print a table with a row per comparison")
    parser.add_argument("--stage", default="post hoc", help="the stage of --tasks")
    parser.add_argument("--methods", default="learned", help="the methods of --tasks, separated by commas")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of()
    options = parser.parse_args(arguments)
    try:
        if options.tasks:
            print(table_of_tasks(Path(), options.tasks, options.stage, split_methods(options.methods)))
        for folder in options.rewrite:
            with only_writer(folder):
                rewrite(folder)
        for page in options.pages:
            update(page)
    except GateError as error:
        parser.error(str(error))


def update(page: Path) -> None:
    """Update every table of a document. Nothing is written if a command in it is wrong."""
    with page.open(encoding="utf-8", newline="") as file:  # lines end as before
        text = file.read()
    if not TABLE.search(text):
        raise GateError(f"{str(page)!r} has no table: no line <!-- python -m training summary ... --> with <!-- end --> below")

    def made(match: re.Match[str]) -> str:
        try:
            given = shlex.split(match[3])
            if match[2] == "tools.docs_tables":
                wanted = parser_of().parse_args(given)
                table = table_of_tasks(page.parent, wanted.tasks, wanted.stage, split_methods(wanted.methods))
                return f"{match[1]}\n\n{table}\n\n<!-- end -->"
            options = parse(summary_parser(), given)
            check_unused(given)
            options.runs = [page.parent / run for run in options.runs]
            return f"{match[1]}\n\n{report(options)}\n\n<!-- end -->"
        except ValueError as error:  # a GateError, or quotes that do not close
            raise GateError(f"{str(page)!r} has the command {match[1]!r}, which fails: {error}") from error

    changed = TABLE.sub(made, text)
    with replacing(page) as partial:
        partial.write_bytes(changed.encode())


def best_of_three(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the rows of the heads that ``fit`` keeps, by seed, stage and budget.

    They are the best of three on the selection split: by a metric that is better if higher, and among equals by the loss.
    """
    among = rows[rows["method"].isin(["learned+refit", *CHEAP_RIVALS])]
    best_last = among.sort_values([f"select_{metric}", "select_loss"], ascending=[True, False])
    return best_last.groupby(["seed", "stage", "heads"], as_index=False).tail(1).assign(method=BEST)


def table_of_tasks(base: Path, tasks: Sequence[str], stage: str, methods: Sequence[str]) -> str:
    """Return a Markdown table with a row per comparison: the dense model, and each method at each number of heads.

    Tasks are ``FOLDER=NAME`` with folders relative to ``base``. A folder without the methods at the stage is an error.
    """
    rows: dict[str, dict[tuple[int, str], str]] = {}
    for folder, _, name in (task.rpartition("=") for task in tasks):
        directory = base / folder
        metric = str(read_json(directory / "metrics.json", dict)["main_metric"])
        found = read_runs([directory])
        if BEST in methods:
            found = pd.concat([found, best_of_three(found, metric)], ignore_index=True)
        found = found[(found["stage"] == stage) & found["method"].isin(["dense", *methods])]
        if not set(methods) & set(found["method"]):
            raise GateError(f"{str(directory)!r} has none of the methods {', '.join(methods)} at the stage {stage!r}")
        cells = cells_of(found, f"test_{metric}").droplevel("stage").droplevel("kinds", axis="columns")
        texts = {(int(heads), str(method)): str(cells.at[method, heads]) for heads in cells.columns for method in cells.index}
        rows[name] = {cell: text for cell, text in texts.items() if text}
    order = {method: position for position, method in enumerate(["dense", *methods])}
    columns = sorted({column for row in rows.values() for column in row}, key=lambda column: (-column[0], order[column[1]]))
    titles = [f"{method}, {heads} heads" for heads, method in columns]
    lines = ["| task | " + " | ".join(titles) + " |", "| --- |" + " --: |" * len(columns)]
    lines += [f"| {name} | " + " | ".join(row.get(column, "") for column in columns) + " |" for name, row in rows.items()]
    return "\n".join(lines)


def rewrite(folder: Path) -> None:
    """Write the summary and the verdict of a finished comparison again. The tests, which need predictions, stay."""
    try:
        metrics = read_json(folder / "metrics.json", dict)
        comparison, tests = read_table(folder / "comparison.csv"), read_table(folder / "statistics.csv", needed=TEST_COLUMNS)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GateError(f"{str(folder)!r} does not hold a finished comparison; start its command again") from error
    metric, lower = str(metrics["main_metric"]), bool(metrics.get("lower_is_better", False))
    summary = summarise(comparison, metric)
    check_complete(folder, summary)
    text = verdict(
        summary,
        tests,
        main_metric=metric,
        lower_is_better=lower,
        ours=metrics["ours"],
        ranks=rank_methods(comparison, metric, lower_is_better=lower),
        kinds={int(budget): kinds for budget, kinds in metrics["budgets_by_kind"].items()},
        unit=metrics["unit"],
        within={int(budget): time for budget, time in metrics.get("within", {}).items()},
        majority=metrics.get("majority", {}).get(metric),
    )
    files = {"summary.csv": summary.to_csv(index=False), "verdict.md": text}
    has_checksums = (folder / CHECKSUMS).is_file()
    remove_checksums(folder)
    for name, content in files.items():
        with replacing(folder / name) as partial:
            partial.write_text(content, encoding="utf-8")
    if has_checksums:
        write_checksums(folder)


def check_complete(folder: Path, summary: pd.DataFrame) -> None:
    """Raise :class:`GateError` if the stored summary has seeds that the rows of the comparison lack."""
    if not (folder / "summary.csv").is_file():
        return
    cell = ["stage", "budget", "method"]
    stored = read_table(folder / "summary.csv", needed=(*cell, "seeds")).set_index(cell)["seeds"]
    found = summary.set_index(cell)["seeds"].reindex(stored.index).fillna(0)
    if (lacking := stored[found < stored]).any():
        raise GateError(f"comparison.csv in {str(folder)!r} has lost rows of {lacking.index[0]}; start its command again")


if __name__ == "__main__":
    main()
