"""Weights that are handed out are those of the model, whatever its attention implementation."""

import pytest
import torch

from gates import find_attention
from gates.roles.roles import observe_weights
from tests.gates.relevance.models import build, inputs


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "bart", "t5"])
def test_weights_are_those_of_the_model(name, implementation):
    if name == "t5" and implementation == "sdpa":
        pytest.skip("T5 has eager attention alone")
    model = build(name).float()
    model.set_attn_implementation(implementation)
    batch = inputs(model)
    sites, seen = find_attention(model), {}
    with torch.no_grad(), observe_weights(model, sites, lambda site, weights: seen.update({site: weights})):
        model(**batch)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**batch, output_attentions=True)
    own = {
        "encoder": outputs.get("encoder_attentions") or outputs.get("attentions"),
        "decoder": outputs.get("decoder_attentions") or outputs.get("attentions"),
        "cross": outputs.get("cross_attentions"),
    }
    assert len(seen) == len(sites)
    for place, site in enumerate(sites):
        expected = own[site.kind][site.layer]
        torch.testing.assert_close(seen[place], expected, rtol=1e-4, atol=1e-5)
