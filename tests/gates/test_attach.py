import copy

import pytest
import torch

from gates.attach import HeadGates, scale_heads
from gates.errors import GateError
from tests.models import FAMILIES, build, inputs, logits, random_mask


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gates_of_one_change_nothing(name, attention):
    model, batch = build(name), inputs(name)
    model.set_attn_implementation(attention)
    expected = logits(model, batch)
    gates = HeadGates(model).eval()
    with gates.attached(), gates.use(torch.ones(gates.heads)):
        assert torch.equal(logits(model, batch), expected)
    with gates.attached():  # near-open start, in evaluation mode
        assert torch.equal(logits(model, batch), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gate_equals_scaling_the_columns_of_the_output_projection(name):
    model, batch = build(name), inputs(name)
    gates = HeadGates(model)
    values = torch.rand(gates.heads, generator=torch.Generator().manual_seed(0)) * random_mask(name)
    with gates.attached(), gates.use(values):
        gated = logits(model, batch)
    scaled = copy.deepcopy(model)
    paths = {site.name: part for site, part in zip(gates.sites, values.split(gates.sizes), strict=True)}
    for path in FAMILIES[name].output_paths:
        site = max((name for name in paths if path.startswith(name + ".")), key=len)
        projection = scaled.get_submodule(path)
        columns = paths[site].repeat_interleave(8)
        with torch.no_grad():
            projection.weight.mul_(columns.unsqueeze(1) if name == "gpt2" else columns.unsqueeze(0))
    torch.testing.assert_close(gated, logits(scaled, batch), atol=2e-6, rtol=1e-5)
    assert (gated - logits(model, batch)).abs().max() > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_per_example_gates_equal_example_by_example(name):
    model, batch = build(name), inputs(name)
    gates = HeadGates(model).attach()
    values = torch.rand(3, gates.heads, generator=torch.Generator().manual_seed(0))
    with gates.use(values):
        together = logits(model, batch)
    for row in range(3):
        with gates.use(values[row]):
            alone = logits(model, {key: tensor[row : row + 1] for key, tensor in batch.items()})
        valid = batch["attention_mask"][row].bool() if "attention_mask" in batch and alone.shape[1] == 7 else slice(None)
        torch.testing.assert_close(
            together[row][valid] if alone.dim() == 3 else together[row],
            alone[0][valid] if alone.dim() == 3 else alone[0],
            atol=3e-6,
            rtol=1e-4,
        )


@pytest.mark.parametrize("name", ["bert", "marian", "llama"])
def test_gradients_reach_every_gate(name):
    model = build(name)
    gates = HeadGates(model, initial_log_alpha=0.5).attach().train()
    torch.manual_seed(0)
    sum(model(**inputs(name)).logits.square().mean() for _ in range(8)).backward()
    assert bool((gates.log_alpha.grad != 0).all())


def test_one_draw_per_call_shared_over_the_batch():
    model, batch = build("bert"), inputs("bert", padding=False)
    batch = {key: tensor[:1].expand(4, -1) for key, tensor in batch.items()}
    HeadGates(model, initial_log_alpha=0.0).attach().train()
    first, second = logits(model, batch), logits(model, batch)
    torch.testing.assert_close(first[0], first[3])
    assert not torch.allclose(first, second)


def test_one_draw_per_example_shared_over_positions():
    model, batch = build("bert"), inputs("bert", padding=False)
    batch = {key: tensor[:1].expand(4, -1) for key, tensor in batch.items()}
    gates = HeadGates(model, initial_log_alpha=0.0, draw_per="example").attach().train()
    drawn = logits(model, batch)
    assert not torch.allclose(drawn[0], drawn[3])
    gates.generator = torch.Generator().manual_seed(3)
    drawn = logits(model, batch)
    values = gates.hard_concrete(torch.Generator().manual_seed(3), draws=4)
    with torch.no_grad(), gates.use(values):
        torch.testing.assert_close(logits(model, batch), drawn)


def test_detach_leaves_no_trace():
    model, batch = build("bert"), inputs("bert")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    expected = logits(model, batch)
    gates = HeadGates(model).attach()
    gates.set_mask_(torch.zeros(gates.heads))
    assert not torch.allclose(logits(model, batch), expected)
    gates.detach()
    assert torch.equal(logits(model, batch), expected)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert not module._forward_pre_hooks
    assert not gates.is_attached


def test_attached_restores_after_an_exception():
    model = build("bert")
    gates = HeadGates(model)
    with pytest.raises(RuntimeError, match="inside"), gates.attached():
        raise RuntimeError("inside")
    assert not gates.is_attached


def test_a_head_is_never_gated_twice():
    model = build("bert")
    gates = HeadGates(model).attach()
    with pytest.raises(GateError, match="attached already"):
        gates.attach()
    with pytest.raises(GateError, match="other gates"):
        HeadGates(model).attach()


def test_the_model_does_not_own_the_gates_and_the_gates_do_not_own_the_model():
    model = build("bert")
    names = [name for name, _ in model.named_parameters()]
    gates = HeadGates(model).attach()
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in gates.named_parameters()] == ["hard_concrete.log_alpha"]


