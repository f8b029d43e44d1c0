"""Phases that have enough steps on small data."""

from dataclasses import replace

import pytest

from gates.errors import GateError
from tests.training.runs import STEPS_PER_EPOCH, make_data, make_setup
from training.pruner.schedule import Schedule
from training.setup import check_limits, with_min_steps


def steps_of(setup, data):
    """The steps of each phase in the schedule of a run."""
    sampler = data.batches_of_run(epochs=setup.model.epochs, first=0, rank=0, world=1)
    schedule = Schedule.of_options(len(sampler) // (setup.trainer.accumulate_grad_batches or 1), setup.model)
    return schedule.finetune, schedule.prune - schedule.finetune, schedule.end - schedule.prune


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    ("phases", "steps"),
    [
        ((0.5, 4.0, 0.25), (24, None, None)),
        ((0.0, 0.1, 3.0), (0, 24, None)),  # a phase that is left out stays so
        ((4.0, 0.5, 0.0), (None, 24, None)),
        ((4.0, 4.0, 4.0), (None, None, None)),
    ],
)
def test_short_phases_have_the_least_number_of_steps(phases, steps, accumulated, capfd):
    data, names = make_data(), ("finetune", "prune", "retrain")
    setup = make_setup(**dict(zip(names, phases, strict=True)), min_steps=24)
    setup = replace(setup, trainer=replace(setup.trainer, accumulate_grad_batches=accumulated))
    longer = with_min_steps(setup, data)
    expected = [
        round(length * STEPS_PER_EPOCH / accumulated) if least is None else least
        for length, least in zip(phases, steps, strict=True)
    ]
    assert steps_of(longer, data) == pytest.approx(expected, abs=1)
    told = capfd.readouterr().out
    changed = [name for name, least in zip(names, steps, strict=True) if least]
    assert all((name in told) == (name in changed) for name in names)
    assert ("24 steps" in told) == bool(changed)


def test_validations_can_be_as_far_apart_as_the_longer_run_is():
    setup = make_setup(finetune=0.5, prune=0.5, retrain=0.5, min_steps=24)
    far = replace(setup, trainer=replace(setup.trainer, val_check_interval=50))
    check_limits(far, make_data())
    with pytest.raises(GateError, match="val_check_interval is 50, more than the 24 batches of the run"):
        check_limits(replace(far, model=replace(far.model, min_steps=0)), make_data())


def test_a_limit_on_training_batches_is_kept():
    setup = make_setup(min_steps=1000)
    limited = replace(setup, trainer=replace(setup.trainer, limit_train_batches=3))
    assert with_min_steps(limited, make_data()) == limited
