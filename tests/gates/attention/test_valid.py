import pytest
import torch
import transformers as t

from gates.attention.sites import find_attention
from gates.attention.valid import key_of, stack_of, valid_by_site, valid_positions
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.recovery.refit import refit_
from gates.recovery.rescale import rescaled_gates
from gates.scores.ablation import MeanHeadOutput
from gates.scores.attention import AttentionConfidence, AttentionEntropy
from gates.scores.observe import observe_attention
from gates.scores.weights import HeadOutputVariance
from tests.models import build
from tools.coverage import architectures as zoo
from tools.coverage.tiny import tiny_config

PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def two_towers():
    """Texts of five tokens and pictures of five rows, both of bidirectional attention."""
    config = tiny_config(t.AltCLIPConfig())
    config.vision_config.image_size, config.vision_config.patch_size = 8, 4
    torch.manual_seed(0)
    model = zoo.randomise_(t.AltCLIPModel(config)).eval()
    batch = {"input_ids": torch.randint(3, 60, (3, 5)), "attention_mask": PADDED, "pixel_values": torch.randn(3, 3, 8, 8)}
    return model, batch


def test_the_innermost_name_wins_over_the_kind():
    sites = find_attention(build("bert"))
    a, b, c = (torch.ones(1, 1) for _ in range(3))
    given = {"encoder": a, "bert.encoder": b, "bert.encoder.layer.1": c}
    assert [key_of(given, site) for site in sites] == ["bert.encoder", "bert.encoder.layer.1"]
    assert all(one is other for one, other in zip(valid_by_site(given, sites), (b, c), strict=True))
    assert valid_by_site({"decoder": a, "bert.enc": b}, sites) == [None, None]
    assert {stack_of(site) for site in sites} == {"bert.encoder.layer"}


def test_a_module_called_as_a_kind_is_no_module():
    """The layers of BART's decoder lie in a module ``decoder``, and those of its cross-attention too."""
    sites = find_attention(t.BartModel(t.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=50)))
    assert {site.kind: key_of({"decoder": None, "encoder": None}, site) for site in sites} == {
        "encoder": "encoder",
        "decoder": "decoder",
        "cross": None,
    }


def test_positions_of_any_number_of_axes():
    states = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(valid_positions(states, None), states.view(6, 2))
    assert torch.equal(valid_positions(states[0], None), states[0])
    assert torch.equal(valid_positions(states, torch.tensor([[1, 0, 0], [0, 0, 1]])), states[[0, 1], [0, 2]])
    with pytest.raises(GateError, match=r"has shape \[3, 2\], but the head outputs have \[2, 3\]"):
        valid_positions(states, torch.ones(3, 2))


def uses():
    model, batch = two_towers()
    gates = HeadGates(model)
    mask = torch.ones(gates.size)
    mask[1] = mask[-2] = 0

    def observed(valid):
        metric = AttentionEntropy(gates.sites)
        with torch.no_grad(), observe_attention(model, gates.sites, [metric, AttentionConfidence(gates.sites)], valid):
            model(**batch)
        return metric.compute()

    def refitted(valid):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        refit_(gates, mask, lambda: [batch], lambda one: model(**one), lambda one: valid)
        weights = [site.output.weight.detach().clone().flatten() for site in gates.sites]
        model.load_state_dict(before)
        return torch.cat(weights)

    def rescaled(valid):
        return rescaled_gates(gates, mask, lambda: [batch], lambda one: model(**one), lambda one: valid)

    return {"observe": observed, "refit": refitted, "rescale": rescaled}


@pytest.mark.parametrize("use", ["observe", "refit", "rescale"])
def test_a_text_mask_is_not_applied_to_pictures_of_the_same_length(use):
    compute = uses()[use]
    with pytest.raises(GateError, match=r"'encoder' would apply to 'text_model\S+' and 'vision_model\S+'"):
        compute({"encoder": PADDED})
    own = compute({"encoder": PADDED, "vision_model": None})
    by_name = compute({"text_model": PADDED})
    assert torch.equal(own, by_name)
    both = compute({"text_model": PADDED, "vision_model": PADDED})
    assert not torch.allclose(own, both, rtol=1e-4)
    assert torch.allclose(compute({"encoder": torch.ones_like(PADDED)}), compute({}))


@pytest.mark.parametrize("metric", [MeanHeadOutput, HeadOutputVariance])
def test_outputs_are_those_of_a_mask_of_their_shape(metric):
    sites = find_attention(build("bert"))
    with pytest.raises(GateError, match=r"has shape \[5, 3\], but the head outputs have \[3, 5\]"):
        metric(sites).update(0, torch.rand(3, 5, 32), PADDED.T)
    packed = metric(sites)
    packed.update(0, torch.rand(7, 32))  # rows of all pictures in one axis
    assert packed.count[0] == 7
