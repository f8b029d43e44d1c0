"""Hashes of columns: the same for the same values, however they lie in memory, and for no others."""

import pyarrow as pa
import pytest
import xxhash
from datasets import Dataset, concatenate_datasets

from training.data import hashing

LISTS = [[1, 2], [], [3], [4, 5, 6]]


def hashed(split, name="values"):
    digest = xxhash.xxh3_128()
    hashing.add_column(digest, split, name)
    return digest.hexdigest()


def split_of(values, kind=None):
    return Dataset(pa.table({"values": pa.array(values, kind)}))


def test_widths_chunks_and_orders_of_reading_do_not_matter(monkeypatch):
    whole = hashed(split_of(LISTS))
    assert hashed(split_of(LISTS, pa.list_(pa.int8()))) == whole
    assert hashed(concatenate_datasets([split_of(LISTS[:1]), split_of(LISTS[1:])])) == whole
    assert hashed(split_of(LISTS[::-1]).select([3, 2, 1, 0])) == whole
    assert hashed(split_of([[9], *LISTS]).select(range(1, 5))) == whole


@pytest.mark.parametrize(
    "other",
    [
        [[1], [2], [3], [4, 5, 6]],  # the same numbers, in other examples
        [[1, 2], [], [4, 5, 6], [3]],
        [[1, 2], [], [3], [4, 5, 7]],
        LISTS[:3],
        [[1, 2], None, [3], [4, 5, 6]],
    ],
)
def test_other_values_have_another_hash(other):
    assert hashed(split_of(other)) != hashed(split_of(LISTS))


def test_numbers_and_texts():
    assert hashed(split_of([1, 2])) == hashed(split_of([1, 2], pa.int8())) != hashed(split_of([2, 1]))
    assert hashed(split_of(["a", "b"])) != hashed(split_of(["ab", ""])) != hashed(split_of(["a", None]))
    assert hashed(split_of([0.5])) != hashed(split_of([0.25]))


def test_more_rows_than_are_read_at_once(monkeypatch):
    monkeypatch.setattr(hashing, "ROWS", 2)
    assert hashed(split_of(LISTS)) != hashed(split_of([*LISTS[:3], [4, 5, 7]]))
    assert hashed(split_of(LISTS)) == hashed(split_of(LISTS, pa.list_(pa.int16())))
