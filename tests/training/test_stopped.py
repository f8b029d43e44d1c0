"""Runs that are stopped, at any moment of their life, and go on."""

import signal

import pandas as pd
import pytest

from tests.training.runs import write_config
from tests.training.stops import Moment, fit
from tests.training.test_fit import assert_same_tables

MODULE = "training.pruner.module:HeadPruner"
RUN = "training.comparison.run"
SMALL = ["--data.train_rows", "96", "--data.select_rows", "32", "--data.test_rows", "32", "--data.score_rows", "32"]
COMPARED = ["--compare", "full", "--retrained", "[his]", "--curve", "[0.5]"]
BEFORE = {
    "before there is a directory": Moment("training.runs.run_directory:RunDirectory.create"),
    "in the directory, before its configuration": Moment("training.runs.run_directory:RunDirectory.write_text"),
}
"""A run that is stopped here has not begun."""
DURING = {
    "when its configuration is written": Moment("training.runs.run_directory:RunDirectory.create", after=True),
    "in the finetune phase": Moment(f"{MODULE}.optimizer_step", 3),
    "before dense.ckpt has its name": Moment("training.pruner.callbacks:pending_name", 2, after=True),
    "when dense.ckpt is there": Moment(f"{MODULE}._start_pruning"),
    "in the prune phase": Moment(f"{MODULE}.optimizer_step", 3),
    "in the retrain phase": Moment(f"{MODULE}.optimizer_step", 9),
    "when training has ended": Moment(f"{MODULE}.on_train_end", after=True),
    "when final.ckpt is there": Moment("training.comparison.training:evaluate"),
    "when a part of its training is kept": Moment("training.comparison.cache:ExperimentCache._make", 2, after=True),
    "in its export": Moment("gates.export.checkpoint:load_pruned"),
    "when its export is there": Moment(f"{RUN}:export", after=True),
    "in the evaluation of its comparison": Moment("training.comparison.experiments:Experiments._evaluate", 2),
    "in the training of its comparison": Moment(f"{MODULE}.optimizer_step", 4),
    "when that training has ended": Moment("training.comparison.experiments:Experiments._evaluate", 1),
    "in its curve": Moment("training.comparison.experiments:Experiments.post_hoc", 14),
    "while it draws": Moment("training.comparison.run_results:mask_agreement"),
    "between its tables": Moment("training.runs.run_directory:RunDirectory.write_table", 4),
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


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_a_run_that_is_stopped_again_and_again_ends_as_an_unbroken_one(sign, unbroken, tmp_path):
    """The advice after Ctrl+C is followed each time, and true each time."""
    given, more = arguments_in(tmp_path, "--run_dir", "run"), []
    for name, moment in (BEFORE | DURING).items():
        code, said = fit([*given, *more], tmp_path, moment, sign)
        assert code == (-sign if sign == signal.SIGKILL else 130), (name, said)
        advice = "nothing was written; start again" if name in BEFORE else "go on with --existing resume"
        if sign == signal.SIGINT:
            assert said == f"stopped; {advice}\n", name
        more = [] if name in BEFORE else ["--existing", "resume"]
    code, said = fit([*given, *more], tmp_path)
    assert (code, said) == (0, "")
    assert_same_tables(tmp_path / "run", unbroken)
    pd.testing.assert_frame_equal(logged(tmp_path / "run"), logged(unbroken), check_exact=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in unbroken.iterdir()}
