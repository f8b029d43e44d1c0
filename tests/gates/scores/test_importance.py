import pytest
import torch

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.fisher import FisherInformation
from gates.scores.importance import HeadImportance, gradient_rows, head_gradients, removal_ranking
from tests.models import FAMILIES, build, inputs, logits, slope


def losses_of(model, batch):
    """A loss per example that depends on every real position."""
    out = model(**batch).logits.double()
    if out.dim() == 3 and out.shape[1] == batch.get("attention_mask", out).shape[1]:
        out = out * batch["attention_mask"].unsqueeze(-1)
    return out.square().flatten(1).sum(1)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_matches_finite_differences_example_by_example(name):
    model, batch = build(name).double(), inputs(name)
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].double()
    gates = HeadGates(model).eval()
    rows = head_gradients(gates, lambda: losses_of(model, batch))
    for head in range(0, gates.heads, 5):
        expected = slope(gates, head, lambda: losses_of(model, batch), 1e-3)  # norms compute in float32 even in a float64 Llama
        torch.testing.assert_close(rows[:, head].double(), expected, rtol=2e-3, atol=2e-2)


def test_a_shared_module_has_the_gradient_of_all_its_passes():
    model, batch = build("bert").double(), inputs("bert")
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]
    gates = HeadGates(model).eval().attach()
    rows = head_gradients(gates, lambda: losses_of(model, batch))
    assert rows.shape == (3, 4)
    for head in range(4):
        expected = slope(gates, head, lambda: losses_of(model, batch), 1e-5)
        torch.testing.assert_close(rows[:, head].double(), expected, rtol=1e-3, atol=1e-5)


def test_token_granularity_by_hand():
    """Michel et al.'s released code: the product of the context and its gradient, summed over the head's features."""
    model, batch = build("bert"), inputs("bert", padding=False)
    gates = HeadGates(model).eval()
    projection, kept = model.bert.encoder.layer[1].attention.output.dense, []

    def keep(module, args):
        args[0].retain_grad()
        kept.append(args[0])

    handle = projection.register_forward_pre_hook(keep)
    losses_of(model, batch).sum().backward()
    handle.remove()
    product = (kept[0] * kept[0].grad).detach().unflatten(-1, (4, 8)).sum(-1).abs().sum(1)
    rows = head_gradients(gates, lambda: losses_of(model, batch), "token")
    torch.testing.assert_close(rows[:, 4:], product.float(), atol=1e-5, rtol=1e-4)


def test_scoring_leaves_the_model_and_its_gradients_alone():
    model, batch = build("bert"), inputs("bert")
    expected = logits(model, batch)
    gates = HeadGates(model).eval()
    head_gradients(gates, lambda: losses_of(model, batch))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not gates.is_attached
    assert torch.equal(logits(model, batch), expected)


def test_the_metric_streams_to_the_direct_result():
    torch.manual_seed(0)
    rows = torch.randn(37, 6)
    metric = HeadImportance(6)
    for part in rows.split(5):
        metric.update(part)
    found = metric.compute()
    torch.testing.assert_close(found.his, rows.double().abs().mean(0))
    torch.testing.assert_close(found.signed, rows.double().mean(0))
    torch.testing.assert_close(found.fisher, rows.double().square().mean(0))
    torch.testing.assert_close(found.standard_error, rows.double().abs().std(0) / 37**0.5)


def test_a_loss_that_misses_a_site_is_an_error():
    model, batch = build("marian"), inputs("marian")
    with pytest.raises(GateError, match="decoder"):
        head_gradients(
            HeadGates(model), lambda: model.get_encoder()(batch["input_ids"]).last_hidden_state.square().flatten(1).sum(1)
        )


@pytest.mark.parametrize("name", ["bert", "llama", "marian"])
@pytest.mark.parametrize("unit", ["head", "group"])
def test_one_backward_pass_gives_every_granularity(name, unit):
    model, batch = build(name), inputs(name)
    gates = HeadGates(model, unit).eval()
    rows = gradient_rows(gates, lambda: losses_of(model, batch))
    for granularity in ("example", "token", "batch"):
        expected = head_gradients(gates, lambda: losses_of(model, batch), granularity)
        torch.testing.assert_close(getattr(rows, granularity), expected, atol=1e-3, rtol=1e-4)
    assert rows.weights == ()


def test_gates_are_removed_in_steps_and_scored_again():
    """Each gate is worth less while a better one of its pair is open, which one scoring at the start cannot know."""
    masks = []

    def scores_at(mask):
        masks.append(mask.clone())
        pairs = mask.view(3, 2)
        alone = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
        return torch.where(pairs.flip(1) == 1, alone / 10, alone * 10).flatten()

    ranking = removal_ranking(scores_at, 6, share=0.2)
    assert ranking.tolist() == [0, 3, 1, 4, 2, 5]
    assert [int(mask.sum()) for mask in masks] == [6, 5, 4, 3, 2, 1]
    masks.clear()
    one_shot = removal_ranking(scores_at, 6, share=1.0)
    assert one_shot.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(masks) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_named(value):
    model, batch = build("bert"), inputs("bert")
    gates = HeadGates(model)

    def losses():
        return losses_of(model, batch) * torch.tensor([1.0, value, *[1.0] * (len(batch["input_ids"]) - 2)])

    with pytest.raises(GateError, match=f"the loss of example 1 is -?{value}, so no head has a score"):
        head_gradients(gates, losses)


@pytest.mark.parametrize("shape", [(8,), (3, 1), (3, 7), (2, 3, 8)])
def test_rows_of_another_shape_are_refused(shape):
    for metric in (HeadImportance(8), FisherInformation(8)):
        with pytest.raises(GateError, match=r"expected \[samples, 8\]"):
            metric.update(torch.ones(shape))
