"""The Metric that the library's own derive from."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torchmetrics import Metric


class _Whole:
    """A result, in something that torchmetrics does not look into as it does into a dataclass."""

    def __init__(self, result: Any) -> None:
        self.result = result


class HeadMetric(Metric):
    """A Metric whose result keeps its shape: torchmetrics makes a scalar of every tensor with a single number, so also of the
    scores ``[1]`` of a model with one head."""

    full_state_update = False

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # The copy is of the state, which may be the result itself and goes on changing.
        wrapped = super()._wrap_compute(lambda: _Whole(copy.deepcopy(compute())))

        @functools.wraps(compute)
        def whole() -> Any:
            return wrapped().result

        return whole
