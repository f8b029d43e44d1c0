import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.scores import attention as module
from gates.scores.attention import AttentionEntropy, attention_confidence, attention_entropy, visible_keys
from gates.scores.observe import observe_attention
from tests.gates.scores.kernel_cases import cases, exact
from tests.models import build, inputs, logits


def naive(query, key, scale, bias=None):
    """The definition, in float64, with the whole matrix."""
    scores = query.double() @ key.double().transpose(-1, -2) * scale
    p = (scores if bias is None else scores + bias.double()).softmax(-1)
    return -(p * p.clamp(min=1e-300).log()).sum(-1)


@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.floats(0.1, 4.0), st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_entropy_equals_the_naive_sum(heads, queries, keys, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads, queries, 8, generator=generator) * spread
    key = torch.randn(2, heads, keys, 8, generator=generator)
    hidden = torch.rand(2, 1, queries, keys, generator=generator) < 0.3
    hidden[..., 0] = False
    bias = torch.zeros(2, 1, queries, keys).masked_fill(hidden, -torch.inf)
    position = torch.randn(1, heads, queries, keys, generator=generator)
    for b in (None, bias, position, bias + position):
        found = attention_entropy(query, key, 0.35, b)
        torch.testing.assert_close(found.double(), naive(query, key, 0.35, b), atol=2e-5, rtol=1e-5)


CASES = {name: (tensors, more) for name, tensors, more in cases()}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_entropies_confidences_and_visible_keys_are_exact(monkeypatch, name, fused):
    """In float32 by blocks, for inputs of any precision, every shape of mask, and sinks."""
    monkeypatch.setattr(module, "BLOCK", 64)
    if not fused:
        monkeypatch.setattr(module, "_kernel", lambda *arguments: None)
    (query, key), more = CASES[name]
    weights, visible = exact(query, key, 0.3, **more)
    entropy, confidence = (measure(query, key, 0.3, **more) for measure in (attention_entropy, attention_confidence))
    assert entropy.dtype == confidence.dtype == torch.float32
    atol = 1e-4 if fused and "large scores" in name else 2e-5  # a small difference of large numbers
    torch.testing.assert_close(entropy.double(), torch.special.entr(weights).sum(-1), atol=atol, rtol=1e-5)
    largest = weights[..., : key.shape[2]].amax(-1)
    torch.testing.assert_close(confidence.double(), largest, atol=1e-5, rtol=1e-4)
    counts = visible_keys(query, key, more.get("mask"), more.get("causal", False))
    assert torch.equal(counts.expand_as(visible), visible)


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (300, 1)])
def test_causal_attention_of_other_numbers_of_keys(queries, keys):
    """Query i sees the keys 0 to i, as PyTorch's attention has it."""
    query, key = torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8)
    bias = torch.zeros(queries, keys).masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1), -torch.inf)
    assert visible_keys(query, key, None, True).flatten().tolist() == [min(i + 1, keys) for i in range(queries)]
    found = attention_entropy(query, key, 0.35, causal=True)
    torch.testing.assert_close(found.double(), naive(query, key, 0.35, bias), atol=2e-5, rtol=1e-5)


def test_a_kernel_sees_only_the_keys_of_its_block(monkeypatch):
    sizes = []
    kernel = module._kernel

    def noted(query, key, *arguments):
        sizes.append((query.shape[2], key.shape[2]))
        return kernel(query, key, *arguments)

    monkeypatch.setattr(module, "_kernel", noted)
    query = key = torch.randn(1, 1, 600, 8)
    window = torch.ones(600, 600, dtype=torch.bool).tril().triu(-99)
    attention_entropy(query, key, 0.35, causal=True)
    attention_entropy(query, key, 0.35, window[None, None])
    assert sizes == [(600, 600), (256, 256), (256, 355), (88, 187)]


ON_A_GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_without_the_private_operator_the_blocks_give_the_same(monkeypatch, device):
    """Which also says that the operator is there, since without it the scores are right but slow."""
    monkeypatch.setattr(module.entropy_kernel, "supports", lambda *arguments, **more: False)
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 600, 8, device=device), torch.randn(2, 3, 500, 8, device=device)
    hidden = torch.rand(2, 1, 600, 500, device=device) < 0.2
    bias = torch.zeros(2, 1, 600, 500, device=device).masked_fill(hidden, -torch.inf)
    assert module._fused(query, key, 0.3, bias, None) is not None
    fused = attention_entropy(query, key, 0.3, bias)
    monkeypatch.setattr(module, "_fused", lambda *arguments, **more: None)
    torch.testing.assert_close(attention_entropy(query, key, 0.3, bias), fused, atol=2e-5, rtol=1e-5)


