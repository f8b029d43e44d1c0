"""The results of a model card as the Hub reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult

MetricTypes = Mapping[str, Mapping[str, Any]]
"""What metrics are to Hugging Face's library ``evaluate``: ``type``, which ``evaluate.load`` takes, and ``args`` of its
``compute``, with which it gives the same number."""


def evaluation_block(
    results: Mapping[str, float | int | str],
    types: MetricTypes,
    *,
    task: str,
    dataset: str,
    subset: str = "",
    split: str = "test",
    more_splits: Sequence[str] = (),
) -> list[EvalResult]:
    """The Hub's evaluation block; none for results on data that are not stated.

    Args:
        results: by name; texts and numbers that are not finite are left out.
        types: of metrics; one that is not among them keeps its name and has no arguments.
        task: the Hub's name of what the model does, such as ``text-classification``.
        dataset, subset, split, more_splits: the data that they are results on; see :class:`gates.export.card.ModelCard`.

    >>> types = {"matthews": {"type": "matthews_correlation"}}
    >>> (result,) = evaluation_block({"matthews": 0.4}, types, task="text-classification", dataset="glue", subset="cola")
    >>> result.metric_name, result.metric_type
    ('matthews', 'matthews_correlation')
    """

    def place(result: str) -> tuple[str, str]:
        """The split and the metric that a result is of."""
        own = next((more for more in more_splits if result.startswith(f"{more}_")), None)
        return (split, result) if own is None else (own, result.removeprefix(f"{own}_"))

    numbers = {name: value for name, value in results.items() if isinstance(value, (int, float)) and math.isfinite(value)}
    return [
        EvalResult(
            task_type=task,
            dataset_type=dataset,
            dataset_name=" ".join(filter(None, [dataset, subset])),
            dataset_config=subset or None,
            dataset_split=own_split,
            metric_name=name,
            metric_type=types.get(name, {}).get("type", name),
            metric_args=types.get(name, {}).get("args"),
            metric_value=value,
        )
        for (own_split, name), value in ((place(result), value) for result, value in numbers.items() if dataset)
    ]
