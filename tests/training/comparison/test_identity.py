"""What an experiment's key depends on, and what it does not."""

import sys
from dataclasses import replace

import pytest
import torch

from tests.models import FAMILIES
from tests.training.runs import MODEL, make_data, make_pruner, make_setup
from training.comparison.cache import behaviour_of, identity_of_dense, options_of_gates, own_code_of, shape_of
from training.runs.hashing import key_of, weights_fingerprint


def dense_key(setup=None, *, pruner=None, data=None, processes=1):
    setup = setup or make_setup()
    identity = identity_of_dense(setup, pruner or make_pruner(), data or make_data(), processes=processes)
    return key_of(identity)


@pytest.mark.parametrize("changed", [{"hidden_dropout_prob": 0.3}, {"num_attention_heads": 2}, {"hidden_act": "relu"}])
def test_what_a_model_does_with_the_same_weights_is_part_of_its_key(changed):
    keys = [dense_key(pruner=make_pruner(from_scratch=MODEL | more, budget=2)) for more in ({}, {}, changed)]
    assert keys[0] == keys[1] != keys[2]


class OwnData(type(make_data())):
    """Of a module that is not the project's."""


def test_a_users_own_code_is_part_of_the_key_and_the_projects_is_not(monkeypatch):
    own = make_data()
    own.__class__ = OwnData
    before, plain = dense_key(data=own), dense_key()
    assert own_code_of(make_data()) == {}
    assert before != plain
    monkeypatch.setattr(sys.modules[__name__], "__file__", sys.modules["tests.training.runs"].__file__)  # as if it were edited
    assert dense_key(data=own) != before
    assert dense_key() == plain


def test_how_a_translator_generates_is_part_of_its_key():
    model = FAMILIES["marian"].build()
    before = behaviour_of(model)
    model.generation_config.no_repeat_ngram_size = 3
    assert behaviour_of(model) != before


def test_weights_are_part_of_the_key():
    pruner = make_pruner()
    before = dense_key(pruner=pruner), weights_fingerprint(pruner.backbone)
    with torch.no_grad():
        pruner.backbone.classifier.bias[0] += 1e-6
    assert dense_key(pruner=pruner) != before[0]
    assert weights_fingerprint(pruner.backbone) != before[1]


def test_batches_of_evaluation_matter_only_where_they_are_limited():
    setup, data, pruner, keys = make_setup(), make_data(), make_pruner(), {}
    for limit in (None, 1.0, 2):
        for size in (8, 16):
            data.options = replace(data.options, eval_batch_size=size)
            limited = replace(setup, trainer=replace(setup.trainer, limit_test_batches=limit))
            keys[limit, size] = dense_key(limited, pruner=pruner, data=data)
    assert keys[None, 8] == keys[None, 16]
    assert keys[1.0, 8] == keys[1.0, 16]
    assert keys[2, 8] != keys[2, 16]


@pytest.mark.parametrize(
    ("changes", "is_another"),
    [
        ({"finetune": 2.0}, True),
        ({"retrain": 2.0}, False),  # a second cycle of the learning rate
        ({"prune": 1.5, "retrain": 0.5}, False),
        ({"learning_rate": 2e-3}, True),
        ({"freeze": ["classifier"]}, True),
        ({"budget": 5}, False),
        ({"refit": True}, False),
        ({"distil": 0.5}, False),
    ],
)
def test_options_of_the_dense_model_are_part_of_its_key_and_those_of_gates_are_not(changes, is_another):
    pruner, data = make_pruner(), make_data()
    keys = [dense_key(make_setup(**more), pruner=pruner, data=data) for more in ({}, changes)]
    assert (keys[0] != keys[1]) is is_another


def test_other_settings_of_training_are_part_of_the_key():
    """But not where a run writes, nor what it compares."""
    setup, pruner, data = make_setup(), make_pruner(), make_data()
    plain = dense_key(setup, pruner=pruner, data=data)

    def key(changed, **more):
        return dense_key(changed, pruner=pruner, data=data, **more)

    others = [
        setup.with_seed(1),
        replace(setup, trainer=replace(setup.trainer, accumulate_grad_batches=2)),
        replace(setup, weights=replace(setup.weights, average_last=3)),
    ]
    assert len({plain, key(setup, processes=2), *map(key, others)}) == 5
    same = [
        replace(setup, run=replace(setup.run, name="other", run_dir="elsewhere", save_every=3)),
        replace(setup, end=replace(setup.end, compare="full")),
        replace(setup, trainer=replace(setup.trainer, log_every_n_steps=7)),
    ]
    assert {plain} == set(map(key, same))
    assert dense_key(setup, pruner=pruner, data=make_data(train_rows=128)) != plain


def test_swaps_are_no_option_of_gates_but_a_method():
    options = make_setup(swaps=40.0).model
    assert options_of_gates(options) == options_of_gates(replace(options, swaps=0.0))
    assert options_of_gates(options) != options_of_gates(replace(options, init_spread=1.0))


def test_the_shape_of_a_model_is_what_makes_another_like_it():
    pruner = make_pruner()
    shape = shape_of(pruner.backbone)
    other = make_pruner(from_scratch=shape).backbone
    assert {name: tensor.shape for name, tensor in other.state_dict().items()} == {
        name: tensor.shape for name, tensor in pruner.backbone.state_dict().items()
    }
    assert not {"architectures", "transformers_version", "dtype"} & shape.keys()


def test_a_run_that_goes_on_from_another_has_its_history_in_its_keys(tmp_path):
    setup, keys = make_setup(), []
    for content in (b"one", b"one", b"other"):
        (tmp_path / "dense.ckpt").write_bytes(content)
        keys.append(dense_key(replace(setup, run=replace(setup.run, ckpt_path=str(tmp_path / "dense.ckpt")))))
    assert dense_key(setup) != keys[0] == keys[1] != keys[2]
