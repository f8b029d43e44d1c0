import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.runs import make_options
from training.pruner.schedule import Schedule


def of(steps, finetune=2.0, prune=1.0, retrain=1.0, ramp=0.5, rise=0.1, *, pipelined=False, peak=None, **more):
    """A schedule whose second cycle of the learning rate has a peak of its own."""
    rates = {"learning_rate": 1.0, "prune_learning_rate": peak}
    phases = {"finetune": finetune, "prune": prune, "retrain": retrain, "ramp": ramp, "lr_warm_up": rise}
    return Schedule.of_options(steps, make_options(**phases, **rates, **more), pipelined=pipelined)


@pytest.mark.parametrize("decay", ["linear", "noam"])
def test_a_second_cycle_rises_from_zero_to_its_own_peak_after_the_finetune(decay):
    schedule = of(200, lr_decay=decay, peak=0.25)
    first, second = ([schedule.backbone_rate(step) for step in steps] for steps in (range(100), range(100, 200)))
    assert second == pytest.approx([0.25 * rate for rate in first])
    assert max(first) == pytest.approx(1) == first[9]
    whole = of(200, finetune=0.0, lr_decay=decay, peak=0.25)
    assert max(whole.backbone_rate(step) for step in range(200)) == pytest.approx(0.25)


def test_noam_falls_with_the_inverse_square_root_of_the_step():
    schedule = of(2000, rise=0.04, lr_decay="noam")
    for step in (0, 10, 39, 40, 300, 999):  # Vaswani et al. 2017, equation 3, with its peak as unit
        count = step + 1
        expected = min(count**-0.5, count * 40**-1.5) / 40**-0.5
        assert schedule.backbone_rate(step) == pytest.approx(expected)


def test_without_prune_and_retrain_there_is_one_phase():
    schedule = of(70, finetune=3.0, prune=0.0, retrain=0.0, budget=None)
    assert (schedule.finetune, schedule.prune, schedule.end) == (70, 70, 70)
    assert {schedule.phase(step) for step in range(70)} == {"finetune"}


def test_phases_are_in_proportion():
    schedule = of(100)
    assert (schedule.finetune, schedule.prune, schedule.end) == (50, 75, 100)
    assert [schedule.phase(step) for step in (0, 49, 50, 74, 75, 99)] == [*["finetune"] * 2, *["prune"] * 2, *["retrain"] * 2]


@given(st.integers(1, 500), st.floats(0, 5), st.floats(0.01, 5), st.floats(0, 5), st.floats(0.01, 1), st.floats(0, 1))
def test_every_run_has_a_prune_phase_whose_ramp_reaches_one(steps, finetune, prune, retrain, ramp, rise):
    schedule = of(steps, finetune, prune, retrain, ramp, rise)
    assert 0 <= schedule.finetune <= schedule.prune <= schedule.end == steps
    pruning = [schedule.ramp(step) for step in range(schedule.finetune, schedule.prune)]
    assert pruning
    assert pruning == sorted(pruning)
    assert pruning[-1] == pytest.approx(1.0)
    assert pruning[0] > 0
    assert {schedule.ramp(step) for step in range(schedule.prune, steps)} <= {0.0}
    assert all(0 <= schedule.backbone_rate(step) <= 1 for step in range(steps + 1))


def test_learning_rates():
    schedule = of(100)
    rates = [schedule.backbone_rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[4] == 1.0
    assert rates[100] == 0.0
    assert rates[25] == pytest.approx(25 / 45)
    assert rates[50:] == [*rates[:50], 0.0]
    assert [schedule.gate_rate(step) for step in (49, 50, 74, 75)] == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(("peaks", "second"), [((1e-3, None), 1.0), ((1e-3, 5e-4), 0.5), ((0.0, 5e-4), 1.0)])
def test_options_become_a_schedule(peaks, second):
    names = {"finetune": 2.0, "prune": 1.0, "retrain": 1.0, "ramp": 0.3, "lr_warm_up": 0.2, "lr_decay": "noam"}
    found = Schedule.of_options(100, make_options(**names, learning_rate=peaks[0], prune_learning_rate=peaks[1]))
    assert found == Schedule(50, 75, 100, ramp_share=0.3, rise_share=0.2, decay="noam", second_peak=second)


def test_a_second_cycle_begins_when_the_backbone_trains_again():
    schedule = of(100, peak=0.5, pipelined=True)
    joint = of(100, peak=0.5)
    assert [schedule.backbone_rate(step) for step in range(50)] == [joint.backbone_rate(step) for step in range(50)]
    assert schedule.backbone_rate(49) < 0.03  # the dense model is trained to its end
    assert max(schedule.backbone_rate(step) for step in range(75, 100)) == 0.5
    assert schedule.backbone_rate(99) < 0.03
    assert max(joint.backbone_rate(step) for step in range(50, 75)) == 0.5
