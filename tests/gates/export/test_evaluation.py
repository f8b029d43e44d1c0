"""Results in the Hub's evaluation block."""

import math

import huggingface_hub

from gates.export.card import ModelCard, evaluation_block

DATA = {"dataset": "nyu-mll/glue", "subset": "cola", "split": "validation"}
TYPES = {"f1": {"type": "f1", "args": {"average": "macro"}}, "matthews": {"type": "matthews_correlation"}}


def block(numbers, types, **data):
    return evaluation_block(ModelCard(metrics=numbers, metric_types=types, **data), "text-classification")


def test_the_block_goes_into_a_card_and_comes_out_of_it():
    results = block({"f1": 0.5, "matthews": 0.25}, TYPES, **DATA)
    data = huggingface_hub.ModelCardData(model_name="small", eval_results=results)
    read = huggingface_hub.ModelCard(f"---\n{data.to_yaml()}\n---\n").data.eval_results
    assert [(one.metric_name, one.metric_type, one.metric_args) for one in read] == [
        ("f1", "f1", {"average": "macro"}),
        ("matthews", "matthews_correlation", None),
    ]
    assert {one.dataset_config for one in read} == {"cola"}


def test_what_is_no_number_and_results_on_unknown_data_are_left_out():
    assert block({"accuracy": math.nan, "bleu": "none"}, {}, **DATA) == []
    assert block({"accuracy": 0.5}, {}, **(DATA | {"dataset": ""})) == []


def test_results_on_further_splits_are_metrics_of_their_own_split():
    numbers = {"word_perplexity": 9.0, "news_f1": 0.25, "news_word_perplexity": 8.0, "loss": 1.0}
    results = block(numbers, TYPES, **DATA, more_splits=["news"])
    assert [(one.dataset_split, one.metric_name, one.metric_type, one.metric_value) for one in results] == [
        ("validation", "word_perplexity", "word_perplexity", 9.0),
        ("news", "f1", "f1", 0.25),
        ("news", "word_perplexity", "word_perplexity", 8.0),
        ("validation", "loss", "loss", 1.0),
    ]
