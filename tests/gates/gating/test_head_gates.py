import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from gates.attention.scaling import scale_heads
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.surgery.remove import remove_heads_
from tests.gates.chosen import chosen
from tests.models import FAMILIES, build, inputs, logits, random_mask, values_of_a_call


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


def test_one_draw_per_call_shared_over_the_batch():
    model, batch = build("bert"), inputs("bert", padding=False)
    batch = {key: tensor[:1].expand(4, -1) for key, tensor in batch.items()}
    HeadGates(model, initial_log_alpha=0.0).attach().train()
    first, second = logits(model, batch), logits(model, batch)
    torch.testing.assert_close(first[0], first[3])
    assert not torch.allclose(first, second)


def test_the_model_does_not_own_the_gates_and_the_gates_do_not_own_the_model():
    model = build("bert")
    names = [name for name, _ in model.named_parameters()]
    gates = HeadGates(model).attach()
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in gates.named_parameters()] == ["learned.log_alpha"]


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


@pytest.mark.parametrize("mode", chosen(["masked", "stochastic"], fast=(), integration=["stochastic"]))
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


@pytest.mark.integration
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


def test_scale_heads_by_hand():
    heads = torch.arange(12.0).reshape(1, 2, 6)  # two queries, three heads of two features
    scaled = scale_heads(heads, torch.tensor([1.0, 0.0, 2.0]))
    assert scaled.tolist() == [[[0, 1, 0, 0, 8, 10], [6, 7, 0, 0, 20, 22]]]


# -- groups ------------------------------------------------------------------------------------------------------


