"""``python -m training compare`` through its entry point: the table, its experiments, what a kill leaves, bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl

import training.comparison.grid
from tests.training.runs import write_config
from training.commands.table import run_command
from training.comparison.grid import locked_directory
from training.comparison.methods import LEARNED, Method
from training.runs.directory import UNFINISHED
from training.scoring.scorers import SCORERS

pytestmark = pytest.mark.usefixtures("undrawn")
main = partial(run_command, "compare")

MEASURED = ["seconds", "peak_memory_mb"]


SWAPS = ["--swap.passes", "6"]


def command(folder, config, *more):
    return ["--config", config, "--run_dir", str(folder), *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison with two methods, two budgets and two seeds."""
    folder = tmp_path_factory.mktemp("compare")
    config = write_config(folder)
    run = folder / "run"
    methods = ["--methods", "learned,his+swap", "--budgets", "4,2", "--seeds", "0,1", *SWAPS]
    assert main(command(run, config, *methods)) == 0
    return run, config


@pytest.fixture
def again(finished, tmp_path):
    """A function that runs another comparison on the experiments of the finished one; returns its directory."""
    run, config = finished

    def compare(*more):
        given = ["--seeds", "0", "--experiments", str(run / "experiments"), *more]
        assert main(command(tmp_path / "run", config, *given)) == 0
        return tmp_path / "run"

    return compare


@pytest.mark.integration
def test_every_combination_has_a_row_at_exactly_its_budget_and_equal_cost(finished):
    run, _ = finished
    table = pd.read_csv(run / "comparison.csv")
    assert len(table) == 2 * (2 + 2 * 2 * 2)
    pruned = table[table["method"] != "dense"]
    assert (pruned["heads"] == pruned["budget"]).all()
    assert set(pruned["budget"]) == {4, 2}
    steps = table[table["stage"] == "retrained from dense"].groupby("method")["steps"].agg(set)
    assert steps.to_dict() == {"dense": {32}, "his+swap": {32}, "learned": {32 + 16}}  # and those of the gates
    assert (table[(table["stage"] == "post hoc") & (table["method"] != "learned")]["steps"] == 0).all()


def rows_state_what_their_predictions_give(run, rows=None):
    """Check every row of a table against the predictions of its experiment, and their numbers."""
    for row in pd.read_csv(run / "comparison.csv").itertuples():
        kept = np.load(run / "experiments" / row.experiment / "predictions.npz")
        for split, count in (rows or {"select": 96, "test": 96}).items():
            assert len(kept[f"{split}_prediction"]) == len(kept[f"{split}_target"]) == count
            accuracy = (kept[f"{split}_prediction"] == kept[f"{split}_target"]).mean()
            assert accuracy == pytest.approx(getattr(row, f"{split}_accuracy"), abs=1e-6)


@pytest.mark.integration
def test_rows_state_what_their_predictions_give(finished):
    rows_state_what_their_predictions_give(finished[0])


@pytest.mark.integration
def test_nothing_is_trained_again(finished, again, monkeypatch):
    """A further stage trains the dense structure and the learned one from scratch. Other rows stay equal to the bit."""
    trainings, fitted = [], pl.Trainer.fit
    monkeypatch.setattr(pl.Trainer, "fit", lambda self, *args, **more: trainings.append(self) or fitted(self, *args, **more))
    stages = ["--stages", "post hoc,retrained from dense,from scratch"]
    run = again("--methods", "learned,his+swap", "--budgets", "4", *SWAPS, *stages)
    assert len(trainings) == 2
    table, whole = (pd.read_csv(folder / "comparison.csv").query("seed == 0") for folder in (run, finished[0]))
    table, whole = (table.set_index(["method", "stage", "budget"])["test_loss"] for table in (table, whole))
    both = [key for key in table.index if key in whole.index]
    assert len(both) == 6
    pd.testing.assert_series_equal(table[both], whole[both], check_exact=True)
    trainings.clear()
    before = (run / "comparison.csv").read_bytes()
    assert again("--methods", "learned,his+swap", "--budgets", "4", *SWAPS, *stages) == run
    assert trainings == []
    assert (run / "comparison.csv").read_bytes() == before


