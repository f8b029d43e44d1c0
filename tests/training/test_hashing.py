"""Hashes of columns: the same for the same values, however they lie in memory, and for no others."""

import json
import shutil
from types import SimpleNamespace

import pyarrow as pa
import pytest
import xxhash
from datasets import Dataset, concatenate_datasets

from training.data.text import read_hub
from training.runs import hashing
from training.runs.hashing import probed

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


def written(path, text):
    path.write_text(text)
    return str(path)


def test_a_file_is_known_by_what_it_holds(tmp_path, monkeypatch):
    first = written(tmp_path / "a.txt", "abc" * 1000)
    shutil.copy(first, tmp_path / "b.txt")
    assert probed(first) == probed(str(tmp_path / "b.txt"))
    written(tmp_path / "b.txt", "abc" * 999 + "abd")
    assert probed(first) != probed(str(tmp_path / "b.txt"))
    monkeypatch.setattr(hashing, "PROBES", 4)
    monkeypatch.setattr(hashing, "PROBE", 100)  # now it is a large file
    for content in ("abd" + "abc" * 999, "abc" * 999 + "abd", "abc" * 1001, "abc" * 333 + "x" + "abc" * 666 + "ab"):
        assert probed(first) != probed(written(tmp_path / "c.txt", content)), content[:9]


def test_a_folder_with_a_card_that_changes_is_read_anew(tmp_path):
    """As one without; ``datasets`` alone would not notice."""
    card = '---\nconfigs: [{"config_name": "c", "data_files": [{"split": "train", "path": "train.jsonl"}]}]\n---\n'
    for text in ("first", "other, of another size"):
        written(tmp_path / "train.jsonl", json.dumps({"text": text}) + "\n")
        for name, subset in (("README.md", "c"), ("none", None)):
            if subset is None:
                (tmp_path / "README.md").unlink()
            else:
                written(tmp_path / name, card)
            options = SimpleNamespace(dataset=str(tmp_path), subset=subset, split_names={"train": "train"})
            found = read_hub(options, instead="files")
            assert found["train"]["text"][:] == [text]
