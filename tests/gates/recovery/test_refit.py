import copy
import gc

import pytest
import torch
import transformers as t

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.recovery.refit import refit_
from tests.gates.chosen import chosen
from tests.models import FAMILIES, build, inputs, logits

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 60}
MASK = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 0])


def batches_of(name):
    return [inputs(name, batch=8, seed=seed) for seed in (1, 2)]


def refitted(name, model, mask, **more):
    return refit_(
        HeadGates(model), mask, lambda: batches_of(name), lambda batch: logits(model, batch), lambda batch: {}, **more
    )


def masked(name, model, mask):
    gates = HeadGates(model).eval()
    with gates.attached(), gates.use(mask), torch.no_grad():
        return [logits(model, batch) for batch in batches_of(name)]


def distance(one, other):
    return float(sum((a - b).square().sum() for a, b in zip(one, other, strict=True)))


@pytest.mark.parametrize(
    ("name", "feed_forward"),
    chosen(
        [*((name, True) for name in FAMILIES), ("bert", False), ("bart", False)],
        fast=[("bert", False), ("llama", True), ("gpt2", True)],
        integration=[("bert", True), ("bart", False), ("vit", True)],
    ),
)
def test_outputs_come_nearer_to_the_dense_models(name, feed_forward):
    torch.manual_seed(1)
    model = build(name).eval()
    mask = (torch.rand(HeadGates(model).size) < 0.5).float()
    dense, pruned = masked(name, model, torch.ones_like(mask)), masked(name, model, mask)
    done = refitted(name, model, mask, feed_forward=feed_forward, ridge=1e-4)
    assert done
    assert all(one.after <= one.before for one in done)
    assert distance(masked(name, model, mask), dense) < 0.7 * distance(pruned, dense)


def test_nothing_is_changed_before_the_first_closed_head_nor_without_one():
    model = build("bert").eval()
    before = copy.deepcopy(model.state_dict())
    assert refitted("bert", model, torch.ones(8)) == []
    mask = torch.tensor([1.0, 1, 1, 1, 0, 1, 1, 1])
    done = refitted("bert", model, mask)
    assert [one.name for one in done] == ["bert.encoder.layer.1.attention.output.dense", "bert.encoder.layer.1.output.dense"]
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{one.name}.{part}" for one in done for part in ("weight", "bias")}


def test_weights_that_moved_are_fitted_to_the_dense_ones():
    """Where only output projections moved, the old ones are found again."""
    model = build("bert").eval()
    dense = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = masked("bert", model, torch.ones(8))
    torch.manual_seed(0)
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.output.dense.weight.add_(torch.randn(32, 32) / 5)
    mask = torch.ones(8)
    assert refitted("bert", model, mask, dense=dense) == []  # no head is closed
    mask[3] = 0
    far = distance(masked("bert", model, mask), expected)
    refitted("bert", model, mask, dense=dense, ridge=1e-6)
    near = distance(masked("bert", model, mask), expected)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(dense[name])
    refitted("bert", model, mask, ridge=1e-6)
    assert near < 0.2 * far
    assert near < 1.5 * distance(masked("bert", model, mask), expected)


def test_padding_does_not_count():
    """Queries that are not valid may hold anything."""
    model = build("bert").eval()
    ids, valid = torch.randint(3, 40, (8, 9)), torch.ones(8, 9, dtype=torch.long)
    valid[:4, 5:] = 0
    results = []
    for filler in (0, 7):
        own = copy.deepcopy(model)
        batch = {"input_ids": torch.where(valid.bool(), ids, filler), "attention_mask": valid}
        refit_(HeadGates(own), MASK, lambda batch=batch: [batch], lambda b, own=own: own(**b), lambda b: {"encoder": valid})
        results.append(own.state_dict())
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=1e-4, atol=1e-5)
    with pytest.raises(GateError, match=r"has shape \[8, 3\], but the head outputs have \[8, 9\]"):
        refit_(HeadGates(model), MASK, lambda: [batch], lambda b: model(**b), lambda b: {"encoder": valid[:, :3]})


def test_a_model_in_training_mode_is_fitted_without_dropout():
    one, other = build("bert").eval(), build("bert").train()
    refitted("bert", one, MASK)
    refitted("bert", other, MASK)
    assert other.training
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_a_failure_changes_nothing():
    model = build("bert").eval()
    before, seen = copy.deepcopy(model.state_dict()), []

    def forward(batch):
        seen.append(1)
        if len(seen) > 12:
            raise ZeroDivisionError
        return logits(model, batch)

    with pytest.raises(ZeroDivisionError):
        refit_(HeadGates(model), MASK, lambda: batches_of("bert"), forward, lambda batch: {})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("make", "heads"),
    [
        (lambda: t.AlbertModel(t.AlbertConfig(**SIZES, embedding_size=16)), 4),  # one module for all layers
        (lambda: t.Gemma2Model(t.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8)), 8),  # a norm comes between
        (lambda: t.GPTNeoXModel(t.GPTNeoXConfig(**SIZES)), 8),  # side by side, fused
    ],
)
def test_layouts_of_other_kinds(make, heads):
    torch.manual_seed(0)
    model = make().eval()
    batches = [torch.randint(3, 60, (8, 7)) for _ in range(2)]
    gates = HeadGates(model).eval().attach()
    mask = torch.ones(heads)
    mask[::2] = 0

    def states(values):
        with gates.use(values), torch.no_grad():
            return [model(batch).last_hidden_state for batch in batches]

    dense, pruned = states(torch.ones(heads)), states(mask)
    refit_(gates, mask, lambda: batches, model, lambda batch: {}, ridge=1e-4)
    assert gates.is_attached
    assert distance(states(mask), dense) < 0.8 * distance(pruned, dense)


