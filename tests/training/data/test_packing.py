"""Documents as blocks: every token is predicted once, from what comes before it in its own document."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.documents import packed, positions

DOCUMENTS = st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=12), min_size=1, max_size=8)


def predictions(documents):
    """What follows what, in each document."""
    return [(ids[place], ids[place + 1]) for ids in documents for place in range(len(ids) - 1)]


@given(DOCUMENTS, st.integers(2, 9), st.booleans())
def test_every_token_behind_the_first_is_predicted_once_and_in_order(documents, length, packing):
    found = list(packed(documents, length, packing=packing))
    pairs = [pair for block in found for pair in zip(block.input_ids, block.labels, strict=True)]
    assert pairs == predictions(documents)
    assert all(0 < len(block.input_ids) <= length for block in found)


@given(DOCUMENTS, st.integers(2, 9))
def test_packed_blocks_are_full_but_for_the_last(documents, length):
    assert {len(block.input_ids) for block in list(packed(documents, length))[:-1]} <= {length}


@given(DOCUMENTS, st.integers(2, 9))
def test_without_packing_a_block_holds_one_document(documents, length):
    for block in packed(documents, length, packing=False):
        assert (block.starts, len({number for number, _ in block.shares})) == ([0], 1)


@given(DOCUMENTS, st.integers(2, 9), st.booleans())
def test_the_shares_of_a_document_are_its_whole(documents, length, packing):
    whole = [0.0] * len(documents)
    for block in packed(documents, length, packing=packing):
        for number, share in block.shares:
            whole[number] += share
    assert whole == pytest.approx([1.0] * len(documents))


@given(DOCUMENTS, st.integers(2, 9))
def test_positions_start_again_with_every_part(documents, length):
    for block in packed(documents, length):
        found = positions(block.starts, len(block.input_ids))
        assert [place for place, position in enumerate(found) if position == 0] == block.starts
        assert all(after in (0, before + 1) for before, after in pairwise(found))


def test_a_document_without_anything_to_predict_has_no_block():
    assert [block.input_ids for block in packed([[1], [1, 2]], 4)] == [[1]]
    assert list(packed([[1]], 4)) == []


@given(DOCUMENTS, st.integers(2, 9), st.booleans())
def test_no_document_is_asked_for_before_it_is_needed(documents, length, packing):
    """A block is there as soon as it is full, or, where it holds one document alone, when the next one comes."""
    asked = 0

    def come():
        nonlocal asked
        for ids in documents:
            asked += 1
            yield ids

    for block in packed(come(), length, packing=packing):
        full = len(block.input_ids) == length
        assert asked == min(len(documents), block.shares[-1][0] + (1 if full else 2))
