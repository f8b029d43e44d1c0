import peft
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.importance import requiring_gradients
from gates.scores.weights import gradient_norms, input_weights
from tests.gates.scores.test_importance import losses_of
from tests.models import build, inputs
from tools.coverage import architectures as zoo


def objective(model, batch):
    return losses_of(model, batch).mean()


def found_by(model, batch, unit="head"):
    gates = HeadGates(model, unit).eval()
    weights = input_weights(gates)
    with requiring_gradients(weights):
        return gradient_norms(gates, torch.autograd.grad(objective(model, batch), weights))


def model_of(name):
    if name != "gpt_neox":
        return build(name)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=50, max_position_embeddings=48, **sizes)).eval()


def blocks(name, model):
    """For each layer the gradients of query, key and value, ``[heads, head_dim, in]`` each, as the family stores them."""
    for layer in range(2):
        if name == "bert":
            attention = model.bert.encoder.layer[layer].attention.self
            yield [getattr(attention, part).weight.grad.view(4, 8, 32) for part in ("query", "key", "value")]
        elif name == "llama":
            attention = model.model.layers[layer].self_attn
            yield [getattr(attention, f"{part}_proj").weight.grad.unflatten(0, (-1, 8)) for part in "qkv"]
        elif name == "gpt2":  # [in, out], one after another
            yield list(model.transformer.h[layer].attn.c_attn.weight.grad.T.reshape(3, 4, 8, 32))
        else:  # GPT-NeoX: for each head its query, key and value
            yield model.gpt_neox.layers[layer].attention.query_key_value.weight.grad.view(4, 3, 8, 32).unbind(1)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "gpt_neox"])
def test_equals_ordinary_backpropagation(name):
    model, batch = model_of(name), inputs("llama" if name == "gpt_neox" else name)
    objective(model, batch).backward()
    expected = []
    for parts in blocks(name, model):
        norms = [part.double().square().sum((1, 2)).sqrt() for part in parts]
        query, key, value = (norm.repeat_interleave(4 // len(norm)) for norm in norms)
        expected.append(query * key * value)
    torch.testing.assert_close(found_by(model, batch), torch.cat(expected), atol=0, rtol=1e-4)


def test_a_group_has_the_norm_of_all_its_queries():
    model, batch = build("llama"), inputs("llama")
    heads, groups = found_by(model, batch), found_by(model, batch, "group")
    per_group = len(heads) // len(groups)
    expected = heads.square().view(-1, per_group).sum(1).sqrt()  # key and value are the same in all of them
    torch.testing.assert_close(groups, expected, atol=0, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft's calls of Transformers
def test_adapters_are_refused():
    model = peft.get_peft_model(build("bert"), peft.LoraConfig(target_modules=["query"], r=2))
    with pytest.raises(GateError, match="adapter"):
        input_weights(HeadGates(model))


def test_heads_without_weights_of_their_own_are_refused():
    model = zoo.build(zoo.BY_NAME["DeepseekV3"])  # latent attention: keys and values of all heads from one projection
    with pytest.raises(GateError, match="DeepseekV3Attention has no separate query, key and value weights"):
        input_weights(HeadGates(model))
