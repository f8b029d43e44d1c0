"""The truth is true: heads that are said to be enough are enough, and without any one function the answer is lost."""

import itertools

import pytest
import torch
from transformers import BertForSequenceClassification

from tests.training.truth.models import ScoringContext
from training.truth.compiler import compiled, directions
from training.truth.program import PROGRAMS, Layer, Program
from training.truth.tables import judged


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_any_one_head_of_each_necessary_function_is_enough_and_none_can_be_spared(name, seed):
    subject = ScoringContext(name, seed)
    assert subject.accuracy() >= 0.99
    for chosen in itertools.product(*subject.functions):
        assert subject.accuracy(kept=chosen) == 1.0
        for head in chosen:
            assert subject.accuracy(kept=set(chosen) - {head}) < 0.7
    for heads in subject.functions:
        assert subject.accuracy(closed=heads) < 0.7


@pytest.mark.parametrize("name", ["has", "same-ends", pytest.param("has-copies", marks=pytest.mark.nightly)])
def test_of_all_masks_those_answer_that_keep_every_necessary_function(name):
    subject = ScoringContext(name)
    for bits in itertools.product([0, 1], repeat=subject.gates.size):
        mask = torch.tensor(bits)
        has_all = judged(mask, subject.functions).recall == 1
        assert (subject.accuracy(kept=mask.nonzero().flatten().tolist()) > 0.95) == has_all


def test_seeds_rotate_the_stream_and_shuffle_heads():
    first, second = ScoringContext("induction", 0), ScoringContext("induction", 1)
    assert first.functions != second.functions
    words = [subject.model.bert.embeddings.word_embeddings.weight for subject in (first, second)]
    assert not torch.allclose(*words, atol=0.1)
    assert (words[0].abs() > 0.5).float().mean() < 0.05  # no letter has a coordinate of its own
    assert type(first.model) is BertForSequenceClassification


def test_directions_are_orthonormal_and_survive_a_layer_norm():
    found = directions(24).double()
    torch.testing.assert_close(found.T @ found, torch.eye(23, dtype=torch.float64), atol=1e-6, rtol=0)
    assert found.sum(0).abs().max() < 1e-5


def test_a_local_gradient_sees_no_head_that_has_a_copy():
    """With copies the gates' gradient is that of what leaks, far below that of the same head alone."""
    sizes = {}
    for name in ("has", "has-copies", "has-backup"):
        subject = ScoringContext(name)
        values = torch.ones(len(subject.ids), subject.gates.size, requires_grad=True)
        with subject.gates.use(values):
            loss = torch.nn.functional.cross_entropy(subject.model(subject.ids).logits, subject.answers, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, values)
        sizes[name] = float(gradient.abs().mean(0)[subject.functions[0]].max())
    assert sizes["has-copies"] < sizes["has"] / 10
    assert sizes["has-backup"] < sizes["has"] / 10


def test_loud_heads_that_undo_each_other_are_harmless_only_together():
    subject = ScoringContext("bigram-undone")
    needed = [heads[0] for heads in subject.functions]
    assert subject.accuracy(kept=needed) == 1.0
    alone = [subject.accuracy(closed=[head]) for head in range(subject.gates.size) if head not in needed]
    assert sorted(value < 0.95 for value in alone) == [False] * 6 + [True] * 4


def test_a_program_that_does_not_fit_is_refused():
    wide = Program("wide", "", "ab", 30, (Layer(),), (), lambda *_: "", lambda _: True, heads=2)
    with pytest.raises(ValueError, match="wide"):
        compiled(wide, vocabulary={"[PAD]": 0, "a": 1, "b": 2}, labels={"no": 0, "yes": 1})
