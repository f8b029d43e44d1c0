"""GLUE's tasks: columns, metrics and splits, from a folder that holds some of them."""

import json
from typing import get_args

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from gates.errors import GateError
from training.config.data import COLUMNS, Glue, GlueTask
from training.data.synthetic import NOUNS, build_tokenizer
from training.data.text import glue_data

CLASSES = {
    "cola": ["unacceptable", "acceptable"], "sst2": ["negative", "positive"], "mrpc": ["not_equivalent", "equivalent"],
    "qqp": ["not_duplicate", "duplicate"], "mnli": ["entailment", "neutral", "contradiction"],
    "qnli": ["entailment", "not_entailment"], "rte": ["entailment", "not_entailment"],
    "wnli": ["not_entailment", "entailment"],
}  # fmt: skip
"""As the hub's data set names them, in its order; STS-B has numbers."""
KNOWN_BY = {"cola": "matthews", "mrpc": "binary_f1", "qqp": "binary_f1", "stsb": "pearson"}
"""Wang et al. (2019), table 1; the others by accuracy."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """All tasks in the form of the hub: parquet files whose labels are numbers with names, and hidden in the test splits."""
    place = tmp_path_factory.mktemp("hub")
    build_tokenizer().save_pretrained(place / "tokenizer")
    configs = []
    for task in get_args(GlueTask):
        label = ClassLabel(names=CLASSES[task]) if task in CLASSES else Value("float32")
        features = Features({**dict.fromkeys(COLUMNS[task], Value("string")), "label": label, "idx": Value("int32")})
        evaluated = ("validation_matched", "validation_mismatched") if task == "mnli" else ("validation",)
        hidden = ("test_matched", "test_mismatched") if task == "mnli" else ("test",)
        files = []
        for split, rows in {"train": 40, **dict.fromkeys(evaluated, 20), **dict.fromkeys(hidden, 10)}.items():
            labels = [-1 if split in hidden else row % len(CLASSES.get(task, range(6))) for row in range(rows)]
            seen = NOUNS[split.endswith("mismatched")]
            texts = [f"the fox {'sees ' * (row % 4)}the {seen}" for row in range(rows)]
            table = {**dict.fromkeys(COLUMNS[task], texts), "label": labels, "idx": list(range(rows))}
            Dataset.from_dict(table, features=features).to_parquet(place / f"{task}-{split}.parquet")
            files.append({"split": split, "path": f"{task}-{split}.parquet"})
        configs.append({"config_name": task, "data_files": files})
    (place / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return place


def opened(folder, **more):
    data = glue_data(Glue(dataset=str(folder), tokenizer=str(folder / "tokenizer"), **more))
    data.build(None)
    return data


@pytest.mark.parametrize(("task", "mismatched"), [*((task, False) for task in get_args(GlueTask)), ("mnli", True)])
def test_every_task_is_opened_as_the_hub_has_it(hub, task, mismatched):
    """Results are on the validation split, choices on a tenth of the training examples, the metric is the known one, and a
    class has the hub's number where it matters: the positive one is the second."""
    data = opened(hub, subset=task, **({"mismatched": True} if mismatched else {}))
    more = {"test_matched" if mismatched else "test_mismatched": 20} if task == "mnli" else {}
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 36, "select": 4, "test": 20, **more}
    assert data.more_tests == list(more)
    assert data.task.main_metric == KNOWN_BY.get(task, "accuracy")
    told = data.task.metrics("test")
    labels = data.splits["test"]["labels"][:]
    if task == "stsb":
        assert set(told) == {"pearson", "spearman"}
        assert labels == [float(row % 6) for row in range(20)]
        return
    assert {"accuracy", "f1", "matthews"} <= set(told)
    assert sorted(data.labels) == sorted(CLASSES[task])
    assert [data.labels[int(label)] for label in labels] == [CLASSES[task][row % len(CLASSES[task])] for row in range(20)]
    if task in ("mrpc", "qqp"):
        assert data.labels == CLASSES[task]
        assert "binary_f1" in told


def test_matched_and_mismatched_are_other_texts_with_the_same_choices(hub):
    matched, other = opened(hub, subset="mnli"), opened(hub, subset="mnli", mismatched=True)
    for name in ("train", "select"):
        assert matched.splits[name][:] == other.splits[name][:]
    assert matched.splits["test"]["input_ids"][:] != other.splits["test"]["input_ids"][:]
    assert matched.splits["test"][:] == other.splits["test_matched"][:]
    assert matched.splits["test_mismatched"][:] == other.splits["test"][:]
    assert matched.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"subset": "rte", "mismatched": True}, "mismatched is for mnli only"),
        ({"subset": "stsb", "metric": "accuracy"}, "metric is 'accuracy'; expected pearson or spearman for stsb"),
        ({"subset": "rte", "metric": "pearson"}, "metric is 'pearson'; expected accuracy"),
        ({"select_fraction": 0}, "select_fraction is 0"),
    ],
)
def test_what_does_not_fit_is_refused(more, said):
    with pytest.raises(GateError, match=said):
        Glue(**more)
