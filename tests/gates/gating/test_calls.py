"""A draw of the gates belongs to one call of the model, also where layers run again in the backward pass."""

import copy
import gc
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from tests.models import build, inputs, logits, values_of_a_call


def gated(name, *, checkpointing=None, draw_per="batch", **more):
    """Return a model without dropout, its attached gates in training mode, and inputs."""
    model = build(name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    model.set_attn_implementation("eager")
    if checkpointing is not None:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(checkpointing)
    torch.manual_seed(0)
    return model, HeadGates(model, initial_log_alpha=0.0, draw_per=draw_per, **more).attach().train(), inputs(name, batch=3)


def gradients(model, gates, losses):
    """Return the gradients of all weights and gates, by name."""
    model.zero_grad()
    gates.zero_grad()
    losses().backward()
    named = [*model.named_parameters(), *gates.named_parameters()]
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def compare(losses, name="bert", **more):
    """Check that checkpointing changes no gradient of a loss, a function of model, gates and inputs."""
    found = []
    for checkpointing in (None, {"use_reentrant": False}):
        model, gates, batch = gated(name, checkpointing=checkpointing, **more)
        gates.generator = torch.Generator().manual_seed(1)
        found.append(gradients(model, gates, partial(losses, model, gates, batch)))
    torch.testing.assert_close(found[1], found[0])
    assert found[0]["learned.log_alpha"].abs().sum() > 0


def loss_of(model, batch):
    return model(**batch).logits.square().mean()


def contrast(model, gates, batch):
    first, second = model(**batch).logits, model(**batch).logits
    return (first - second).square().mean() + first.mean()


def with_a_call_without_gradients(model, gates, batch):
    loss = loss_of(model, batch)
    with torch.no_grad():
        model(**batch)
    return loss


def with_a_dense_teacher(model, gates, batch):
    student = model(**batch).logits
    with torch.no_grad(), gates.use(torch.ones(gates.size)):
        teacher = model(**batch).logits
    return (student - teacher).square().mean()


def with_a_shorter_call_between(model, gates, batch):
    loss = loss_of(model, batch)
    model(**{name: tensor[:1] for name, tensor in batch.items()})
    return loss


@pytest.mark.parametrize(
    ("losses", "draw_per", "name"),
    [
        (contrast, "batch", "gpt2"),
        (contrast, "example", "bart"),
        (with_a_call_without_gradients, "batch", "bert"),
        (with_a_call_without_gradients, "example", "bart"),
        (with_a_dense_teacher, "batch", "bert"),
        (with_a_dense_teacher, "example", "gpt2"),
        (with_a_shorter_call_between, "batch", "bart"),
        (with_a_shorter_call_between, "example", "bert"),
    ],
)
def test_checkpointing_changes_no_gradient(losses, draw_per, name):
    compare(losses, name, draw_per=draw_per)


def test_values_that_changed_since_the_call_do_not_matter():
    """The call was masked, or had values of its own; its backward pass runs when others are in force."""

    def masked(model, gates, batch):
        gates.set_mask_(torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 1]))
        loss = loss_of(model, batch) + 0 * gates.log_alpha.sum()
        gates.set_mask_(torch.ones(gates.size))
        return loss + gates.learned.log_alpha.sum()

    def of_a_block(model, gates, batch):
        with gates.use(gates.log_alpha.sigmoid()):
            return loss_of(model, batch)

    compare(masked)
    compare(of_a_block)


def test_a_backward_pass_inside_a_block_of_other_values():
    found = []
    for checkpointing in (None, {"use_reentrant": False}):
        model, gates, batch = gated("bert", checkpointing=checkpointing)
        gates.generator = torch.Generator().manual_seed(1)
        loss = loss_of(model, batch)
        with gates.use(torch.ones(gates.size)):
            found.append(gradients(model, gates, lambda loss=loss: loss))
    torch.testing.assert_close(found[1], found[0])


