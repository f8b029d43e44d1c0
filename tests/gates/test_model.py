import copy
from contextlib import nullcontext

import pytest
import torch
import transformers

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import load_pruned
from gates.gating.hard_concrete import Stretch, open_probability
from gates.gating.head_gates import HeadGates
from gates.model import GateConfig, GatedModel, get_gated_model
from gates.recovery.refit import refit_, valid_queries
from tests.models import build, inputs, logits, masked


def gated_model(name, *, training=False, **config):
    """A gated model whose gates are closed, open and in between, some exactly."""
    gated = get_gated_model(build(name).train(training), GateConfig(**config))
    with torch.no_grad():
        gated.gates.log_alpha.copy_(torch.linspace(-3, 3, gated.gates.size))
    return gated


def evaluation(log_alpha, low=-0.1, high=1.1):
    """The evaluation gate, written down again."""
    return ((1 / (1 + torch.exp(-log_alpha))) * (high - low) + low).clamp(0, 1)


@pytest.mark.parametrize("unit", ["head", "group"])
def test_the_configuration_reaches_the_gates(unit):
    config = GateConfig(
        unit=unit,
        temperature=0.5,
        stretch_low=-0.2,
        stretch_high=1.2,
        initial_log_alpha=1.0,
        straight_through=True,
        draw_per="example",
    )
    gates = get_gated_model(build("llama"), config).gates
    assert (gates.unit, gates.size, gates.draw_per) == (unit, {"head": 8, "group": 4}[unit], "example")
    assert gates.learned.stretch == Stretch(0.5, -0.2, 1.2)
    assert gates.learned.straight_through
    assert gates.log_alpha.tolist() == [1.0] * gates.size


def test_everything_else_is_the_base_models():
    gated, batch = gated_model("llama"), inputs("llama")
    model = gated.base_model
    assert gated.config is model.config
    assert gated.device == model.device
    assert gated.dtype == model.dtype
    assert gated.num_parameters() == model.num_parameters()
    assert torch.equal(
        gated.generate(**batch, max_new_tokens=4, do_sample=False), model.generate(**batch, max_new_tokens=4, do_sample=False)
    )
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = gated.no_such_thing


def test_parameters_state_and_mode_cover_model_and_gates():
    gated = gated_model("bert")
    names = dict(gated.named_parameters())
    assert names.pop("gates.learned.log_alpha") is gated.gates.log_alpha
    assert names.keys() == {f"base_model.{name}" for name, _ in gated.base_model.named_parameters()}
    gated.train()
    assert gated.gates.learned.training
    assert gated.base_model.training
    other = gated_model("bert")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(gated.state_dict())
    assert torch.equal(other.gates.log_alpha, gated.gates.log_alpha)
    assert torch.equal(logits(other, inputs("bert")), logits(gated.eval(), inputs("bert")))


def test_disabled_gates_and_back():
    gated, batch = gated_model("bert", training=False), inputs("bert")
    expected, closed = logits(build("bert"), batch), logits(gated, batch)
    with gated.disable_gates() as same:
        assert same is gated
        assert torch.equal(logits(gated, batch), expected)
    assert torch.equal(logits(gated, batch), closed)
    with pytest.raises(RuntimeError, match="inside"), gated.disable_gates():
        raise RuntimeError("inside")
    assert torch.equal(logits(gated, batch), closed)
    assert not torch.allclose(closed, expected)


# -- training ----------------------------------------------------------------------------------------------------


def test_the_penalty_is_the_price_of_the_expectation():
    gated = gated_model("llama", unit="group")
    probability = open_probability(gated.gates.log_alpha.detach())
    torch.testing.assert_close(gated.penalty(0.1).detach(), 0.1 * probability.sum())
    prices = torch.tensor([0.0, 1.0, 2.0, 3.0])
    gated.penalty(prices).backward()
    torch.testing.assert_close(gated.gates.log_alpha.grad, prices * probability * (1 - probability))


# -- masks -------------------------------------------------------------------------------------------------------


def test_the_mask_is_what_evaluation_leaves_open_or_exactly_a_budget():
    gated = gated_model("bert")
    values = evaluation(gated.gates.log_alpha.detach())
    assert gated.mask().tolist() == (values > 0).float().tolist()
    assert gated.train().mask().tolist() == (values > 0).float().tolist()
    assert gated.mask(3).tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert gated.mask(0.25).tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert gated.mask(3, minimum_per_layer=1).tolist() == [0, 0, 0, 1, 0, 0, 1, 1]
    kinds = gated_model("marian")
    mask = kinds.mask({"encoder": 2, "cross": 0})
    index = kinds.gates.kind_index()
    assert [int(mask[index == kind].sum()) for kind in range(3)] == [2, 12, 0]


