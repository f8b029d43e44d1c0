"""Roles of heads whose attention is planted along gold arcs: these are found, and noise and sinks have none."""

from contextlib import contextmanager

import pytest
import torch

from gates.errors import GateError
from tests.training.runs import make_data, make_pruner, make_trainer
from training.analysis import arc_roles
from training.analysis.arc_roles import NEAR, QUESTION_OF, reader_of, trees_of_arcs
from training.scoring.subject import Subject

ROWS = 120
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
MODERN = {
    "model_type": "modernbert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip


def subject_of(**settings):
    pruner = make_pruner(**settings)
    return Subject(pruner, make_data(), make_trainer())


def first_batch():
    return next(make_data().with_arcs(12, 0))[0]


@pytest.mark.parametrize(("model", "reader"), [(None, 0), (GPT2, -1), (MODERN | {"classifier_pooling": "cls"}, 0)])
def test_the_token_that_the_answer_is_read_off(model, reader):
    subject = subject_of(**({} if model is None else {"from_scratch": model, "budget": 1}))
    with subject.at_rest():
        assert reader_of(subject, first_batch()) == reader


def test_an_answer_from_the_mean_of_all_tokens_has_no_place():
    subject = subject_of(from_scratch=MODERN | {"classifier_pooling": "mean"}, budget=1)
    tokens = first_batch()["input_ids"].shape[1]
    with subject.at_rest(), pytest.raises(GateError, match=f"reads its answer off {tokens} of {tokens} tokens"):
        reader_of(subject, first_batch())


def test_every_relation_has_a_tree_of_its_own():
    text = torch.tensor([[False, True, True, True, False]])
    arcs = {"question to subject": (1, 3), "question to verb": (1, 2), "answer to verb": (0, 2)}
    trees = trees_of_arcs([arcs], text, reader=0)
    assert [tree.heads.tolist() for tree in trees] == [[[-1, 3, -1, -1, -1]], [[-1, 2, -1, -1, -1]], [[2, -1, -1, -1, -1]]]
    numbers = [list(QUESTION_OF).index(name) for name in arcs]
    assert [tree.relations.max().item() for tree in trees] == numbers
    assert all(tree.words.tolist() == [[0, 1, 2, 3, -1]] for tree in trees)


def planted(number, arcs, tokens, generator):
    """Attention of one site: along one arc, one back, noise, and along another arc behind a sink."""
    weights = torch.rand(len(arcs), 4, tokens, tokens, generator=generator)
    weights[:, 1, range(1, tokens), range(tokens - 1)] = 2.0
    weights[:, 3, :, 0] = 5.0
    for row, own in enumerate(arcs):
        for head, name in ((0, "verb to subject"), (3, "answer to rare")):
            if name in own:
                weights[row, head, own[name][0], own[name][1]] = 2.0
    return weights / weights.sum(-1, keepdim=True)


def test_heads_have_the_arcs_that_they_look_along_and_no_others(monkeypatch):
    subject, data = subject_of(), make_data()
    batches = iter(list(data.with_arcs(ROWS, 0)))
    generator = torch.Generator().manual_seed(0)

    @contextmanager
    def observed(model, sites, take):
        batch, arcs = next(batches)
        for site in range(len(sites)):
            take(site, planted(site, arcs, batch["input_ids"].shape[1], generator))
        yield

    monkeypatch.setattr(arc_roles, "observe_weights", observed)
    found = arc_roles.arc_roles(subject, data, ROWS)
    for site in (0, 4):
        assert found.arcs_of(site) == {"verb to subject": "agree?"}
        assert found.arcs_of(site + 1) == {NEAR: "order?"}
        assert found.arcs_of(site + 2) == {}
        assert found.arcs_of(site + 3) == {"answer to rare": "rare?"}
    assert found.shares["verb to subject"][[0, 4]].tolist() == [1, 1]
    assert found.shares[NEAR][[1, 5]].tolist() == [1, 1]
    others = {role.rule.name: role.holds.tolist() for role in found.others}
    assert others["positional"] == [False, True, False, False] * 2
    assert not any(others["separator"])


def test_a_fixed_distance_is_no_arc_of_varying_ones(monkeypatch):
    """A head that looks a fixed way ahead has no arc, however often the word there happens to be the subject."""
    subject, data = subject_of(), make_data()
    batches = iter(list(data.with_arcs(ROWS, 0)))

    @contextmanager
    def observed(model, sites, take):
        batch, _ = next(batches)
        rows, tokens = batch["input_ids"].shape
        weights = torch.zeros(rows, 4, tokens, tokens)
        for head, ahead in enumerate((1, 2, 3, 4)):
            weights[:, head, range(tokens - ahead), range(ahead, tokens)] = 1.0
        for site in range(len(sites)):
            take(site, weights)
        yield

    monkeypatch.setattr(arc_roles, "observe_weights", observed)
    found = arc_roles.arc_roles(subject, data, ROWS)
    assert max(found.shares["answer to subject"].tolist()) > 0.3
    assert [found.arcs_of(head) for head in range(8)] == [{}] * 8


def test_arcs_to_later_words_do_not_count_in_a_decoder():
    found = arc_roles.arc_roles(subject_of(from_scratch=GPT2, budget=1), make_data(), ROWS)
    unseen = {name for name, share in found.shares.items() if bool(share.isnan().all())}
    assert unseen == {name for name in QUESTION_OF if name.startswith(("question", "subject"))}