def test_a_region_around_the_model_is_refused_where_its_draw_cannot_be_repeated():
    model, gates, batch = gated("bert")
    gates.generator = torch.Generator().manual_seed(1)

    def region(ids):
        return model(**{**batch, "input_ids": ids}).logits.square().mean().sqrt()

    loss = checkpoint(region, batch["input_ids"], use_reentrant=False)
    with pytest.raises(GateError, match="checkpoint its layers"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", ["bert", "bart"])
def test_reentrant_checkpointing_is_refused_after_other_calls_too(name):
    model, _, batch = gated(name, checkpointing={"use_reentrant": True})
    first = loss_of(model, batch)
    with torch.no_grad():
        model(**batch)
    with pytest.raises(GateError, match="use_reentrant=False"):
        first.backward()


# -- a part of the model called alone ----------------------------------------------------------------------------

PARTS = {
    "the base model": lambda model, batch: model.bert(**batch)[0],
    "its encoder": lambda model, batch: model.bert.encoder(model.bert.embeddings(batch["input_ids"]))[0],
    "a layer": lambda model, batch: model.bert.encoder.layer[1](model.bert.embeddings(batch["input_ids"])),
    "an attention module": lambda model, batch: model.bert.encoder.layer[0].attention(
        model.bert.embeddings(batch["input_ids"])
    )[0],
}


@pytest.mark.parametrize("draw_per", ["batch", "example"])
@pytest.mark.parametrize("part", PARTS)
def test_each_call_of_a_part_has_its_own_draw(part, draw_per):
    model, gates, batch = gated("bert", draw_per=draw_per)

    def run():
        output = PARTS[part](model, batch)
        return output[0] if isinstance(output, tuple) else output

    with torch.no_grad():
        assert not torch.allclose(run(), run())
    for _ in range(5):  # the graph of an earlier draw is gone
        run().square().mean().backward()
    assert gates.log_alpha.grad.abs().sum() > 0
    assert gates._calls.running() is None


@pytest.mark.parametrize("draw_per", ["batch", "example"])
@pytest.mark.parametrize("reads", [lambda logits: logits.square().sum(), lambda logits: logits])
def test_a_checkpoint_around_the_model_repeats_its_draw_or_is_refused(draw_per, reads):
    """Also where the checkpoint holds more than the model, whose nodes are then not what asks for the recomputation."""
    model, gates, batch = gated("bert", draw_per=draw_per)

    def loss(**options):
        torch.manual_seed(3)
        found = checkpoint(lambda: reads(model(**batch).logits), use_reentrant=False, **options) if options else None
        return (reads(model(**batch).logits) if found is None else found).square().sum()

    expected = gradients(model, gates, loss)
    torch.testing.assert_close(gradients(model, gates, partial(loss, preserve_rng_state=True)), expected)
    with pytest.raises(GateError, match="recomputed in a backward pass with another draw; leave preserve_rng_state=True"):
        loss(preserve_rng_state=False).backward()
    gates.set_mask_(torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 1]))  # nothing is drawn
    loss(preserve_rng_state=False).backward()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["bert.encoder.layer.1", "bert.encoder.layer.1.attention.self", "bert.encoder"])
def test_an_error_inside_a_call_ends_it(place, error):
    """PyTorch calls no hook at the end of a module that is interrupted."""
    model, gates, batch = gated("bert")

    def fail(*_):
        raise error

    handle = model.get_submodule(place).register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(**batch)
    handle.remove()
    found = [values_of_a_call(gates, lambda: model.bert(**batch)) for _ in range(2)]
    assert not torch.equal(*found)
    for _ in range(2):
        model.bert(**batch)[0].square().mean().backward()
    gates.eval()
    mask = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 1])
    gates.set_mask_(mask)
    assert torch.equal(values_of_a_call(gates, lambda: model.bert(**batch)), mask)


