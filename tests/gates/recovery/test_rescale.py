import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.recovery.rescale import rescaled_gates
from tests.models import FAMILIES, build, inputs, logits


def batches_of(name):
    return [inputs(name, batch=8, seed=seed) for seed in (1, 2)]


def run(name, model, gates, mask):
    kinds = ["encoder"] if "cross" in FAMILIES[name].kinds else ["encoder", "decoder"]
    return rescaled_gates(
        gates,
        mask,
        lambda: batches_of(name),
        lambda batch: logits(model, batch),
        lambda batch: dict.fromkeys(kinds, batch.get("attention_mask")),
    )


def site_outputs(name, model, gates, values, path):
    """Output of one site's projection at valid queries, stacked over the batches."""
    found = []
    for batch in batches_of(name):
        keep = batch["attention_mask"].bool() if FAMILIES[name].kinds.keys() != {"cross"} else slice(None)
        hook = model.get_submodule(path).register_forward_hook(lambda m, a, out, keep=keep: found.append(out[keep]))
        with gates.use(values):
            logits(model, batch)
        hook.remove()
    return torch.cat(found).double()


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_each_site_is_the_least_squares_fit_given_the_sites_before_it(name):
    model = build(name)
    gates = HeadGates(model).eval().attach()
    mask = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 1])
    values = run(name, model, gates, mask)
    for site, path in enumerate(FAMILIES[name].output_paths):
        dense = site_outputs(name, model, gates, torch.ones(8), path)
        parts, base = [], values.clone().float()
        base[4 * site :] = 0.0
        bias = site_outputs(name, model, gates, base, path)
        kept = [gate for gate in range(4 * site, 4 * site + 4) if mask[gate] == 1]
        for gate in kept:
            alone = base.clone()
            alone[gate] = 1.0
            parts.append((site_outputs(name, model, gates, alone, path) - bias).flatten())
        matrix, target = torch.stack(parts, 1), (dense - bias).flatten()
        reference = torch.linalg.lstsq(matrix, target.unsqueeze(1)).solution.squeeze(1)
        torch.testing.assert_close(values[kept], reference, atol=1e-3, rtol=1e-3)
        error = (matrix @ values[kept] - target).square().sum()
        assert float(error) < float((matrix.sum(1) - target).square().sum())
    assert torch.equal(values == 0, mask == 0)
    assert mask.tolist() == [1, 0, 1, 1, 0, 1, 0, 1]


def test_whole_groups_and_sites_without_heads():
    model = build("llama")
    gates = HeadGates(model, "group").eval()
    values = run("llama", model, gates, torch.tensor([1.0, 0, 0, 0]))
    assert values[1:].tolist() == [0, 0, 0]
    assert float(values[0]) not in (0.0, 1.0)
    assert not gates.is_attached
    assert torch.allclose(run("llama", model, gates, torch.ones(4)), torch.ones(4, dtype=torch.float64), atol=1e-4)


def test_a_removed_twin_is_made_up_for_exactly():
    """The second head of the first site is made a copy of the first, so doubling the first is exact everywhere."""
    model, batch = build("bert"), inputs("bert")
    attention = model.bert.encoder.layer[0].attention
    with torch.no_grad():
        for projection in (attention.self.query, attention.self.key, attention.self.value):
            projection.weight[8:16], projection.bias[8:16] = projection.weight[:8], projection.bias[:8]
        attention.output.dense.weight[:, 8:16] = attention.output.dense.weight[:, :8]
    expected = logits(model, batch)
    gates = HeadGates(model).eval()
    values = run("bert", model, gates, torch.tensor([1.0, 0, 1, 1, 1, 1, 1, 1]))
    assert values.tolist() == pytest.approx([2, 0, 1, 1, 1, 1, 1, 1], abs=1e-3)
    with gates.attached(), gates.use(values.float()):
        torch.testing.assert_close(logits(model, batch), expected, atol=1e-3, rtol=1e-3)


def test_a_mask_of_another_size_is_refused():
    model = build("bert")
    with pytest.raises(GateError, match=r"\[3\]"):
        run("bert", model, HeadGates(model).eval(), torch.ones(3))


@pytest.mark.parametrize(("mask", "sites"), [([1, 1, 1, 1, 1, 0, 0, 1], 2), ([0, 0, 0, 0, 1, 0, 1, 1], 1), ([0] * 8, 0)])
def test_every_site_that_keeps_heads_is_fitted_and_no_other(mask, sites):
    model, calls = build("bert"), []
    gates, batch = HeadGates(model).eval(), inputs("bert")

    def batches():
        calls.append(1)
        return [batch]

    found = [
        rescaled_gates(gates, torch.tensor(mask, dtype=dtype), batches, lambda one: logits(model, one), lambda one: {})
        for dtype in (torch.float32, torch.bool)
    ]
    assert len(calls) == 2 * sites
    assert torch.equal(*found)
    for part, kept in zip(found[0].split(4), torch.tensor(mask).split(4), strict=True):
        fitted = part[kept == 1]
        assert bool((fitted != 0).all())
        if 0 < len(fitted) < 4:
            assert bool((fitted != 1).all())


def test_heads_together_wider_than_the_model():
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 40, "vocab_size": 50}
    model = LlamaModel(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, head_dim=8, **sizes)).eval()
    ids = torch.randint(50, (3, 7))
    with torch.no_grad():
        values = rescaled_gates(HeadGates(model), torch.tensor([1.0, 0, 1, 1]), lambda: [ids], model, lambda batch: {})
    assert (values != 0).tolist() == [True, False, True, True]
