"""The results of a sweep: the table of its trials, a picture, and the configuration of the best trial."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import yaml
from matplotlib import pyplot
from optuna.visualization.matplotlib import plot_slice
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
    with replacing(directory / "sweep.png") as partial, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        axes: Any = plot_slice(trials.study, target_name=sweep.metric)
        figure = np.ravel(axes)[0].figure
        figure.set_size_inches(4.0 * len(figure.axes), 4.0)
        figure.savefig(partial, format="png", dpi=150, bbox_inches="tight")
        pyplot.close(figure)
    best = trials.study.best_trial
    (notes,) = [trial.notes for trial in trials.begun() if trial.number == best.number]
    config = yaml.safe_load(notes["config"]) | {"name": f"{sweep.name}-best", "run_dir": None, "existing": "refuse"}
    config["wandb"] |= {"group": None, "name": None}
    head = f"# The best trial of the sweep {sweep.name!r}: trial {best.number}, {sweep.metric} {best.value:.6g}.\n"
    with replacing(directory / "best.yaml") as partial:
        partial.write_text(head + yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


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
