"""Data files that no model is meant for: refused before anything is loaded."""

import pytest

from gates.errors import GateError
from training.config.data import Text
from training.data.files import LONGEST, read_table
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


def test_a_text_after_a_quotation_mark_that_is_not_closed(tmp_path):
    line = "y" * 999 + "\n"
    (tmp_path / "a.csv").write_text('text,label\n"x,1\n' + line * (LONGEST // 1000 + 1) + '",1\n')
    refused(tmp_path / "a.csv", "'text' of line 1004 of .* characters; expected at most .*; close its quotation marks")


def test_lists_in_lists_in_lists(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + ', "label": 1}\n')
    refused(tmp_path / "a.jsonl", "cannot be read as json")


def test_a_share_that_leaves_nothing_to_train_on(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "a text\t1\nanother\t0\n" * 3)
    data = TextData(Text(train_file=str(tmp_path / "a.tsv"), test_file=str(tmp_path / "a.tsv"), select_fraction=0.999))
    with pytest.raises(GateError, match=r"select_fraction is 0.999, which leaves nothing of 6 examples to train on"):
        data.load_splits()
