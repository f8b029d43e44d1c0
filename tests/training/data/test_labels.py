"""Labels that are no classes, rows of a file that are not those that its writer meant, and files beyond all limits."""

import pytest

from gates.errors import GateError
from training.config.data import Text
from training.data.files import LONGEST, read_table, refuse_broken_quotes
from training.data.labels import check_classes
from training.data.text import TextData
from training.data.translation import read_lines


@pytest.mark.parametrize("label", ["[0, 1, 0]", "[0 1 0]", "[1]", "[]", "{'a': 1}"])
def test_several_classes_for_one_example(label):
    with pytest.raises(GateError, match="several values for one example; expected one class"):
        check_classes({"train": ["a", label] * 5})


def test_names_in_brackets_are_classes_and_numbers_are_ordered():
    assert check_classes({"train": ["[place]", "[person]", *map(str, range(12))] * 5}) == [
        *map(str, range(12)),
        "[person]",
        "[place]",
    ]


@pytest.mark.parametrize(("one", "other"), [("1", "1.0"), ("yes", "Yes"), ("true", "True"), ("-1", "-1.0")])
def test_one_class_in_two_ways(one, other):
    with pytest.raises(GateError, match="look like one class; use one spelling"):
        check_classes({"train": [one, other, "x"] * 5})


def test_a_missing_value_is_no_class():
    with pytest.raises(GateError, match="'NaN', which means a missing value"):
        check_classes({"train": ["a", "b", "NaN"] * 5})


def test_a_line_break_in_quotes_adds_no_row(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text('label\ttext\nyes\tgood\nno\t"bad\nvery bad"\nyes\tfine\n')
    with pytest.raises(GateError, match=r"line 4 of '.*' has 1 fields and the file 2 columns.*--data\.quoting true"):
        read_table(str(file))
    assert read_table(str(file), quoting=True)["label"].tolist() == ["yes", "no", "yes"]


def check_quotes(file, quoting=None):
    refuse_broken_quotes(str(file), read_table(str(file), quoting=quoting), quoting)


@pytest.mark.parametrize("rows", ['1\t"a\n2\tb"', '1\t"a ""b"" c\n2\td\n1\te"""'])
def test_a_line_break_in_quotes_whose_halves_are_whole_rows(tmp_path, rows):
    file = tmp_path / "a.tsv"
    file.write_text(f"label\ttext\n1\tx\n{rows}\n")
    with pytest.raises(GateError, match=r"line 3 of '.*' begins a quoted field.*--data\.quoting true, or false"):
        check_quotes(file)
    for quoting in (True, False):
        check_quotes(file, quoting)
    (tmp_path / "a.csv").write_text(file.read_text().replace("\t", ","))
    check_quotes(tmp_path / "a.csv")


@pytest.mark.parametrize(
    "rows",
    [
        '1\t"never closed\n2\tb',
        '1\t"whole"\n2\t"so ""it"" is"',
        '1\t"a quotation\n2\tof two "rows"\n1\tend"',
        '1\t"a quotation\n2\tof two rows"\n1\tthe "good" one',
        '1\tends with an inch"\n2\t"begins',
    ],
)
def test_quotation_marks_of_texts_are_left_alone(tmp_path, rows):
    file = tmp_path / "a.tsv"
    file.write_text(f"label\ttext\n{rows}\n")
    check_quotes(file)


def test_a_text_may_be_longer_than_a_field_of_csv(tmp_path):
    (tmp_path / "a.csv").write_text(f"label,text\n1,{'x ' * 100_000}\n")
    assert len(read_table(str(tmp_path / "a.csv"))["text"][2]) == 200_000


@pytest.mark.parametrize("end", ['1,"a', '"', 'a,"b\n'])
def test_quotation_marks_that_are_not_closed(tmp_path, end):
    (tmp_path / "a.csv").write_text(f"label,text\n1,a\n{end}")
    with pytest.raises(GateError, match="ends within quotation marks; close them"):
        read_table(str(tmp_path / "a.csv"))


def test_a_mark_of_order_line_ends_and_blank_lines_add_nothing(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbflabel,text\r\nyes,good\r\n\r\nno,"bad\r\nx"\r\nyes,\r\n')
    assert read_table(str(file)).to_dict("list") == {"label": ["yes", "no", "yes"], "text": ["good", "bad\r\nx", ""]}


def test_true_is_not_one(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "label": 1}\n{"text": "b", "label": null}\n{"text": "c", "label": true}\n')
    with pytest.raises(GateError, match="mixes true or false with other values; write one kind"):
        read_table(str(file))


# -- files that no model is meant for --

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
