import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification, BertModel

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.importance import attention_gradients, gradient_rows, head_gradients
from tests.gates import layouts
from tests.models import build, inputs

ALL = pytest.mark.parametrize("name", layouts.MODELS)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


def one_loss_at_a_time(model, gates, losses):
    """Each example's loss differentiated by itself, with respect to gates that all rows share."""
    rows = []
    for row in range(len(losses())):
        values = torch.ones(gates.size, requires_grad=True)
        with gates.attached(), gates.use(values):
            rows.append(torch.autograd.grad(losses()[row], values)[0])
    return torch.stack(rows)


@ALL
def test_a_batch_equals_its_examples_wherever_they_are(name):
    model, batch = layouts.make(name)
    gates, examples = HeadGates(model).eval(), len(next(iter(batch.values())))
    loop = [head_gradients(gates, lambda row=row: layouts.losses_of(model, layouts.one(batch, row))) for row in range(examples)]
    expected = torch.cat(loop)
    for _ in range(2):  # with the axes unknown and known
        found = head_gradients(gates, lambda: layouts.losses_of(model, batch))
        assert found.shape == (examples, gates.size)
        close(found, expected)
    close(expected, one_loss_at_a_time(model, gates, lambda: layouts.losses_of(model, batch)))
    rows = gradient_rows(gates, lambda: layouts.losses_of(model, batch))
    close(rows.example, expected)
    close(rows.batch, expected.mean(0, keepdim=True))
    assert bool((rows.token >= expected.abs() * (1 - 1e-4) - 1e-5).all())


def test_other_numbers_of_rows_are_located_again():
    """First one choice for each question, then four, then two."""
    model, _ = layouts.make("choices")
    gates = HeadGates(model).eval()
    for choices in (1, 4, 2):
        batch = {"input_ids": layouts.ids(3, choices, 7, seed=choices)}
        found = head_gradients(gates, lambda batch=batch: layouts.losses_of(model, batch))
        close(found, one_loss_at_a_time(model, gates, lambda batch=batch: layouts.losses_of(model, batch)))


def test_images_are_their_texts_own_in_every_batch():
    """As many images as texts, but not one for each; what the first batch showed does not hold for the second."""
    model, _ = layouts.make("LLaVA")
    gates = HeadGates(model).eval()
    for counts in ((1, 1, 1), (2, 0, 1), (1, 2, 2)):
        batch = layouts.with_images(*counts)
        found = head_gradients(gates, lambda batch=batch: layouts.losses_of(model, batch))
        close(found, one_loss_at_a_time(model, gates, lambda batch=batch: layouts.losses_of(model, batch)))


@pytest.mark.parametrize(("name", "unused"), [("LLaVA", "vision_tower"), ("CANINE", "final_char_encoder")])
def test_heads_that_the_loss_does_not_read_score_exactly_zero(name, unused):
    """The last layer of LLaVA's vision model, and CANINE's last encoder under its classifier."""
    model, batch = layouts.make(name)
    gates = HeadGates(model).eval()
    rows = head_gradients(gates, lambda: layouts.losses_of(model, batch))
    of_sites = rows.abs().amax(0).split(gates.sizes)
    zero = [site.name for site, part in zip(gates.sites, of_sites, strict=True) if not bool(part.any())]
    assert len(zero) == 1
    assert unused in zero[0]
    with torch.no_grad(), gates.attached():
        dense = layouts.output(model, batch)
        closed = torch.cat(
            [torch.full((size,), float(bool(part.any()))) for size, part in zip(gates.sizes, of_sites, strict=True)]
        )
        with gates.use(closed):
            assert torch.equal(layouts.output(model, batch), dense)


def test_a_module_on_two_shapes_has_the_gradient_of_both():
    """One model reads a question and an answer of another length."""
    model = build("bert")
    gates = HeadGates(model).eval()

    def losses():
        question, answer = (model.bert(layouts.ids(3, length)).last_hidden_state.mean(1) for length in (7, 5))
        return (question * answer).sum(1)

    close(head_gradients(gates, losses), one_loss_at_a_time(model, gates, losses))


def test_losses_that_depend_on_other_examples_are_refused():
    model, batch = build("bert"), inputs("bert")
    gates = HeadGates(model).eval()

    def contrast():
        logits = model(**batch).logits
        return torch.nn.functional.cross_entropy(logits @ logits.T, torch.arange(3), reduction="none")

    with pytest.raises(GateError, match=r"of another at 'bert.encoder.layer.0.attention'.*granularity='batch'"):
        head_gradients(gates, contrast)
    found = head_gradients(gates, contrast, "batch")
    close(found, one_loss_at_a_time(model, gates, contrast).mean(0, keepdim=True))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (lambda each: each.mean(), r"shape \[\];"),
        (lambda each: each.detach(), r"shape \[3\] and no gradient"),
        (lambda each: each[:, None], r"\[3, 1\]"),
    ],
)
def test_losses_that_are_none_of_an_example_are_refused(changed, match):
    model, batch = build("bert"), inputs("bert")
    with pytest.raises(GateError, match=match):
        head_gradients(HeadGates(model).eval(), lambda: changed(layouts.losses_of(model, batch)))


