"""Results in the Hub's evaluation block."""

import math

from huggingface_hub import ModelCard, ModelCardData

from gates.export.card import evaluation_block

DATA = {"task": "text-classification", "dataset": "nyu-mll/glue", "subset": "cola", "split": "validation"}
TYPES = {"f1": {"type": "f1", "args": {"average": "macro"}}, "matthews": {"type": "matthews_correlation"}}


def test_the_block_goes_into_a_card_and_comes_out_of_it():
    results = evaluation_block({"f1": 0.5, "matthews": 0.25}, TYPES, **DATA)
    data = ModelCardData(model_name="small", eval_results=results)
    read = ModelCard(f"---\n{data.to_yaml()}\n---\n").data.eval_results
    assert [(one.metric_name, one.metric_type, one.metric_args) for one in read] == [
        ("f1", "f1", {"average": "macro"}),
        ("matthews", "matthews_correlation", None),
    ]
    assert {one.dataset_config for one in read} == {"cola"}


def test_what_is_no_number_and_results_on_unknown_data_are_left_out():
    assert evaluation_block({"accuracy": math.nan, "bleu": "none"}, {}, **DATA) == []
    assert evaluation_block({"accuracy": 0.5}, {}, **(DATA | {"dataset": ""})) == []


def test_results_on_further_splits_are_metrics_of_their_own_split():
    numbers = {"word_perplexity": 9.0, "news_f1": 0.25, "news_word_perplexity": 8.0, "loss": 1.0}
    results = evaluation_block(numbers, TYPES, **DATA, more_splits=["news"])
    assert [(one.dataset_split, one.metric_name, one.metric_type, one.metric_value) for one in results] == [
        ("validation", "word_perplexity", "word_perplexity", 9.0),
        ("news", "f1", "f1", 0.25),
        ("news", "word_perplexity", "word_perplexity", 8.0),
        ("validation", "loss", "loss", 1.0),
    ]