def test_a_fixed_mask_stays_what_it_is():
    gated, batch = gated_model("bert"), inputs("bert")
    mask = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
    assert gated.set_mask_(mask) is gated
    assert torch.equal(gated.mask(), mask)
    model = build("bert")
    assert torch.equal(logits(gated, batch), masked(model, mask, lambda: logits(model, batch)))
    with pytest.raises(GateError, match="fixed at a mask that keeps 3"):
        gated.mask(2)


def test_open_heads_by_kind_and_layer(capsys):
    gated = gated_model("marian")
    mask = torch.ones(32)
    mask[:4], mask[-1] = 0.0, 0.0  # the encoder's first layer; a head of the decoder's last cross-attention
    gated.set_mask_(mask)
    assert gated.open_heads() == {"encoder": [0, 4], "decoder": [4, 4, 4], "cross": [4, 4, 3]}
    gated.print_open_heads()
    assert capsys.readouterr().out.splitlines() == [
        "open heads: 27 of 32 (84.4%)",
        "  encoder: 4 of 8, by layer 0 4",
        "  decoder: 12 of 12, by layer 4 4 4",
        "  cross: 11 of 12, by layer 4 4 3",
    ]


def test_open_heads_are_heads_whatever_the_unit():
    gated = gated_model("llama", unit="group").set_mask_(torch.tensor([1.0, 0, 1, 1]))
    assert gated.open_heads() == {"decoder": [2, 4]}


# -- taking the gates off ----------------------------------------------------------------------------------------


def test_unload_leaves_no_trace():
    model, batch = build("bert"), inputs("bert")
    expected = logits(model, batch)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    gated = get_gated_model(model)
    gated.set_mask_(torch.zeros(8))
    assert gated.unload() is model
    assert torch.equal(logits(model, batch), expected)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == {k: v.keys() for k, v in before.items()}
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(GateError, match="taken off"):
        gated(**batch)
    get_gated_model(model)


@pytest.mark.parametrize("name", ["bert", "llama", "marian"])
@pytest.mark.parametrize("unit", ["head", "group"])
def test_pruned_equals_gated_in_evaluation(name, unit):
    gated, batch = gated_model(name, unit=unit), inputs(name)
    expected, mask = logits(gated, batch), gated.gates.to_heads(gated.mask())
    values = gated.gates.values()
    assert bool(((values > 0) & (values < 1)).any())  # gates that have to be folded
    pruned = gated.train().prune_and_unload().eval()
    found = logits(pruned, batch)
    valid = batch["attention_mask"].bool() if found.shape[1:2] == (7,) else slice(None)
    torch.testing.assert_close(found[valid], expected[valid], atol=3e-6, rtol=1e-4)
    assert sum(site.heads for site in find_attention(pruned)) == int(mask.sum()) < len(mask)
    assert not any(module._forward_pre_hooks for module in pruned.modules())


def test_with_a_budget_the_heads_kept_count_fully():
    gated, batch = gated_model("bert"), inputs("bert")
    twin = copy.deepcopy(gated)
    twin.set_mask_(twin.mask(6))
    pruned = gated.prune_and_unload(budget=6)
    torch.testing.assert_close(logits(pruned, batch), logits(twin, batch), atol=3e-6, rtol=1e-4)


def test_a_model_is_gated_once():
    gated = gated_model("bert")
    with pytest.raises(GateError, match="unload"):
        get_gated_model(gated)
    with pytest.raises(GateError, match="other gates"):
        GatedModel(gated.base_model)


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_closed_heads_are_made_up_for(name):
    """The same as the function with masks of its own; padding does not count."""
    batches = [inputs(name, batch=6, seed=seed) for seed in (1, 2)]
    gated, other = GatedModel(build(name)).eval(), build(name).eval()
    mask = torch.ones_like(gated.gates.mask)
    mask[::3] = 0
    gated.set_mask_(mask)
    done = gated.refit_(batches, held_out=None, ridge=0.1)
    expected = refit_(
        HeadGates(other),
        mask,
        lambda: batches,
        lambda batch: other(**batch),
        lambda batch: valid_queries(batch, is_encoder_decoder=name == "bart"),
        ridge=0.1,
    )
    assert done == expected
    assert has_weights(gated, other.state_dict())


@pytest.fixture
def fixed():
    """A classifier with a mask, three batches to refit it to, and weights before."""
    gated = GatedModel(build("bert")).eval()
    gated.set_mask_(torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 0]))
    batches = [{**inputs("bert", batch=6, seed=seed), "labels": torch.tensor([0, 1] * 3)} for seed in (1, 2, 3)]
    return gated, batches, copy.deepcopy(gated.base_model.state_dict())


