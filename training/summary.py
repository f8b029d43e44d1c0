"""``python -m training.summary RUN...``: the comparisons of several runs (seeds, budgets) as one Markdown table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gates.errors import GateError


def read_runs(paths: Sequence[Path]) -> pd.DataFrame:
    """The rows of all ``comparison.csv`` files, with the run's budget and seed.

    Raises:
        GateError: for a directory without a finished comparison.
    """
    tables = []
    for path in paths:
        try:
            metrics = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
            table = pd.read_csv(path / "comparison.csv")
        except (OSError, ValueError) as error:
            raise GateError(f"{str(path)!r} does not hold a finished run: metrics.json or comparison.csv is missing") from error
        tables.append(table.assign(budget=metrics["heads"]["kept"], seed=metrics["seed"]))
    return pd.concat(tables, ignore_index=True)


def summarise(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Mean and standard deviation over seeds: one row per stage and method, one column per budget, as text."""
    if metric not in rows:
        raise GateError(f"no column {metric!r} in the runs; they have {', '.join(map(str, rows.filter(like='test_').columns))}")
    rows = rows.drop_duplicates(["method", "stage", "heads", "seed", metric]).copy()
    values = rows.groupby(["stage", "method", "heads"], sort=False)[metric].agg(["mean", "std", "count"]).reset_index()
    values["text"] = [
        f"{100 * mean:.1f}" + (f" ± {100 * spread:.1f}" if count > 1 else "")
        for mean, spread, count in zip(values["mean"], values["std"], values["count"], strict=True)
    ]
    table = values.pivot(index=["stage", "method"], columns="heads", values="text")
    order = list(dict.fromkeys(zip(values["stage"], values["method"], strict=True)))
    return table.reindex(order)[sorted(table.columns, reverse=True)].fillna("")


def markdown(table: pd.DataFrame) -> str:
    """A summary as a Markdown table."""
    heads = [f"{column} heads" for column in table.columns]
    lines = ["| stage | method | " + " | ".join(heads) + " |", "| --- | --- |" + " --: |" * len(heads)]
    for (stage, method), cells in zip(table.index, table.to_numpy(), strict=True):
        lines.append(f"| {stage} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.summary", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--metric", default="test_accuracy", help="column of comparison.csv, shown in percent")
    options = parser.parse_args(arguments)
    try:
        rows = read_runs(options.runs)
        print(markdown(summarise(rows, options.metric)))
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seeds = sorted(rows["seed"].unique())
    print(f"\nMean ± standard deviation over {len(seeds)} seeds ({', '.join(map(str, seeds))}), {options.metric} in percent.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
