"""Heads are removed from attention that has parameters with an axis of heads, masks with one, or a head size of its own."""

import pytest
import torch
import transformers as t

from gates.attention.inputs import example_inputs
from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import load_pruned, save_pruned
from gates.surgery.remove import remove_heads_
from gates.surgery.slices import per_head_parts
from tests.gates.layouts import TEXT, WINDOWS
from tests.models import masked

PICTURE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 16}
FUNNEL = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 40, "vocab_size": 50, "block_sizes": [1, 1]}
MODELS = {
    "DeBERTa": lambda: t.DebertaModel(
        t.DebertaConfig(**TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16)
    ),
    "Funnel": lambda: t.FunnelModel(t.FunnelConfig(**FUNNEL, num_decoder_layers=1)),
    "Swin": lambda: t.SwinModel(t.SwinConfig(**WINDOWS)),
    "Swin v2": lambda: t.Swinv2Model(t.Swinv2Config(**WINDOWS)),
    "Donut": lambda: t.DonutSwinModel(t.DonutSwinConfig(**WINDOWS)),
    "BEiT": lambda: t.BeitModel(t.BeitConfig(**PICTURE, patch_size=4, use_relative_position_bias=True)),
    "BLIP": lambda: t.BlipVisionModel(t.BlipVisionConfig(**PICTURE, patch_size=4)),
    "BLIP-2": lambda: t.Blip2VisionModel(t.Blip2VisionConfig(**PICTURE, patch_size=4)),
}  # fmt: skip


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model, example_inputs(model, length=8)


@torch.no_grad()
def output(model, inputs):
    return model(**inputs)[0]


def mask_of(sites):
    """All heads of the last site go; of the others those that are odd."""
    parts = [torch.tensor([float(head % 2 == 0) for head in range(site.heads)]) for site in sites]
    parts[-1][:] = 0
    return torch.cat(parts)


@pytest.mark.parametrize("name", MODELS)
def test_removed_saved_and_loaded_equals_gated(name, tmp_path):
    model, inputs = build(name)
    mask, dense = mask_of(find_attention(model)), output(model, inputs)
    expected = masked(model, mask, lambda: output(model, inputs))
    assert (dense - expected).abs().max() > 1e-3
    save_pruned(model, tmp_path / "export", mask, check_batch=inputs, tokenizer=None)
    loaded = load_pruned(tmp_path / "export", model_class=type(model)).eval()
    torch.testing.assert_close(output(loaded, inputs), expected, atol=1e-4, rtol=1e-4)
    assert sum(map(torch.Tensor.numel, loaded.parameters())) < sum(map(torch.Tensor.numel, model.parameters()))


def test_what_has_an_axis_of_heads_is_known_by_its_size():
    found = {name: {part.path: part.form for part in per_head_parts(find_attention(build(name)[0])[0])} for name in MODELS}
    assert found["DeBERTa"] == {"self.q_bias": "features", "self.v_bias": "features"}
    assert set(found["Funnel"]) == {"r_w_bias", "r_r_bias", "r_s_bias", "r_kernel", "seg_embed"}
    assert found["Swin"] == {"relative_position_bias.relative_position_bias_table": "rows"}
    assert found["Swin v2"] == {"self.logit_scale": "rows"}
    assert found["BLIP"] == found["BEiT"] == {}


def test_heads_that_are_mixed_with_each_other_stay():
    model = t.DebertaModel(t.DebertaConfig(**TEXT, talking_head=True))
    with pytest.raises(GateError, match=r"unknown parameter 'head_logits_proj\.weight'"):
        remove_heads_(model, torch.ones(8))