@pytest.mark.integration
@pytest.mark.parametrize("in_place", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_compiled_model_scores_as_it_does_uncompiled(in_place):
    model, batch = build("bert"), inputs("bert")
    gates = HeadGates(model).eval()
    expected = head_gradients(gates, lambda: layouts.losses_of(model, batch))
    if in_place:
        model.compile(backend="eager")
    other = model if in_place else torch.compile(model, backend="eager")
    before = layouts.output(other, batch)
    torch.testing.assert_close(head_gradients(gates, lambda: layouts.losses_of(other, batch)), expected)
    torch.testing.assert_close(layouts.output(other, batch), before)
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_under_activation_checkpointing_scores_the_same(reentrant):
    model, batch = build("bert"), inputs("bert")
    gates = HeadGates(model).eval()
    expected = head_gradients(gates, lambda: layouts.losses_of(model, batch))
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    torch.testing.assert_close(head_gradients(gates, lambda: layouts.losses_of(model, batch)), expected)
    assert model.training


def test_layers_that_run_without_a_graph_are_refused():
    """Their heads matter, and no gradient would say so."""
    model = BertModel(BertConfig(**layouts.TEXT))
    layer, forward = model.encoder.layer[1], model.encoder.layer[1].forward
    layer.forward = lambda hidden, *args, **kwargs: checkpoint(
        lambda own: forward(own, *args, **kwargs), hidden, use_reentrant=True
    )
    with pytest.raises(GateError, match=r"'encoder.layer.1.attention' runs without a graph.*reentrant"):
        head_gradients(HeadGates(model), lambda: model(layouts.ids(3, 7)).pooler_output.square().sum(1))


def test_scores_of_attention_matrices_are_summed_over_choices():
    model, batch = layouts.make("choices")
    sites = find_attention(model)
    together = attention_gradients(model, sites, lambda: layouts.losses_of(model, batch))
    loop = [
        attention_gradients(model, sites, lambda row=row: layouts.losses_of(model, layouts.one(batch, row))) for row in range(3)
    ]
    assert together.shape == (3, 8)
    close(together, torch.cat(loop))


PAIRINGS = ([0, 1, 2], [1, 2, 0], [2, 1, 0], [0, 2, 1])


@pytest.mark.parametrize(("dtype", "inside"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_the_same_function_can_pair_other_rows_at_every_call(dtype, inside):
    """One closure reads the rows in an order that changes between calls, or the model sorts its texts within itself, so that
    its outputs are in their order and its heads are not; forward passes are as many as calls."""
    model, batch = build("bert").to(dtype), inputs("bert")
    gates, order, calls = HeadGates(model).eval(), [], []
    model.register_forward_hook(lambda *_: calls.append(1))

    def sort(module, args, kwargs):
        return args, {name: value[order] if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}

    def bring_back(module, args, output):
        output.pooler_output = output.pooler_output[torch.tensor(order).argsort()]

    if inside:
        model.bert.register_forward_pre_hook(sort, with_kwargs=True)
        model.bert.register_forward_hook(bring_back)

    def losses():
        each = model(**batch).logits.float().square().flatten(1).sum(1)
        return each if inside else each[order]

    for pairing in (*PAIRINGS, PAIRINGS[0]):
        order[:] = pairing
        calls.clear()
        found = head_gradients(gates, losses)
        assert len(calls) == 1
        expected = torch.cat([head_gradients(gates, lambda row=row: losses()[row : row + 1]) for row in range(3)])
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, expected, atol=tolerance * float(expected.abs().max()), rtol=0)


def test_a_function_that_comes_to_mix_examples_is_refused():
    model, batch = build("bert"), inputs("bert")
    gates, mixes = HeadGates(model).eval(), []

    def losses():
        each = model(**batch).logits.square().flatten(1).sum(1)
        return each + each.roll(1) if mixes else each

    head_gradients(gates, losses)
    mixes.append(True)
    with pytest.raises(GateError, match="depends on the heads of another"):
        head_gradients(gates, losses)


def test_rows_of_many_examples_are_told_apart():
    """Two neighbours of sixty-four change places."""
    model = build("bert")
    gates, order = HeadGates(model).eval(), list(range(64))
    ids = layouts.ids(64, 5)

    def losses():
        return model(input_ids=ids).logits.square().flatten(1).sum(1)[order]

    straight = head_gradients(gates, losses)
    order[30:32] = 31, 30
    close(head_gradients(gates, losses), straight[order])


def small_bert(layers):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 50}
    return BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=layers)).eval()


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_what_is_known_of_rows_saves_backward_passes(products, monkeypatch):
    """Two of them, one for the gradients and a short one that checks the rows; a new function takes two for each digit more."""
    model, ids, passes, grad = small_bert(layers=2), layouts.ids(8, 16), [], torch.autograd.grad
    gates = HeadGates(model).eval()
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **more: passes.append(1) or grad(*args, **more))

    def losses():
        return cross_entropy(model(ids).logits, ids[:, 0] % 2, reduction="none")

    counts = []
    for _ in range(3):
        passes.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=products == "bfloat16"):
            head_gradients(gates, losses)
        counts.append(len(passes))
    assert counts == [7, 2, 2]


def test_a_batch_of_scores_takes_seven_tenths_of_a_plain_forward_and_backward_pass():
    """The pass that checks the rows ends at the last site, and no weight gets a gradient."""
    model = small_bert(layers=12)
    gates, batch = HeadGates(model), {"input_ids": layouts.ids(4, 32)}

    def losses():
        return model(**batch).logits.square().sum(1)

    head_gradients(gates, losses)  # locates the rows
    found = []
    for run in (lambda: head_gradients(gates, losses), lambda: losses().mean().backward()):
        with FlopCounterMode(display=False) as counted:
            run()
        found.append(counted.get_total_flops())
    assert found[0] <= 0.70 * found[1]
