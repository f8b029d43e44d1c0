"""Sentences with a number each; and which of two classes is the positive one."""

import pytest

from gates.errors import GateError
from training.config.data import Ratings, Text
from training.data.synthetic import build_tokenizer
from training.data.text import RatingsData, TextData
from training.tasks import Regression

WORDS = ["the fox sees the basil", "the king", "the fox", "the basil sees", "the king sees the fox"]


def file_of(folder, labels, name="train.tsv"):
    rows = [f"{WORDS[row % len(WORDS)]}\t{label}" for row, label in enumerate(labels)]
    (folder / name).write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return str(folder / name)


def opened(folder, kind, labels, stated=None, **more):
    train, test = file_of(folder, labels), file_of(folder, labels, "test.tsv")
    build_tokenizer().save_pretrained(folder / "tokenizer")
    options = kind(train_file=train, test_file=test, select_file=test, tokenizer=str(folder / "tokenizer"), **more)
    data = (RatingsData if kind is Ratings else TextData)(options)
    data.build(None, stated)
    return data


def test_numbers_are_targets_as_they_are(tmp_path):
    data = opened(tmp_path, Ratings, ["0.5", "3", "-1e-1", "4.25"], metric="spearman")
    assert data.splits["train"]["labels"][:] == [0.5, 3.0, -0.1, 4.25]
    batch = next(iter(data.test_dataloader()))
    assert batch["labels"].dtype.is_floating_point
    assert isinstance(data.task, Regression)
    assert data.task.main_metric == "spearman"


@pytest.mark.parametrize("label", ["good", "nan", "inf", "1_0", "\u0663", "1,5"])
def test_what_is_no_number_is_named(tmp_path, label):
    with pytest.raises(GateError, match=r"the train split has the label .* \(example 3\); expected a number to predict"):
        opened(tmp_path, Ratings, ["1", "2", label, "3"])


@pytest.mark.parametrize(
    ("labels", "positive", "order"),
    [(["1", "0"], None, ["0", "1"]), (["yes", "no"], "no", ["yes", "no"]), (["same", "other"], "other", ["same", "other"])],
)
def test_the_positive_class_is_the_second(tmp_path, labels, positive, order):
    data = opened(tmp_path, Text, labels * 5, metric="binary_f1", positive=positive)
    assert data.labels == order
    assert data.task.labels == order
    assert data.splits["train"]["labels"][:2] == [order.index(label) for label in labels]


@pytest.mark.parametrize(
    ("labels", "more", "said"),
    [
        (["yes", "no"], {}, "positive is '1', but the classes are 'no' and 'yes'"),
        (["yes", "no"], {"positive": "oui"}, "positive is 'oui', but the classes are 'no' and 'yes'"),
        (["a", "b", "c"], {"positive": "a"}, "binary_f1 needs two classes, but there are 3"),
    ],
)
def test_a_positive_class_that_is_not_clear_is_refused(tmp_path, labels, more, said):
    with pytest.raises(GateError, match=said):
        opened(tmp_path, Text, labels * 5, metric="binary_f1", **more)


def test_the_order_of_a_model_that_states_its_classes_stays(tmp_path):
    assert opened(tmp_path, Text, ["yes", "no"] * 5, ["yes", "no"]).labels == ["yes", "no"]
    data = opened(tmp_path, Text, ["yes", "no"] * 5, ["yes", "no"], metric="binary_f1", positive="no")
    assert data.labels == ["yes", "no"]
    with pytest.raises(GateError, match=r"the model states the classes 'yes' and 'no' in this order.*--data.positive 'no'"):
        opened(tmp_path, Text, ["yes", "no"] * 5, ["yes", "no"], metric="binary_f1", positive="yes")