def test_a_model_that_is_called_inside_one_of_its_layers():
    """A dense teacher in a hook: the layers after it have the draw of the call around it."""
    model, gates, batch = gated("bert")
    seen = []

    def teach(*_):
        handle.remove()
        with torch.no_grad(), gates.use(torch.ones(gates.size)):
            model(**batch)

    for layer in (0, 1):
        model.bert.encoder.layer[layer].register_forward_pre_hook(lambda *_: seen.append(gates._calls.running()))
    handle = model.bert.encoder.layer[0].attention.register_forward_hook(teach)
    model(**batch).logits.square().mean().backward()
    assert [call is seen[0] for call in seen] == [True, False, False, True]  # the teacher runs both layers in between
    assert gates._calls.running() is None


def test_a_loss_of_states_that_a_hook_took_when_the_output_is_gone():
    def of_states(model, gates, batch):
        states = []
        handle = model.bert.encoder.layer[1].register_forward_hook(lambda _, __, output: states.append(output))
        model(**batch)
        handle.remove()
        gc.collect()
        state = states[0][0] if isinstance(states[0], tuple) else states[0]
        return state.square().mean()

    compare(of_states)


def test_calls_are_kept_as_long_as_their_graph():
    model, gates, batch = gated("bert", checkpointing={"use_reentrant": False})
    loss = loss_of(model, batch)
    assert len(gates._calls._finished) == 1
    loss.backward()
    del loss
    gc.collect()
    assert len(gates._calls._finished) == 0
    with torch.no_grad():
        loss_of(model, batch)
    assert len(gates._calls._finished) == 0


def test_a_copy_has_had_no_calls():
    model, gates, batch = gated("bert")
    loss = loss_of(model, batch)
    assert len(copy.deepcopy(gates._calls)._finished) == 0
    loss.backward()


# -- threads -----------------------------------------------------------------------------------------------------


def in_threads(count, work):
    """Run a function in several threads at a time; raise the first error."""
    errors, barrier = [], threading.Barrier(count)

    def run(index):
        try:
            barrier.wait()
            work(index)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_the_first_calls_of_several_threads_are_gated():
    for _ in range(5):
        model, batch = build("bert").eval(), inputs("bert")
        mask = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 1])
        with HeadGates(copy.deepcopy(model)).attached() as gates, torch.no_grad():
            expected = logits(gates.set_mask_(mask).model, batch)
        gates, found = HeadGates(model).attach().set_mask_(mask), {}

        def work(index, found=found, model=model, batch=batch):
            with torch.no_grad():
                found[index] = [model(**batch).logits for _ in range(3)]

        in_threads(4, work)
        for outputs in found.values():
            for output in outputs:
                torch.testing.assert_close(output, expected)


def test_threads_find_out_where_examples_are_without_harm():
    """A square batch: shapes do not tell, and the model runs on other inputs to find out."""
    values = torch.rand(4, 8)
    for _ in range(5):
        model, batch = build("bert").eval(), inputs("bert", batch=4, length=4, padding=False)
        expected = []
        for row in range(4):
            with HeadGates(copy.deepcopy(model)).attached() as one, one.use(values[row]):
                expected.append(logits(one.model, {name: tensor[row : row + 1] for name, tensor in batch.items()}))
        gates, found = HeadGates(model).attach(), {}

        def work(index, found=found, model=model, batch=batch):
            with torch.no_grad():
                found[index] = model(**batch).logits

        with gates.use(values):
            in_threads(4, work)
        for output in found.values():
            torch.testing.assert_close(output, torch.cat(expected))
        assert not model.training


def test_each_thread_trains_on_its_own_draw():
    model, gates, batch = gated("bert", checkpointing={"use_reentrant": False})
    in_threads(2, lambda _: [loss_of(model, batch).backward() for _ in range(5)])
    assert gates.log_alpha.grad.isfinite().all()


def test_a_backward_pass_in_another_thread_than_both_calls_is_refused():
    """Nodes are numbered in each thread, so that numbers do not tell the calls apart."""
    model, gates, batch = gated("bert", checkpointing={"use_reentrant": False})
    gates.generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(2):
        in_threads(1, lambda _: losses.append(loss_of(model, batch)))
    with pytest.raises(GateError, match="several threads called the gated model"):
        losses[0].backward()
