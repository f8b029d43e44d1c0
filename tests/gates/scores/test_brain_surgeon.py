"""Removal by an optimal brain surgeon against least squares solved anew for every removal."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.brain_surgeon import RIDGE, SiteMoments, brain_surgeon, output_gradients, removal_errors


def tensor(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def least_error(x, weight, root, kept, ridge):
    """The error that remains when some columns stay: the least squares of a stacked system, price of changes included."""
    price = (ridge * x.square().sum(0).mean()).sqrt() * torch.eye(x.shape[1], dtype=x.dtype)
    stacked = torch.cat([x, price])
    aim = stacked @ weight.T
    best = torch.linalg.lstsq(stacked[:, kept], aim).solution if len(kept) else torch.zeros(0, len(weight), dtype=x.dtype)
    return float(((aim - stacked[:, kept] @ best) @ root).square().sum())


@pytest.mark.parametrize("ridge", [1e-4, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_each_removal_is_the_best_of_all_and_its_error_that_of_least_squares(seed, ridge):
    heads, width, out = 5, 3, 4
    x = tensor(seed, 60, heads * width) @ tensor(seed + 10, heads * width, heads * width)
    weight, root = tensor(seed + 20, out, heads * width), tensor(seed + 30, out, out)
    found = removal_errors(weight, x.T @ x, root @ root.T, heads, ridge=ridge)
    left, lost, least = list(range(heads)), 0.0, 0.0
    while left:
        errors = {}
        for head in left:
            columns = [feature for other in left if other != head for feature in range(other * width, (other + 1) * width)]
            errors[head] = least_error(x, weight, root, columns, ridge)
        if len(left) > 1:  # the first to go by the errors is the lowest of those that are left
            assert min(left, key=lambda head: float(found[head])) == min(left, key=lambda head: errors[head] - lost)
        gone = min(errors, key=errors.__getitem__)
        least = max(least, errors[gone] - lost)
        assert float(found[gone]) == pytest.approx(least, rel=1e-6)
        lost = errors[gone]
        left.remove(gone)


def test_of_two_copies_one_may_go_for_nothing_and_then_the_other_is_dear():
    """A gradient of either copy's gate is as large as that of a head that nothing replaces."""
    x = tensor(1, 200, 4)
    x = torch.cat([x[:, :2], x[:, :2], x[:, 2:]], 1)
    weight = tensor(2, 3, 6)
    errors = removal_errors(weight, x.T @ x / 200, torch.eye(3), 3, ridge=1e-6)
    assert float(min(errors[:2])) < 1e-4
    assert float(max(errors[:2])) > 0.5
    assert float(errors[2]) > 0.5


def test_equal_errors_keep_their_order_and_dead_inputs_cost_nothing():
    same = removal_errors(torch.eye(4), torch.eye(4), torch.eye(4), 4)
    assert same.tolist() == sorted(set(same.tolist()))
    assert removal_errors(torch.eye(4), torch.zeros(4, 4), torch.eye(4), 2).tolist() == [0, 0]


@pytest.mark.parametrize("ridge", [0.0, -1.0])
def test_a_ridge_is_above_0(ridge):
    with pytest.raises(GateError, match="expected a number above 0"):
        removal_errors(torch.eye(2), torch.eye(2), torch.eye(2), 2, ridge=ridge)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, vocab_size=40)
    return BertForSequenceClassification(config).eval()


def losses(model, ids, mask, labels):
    return torch.nn.functional.cross_entropy(model(ids, attention_mask=mask).logits, labels, reduction="none")


def batch_of(tokens):
    torch.manual_seed(1)
    ids, labels = torch.randint(40, (6, 7)), torch.randint(2, (6,))
    mask = (torch.arange(7) < torch.tensor([7, 5, 6, 3, 7, 4]).unsqueeze(1)).long()
    extra = tokens - 7
    return torch.nn.functional.pad(ids, (0, extra), value=3), torch.nn.functional.pad(mask, (0, extra)), labels


def test_gradients_are_those_of_moving_an_output(model):
    ids, mask, labels = batch_of(7)
    gates = HeadGates(model)
    examples, calls = output_gradients(gates, lambda: losses(model, ids, mask, labels))
    assert examples == 6
    assert [site for site, _, _ in calls] == [0, 1]
    step = 1e-2 * torch.randn(16, generator=torch.Generator().manual_seed(2))
    for site, inputs, gradient in calls:
        assert inputs.shape == gradient.shape == (6, 7, 16)
        moved = []
        for sign in (1, -1):

            def move(module, args, output, sign=sign):
                changed = output.clone()
                changed[:, 1] += sign * step
                return changed

            handle = gates.sites[site].output.register_forward_hook(move)
            with torch.no_grad():
                moved.append(float(losses(model, ids, mask, labels).double().sum()))
            handle.remove()
        assert (moved[0] - moved[1]) / 2 == pytest.approx(float((gradient[:, 1] @ step).sum()), rel=0.02, abs=1e-5)


def scored(model, tokens, sizes):
    batches = zip(*(tensor.split(sizes) for tensor in batch_of(tokens)), strict=True)
    return brain_surgeon(HeadGates(model), batches, lambda batch: losses(model, *batch), lambda batch: {"encoder": batch[1]})


def test_padding_and_batching_make_no_difference(model):
    found = scored(model, 7, [6])
    assert found.shape == (8,)
    assert bool((found > 0).all())
    torch.testing.assert_close(scored(model, 11, [6]), found, rtol=1e-3, atol=0)
    torch.testing.assert_close(scored(model, 7, [1, 3, 2]), found, rtol=1e-3, atol=0)


def test_the_scores_of_a_site_are_its_removal_errors_about_the_mean(model):
    ids, mask, labels = batch_of(7)
    gates = HeadGates(model)
    expected = []
    for site, inputs, gradient in output_gradients(gates, lambda: losses(model, ids, mask, labels))[1]:
        x, g = inputs[mask.bool()].double(), gradient[mask.bool()].double()
        x = x - x.mean(0)
        weight = gates.sites[site].output.weight.detach()
        expected.append(removal_errors(weight, x.T @ x / 6, g.T @ g / len(g) / 2, 4, ridge=RIDGE))
    torch.testing.assert_close(scored(model, 7, [6]), torch.cat(expected), rtol=1e-6, atol=0)


def test_a_mask_of_another_size_and_no_positions_are_refused(model):
    moments = SiteMoments(16, 16)
    with pytest.raises(GateError, match="give a mask for each part"):
        moments.update(torch.ones(2, 3, 16), torch.ones(2, 3, 16), 2, torch.ones(2, 4))
    nothing = {"encoder": torch.zeros(6, 7)}
    with pytest.raises(GateError, match="no positions to score heads on"):
        brain_surgeon(HeadGates(model), [batch_of(7)], lambda batch: losses(model, *batch), lambda batch: nothing)
