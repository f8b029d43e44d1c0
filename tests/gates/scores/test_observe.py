"""Observation leaves a model as it is, whatever its attention function makes of masks, dropout and names."""

import copy
import threading

import pytest
import torch
from transformers import BertConfig, BertModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from gates.attention.intercept import attention_calls, implementation, observing, readable_implementation, uncompiled
from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.scores import observe
from gates.scores.attention import AttentionConfidence, AttentionEntropy
from gates.scores.observe import observe_attention
from tests.models import build, inputs, logits
from tools.coverage import architectures as zoo


def entropies(model, batch, **valid):
    sites = find_attention(model)
    metric = AttentionEntropy(sites)
    with torch.no_grad(), observe_attention(model, sites, [metric], valid):
        model(**batch)
    return metric.compute()


@pytest.mark.parametrize("name", ["bert", "llama", "marian"])
def test_eager_and_fused_attention_have_the_same_measures(name):
    found = []
    for way in ("sdpa", "eager"):
        model, batch = build(name), inputs(name)
        model.set_attn_implementation(way)
        sites = find_attention(model)
        metrics = [AttentionEntropy(sites), AttentionConfidence(sites)]
        kinds = ("encoder", "decoder") if name != "marian" else ("encoder",)
        with observe_attention(model, sites, metrics, dict.fromkeys(kinds, batch["attention_mask"])):
            logits(model, batch)
        found.append(torch.stack([metric.compute() for metric in metrics]))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_a_missing_mask_is_what_the_function_takes_it_for():
    """Without a mask, eager attention sees all keys, where PyTorch's asks the module, which is causal if it says nothing."""
    architecture = zoo.BY_NAME["Splinter"]
    batch = zoo.inputs(architecture, padding=False)
    visible = []
    for way in ("eager", "sdpa"):
        model = zoo.build(architecture)
        model.config._attn_implementation = way
        sites = find_attention(model)
        metric = AttentionEntropy(sites)
        with torch.no_grad(), observe_attention(model, sites, [metric], {}):
            model(**batch)
        visible.append(int(metric.count[0]))
    assert visible == [3 * 8, 3 * 7]  # the first query of a causal model sees one key, and does not count


def test_an_implementation_that_cannot_be_read_is_exchanged_for_a_while():
    """Flash attention is not here; so a copy of PyTorch's attention that nobody knows by its name."""

    def strange(*arguments, **more):
        calls.append(1)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, **more)

    calls = []
    AttentionInterface.register("strange", strange)
    try:
        model, batch = build("bert"), inputs("bert")
        expected = entropies(model, batch)
        model.config._attn_implementation = "strange"
        torch.testing.assert_close(entropies(model, batch), expected)
        assert calls == []
        assert model.config._attn_implementation == "strange"
        with readable_implementation(model):
            assert model.config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == "strange"
    finally:
        AttentionInterface._global_mapping.pop("strange")


def test_weights_that_are_no_distribution_are_refused():
    model, batch = build("bert"), inputs("bert")
    model.set_attn_implementation("eager")

    def halved(name, attend, *arguments, **more):
        output, weights = attend(*arguments, **more)
        return output, weights / 2

    with attention_calls(find_attention(model), halved), pytest.raises(GateError, match=r"do not sum to 1 \(off by 0\.5\)"):
        entropies(model, batch)

    def silent(name, attend, *arguments, **more):
        return attend(*arguments, **more)[0], None

    with (
        attention_calls(find_attention(model), silent),
        pytest.raises(GateError, match="does not hand out its attention weights"),
    ):
        entropies(model, batch)


def test_calls_are_wrapped_for_a_while_and_in_each_other():
    look_up = AttentionInterface.get_interface
    model, batch, order = build("bert"), inputs("bert"), []

    def note(label):
        def around(name, attend, *arguments, **more):
            order.append((label, name))
            return attend(*arguments, **more)

        return around

    sites = find_attention(model)
    with attention_calls(sites, note("outer")), attention_calls(sites, note("inner")):
        assert AttentionInterface.get_interface is look_up
        logits(model, batch)
    assert order == [("inner", "sdpa"), ("outer", "sdpa")] * 2
    assert AttentionInterface.get_interface is look_up
    assert all("forward" not in vars(site.core) for site in sites)


