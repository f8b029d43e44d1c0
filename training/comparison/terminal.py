"""Print the end of a run: a table, the kept heads and their quality, warnings, and the paths of all outputs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from gates.surgery.remove import why_not_removable
from training.comparison.latency import faster_with_more, latency_sentence
from training.comparison.tables import Results
from training.config.comparison import POST_HOC, STAGES
from training.report.captions import outcome, warnings
from training.runs.directory import RunDirectory
from training.stats.numbers import CACHE, counted, duration, number, shown, signed, unit
from training.stats.verdict import ENOUGH, HINT, is_dense, nothing_learned


def show_run(console: Console, run: RunDirectory, results: Results, described: Mapping[str, Any]) -> None:
    """Print the table of a finished run, its kept heads, warnings, and the paths of its outputs."""
    metrics = run.read_json("metrics.json")
    main, majority = metrics["main_metric"], metrics.get("majority", {})
    console.print(table_of(results, described, main, majority))
    if results.data is not None and (more := [f"{split}_{main}" for split in results.data.more_tests]):
        _say(console, f"on further test data: {', '.join(more)} in comparison.csv")
    for sentence in sentences(described, metrics):
        _say(console, sentence)
    for name, path in {
        "comparison": run.path / "comparison.csv",
        "verdict": run.path / "verdict.md",
        "masks": run.path / "masks",
        "pictures": run.path / "plots",
        "pruned model": run.export,
    }.items():
        console.print(f"{name}: {path}")
    assert results.pruner is not None
    if reason := why_not_removable(results.pruner.gates.sites):
        _say(console, f"the closed heads are zeros in the pruned model and were not removed: {reason}")
    if described["wandb_mode"] == "offline":
        console.print(f"W&B (offline): upload with  wandb sync {run.path / 'wandb'}/offline-run-*")
    if not is_dense(described["method"]) and all(row.method != "random" for row in results.rows):
        added = f"--compare posthoc --existing resume --run_dir {shlex.quote(str(run.path))}"
        _say(console, f"to compare with random heads and more scores, and for a curve, repeat this command with {added}")
    dense = pd.Series([row[f"test_{main}"] for row in described["dense"].values()], dtype=float)
    of_majority = shown(main, majority[main]) if main in majority else None
    nothing = nothing_learned(shown(main, dense.head(1)), of_majority, unit(main))
    for sentence in (*([nothing] if nothing else []), *warnings(metrics)):  # last, where they are seen
        _say(console, f"warning: {sentence}")


def _say(console: Console, sentence: str) -> None:
    console.print(sentence, soft_wrap=True, highlight=False)


def table_of(results: Results, described: Mapping[str, Any], main: str, majority: Mapping[str, float]) -> Table:
    """Return the rows of a run as a table: metrics in percent where that is usual, and the difference to the dense model."""
    assert results.pruner is not None
    rows = [row.as_columns() for row in sorted(results.rows, key=lambda row: STAGES.index(row.stage))]
    of_dense = {row["stage"]: row[f"test_{main}"] for row in rows if is_dense(row["method"])}
    dense = of_dense.get(POST_HOC, float("nan"))
    table = Table(title=f"{described['kept']} of {results.pruner.gates.heads} heads kept; {main}{unit(main)}")
    columns = ["method", "stage", "heads", "select", "test", "- dense", "test loss", "steps", "time"]
    if CACHE in rows[0]:
        columns.insert(7, "KV bytes")
    for name in columns:
        table.add_column(name, justify="left" if name in ("method", "stage") else "right", no_wrap=True)
    if not results.pruner.options.retrain:  # weights that nothing trained, post hoc and in the end
        post_hoc = {row["method"]: row["test_loss"] for row in rows if row["stage"] == POST_HOC}
        rows = [row for row in rows if row["stage"] == POST_HOC or row["test_loss"] != post_hoc.get(row["method"])]
    for row in rows:
        value = row[f"test_{main}"]
        cells = [row["method"], row["stage"], str(row["heads"]), number(main, row[f"select_{main}"]), number(main, value)]
        difference = signed(shown(main, value - of_dense.get(row["stage"], dense)))
        cells += ["" if is_dense(row["method"]) else difference, f"{row['test_loss']:.4f}"]
        cells += [str(row[CACHE])] if CACHE in row else []
        cells += [str(row["steps"]), duration(row["seconds"])]
        table.add_row(*cells, style="bold" if row["method"] == described["method"] else None)
    if main in majority:
        table.add_row("majority class", "", "", "", number(main, majority[main]), signed(shown(main, majority[main] - dense)))
    return table


def sentences(described: Mapping[str, Any], metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kept heads, their quality with its interval, the size and speed, and the closed gates, in sentences."""
    yield from outcome(described, metrics["main_metric"]).values()
    if "latency" in described:
        yield latency_sentence(described["latency"])
        if more := faster_with_more(described["latency"]):
            yield more
    if text := gates_sentence(described["gates"], "a millisecond" if "latency" in described else "an open gate"):
        yield text


def gates_sentence(learned: Mapping[str, Any], unit_of_price: str = "an open gate") -> str:
    """Return how many gates training closed and the final price of a gate; empty if nothing was trained."""
    if not learned or not learned["price"]:  # a price that was given, and the exact top K, leave no gate to a budget
        return ""
    closed, by_gates = learned["closed"], learned["closed_by_gates"]
    text = f"training closed {by_gates} of {counted(closed, 'gate')}"
    text += f", and the remaining {closed - by_gates} closed at its end" if by_gates < closed else ""
    text += f"; {HINT}" if by_gates < ENOUGH * closed else ""
    return f"{text}; price of {unit_of_price} at the end: {', '.join(f'{each:.3g}' for each in learned['price'])}"
