import pytest
import torch

from gates.gating.head_gates import HeadGates
from gates.scores.importance import gradient_rows, requiring_gradients
from gates.scores.weights import MeanGradients, output_weights, weight_taylor
from tests.gates.scores.test_importance import losses_of
from tests.models import FAMILIES, build, inputs


def gradients_of(gates, model, batches):
    weights = output_weights(gates)
    metric = MeanGradients(weights)
    signed, examples = 0.0, 0
    with requiring_gradients(weights):
        for batch in batches:
            rows = gradient_rows(gates, lambda batch=batch: losses_of(model, batch), weights)
            metric.update(rows.weights, len(rows.example))
            signed, examples = signed + rows.example.double().sum(0), examples + len(rows.example)
    return metric.compute(), signed / examples


@pytest.mark.parametrize("unit", ["head", "group"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "marian"])
def test_without_the_absolute_value_it_is_the_signed_gradient_of_the_gate(name, unit):
    model, batch = build(name), inputs(name)
    gates = HeadGates(model, unit).eval()
    batches = [{key: tensor[rows] for key, tensor in batch.items()} for rows in (slice(0, 2), slice(2, 3))]
    gradients, signed = gradients_of(gates, model, batches)
    found = weight_taylor(gates, gradients, absolute=False)
    torch.testing.assert_close(found, signed, atol=1e-3, rtol=1e-3)
    assert bool((weight_taylor(gates, gradients) >= found.abs() - 1e-9).all())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_equals_ordinary_backpropagation(name):
    model, batch = build(name), inputs(name)
    gates = HeadGates(model).eval()
    gradients, _ = gradients_of(gates, model, [batch])
    (losses_of(model, batch).sum() / 3).backward()
    expected = []
    for path in FAMILIES[name].output_paths:
        weight = model.get_submodule(path).weight
        product = (weight * weight.grad).abs().detach().double()
        columns = product.sum(1 if name == "gpt2" else 0)  # GPT-2 stores [in, out]
        expected += [float(columns[head * 8 : head * 8 + 8].sum()) for head in range(4)]
    assert weight_taylor(gates, gradients).tolist() == pytest.approx(expected, rel=1e-3)


def test_frozen_weights_are_frozen_again():
    model, batch = build("bert").requires_grad_(False), inputs("bert")
    gates = HeadGates(model).eval()
    gradients, _ = gradients_of(gates, model, [batch])
    assert all(float(gradient.abs().sum()) > 0 for gradient in gradients)
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())


def test_gradients_of_batches_count_by_their_examples():
    metric = MeanGradients([torch.zeros(2), torch.zeros(1, 2)])
    metric.update([torch.tensor([1.0, 2.0]), torch.tensor([[4.0, 0.0]])], 3)
    metric.update([torch.tensor([5.0, -2.0]), torch.tensor([[0.0, 8.0]])], 1)
    assert [gradient.tolist() for gradient in metric.compute()] == [[2.0, 1.0], [[3.0, 2.0]]]


def test_scores_are_numbers_in_double_precision_without_a_graph():
    gates = HeadGates(build("bert")).eval()
    scores = weight_taylor(gates, [torch.ones_like(weight) for weight in output_weights(gates)])
    assert scores.dtype == torch.float64
    assert not scores.requires_grad
    expected = [weight.double().abs().sum(0).view(4, 8).sum(1) for weight in output_weights(gates)]
    torch.testing.assert_close(scores, torch.cat(expected).detach(), rtol=1e-13, atol=0)


def test_gradients_that_are_missing_are_no_shorter_score():
    gates = HeadGates(build("bert")).eval()
    weights = output_weights(gates)
    with pytest.raises(ValueError, match="shorter"):
        weight_taylor(gates, weights[:1])
    with pytest.raises(ValueError, match="shorter"):
        MeanGradients(weights).update(weights[:1], 3)
