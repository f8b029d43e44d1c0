import pytest
import torch
from transformers import GraniteConfig, GraniteModel

from gates.attention.intercept import observe_head_outputs
from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.ablation import MeanHeadOutput, _only_hides, mean_replacement, uniform_replacement
from gates.scores.importance import head_gradients
from tests.gates.scores.test_importance import losses_of
from tests.models import FAMILIES, build, inputs, logits, projection_inputs, replaced_heads, slope
from tools.coverage import architectures as zoo

NAMES = ["bert", "llama", "marian"]


def means_of(name, model, batch, sites):
    metric = MeanHeadOutput(sites)
    kinds = ["encoder"] if "cross" in FAMILIES[name].kinds else ["encoder", "decoder"]
    valid = dict.fromkeys(kinds, batch.get("attention_mask"))
    with observe_head_outputs(model, sites, lambda site, heads: metric.update(site, heads, valid.get(sites[site].kind))):
        logits(model, batch)
    return metric.compute()


@pytest.mark.parametrize("name", NAMES)
def test_means_are_over_valid_positions(name):
    model, batch = build(name), inputs(name)
    sites = find_attention(model)
    found = means_of(name, model, batch, sites)
    for (path, heads), mean in zip(projection_inputs(model, name, batch).items(), found, strict=True):
        decoder = "cross" in FAMILIES[name].kinds and "encoder.layers" not in path
        rows = heads.flatten(0, 1) if decoder else heads[batch["attention_mask"].bool()]
        torch.testing.assert_close(mean, rows.double().mean(0))


@pytest.mark.parametrize("name", NAMES)
def test_mean_replacement_is_exact_at_both_ends(name):
    model, batch = build(name), inputs(name)
    gates = HeadGates(model).eval().attach()
    means = means_of(name, model, batch, gates.sites)
    expected = logits(model, batch)
    with mean_replacement(gates, means):
        gates.mode = "open"
        assert torch.equal(logits(model, batch), expected)
        gates.set_mask_(torch.ones(gates.size))
        assert torch.equal(logits(model, batch), expected)
    other = build(name)
    for mask in (torch.zeros(gates.size), torch.arange(gates.size) % 3 != 0):
        gates.set_mask_(mask.float())
        with mean_replacement(gates, means), replaced_heads(other, name, mask, lambda site, heads: means[site]):
            assert torch.equal(logits(model, batch), logits(other, batch))
    gates.mode = "open"
    assert torch.equal(logits(model, batch), expected)


