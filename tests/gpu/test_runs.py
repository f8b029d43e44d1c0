"""Whole runs on a GPU: every precision, every kind of task and method, and a run that is killed and resumed."""

import signal

import pandas as pd
import pytest

from tests.training import causal_runs, runs, translation_runs
from tests.training.stops import Moment, fit
from training.commands.table import run_command

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of Lightning and the card
METHODS = (
    "learned", "learned+refit", "learned+swap", "his", "his+refit", "obs+refit", "taylor-weights", "fisher", "dsp", "shapley",
    "flap", "hies", "entropy(keep=high)", "leave-one-out", "random",
)  # fmt: skip


def run(on_device, command, config, folder, *more):
    assert run_command(command, ["--config", config, "--run_dir", str(folder), *on_device, *more]) == 0
    return folder


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_run_learns_in_every_precision(precision, on_device, tmp_path):
    config = runs.write_config(tmp_path)
    folder = run(on_device, "fit", config, tmp_path / "run", "--trainer.precision", precision, "--compare", "full")
    table = pd.read_csv(folder / "comparison.csv")
    assert table["test_loss"].notna().all()
    assert (table[table["method"] == "learned"]["heads"] == 3).all()


@pytest.mark.parametrize(
    ("kind", "precision"), [(causal_runs, "bf16-mixed"), (translation_runs, "bf16-mixed"), (causal_runs, "32-true")]
)
def test_language_models_and_translators_are_pruned(kind, precision, on_device, tmp_path):
    config = kind.write_config(tmp_path)
    folder = run(on_device, "fit", config, tmp_path / "run", "--trainer.precision", precision, "--compare", "posthoc")
    assert pd.read_csv(folder / "comparison.csv")["test_loss"].notna().all()


@pytest.fixture(scope="module")
def compared(on_device, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    more = ["--methods", ",".join(METHODS), "--budgets", "3", "--seeds", "0", "--stages", "post hoc"]
    return pd.read_csv(run(on_device, "compare", runs.write_config(folder), folder / "run", *more) / "comparison.csv")


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_method_is_compared(method, compared):
    rows = compared[compared["method"] == method]
    assert len(rows) == 1
    assert rows["heads"].item() == 3
    assert rows["test_accuracy"].between(0, 1).all()
    assert rows["peak_memory_mb"].notna().all()


def test_a_killed_run_ends_in_the_table_of_an_unbroken_one(on_device, tmp_path):
    tables = []
    for name, moment in (("unbroken", None), ("killed", Moment("training.pruner.module:HeadPruner.training_step", call=21))):
        folder = tmp_path / name
        folder.mkdir()
        given = ["--config", runs.write_config(folder), "--run_dir", "run", *on_device, "--compare", "posthoc"]
        code, said = fit(given, folder, moment)
        assert code == (0 if moment is None else -signal.SIGKILL), said
        if moment is not None:
            code, said = fit([*given, "--existing", "resume"], folder)
            assert code == 0, said
        table = pd.read_csv(folder / "run" / "comparison.csv")
        tables.append(table.drop(columns=[column for column in table if column in ("seconds", "peak_memory_mb")]))
    pd.testing.assert_frame_equal(*tables)