def test_groups():
    model = build("llama").eval()
    mask = torch.tensor([1.0, 0, 1, 0])
    gates = HeadGates(model, "group").eval()
    dense, heads = masked("llama", model, torch.ones(8)), gates.to_heads(mask)
    before = distance(masked("llama", model, heads), dense)
    refit_(gates, mask, lambda: batches_of("llama"), lambda batch: logits(model, batch), lambda batch: {}, ridge=1e-4)
    assert distance(masked("llama", model, heads), dense) < 0.7 * before


def test_what_cannot_be_refitted():
    model = build("bert").eval()
    with pytest.raises(GateError, match=r"the mask has shape \[3\]; this model has 8 heads to gate"):
        refitted("bert", model, torch.ones(3))
    with pytest.raises(GateError, match="the mask has nan for head 2"):
        refitted("bert", model, torch.ones(8).index_fill(0, torch.tensor([2]), torch.nan))
    with pytest.raises(GateError, match="ridge is an empty list"):
        refitted("bert", model, MASK, ridge=[])
    with pytest.raises(GateError, match="no batches to fit to"):
        refit_(HeadGates(model), MASK, list, model, lambda batch: {})
    model.bert.encoder.layer[1].output.dense.weight = model.bert.encoder.layer[0].output.dense.weight
    with pytest.raises(GateError, match="share one weight"):
        refitted("bert", model, MASK)


def test_each_projection_takes_its_own_ridge_and_is_fitted_to_all_batches():
    """The first one as with this ridge alone."""
    mask, done = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 0]), {}
    for ridge in ((1e-3, 10.0), 1e-3, 10.0):
        model = build("bert").eval()
        done[ridge] = refitted("bert", model, mask, ridge=ridge), model.get_submodule(FAMILIES["bert"].output_paths[0]).weight
    several, weight = done[1e-3, 10.0]
    assert {one.ridge for one in several} <= {1e-3, 10.0}
    assert done[10.0][0][0].after != done[1e-3][0][0].after
    (alone, *_), expected = done[several[0].ridge]
    assert several[0].after == pytest.approx(alone.after, rel=1e-9)
    torch.testing.assert_close(weight, expected)


@torch.no_grad()
def test_a_head_that_is_linear_in_a_kept_one_is_made_up_for_exactly():
    """The second head attends as the first does, and its values are those of the first turned and stretched."""
    model = build("bert").eval()
    attention = model.bert.encoder.layer[0].attention
    for projection in (attention.self.query, attention.self.key):
        projection.weight[8:16], projection.bias[8:16] = projection.weight[:8], projection.bias[:8]
    turn, value = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), attention.self.value
    value.weight[8:16], value.bias[8:16] = turn @ value.weight[:8], turn @ value.bias[:8]
    mask = torch.ones(8)
    dense = masked("bert", model, mask)
    mask[1] = 0
    before = distance(masked("bert", model, mask), dense)
    refitted("bert", model, mask, ridge=1e-9)
    assert distance(masked("bert", model, mask), dense) < 1e-6 * before


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "bart"])
def test_sites_without_a_head_left_of_every_layout(name):
    """One site of each kind is closed; those without a bias stay as they are, and the rest makes up for them."""
    model = build(name).eval()
    gates, closed, tensors = HeadGates(model), set(), set(model.state_dict())
    mask = torch.ones(gates.size)
    for site, part in zip(gates.sites, mask.split(gates.sizes), strict=True):
        if site.kind not in closed:
            closed.add(site.kind)
            part.zero_()
    dense, before = masked(name, model, torch.ones_like(mask)), masked(name, model, mask)
    done = refitted(name, model, mask, ridge=1e-3)
    assert done
    assert all(one.after <= one.before for one in done)
    assert distance(masked(name, model, mask), dense) < distance(before, dense)
    assert set(model.state_dict()) == tensors


@pytest.mark.nightly
@pytest.mark.usefixtures("frozen_imports")  # a list of all objects is long otherwise
@pytest.mark.parametrize(("keep_states", "grows"), [(False, False), (True, True)])
def test_memory_does_not_grow_with_the_data_unless_states_are_kept(keep_states, grows):
    """By the tensors alive whenever a batch is asked for."""

    def most(count):
        alive = []

        def batches():
            for seed in range(count):
                gc.collect()  # of what other tests left
                alive.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
                yield inputs("bert", batch=2, seed=seed)

        model = build("bert").eval()
        refit_(HeadGates(model), MASK, batches, lambda b: logits(model, b), lambda b: {}, keep_states=keep_states)
        return max(alive) - alive[0]

    most(2)  # what is made once
    assert (most(12) > most(2) + 8) is grows


def _in_one_of_two(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model, own = build("bert").eval(), [inputs("bert", batch=4, seed=seed) for seed in ((1, 2), (3,))[rank]]
    refit_(HeadGates(model), MASK, lambda: own, lambda b: logits(model, b), lambda b: {"encoder": b["attention_mask"]})
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.nightly
def test_two_processes_with_unequal_shares_end_as_one(tmp_path):
    torch.multiprocessing.spawn(_in_one_of_two, args=(str(tmp_path),), nprocs=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    model, whole = build("bert").eval(), [inputs("bert", batch=4, seed=seed) for seed in (1, 2, 3)]
    refit_(HeadGates(model), MASK, lambda: whole, lambda b: logits(model, b), lambda b: {"encoder": b["attention_mask"]})
    for name, tensor in model.state_dict().items():
        assert torch.equal(one[name], other[name])
        torch.testing.assert_close(one[name], tensor, rtol=1e-5, atol=1e-6)