def grouped(name="llama"):
    """A model with two query heads to each key/value head, with gates per group and per head, not attached."""
    model = build(name)
    return model, HeadGates(model, "group").eval(), HeadGates(model, "head").eval()


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_group_gates_equal_head_gates_with_repeated_values(name):
    model, groups, heads = grouped(name)
    kv_heads, batch = FAMILIES[name].kv_heads, inputs(name)
    assert groups.sizes == [kv_heads, kv_heads]
    values = torch.rand(3, groups.size, generator=torch.Generator().manual_seed(0))
    by_hand = torch.stack([values[:, head // (4 // kv_heads)] for head in range(8)], dim=1)
    assert torch.equal(groups.to_heads(values), by_hand)
    for row in (slice(None), 0):
        found = []
        for gates, own in ((groups, values), (heads, by_hand)):
            with gates.attached(), gates.use(own[row]):
                found.append(logits(model, batch))
        torch.testing.assert_close(*found)


def test_the_score_of_a_group_is_the_mean_over_its_heads_and_its_gradient_their_sum():
    model, groups, heads = grouped()
    scores = torch.arange(16.0).reshape(2, 8)
    assert groups.to_gates(scores).tolist() == [[0.5, 2.5, 4.5, 6.5], [8.5, 10.5, 12.5, 14.5]]
    assert torch.equal(heads.to_gates(scores), scores)
    batch, found = inputs("llama"), []
    for gates in (groups, heads):
        with gates.attached(), gates.probe() as leaves:
            loss = model(**batch).logits.square().mean()
        found.append(torch.cat(torch.autograd.grad(loss, list(leaves.values())), dim=-1).sum(1))
    torch.testing.assert_close(found[0], 2 * groups.to_gates(found[1]))


def test_gates_of_each_kind_are_counted():
    assert HeadGates(build("marian")).kind_sizes() == {"encoder": 8, "decoder": 12, "cross": 12}
    assert HeadGates(build("llama"), "group").kind_sizes() == {"decoder": 4}


def test_state_of_another_unit_is_refused():
    _, groups, heads = grouped()
    with pytest.raises(GateError, match="unit='head'"):
        groups.load_state_dict(heads.state_dict())
    with pytest.raises(GateError, match="unit='group'"):
        HeadGates(build("bert")).load_state_dict(HeadGates(build("bert"), "group").state_dict())


def test_sizes_that_do_not_fit_and_units_that_are_none_are_refused():
    model, groups, heads = grouped()
    with pytest.raises(GateError, match=r"\[7\]"), heads.use(torch.ones(7)):
        pass
    with pytest.raises(GateError, match="8 heads"):
        heads.set_mask_(torch.ones(9))
    with pytest.raises(GateError, match="4 groups"):
        groups.set_mask_(torch.ones(8))
    with pytest.raises(GateError, match="4 groups"):
        groups.to_heads(torch.ones(8))
    with pytest.raises(GateError, match="8 heads"):
        groups.to_gates(torch.ones(4))
    with pytest.raises(GateError, match="'layer'"):
        HeadGates(model, "layer")


# -- head masks of Transformers 4 --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["head_mask", "decoder_head_mask", "cross_attn_head_mask"])
def test_a_head_mask_is_an_error_that_names_the_replacement(name):
    model, batch = build("marian"), inputs("marian")
    gates = HeadGates(model).eval()
    ignored = logits(model, batch | {name: torch.zeros(2, 4)})  # without gates Transformers ignores it
    with gates.attached():
        with pytest.raises(GateError, match=rf"^{name} .*gates\.use\(values\).*set_mask_\(mask\)"):
            model(**batch, **{name: torch.zeros(2, 4)})
        torch.testing.assert_close(logits(model, batch | {name: None}), ignored)


# -- precision ---------------------------------------------------------------------------------------------------


def test_casting_leaves_the_gates_in_float32():
    gates = HeadGates(build("bert"))
    with torch.no_grad():
        gates.log_alpha.fill_(0.1234567)
    before = gates.log_alpha.clone()
    for cast in (gates.half, gates.bfloat16, gates.double, lambda: gates.to("cpu", torch.float16)):
        cast()
        assert torch.equal(gates.log_alpha, before)
        assert {tensor.dtype for tensor in gates.state_dict().values() if tensor.is_floating_point()} == {torch.float32}
    assert gates.to("meta").log_alpha.is_meta


@pytest.mark.parametrize("draw_per", ["batch", "example"])
@pytest.mark.parametrize("family", ["hard-concrete", "clamped-linear"])
def test_gates_of_kinds_that_are_not_learned_are_one(family, draw_per):
    model, batch = build("bart"), inputs("bart")
    gates = HeadGates(model, family=family, draw_per=draw_per, kinds=["encoder"]).attach().train()
    encoder = gates.kind_index() == 0
    with torch.no_grad():
        gates.log_alpha.fill_(-1.0)  # would close, or nearly so
    drawn = values_of_a_call(gates, lambda: model(**batch))
    assert (drawn[..., ~encoder] == 1).all()
    assert (drawn[..., encoder] != 1).any()
    assert (gates.values()[~encoder] == 1).all()
    assert (gates.open_probability()[~encoder] == 1).all()
    assert (gates.open_probability()[encoder] < 1).all()
    model(**batch)[0].square().mean().backward()
    assert gates.log_alpha.grad is not None
    assert (gates.log_alpha.grad[~encoder] == 0).all()
    gates.eval()
    with_learned = logits(model, batch)
    with gates.use(torch.where(encoder, gates.values(), torch.ones_like(gates.mask))):
        assert torch.equal(logits(model, batch), with_learned)
    gates.set_mask_(torch.zeros_like(gates.mask))  # fixed masks are of all gates
    assert not torch.equal(logits(model, batch), with_learned)


def test_kinds_that_the_model_lacks_are_named():
    with pytest.raises(GateError, match="gates of kind 'cross' are to be learned; this model has 'encoder' only"):
        HeadGates(build("bert"), kinds=["cross"])


def test_new_gates_keep_all_heads():
    gates = HeadGates(build("marian"), kinds=["encoder"])
    assert gates.mask.tolist() == [1.0] * 32
    assert gates.open_heads() == 32
    assert gates.log_alpha.tolist() == [2.5] * 32
    assert set(gates.state_dict()) == {"mask", "learned.log_alpha", "_extra_state"}


def test_gates_of_a_model_that_lost_heads_since_are_refused():
    model, batch = build("bert"), inputs("bert")
    mask = torch.tensor([1.0, 0, 1, 0] * 2)
    gates = HeadGates(model)
    remove_heads_(model, mask)
    with gates.attached(), gates.use(mask), pytest.raises(GateError, match="make new gates or sites after removing heads"):
        logits(model, batch)
    with HeadGates(model).attached() as new:
        logits(model, batch)
    assert new.size == 4


def test_gates_for_another_number_of_examples_do_not_become_gates_of_positions():
    model, batch = build("bert"), inputs("bert")
    rows, length = batch["input_ids"].shape
    assert rows != length
    with (
        HeadGates(model).attached() as gates,
        gates.use(torch.rand(length, gates.size)),
        pytest.raises(GateError, match="are ambiguous for 7 examples"),
    ):
        logits(model, batch)


# -- devices -----------------------------------------------------------------------------------------------------


def test_gates_are_where_the_weights_are_and_not_where_offloaded_ones_are():
    """With ``device_map="auto"`` weights that do not fit are on the meta device until their module runs."""
    model = build("bert")
    model.bert.embeddings.to("meta")
    assert HeadGates(model).mask.device.type == "cpu"
    model.bert.encoder.layer[0].to("meta")
    assert HeadGates(model).mask.device.type == "cpu"
    assert HeadGates(model.to("meta")).mask.device.type == "meta"


def test_gates_of_a_model_that_is_offloaded_whole_are_where_it_runs():
    accelerate = pytest.importorskip("accelerate")
    model, batch = build("bert"), inputs("bert")
    expected = logits(model, batch)
    accelerate.cpu_offload(model, execution_device="cpu")
    gates = HeadGates(model).attach()
    assert gates.mask.device.type == "cpu"
    torch.testing.assert_close(logits(model, batch), expected)


@pytest.mark.parametrize("draw_per", ["batch", "example"])
def test_values_follow_the_device_of_each_site(draw_per):
    """The meta device stands in for a second GPU: every operation on tensors of two devices is an error there too."""
    model, batch = build("bert").train(), inputs("bert")
    gates = HeadGates(model, draw_per=draw_per).attach().train()
    model.bert.encoder.layer[1].to("meta")
    model.bert.pooler.to("meta")
    model.classifier.to("meta")
    model.bert.encoder.layer[1].register_forward_pre_hook(to_meta, with_kwargs=True)
    for mode in ("stochastic", "masked", "open"):
        gates.mode = mode
        assert model(**batch).logits.device.type == "meta"
    gates.mode = "stochastic"
    with gates.probe() as leaves:
        model(**batch)
    assert {leaf.device.type for leaf in leaves.values()} == {"cpu", "meta"}


def to_meta(module, args, kwargs):
    """Move the inputs of a module as the hooks of accelerate do."""
    args = tuple(value.to("meta") if isinstance(value, torch.Tensor) else value for value in args)
    return args, {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}


# -- frozen gates ------------------------------------------------------------------------------------------------


def test_frozen_gates_are_an_error_at_the_first_step():
    model, batch = build("bert").train(), inputs("bert")
    gates = HeadGates(model).attach().train()
    gates.log_alpha.requires_grad = False
    with pytest.raises(GateError, match="log_alpha requires no gradient"):
        model(**batch)
    with torch.no_grad():
        model(**batch)
    gates.eval()
    model(**batch)
    gates.train().set_mask_(torch.ones(gates.size))
    model(**batch).logits.sum().backward()


# -- state that others copy --------------------------------------------------------------------------------------


def test_the_state_consists_of_tensors_of_the_same_shape_in_every_mode(tmp_path):
    gates, shapes = HeadGates(build("bart"), unit="group"), []
    for mode in ("open", "stochastic", "masked"):
        gates.mode = mode
        save_file(gates.state_dict(), tmp_path / "gates.safetensors")
        state = load_file(tmp_path / "gates.safetensors")
        shapes.append({name: tensor.shape for name, tensor in state.items()})
        other = HeadGates(build("bart"), unit="group")
        other.load_state_dict(state)
        assert other.mode == mode
    assert shapes[0] == shapes[1] == shapes[2]
