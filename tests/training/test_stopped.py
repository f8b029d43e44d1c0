"""Runs that are stopped, at any moment of their life, and go on."""

import shutil
import signal

import pandas as pd
import pytest
import torch

from tests.training.runs import write_config
from tests.training.stops import Moment, fit
from tests.training.test_fit import MEASURED, assert_same_tables

MODULE = "training.pruner.module:HeadPruner"
RUN = "training.comparison.run"
SMALL = ["--data.train_rows", "96", "--data.select_rows", "32", "--data.test_rows", "32", "--data.score_rows", "32"]
COMPARED = ["--compare", "full", "--retrained", "[his]", "--curve", "[0.5]"]
BEFORE = {
    "before there is a directory": Moment("training.runs.directory:RunDirectory.create"),
    "in the directory, before its configuration": Moment("training.runs.directory:RunDirectory.write_text"),
}
"""A run that is stopped here has not begun."""
DURING = {
    "when its configuration is written": Moment("training.runs.directory:RunDirectory.create", after=True),
    "in the finetune phase": Moment(f"{MODULE}.optimizer_step", 3),
    "before dense.ckpt has its name": Moment("torch:save", after=True),
    "when dense.ckpt is there": Moment(f"{MODULE}._start_pruning"),
    "in the prune phase": Moment(f"{MODULE}.optimizer_step", 3),
    "in the retrain phase": Moment(f"{MODULE}.optimizer_step", 9),
    "when training has ended": Moment(f"{MODULE}.on_train_end", after=True),
    "when final.ckpt is there": Moment(f"{RUN}:export"),
    "when a part of its training is kept": Moment("training.comparison.cache:ExperimentCache._make", 2, after=True),
    "in its export": Moment("gates.export.checkpoint:load_pruned"),
    "when its export is there": Moment(f"{RUN}:export", after=True),
    "in the evaluation of its comparison": Moment("training.comparison.experiments:Experiments._evaluate", 2),
    "in the training of its comparison": Moment(f"{MODULE}.optimizer_step", 4),
    "when that training has ended": Moment("training.comparison.experiments:Experiments._evaluate", 1),
    "in its curve": Moment("training.comparison.experiments:Experiments.post_hoc", 14),
    "while it draws": Moment("training.comparison.run:mask_agreement"),
    "between its tables": Moment("training.runs.directory:RunDirectory.write_table", 4),
    "before its end": Moment(f"{RUN}:show_run"),
}
"""In the order of a run's life, each as a run finds it that goes on from the one before; there is no ``last.ckpt``."""


def arguments_in(folder, *more):
    return ["--config", write_config(folder), *SMALL, *COMPARED, "--save_every", "200", *more]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    code, said = fit(arguments_in(folder, "--run_dir", "run"), folder)
    assert (code, said) == (0, "")
    return folder / "run"


def logged(run):
    """What does not depend on how fast it went."""
    log = pd.read_csv(run / "metrics.csv")
    return log[[name for name in sorted(log) if "per_second" not in name]]


def stop_each_time(given, folder, moments, sign=signal.SIGKILL):
    """Begin a run, stop it at the first moment, resume it, stop it at the next, and so on, and let it end."""
    more = []
    for name, moment in moments.items():
        code, said = fit([*given, *more], folder, moment, sign)
        assert code == (-sign if sign == signal.SIGKILL else 130), (name, said)
        if sign == signal.SIGINT:
            advice = "nothing was written; start again" if name in BEFORE else "continue with --existing resume"
            assert said == f"stopped; {advice}\n", name
        more = [] if name in BEFORE else ["--existing", "resume"]
    assert fit([*given, *more], folder) == (0, "")


@pytest.mark.nightly
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_a_run_that_is_stopped_again_and_again_ends_as_an_unbroken_one(sign, unbroken, tmp_path):
    """The advice after Ctrl+C is followed each time, and true each time."""
    moments = BEFORE | DURING
    if sign == signal.SIGINT:
        moments = {name: moments[name] for name in (*BEFORE, *list(DURING)[1::3])}
    stop_each_time(arguments_in(tmp_path, "--run_dir", "run"), tmp_path, moments, sign)
    assert_same_tables(tmp_path / "run", unbroken)
    pd.testing.assert_frame_equal(logged(tmp_path / "run"), logged(unbroken), check_exact=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in unbroken.iterdir()}


ALONE = ["--model.prune", "0", "--model.retrain", "0", "--model.budget", "null", "--model.finetune", "4"]
STEP = f"{MODULE}.optimizer_step"
END = (f"{MODULE}.on_fit_end", 1)
OTHERS = {
    "checkpoints at validations": (["--save_every", "6"], [(STEP, 8), (STEP, 8), END]),
    "averages": (["--save_every", "2", "--average_last", "2", "--average_every", "2"], [(STEP, 6), (STEP, 13)]),
    "a search": (["--save_every", "5", "--model.swaps", "6"], [(STEP, 14), END]),
    "a refit": (["--save_every", "5", "--model.refit", "true"], [(STEP, 10), END]),
    "a dense model that ends early": ([*ALONE, "--save_every", "6", "--patience", "1"], [(STEP, 8), END]),
}
"""Other kinds of runs, and the calls of functions before which they are stopped."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_run_ends_as_an_unbroken_one(name, tmp_path):
    own, calls = OTHERS[name]
    given = ["--config", write_config(tmp_path), *SMALL, "--compare", "none", "--trainer.log_every_n_steps", "1", *own]
    moments = {f"{number}: {function}, {call}": Moment(function, call) for number, (function, call) in enumerate(calls)}
    stop_each_time([*given, "--run_dir", "run"], tmp_path, moments)
    assert fit([*given, "--run_dir", "unbroken"], tmp_path) == (0, "")
    runs = tmp_path / "run", tmp_path / "unbroken"
    states = [torch.load(run / "checkpoints" / "final.ckpt", weights_only=True)["state_dict"] for run in runs]
    for key, tensor in states[0].items():
        if torch.is_tensor(tensor):
            assert torch.equal(tensor, states[1][key]), key
    for table in ("comparison.csv", "gates_over_time.csv"):
        if (runs[1] / table).exists():
            tables = [pd.read_csv(run / table).drop(columns=MEASURED, errors="ignore") for run in runs]
            pd.testing.assert_frame_equal(*tables, check_exact=True, obj=table)
    pd.testing.assert_frame_equal(*map(logged, runs), check_exact=True)


@pytest.mark.nightly
def test_a_run_that_is_overwritten_is_never_half_of_two(unbroken, tmp_path):
    """Stopped while the old one is removed, it can be started again; nothing of the old one goes into it."""
    shutil.copytree(unbroken, tmp_path / "run")
    given = arguments_in(tmp_path, "--run_dir", "run", "--existing", "overwrite", "--seed", "5")
    code, said = fit(given, tmp_path, Moment("shutil:rmtree", 2), signal.SIGINT)
    assert (code, said) == (130, "stopped; nothing was written; start again\n")
    assert (tmp_path / "run" / "config.yaml").read_text() == (unbroken / "config.yaml").read_text()
    code, said = fit(given, tmp_path, Moment(STEP, 3), signal.SIGINT)
    assert (code, said) == (130, "stopped; continue with --existing resume\n")
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not list((tmp_path / "run" / "experiments").glob("[!.]*"))
    assert not left & {"export", "comparison.csv", "metrics-before-resuming.csv", "finished.json"}
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