def has_weights(gated, weights):
    return all(torch.equal(tensor, weights[key]) for key, tensor in gated.base_model.state_dict().items())


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        ((1.0, 3.0), (0.5, 3.4), ""),
        ((1.0, 3.0), (1.0, 3.0), ""),
        ((1.0, 3.0), (0.5, 3.6), r"is 2 with the mask alone and 2\.05 after"),
        ((torch.nan,), (torch.nan,), "inf after the refit"),
        ((torch.inf,), (torch.inf,), "inf after the refit"),
        ((torch.nan,), (7.0,), ""),  # a mask alone that gives no number is mended by a refit
    ],
)
def test_the_mean_over_held_out_batches_decides(fixed, before, after, refused):
    gated, (fitted, *held_out), weights = fixed
    values = map(torch.tensor, (*before, *after))
    with pytest.raises(GateError, match=refused) if refused else nullcontext():
        gated.refit_([fitted], held_out=held_out[: len(before)], loss=lambda batch: next(values))
    assert has_weights(gated, weights) is bool(refused)


def test_without_a_loss_the_models_own_decides(fixed):
    gated, (fitted, held_out, _), _ = fixed
    with torch.no_grad():
        done = copy.deepcopy(gated)
        done.refit_([fitted], held_out=None)
        change = done(**held_out).logits - gated(**held_out).logits
    held_out["labels"] = change.argmin(-1)  # classes that lose by the refit
    with torch.no_grad():
        expected = f"{gated(**held_out).loss:.6g} with the mask alone and {done(**held_out).loss:.6g} after"
    with pytest.raises(GateError, match=expected):
        gated.refit_([fitted], held_out=[held_out])
    held_out["labels"] = change.argmax(-1)
    assert gated.refit_([fitted], held_out=[held_out])


def test_held_out_batches_that_judge_nothing_are_refused(fixed):
    gated, (fitted, held_out, _), weights = fixed
    without = {name: tensor for name, tensor in held_out.items() if name != "labels"}
    for given, message in (
        ([without], "the model returns no loss for a held-out batch; add labels"),
        ([], "there are no held-out batches"),
        (iter([held_out]), "only once"),
    ):
        with pytest.raises(GateError, match=message):
            gated.refit_([fitted], held_out=given)
    assert has_weights(gated, weights)


def test_gates_that_are_not_fixed_cannot_be_made_up_for():
    gated = GatedModel(build("bert"), GateConfig(budget=3))
    with pytest.raises(GateError, match="their mask is not fixed"):
        gated.refit_([inputs("bert")], held_out=None)
    half = GatedModel(build("bert")).eval()
    half.gates.log_alpha.data.fill_(0.3)
    with pytest.raises(GateError, match="between 0 and 1"):
        half.refit_([inputs("bert")], held_out=None)
    with pytest.raises(GateError, match="only once"):
        half.set_mask_(half.mask()).refit_(iter([inputs("bert")]), held_out=None)


# -- gates that learned nothing ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*")
def test_peft_around_gates_is_an_error_at_the_first_step_until_they_are_trainable():
    peft = pytest.importorskip("peft")
    gated = get_gated_model(build("bert"), GateConfig(budget=3)).train()
    adapted = peft.get_peft_model(gated, peft.LoraConfig(target_modules=["query"], r=2))
    with pytest.raises(GateError, match="get_peft_model"):
        adapted(**inputs("bert"))
    gated.gates.log_alpha.requires_grad = True
    adapted(**inputs("bert")).logits.sum().backward()
    assert gated.gates.log_alpha.grad is not None


def test_gates_in_evaluation_mode_are_not_trained():
    gated = get_gated_model(build("bert").eval(), GateConfig(budget=3))
    with pytest.raises(GateError, match="in evaluation mode"):
        gated.step_(0.5)
    gated.gates.train()
    gated.step_(0.5)
    assert not gated.base_model.training


def test_a_mask_of_gates_that_never_stepped_is_refused():
    gated = get_gated_model(build("bert"), GateConfig(budget=3, initial_log_alpha=0.0)).train()
    with pytest.raises(GateError, match="all 8 gates are equal"):
        gated.fix_mask_()
    optimizer = torch.optim.AdamW(gated.parameter_groups(1e-3))
    gated(**inputs("bert")).logits.square().sum().backward()
    optimizer.step()
    with pytest.raises(GateError, match=r"call step_\(progress, optimizer\) after every optimiser step"):
        gated.fix_mask_()
    assert gated.gates.mode == "stochastic"
    gated.step_(1.0, optimizer)
    assert int(gated.fix_mask_().sum()) == 3


