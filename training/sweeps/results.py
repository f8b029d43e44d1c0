"""The results of a sweep: the table of its trials, a picture, and the configuration of the best trial."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib.figure import Figure
from optuna.distributions import CategoricalDistribution
from rich.console import Console
from rich.table import Table

from gates.files import replacing
from training.sweeps.space import Sweep
from training.sweeps.study import Trials


def sweep_table(trials: Trials) -> pd.DataFrame:
    """Return one row per trial: number, state, options, heads, metrics of both splits, seconds of its last process, error."""
    rows = []
    for trial in trials.begun():
        result = trial.notes.get("result", {})
        rows.append(
            {"trial": trial.number, "state": trial.state, **trial.values}
            | {name: result[name] for name in ("heads", "all_heads") if name in result}
            | {name: value for name, value in result.items() if name.startswith(("select_", "test_"))}
            | {"seconds": trial.notes.get("seconds"), "error": trial.notes.get("error", "")}
        )
    table = pd.DataFrame(rows, dtype=object)  # values stay as they were drawn
    last = [name for name in ("seconds", "error") if name in table]
    return table[[name for name in table if name not in last] + last]


def write_report(trials: Trials, directory: Path, *, whole: bool = True) -> None:
    """Write sweep.csv, and as a whole report, once there is a result, sweep.png and best.yaml."""
    sweep, table = trials.sweep, sweep_table(trials)
    with replacing(directory / "sweep.csv") as partial:
        table.to_csv(partial, index=False)
    complete = table[table["state"] == "complete"] if len(table) else table
    if complete.empty or not whole:
        return
    with replacing(directory / "sweep.png") as partial:
        slices(complete, sweep).savefig(partial, format="png", dpi=150)
    best = trials.study.best_trial
    (notes,) = [trial.notes for trial in trials.begun() if trial.number == best.number]
    config = yaml.safe_load(notes["config"]) | {"name": f"{sweep.name}-best", "run_dir": None, "existing": "refuse"}
    config["wandb"] |= {"group": None, "name": None}
    head = f"# The best trial of the sweep {sweep.name!r}: trial {best.number}, {sweep.metric} {best.value:.6g}.\n"
    with replacing(directory / "best.yaml") as partial:
        partial.write_text(head + yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def slices(complete: pd.DataFrame, sweep: Sweep) -> Figure:
    """Draw the metric against each searched option, and against the heads kept where trials differ in them.

    The colour of a trial is the number of heads that it kept.
    """
    values, heads = complete[sweep.column].astype(float), complete["heads"].astype(int)
    panels = [*sweep.space, *(["heads"] if heads.nunique() > 1 else [])] or ["trial"]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(1.2 + 3.6 * columns, 0.6 + 2.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, name in zip(grid.flat, panels, strict=False):
        places: list[Any] = complete[name].tolist()
        drawn = sweep.space.get(name)
        if isinstance(drawn, CategoricalDistribution):  # in the file's order, at equal distances
            places = [drawn.choices.index(json.dumps(value)) for value in places]
            axes.set_xticks(range(len(drawn.choices)), list(drawn.choices))
        elif getattr(drawn, "log", False):
            axes.set_xscale("log")
        points = axes.scatter(places, values, c=heads, cmap="viridis", edgecolors="black")
        axes.set(xlabel="heads kept" if name == "heads" else name)
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set(ylabel=f"{sweep.metric} (selection split)")
    figure.colorbar(points, ax=grid, label="heads kept")
    figure.suptitle(f"{sweep.name}: {len(complete)} trials, {'more' if sweep.maximize else 'less'} is better")
    return figure


def show(console: Console, sweep: Sweep, table: pd.DataFrame, best: int, directory: Path) -> None:
    """Print the table of all trials, the best in bold, and the paths of the files."""
    test = sweep.column.replace("select_", "test_", 1)
    titles = {"trial": "trial", "state": "state"} | {name: name.rpartition(".")[2] for name in sweep.space}
    titles |= {"heads": "heads", sweep.column: sweep.metric, test: test.replace("_", "/", 1), "seconds": "s"}
    shown = Table(title=f"{sweep.name}: chosen by {sweep.metric}; test for information")
    for name, title in titles.items():
        shown.add_column(title, justify="left" if name == "state" else "right", overflow="fold")
    for row in table.to_dict("records"):
        shown.add_row(*(_cell(row[name]) for name in titles), style="bold" if row["trial"] == best else None)
    console.print(shown)
    for title, file in {"trials": "sweep.csv", "picture": "sweep.png", "best configuration": "best.yaml"}.items():
        console.print(f"{title}: {directory / file}", soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None or value != value:  # NaN
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
