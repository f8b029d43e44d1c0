import pytest
import torch

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from tests.models import build
from tests.training.runs import make_options
from training.pruner.module import (
    backbone_groups,
    is_of_gates,
    learning_rate_of,
    matching_parameters,
    parameter_groups,
    restore_learning_rates_,
)


def names(model, group):
    return {name for name, parameter in model.named_parameters() if any(parameter is p for p in group["params"])}


def test_matrices_decay_and_biases_and_norms_do_not():
    model = build("bert")
    decayed, plain = backbone_groups(model, 0.1, 0.01)
    assert (decayed["lr"], decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.01, 0.0)
    assert names(model, decayed) | names(model, plain) == {name for name, _ in model.named_parameters()}
    assert not names(model, decayed) & names(model, plain)
    assert all(name.endswith("weight") and "LayerNorm" not in name for name in names(model, decayed))
    assert all(name.endswith("bias") or "LayerNorm" in name for name in names(model, plain))


def test_what_does_not_train_is_in_no_group():
    model = build("bert")
    for parameter in matching_parameters(model, ["bias$", "LayerNorm", "embeddings"]):
        parameter.requires_grad_(False)
    (group,) = backbone_groups(model, 0.1, 0.01)
    assert group["name"] == "backbone"
    assert not any("embeddings" in name for name in names(model, group))


@pytest.mark.parametrize(
    ("pattern", "message"), [("telepathy", "matches no parameter of Bert"), ("(", "not a regular expression")]
)
def test_patterns_that_match_nothing_are_named(pattern, message):
    with pytest.raises(GateError, match=message):
        matching_parameters(build("bert"), [pattern])


def test_all_groups_of_a_run_have_the_learning_rates_of_its_options():
    options = make_options(learning_rate=0.3, gate_learning_rate=0.2, weight_decay=0.5)
    model = build("bert")
    gates = HeadGates(model)
    groups = parameter_groups(model, gates, options)
    assert {group["name"]: (group["lr"], group["weight_decay"]) for group in groups} == {
        "backbone": (0.3, 0.5), "backbone-no-decay": (0.3, 0.0), "gates": (0.2, 0.0),
    }  # fmt: skip
    assert [learning_rate_of(group, options) for group in groups] == [0.3, 0.3, 0.2]
    assert [is_of_gates(group) for group in groups] == [False, False, True]
    assert groups[-1]["params"] == [gates.log_alpha]


def test_other_rates_take_the_place_of_a_checkpoints_from_a_step_on():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 2.0}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (step + 1), lambda step: 1.0])
    restore_learning_rates_(optimizer.param_groups, scheduler, [3.0, 4.0], step=2)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 4.0]
    assert [group["initial_lr"] for group in optimizer.param_groups] == scheduler.base_lrs == [3.0, 4.0]
