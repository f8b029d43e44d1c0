"""The results of a model card as the Hub reads them, under the names of Hugging Face's library ``evaluate``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from huggingface_hub import EvalResult


class EvaluateMetric(NamedTuple):
    """A metric of ``evaluate``.

    Args:
        name: that ``evaluate.load`` takes, and the Hub's evaluation block as a metric's type.
        arguments: of its ``compute``, with which it gives the same number.
    """

    name: str
    arguments: Mapping[str, Any] = {}


METRICS = {
    "accuracy": EvaluateMetric("accuracy"),
    "f1": EvaluateMetric("f1", {"average": "macro"}),
    "binary_f1": EvaluateMetric("f1"),
    "matthews": EvaluateMetric("matthews_correlation"),
    "pearson": EvaluateMetric("pearsonr"),
    "spearman": EvaluateMetric("spearmanr"),
    "token_accuracy": EvaluateMetric("accuracy"),
    "entity_f1": EvaluateMetric("seqeval"),
    "bleu": EvaluateMetric("sacrebleu"),
    "beam_bleu": EvaluateMetric("sacrebleu"),
    "chrf": EvaluateMetric("chrf"),
    "beam_chrf": EvaluateMetric("chrf"),
}
"""By this project's names."""


def evaluation_block(
    results: Mapping[str, float | int | str], *, task: str, dataset: str, subset: str = "", split: str = "test"
) -> list[EvalResult]:
    """The Hub's evaluation block; none for results on data that are not stated.

    Args:
        results: by this project's names of metrics; texts and numbers that are not finite are left out, and a metric that
            ``evaluate`` does not have keeps its name.
        task: the Hub's name of what the model does, such as ``text-classification``.
        dataset, subset, split: the data that they are results on; see :class:`gates.export.card.ModelCard`.

    >>> (result,) = evaluation_block({"matthews": 0.4}, task="text-classification", dataset="nyu-mll/glue", subset="cola")
    >>> result.metric_name, result.metric_type
    ('matthews', 'matthews_correlation')
    """
    numbers = {name: value for name, value in results.items() if isinstance(value, (int, float)) and math.isfinite(value)}
    known = {name: METRICS.get(name, EvaluateMetric(name)) for name in numbers}
    return [
        EvalResult(
            task_type=task,
            dataset_type=dataset,
            dataset_name=" ".join(filter(None, [dataset, subset])),
            dataset_config=subset or None,
            dataset_split=split,
            metric_name=name,
            metric_type=known[name].name,
            metric_args=dict(known[name].arguments) or None,
            metric_value=value,
        )
        for name, value in (numbers.items() if dataset else ())
    ]