def test_state_survives_a_round_trip():
    gates = HeadGates(build("bert"))
    gates.set_mask_(random_mask("bert"))
    with torch.no_grad():
        gates.log_alpha.normal_()
    other = HeadGates(build("bert"))
    other.load_state_dict(gates.state_dict())
    assert other.mode == "masked"
    assert torch.equal(other.mask, gates.mask)
    assert torch.equal(other.log_alpha, gates.log_alpha)


def test_state_of_another_model_is_refused():
    with pytest.raises(GateError, match="use the model it was trained with"):
        HeadGates(build("bert")).load_state_dict(HeadGates(build("roberta")).state_dict())


def test_values_of_another_shape_are_refused():
    gates = HeadGates(build("bert"))
    with pytest.raises(GateError, match=r"\[7\]"), gates.use(torch.ones(7)):
        pass
    with pytest.raises(GateError, match="8 heads"):
        gates.set_mask_(torch.ones(9))


@pytest.mark.parametrize("mode", ["masked", "stochastic"])
def test_compiled_equals_eager(mode):
    model, batch = build("bert"), inputs("bert")
    gates = HeadGates(model, initial_log_alpha=0.4).eval().attach()
    if mode == "masked":
        gates.set_mask_(random_mask("bert"))
    expected = logits(model, batch)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, batch), expected)
    with torch.no_grad():
        gates.mask.fill_(1.0)
        gates.log_alpha.fill_(-1.0)
    torch.testing.assert_close(logits(compiled, batch), logits(model, batch))
    assert (logits(compiled, batch) - expected).abs().max() > 1e-3
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # raised within dynamo
def test_compiled_training_reaches_the_gates():
    model, batch = build("bert"), inputs("bert")
    gates = HeadGates(model, initial_log_alpha=0.4).attach().train()
    compiled = torch.compile(model, backend="aot_eager")
    drawn = [compiled(**batch).logits.square().mean() for _ in range(3)]
    sum(drawn).backward()
    assert len({loss.item() for loss in drawn}) == 3
    assert bool((gates.log_alpha.grad != 0).any())
    torch._dynamo.reset()


def test_gradient_checkpointing_uses_the_same_draw():
    model, batch = build("bert").train(), inputs("bert")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.set_attn_implementation("eager")
    gates = HeadGates(model, initial_log_alpha=0.0).attach().train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        torch.manual_seed(5)
        gates.zero_grad()
        model(**batch).logits.square().mean().backward()
        found.append(gates.log_alpha.grad.clone())
    torch.testing.assert_close(*found)


def test_unreached_sites_are_named():
    model, batch = build("marian"), inputs("marian")
    gates = HeadGates(model).attach()
    assert len(gates.unreached()) == len(gates.sites)
    with torch.no_grad():
        model.get_encoder()(batch["input_ids"])
    assert gates.unreached()
    assert not any(".encoder." in name for name in gates.unreached())
    logits(model, batch)
    assert gates.unreached() == []


def test_scale_heads_by_hand():
    heads = torch.arange(12.0).reshape(1, 2, 6)  # two queries, three heads of two features
    scaled = scale_heads(heads, torch.tensor([1.0, 0.0, 2.0]))
    assert scaled.tolist() == [[[0, 1, 0, 0, 8, 10], [6, 7, 0, 0, 20, 22]]]
