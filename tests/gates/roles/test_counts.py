"""What is counted, against loops over heads, sentences and words."""

import math

import pytest
import torch

from gates.roles.measures import (
    Mentions,
    Trees,
    arc_counts,
    copy_counts,
    earlier_copies,
    mention_counts,
    positional_counts,
    rare_counts,
    repeated_sequences,
    sink_counts,
    token_counts,
)
from gates.roles.shares import View, at_offsets, most_attended, offsets_within, word_attention

BATCH, HEADS, TOKENS = 6, 3, 9
CAUSAL = pytest.mark.parametrize("causal", [False, True])


def make_view(causal=False):
    """Texts between two special tokens, of lengths from 5 to 9."""
    lengths = torch.tensor([9, 5, 7, 9, 6, 8])
    place = torch.arange(TOKENS)
    keys = place < lengths.unsqueeze(1)
    text = keys & (place > 0) & (place < (lengths - 1).unsqueeze(1))
    return View(torch.arange(BATCH), text, keys, text, causal)


def make_weights(view, seed=0):
    scores = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(seed)) * 4
    return scores.masked_fill(~view.visible.unsqueeze(1), -torch.inf).softmax(-1).nan_to_num(0.0)


def queries(view):
    for b in range(BATCH):
        for q in range(TOKENS):
            if view.queries[b, q]:
                yield b, q, [k for k in range(TOKENS) if view.keys[b, k] and (k <= q or not view.causal)]


def largest(weights, b, h, q, among):
    return max(among, key=lambda k: float(weights[b, h, q, k])) if among else None


@CAUSAL
def test_positional(causal):
    view, offsets = make_view(causal), offsets_within(2)
    weights = make_weights(view)
    found = positional_counts(weights, view, offsets)
    hits, uniform, chances = torch.zeros(BATCH, HEADS, 5), torch.zeros(BATCH, 5), torch.zeros(BATCH)
    for b, q, seen in queries(view):
        if len(seen) < 2:
            continue
        chances[b] += 1
        for column, offset in enumerate(offsets.tolist()):
            uniform[b, column] += (q + offset in seen) / len(seen)
            for h in range(HEADS):
                hits[b, h, column] += largest(weights, b, h, q, seen) == q + offset
    assert torch.equal(found.hits.float(), hits)
    torch.testing.assert_close(found.baselines[:, 0], uniform)
    assert (found.chances == chances.unsqueeze(1)).all()


@CAUSAL
def test_sinks(causal):
    view = make_view(causal)
    weights = make_weights(view)
    found = sink_counts(weights, view)
    hits, uniform, chances = torch.zeros(BATCH, HEADS, 4), torch.zeros(BATCH, 2), torch.zeros(BATCH, 4)
    for b, q, seen in queries(view):
        separators = [k for k in seen if not view.text[b, k] and k > 0]
        for column, among in enumerate((separators, [0])):
            if among:
                chances[b, column] += 1
                uniform[b, column] += len(among) / len(seen)
                hits[b, :, column] += weights[b, :, q, among].sum(-1)
        chances[b, 2:] += 1
        for h in range(HEADS):
            p = [float(weights[b, h, q, k]) for k in seen]
            hits[b, h, 2] -= sum(value * math.log(value) for value in p) / math.log(len(p))
            hits[b, h, 3] += max((float(weights[b, h, q, k]) for k in seen if view.text[b, k]), default=0.0)
    torch.testing.assert_close(found.hits.float(), hits)
    torch.testing.assert_close(found.chances.float(), chances)
    torch.testing.assert_close(found.baselines[:, 0, :2].float(), uniform)
    assert found.baselines[..., 2:].isnan().all()
    assert (found.chances[:, 0] == 0).all() == causal  # a separator behind the text is never seen


@CAUSAL
def test_rare(causal):
    view, offsets = make_view(causal), offsets_within(1)
    weights = make_weights(view)
    frequency = torch.randint(1, 6, (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))
    common = frequency >= 2
    found = rare_counts(weights, view, frequency, common, offsets)
    hits, rows, chances = torch.zeros(BATCH, HEADS, 2), torch.zeros(BATCH, 4, 2), torch.zeros(BATCH)
    for b, q, seen in queries(view):
        among = [k for k in seen if view.text[b, k]]
        ordered = sorted({int(frequency[b, k]) for k in among})
        rarest = [k for k in among if frequency[b, k] == ordered[0]]
        second = [k for k in among if len(rarest) == 1 and len(ordered) > 1 and frequency[b, k] == ordered[1]]
        if len(among) < 3 or bool(common[b, rarest[0]]):
            continue
        chances[b] += 1
        for column, targets in enumerate((rarest, rarest + second)):
            rows[b, 0, column] += len(targets) / len(among)
            for row, offset in enumerate(offsets.tolist()):
                rows[b, 1 + row, column] += q + offset in targets
            for h in range(HEADS):
                hits[b, h, column] += largest(weights, b, h, q, among) in targets
    assert chances.sum() > 5
    assert torch.equal(found.hits.float(), hits)
    assert torch.equal(found.chances.float(), chances.unsqueeze(1).expand(-1, 2))
    torch.testing.assert_close(found.baselines.float(), rows)


