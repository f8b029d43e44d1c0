"""Labels that are no classes, and rows of a file that are not those that its writer meant."""

import pytest

from gates.errors import GateError
from training.data.files import read_table
from training.data.labels import check_classes


@pytest.mark.parametrize("label", ["[0, 1, 0]", "[0 1 0]", "[1]", "[]", "{'a': 1}"])
def test_several_classes_for_one_example(label):
    with pytest.raises(GateError, match="several values for one example; expected one class for each"):
        check_classes({"train": ["a", label] * 5})


def test_names_in_brackets_are_classes():
    check_classes({"train": ["[person]", "[place]"] * 5})


@pytest.mark.parametrize(("one", "other"), [("1", "1.0"), ("yes", "Yes"), ("true", "True"), ("-1", "-1.0")])
def test_one_class_in_two_ways(one, other):
    with pytest.raises(GateError, match="look like one class; write it in one way"):
        check_classes({"train": [one, other, "x"] * 5})


def test_a_missing_value_is_no_class():
    with pytest.raises(GateError, match="'NaN', which stands for a missing value"):
        check_classes({"train": ["a", "b", "NaN"] * 5})


def test_a_line_break_in_quotes_adds_no_row(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text('label\ttext\nyes\tgood\nno\t"bad\nvery bad"\nyes\tfine\n')
    with pytest.raises(GateError, match=r"line 4 of '.*' has 1 fields and the file 2 columns.*--data\.quoting true"):
        read_table(str(file))
    assert read_table(str(file), quoting=True)["label"].tolist() == ["yes", "no", "yes"]


def test_a_mark_of_order_line_ends_and_blank_lines_add_nothing(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbflabel,text\r\nyes,good\r\n\r\nno,"bad\r\nx"\r\nyes,\r\n')
    assert read_table(str(file)).to_dict("list") == {"label": ["yes", "no", "yes"], "text": ["good", "bad\r\nx", ""]}


def test_true_is_not_one(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "label": 1}\n{"text": "b", "label": null}\n{"text": "c", "label": true}\n')
    with pytest.raises(GateError, match="has true or false and other values; write all of one kind"):
        read_table(str(file))