@pytest.mark.parametrize("unit", ["head", "group"])
def test_a_gate_between_mixes(unit):
    model, batch = build("llama"), inputs("llama")
    gates = HeadGates(model, unit).eval().attach()
    means = means_of("llama", model, batch, gates.sites)
    values = torch.linspace(0.1, 0.9, gates.size)
    with gates.use(values), mean_replacement(gates, means):
        found = logits(model, batch)
    other, z = build("llama"), gates.to_heads(values).view(2, 4).repeat_interleave(8, 1)
    for site, path in enumerate(FAMILIES["llama"].output_paths):
        other.get_submodule(path).register_forward_pre_hook(
            lambda m, args, site=site: (z[site] * args[0] + (1 - z[site]) * means[site].float(),)
        )
    torch.testing.assert_close(found, logits(other, batch), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mean", "uniform"])
def test_gradients_see_the_replacement(kind):
    """dL/dz at z = 1 is that of z * head + (1 - z) * replacement, by finite differences."""
    model, batch = build("bert").double(), inputs("bert")
    gates = HeadGates(model).eval().attach()
    means = means_of("bert", model, batch, gates.sites)
    gates.mode = "open"

    def context():
        return mean_replacement(gates, means) if kind == "mean" else uniform_replacement(model, gates)

    with context():
        rows = head_gradients(gates, lambda: losses_of(model, batch))
        for head in (1, 6):
            expected = slope(gates, head, lambda: losses_of(model, batch), 1e-5)
            torch.testing.assert_close(rows[:, head].double(), expected, rtol=1e-3, atol=1e-5)
    without = head_gradients(gates, lambda: losses_of(model, batch))
    assert float((rows - without).abs().max()) > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_uniform_replacement_equals_attention_by_hand(name):
    """Softmax of zeros under the mask: the mean value over the keys that a query sees."""
    model, batch = build(name), inputs(name)
    gates = HeadGates(model).eval().attach()
    expected = logits(model, batch)
    with uniform_replacement(model, gates):
        torch.testing.assert_close(logits(model, batch), expected, atol=1e-5, rtol=1e-4)
    mask = (torch.arange(gates.size) % 3 != 0).float()
    gates.set_mask_(mask)
    with uniform_replacement(model, gates):
        found = logits(model, batch)

    other, values = build(name), {}
    visible = batch["attention_mask"].bool()
    for site, path in enumerate(FAMILIES[name].output_paths):
        attention = other.get_submodule(path.rsplit(".", 1)[0].removesuffix(".output"))
        projection = getattr(attention, "v_proj", None) or attention.self.value

        def keep(module, args, output, site=site):
            heads = output.unflatten(-1, (-1, 8))
            values[site] = heads.repeat_interleave(4 // heads.shape[-2], 2)

        projection.register_forward_hook(keep)
    decoder = {"bert": (), "llama": (0, 1), "marian": (2, 4, 6)}[name]

    def instead(site, heads):
        queries, keys = heads.shape[1], values[site].shape[1]
        sees = visible[:, None, :] if keys == visible.shape[1] else torch.ones(3, 1, keys, dtype=torch.bool)
        sees = sees.expand(3, queries, keys)
        if site in decoder:
            sees = sees & torch.ones(queries, keys, dtype=torch.bool).tril()
        scores = torch.zeros(3, queries, keys).masked_fill(~sees, -1e30)
        return torch.einsum("bqk,bkhd->bqhd", scores.softmax(-1), values[site]).flatten(2)

    with replaced_heads(other, name, mask, instead):
        reference = logits(other, batch)
    if name == "llama":  # queries of padding on the left see no key, and what they compute is of no account
        found, reference = found[visible], reference[visible]
    torch.testing.assert_close(found, reference, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Bloom", "on its own"),
        ("T5", "position bias"),
        ("GptOss", "sink"),
        ("Gemma2", "caps"),
        ("Falcon (ALiBi)", "on its own"),
    ],
)
def test_what_cannot_be_uniform_is_refused_with_the_reason(name, reason):
    architecture = zoo.BY_NAME[name]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)
    gates = HeadGates(model).eval().attach()
    before = model.config._attn_implementation
    with pytest.raises(GateError, match=reason), torch.no_grad(), uniform_replacement(model, gates):
        model(**batch)
    assert model.config._attn_implementation == before
    with torch.no_grad():
        model(**batch)  # no hook is left behind


@pytest.mark.parametrize("name", ["Splinter", "NllbMoe"])
def test_open_heads_of_eager_attention_stay_as_they_are(name):
    """Attention without a mask that says nothing of causality was taken for causal."""
    architecture = zoo.BY_NAME[name]
    model, batch = zoo.build(architecture), zoo.inputs(architecture, padding=False)
    gates = HeadGates(model).eval().attach()
    gates.mode = "open"
    with torch.no_grad():
        expected = model(**batch)[0]
        with uniform_replacement(model, gates):
            assert torch.equal(model(**batch)[0], expected)


def test_bad_input_is_named():
    model, batch = build("bert"), inputs("bert")
    gates = HeadGates(model).eval()
    means = means_of("bert", model, batch, gates.sites)
    with pytest.raises(GateError, match="not attached"), mean_replacement(gates, means):
        pass
    with pytest.raises(GateError, match=r"\[32\]"), mean_replacement(gates.attach(), means[:1]):
        pass


def test_the_mean_of_a_site_that_did_not_run_is_0_and_every_site_counts_for_itself():
    metric = MeanHeadOutput(find_attention(build("bert")))
    heads = torch.randn(2, 3, 32, requires_grad=True)
    metric.update(0, heads)
    metric.update(0, heads[:1] + 2)
    first, second = metric.compute()
    expected = torch.cat([heads, heads[:1] + 2]).double().mean((0, 1))
    torch.testing.assert_close(first, expected.detach())
    assert not first.requires_grad
    assert second.tolist() == [0.0] * 32


def test_replaced_heads_are_exact_where_gates_are_closed_by_hand():
    """In half precision too, where taking a replacement away and adding it again would leave its rounding."""
    model, batch = build("bert").to(torch.bfloat16), inputs("bert")
    gates = HeadGates(model).eval().attach()
    means = [torch.full((32,), 0.3), torch.linspace(-1, 1, 32)]
    gates.set_mask_(torch.zeros(8))
    seen = []
    with mean_replacement(gates, means):
        hook = gates.sites[1].output.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        logits(model, batch)
        hook.remove()
    assert torch.equal(seen[0], means[1].to(torch.bfloat16).expand_as(seen[0]))


