"""A batch that enters a model again behind its finished layers gives what it would have given from the start."""

import copy

import pytest
import torch
import transformers as t
from torch import nn

from gates.gating.head_gates import HeadGates
from gates.recovery.refit import refit_
from gates.recovery.residual import Block, FinishedStates
from tests.gates.chosen import chosen
from tests.models import FAMILIES, build, inputs, logits

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 60}


def refitted(name, model, mask, calls=None, **more):
    batches = [inputs(name, batch=4, seed=seed) for seed in (1, 2, 3)]

    def forward(batch):
        if calls is not None:
            calls.append(1)
        return logits(model, batch)

    return refit_(HeadGates(model), mask, lambda: batches, forward, lambda batch: {}, **more)


@pytest.mark.parametrize(
    ("name", "dtype"),
    chosen(
        [*((name, torch.float32) for name in FAMILIES), ("bert", torch.float64), ("bart", torch.float64)],
        fast=[("llama", torch.float32), ("bert", torch.float64)],
        integration=[("gpt2", torch.float32), ("bart", torch.float32), ("vit", torch.float32)],
    ),
)
def test_refitting_gives_the_same_bit_by_bit_as_running_from_the_start(name, dtype):
    torch.manual_seed(2)
    model = build(name).eval().to(dtype)
    other, mask = copy.deepcopy(model), (torch.rand(HeadGates(model).size) < 0.6).float()
    done = refitted(name, model, mask)
    assert done == refitted(name, other, mask, keep_states=False)
    assert all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())


class Counted(nn.Module):
    """A stack of layers, of which it is counted how often they run."""

    def __init__(self, layers=4, *, sums=False, in_place=False):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(layers)])
        self.sums, self.in_place, self.ran = sums, in_place, []
        for number, layer in enumerate(self.layers):
            layer.forward = self._counting(number, layer.forward)

    def _counting(self, number, forward):
        def run(x):
            self.ran.append(number)
            return forward(x)

        return run

    def forward(self, x):
        total = x
        for layer in self.layers:
            y = layer(x)
            x = x.add_(y) if self.in_place else x + y if self.sums else y
            total = total + x
        return total if self.sums else x


@torch.no_grad()
def test_finished_blocks_run_once_and_then_no_more():
    model, x = Counted(), torch.randn(2, 3)
    expected, blocks, states = model(x), [Block(f"layers.{n}", layer) for n, layer in enumerate(model.layers)], FinishedStates()
    assert [block.stack for block in blocks] == ["layers"] * 4
    for finished, ran in ((0, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (2, [2, 3]), (3, [2, 3]), (3, [3])):
        model.ran.clear()
        with states.entered(0, blocks[:finished]):
            assert torch.equal(model(x), expected)
        assert model.ran == ran
    model.ran.clear()
    with states.entered(1, blocks[:3]):  # another batch
        model(x)
    assert model.ran == [0, 1, 2, 3]
    assert not any(layer._forward_hooks for layer in model.layers)
    model.ran.clear()
    model(x)
    assert model.ran == [0, 1, 2, 3]


@torch.no_grad()
def test_kept_states_are_not_changed_by_what_follows():
    inner = nn.ModuleList([nn.Identity(), nn.Identity()])

    def run(x):
        return inner[1](inner[0](x.clone()).mul_(2))

    blocks = [Block(f"layers.{n}", layer) for n, layer in enumerate(inner)]
    states, x = FinishedStates(), torch.ones(2)
    for _ in range(3):
        with states.entered(0, blocks[:1]):
            assert torch.equal(run(x), 2 * x)


def count_of_layers(model, name, mask, **more):
    calls = []
    for layer in model.base_model.encoder.layer:
        layer.intermediate.register_forward_hook(lambda module, args, output: calls.append(1))
    refitted(name, model, mask, **more)
    return len(calls)


def test_a_deep_model_costs_each_layer_a_few_passes():
    """Without re-entry the last of n layers alone would cost n."""
    counts = {}
    for depth in (4, 8):
        torch.manual_seed(0)
        config = t.BertConfig(**SIZES | {"num_hidden_layers": depth})
        model = t.BertForSequenceClassification(config).eval()
        mask = torch.tensor([1.0, 0, 1, 0] * depth)
        counts[depth] = count_of_layers(model, "bert", mask)
    assert counts[8] < 2.4 * counts[4]  # not 4 times


class LooksBack(t.BertForSequenceClassification):
    """Uses the output of its first layer beside that of its last, as some models do."""

    def forward(self, **batch):
        seen = []
        hook = self.bert.encoder.layer[0].register_forward_hook(lambda module, args, output: seen.append(output))
        late = self.bert.encoder.layer[3].register_forward_pre_hook(
            lambda module, args: ((args[0] + (seen[0][0] if isinstance(seen[0], tuple) else seen[0])), *args[1:])
        )
        try:
            return super().forward(**batch)
        finally:
            hook.remove()
            late.remove()


@pytest.mark.integration
def test_a_model_that_looks_back_is_run_from_the_start():
    torch.manual_seed(0)
    model = LooksBack(t.BertConfig(**SIZES)).eval()
    other, mask = copy.deepcopy(model), torch.tensor([1.0, 0, 1, 0] * 4)
    done = refitted("bert", model, mask)
    assert done == refitted("bert", other, mask, keep_states=False)
    assert all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert count_of_layers(model, "bert", mask) == count_of_layers(other, "bert", mask)
