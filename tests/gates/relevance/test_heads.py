"""Relevance of heads: against gradients of their gates, and where the truth is known."""

import pytest
import torch
import transformers as t

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.model import get_gated_model
from gates.relevance.heads import (
    Predictions,
    gradient_times_input,
    head_relevance,
    head_steps,
    layer_shares,
    top_logits,
    with_text,
    with_written_text,
)
from gates.scores.importance import head_gradients
from tests.gates.relevance.models import SIZES, build, inputs
from tests.models import logits
from tests.training.truth.models import ScoringContext


def rows_of(model, batch, **more):
    return torch.cat([step.rows for step in head_steps(model, find_attention(model), batch, **more)])


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_activation_times_gradient_is_the_gradient_of_the_gate(name):
    model = build(name)
    batch = inputs(model, padding=name == "bert")
    with HeadGates(model).attached() as gates:
        expected = head_gradients(gates, lambda: top_logits(model, batch, model(**batch)).logits[:, 0])
    torch.testing.assert_close(rows_of(model, batch, epsilon=None), expected.double(), rtol=1e-4, atol=1e-6)
    shares = layer_shares(expected.double(), gates.layer_index())
    torch.testing.assert_close(gradient_times_input(model, [batch]), shares.abs().mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient_times_input(model, [batch], signed=True), shares.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["distilbert", "opt", "bart"])
def test_batches_and_padding_change_nothing(name):
    model = build(name).float()
    batch = inputs(model)
    together = rows_of(model, batch, target=first_step)
    for row in range(3):
        length = int(batch["attention_mask"][row].sum())
        one = {key: tensor[row : row + 1] for key, tensor in batch.items()}
        one |= {key: one[key][:, :length] for key in ("input_ids", "attention_mask")}
        torch.testing.assert_close(rows_of(model, one, target=first_step)[0], together[row], rtol=2e-3, atol=1e-4)


def first_step(model, batch, output):
    found = top_logits(model, batch, output)
    return Predictions(found.logits[:, :1], found.counted[:, :1])


def test_padding_on_the_left_changes_nothing():
    model = build("llama").float()
    ids = torch.tensor([[5, 6, 7, 8]])
    padded = {"input_ids": torch.tensor([[0, 0, 5, 6, 7, 8]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    positions = {"position_ids": torch.tensor([[0, 0, 0, 1, 2, 3]])}
    torch.testing.assert_close(
        rows_of(model, {**padded, **positions}), rows_of(model, {"input_ids": ids}), rtol=2e-3, atol=1e-4
    )


def test_each_token_of_a_text_is_a_prediction_up_to_its_end():
    model = build("marian")
    ids = torch.tensor([[1, 7, 2, 0, 0], [1, 8, 9, 10, 2], [1, 5, 6, 7, 8]])
    written = with_text(model, source(model), ids)
    assert torch.equal(written["decoder_input_ids"], ids[:, :-1])
    assert written["decoder_attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    steps = list(head_steps(model, find_attention(model), written))
    assert [len(step.rows) for step in steps] == [3, 3, 2, 2]
    assert sum(step.logit for step in steps) == pytest.approx(
        float((logits(model, written).amax(-1) * written["decoder_attention_mask"]).sum())
    )
    alone = {key: tensor[2:] for key, tensor in written.items()}
    for step, together in zip(head_steps(model, find_attention(model), alone), steps, strict=True):
        torch.testing.assert_close(step.rows[0], together.rows[-1])


def test_an_encoder_decoder_writes_its_own_text():
    model = build("marian")
    written = with_written_text(model, source(model), max_new_tokens=6)
    best = logits(model, written).argmax(-1)
    assert torch.equal(best[:, :-1], written["decoder_input_ids"][:, 1:])
    expected = layer_shares(rows_of(model, written), HeadGates(model).layer_index()).abs().mean(0)
    found = head_relevance(model, [{**source(model), "labels": best}], max_new_tokens=6)
    torch.testing.assert_close(found, expected)


def source(model):
    batch = inputs(model)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def test_a_closed_head_has_no_relevance_and_gates_are_those_of_evaluation():
    model = build("bert").float()
    batch = inputs(model)
    gated = get_gated_model(model)
    before = head_relevance(gated, [batch])
    torch.testing.assert_close(before.view(2, 4).sum(1), torch.ones(2).double())
    mask = torch.tensor([1.0, 0, 1, 1, 1, 1, 0, 1])
    gated.gates.set_mask_(mask)
    after = head_relevance(gated, [batch])
    assert ((after == 0) == (mask == 0)).all()
    torch.testing.assert_close(head_relevance(gated.gates, [batch]), after)
    assert not torch.allclose(after[mask == 1], before[mask == 1])


@pytest.mark.parametrize("name", ["has", "same-ends", "bigram"])
@pytest.mark.parametrize("seed", [0, 1])
def test_where_needed_heads_write_the_answer_they_have_most_of_the_relevance(name, seed):
    """For the answer yes, which is there because the needed heads found something."""
    subject = ScoringContext(name, seed)
    subject.gates.mode = "open"
    shares = head_relevance(subject.gates, [{"input_ids": subject.ids[subject.answers == 1]}])
    needed = [head for heads in subject.functions for head in heads]
    others = [head for head in range(subject.gates.size) if head not in needed]
    assert shares[needed].min() > 3 * shares[others].max()
    assert shares[needed].sum() > 0.75 * len(subject.gates.sizes)


def test_what_relevance_does_not_see():
    """An answer that is there because nothing was found has no relevance to give to the head that looked."""
    subject = ScoringContext("has")
    subject.gates.mode = "open"
    shares = head_relevance(subject.gates, [{"input_ids": subject.ids[subject.answers == 0]}])
    assert shares[subject.functions[0]].max() < 0.05


def test_what_cannot_be_answered_is_refused():
    model = t.BertModel(t.BertConfig(**SIZES))
    batch = {"input_ids": torch.tensor([[3, 4, 5]])}
    with pytest.raises(GateError, match="BertModel returns no logits of classes or tokens"):
        head_relevance(model, [batch])
    with pytest.raises(GateError, match="BertForMaskedLM predicts tokens in the middle of texts"):
        head_relevance(t.BertForMaskedLM(t.BertConfig(**SIZES)), [batch])
    classifier = build("bert")
    with pytest.raises(GateError, match="no predictions"):
        head_relevance(classifier, [])
    with pytest.raises(GateError, match=r"expected both as \[batch, steps\]"):
        head_relevance(
            classifier, [batch], target=lambda model, inputs, output: Predictions(output.logits[:, 0], torch.ones(1))
        )
    with torch.no_grad():
        classifier.classifier.weight.fill_(torch.inf)
    with pytest.raises(GateError, match="not finite"):
        head_relevance(classifier, [batch])
