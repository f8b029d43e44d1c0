"""Each rule against its formula, written out."""

import pytest
import torch

from gates.errors import GateError
from gates.relevance.rules import RelevanceGraph


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def relevance(function, *inputs, epsilon=1e-6):
    """Relevances of a function's inputs where its outputs' are their values, and the graph."""
    leaves = [one.double().clone().requires_grad_() for one in inputs]
    with RelevanceGraph(epsilon=epsilon) as graph:
        output = function(*leaves)
    gradients = torch.autograd.grad(output.sum(), leaves)
    return [(leaf * gradient).detach() for leaf, gradient in zip(leaves, gradients, strict=True)], graph.rules.absorbed


def test_a_linear_model_has_the_closed_form():
    """Three linear layers: the relevance of an input is its value times its weight in the product of the matrices."""
    weights = [torch.randn(6, 5).double(), torch.randn(4, 6).double(), torch.randn(1, 4).double()]
    biases = [torch.randn(6).double(), torch.randn(4).double(), torch.randn(1).double()]
    x = torch.randn(3, 5)

    def model(found):
        for weight, bias in zip(weights, biases, strict=True):
            found = torch.nn.functional.linear(found, weight, bias)
        return found

    (found,), absorbed = relevance(model, x, epsilon=1e-12)
    joined = weights[2] @ weights[1] @ weights[0]
    torch.testing.assert_close(found, x.double() * joined, rtol=1e-6, atol=1e-8)
    constant = weights[2] @ (weights[1] @ biases[0] + biases[1]) + biases[2]
    assert float(absorbed["bias"]) == pytest.approx(3 * float(constant), rel=1e-6)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_the_epsilon_rule_is_that_of_its_formula(epsilon):
    x, weight, bias = torch.randn(4).double(), torch.randn(3, 4).double(), torch.randn(3).double()
    (found,), absorbed = relevance(lambda a: torch.nn.functional.linear(a, weight, bias), x, epsilon=epsilon)
    y = weight @ x + bias
    share = y / (y + epsilon * y.sign())
    torch.testing.assert_close(found, ((weight * x) * share.unsqueeze(1)).sum(0))
    assert float(absorbed["bias"]) == pytest.approx(float((bias * share).sum()))
    assert float(absorbed["epsilon"]) == pytest.approx(float((y - y * share).sum()))


def test_a_product_of_two_matrices_gives_half_to_each():
    a, b = torch.randn(2, 3, 4).double(), torch.randn(2, 4, 5).double()
    (of_a, of_b), absorbed = relevance(torch.matmul, a, b, epsilon=1e-3)
    y = a @ b
    parts = a.unsqueeze(-1) * b.unsqueeze(1) * (y / (2 * y + 1e-3 * y.sign())).unsqueeze(2)  # [batch, row, inner, column]
    torch.testing.assert_close(of_a, parts.sum(3))
    torch.testing.assert_close(of_b, parts.sum(1))
    assert float(absorbed["epsilon"]) == pytest.approx(float(y.sum() - of_a.sum() - of_b.sum()))


def test_a_gated_product_gives_half_to_each():
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    (of_a, of_b), _ = relevance(lambda x, y: x * y, a, b)
    torch.testing.assert_close(of_a, (a * b / 2).double())
    torch.testing.assert_close(of_b, (a * b / 2).double())


def test_a_softmax_follows_its_expansion():
    x, upstream = torch.randn(2, 5).double(), torch.randn(2, 5).double()
    (found,), absorbed = relevance(lambda a: torch.softmax(a, -1) * upstream, x)
    s = x.softmax(-1)
    expected = x * (s * upstream - s * (s * upstream).sum(-1, keepdim=True))
    torch.testing.assert_close(found, expected)
    assert float(absorbed["softmax"]) == pytest.approx(float((s * upstream).sum() - expected.sum()))


