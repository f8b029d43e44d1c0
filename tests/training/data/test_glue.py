"""GLUE's tasks: columns, metrics and splits, from a folder that holds some of them."""

import json
from typing import get_args

import pytest

from gates.errors import GateError
from training.config.data import Glue, Ratings, Text
from training.config.glue import COLUMNS, GlueTask
from training.data.glue import glue_data
from training.data.synthetic import build_tokenizer
from training.tasks import Classification, Regression

SPLITS = {"mrpc": ("train", "validation"), "stsb": ("train", "validation"),
          "mnli": ("train", "validation_matched", "validation_mismatched")}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GLUE as far as the tests need it, in the form that ``datasets`` reads."""
    place = tmp_path_factory.mktemp("glue")
    build_tokenizer().save_pretrained(place / "tokenizer")
    configs = []
    for task, splits in SPLITS.items():
        files = []
        for number, split in enumerate(splits):
            rows = [row_of(task, row + number) for row in range(20)]
            (place / f"{task}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            files.append({"split": split, "path": f"{task}-{split}.jsonl"})
        configs.append({"config_name": task, "data_files": files})
    (place / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return place


def row_of(task, row):
    label = {"mrpc": ["not_equivalent", "equivalent"][row % 2], "stsb": row / 4, "mnli": ["a", "b", "c"][row % 3]}[task]
    return dict.fromkeys(COLUMNS[task], f"the fox {'sees ' * (row % 4)}the king") | {"label": label, "idx": row}


def opened(folder, **more):
    data = glue_data(Glue(dataset=str(folder), tokenizer=str(folder / "tokenizer"), **more))
    data.build(None)
    return data


def test_paraphrases_are_judged_by_f1_of_the_equivalent_ones(folder):
    data = opened(folder, subset="mrpc")
    assert data.task == Classification(["not_equivalent", "equivalent"], "binary_f1")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 18, "select": 2, "test": 20}


def test_similarity_is_a_number(folder):
    data = opened(folder, subset="stsb")
    assert data.task == Regression("pearson")
    assert data.splits["test"]["labels"][:3] == [0.25, 0.5, 0.75]


def test_texts_of_other_kinds_are_another_split(folder):
    matched, other = opened(folder, subset="mnli"), opened(folder, subset="mnli", mismatched=True)
    assert matched.task == other.task == Classification(["a", "b", "c"], "accuracy")
    assert matched.splits["train"]["labels"][:] == other.splits["train"]["labels"][:]
    assert matched.splits["test"]["labels"][:] != other.splits["test"]["labels"][:]


@pytest.mark.parametrize("task", get_args(GlueTask))
def test_every_task_is_sentences_of_its_columns(task):
    found = Glue(subset=task, batch_size=7, max_length=33).sentences
    assert type(found) is (Ratings if task == "stsb" else Text)
    assert tuple(name for name in (found.text_column, found.pair_column) if name) == COLUMNS[task]
    assert (found.batch_size, found.max_length, found.dataset, found.subset) == (7, 33, "nyu-mll/glue", task)


def test_another_metric_takes_the_place_of_the_known_one():
    assert Glue(subset="cola").sentences.metric == "matthews"
    found = Glue(subset="mrpc", metric="accuracy").sentences
    assert (found.metric, found.positive) == ("accuracy", None)
    assert Glue(subset="stsb", metric="spearman").sentences.metric == "spearman"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"subset": "sst"}, "subset is 'sst'; expected one of cola, sst2"),
        ({"subset": "rte", "mismatched": True}, "mismatched is of mnli alone"),
        ({"subset": "stsb", "metric": "accuracy"}, "metric is 'accuracy'; expected pearson or spearman for stsb"),
        ({"subset": "rte", "metric": "pearson"}, "metric is 'pearson'; expected accuracy"),
        ({"select_fraction": 0}, "select_fraction is 0"),
    ],
)
def test_what_does_not_fit_is_refused(more, said):
    with pytest.raises(GateError, match=said):
        Glue(**more)