@pytest.mark.integration
def test_what_changes_rivals_changes_their_experiments(finished, again):
    """Options that act after fine-tuning reuse the dense model and nothing that was trained on from it; the control with
    distillation is one row per seed."""
    run = again("--methods", "his,dense+distil", "--budgets", "4", "--model.distil", "0.3")
    before, table = pd.read_csv(finished[0] / "comparison.csv"), pd.read_csv(run / "comparison.csv")
    retrained = set(before.loc[before["stage"] == "retrained from dense", "experiment"])
    assert not retrained & set(table.loc[table["stage"] == "retrained from dense", "experiment"])
    assert (table["method"] == "dense+distil").sum() == 2
    assert table.loc[table["method"].isin(["dense", "dense+distil"]), "budget"].eq(8).all()


@pytest.mark.integration
def test_killed_in_the_middle_it_continues_to_the_same_table(finished, tmp_path):
    run, config = finished
    arguments = command(tmp_path / "run", config, "--methods", "learned,his+swap", "--budgets", "4,2", "--seeds", "0", *SWAPS)
    arguments += ["--save_every", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "training", "compare", *arguments], env=environment)
    experiments = tmp_path / "run" / "experiments"
    while len(list(experiments.glob("[!.]*"))) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "run" / "comparison.csv").exists()
    assert main(arguments) == 0
    assert not (tmp_path / "run" / UNFINISHED).exists()
    got, expected = pd.read_csv(tmp_path / "run" / "comparison.csv"), pd.read_csv(run / "comparison.csv").query("seed == 0")
    got, expected = (table.drop(columns=["experiment", *MEASURED]).reset_index(drop=True) for table in (got, expected))
    pd.testing.assert_frame_equal(got, expected)