def test_float32_under_autocast():
    torch.manual_seed(0)
    query, key, bias = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 9)
    for measure, b in product((attention_entropy, attention_confidence), (None, bias)):
        expected = measure(query, key, 0.3, b)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(measure(query, key, 0.3, b), expected)


def test_a_softcap_changes_the_scores():
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 9, 8) * 3, torch.randn(2, 3, 9, 8)
    bias = torch.zeros(1, 1, 9, 9).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
    scores = 2.0 * (query.double() @ key.double().transpose(-1, -2) * 0.3 / 2.0).tanh()
    p = (scores + bias).softmax(-1)
    expected = -(p * p.clamp(min=1e-300).log()).sum(-1)
    torch.testing.assert_close(attention_entropy(query, key, 0.3, bias, softcap=2.0).double(), expected, atol=1e-5, rtol=1e-5)
    found = attention_confidence(query, key, 0.3, bias, softcap=2.0)
    torch.testing.assert_close(found.double(), p.amax(-1), atol=1e-5, rtol=1e-5)


def test_attention_that_is_not_seen_is_an_error():
    model, batch = build("bert"), inputs("bert")
    other = build("bert", seed=1)
    sites = find_attention(other)
    with pytest.raises(GateError, match="was not seen"), observe_attention(model, sites, [AttentionEntropy(sites)], {}):
        logits(model, batch)


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 40])
def test_rows_of_an_aligned_bias_start_at_multiples_of_16(keys):
    bias = torch.randn(2, 1, 5, keys)
    found = module._aligned(bias)
    assert torch.equal(found, bias)
    assert found.stride(-2) == -(-keys // 16) * 16


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
def test_the_measure_of_a_matrix_takes_its_zeros(dtype, atol):
    weights = torch.randn(2, 3, 5, 6).softmax(-1).masked_fill(torch.rand(2, 3, 5, 6) < 0.4, 0.0)
    weights[..., 0] += 1 - weights.sum(-1)
    entropy = AttentionEntropy(find_attention(build("bert"))).from_matrix(weights.to(dtype))
    torch.testing.assert_close(entropy.double(), torch.special.entr(weights.double()).sum(-1), atol=atol, rtol=1e-5)


def test_normalised_entropy_by_hand():
    entropy, visible = torch.full((1, 1, 4), math.log(2)), torch.tensor([[[0, 1, 2, 8]]])
    assert AttentionEntropy(()).normalised(entropy, visible).flatten().tolist() == pytest.approx([0, 0, 1, 1 / 3])


@pytest.mark.parametrize("fused", [True, False])
def test_attention_to_a_single_key_has_no_entropy(monkeypatch, fused):
    """Also not a tiny negative one, whatever the scores round to."""
    if not fused:
        monkeypatch.setattr(module, "_fused", lambda *arguments, **more: None)
    torch.manual_seed(0)
    entropy = attention_entropy(torch.randn(4, 3, 50, 8) * 200, torch.randn(4, 3, 20, 8), 1.0)
    assert 0 <= float(entropy.min()) < 1e-6
    assert float(entropy.median()) < 1e-3


def test_masks_that_hide_keys_take_the_fused_way_and_others_do_not():
    """A finite summand, however large, moves the mean score."""
    visible = torch.tensor([True, False])
    assert module._only_hides(visible, None)
    for mask, hides in (([0.0, -torch.inf], True), ([0.0, -1e4, -torch.inf], False), ([0.0, 0.5], False)):
        assert module._only_hides(torch.tensor(mask), torch.tensor(mask)) == hides


def test_sites_on_another_device_add_to_the_same_score():
    """The meta device stands in for the second GPU of a model with a device map."""
    entropy = AttentionEntropy(find_attention(build("bert"))).to("meta")
    entropy.update(0, torch.rand(2, 4, 3), torch.full((1, 1, 1), 3), valid=torch.ones(2, 3))
    assert entropy.compute().device.type == "meta"
