import pytest
import torch

from gates.attention.intercept import observe_head_outputs
from gates.attention.sites import find_attention
from gates.gating.head_gates import HeadGates
from gates.scores.ablation import mean_replacement
from gates.scores.weights import HeadOutputVariance, fluctuation
from tests.gates.scores.test_replacement import means_of
from tests.models import FAMILIES, build, inputs, logits, projection_inputs


def variances_of(model, batch):
    sites = find_attention(model)
    metric = HeadOutputVariance(sites)
    valid = batch.get("attention_mask")
    with observe_head_outputs(model, sites, lambda site, heads: metric.update(site, heads, valid)):
        logits(model, batch)
    return metric.compute()


@pytest.mark.parametrize("unit", ["head", "group"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_by_hand(name, unit):
    """The metric WIFV of the released code, standardised by layer and averaged over a head's features."""
    model, batch = build(name), inputs(name)
    gates = HeadGates(model, unit).eval()
    expected, seen = [], projection_inputs(model, name, batch)
    for path, size in zip(FAMILIES[name].output_paths, gates.sizes, strict=True):
        weight = model.get_submodule(path).weight.detach().double()
        columns = weight.T if name == "gpt2" else weight  # GPT-2 stores [in, out]
        metric = seen[path][batch["attention_mask"].bool()].double().var(0) * columns.pow(2).sum(0)
        metric = (metric - metric.mean()) / metric.std()
        expected.append(metric.reshape(size, -1).mean(1))
    found = fluctuation(gates, variances_of(model, batch))
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-6, rtol=1e-6)


def test_a_constant_head_does_not_fluctuate_however_large_it_is():
    gates = HeadGates(build("bert")).eval()
    variances = [torch.rand(32, dtype=torch.float64, generator=torch.Generator().manual_seed(site)) + 1 for site in range(2)]
    variances[0][8:16] = 0.0  # the second head
    found = fluctuation(gates, variances)
    assert int(found.argmin()) == 1
    assert fluctuation(gates, [torch.zeros(32), variances[1]])[:4].tolist() == [0.0] * 4


@torch.no_grad()
def test_mean_replacement_is_its_compensation_in_the_bias():
    """``b + W_closed E[x_closed]`` in the bias of a projection without closed heads, which is what the paper adds."""
    model, batch, mask = build("bert"), inputs("bert"), torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1])
    gates = HeadGates(model).eval().attach()
    means = means_of("bert", model, batch, gates.sites)
    with gates.use(mask), mean_replacement(gates, means):
        replaced = logits(model, batch)
    for site, (path, mean) in enumerate(zip(FAMILIES["bert"].output_paths, means, strict=True)):
        projection = model.get_submodule(path)
        closed = (mask[4 * site : 4 * site + 4] == 0).repeat_interleave(8)
        projection.bias += projection.weight[:, closed] @ mean[closed].float()
    with gates.use(mask):
        torch.testing.assert_close(logits(model, batch), replaced, atol=1e-5, rtol=1e-4)
