"""Relevance of a translator's heads: to the tokens of its own translations."""

import pytest
import torch

from gates.relevance.heads import head_relevance
from tests.training.runs import make_trainer
from tests.training.translation_runs import make_data, make_pruner
from training.scoring.passes import relevance_shares
from training.scoring.subject import ScoringContext


@pytest.fixture(scope="module")
def subject():
    data = make_data(score_rows=6)
    pruner = make_pruner(data).eval()
    for parameter in pruner.backbone.parameters():
        if parameter.dim() >= 2 and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return ScoringContext(pruner, data, make_trainer())


def test_all_kinds_of_heads_have_their_shares(subject):
    with subject.at_rest():
        found = relevance_shares(subject, epsilon=1e-6, description="test")
    for layer in found.absolute.split(subject.gates.sizes):
        assert float(layer.sum()) == pytest.approx(1.0, abs=1e-4)
    assert bool((found.signed.abs() <= found.absolute + 1e-9).all())
    assert set(subject.gates.kind_sizes()) == {"encoder", "decoder", "cross"}


def test_it_is_the_relevance_to_the_tokens_that_the_task_writes(subject, monkeypatch):
    """With the text given by hand, the library finds the same."""
    given = []

    def written(model, ids, mask, decoding, *, beams):
        assert beams == 1
        text = torch.tensor([[model.config.decoder_start_token_id, 5, 6, model.config.eos_token_id]]).repeat(len(ids), 1)
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": text[:, :-1]}
        given.append(inputs)
        return text

    monkeypatch.setattr("training.scoring.passes.generate", written)
    with subject.at_rest():
        found = relevance_shares(subject, epsilon=1e-6, description="test")
        expected = head_relevance(subject.gates, given)
    torch.testing.assert_close(found.absolute, expected, rtol=1e-3, atol=1e-5)
