import pytest
import torch

from gates.attention.sites import find_attention
from gates.scores.attention import AttentionConfidence, AttentionEntropy, attention_confidence, attention_entropy
from gates.scores.observe import observe_attention
from tests.models import FAMILIES, build, inputs, logits
from tools.coverage import architectures as zoo


def matrices(name, model, batch, row):
    """The model's own attention matrices of one example, ``[heads, query, key]`` per site, without padded queries."""
    with torch.no_grad():
        output = model(**{key: tensor[row : row + 1] for key, tensor in batch.items()}, output_attentions=True)
    keep = batch["attention_mask"][row].bool() if "attention_mask" in batch else slice(None)
    if "cross" in FAMILIES[name].kinds:
        both = zip(output.decoder_attentions, output.cross_attentions, strict=True)
        return [m[0, :, keep] for m in output.encoder_attentions] + [m[0] for pair in both for m in pair]
    return [matrix[0, :, keep] for matrix in output.attentions]


@pytest.mark.parametrize("name", ["bert", "llama", "marian", "vit"])
def test_observed_confidence_equals_the_models_own_matrices(name):
    model, batch = build(name), inputs(name)
    sites = find_attention(model)
    kinds = ["encoder"] if "cross" in FAMILIES[name].kinds else ["encoder", "decoder"]
    confidence, entropy = AttentionConfidence(sites), AttentionEntropy(sites)
    with observe_attention(model, sites, [confidence, entropy], dict.fromkeys(kinds, batch.get("attention_mask"))):
        logits(model, batch)
    alone = AttentionEntropy(sites)
    with observe_attention(model, sites, [alone], dict.fromkeys(kinds, batch.get("attention_mask"))):
        logits(model, batch)
    assert torch.equal(entropy.compute(), alone.compute())
    model.set_attn_implementation("eager")
    rows = [matrices(name, model, batch, row) for row in range(3)]
    expected = torch.cat([torch.cat([row[site] for row in rows], 1).amax(-1).mean(1) for site in range(len(sites))])
    torch.testing.assert_close(confidence.compute(), expected.double(), atol=1e-5, rtol=1e-4)


def test_a_model_that_computes_attention_on_its_own():
    architecture = zoo.BY_NAME["Bloom"]
    model, batch = zoo.build(architecture), zoo.inputs(architecture, padding=False)
    sites = find_attention(model)
    metric = AttentionConfidence(sites)
    with observe_attention(model, sites, [metric], {}), torch.no_grad():
        found = model(**batch, output_attentions=True).attentions
    expected = torch.cat([matrix.amax(-1).mean((0, 2)) for matrix in found])
    torch.testing.assert_close(metric.compute(), expected.double(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("metric", [AttentionConfidence, AttentionEntropy])
def test_caps_and_sinks_reach_the_measure(metric):
    torch.manual_seed(0)
    query, key, sink = torch.randn(2, 3, 9, 8) * 3, torch.randn(2, 3, 7, 8), torch.tensor([0.5, -1.0, 3.0])
    measure = {AttentionConfidence: attention_confidence, AttentionEntropy: attention_entropy}[metric]
    observed, plain = metric(find_attention(build("bert"))), measure(query, key, 0.3)
    for more in ({"softcap": 2.0}, {"sink": sink}):
        found = observed.from_scores(query, key, 0.3, None, **more)
        assert torch.equal(found, measure(query, key, 0.3, **more))
        assert not torch.allclose(found, plain, atol=1e-2)