def test_an_attention_head_hands_on_what_the_rules_say_one_after_the_other():
    """The relevances of keys, queries and values, by rules for relevances and not for gradients."""
    q, k, v = (torch.randn(5, 4).double() for _ in range(3))
    output = torch.randn(4, 4).double()

    def head(query, key, value):
        return torch.nn.functional.linear(torch.softmax(query @ key.T / 2, -1) @ value, output)

    (of_q, of_k, of_v), _ = relevance(head, q, k, v, epsilon=1e-12)
    scores = q @ k.T / 2
    a = scores.softmax(-1)
    z, y = a @ v, (a @ v) @ output.T
    of_z = (z.unsqueeze(1) * output * (y / y).unsqueeze(-1)).sum(1)
    contributions = a.unsqueeze(-1) * v * (of_z / z / 2).unsqueeze(1)  # [query, key, feature]
    of_a = contributions.sum(-1)
    of_scores = scores * (of_a - a * of_a.sum(-1, keepdim=True))
    pairs = q.unsqueeze(1) * k / 2 * (of_scores / scores / 2).unsqueeze(-1)
    torch.testing.assert_close(of_v, contributions.sum(0))
    torch.testing.assert_close(of_q, pairs.sum(1))
    torch.testing.assert_close(of_k, pairs.sum(0))


def test_masked_scores_have_no_relevance():
    x = torch.randn(2, 5)
    hidden = torch.arange(5) > 2
    (found,), absorbed = relevance(lambda a: torch.softmax(a.masked_fill(hidden, -torch.inf), -1) * torch.arange(5), x)
    assert bool((found[:, 3:] == 0).all())
    assert bool(found.isfinite().all())
    assert all(bool(value.isfinite()) for value in absorbed.values())


@pytest.mark.parametrize("function", [torch.nn.functional.gelu, torch.relu, torch.tanh, torch.nn.functional.silu])
def test_an_activation_hands_all_of_its_relevance_on(function):
    x = torch.randn(3, 4).double()
    (found,), _ = relevance(function, x, epsilon=1e-12)
    torch.testing.assert_close(found, function(x))


def test_a_layer_norm_is_linear_with_its_deviation_held():
    x, weight, bias = torch.randn(3, 6).double(), torch.randn(6).double(), torch.randn(6).double()
    upstream = torch.randn(6).double()
    (found,), absorbed = relevance(lambda a: torch.nn.functional.layer_norm(a, (6,), weight, bias, 1e-5) * upstream, x)
    scale = weight * upstream / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(found, x * (scale - scale.mean(-1, keepdim=True)))
    assert float(absorbed["bias"]) == pytest.approx(float(3 * (bias * upstream).sum()))


def test_root_mean_square_norms_are_alike_written_out_or_not():
    x, weight = torch.randn(3, 6), torch.randn(6).double()

    def written(a):
        return weight * (a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6))

    (found,), _ = relevance(written, x)
    (other,), _ = relevance(lambda a: torch.nn.functional.rms_norm(a, (6,), weight, 1e-6), x)
    torch.testing.assert_close(found, other)
    torch.testing.assert_close(found, written(x.double()))  # all relevance stays where it is


def test_sums_hand_on_what_each_part_added():
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    constant = torch.randn(4).double()
    (of_a, of_b), absorbed = relevance(lambda x, y: torch.cat([x - y + constant + 2.0, torch.ones(3, 1).double()], dim=1), a, b)
    torch.testing.assert_close(of_a, a.double())
    torch.testing.assert_close(of_b, -b.double())
    assert float(absorbed["bias"]) == pytest.approx(float(3 * constant.sum() + 3 * 4 * 2 + 3))


def test_an_operation_without_a_rule_is_refused_once_relevance_reaches_it():
    with pytest.raises(GateError, match="'erf', which has no rule"):
        relevance(torch.erf, torch.randn(3))
    relevance(lambda a: a + 0 * torch.erf(a).detach(), torch.randn(3))
    with pytest.raises(GateError, match="'div'"):
        relevance(lambda a, b: a / b, torch.randn(3), torch.randn(3))


def test_an_activation_that_is_overwritten_is_refused():
    weight = torch.randn(3, 3).double()
    with pytest.raises(GateError, match="overwritten"):
        relevance(lambda a: torch.nn.functional.linear(a, weight).add_(1.0), torch.randn(2, 3))