def measured(*arguments, **more):
    """The entropy and the visible keys of a direct call of PyTorch's attention."""
    sites, found = find_attention(build("bert"))[:1], []
    calls = observe._Calls(sites, lambda position, measure, visible: found.append((measure(AttentionEntropy(sites)), visible)))
    calls.enter(0)
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    with observe._ScaledDotProducts(calls):
        torch.nn.functional.scaled_dot_product_attention(query, key, key, *arguments, **more)
    return found[0]


@pytest.mark.parametrize("shape", [(5, 5), (4, 5, 5), (1, 5, 5), (2, 4, 5, 5)])
def test_a_mask_is_seen_in_a_direct_call(shape):
    """PyTorch's attention takes its mask as the fourth argument too, and it may be one for all texts."""
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(shape)
    expected, every = measured(attn_mask=mask.expand(2, 4, 5, 5))
    entropy, visible = measured(mask)
    torch.testing.assert_close(entropy, expected)
    assert not torch.allclose(entropy, measured()[0], atol=1e-2)
    assert visible.expand(2, 1, 5).tolist() == every.tolist() == [[[1, 2, 3, 4, 5]]] * 2


def test_dropout_does_not_reach_the_measures_of_eager_attention():
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40, vocab_size=50)
    config.hidden_dropout_prob, config.attention_probs_dropout_prob = 0.0, 0.5
    torch.manual_seed(0)
    model = BertModel(config).eval()
    model.set_attn_implementation("eager")
    batch = {"input_ids": torch.randint(50, (3, 7))}
    expected = entropies(model, batch)
    torch.testing.assert_close(entropies(model.train(), batch), expected)


def overlapping(first, second):
    """Enter the first block, then the second in another thread, leave the first and then the second."""
    inside, may_leave = threading.Event(), threading.Event()

    def other():
        with second:
            inside.set()
            may_leave.wait(60)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        assert inside.wait(60)
    may_leave.set()
    thread.join()


def test_blocks_of_two_threads_leave_the_compiler_as_it_was():
    before = torch._dynamo.eval_frame._stance
    overlapping(uncompiled(), uncompiled())
    models = build("bert"), build("bert")
    overlapping(*(observing(model, find_attention(model)) for model in models))
    assert torch._dynamo.eval_frame._stance is before
    with uncompiled():
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    with pytest.raises(KeyboardInterrupt), uncompiled():
        raise KeyboardInterrupt
    assert torch._dynamo.eval_frame._stance is before


def test_models_of_one_config_do_not_share_another_implementation():
    config = build("bert").config
    one, other = BertModel(config), BertModel(config)
    with implementation(one, "eager"):
        assert {part.config._attn_implementation for part in one.modules() if hasattr(part, "config")} == {"eager"}
        assert other.config._attn_implementation == config._attn_implementation == "sdpa"
    assert all(part.config is config for part in one.modules() if hasattr(part, "config"))
    overlapping(implementation(one, "eager"), implementation(other, "eager"))
    assert config._attn_implementation == "sdpa"


def test_calls_of_another_model_are_not_sent_through():
    one, other, seen = build("bert"), build("bert"), []
    note = lambda name, attend, *arguments, **more: seen.append(name) or attend(*arguments, **more)  # noqa: E731
    batch = inputs("bert")
    before = logits(other, batch)
    with attention_calls(find_attention(one), note):
        assert torch.equal(logits(other, batch), before)
        assert seen == []
        logits(copy.deepcopy(one), batch)
    assert seen == ["sdpa", "sdpa"]
    overlapping(attention_calls(find_attention(one), note), attention_calls(find_attention(one), note))
    assert all("forward" not in vars(part) for part in one.modules())


def test_two_threads_that_score_one_model_take_turns():
    model = build("bert")
    batches = [inputs("bert"), {name: tensor[:1] for name, tensor in inputs("bert").items()}]
    expected, found = [entropies(model, batch) for batch in batches], {}

    def score(number):
        found[number] = [entropies(model, batches[number]) for _ in range(10)]

    threads = [threading.Thread(target=score, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, one in enumerate(expected):
        assert all(torch.equal(again, one) for again in found[number])