METHODS = [
    *LEARNED, *SCORERS, "learned+distil+draws+swap", "learned+restarts", "his+rescale", "dense+distil",
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("methods", [METHODS[first::6] for first in range(6)], ids=range(6))
def test_every_method_has_all_its_rows(methods, again):
    """In groups of ten, because a picture of a comparison has no room for all."""
    stages = ["post hoc", "post hoc with means", "post hoc with optimal constants", "post hoc with uniform attention"]
    stages += ["retrained", "from scratch"]
    swaps = SWAPS if any("+swap" in method for method in methods) else []
    run = again("--methods", ",".join(methods), "--budgets", "3", "--stages", ",".join(stages), *swaps)
    table = pd.read_csv(run / "comparison.csv")
    for method in map(Method.parse, methods):
        own = table[table["method"] == method.name]
        assert set(stages) - {"from scratch"} <= set(own["stage"]), method.name
        assert ("from scratch" in set(own["stage"])) == method.is_learned, method.name
    assert np.isfinite(table["test_loss"]).all()


@pytest.mark.nightly
def test_two_processes_end_with_complete_tables(tmp_path):
    """On splits that they cannot share equally, with searches."""
    methods = ["learned", "his+swap", "learned+draws", "fisher", "his(order=best-of-layer)"]
    stages, rows = ["post hoc", "post hoc with optimal constants"], {"select": 45, "test": 51}
    given = ["--methods", ",".join(methods), "--budgets", "3", "--seeds", "0", "--stages", ",".join(stages), *SWAPS]
    given += [part for split, count in rows.items() for part in (f"--data.{split}_rows", str(count))]
    given += ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    process = [sys.executable, "-m", "training", "compare", *command(tmp_path / "two", write_config(tmp_path), *given)]
    done = subprocess.run(process, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("report:") == 1  # one of the two speaks
    table = pd.read_csv(tmp_path / "two" / "comparison.csv")
    own = table[table["method"] != "dense"]
    assert sorted(zip(own["method"], own["stage"], strict=True)) == sorted((name, one) for name in methods for one in stages)
    assert not table.drop(columns=["peak_memory_mb", "closed_by_gates"]).isna().any(axis=None)
    assert table["closed_by_gates"].notna().tolist() == table["method"].str.startswith("learned").tolist()
    assert (own["heads"] == 3).all()
    assert not list((tmp_path / "two" / "experiments").glob(".*"))
    rows_state_what_their_predictions_give(tmp_path / "two", rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "learned,nonsense"], "unknown method 'nonsense'"),
        (["--budgets", "4,99"], "the budget is 99; expected a whole number from 0 to 8"),
        (["--budgets", "4,0.5"], "--budgets has 4 and 0.5, which both keep 4 heads; remove one of them"),
        (["--budgets", "8"], "nothing can be compared there"),
        (["--seeds", "0,-1"], "--seeds has -1"),
        (["--prices", "0.1,-1"], "--prices has -1"),
        (["--stages", "retrained,later"], "--stages has 'later'"),
        (["--methods", "learned+draws", "--draws.temperature", "0"], "--draws.temperature is 0"),
        (["--methods", "his+swap", "--swap.passes", "1"], "expected at least 6"),
        (["--methods", "learned+restarts+refit", "--restarts.rows", "64"], "add +restarts to a method without +refit"),
        (["--methods", "his,learned", "--draws.count=4"], "--draws.count is given, but nothing uses it; add +draws"),
        (["--from_scratch_epochs", "3"], "add from scratch to --stages"),
        (["--methods", "learned(once=true)", "--budgets", "4,{encoder: 2}"], "learns once, for the smallest budget"),
        (["--prices", "0.1,0.2"], "add lambda to --methods"),
        (["--seed", "5"], "--seeds has those of a comparison"),
        (["--ckpt_path=dense.ckpt"], "--ckpt_path is an option of head-gates fit"),
        (["--model.swaps", "40"], "here swaps are a method"),
        (["--model.budget", "3"], "--budgets has those of a comparison"),
        (["--trainer.limit_val_batches", "0"], "results need the selection and the test split"),
        (["--methods", "his,learned+distil", "--distil.weight", "2"], "distil is 2.0"),
        (["--methods", "his,his+refit", "--model.freeze", "[classifier]"], "remove +refit"),
        (["--budgets", "4,2", "--model.minimum_per_layer", "2"], "needs 4 heads"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(arguments, message, tmp_path, capsys):
    config = write_config(tmp_path)
    assert main(command(tmp_path / "run", config, *arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run" / "comparison.csv").exists()


@pytest.mark.integration
def test_every_price_that_was_trained_with_is_in_a_table(finished, again):
    priced = ["--methods", "lambda", "--prices", "0,3", "--model.gate_learning_rate", "1", "--stages", "post hoc"]
    run = again(*priced, "--budgets", "4")
    table = pd.read_csv(run / "prices.csv")
    sites = [site["label"] for site in json.loads((run / "sites.json").read_text())]
    assert table.columns.tolist() == ["seed", "method", "price", "open", *sites]
    assert table["price"].tolist() == [0, 3]
    assert table["open"].tolist() == table[sites].sum(axis=1).tolist()
    assert table["open"][0] > table["open"][1]


@pytest.mark.integration
def test_tables_of_other_methods_go_and_others_stay_until_the_comparison_is_complete(finished, again, monkeypatch):
    run = again("--methods", "learned,his", "--budgets", "4")
    assert (run / "gates_over_time.csv").is_file()
    again("--methods", "his", "--budgets", "4")
    assert not (run / "gates_over_time.csv").exists()
    before = {path.name: path.read_bytes() for path in run.glob("*.*")}
    after_one = training.comparison.grid.run_seed

    def stopped(experiments, *others):
        yield from after_one(experiments, *others)
        if experiments.seed == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.comparison.grid, "run_seed", stopped)
    given = ["--methods", "his", "--budgets", "4", "--experiments", str(finished[0] / "experiments"), "--seeds", "0,1"]
    assert main(command(run, finished[1], *given)) == 130
    kept = {path.name: path.read_bytes() for path in run.glob("*.*")}
    assert len(pd.read_csv(run / UNFINISHED)) == 2 * 4
    assert {name for name in kept if kept[name] != before.get(name)} <= {UNFINISHED, "config.yaml"}


def test_a_comparison_killed_with_experiments_elsewhere_goes_on(tmp_path):
    """Before its first row, and between its tables."""
    for names in (
        ["config.yaml"],
        ["config.yaml", ".comparison.unfinished.csv.partial-7"],
        [UNFINISHED, "comparison.csv", "summary.csv"],
    ):
        for name in names:
            (tmp_path / name).touch()
        with locked_directory(str(tmp_path)) as run:
            assert run.path == tmp_path
            assert not list(tmp_path.glob(".*.partial-*"))


@pytest.mark.integration
def test_one_batch_is_not_all_batches():
    """Python keeps the ``Optional[Union[float, int]]`` of the first library that writes it, so in a process of its own."""
    read = {"1": "1", "1.0": "1.0", "0.5": "0.5", "null": "None"}
    code = (
        "from training.commands.table import COMMANDS; from training.cli.command_line import with_config\n"
        "parser = COMMANDS['compare'].parser()\n"
        f"for given in {list(read)}:\n"
        "    found = parser.parse_args(with_config(['--trainer.limit_train_batches', given]))\n"
        "    print(repr(found.trainer.limit_train_batches))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(read.values())
