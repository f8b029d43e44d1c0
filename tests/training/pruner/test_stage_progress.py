"""Training and evaluation as stages, in the lines of a pipe."""

import io
import re

import pytest

from tests.training.pruner.fits import N, fit, make_data
from tests.training.runs import make_pruner, make_trainer
from training.pruner.callbacks import LastGoodCheckpoint
from training.pruner.logging import StageProgress
from training.pruner.module import evaluate
from training.runs import progress


@pytest.fixture
def lines(monkeypatch):
    """Lines of a display whose every look at the clock is 31 seconds after the last, so that nothing is held back."""
    ticks = iter(range(0, 10**9, 31))
    display = progress.PlainLines(io.StringIO(), lambda: float(next(ticks)))
    monkeypatch.setattr(progress, "_fitting_display", lambda: display)
    with progress.displayed():
        yield lambda: display.file.getvalue().splitlines()
    assert display.stages == []


def counts(lines, name):
    """The numbers done of a stage, as told, and its total."""
    found = [re.search(rf"(?:^|; ){name} (\d+)/(\d+)", line) for line in lines]
    return [int(match[1]) for match in found if match], {int(match[2]) for match in found if match}


def test_phases_count_their_own_steps(lines):
    fit(None, StageProgress())
    for phase in ("finetune", "prune", "retrain"):
        done, totals = counts(lines(), phase)
        assert done[0] == 0
        assert done[-1] == N
        assert done == sorted(done)
        assert totals == {N}
    ends = [line for line in lines() if ", took" in line]
    assert [line.split()[0] for line in ends] == ["finetune", "prune", "retrain"]
    assert re.search(rf"prune 1/{N}, loss [\d.]+, heads 8 -> 3, about", "\n".join(lines()))
    assert re.search(rf"retrain {N}/{N}, loss [\d.]+, heads 3, took", ends[2])
    assert "heads" not in ends[0]


def test_evaluations_are_within_training_and_alone(lines):
    pruner, data = make_pruner(finetune=1.0, prune=0.0, retrain=0.0, budget=None), make_data(eval_batch_size=32)
    trainer = make_trainer(callbacks=[StageProgress()], limit_val_batches=1.0, val_check_interval=0.5)
    trainer.fit(pruner, data)
    assert any(line.startswith(f"finetune {N // 2}/{N}") and "; evaluating select 1/3" in line for line in lines())
    before = len(lines())
    evaluate(make_trainer(callbacks=[StageProgress()]), pruner, data, ("test",))
    assert counts(lines()[before:], "evaluating test") == ([0, 1, 2, 3, 3], {3})


def test_a_phase_that_goes_on_starts_where_it_was(lines, tmp_path):
    last = tmp_path / "last.ckpt"
    fit(None, LastGoodCheckpoint(last, every=2 * N + 5))
    before = len(lines())  # scores are stages too
    fit(None, StageProgress(), ckpt_path=last)
    assert lines()[before] == f"retrain 5/{N}"


def test_a_failure_leaves_no_stage_behind(lines):
    class Fails(StageProgress):
        def on_train_batch_end(self, trainer, pl_module, *args):
            super().on_train_batch_end(trainer, pl_module, *args)
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fit(None, Fails())
    with progress.stage("next"):
        pass
    assert lines()[-2:][0] == "next"
