"""What W&B gets of results, read back from its own offline files."""

import json
import time

import pandas as pd
import pytest
from wandb.proto import wandb_internal_pb2

from tests.training.report.fixture import write_comparison
from tests.training.test_fit import wandb_records
from training.commands.table import run_command
from training.comparison.wandb import send_comparison, summary_of_run
from training.config import WandbOptions
from training.runs.directory import RunDirectory


def written(file):
    """The records of an offline run, once W&B's own process has written the last one."""
    while True:
        records = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(file.read_bytes())]
        if {"run", "exit"} <= {record.WhichOneof("record_type") for record in records}:
            return records
        time.sleep(0.1)


def read_back(file):
    """Run, summary, logged keys and types of artifacts of an offline run."""
    run, summary, keys, artifacts = None, {}, set(), set()
    for record in written(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        elif kind == "summary":
            summary |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update}
        elif kind == "history":
            keys |= {item.key or item.nested_key[0] for item in record.history.item}
        elif kind == "artifact":
            artifacts.add(record.artifact.type)
    return run, summary, keys, artifacts


@pytest.mark.integration
def test_a_comparison_is_a_group_with_a_run_for_every_experiment(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = write_comparison(tmp_path / "cmp", methods=("learned", "his"), budgets=(4, 2), seeds=(0,))
    for part in ("scores.csv", "gates_over_time.csv"):  # of pictures, which take the time
        (folder / part).unlink()
    assert run_command("report", [str(folder), "--output", str(folder / "report.html")]) == 0
    capfd.readouterr()
    send_comparison(RunDirectory(folder), WandbOptions(), {"seeds": [0]}, "accuracy")
    found = [read_back(file) for file in (folder / "wandb").glob("offline-run-*/*.wandb")]
    rows = pd.read_csv(folder / "comparison.csv")
    assert {run.run_group for run, *_ in found} == {"cmp"}
    of_rows = {run.display_name: summary for run, summary, _, _ in found if run.job_type != "comparison"}
    assert len(of_rows) == len(rows) == 10
    for row in rows.to_dict("records"):
        summary = of_rows[f"{row['method']} {row['stage']} {row['budget']} seed 0"]
        assert summary["test/accuracy"] == row["test_accuracy"]
        assert (summary["heads"], summary["cost/seconds"]) == (row["heads"], row["seconds"])
    ((run, summary, keys, artifacts),) = [one for one in found if one[0].job_type == "comparison"]
    assert run.display_name == "cmp"
    means = pd.read_csv(folder / "summary.csv").set_index(["stage", "method", "budget"])["mean"]
    assert summary["retrained/test/accuracy/learned/2"] == means["retrained", "learned", 2]
    assert summary["post_hoc/test/accuracy/dense"] == means["post hoc", "dense", 8]
    assert keys >= {"comparison", "summary", "statistics", "agreement", "figures/quality_retrained"}
    assert artifacts == {"results", "run_table"}  # the latter are W&B's own, of Tables
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("stage", ["retrained", "retrained from dense"])
def test_the_summary_of_a_run_is_flat_and_says_what_was_lost(stage):
    measured = {"select_accuracy": 0.9, "steps": 12, "seconds": 2.5, "peak_memory_mb": None}
    of = {("dense", "post hoc"): 0.95, ("learned", "post hoc"): 0.6, ("learned", stage): 0.92}
    rows = [
        {"method": method, "stage": stage, "heads": 8 if method == "dense" else 3, "test_accuracy": value, **measured}
        | {"test_loss": 1 - value}
        for (method, stage), value in of.items()
    ]
    described = {"method": "learned", "kept": 3, "by_site": {"encoder.0": 3}, "result": rows[-1], "train_seconds": 5.0}
    described["against_dense"] = {"value": 0.92, "low": 0.9, "high": 0.94, "difference": -0.03, "difference_low": -0.05}
    described["cost"] = {"latency": [{"batch_size": 8, "ratio": 1.3}]}
    summary = summary_of_run(pd.DataFrame(rows), described, "accuracy")
    assert not any(isinstance(value, dict) for value in summary.values())
    assert summary["test/accuracy/learned"] == 0.92
    assert (summary["test/accuracy/low"], summary["test/accuracy/difference_low"]) == (0.9, -0.05)
    assert summary["cost/speed/batch_8"] == 1.3
    assert summary["post_hoc/test/accuracy/learned"] == 0.6
    assert summary["test/accuracy/dense"] == 0.95  # which was not trained on
    assert summary["test/accuracy/drop"] == pytest.approx(0.03)
    assert summary["test/loss/drop"] == pytest.approx(0.03)  # above 0 if the pruned model is worse
    assert (summary["heads/kept"], summary["heads/all"], summary["heads/kept/encoder.0"]) == (3, 8, 3)
    assert (summary["select/accuracy"], summary["cost/steps"], summary["cost/train_seconds"]) == (0.9, 12, 5.0)
    assert "cost/peak_memory_mb" not in summary
