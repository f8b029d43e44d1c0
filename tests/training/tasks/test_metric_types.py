"""What tasks call their metrics for Hugging Face's library evaluate: what its scripts call gives the same numbers."""

import numpy as np
import pandas as pd
import pytest
import sacrebleu
import scipy.stats
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.stats.bootstrap import majority_class, metric_values, resample_metric
from training.stats.numbers import shown
from training.stats.verdict import nothing_learned
from training.tasks.causal_lm import CausalLM
from training.tasks.classification import Classification, Regression
from training.tasks.token_classification import TokenClassification
from training.tasks.translation import TextScore, Translation

REFERENCES = {  # with the names of evaluate
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": sklearn.metrics.f1_score,
    "matthews_correlation": sklearn.metrics.matthews_corrcoef,
    "pearsonr": lambda true, predicted: scipy.stats.pearsonr(true, predicted)[0],
    "spearmanr": lambda true, predicted: scipy.stats.spearmanr(true, predicted)[0],
    "sacrebleu": lambda true, predicted, **more: sacrebleu.corpus_bleu(predicted, [true], **more).score,
    "chrf": lambda true, predicted: sacrebleu.corpus_chrf(predicted, [true]).score,
}


def evaluated(task, name, true, predicted):
    stated = task.metric_types()[name]
    return REFERENCES[stated["type"]](true, predicted, **stated.get("args", {}))


@pytest.mark.parametrize(
    "task",
    [Classification(["no", "yes"], "binary_f1"), Classification(["a", "b", "c"]), Regression()],
    ids=["2", "3", "number"],
)
def test_numbers_and_classes(task):
    generator = torch.Generator().manual_seed(0)
    classes = len(task.labels) if isinstance(task, Classification) else 0
    logits = torch.randn(200, classes or 1, generator=generator)
    labels = (
        torch.randint(classes, (200,), generator=generator) if classes else logits[:, 0] + torch.randn(200, generator=generator)
    )
    metrics = task.metrics("test")
    metrics.update(logits if classes else logits[:, 0], labels)
    predicted = logits.argmax(-1) if classes else logits[:, 0]
    found = metrics.compute()
    assert len(found) >= 2
    for name, value in found.items():
        assert float(value) == pytest.approx(evaluated(task, name, labels.numpy(), predicted.numpy()), abs=1e-5)


def classified(classes, predicted, true, *, rows=3):
    """The metrics of a task over batches of so many rows, with binary F1 for two classes."""
    task = Classification([f"class {number}" for number in range(classes)], "binary_f1" if classes == 2 else "matthews")
    metrics = task.metrics("test")
    logits = torch.nn.functional.one_hot(torch.tensor(predicted), classes).float()
    for part, labels in zip(logits.split(rows), torch.tensor(true).split(rows), strict=True):
        metrics.update(part, labels)
    return task, {name: float(value) for name, value in metrics.compute().items()}


@st.composite
def answers(draw):
    """Predictions and targets of two to four classes, often of one class alone, so that cells of their table are empty."""
    classes, examples = draw(st.integers(2, 4)), draw(st.integers(1, 8))
    number = st.integers(0, classes - 1)
    rows = st.one_of(st.lists(number, min_size=examples, max_size=examples), number.map(lambda one: [one] * examples))
    return classes, draw(rows), draw(rows)


@settings(max_examples=30, deadline=None)
@given(answers())
@pytest.mark.filterwarnings("ignore:F-score is ill-defined", "ignore:A single label was found")
def test_metrics_of_classes_are_those_of_scikit_learn_and_of_the_statistics(given):
    classes, predicted, true = given
    task, found = classified(classes, predicted, true)
    _, replicates = resample_metric(np.array([predicted]), np.array(true), task.main_metric, resamples=5)
    for row, rows in enumerate(np.random.default_rng(0).integers(len(true), size=(5, len(true)))):
        expected = evaluated(task, task.main_metric, np.array(true)[rows], np.array(predicted)[rows])
        assert replicates[row, 0] == pytest.approx(expected, abs=1e-12)
    for name, value in found.items():
        assert value == pytest.approx(evaluated(task, name, true, predicted), abs=1e-12)
        assert value == pytest.approx(float(metric_values(predicted, true, name)), abs=1e-15)


@pytest.mark.parametrize("answer", [0, 1])
@pytest.mark.parametrize("positives", [0, 3, 1043])
def test_a_classifier_that_always_says_the_same_has_no_correlation_and_has_learned_nothing(answer, positives):
    """The sizes of CoLA's validation set, whose constant classifiers are what small models collapse to."""
    true = [1] * positives + [0] * (1043 - positives)
    _, found = classified(2, [answer] * 1043, true, rows=256)
    assert found["matthews"] == 0.0
    majority = majority_class(true)["matthews"]
    dense = shown("matthews", pd.Series([found["matthews"]]))
    assert "It has learned nothing" in nothing_learned(dense, shown("matthews", majority), " %")


def test_a_class_of_one_example_counts():
    true = np.zeros(300_000, dtype=np.int64)
    true[5] = 1
    predicted = true.copy()
    predicted[7] = 1
    expected = sklearn.metrics.matthews_corrcoef(true, predicted)
    assert expected == pytest.approx(0.5**0.5, abs=1e-5)
    assert float(metric_values(predicted, true, "matthews")) == pytest.approx(expected)
    assert classified(2, predicted, true, rows=100_000)[1]["matthews"] == pytest.approx(expected)


@pytest.mark.parametrize("tokenize", ["13a", "zh"])
def test_translations_with_the_tokenizer_of_the_task(tokenize):
    task = Translation.__new__(Translation)
    task.bleu_tokenize = tokenize
    predicted, true = ["我们今天去北京看朋友。", "他在家里读书"], ["我们明天去北京看朋友。", "她在家里读书"]
    for name in ("bleu", "chrf"):
        score = TextScore(name, tokenize)
        score.update(torch.arange(2), predicted, true)
        assert float(score.compute()) == pytest.approx(evaluated(task, name, true, predicted), abs=1e-4)


@pytest.mark.parametrize(
    ("tags", "scheme", "expected"),
    [
        (["O", "B-PER", "I-PER"], "BIO", "IOB2"),
        (["O", "B-PER", "E-PER", "S-PER"], "IOBES", "IOBES"),
        (["O", "B-PER", "L-PER", "U-PER"], "IOBES", "BILOU"),
    ],
)
def test_entities_are_those_of_seqevals_strict_mode_in_their_scheme(tags, scheme, expected):
    """What seqeval finds by default is more: an entity that begins with I counts there, and not here."""
    assert TokenClassification(tags, scheme).metric_types()["entity_f1"] == {
        "type": "seqeval",
        "args": {"mode": "strict", "scheme": expected},
    }
    assert "entity_f1" not in TokenClassification(["NOUN", "VERB"]).metric_types()


def test_perplexities_keep_their_names():
    """Since evaluate's loads a model of its own."""
    assert set(CausalLM().metrics("test")) - set(CausalLM().metric_types()) == {
        "perplexity",
        "word_perplexity",
        "byte_perplexity",
    }
