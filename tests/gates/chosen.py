"""Which rows of a long table run where: a few in ``make test``, one of each kind in ``.ci/run``, all of them nightly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tools.coverage import architectures as zoo

FAST = ("Bert", "GPT2", "Llama", "T5", "Longformer")
"""An encoder, a decoder with fused projections, one with grouped queries, an encoder-decoder, attention that is only gated."""
CHOSEN = (
    "Albert",  # one module for all layers
    "Falcon (new decoder)",  # fused in groups, grouped queries
    "Bart",
    "ViT",
    "Mixtral",
    "Splinter",  # eager attention without a mask that says nothing of causality
    "HYV4",  # looks at the name of its attention's implementation
    "Lilt",  # two streams of heads in one module
)


def chosen(rows: Iterable[Any], *, fast: Iterable[Any], integration: Iterable[Any] = ()) -> list[Any]:
    """Return the rows as parameters of a test; those that are neither fast nor for integration tests are nightly."""
    fast, integration = list(fast), list(integration)

    def marks(row: Any) -> list[Any]:
        return [] if row in fast else [pytest.mark.integration if row in integration else pytest.mark.nightly]

    return [pytest.param(*row if isinstance(row, tuple) else (row,), marks=marks(row)) for row in rows]


def architectures(
    fast: Iterable[str] = FAST,
    integration: Iterable[str] = CHOSEN,
    *,
    only: Callable[[zoo.Architecture], bool] = lambda row: True,
) -> list[Any]:
    """Return the names of the architectures as parameters of a test.

    Args:
        fast: The names that run in ``make test``.
        integration: The names that run in ``.ci/run`` as well.
        only: Whether an architecture takes part.
    """
    return chosen([row.name for row in zoo.ARCHITECTURES if only(row)], fast=fast, integration=integration)
