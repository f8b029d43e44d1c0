"""Every architecture of the coverage table: found, gated, scored, pruned, saved.

Those of :data:`FAST` stand for the others: one of each way to hold projections, keys and biases. The rest is slow.
"""

import pickle

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from gates.errors import GateError
from gates.export.checkpoint import load_pruned, save_pruned
from gates.head_gates import HeadGates
from gates.hooks.intercept import sparse_site
from gates.hooks.observe import observe_entropy
from gates.hooks.probe import is_bypassed, seen_kinds
from gates.scores.entropy import AttentionEntropy
from gates.scores.importance import head_gradients
from gates.sites import describe_kinds, find_attention
from gates.surgery.pruned import Headless
from gates.surgery.remove import remove_heads_, zero_heads_
from training.coverage import architectures as zoo

FAST = (
    "Bert",
    "Albert",  # one module for all layers
    "GPT2",  # fused in blocks
    "Llama",  # grouped queries
    "Falcon (new decoder)",  # fused in groups, grouped queries
    "T5",  # position biases with an axis of heads
    "Bart",
    "ViT",
    "Longformer",  # gated only
    "Splinter",  # eager attention without a mask that says nothing of causality
    "HYV4",  # looks at the name of its attention's implementation
    "Lilt",  # two streams of heads in one module
)


def by_name(names):
    return pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n not in FAST else []) for n in names])


ALL = by_name(zoo.BY_NAME)
PRUNABLE = [name for name, architecture in zoo.BY_NAME.items() if not architecture.gate_only]
GROUPED = [name for name in PRUNABLE if zoo.BY_NAME[name].kv_heads == 2]
GENERATING = [name for name in PRUNABLE if zoo.BY_NAME[name].generates]
CLOSE = {"atol": 5e-6, "rtol": 2e-5}


def make(name):
    architecture = zoo.BY_NAME[name]
    return architecture, zoo.build(architecture), zoo.inputs(architecture)


def output(model, batch):
    with torch.no_grad():
        return model(**batch)[0]


def generate(model, batch, **more):
    prompt = {key: tensor for key, tensor in batch.items() if key != "decoder_input_ids"}
    return model.generate(**prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, **more)


def masked_and_pruned(name, mask, values=None):
    """What the gated model gives, and the pruned model."""
    _, model, batch = make(name)
    gates = HeadGates(model)
    with gates.attached(), gates.use(mask if values is None else mask * values):
        expected = output(model, batch)
    return expected, remove_heads_(model, mask, values=values), batch


@ALL
def test_every_site_is_found_with_its_kind_and_size(name):
    architecture, model, _ = make(name)
    sites = find_attention(model)
    assert describe_kinds(sites) == architecture.kinds
    assert {(site.heads, site.kv_heads) for site in sites} == {(4, architecture.kv_heads)}
    assert {site.head_dim for site in sites} == set(architecture.head_dims)
    assert len({site.name for site in sites}) == len(sites) == architecture.heads // 4
    assert bool(sites[0].gate_only) == architecture.gate_only


@ALL
def test_gates_of_ones_change_nothing(name):
    architecture, model, batch = make(name)
    expected = output(model, batch)
    gates = HeadGates(model)
    with gates.attached(), gates.use(torch.ones(architecture.heads)):
        assert torch.equal(output(model, batch), expected)
        assert gates.unreached() == []
    assert torch.equal(output(model, batch), expected)


