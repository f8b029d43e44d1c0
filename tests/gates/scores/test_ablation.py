import pytest
import torch

from gates.gating.head_gates import HeadGates
from gates.scores.ablation import ablate, leave_one_out_masks
from gates.surgery.remove import remove_heads_
from tests.gates.scores.test_importance import losses_of
from tests.models import build, inputs


def rows(batch, at):
    return {key: tensor[at] for key, tensor in batch.items()}


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_each_head_left_out_equals_a_model_without_it(name):
    model, batch = build(name), inputs(name)
    gates = HeadGates(model).eval()
    batches = [rows(batch, slice(0, 2)), rows(batch, slice(2, 3))]
    found = ablate(gates, leave_one_out_masks(8), iter(batches), lambda part: losses_of(model, part))
    assert found.shape == (9, 3)
    assert not gates.is_attached
    with torch.no_grad():
        torch.testing.assert_close(found[0], losses_of(model, batch))
        for head in (0, 3, 5):
            pruned = build(name)
            mask = torch.ones(8)
            mask[head] = 0.0
            remove_heads_(pruned, mask)
            torch.testing.assert_close(found[head + 1], losses_of(pruned, batch), atol=1e-3, rtol=1e-4)


def test_several_values_per_example():
    model, batch = build("bert"), inputs("bert")
    gates = HeadGates(model).eval()

    def loss_and_answer(part):
        logits = model(**part).logits
        return torch.stack([logits.square().sum(1), logits.argmax(1).float()], 1)

    found = ablate(gates, torch.stack([torch.ones(8), torch.zeros(8)]), [rows(batch, slice(0, 2)), batch], loss_and_answer)
    assert found.shape == (2, 5, 2)
    assert torch.equal(found[:, :2], found[:, 2:4])
    assert not torch.equal(found[0], found[1])
