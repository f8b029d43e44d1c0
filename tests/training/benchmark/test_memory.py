import os

import pytest
import torch

from training.benchmark import memory
from training.benchmark.alternate import Spread
from training.benchmark.entropy import HEADS, prepare
from training.benchmark.memory import NOISE, peak_megabytes, peaks_in_turn, ratio, spread_of
from training.benchmark.setting import Setting
from training.benchmark.size import Size
from training.runs.cost import STATUS

CPU = torch.device("cpu")
SETTING = Setting("tiny", None, "cpu", 1, (Size(1, 8),))


def ending():
    """Work at which the system ends the process."""
    return lambda: os._exit(1)


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells the peak of a process's memory")
def test_the_definition_of_entropy_takes_its_matrices_and_the_entropy_does_not():
    length = 2048
    matrix = 4 * HEADS * length**2 / 2**20
    assert matrix > NOISE, "shorter texts drown in what the libraries touch"
    peaks = {
        name: peak_megabytes(name, CPU, 1, prepare, SETTING, "float32", "none", length, name)
        for name in ("entropy", "definition")
    }
    assert peaks["definition"] > 2 * matrix
    assert peaks["entropy"] < matrix


def test_a_process_that_is_ended_leaves_no_number():
    assert peak_megabytes("a process that ends", CPU, 1, ending) is None


def test_peaks_that_are_unknown_or_noise_are_not_compared():
    assert ratio([3 * NOISE], [2 * NOISE]).median == 1.5
    assert [ratio([one], [other]) for one, other in ((None, 100.0), (100.0, None), (100.0, NOISE / 2))] == [None] * 3
    assert ratio([], []) is spread_of([]) is spread_of([None]) is None


def test_ratios_are_those_of_the_turns():
    """Not that of two medians, which here would be 1."""
    ones, others = [100.0, 200.0, 400.0, None], [100.0, 400.0, 200.0, 100.0]
    assert ratio(ones, others) == Spread(1.0, 0.75, 1.5)
    assert spread_of(ones) == Spread(200.0, 150.0, 300.0)


def test_variants_take_turns(monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "peak_megabytes", lambda *given: asked.append(given[-1]) or float(len(asked)))
    found = peaks_in_turn("work", CPU, 1, 3, {"a": (ending, ("x",)), "b": (ending, ("y",))})
    assert asked == ["x", "y", "y", "x", "x", "y"]
    assert found == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_systems_that_tell_nothing_yield_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    assert memory._peak("cpu", torch.get_num_threads(), prepare, (SETTING, "float32", "none", 8, "entropy")) is None
