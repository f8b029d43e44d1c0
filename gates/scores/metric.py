"""Provide the base class of the library's Metrics."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchmetrics import Metric


class _Whole:
    """Wrap a result in an object that torchmetrics does not inspect."""

    def __init__(self, result: Any) -> None:
        self.result = result


class HeadMetric(Metric):
    """Keep the shape of a Metric's result. torchmetrics turns tensors with one number, such as the scores of a model with one
    head, into scalars."""

    full_state_update = False

    def add_sums(self, **shapes: Sequence[int]) -> None:
        """Add states of these shapes: float64 zeros, to accumulate sums over batches and processes."""
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(tuple(shape), dtype=torch.float64), dist_reduce_fx="sum")

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # The result may be the state itself, which later updates change.
        wrapped = super()._wrap_compute(lambda: _Whole(copy.deepcopy(compute())))

        @functools.wraps(compute)
        def whole() -> Any:
            return wrapped().result

        return whole
