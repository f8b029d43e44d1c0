import importlib

import pytest
import torch

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.scores.importance import attention_gradients, reduce_matrix
from tests.gates.scores.test_importance import losses_of
from tests.models import build, inputs
from tools.coverage import architectures as zoo


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "marian"])
def test_a_batch_equals_its_examples_whatever_their_padding(name):
    """Each example alone and cut to its own length: hidden keys must not count."""
    model, batch = build(name), inputs(name)
    sites = find_attention(model)
    together = attention_gradients(model, sites, lambda: losses_of(model, batch))
    for row in range(3):
        visible = batch["attention_mask"][row].bool()
        one = {key: tensor[row : row + 1] for key, tensor in batch.items()}
        one |= {key: one[key][:, visible] for key in ("input_ids", "attention_mask")}
        if name == "gpt2":
            one["position_ids"] = torch.arange(7)[visible].unsqueeze(0)
        alone = attention_gradients(model, sites, lambda one=one: losses_of(model, one))
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradients_equal_finite_differences_of_single_weights(name):
    """The attention function is replaced by one in which a single weight of a single head is changed."""
    model, batch = build(name).double(), inputs(name, batch=1, length=5, padding=False)
    model.set_attn_implementation("eager")
    module = importlib.import_module(type(model).__module__)
    eager, step = module.eager_attention_forward, 3e-3  # norms compute in float32
    change: dict = {}

    def attend(core, query, key, value, mask, **kwargs):
        output, weights = eager(core, query, key, value, mask, **kwargs)
        if core.layer_idx == 1 and change:
            head, i, j = change["at"]
            output = output.clone()
            output[0, i, head] += change["step"] * value[0, head // (query.shape[1] // value.shape[1]), j]
        return output, weights

    sites = find_attention(model)
    found = attention_gradients(model, sites, lambda: losses_of(model, batch))
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "eager_attention_forward", attend)
    expected = torch.zeros(4, dtype=torch.float64)
    for head in range(4):
        for i in range(5):
            for j in range(5 if name == "bert" else i + 1):
                losses = []
                for sign in (1, -1):
                    change |= {"at": (head, i, j), "step": sign * step}
                    with torch.no_grad():
                        losses.append(losses_of(model, batch)[0])
                expected[head] += ((losses[0] - losses[1]) / (2 * step)).abs()
    patch.undo()
    torch.testing.assert_close(found[0, 4:].double(), expected, rtol=2e-3, atol=1e-3)


def test_hidden_keys_do_not_count():
    weights, gradient = torch.tensor([[[[0.5, 0.5, 0.0]]]]), torch.tensor([[[[1.0, -2.0, 5.0]]]])
    assert reduce_matrix(weights, gradient).tolist() == [[3.0]]


def test_a_frozen_model_scores_the_same_and_stays_frozen():
    model, batch = build("bert"), inputs("bert")
    sites, before = find_attention(model), model.config._attn_implementation
    expected = attention_gradients(model, sites, lambda: losses_of(model, batch))
    model.requires_grad_(False)
    torch.testing.assert_close(attention_gradients(model, sites, lambda: losses_of(model, batch)), expected)
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["T5", "Bloom", "DebertaV2 (own keys)", "Falcon (ALiBi)", "GptOss", "Gemma2"])
def test_attention_of_every_kind_has_a_score(name):
    architecture = zoo.BY_NAME[name]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)

    def losses():
        output = model(**batch)
        return (output.logits if "logits" in output else output.last_hidden_state).flatten(1).square().sum(1)

    scores = attention_gradients(model, find_attention(model), losses)
    assert scores.shape == (3, architecture.heads)
    assert bool(torch.isfinite(scores).all())
    assert bool((scores.sum(0) > 0).all())


def test_what_has_no_matrix_is_refused():
    architecture = zoo.BY_NAME["Longformer"]
    model = zoo.build(architecture)
    with pytest.raises(GateError, match="no attention matrix"):
        attention_gradients(model, find_attention(model), lambda: torch.zeros(1))
    marian, batch = build("marian"), inputs("marian")
    with pytest.raises(GateError, match="decoder"):
        attention_gradients(
            marian,
            find_attention(marian),
            lambda: marian.get_encoder()(batch["input_ids"]).last_hidden_state.square().flatten(1).sum(1),
        )


def test_one_matrix_for_two_streams_of_heads_is_refused():
    architecture = zoo.BY_NAME["Lilt"]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)
    with pytest.raises(GateError, match="one of its streams"):
        attention_gradients(model, find_attention(model), lambda: model(**batch)[0].flatten(1).mean(1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.detach(), "are not in its graph"),
        (lambda weights: weights * 1, r"does not depend on the attention matrix that BertSelfAttention at '.*layer\.1"),
    ],
)
def test_a_matrix_that_the_loss_does_not_come_from_is_refused(change, said):
    """One of two layers hands out a copy of its matrix, with a graph of its own or without one."""
    model, batch = build("bert"), inputs("bert")
    core = model.bert.encoder.layer[1].attention.self
    core.register_forward_hook(lambda module, args, output: (output[0], change(output[1])))
    with pytest.raises(GateError, match=said):
        attention_gradients(model, find_attention(model), lambda: losses_of(model, batch))


def test_scores_of_a_half_precision_model_are_float32():
    model, batch = build("bert").to(torch.bfloat16), inputs("bert")
    assert attention_gradients(model, find_attention(model), lambda: losses_of(model, batch)).dtype == torch.float32