def test_the_frequent_tokens_are_the_first_of_those_that_occur():
    counts, common = token_counts(torch.tensor([5, 0, 9, 1]), common=3)
    assert common.tolist() == [True, False, True, True]
    assert token_counts(counts, common=1)[1].tolist() == [False, False, True, False]
    assert not token_counts(torch.zeros(4))[1].any()


WORDS = torch.tensor(
    [
        [-1, 0, 0, 1, 2, 3, 4, 5, -1], [-1, 0, 1, 1, -1, -1, -1, -1, -1], [-1, 0, 1, 2, 2, 4, -1, -1, -1],
        [-1, 0, 1, 2, 3, 4, 5, 5, -1], [-1, 0, 1, 2, 3, -1, -1, -1, -1], [-1, 0, 1, 2, 3, 3, 4, -1, -1],
    ]
)  # fmt: skip
"""Words of several pieces, and one (the fourth of the third sentence) without any."""


def of_words(weights, b, h):
    """Attention between words of a sentence, summed over pieces attended to and averaged over those that attend."""
    count = int(WORDS[b].max()) + 1
    pieces = [[t for t in range(TOKENS) if WORDS[b, t] == word] for word in range(count)]
    return [
        [float(sum(weights[b, h, q, k] for q in of for k in to)) / len(of) if of and to else None for to in pieces]
        for of in pieces
    ]


def test_words_of_several_pieces():
    weights = make_weights(make_view())
    found = word_attention(weights, WORDS, 6)
    for b in range(BATCH):
        for i, row in enumerate(of_words(weights, b, 1)):
            for j, value in enumerate(row):
                if value is not None:
                    assert float(found[b, 1, i, j]) == pytest.approx(value, rel=1e-5)


@CAUSAL
def test_syntactic(causal):
    view = make_view(causal)
    weights = make_weights(view, seed=4)
    generator = torch.Generator().manual_seed(5)
    heads = torch.randint(-1, 6, (BATCH, 6), generator=generator).minimum(WORDS.amax(1, keepdim=True))
    relations = torch.randint(-1, 2, (BATCH, 6), generator=generator)
    relations[(heads < 0) | (torch.arange(6) > WORDS.amax(1, keepdim=True))] = -1
    offsets = offsets_within(2, zero=False)
    found = arc_counts(weights, view, Trees(WORDS, heads, relations), 2, offsets)
    hits, chances, rows = torch.zeros(BATCH, HEADS, 4), torch.zeros(BATCH, 4), torch.zeros(BATCH, 4, 4)
    for b in range(BATCH):
        size = int(WORDS[b].max()) + 1
        there = [bool((WORDS[b] == word).any()) for word in range(size)]
        for w in range(size):
            among = [k for k in range(size) if there[w] and there[k] and k != w and (k < w or not causal)]
            targets = {}  # column -> words on which the largest weight is a hit
            if relations[b, w] >= 0 and int(heads[b, w]) in among:
                targets[int(relations[b, w])] = [int(heads[b, w])]
            for k in among:
                if heads[b, k] == w and relations[b, k] >= 0:
                    targets.setdefault(2 + int(relations[b, k]), []).append(k)
            for column, right in targets.items():
                chances[b, column] += 1
                for row, offset in enumerate(offsets.tolist()):
                    rows[b, row, column] += w + offset in right
                for h in range(HEADS):
                    attention = of_words(weights, b, h)[w]
                    hits[b, h, column] += max(among, key=lambda k: attention[k]) in right
    assert chances.sum() > 10
    assert torch.equal(found.chances.float(), chances)
    assert torch.equal(found.hits.float(), hits)
    assert torch.equal(found.baselines.float(), rows)


def test_several_dependents_of_a_relation_are_one_opportunity():
    trees = Trees(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 0]]), torch.tensor([[-1, 0, 0, 1]]))
    weights = torch.tensor([[0.0, 0.1, 0.9, 0.0], [1.0, 0, 0, 0], [0.4, 0.6, 0, 0], [0.9, 0.1, 0, 0]]).view(1, 1, 4, 4)
    found = arc_counts(weights, make_view(), trees, 2, torch.tensor([-1, 1]))
    assert found.chances.tolist() == [[2, 1, 1, 1]]
    assert found.hits.tolist() == [[[1, 1, 1, 0]]]
    assert found.baselines.tolist() == [[[1, 0, 0, 0], [0, 0, 1, 0]]]