@ALL
def test_a_zero_gate_is_a_zero_block_of_the_output_projection(name):
    """Without the hook: the head's columns of the weight are set to zero in place."""
    architecture, model, batch = make(name)
    gates = HeadGates(model)
    dense = output(model, batch)
    for head in range(0, architecture.heads, 3):
        values = torch.ones(architecture.heads)
        values[head] = 0.0
        with gates.attached(), gates.use(values):
            gated = output(model, batch)
        layer, width = gates.sites[head // 4].output, gates.sites[head // 4].head_dim
        weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        block = slice(width * (head % 4), width * (head % 4 + 1))
        saved = weight[:, block].detach().clone()
        with torch.no_grad():
            weight[:, block] = 0.0
            torch.testing.assert_close(output(model, batch), gated, **CLOSE)
            weight[:, block] = saved
        assert torch.equal(gated, dense) == (head >= architecture.heads - architecture.idle)


@ALL
def test_the_gradient_of_every_gate_matches_finite_differences(name):
    architecture, model, batch = make(name)
    if name in ("Falcon (ALiBi)", "GPTNeoXJapanese", "Doge"):  # the gradient is off for queries that see no key
        batch = zoo.inputs(architecture, padding=False)
    gates = HeadGates(model).eval()

    def losses():
        return (
            model(**batch)[0].double().square().flatten(1).mean(1)
            if batch_first
            else model(**batch)[0].double().square().mean()[None]
        )

    batch_first = output(model, batch).shape[0] == 3 and name != "CLIP"
    rows = head_gradients(gates, losses, granularity="example" if batch_first else "batch")
    assert rows.shape == (3 if batch_first else 1, architecture.heads)
    assert (rows.abs().amax(0) > 0).tolist() == [True] * (architecture.heads - architecture.idle) + [False] * architecture.idle
    gates.attach()
    for head in (0, architecture.heads - 1):
        found = []
        for step in (0.005, -0.005):
            values = torch.ones(architecture.heads)
            values[head] += step
            with torch.no_grad(), gates.use(values):
                found.append(losses())
        torch.testing.assert_close(rows[:, head].double(), (found[0] - found[1]) / 0.01, rtol=0.02, atol=2e-3)


@ALL
def test_entropy_equals_that_of_the_attention_matrices(name):
    architecture, model, batch = make(name)
    sites = find_attention(model)
    metric = AttentionEntropy(sites)
    if sparse_site(sites) is not None:
        with pytest.raises(GateError, match="not defined over all keys"), observe_entropy(model, sites, metric, {}):
            pass
        return
    batch = zoo.inputs(architecture, padding=False)
    expected = output(model, batch)
    with observe_entropy(model, sites, metric, {}):
        assert torch.equal(output(model, batch), expected)
    assert torch.equal(output(model, batch), expected)  # nothing is left behind
    eager = type(model)._from_config(model.config, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    if name == "Falcon (ALiBi)":  # eager adds its bias twice (Transformers 5.23), so nothing to compare with
        return
    with torch.no_grad():
        found = eager.eval()(**batch, output_attentions=True)
    by_kind = {"cross": getattr(found, "cross_attentions", None)}
    if "cross" in architecture.kinds:
        by_kind |= {"encoder": found.encoder_attentions, "decoder": found.decoder_attentions}
    elif name == "CLIP":
        by_kind |= {"encoder": found.vision_model_output.attentions, "decoder": found.text_model_output.attentions}
    else:
        by_kind |= dict.fromkeys(("encoder", "decoder"), found.attentions)
    parts = []
    for site in sites:
        of_kind = by_kind[site.kind]
        matrices = of_kind if len(sites) == 1 else of_kind[site.layer : site.layer + 1]
        totals, count = torch.zeros(4, dtype=torch.float64), 0
        for matrix in matrices:  # several passes where one module is shared by all layers
            p = matrix.double()
            keys = (p > 0).sum(-1)
            if name in ("GptOss", "HYV4"):  # the sink is the rest of the probability
                p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
                keys = keys + 1
            h = -(p * p.clamp(min=1e-300).log()).sum(-1) / keys.clamp(min=2).double().log()
            totals += (h * (keys > 1)).sum((0, 2))
            count += int((keys[:, 0] > 1).sum())
        parts.append(totals / count)
    torch.testing.assert_close(metric.compute(), torch.cat(parts), atol=2e-5, rtol=1e-4)


@ALL
def test_the_kind_of_a_site_is_what_changed_tokens_show(name):
    architecture, model, _ = make(name)
    sites = find_attention(model)
    one = zoo.inputs(architecture, batch=1, padding=False)
    assert seen_kinds(model, sites, lambda: model(**one)) == [site.kind for site in sites]


@ALL
def test_with_all_gates_at_zero_no_token_reaches_another_through_attention(name):
    """Every call of every attention module, with padding: a token that is not a number stays alone."""
    _, model, batch = make(name)
    sites, bypassed = find_attention(model), []

    def look(module, args, kwargs, output):
        gated = [site.output for site in sites if site.module is module]
        bypassed.append(is_bypassed(module, gated, (args, kwargs)))
        assert is_bypassed(module, [nn.Identity()], (args, kwargs))  # without these gates it would not stay alone

    for module in {id(site.module): site.module for site in sites}.values():
        module.register_forward_hook(look, with_kwargs=True)
    output(model, batch)
    assert bypassed.count(False) == len(bypassed) >= len({id(site.module) for site in sites})


@ALL
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_observation_changes_no_bit(name, padding, eager):
    architecture, model, _ = make(name)
    sites = find_attention(model)
    if sparse_site(sites) is not None:
        return
    if eager:
        model.set_attn_implementation("eager")
    batch = zoo.inputs(architecture, padding=padding)
    expected, before = output(model, batch), model.config._attn_implementation
    with observe_entropy(model, sites, AttentionEntropy(sites), {}):
        assert torch.equal(output(model, batch), expected)
        assert model.config._attn_implementation == before
    assert torch.equal(output(model, batch), expected)


@pytest.mark.parametrize("seed", [2, 3])
@by_name(PRUNABLE)
def test_pruned_equals_masked(name, seed):
    architecture = zoo.BY_NAME[name]
    mask = zoo.random_mask(architecture, seed=seed)
    values = torch.rand(len(mask), generator=torch.Generator().manual_seed(9)) if seed == 3 else None
    expected, pruned, batch = masked_and_pruned(name, mask, values)
    torch.testing.assert_close(output(pruned, batch), expected, **CLOSE)
    assert (output(zoo.build(architecture), batch) - expected).abs().max() > 1e-3
    assert sum(site.heads for site in find_attention(pruned)) == int(mask.sum())
    again = remove_heads_(pruned, torch.ones(int(mask.sum())))
    torch.testing.assert_close(output(again, batch), expected, **CLOSE)


@by_name(PRUNABLE)
def test_without_any_head_only_biases_remain(name):
    mask = torch.zeros(zoo.BY_NAME[name].heads)
    expected, pruned, batch = masked_and_pruned(name, mask)
    torch.testing.assert_close(output(pruned, batch), expected, **CLOSE)
    assert sum(isinstance(module, Headless) for module in pruned.modules()) == len(mask) // 4


@by_name(PRUNABLE)
def test_pruning_in_two_steps_equals_one(name):
    heads = zoo.BY_NAME[name].heads
    first = torch.ones(heads)
    first[1::4] = 0.0
    both = first.clone()
    both[2::4] = 0.0
    expected, once, batch = masked_and_pruned(name, both)
    _, twice, _ = masked_and_pruned(name, first)
    remove_heads_(twice, both[first.bool()])
    torch.testing.assert_close(output(twice, batch), expected, **CLOSE)
    assert twice.config.pruned_attention == once.config.pruned_attention
    assert {key: tensor.shape for key, tensor in twice.state_dict().items()} == {
        key: tensor.shape for key, tensor in once.state_dict().items()
    }


@pytest.mark.parametrize(("keep", "kv_heads"), [([1, 1, 1, 0], 3), ([1, 0, 0, 1], 2), ([1, 1, 0, 0], 1), ([0, 0, 0, 1], 1)])
@by_name(GROUPED)
def test_uneven_groups_under_grouped_query_attention(name, keep, kv_heads):
    mask = torch.tensor(keep * 2, dtype=torch.float32)
    expected, pruned, batch = masked_and_pruned(name, mask)
    torch.testing.assert_close(output(pruned, batch), expected, **CLOSE)
    assert {(site.heads, site.kv_heads) for site in find_attention(pruned)} == {(sum(keep), kv_heads)}


@pytest.mark.parametrize("seed", [2, 3])
@by_name(GENERATING)
def test_generation_is_the_same_with_and_without_caches(name, seed):
    architecture, model, batch = make(name)
    mask = zoo.random_mask(architecture, seed=seed)
    gates = HeadGates(model)
    ways = [{}, {"use_cache": False}, {"cache_implementation": "static"}]
    if name == "Falcon (ALiBi)":  # Transformers has no static cache for it, pruned or not
        ways.pop()
    with gates.attached(), gates.use(mask):
        expected = [generate(model, batch, **way) for way in ways]
    remove_heads_(model, mask)
    for way, text in zip(ways, expected, strict=True):
        assert torch.equal(generate(model, batch, **way), text), way


@by_name(PRUNABLE)
def test_saved_and_reloaded_it_is_the_same(name, tmp_path):
    architecture, model, batch = make(name)
    mask = zoo.random_mask(architecture)
    gates = HeadGates(model)
    with gates.attached(), gates.use(mask):
        expected = output(model, batch)
    save_pruned(model, tmp_path / "out", mask, check_batch=batch, tokenizer=None)
    reloaded = load_pruned(tmp_path / "out").eval()
    torch.testing.assert_close(output(reloaded, batch), expected, **CLOSE)
    if name != "Wav2Vec2":  # PyTorch pickles no parametrised modules, those of the dense model included
        assert torch.equal(output(pickle.loads(pickle.dumps(reloaded)), batch), output(reloaded, batch))


@by_name([name for name in zoo.BY_NAME if name not in PRUNABLE])
def test_what_can_only_be_gated_refuses_to_be_pruned_and_can_be_masked(name):
    architecture, model, batch = make(name)
    mask = zoo.random_mask(architecture)
    with pytest.raises(GateError, match="gated but not removed"):
        remove_heads_(model, mask)
    gates = HeadGates(model)
    with gates.attached(), gates.use(mask):
        expected = output(model, batch)
    torch.testing.assert_close(output(zero_heads_(model, mask), batch), expected, **CLOSE)


@pytest.mark.parametrize(("name", "kept"), [("Llama", 4), ("Qwen3", 4), ("Falcon (multi-query)", 4)])
def test_a_smaller_cache(name, kept):
    """Keys stored per token fall with the groups that lose all their query heads; multi-query attention has one key only."""
    architecture, model, batch = make(name)
    mask = torch.tensor([1.0, 1, 0, 0] * 2)

    def key_bytes(model):
        with torch.no_grad():
            layers = model(**batch, use_cache=True).past_key_values.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    before = key_bytes(model)
    assert key_bytes(remove_heads_(model, mask)) * (2 if architecture.kv_heads == 2 else 1) == before


def test_prophetnet_is_refused_with_the_reason():
    config = transformers.ProphetNetConfig(
        hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=4, vocab_size=50,
        num_decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=48,
    )  # fmt: skip
    with pytest.raises(GateError, match="several future tokens"):
        find_attention(transformers.ProphetNetForConditionalGeneration(config))
