"""Dense models of runs and comparisons: where they run, and what is said of arguments that cannot be used."""

import json
import shutil

import pytest
import torch

from gates.errors import GateError
from training.analysis.dense_models import dense_of_seeds
from training.comparison.cache import _checksums
from training.runs.fingerprint import key_of


def test_a_run_is_looked_at_on_one_device_whatever_trained_it(full_run):
    ((seed, subject),) = dense_of_seeds(str(full_run[0]), ["--trainer.devices", "2"])
    assert seed == 0
    assert subject.trainer.num_devices == 1


def test_so_is_a_comparison(compared, tmp_path):
    """Its dense model is renamed to that of two processes: how many there were is part of what it is known by."""
    run = shutil.copytree(compared[0], tmp_path / "run")
    ((_, alone),) = dense_of_seeds(str(run))
    known = {path.parent: json.loads(path.read_text()) for path in run.glob("experiments/*/experiment.json")}
    ((folder, determined_by),) = [(folder, told) for folder, told in known.items() if told["experiment"] == "dense"]
    (folder / "experiment.json").write_text(json.dumps(determined_by | {"processes": 2}))
    (folder / "checksums.json").write_text(json.dumps(_checksums(folder)))
    folder.rename(folder.with_name(key_of(determined_by | {"processes": 2})))
    for more in ([], ["--trainer.devices", "2"]):
        ((seed, subject),) = dense_of_seeds(str(run), more)
        assert seed == 0
        assert subject.trainer.num_devices == 1
        for name, value in alone.backbone.state_dict().items():
            assert torch.equal(subject.backbone.state_dict()[name], value)
    with pytest.raises(GateError, match="the dense model of seed 0 with these data and options is not among"):
        list(dense_of_seeds(str(run), ["--model.learning_rate", "0.5"]))


@pytest.mark.parametrize("which", ["compared", "full_run"])
def test_an_argument_that_cannot_be_used_is_not_laid_to_the_configuration(which, request):
    run = str(request.getfixturevalue(which)[0])
    with pytest.raises(GateError, match=r"^what follows -- cannot be used: there is no option data\.nonsense"):
        list(dense_of_seeds(run, ["--data.nonsense", "1"]))