def test_uniform_attention_has_no_dropout():
    model, batch = build("bert"), inputs("bert", padding=False)
    for module in model.modules():
        if hasattr(module, "attention_probs_dropout_prob"):
            module.attention_probs_dropout_prob = 0.5
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    gates = HeadGates(model).attach()
    gates.set_mask_(torch.zeros(8))
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module.p != 0.5:
            module.p = 0.0
    with uniform_replacement(model, gates):
        first, second = (model(**batch).logits for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(("bias", "reason"), [(0.5, "adds a bias to the scores"), (0.0, None)])
def test_a_mask_of_numbers_may_only_hide(bias, reason):
    model, batch = build("bert"), inputs("bert", padding=False)
    batch["attention_mask"] = torch.full((3, 1, 7, 7), bias).masked_fill(
        torch.eye(7, dtype=torch.bool), torch.finfo(torch.float32).min
    )
    gates = HeadGates(model).eval().attach()
    expected = logits(model, batch)
    if reason is None:
        with uniform_replacement(model, gates):
            torch.testing.assert_close(logits(model, batch), expected)
    else:
        with pytest.raises(GateError, match=reason), uniform_replacement(model, gates):
            logits(model, batch)


def test_a_single_query_is_its_own_mean_and_sums_are_in_double_precision():
    metric = MeanHeadOutput(find_attention(build("bert")))
    heads = torch.rand(1, 20_000, 32, generator=torch.Generator().manual_seed(0)) + 100
    metric.update(0, heads[:, :1])
    metric.update(1, heads)
    first, second = metric.compute()
    assert torch.equal(first, heads[0, 0].double())
    torch.testing.assert_close(second, heads[0].double().mean(0), rtol=1e-13, atol=0)
    assert not metric.count.is_floating_point()


def test_heads_that_change_after_attention_are_refused():
    model, batch = build("bert"), inputs("bert")
    gates = HeadGates(model).eval().attach()
    core = gates.sites[1].core
    core.register_forward_hook(lambda module, args, output: (output[0] * 2, *output[1:]))
    with pytest.raises(GateError, match="changes the heads"), uniform_replacement(model, gates):
        logits(model, batch)


def test_a_position_bias_that_is_0_at_most_places_is_one():
    architecture = zoo.BY_NAME["T5"]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "relative_attention_bias", None) is not None:
                module.relative_attention_bias.weight[1:] = 0.0
                module.relative_attention_bias.weight[0] = 1.0
    gates = HeadGates(model).eval().attach()
    with pytest.raises(GateError, match="position bias"), torch.no_grad(), uniform_replacement(model, gates):
        model(**batch)


def test_the_models_own_scale_of_scores_is_kept():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = GraniteConfig(**sizes, intermediate_size=40, vocab_size=50, attention_multiplier=2.0, pad_token_id=0)
    model, ids = GraniteModel(config).eval(), torch.randint(50, (3, 7))
    gates = HeadGates(model).eval().attach()
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with uniform_replacement(model, gates):
            torch.testing.assert_close(model(ids).last_hidden_state, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_mask_hides_by_the_lowest_number_of_its_dtype(dtype):
    hidden = torch.tensor([True, False, False])
    assert _only_hides(torch.zeros(3, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min))
    assert _only_hides(torch.zeros(3, dtype=dtype).masked_fill(hidden, -torch.inf))
    assert not _only_hides(torch.zeros(3, dtype=dtype).masked_fill(hidden, -1e4))


@pytest.mark.parametrize("is_causal", [True, False])
def test_uniform_attention_sees_the_keys_that_the_call_says(is_causal):
    """A decoder that is told so looks ahead; then the first query's replacement changes with the last token."""
    model = build("llama")
    gates = HeadGates(model).eval().attach()
    gates.set_mask_(torch.zeros(8))
    ids = torch.arange(6).unsqueeze(0)
    other = ids.clone()
    other[0, -1] = 17
    with torch.no_grad(), uniform_replacement(model, gates):
        first, second = (model(tokens, is_causal=is_causal).logits[0, 0] for tokens in (ids, other))
    assert torch.equal(first, second) == is_causal