@CAUSAL
def test_coreference(causal):
    view = make_view(causal)
    weights = make_weights(view, seed=6)
    places = {"pronouns": [[3], [1], [4], [2], [0], [2]], "antecedents": [[0, 1], [0], [0], [4], [2], [1]]}
    places["others"] = [[4], [], [2], [0, 1], [1], [0]]
    marks = {name: torch.zeros(BATCH, 6, dtype=torch.bool) for name in places}
    for name, rows in places.items():
        for b, row in enumerate(rows):
            marks[name][b, row] = True
    offsets = offsets_within(2, zero=False)
    found = mention_counts(weights, view, Mentions(WORDS, **marks), offsets)
    for b in range(BATCH):
        pronoun = places["pronouns"][b][0]
        size = int(WORDS[b].max()) + 1
        there = [k for k in range(size) if bool((WORDS[b] == k).any())]
        among = [k for k in there if k != pronoun and (k < pronoun or not causal)]
        right, wrong = ([k for k in places[name][b] if k in among] for name in ("antecedents", "others"))
        counted, both = bool(right), bool(right and wrong)
        assert found.chances[b].tolist() == [counted, both, both]
        for row, offset in enumerate(offsets.tolist()):
            expected = [counted and pronoun + offset in right, both and pronoun + offset in wrong, 0]
            assert found.baselines[b, 1 + row].tolist() == expected
        nearer = both and min(abs(k - pronoun) for k in right) < min(abs(k - pronoun) for k in wrong)
        assert found.baselines[b, 0].tolist() == [0, 0, nearer]
        for h in range(HEADS):
            attention = of_words(weights, b, h)[pronoun]
            best = max(among, key=lambda k: attention[k]) if among else None
            choice = both and max(attention[k] for k in right) > max(attention[k] for k in wrong)
            assert found.hits[b, h].tolist() == [counted and best in right, both and best in wrong, choice]


def test_a_tie_between_candidates_is_no_hit():
    marks = {name: torch.zeros(1, 3, dtype=torch.bool) for name in ("pronouns", "antecedents", "others")}
    for word, name in enumerate(("antecedents", "pronouns", "others")):  # both candidates are as near as each other
        marks[name][0, word] = True
    found = mention_counts(
        torch.full((1, 1, 3, 3), 1 / 3), make_view(), Mentions(torch.tensor([[0, 1, 2]]), **marks), torch.tensor([1])
    )
    assert found.hits[0, 0, 2] == 0
    assert found.baselines[0, 0, 2] == 0


def test_induction_and_duplicate_heads_of_sequences_said_twice():
    rows = repeated_sequences(range(10, 60), 12, start=1, longest=20, seed=3)
    assert all(row[0] == 1 and row[1 : 1 + len(row) // 2] == row[1 + len(row) // 2 :] for row in rows)
    assert len({len(row) for row in rows}) > 3
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[-1] * (longest - len(row))] for row in rows])
    text = ids > 1
    view = View(torch.arange(12), text, ids >= 0, text, causal=True)
    earlier = earlier_copies(ids, text)
    for row, own in zip(rows, earlier.tolist(), strict=True):
        half = len(row) // 2
        assert own[: 1 + half] == [-1] * (1 + half)
        assert own[1 + half : len(row)] == list(range(1, 1 + half))
    induction, duplicate = (torch.nn.functional.one_hot((earlier + shift).clamp(min=0), longest) for shift in (1, 0))
    before = torch.nn.functional.one_hot((torch.arange(longest) - 1).clamp(min=0), longest).expand(12, -1, -1)
    weights = torch.stack([induction, duplicate, before], dim=1).float()
    found = copy_counts(weights, view, earlier, torch.arange(-20, 1))
    shares = found.hits.sum(0) / found.chances.sum(0)
    assert shares[:2].tolist() == [[1, 0], [0, 1]]
    assert (shares[2] < 0.1).all()
    assert (found.baselines.sum(0) / found.chances.sum(0) < 0.5).all()  # no fixed offset finds the copies of all lengths


def test_ties_and_queries_without_keys():
    among = torch.tensor([[[True, True], [False, False]]])
    assert most_attended(torch.zeros(1, 1, 2, 2), among).tolist() == [[[0, -1]]]
    assert at_offsets(among, torch.tensor([-1, 0, 1])).tolist() == [[[-1, -1], [0, -1], [1, -1]]]
