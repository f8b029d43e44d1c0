"""Outputs of a model, and whether two runs of it gave the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Largest difference of outputs that should be equal, relative to the largest output; some parts compute in float32 always."""


@torch.no_grad()
def outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The floating-point tensors that a model returns, with the same random numbers each time."""
    torch.manual_seed(0)
    return list(tensors(model(**inputs)))


def tensors(output: Any) -> Iterator[Tensor]:
    """Floating-point tensors among outputs, without caches and attention matrices."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if not str(name).endswith(("attentions", "past_key_values", "cache")):
                yield from tensors(value)
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from tensors(part)


def check_equal(
    found: list[Tensor], expected: list[Tensor], dtype: torch.dtype, what: str, *, tolerance: float | None = None
) -> None:
    limit = TOLERANCE[dtype] if tolerance is None else max(tolerance, TOLERANCE[dtype])
    if [part.shape for part in found] != [part.shape for part in expected]:
        raise AssertionError(f"{what} changes the shapes of outputs")
    for one, other in zip(found, expected, strict=True):
        both = one.isfinite() & other.isfinite()
        if not torch.equal(one.isfinite(), other.isfinite()):
            raise AssertionError(f"{what} changes which outputs are finite")
        size = float(other[both].abs().max().clamp(min=1.0)) if bool(both.any()) else 1.0
        difference = float((one[both] - other[both]).abs().max()) / size if bool(both.any()) else 0.0
        if not difference <= limit:
            raise AssertionError(f"{what} differs by {difference:.2g}")
