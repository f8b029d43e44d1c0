"""Send results to W&B: a flat summary, tables, pictures and artifacts of a run, and a group of runs for a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import wandb
from pytorch_lightning.loggers import WandbLogger

from training.comparison.tables import Results
from training.config import WandbOptions
from training.config.comparison import is_retrained
from training.runs.directory import RunDirectory
from training.runs.stored import read_table
from training.runs.tracking import resolved_mode, run_id, start
from training.stats.numbers import slug
from training.stats.tables import COSTS
from training.stats.verdict import are_dense, is_dense

TABLES = ("comparison", "summary", "statistics", "agreement")


def send_run(logger: WandbLogger, run: RunDirectory, results: Results, described: Mapping[str, Any]) -> None:
    """Send the end of a run: its comparison as a Table, its pictures as media, and its results as the summary.

    The verdict is its notes. The pruned model, the masks and the tables are artifacts.
    """
    table = results.table()
    logger.log_table("comparison", dataframe=table)
    for picture in sorted((run.path / "plots").glob("*.png")):
        logger.log_image(f"plots/{picture.stem}", [str(picture)])
    experiment: wandb.Run = logger.experiment
    experiment.notes = (run.path / "verdict.md").read_text(encoding="utf-8")
    majority = run.read_json("metrics.json").get("majority", {})
    of_majority = {f"test/{name}/majority_class": value for name, value in majority.items()}
    experiment.summary.update(summary_of_run(table, described, run.read_json("metrics.json")["main_metric"]) | of_majority)
    name = f"run-{run_id(run.path)}"
    for artifact in (
        folder_artifact(f"{name}-export", "model", run.export),
        folder_artifact(f"{name}-masks", "masks", run.path / "masks"),
        tables_artifact(f"{name}-tables", run.path),
    ):
        experiment.log_artifact(artifact)
    experiment.finish()


def summary_of_run(rows: pd.DataFrame, described: Mapping[str, Any], main_metric: str) -> dict[str, Any]:
    """Return a run's results by flat names, as charts and sweeps use them.

    ``test/METRIC/METHOD`` is the metric of a method after retraining, if it was retrained. ``post_hoc/test/METRIC/METHOD`` is
    the metric before that. ``test/METRIC/drop`` is the loss of quality against the dense model, above 0 for a worse model
    whatever the metric. ``select/METRIC`` is the own method's metric on the selection split, because the last value in training
    is not that of the final model. The final model's test metric has an interval (``low``, ``high``), and so has its difference
    to the dense model. ``cost/speed/batch_N`` compares its speed with the dense model's.

    Args:
        described: The result of :func:`training.comparison.run.describe_run`.
    """
    own, result = described["method"], described["result"]
    summary: dict[str, Any] = {f"select/{name[7:]}": value for name, value in result.items() if name.startswith("select_")}
    measured = [name for name in rows.columns if name.startswith("test_")]
    for _, row in rows.iterrows():
        place = "" if is_retrained(row["stage"]) else f"{row['stage']}/"
        for name in measured:
            summary[f"{place}test/{name[5:]}/{row['method']}".replace(" ", "_")] = row[name]
    for name in measured:
        after, before = f"test/{name[5:]}", f"post_hoc/test/{name[5:]}"
        if f"{after}/dense" not in summary and f"{before}/dense" in summary:
            summary[f"{after}/dense"] = summary[f"{before}/dense"]
        if f"{after}/dense" in summary and own != "dense":
            lost = summary[f"{after}/dense"] - result[name]
            summary[f"{after}/drop"] = -lost if name.endswith(("loss", "perplexity")) else lost
    sizes = rows.loc[are_dense(rows["method"]), "heads"]
    kept = {"heads/kept": described["kept"]} | ({"heads/all": int(sizes.iloc[0])} if len(sizes) else {})
    by_site = {f"heads/kept/{site}": count for site, count in described["by_site"].items()}
    costs = {f"cost/{name}": result[name] for name in COSTS if result.get(name) is not None}
    costs["cost/train_seconds"] = described["train_seconds"]
    if (cost := described.get("cost")) is not None:
        costs |= {f"cost/speed/batch_{row['batch_size']}": row["ratio"] for row in cost["latency"]}
    found = described.get("against_dense") or {}
    names = ("low", "high", "difference", "difference_low", "difference_high")
    summary |= {f"test/{main_metric}/{name}": found[name] for name in names if name in found}
    return summary | kept | by_site | costs | {"main_metric": main_metric, "method": own}


def folder_artifact(name: str, kind: str, folder: Path) -> wandb.Artifact:
    """Return a folder as an artifact. W&B reads its files in place, without copies."""
    artifact = wandb.Artifact(name, type=kind)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):  # one by one, since W&B tells of whole folders
        artifact.add_file(str(file), name=file.relative_to(folder).as_posix(), policy="immutable", skip_cache=True)
    return artifact


def tables_artifact(name: str, folder: Path) -> wandb.Artifact:
    """Return the tables of a run directory as an artifact, with masks, sites and the verdict."""
    artifact = wandb.Artifact(name, type="results")
    for file in sorted(path for path in folder.iterdir() if path.suffix in (".csv", ".json", ".md", ".tsv")):
        artifact.add_file(str(file), policy="immutable", skip_cache=True)
    return artifact


def send_comparison(run: RunDirectory, options: WandbOptions, config: Mapping[str, Any], main_metric: str) -> None:
    """Send a comparison as a group: a run for every experiment, and one for the whole.

    The latter has tables, pictures, the verdict as notes, and masks and tables as artifacts.
    """
    group = options.group or options.name or run.path.name
    options = replace(options, mode=resolved_mode(options))  # once: asking again while a run is open is warned of
    if options.mode == "disabled":
        return
    base, rows = run_id(run.path), read_table(run.path / "comparison.csv")
    for row in rows.to_dict("records"):
        described = {name: row[name] for name in ("method", "stage", "budget", "heads", "seed")}
        one = start(
            options,
            run.path,
            id=f"{base}-{row['experiment']}-{slug(row['method'])}",  # two methods may have chosen the same heads
            name=f"{row['method']} {row['stage']} {row['budget']} seed {row['seed']}",
            group=group,
            job_type=str(row["stage"]),
            config=described,
        )
        if one is None:
            return
        options = replace(options, mode="offline" if one.offline else options.mode)  # it stays so if the server has gone
        one.summary.update({key: value for key, value in summary_of_experiment(row).items() if pd.notna(value)})
        one.finish()
    whole = start(
        options, run.path, id=base, name=options.name or run.path.name, group=group, job_type="comparison", config=config
    )
    assert whole is not None
    for part in TABLES:
        whole.log({part: wandb.Table(dataframe=read_table(run.path / f"{part}.csv"))})
    summary = read_table(run.path / "summary.csv")
    for picture in sorted((run.path / "figures").glob("*.png")):
        whole.log({f"figures/{picture.stem}": wandb.Image(str(picture))})
    whole.notes = (run.path / "verdict.md").read_text(encoding="utf-8")
    whole.summary.update(summary_of_comparison(summary, main_metric))
    whole.log_artifact(tables_artifact(f"comparison-{base}-tables", run.path))
    whole.finish()


def summary_of_experiment(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of ``comparison.csv`` by flat names: ``test/accuracy``, ``heads``, ``cost/seconds``."""
    splits = {f"{name.replace('_', '/', 1)}": value for name, value in row.items() if name.startswith(("test_", "select_"))}
    costs = {f"cost/{name}": row[name] for name in COSTS if name in row}
    return splits | costs | {"heads": row["heads"], "budget": row["budget"]}


def summary_of_comparison(summary: pd.DataFrame, main_metric: str) -> dict[str, float]:
    """Return means over seeds as ``STAGE/test/METRIC/METHOD/BUDGET``; the dense model has no budget."""
    named = {}
    for row in summary.to_dict("records"):
        at = "" if is_dense(row["method"]) else f"/{row['budget']}"
        named[f"{row['stage']}/test/{main_metric}/{row['method']}{at}".replace(" ", "_")] = row["mean"]
    return named
