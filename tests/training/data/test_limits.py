"""Data files that no model is meant for: told within seconds, before they take the memory."""

import gzip
import json

import pandas as pd
import pytest

from gates.errors import GateError
from training.config.data import Text
from training.data.files import LONGEST, MOST_COLUMNS, count_keys, read_table
from training.data.text import TextData
from training.data.translation import read_lines

LONG = "x" * (LONGEST + 1)


def refused(file, said, reader=read_table, **more):
    with pytest.raises(GateError, match=said) as caught:
        reader(str(file), **more)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("name", "text"), [("a.tsv", f"text\tlabel\n{LONG}\t1\n"), ("a.jsonl", f'{{"text": "{LONG}"}}\n')])
def test_a_line_that_is_too_long(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    refused(tmp_path / name, f"more than {LONGEST:,} bytes in line {2 if name.endswith('tsv') else 1}; expected one example")
    refused(tmp_path / name, "bytes in line", reader=read_lines)


def test_a_text_behind_a_quotation_mark_that_nothing_closes(tmp_path):
    line = "y" * 999 + "\n"
    (tmp_path / "a.csv").write_text('text,label\n"x,1\n' + line * (LONGEST // 1000 + 1) + '",1\n')
    refused(tmp_path / "a.csv", "'text' of example 1 of .* characters; expected a text. See that its quotation marks")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.parquet"])
def test_more_columns_than_any_data_set_has(tmp_path, name):
    columns = [f"c{number}" for number in range(MOST_COLUMNS + 1)]
    frame = pd.DataFrame([range(len(columns))], columns=columns)
    if name.endswith("parquet"):
        frame.to_parquet(tmp_path / name)
    else:
        frame.to_csv(tmp_path / name, index=False, sep="," if name.endswith("csv") else "\t")
    refused(tmp_path / name, f"has {MOST_COLUMNS + 1:,} columns; expected at most {MOST_COLUMNS:,}")


def test_more_keys_than_any_data_set_has_columns(tmp_path):
    """In one line, or in all lines together."""
    keys = [f"k{number}" for number in range(MOST_COLUMNS + 1)]
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(keys, 1)) + "\n")
    (tmp_path / "b.jsonl").write_text("".join(f'{{"text": "x", "{key}": 1}}\n' for key in keys))
    for name in ("a", "b"):
        refused(tmp_path / f"{name}.jsonl", f"has {MOST_COLUMNS + 1:,} columns; expected at most {MOST_COLUMNS:,}")


def test_what_looks_like_keys_within_texts_is_none(tmp_path):
    rows = [{"text": f'he said "k{number}": {{"a{number}": 1}}', "label": "x"} for number in range(MOST_COLUMNS)]
    lines = [json.dumps(row | {"more": {f"m{number}": 1}}) for number, row in enumerate(rows)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    assert count_keys(tmp_path / "a.jsonl") == 3


def test_a_parquet_file_that_holds_far_more_than_its_size(tmp_path, monkeypatch):
    """One value, again and again, takes next to nothing in the file."""
    constant = pd.DataFrame({"text": ["the same text"] * 20_000, **{f"c{number}": [1] * 20_000 for number in range(20)}})
    constant.to_parquet(tmp_path / "a.parquet")
    assert len(read_table(str(tmp_path / "a.parquet"))) == 20_000  # of which there is room for any
    monkeypatch.setattr("training.data.files.UNPACKED", 1_000_000)
    refused(tmp_path / "a.parquet", "a.parquet' unpacks to more than 200 times its size, as no text does")
    various = pd.DataFrame({"text": [f"text {number * 7919}" for number in range(50_000)], "label": [0, 1] * 25_000})
    various.to_parquet(tmp_path / "b.parquet")
    assert len(read_table(str(tmp_path / "b.parquet"))) == 50_000


@pytest.mark.nightly
@pytest.mark.parametrize("line", [b"\0" * 1_000_000, b"a text\t1\n" * 10_000], ids=["without lines", "of lines"])
def test_a_packed_file_that_holds_a_hundred_times_more_than_text_would(tmp_path, line):
    """A gigabyte in a megabyte; not all of it is unpacked."""
    with gzip.open(tmp_path / "a.tsv.gz", "wb", compresslevel=1) as file:
        for _ in range(100_000_000 // len(line)):
            file.write(line)
    said = "bytes in line 1" if line.startswith(b"\0") else "unpacks to more than 200 times its size"
    for reader in (read_table, read_lines):
        refused(tmp_path / "a.tsv.gz", said, reader=reader)


def test_lists_in_lists_in_lists(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + ', "label": 1}\n')
    refused(tmp_path / "a.jsonl", "cannot be read as json")


def test_a_share_that_leaves_nothing_to_train_on(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "a text\t1\nanother\t0\n" * 3)
    data = TextData(Text(train_file=str(tmp_path / "a.tsv"), test_file=str(tmp_path / "a.tsv"), select_fraction=0.999))
    with pytest.raises(GateError, match=r"select_fraction is 0.999, which leaves nothing of 6 examples to train on"):
        data.load_splits()
