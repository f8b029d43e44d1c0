"""Dense models of runs and comparisons: where they run, and what is said of arguments that cannot be used."""

import json

import pytest
import torch

from gates.errors import GateError
from training.analysis.dense_models import dense_of_seeds
from training.comparison.cache import ExperimentCache


def test_a_run_is_looked_at_on_one_device_whatever_trained_it(full_run):
    ((seed, subject),) = dense_of_seeds(str(full_run[0]), ["--trainer.devices", "2"])
    assert seed == 0
    assert subject.trainer.num_devices == 1


def test_so_is_a_comparison(compared, monkeypatch):
    ((_, alone),) = dense_of_seeds(str(compared[0]))
    kinds = {
        path.parent.name: json.loads(path.read_text())["experiment"]
        for path in compared[0].glob("experiments/*/experiment.json")
    }
    (key,) = [key for key, kind in kinds.items() if kind == "dense"]
    read = ExperimentCache._read
    monkeypatch.setattr(ExperimentCache, "_read", lambda cache, _: read(cache, key))  # as if two devices had trained it
    ((seed, subject),) = dense_of_seeds(str(compared[0]), ["--trainer.devices", "2"])
    assert seed == 0
    assert subject.trainer.num_devices == 1
    for name, value in alone.backbone.state_dict().items():
        torch.testing.assert_close(subject.backbone.state_dict()[name], value)


@pytest.mark.parametrize("which", ["compared", "full_run"])
def test_an_argument_that_cannot_be_used_is_not_laid_to_the_configuration(which, request):
    run = str(request.getfixturevalue(which)[0])
    with pytest.raises(GateError, match=r"^what follows -- cannot be used: there is no option data\.nonsense"):
        list(dense_of_seeds(run, ["--data.nonsense", "1"]))
