"""Heads are multiplied by gates in few operations and without activations of their own."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification

from gates.artefact import GateConfig
from gates.attention.scaling import GatedHeads, gated_linear, multiplies_in_projection, spread_to_columns
from gates.gating.head_gates import HeadGates
from gates.model import get_gated_model
from tests.models import build, inputs

SHAPES = {"shared": (8,), "of each example": (2, 1, 8)}


def tensors(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 3, 8), shape, (5, 8), (5,))
    return [torch.randn(size, dtype=dtype, generator=generator).requires_grad_() for size in sizes]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_projection_of_gated_heads_and_its_first_and_second_derivatives(shape):
    heads, columns, weight, bias = tensors(shape)
    torch.testing.assert_close(gated_linear(heads, columns, weight, bias), linear(heads * columns, weight, bias))
    assert gradcheck(gated_linear, (heads, columns, weight, bias))
    assert gradgradcheck(gated_linear, (heads, columns, weight, bias))
    assert gradcheck(lambda *three: gated_linear(*three, None), (heads, columns, weight))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_autocast_is_that_of_the_plain_layer(shape, create_graph):
    given, found = tensors(shape, torch.float32), []
    for function in (gated_linear, lambda heads, columns, *layer: linear(heads * columns, *layer)):
        with torch.autocast("cpu", torch.bfloat16):
            output = function(*given)
        gradients = torch.autograd.grad(output.float().square().sum(), given, create_graph=create_graph)
        found.append([output, *gradients])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.detach().abs().max()))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gates_of_each_example_by_vmap(shape):
    heads, _, weight, bias = tensors(shape)
    columns = torch.rand(4, *shape, dtype=torch.float64)

    def loss(own):
        return gated_linear(heads, own, weight, bias).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(columns)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(loss)(own) for own in columns]))


def test_other_operations_get_the_product_and_none_gets_heads_without_gates():
    heads, columns, weight, _ = tensors((8,))
    gated = GatedHeads(heads, columns)
    torch.testing.assert_close(gated + 0, heads * columns)
    torch.testing.assert_close(gated.view(6, 8) @ weight.t(), (heads * columns).view(6, 8) @ weight.t())
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="not multiplied by their gates"):
        gated + 0


def test_gates_are_spread_to_columns_of_equal_and_unequal_width():
    assert spread_to_columns(torch.tensor([[1.0, 2.0, 3.0]]), [2, 1], [2, 3]).tolist() == [[1, 2, 3, 3, 3]]
    assert spread_to_columns(torch.tensor([1.0, 2.0, 3.0]), [2, 1], [4, 2]).tolist() == [1, 1, 2, 2, 3, 3]


class Lora(nn.Linear):
    pass


def test_only_a_plain_layer_in_training_multiplies_them_itself():
    heads, layer = torch.ones(2, 8), nn.Linear(8, 5)
    assert not multiplies_in_projection(layer, heads)  # without the hook of the gates
    layer.register_forward_pre_hook(lambda *_: None)
    assert multiplies_in_projection(layer, heads)
    with torch.no_grad():
        assert not multiplies_in_projection(layer, heads)
    layer.register_full_backward_hook(lambda *_: None)
    assert not multiplies_in_projection(layer, heads)
    other = Lora(8, 5)
    other.register_forward_pre_hook(lambda *_: None)
    assert not multiplies_in_projection(other, heads)
    other.__class__ = nn.Linear
    assert multiplies_in_projection(other, heads)
    other.weight.requires_grad_(False)
    assert not multiplies_in_projection(other, heads)


# -- a whole step ------------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts dispatched operations, and copies of a value to the host."""

    def __init__(self):
        super().__init__()
        self.of = Counter()

    @property
    def to_host(self):
        return self.of["aten::_local_scalar_dense"]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def step_of(gated, *, bf16=False, draw_per="batch", dropout=0.0):
    """Return functions for the forward pass of a BERT with 12 sites and for the rest of its step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 50}
    shares = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = BertForSequenceClassification(BertConfig(**sizes, **shares)).train()
    batch = {"input_ids": torch.randint(5, 50, (8, 64)), "labels": torch.zeros(8, dtype=torch.long)}
    groups = [{"params": list(model.parameters())}]
    if gated:
        model = get_gated_model(model, GateConfig(budget=0.5, draw_per=draw_per)).train()
        groups = model.parameter_groups(1e-5)
    optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(**batch).loss

    def finish(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if gated:
            model.step_(0.5, optimizer)

    for _ in range(2):
        finish(forward())
    return forward, finish, model


@pytest.mark.parametrize(
    ("draw_per", "bf16", "most"),
    [("batch", False, 45), ("batch", True, 21), ("example", False, 59), ("example", True, 60)],
)
def test_a_gated_step_dispatches_few_operations_more_and_waits_for_no_value(draw_per, bf16, most):
    """Forward pass, loss, backward pass, fused AdamW with a group for the gates, shared second moment and solved price."""
    found = []
    for gated in (False, True):
        forward, finish, _ = step_of(gated, bf16=bf16, draw_per=draw_per, dropout=0.1)
        with Counted() as counted:
            finish(forward())
        found.append(counted)
    assert found[1].of.total() - found[0].of.total() <= most
    assert found[1].to_host == found[0].to_host


@pytest.mark.parametrize("draw_per", ["batch", "example"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_gated_step_saves_half_a_percent_more_for_the_backward_pass_at_most(bf16, draw_per):
    found = []
    for gated in (False, True):
        forward, _, model = step_of(gated, bf16=bf16, draw_per=draw_per)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved = {}

        def pack(tensor, weights=weights, saved=saved):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = tensor, storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward()
        found.append(sum(size for _, size in saved.values()))
        del loss
    assert found[1] <= 1.005 * found[0]


def test_gates_alone_on_frozen_weights_take_two_thirds_of_the_operations_of_a_plain_step():
    """Neither gradients of weights nor any below the first gates are computed."""
    found = []
    for gated in (False, True):
        forward, _, model = step_of(gated)
        if gated:
            for parameter in model.base_model.parameters():
                parameter.requires_grad_(False)
        with FlopCounterMode(display=False) as counted:
            forward().backward()
        found.append(counted.get_total_flops())
    assert found[1] <= 0.70 * found[0]


def test_gates_alone_compute_no_gradient_below_the_first_site_and_no_dropout():
    """Of 12 layers, the first has no gradient of its attention and its projections of queries, keys and values."""
    _, _, model = step_of(True, dropout=0.1)
    model.base_model.requires_grad_(False).eval()
    with Counted() as counted:
        model(input_ids=torch.randint(5, 50, (8, 64)), labels=torch.zeros(8, dtype=torch.long)).loss.backward()
    products, attention = counted.of["aten::mm"], "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert (products, counted.of[attention]) == (
        11 * 6 + 3 + 2,
        11,
    )  # in a layer q, k, v, output and two of the block; two heads
    assert not [name for name in counted.of if "bernoulli" in name or "dropout" in name]


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler reads it of all tensors
@pytest.mark.parametrize(("backend", "draw_per"), [("eager", "batch"), ("aot_eager", "batch"), ("eager", "example")])
def test_a_gated_forward_pass_compiles_as_one_graph(backend, draw_per):
    model, batch = build("bert").eval(), inputs("bert")
    gates = HeadGates(model, initial_log_alpha=0.0, draw_per=draw_per).attach().train()
    model(**batch)  # the first call looks whether attention passes the gates
    found = []
    for run in (model, torch.compile(model, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        gates.zero_grad()
        run(**batch).logits.square().sum().backward()
        found.append(gates.log_alpha.grad.clone())
    torch.testing.assert_close(*found)
