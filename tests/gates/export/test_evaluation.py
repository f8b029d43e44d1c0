"""Results under the names of Hugging Face's library evaluate."""

import math

import pytest
import scipy.stats
import sklearn.metrics
import torch
from huggingface_hub import ModelCard, ModelCardData

from gates.export.evaluation import METRICS, evaluation_block
from training.tasks.causal_lm import CausalLM
from training.tasks.classification import Classification
from training.tasks.regression import Regression

DATA = {"task": "text-classification", "dataset": "nyu-mll/glue", "subset": "cola", "split": "validation"}
REFERENCES = {  # what the scripts of evaluate call, with its names
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": sklearn.metrics.f1_score,
    "matthews_correlation": sklearn.metrics.matthews_corrcoef,
    "pearsonr": lambda true, predicted: scipy.stats.pearsonr(true, predicted)[0],
    "spearmanr": lambda true, predicted: scipy.stats.spearmanr(true, predicted)[0],
}


@pytest.mark.parametrize(
    "task",
    [Classification(["no", "yes"], "binary_f1"), Classification(["a", "b", "c"]), Regression()],
    ids=["2", "3", "number"],
)
@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef`")
def test_evaluate_gives_the_same_number_by_the_name_and_with_the_arguments(task):
    generator = torch.Generator().manual_seed(0)
    classes = len(task.labels) if isinstance(task, Classification) else 0
    logits = torch.randn(200, classes or 1, generator=generator)
    labels = (
        torch.randint(classes, (200,), generator=generator) if classes else logits[:, 0] + torch.randn(200, generator=generator)
    )
    metrics = task.metrics("test")
    metrics.update(logits if classes else logits[:, 0], labels)
    predicted = logits.argmax(-1) if classes else logits[:, 0]
    found = {name: float(value) for name, value in metrics.compute().items()}
    assert len(found) >= 2
    for result in evaluation_block(found, **DATA):
        expected = REFERENCES[result.metric_type](labels.numpy(), predicted.numpy(), **(result.metric_args or {}))
        assert result.metric_value == pytest.approx(expected, abs=1e-5)
        assert found[result.metric_name] == result.metric_value


def test_the_block_goes_into_a_card_and_comes_out_of_it():
    results = evaluation_block({"f1": 0.5, "matthews": 0.25}, **DATA)
    data = ModelCardData(model_name="small", eval_results=results)
    read = ModelCard(f"---\n{data.to_yaml()}\n---\n").data.eval_results
    assert [(one.metric_name, one.metric_type, one.metric_args) for one in read] == [
        ("f1", "f1", {"average": "macro"}),
        ("matthews", "matthews_correlation", None),
    ]
    assert {one.dataset_config for one in read} == {"cola"}


def test_a_metric_that_evaluate_does_not_have_keeps_its_name():
    names = set(CausalLM().metrics("test")) - set(METRICS)
    assert names == {"perplexity", "word_perplexity", "byte_perplexity"}  # evaluate's loads a model of its own
    assert [one.metric_type for one in evaluation_block(dict.fromkeys(sorted(names), 2.0), **DATA)] == sorted(names)


def test_what_is_no_number_and_results_on_unknown_data_are_left_out():
    assert evaluation_block({"accuracy": math.nan, "bleu": "none"}, **DATA) == []
    assert evaluation_block({"accuracy": 0.5}, **(DATA | {"dataset": ""})) == []
