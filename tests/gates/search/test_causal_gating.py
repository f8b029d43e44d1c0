"""Roles of heads on models whose needed heads are known, with a head that does harm built into them."""

import copy

import pytest
import torch

from gates.gating.head_gates import HeadGates
from gates.search.causal_gating import ROLES, CausalRoles, causal_roles
from tests.models import build, inputs
from tests.training.truth.models import ScoringContext
from training.truth.compiler import HEAD_SIZE


def needed_heads(subject):
    return [head for heads in subject.functions for head in heads]


def with_harm(name, amount=0.4):
    """A compiled model, with one head of noise turned into a needed head whose output is subtracted; its number."""
    subject = ScoringContext(name)
    needed, per_layer = subject.functions[0][0], subject.program.heads
    layer = needed // per_layer
    in_layer = range(layer * per_layer, (layer + 1) * per_layer)
    harmful = next(head for head in in_layer if head not in needed_heads(subject))
    attention = subject.model.bert.encoder.layer[layer].attention
    source, place = (slice(head % per_layer * HEAD_SIZE, (head % per_layer + 1) * HEAD_SIZE) for head in (needed, harmful))
    with torch.no_grad():
        for linear in (attention.self.query, attention.self.key, attention.self.value):
            linear.weight[place], linear.bias[place] = linear.weight[source], linear.bias[source]
        attention.output.dense.weight[:, place] = -amount * attention.output.dense.weight[:, source]
    return subject, harmful


def batches_of(subject):
    rows = zip(subject.ids.split(32), subject.answers.split(32), strict=True)
    return [{"input_ids": ids, "labels": answers} for ids, answers in rows]


def losses_of(subject):
    def losses(batch):
        logits = subject.model(batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")

    return losses


@pytest.mark.parametrize(("name", "steps"), [("has", 40), pytest.param("bigram", 60, marks=pytest.mark.nightly)])
def test_needed_heads_facilitate_noise_is_irrelevant_and_a_harmful_head_interferes(name, steps):
    subject, harmful = with_harm(name)
    found = causal_roles(subject.gates, batches_of(subject), losses_of(subject), steps=steps)
    needed = needed_heads(subject)
    expected = [
        "facilitating" if head in needed else "interfering" if head == harmful else "irrelevant"
        for head in range(subject.gates.size)
    ]
    assert found.names() == expected
    assert bool((found.agreement() == 1).all())
    assert found.with_price.shape == found.with_reward.shape == (3, subject.gates.size)


def test_the_harmful_head_is_told_by_its_harm_alone():
    """The same weights and no subtraction: the head is noise again."""
    subject = ScoringContext("has")
    found = causal_roles(subject.gates, batches_of(subject), losses_of(subject), steps=40, seeds=[0])
    assert found.names().count("facilitating") == 1
    assert found.names().count("irrelevant") == 5


def test_what_a_head_is_worth_depends_on_the_price():
    subject, _ = with_harm("has")
    dear = causal_roles(subject.gates, batches_of(subject), losses_of(subject), price=50.0, steps=40, seeds=[0])
    assert set(dear.names()) == {"irrelevant"}
    assert bool((dear.with_price == 0).all())
    assert bool((dear.with_reward == 1).all())


def test_everything_is_as_before_and_the_seed_decides():
    model = build("bert")
    gates = HeadGates(model)
    batch = inputs("bert")
    before = copy.deepcopy({**model.state_dict(), "log_alpha": gates.log_alpha.detach()})

    def losses(given):
        return torch.nn.functional.cross_entropy(model(**given).logits, torch.tensor([0, 1, 0]), reduction="none")

    steps = []
    first, again, other = (
        causal_roles(gates, [batch], losses, steps=3, seeds=[seed], advance=lambda: steps.append(1)) for seed in (0, 0, 1)
    )
    assert torch.equal(first.with_price, again.with_price)
    assert torch.equal(first.with_reward, again.with_reward)
    assert not torch.equal(first.with_reward, other.with_reward)
    assert len(steps) == 27
    after = {**model.state_dict(), "log_alpha": gates.log_alpha}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not gates.is_attached


def test_roles_and_agreement_by_hand():
    priced = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.0, 0.2], [0.0, 0.1, 0.0]])
    rewarded = torch.tensor([[1.0, 1.0, 0.0], [0.9, 0.3, 0.0], [1.0, 0.9, 1.0]])
    found = CausalRoles(priced, rewarded)
    assert found.names() == list(ROLES)
    torch.testing.assert_close(found.agreement(), torch.tensor([2 / 3, 2 / 3, 2 / 3], dtype=torch.float64))
    torch.testing.assert_close(found.scores()[1, 0], torch.tensor([0.8, 0.18, 0.1]))
