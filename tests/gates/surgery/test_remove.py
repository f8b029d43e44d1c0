import pytest
import torch

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.surgery.masks import kept_heads
from gates.surgery.remove import remove_heads_, zero_heads_
from tests.models import FAMILIES, GENERATING, build, inputs, logits, masked, random_mask

TOLERANCE = {"atol": 3e-6, "rtol": 1e-5}


@pytest.mark.parametrize("name", GENERATING)
def test_beam_search_is_the_same(name):
    mask, model = random_mask(name), build(name)
    batch = {key: tensor for key, tensor in inputs(name).items() if key != "decoder_input_ids"}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": 3}
    expected = masked(model, mask, lambda: model.generate(**batch, **options))
    assert torch.equal(remove_heads_(model, mask).generate(**batch, **options), expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "marian"])
def test_a_full_mask_changes_nothing(name):
    model = build(name)
    expected = logits(model, inputs(name))
    mask = torch.ones(sum(FAMILIES[name].kinds.values()))
    pruned = remove_heads_(model, mask)
    assert torch.equal(logits(pruned, inputs(name)), expected)
    assert pruned.config.pruned_attention == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_gone(name):
    """Rows of query, columns of output: counted from the shapes, for every head removed."""
    mask, model = random_mask(name), build(name)
    dense = sum(parameter.numel() for parameter in model.parameters())
    sites = find_attention(model)
    kept = kept_heads(sites, mask)
    pruned = remove_heads_(model, mask)
    after = {site.name: site for site in find_attention(pruned)}
    for site in sites:
        if kept[site.name]:
            assert after[site.name].heads == len(kept[site.name])
            assert after[site.name].output.weight.numel() == 32 * 8 * len(kept[site.name])
        else:
            assert site.name not in after
    removed = dense - sum(parameter.numel() for parameter in pruned.parameters())
    heads_gone = int((mask == 0).sum())
    assert removed >= heads_gone * 2 * 32 * 8


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_attention_implementations(attention):
    mask, model, batch = random_mask("llama"), build("llama"), inputs("llama", padding=False)
    expected = masked(model, mask, lambda: logits(model, batch))
    pruned = remove_heads_(model, mask)
    pruned.set_attn_implementation(attention)
    torch.testing.assert_close(logits(pruned, batch), expected, **TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_masked_form_keeps_the_shape(name):
    mask, model = random_mask(name), build(name)
    values = torch.rand(len(mask))
    expected = masked(model, mask * values, lambda: logits(model, inputs(name)))
    shapes = [parameter.shape for parameter in model.parameters()]
    zeroed = zero_heads_(model, mask, values=values)
    torch.testing.assert_close(logits(zeroed, inputs(name)), expected, **TOLERANCE)
    assert [parameter.shape for parameter in zeroed.parameters()] == shapes


def test_a_pruned_model_trains():
    pruned = remove_heads_(build("bert"), random_mask("bert")).train()
    pruned(**inputs("bert")).logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in pruned.parameters())


def test_frozen_weights_stay_frozen():
    model = build("gpt2").requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    pruned = remove_heads_(model, torch.tensor([1.0, 0, 1, 1, 1, 1, 0, 0]))
    assert {name for name, parameter in pruned.named_parameters() if parameter.requires_grad} == {"transformer.wte.weight"}


def test_values_for_another_number_of_heads_are_refused():
    with pytest.raises(GateError, match="gate values have shape"):
        remove_heads_(build("bert"), torch.ones(8), values=torch.ones(7))


def test_unknown_parameters_beside_the_projections_are_refused():
    model = build("llama")
    model.model.layers[0].self_attn.temperatures = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(GateError, match="unknown parameter 'temperatures'"):
        remove_heads_(model, torch.ones(8))


def test_refusals():
    model = build("bert")
    HeadGates(model).attach()
    with pytest.raises(GateError, match="detach"):
        remove_heads_(model, torch.ones(8))
    with pytest.raises(GateError, match="detach"):
        zero_heads_(model, torch.ones(8))
    with pytest.raises(GateError, match="8 heads"):
        remove_heads_(build("bert"), torch.ones(7))
    with pytest.raises(GateError, match=r"the mask has 0\.5 for head 0; expected 0"):
        remove_heads_(build("bert"), torch.full((8,), 0.5))
