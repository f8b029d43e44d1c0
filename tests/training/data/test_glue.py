"""GLUE's tasks: columns, metrics and splits, from a folder that holds some of them."""

import json
from typing import get_args

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from scipy import stats

from gates.errors import GateError
from training.config.data import COLUMNS, Glue, GlueTask, Ratings, Text
from training.data.synthetic import NOUNS, build_tokenizer
from training.data.text import glue_data
from training.tasks import Classification, Regression

CLASSES = {
    "cola": ["unacceptable", "acceptable"], "sst2": ["negative", "positive"], "mrpc": ["not_equivalent", "equivalent"],
    "qqp": ["not_duplicate", "duplicate"], "mnli": ["entailment", "neutral", "contradiction"],
    "qnli": ["entailment", "not_entailment"], "rte": ["entailment", "not_entailment"],
    "wnli": ["not_entailment", "entailment"],
}  # fmt: skip
"""As the hub's data set names them, in its order; STS-B has numbers."""
KNOWN_BY = {"cola": "matthews", "mrpc": "binary_f1", "qqp": "binary_f1", "stsb": "pearson"}
"""Wang et al. (2019), table 1; the others by accuracy."""
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


@pytest.mark.filterwarnings("ignore:.*will save all targets and predictions")
@pytest.mark.parametrize("mismatched", [False, True])
@pytest.mark.parametrize("task", get_args(GlueTask))
def test_every_task_is_opened_as_the_hub_has_it(hub, task, mismatched):
    """Results are on the validation split, choices on a tenth of the training examples, the metric is the known one, and a
    class has the hub's number where it matters: the positive one is the second."""
    if mismatched and task != "mnli":
        pytest.skip("of mnli alone")
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


@pytest.mark.filterwarnings("ignore:.*will save all targets and predictions")
def test_f1_and_correlations_are_those_of_other_implementations(hub):
    """Of the equivalent and the duplicate ones (F1), of the acceptable ones (Matthews), of numbers and of their ranks."""
    random = np.random.default_rng(0)
    truth, said = random.integers(0, 2, 60), random.integers(0, 2, 60)
    right, found, are = ((truth & said).sum(), said.sum(), truth.sum())
    logits = torch.nn.functional.one_hot(torch.tensor(said), 2).float()
    for task in ("mrpc", "qqp", "cola"):
        metrics = opened(hub, subset=task).task.metrics("test")
        metrics.update(logits, torch.tensor(truth))
        if task == "cola":
            assert float(metrics.compute()["matthews"]) == pytest.approx(np.corrcoef(truth, said)[0, 1], abs=1e-6)
        else:
            assert float(metrics.compute()["binary_f1"]) == pytest.approx(2 * right / (found + are))
    metrics = opened(hub, subset="stsb").task.metrics("test")
    truth, said = random.uniform(0, 5, 60), random.uniform(0, 5, 60)
    metrics.update(torch.tensor(said), torch.tensor(truth))
    found = {name: float(value) for name, value in metrics.compute().items()}
    assert found["pearson"] == pytest.approx(stats.pearsonr(said, truth).statistic, abs=1e-6)
    assert found["spearman"] == pytest.approx(stats.spearmanr(said, truth).statistic, abs=1e-6)


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
