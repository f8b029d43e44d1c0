"""Weights that are handed out are those of the model, whatever its attention implementation."""

import pytest
import torch
from transformers import BartConfig, BartModel, BertConfig, BertModel, GPT2Config, GPT2Model, T5Config, T5Model

from gates import find_attention
from gates.roles.roles import observe_weights
from tests.models import SEQ2SEQ, VOCABULARY

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": VOCABULARY}
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
MODELS = {
    "bert": lambda **more: BertModel(BertConfig(**SIZES, **more)),
    "gpt2": lambda **more: GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, **more)),
    "bart": lambda **more: BartModel(BartConfig(**SEQ2SEQ, **more)),
    "t5": lambda **more: T5Model(T5Config(**T5_SIZES, decoder_start_token_id=0, **more)),
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_model(name, implementation):
    if name == "t5" and implementation == "sdpa":
        pytest.skip("T5 has eager attention alone")
    torch.manual_seed(0)
    model = MODELS[name](attn_implementation=implementation).eval()
    ids = torch.randint(5, VOCABULARY, (3, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name in ("bart", "t5"):
        inputs["decoder_input_ids"] = ids[:, :6]
    sites, seen = find_attention(model), {}
    with torch.no_grad(), observe_weights(model, sites, lambda site, weights: seen.update({site: weights})):
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    own = {
        "encoder": outputs.get("encoder_attentions") or outputs.get("attentions"),
        "decoder": outputs.get("decoder_attentions") or outputs.get("attentions"),
        "cross": outputs.get("cross_attentions"),
    }
    assert len(seen) == len(sites)
    for place, site in enumerate(sites):
        expected = own[site.kind][site.layer]
        torch.testing.assert_close(seen[place][mask.bool().any(-1)], expected, rtol=1e-4, atol=1e-5)
