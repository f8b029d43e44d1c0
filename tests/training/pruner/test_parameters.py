import pytest
import torch

from gates.budget import Budget
from gates.errors import GateError
from gates.families.hard_concrete import Stretch
from gates.head_gates import HeadGates
from gates.objective import TargetBudget
from tests.models import build
from training.pruner.parameters import backbone_groups, gate_groups, matching_parameters


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


def test_multipliers_ascend_where_they_steer():
    gates = HeadGates(build("bert"))
    (own,) = gate_groups(gates, None, learning_rate=0.05, multiplier_learning_rate=0.1)
    assert own["params"][0] is gates.log_alpha
    target = TargetBudget(Budget(2, {}), gates.kind_sizes(), Stretch())
    _, multipliers = gate_groups(gates, target, learning_rate=0.05, multiplier_learning_rate=0.1)
    optimizer = torch.optim.SGD([multipliers])
    target(gates.open_probability(), gates.kind_index(), 1.0).backward()
    optimizer.step()
    assert target.lambda1 > 0  # more heads are open than the budget: the price rises


@pytest.mark.parametrize(
    ("pattern", "message"), [("telepathy", "matches no parameter of Bert"), ("(", "not a regular expression")]
)
def test_patterns_that_match_nothing_are_named(pattern, message):
    with pytest.raises(GateError, match=message):
        matching_parameters(build("bert"), [pattern])
