"""What the command line and YAML files can say to every data class, through all its parents."""

from __future__ import annotations

import inspect

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser

from training.data.base import TaskData
from training.data.parallel_text import ParallelTextData
from training.data.synthetic import SyntheticData
from training.data.synthetic_translation import SyntheticTranslationData
from training.data.text import TextClassificationData

COMMON = {"eval_batch_size": 5, "score_rows": 6, "max_length": 7, "num_workers": 1, "seed": 8}
CLASSES = {
    SyntheticData: {"batch_size": 64, "eval_batch_size": 128, "score_rows": 1024},
    TextClassificationData: {"batch_size": 32, "eval_batch_size": 128, "score_rows": 2048},
    SyntheticTranslationData: {"batch_tokens": 4096, "eval_batch_size": 64, "score_rows": 2048},
    ParallelTextData: {"batch_tokens": 4096, "eval_batch_size": 64, "score_rows": 2048},
}


def path(data):
    return f"{data.__module__}.{data.__name__}"


def parsed(*arguments):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(TaskData, "data", required=True)
    return parser.parse_args(list(arguments)).data.init_args.as_dict()


@pytest.mark.parametrize("data", CLASSES)
def test_defaults_and_what_is_given_reach_the_class(data):
    defaults = parsed("--data", path(data))
    assert defaults == defaults | {"max_length": 128, "num_workers": 0, "seed": 0} | CLASSES[data]
    given = parsed("--data", path(data), *(f"--data.{name}={value}" for name, value in COMMON.items()))
    assert given == defaults | COMMON


@pytest.mark.parametrize("data", CLASSES)
@pytest.mark.parametrize(("option", "value"), [("scores_rows", "1"), ("kwargs", "1"), ("seed", "one")])
def test_what_no_parent_takes_is_refused(data, option, value):
    with pytest.raises(ArgumentError, match=option):
        parsed("--data", path(data), f"--data.{option}={value}")


@pytest.mark.parametrize("data", CLASSES)
def test_every_argument_is_documented_once(data):
    """In the class that states it; a class that states it again has another default."""
    stated = {}
    for parent in reversed(data.__mro__[: data.__mro__.index(TaskData) + 1]):
        for name, argument in inspect.signature(parent.__init__).parameters.items():
            if name in ("self", "kwargs"):
                continue
            assert name in parent.__doc__
            assert name not in stated or stated[name] != argument.default
            stated[name] = argument.default


def test_the_seed_of_a_run_changes_the_order_as_the_datas_own_does():
    def built(seed, of_run):
        data = SyntheticData(train_rows=48, select_rows=3, test_rows=3, batch_size=8, score_rows=16, seed=seed)
        data.order_by(of_run)
        data.build(None)
        return data

    def seen(data):
        return [batch["input_ids"] for loader in (data.train_dataloader(), data.score_dataloader()) for batch in loader]

    one, other, neither = built(1, 4), built(5, 0), built(1, 0)
    assert all(torch.equal(a, b) for a, b in zip(seen(one), seen(other), strict=True))
    assert one.fingerprint() == other.fingerprint() != neither.fingerprint()
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(seen(one), seen(neither), strict=True))
