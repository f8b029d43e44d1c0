"""Streams of documents: the texts are those of the files, in an order of the seed, and no more is read than is needed."""

import gzip
import json

import pandas as pd
import pytest

from gates.errors import GateError
from tests.training.data.texts import write
from training.config.data import Documents
from training.data.documents import TextStream, open_streams

TEXTS = [f"Story {number}, \u201cdéjà vu\u201d.\nIt has {number} lines, or 2." for number in range(40)]
LINES = [text.replace("\n", " ") for text in TEXTS]


def texts_of(file, seed=None, buffer=1, **more):
    options = Documents(train_file=str(file), test_file=str(file), **({"streaming": True, "train_blocks": 8} | more))
    return list(open_streams(options)["train"].texts(seed, buffer))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_texts_of_every_format_come_as_they_are(tmp_path, name):
    file, table = tmp_path / name, pd.DataFrame({"id": range(40), "text": TEXTS})
    if ".txt" in name:
        write(file, "\n\n".join(TEXTS))
    elif ".jsonl" in name:
        write(file, "".join(json.dumps(row) + "\n" for row in table.to_dict("records")))
    else:
        table.to_parquet(file)
    assert texts_of(file) == texts_of(file, streaming=False, train_blocks=None) == TEXTS


def test_the_order_is_that_of_the_seed(tmp_path):
    file = write(tmp_path / "a.txt", "\n\n".join(TEXTS))
    one, again, other = (texts_of(file, seed, 10) for seed in (3, 3, 4))
    assert one == again != other
    assert one != TEXTS
    assert sorted(one) == sorted(other) == sorted(TEXTS)
    assert texts_of(file, 3, 1) == TEXTS
    place = {text: number for number, text in enumerate(TEXTS)}
    assert all(place[text] <= number + 10 for number, text in enumerate(one))  # none comes from beyond the buffer


def test_a_folder_of_many_files_is_a_data_set(tmp_path):
    for split, part in (("train", LINES[:30]), ("test", LINES[30:])):
        (tmp_path / split).mkdir()
        for first in range(0, len(part), 10):
            rows = "".join(json.dumps({"body": text}) + "\n" for text in part[first : first + 10])
            write(tmp_path / split / f"{first}.jsonl", rows)
    options = Documents(dataset=str(tmp_path), streaming=True, train_blocks=8)
    found = open_streams(options)
    assert sorted(found["train"].texts()) == sorted(LINES[:30])
    assert list(found["test"].texts()) == LINES[30:]
    assert found["train"].content != found["test"].content
    before = found["train"].content
    write(tmp_path / "train" / "10.jsonl", json.dumps({"body": "other"}))
    assert open_streams(options)["train"].content != before
    with pytest.raises(GateError, match="has no split 'valid' for test; it has"):
        open_streams(Documents(dataset=str(tmp_path), streaming=True, train_blocks=8, test_split="valid"))


def test_what_cannot_be_streamed_is_refused(tmp_path):
    with pytest.raises(GateError, match=r"the train file '.*none.txt' does not exist"):
        texts_of(tmp_path / "none.txt")
    with pytest.raises(GateError, match=r"has the ending '.csv'; expected .txt, .jsonl"):
        texts_of(write(tmp_path / "a.csv", "x"))
    with pytest.raises(GateError, match=r"no column for the text; it has 'a', 'b'. Give --data.text_column"):
        texts_of(write(tmp_path / "a.jsonl", '{"a": "x", "b": "y"}\n'))
    with pytest.raises(GateError, match="the train split"):
        texts_of(write(tmp_path / "b.jsonl", "no json\n"))
    with pytest.raises(GateError, match="'text' of document 2 of the train split is None; expected a text"):
        texts_of(write(tmp_path / "c.jsonl", '{"text": "x"}\n{"text": null}\n'))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"story\n\n" * 9999)[:-20])
    with pytest.raises(GateError, match="the train split cannot be read to its end"):
        texts_of(tmp_path / "d.txt.gz")
    (tmp_path / "e.txt").write_bytes(b"story\n\n\xff\xfe\n")
    with pytest.raises(GateError, match="cannot be read to its end: 'utf-8' codec"):
        texts_of(tmp_path / "e.txt")
    with pytest.raises(GateError, match="neither a local folder nor a reachable hub name"):
        open_streams(Documents(dataset=str(tmp_path / "none"), streaming=True, train_blocks=8))


def test_errors_of_a_connection_that_breaks_off_are_one_sentence():
    class Broken:
        def __iter__(self):
            yield {"text": "one"}
            raise ConnectionError("the peer is gone\nand more")

    found = TextStream("train", Broken(), "text", "").texts()
    assert next(found) == "one"
    with pytest.raises(GateError, match=r"^the train split cannot be read to its end: the peer is gone$"):
        next(found)