@pytest.mark.parametrize("closed", [0, 2, 5])
def test_a_fixed_mask_tells_how_many_heads_training_had_closed(closed, capsys):
    gated = get_gated_model(build("bert"), GateConfig(budget=3))
    gated.gates.log_alpha.data = torch.where(torch.arange(8) < closed, -20.0, 5.0) + 0.01 * torch.arange(8)
    gated.fix_mask_()
    gated.fix_mask_()
    assert gated.closed_by_training == closed
    gated.print_open_heads()
    others = " and the ranking the others" if closed < 5 else ""
    assert f"of 5 closed heads, training closed {closed}{others}\n" in capsys.readouterr().out


def test_a_budget_that_leaves_no_choice_is_not_arbitrary():
    gated = get_gated_model(build("bart"), GateConfig(budget={"encoder": 0}))
    kinds = gated.gates.kind_index()
    assert torch.equal(gated.fix_mask_(), (kinds != 0).float())
    with pytest.raises(GateError, match="gates are equal"):
        get_gated_model(build("bart"), GateConfig(budget={"encoder": 1})).fix_mask_()


def test_scores_and_loaded_gates_need_no_step():
    gated = get_gated_model(build("bert"), GateConfig(budget=3)).start_from_(torch.rand(8))
    state = gated.state_dict()
    assert int(gated.fix_mask_().sum()) == 3
    other = get_gated_model(build("bert"), GateConfig(budget=3))
    other.load_state_dict(state)
    assert torch.equal(other.fix_mask_(), gated.gates.mask)


# -- modules of one's own around a model -------------------------------------------------------------------------


class Wrapper(torch.nn.Module):
    """A module of one's own with two parts, as SentenceTransformer has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 50}
        transformer = torch.nn.Module()
        transformer.auto_model = transformers.BertModel(transformers.BertConfig(**size))
        self.parts = torch.nn.ModuleList([transformer, torch.nn.Linear(32, 2)])

    def forward(self, input_ids):
        return self.parts[1](self.parts[0].auto_model(input_ids).last_hidden_state.mean(1))


WRAPPED_MASK = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1])
WRAPPED_IDS = torch.arange(12).view(2, 6)


def test_a_module_of_ones_own_is_trained_and_pruned(tmp_path):
    gated = get_gated_model(Wrapper().train(), GateConfig(budget=4, ramp=1.0))
    optimizer = torch.optim.AdamW(gated.parameter_groups(1e-3))
    for step in range(2):
        gated(WRAPPED_IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gated.step_((step + 1) / 2, optimizer)
    gated.fix_mask_()
    gated.eval().save_pretrained(tmp_path / "gates")
    gated.refit_([{"input_ids": WRAPPED_IDS}] * 2, held_out=None)
    expected = gated(WRAPPED_IDS)
    pruned = gated.prune_and_unload()
    assert type(pruned) is Wrapper
    inner = pruned.parts[0].auto_model
    assert sum(shape["heads"] for shape in inner.config.pruned_attention.values()) == 4
    torch.testing.assert_close(pruned(WRAPPED_IDS), expected)
    inner.save_pretrained(tmp_path / "inner")
    again = load_pruned(tmp_path / "inner")
    torch.testing.assert_close(again(WRAPPED_IDS)[0], inner(WRAPPED_IDS)[0])


def test_a_module_of_ones_own_is_not_exported_and_stays_gated():
    gated = get_gated_model(Wrapper().eval()).set_mask_(WRAPPED_MASK)
    expected = gated(WRAPPED_IDS)
    with pytest.raises(GateError, match="Wrapper is not a Transformers model"):
        gated.save_pruned("unused")
    assert gated.gates.is_attached
    assert torch.equal(gated(WRAPPED_IDS), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GateError])
def test_pruning_that_fails_in_any_way_leaves_the_gates_on(monkeypatch, error):
    def fails(*args, **kwargs):
        raise error

    gated = get_gated_model(Wrapper().eval()).set_mask_(WRAPPED_MASK)
    expected = gated(WRAPPED_IDS)
    monkeypatch.setattr("gates.model.remove_heads_", fails)
    with pytest.raises(error):
        gated.prune_and_unload()
    assert torch.equal(gated(WRAPPED_IDS), expected)


class Linear4bit(torch.nn.Linear):
    """Two numbers in a byte, as bitsandbytes keeps them."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features)
        packed = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)


def test_a_model_in_4_bits_is_refused_as_quantised():
    model = Wrapper().parts[0].auto_model
    for layer in model.encoder.layer:
        layer.attention.output.dense = Linear4bit(layer.attention.output.dense)
    with pytest.raises(GateError, match=r"'output.dense' of Bert\w+ at .* is quantised: its weight is packed to \(512, 1\)"):
        get_gated_model(model)
