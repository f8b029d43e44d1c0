"""What a second call of an attention module shows, for modules written by hand of which the answer is known."""

import copy
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn

from gates.attention.output_hooks import is_bypassed
from gates.attention.sites import find_attention
from gates.gating.head_gates import HeadGates
from tests.gates.kinds import seen_kinds
from tests.models import build, inputs, logits


class Streams(nn.Module):
    """Attention with one head, and, if asked for, a second stream of it with another output."""

    def __init__(self, second=False, causal=False, dropout=0.0):
        super().__init__()
        self.value, self.output, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second, self.causal, self.drop = second, causal, nn.Dropout(dropout)
        self.calls = 0

    def forward(self, hidden, keys=None, mask=None):
        self.calls += 1
        if hidden.shape[1] == 5:
            raise RuntimeError("not again")
        keys = hidden if keys is None else keys
        scores = hidden @ keys.transpose(1, 2)
        if self.causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -1e30)
        mixed = scores.softmax(-1) @ self.value(keys)
        first = self.drop(self.output(mixed)) + hidden
        return (first, self.other(mixed) + hidden) if self.second else (first, scores.softmax(-1))


def test_a_second_stream_goes_round_the_gates_of_the_first():
    torch.manual_seed(0)
    one, two, hidden = Streams(), Streams(second=True), torch.randn(2, 6, 8)
    assert is_bypassed(one, [one.output], ((hidden,), {})) is False
    assert is_bypassed(one, [one.other], ((hidden,), {})) is True
    assert is_bypassed(two, [two.output], ((hidden,), {})) is True
    assert is_bypassed(two, [two.output, two.other], ((), {"hidden": hidden})) is False


def test_one_token_tells_nothing_and_a_module_that_cannot_be_called_again_is_not_accused():
    module = Streams(second=True)
    assert is_bypassed(module, [module.output], ((torch.randn(1, 1, 8),), {})) is None
    assert is_bypassed(module, [module.output], ((torch.ones(1, 3, dtype=torch.long),), {})) is None
    assert is_bypassed(module, [module.output], ((torch.randn(2, 5, 8),), {})) is False


def test_the_second_call_leaves_nothing_behind():
    torch.manual_seed(0)
    module, hidden = Streams(dropout=0.5).train(), torch.randn(2, 6, 8)
    module.drop.eval()
    seen = []
    module.output.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    before, state, noise = copy.deepcopy(module.state_dict()), hidden.clone(), torch.get_rng_state()
    is_bypassed(module, [module.output], ((hidden,), {}))
    assert seen == []  # no observer takes it for a call of the model
    assert module.calls == 0  # the call ran on a copy
    assert torch.equal(hidden, state)
    assert torch.equal(torch.get_rng_state(), noise)
    assert module.training
    assert not module.drop.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    module(hidden)
    assert len(seen) == 1


def test_a_causal_mask_makes_bert_a_decoder():
    model, batch = build("bert"), inputs("bert")
    sites = find_attention(model)
    length = batch["input_ids"].shape[1]
    causal = torch.ones(1, 1, length, length).tril().log()
    found = seen_kinds(sites, lambda: model(input_ids=batch["input_ids"][:1], attention_mask=causal))
    assert found == ["decoder", "decoder"]
    assert {site.kind for site in sites} == {"encoder"}


@pytest.mark.parametrize("hidden", [0, -1], ids=["first", "last"])
def test_padded_tokens_do_not_hide_the_kind(hidden):
    model, batch = build("bert"), inputs("bert")
    mask = torch.ones_like(batch["input_ids"][:1])
    mask[:, hidden] = 0
    found = seen_kinds(find_attention(model), lambda: model(input_ids=batch["input_ids"][:1], attention_mask=mask))
    assert found == ["encoder", "encoder"]


@pytest.mark.parametrize("wrap", ["closure", "method", "partial"])
def test_a_forward_that_was_replaced_accuses_nobody(wrap):
    """A closure leads from the copy back to the original module; methods and partial functions are those of the copy."""
    model, batch = build("bert"), inputs("bert")
    expected = logits(model, batch)
    for layer in model.bert.encoder.layer:
        own = layer.attention.forward
        layer.attention.forward = {
            "closure": lambda *args, own=own, **kwargs: own(*args, **kwargs),
            "method": MethodType(type(layer.attention).forward, layer.attention),
            "partial": partial(type(layer.attention).forward, layer.attention),
        }[wrap]
    with HeadGates(model).attached() as gates:
        torch.testing.assert_close(logits(model, batch), expected)
        assert gates._hooks._probed
