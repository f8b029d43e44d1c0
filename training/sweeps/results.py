"""What a sweep leaves: the table of its trials, a picture, and the configuration of the best."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import yaml
from matplotlib.figure import Figure
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState
from rich.console import Console
from rich.table import Table

from gates.files import replacing
from training.config.yaml_text import read_yaml
from training.runs.directory import CONFIG
from training.sweeps.space import Sweep
from training.sweeps.studies import known_trials

STATES = {TrialState.COMPLETE: "complete", TrialState.FAIL: "failed", TrialState.RUNNING: "running"}


def sweep_table(sweep: Sweep, study: optuna.Study) -> pd.DataFrame:
    """One row per trial: its number, state, options, heads, metrics of both splits, seconds of its (last) process, error."""
    rows = []
    for trial in known_trials(study):
        result = trial.user_attrs.get("result", {})
        rows.append(
            {"trial": trial.number, "state": STATES[trial.state], **sweep.values(trial.params)}
            | {name: result[name] for name in ("heads", "all_heads") if name in result}
            | {name: value for name, value in result.items() if name.startswith(("select_", "test_"))}
            | {"seconds": trial.user_attrs.get("seconds"), "error": trial.user_attrs.get("error", "")}
        )
    table = pd.DataFrame(rows, dtype=object)  # values stay as they were drawn
    last = [name for name in ("seconds", "error") if name in table]
    return table[[name for name in table if name not in last] + last]


def write_table(sweep: Sweep, study: optuna.Study, directory: Path) -> pd.DataFrame:
    """Write sweep.csv; returns its table."""
    table = sweep_table(sweep, study)
    with replacing(directory / "sweep.csv") as partial:
        table.to_csv(partial, index=False)
    return table


def write_report(sweep: Sweep, study: optuna.Study, directory: Path) -> None:
    """Write sweep.csv, and with a first result sweep.png and best.yaml."""
    table = write_table(sweep, study, directory)
    complete = table[table["state"] == "complete"] if len(table) else table
    if complete.empty:
        return
    with replacing(directory / "sweep.png") as partial:
        slices(complete, sweep).savefig(partial, format="png", dpi=150)
    best = study.best_trial
    if CONFIG in best.user_attrs:  # of a study that is shared
        config = yaml.safe_load(best.user_attrs[CONFIG])
    else:
        config = read_yaml(directory / "trials" / str(best.number) / CONFIG, "the configuration of the best trial")
    config |= {"name": f"{sweep.name}-best", "run_dir": None, "existing": "refuse"}
    config["wandb"] |= {"group": None, "name": None}
    head = f"# The best trial of the sweep {sweep.name!r}: trial {best.number}, {sweep.metric} {best.value:.6g}.\n"
    with replacing(directory / "best.yaml") as partial:
        partial.write_text(head + yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def slices(complete: pd.DataFrame, sweep: Sweep) -> Figure:
    """The metric against each searched option, and against the heads kept where trials differ in that; the colour of a
    trial is the number of heads it kept."""
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
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set(ylabel=f"{sweep.metric} (selection split)")
    figure.colorbar(points, ax=grid, label="heads kept")
    figure.suptitle(f"{sweep.name}: {len(complete)} trials, {'more' if sweep.maximize else 'less'} is better")
    return figure


def show(console: Console, sweep: Sweep, table: pd.DataFrame, best: int, directory: Path) -> None:
    """The table of all trials, the best in bold, and the paths of what was written."""
    test = sweep.column.replace("select_", "test_", 1)
    names = ["trial", "state", *sweep.space, "heads", sweep.column, test, "seconds"]
    shown = Table(title=f"{sweep.name}: chosen by {sweep.metric}; test for information")
    titles = {sweep.column: sweep.metric, test: test.replace("_", "/", 1), "seconds": "s"}
    titles |= {name: name.rpartition(".")[2] for name in sweep.space}
    for name in names:
        shown.add_column(titles.get(name, name), justify="left" if name == "state" else "right", overflow="fold")
    for row in table.to_dict("records"):
        shown.add_row(*map(_cell, (row[name] for name in names)), style="bold" if row["trial"] == best else None)
    console.print(shown)
    for title, file in {"trials": "sweep.csv", "picture": "sweep.png", "best configuration": "best.yaml"}.items():
        console.print(f"{title}: {directory / file}", soft_wrap=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return "" if value is None else str(value)
