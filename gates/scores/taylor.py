"""Importance of a head by its output weights: the sum of ``|w * dL/dw|`` over its columns of the output projection.

The first-order (Taylor) criterion of Molchanov et al. 2017 and 2019 on weights alone; the gradient is averaged over the
scoring set *before* the product. Without the absolute value the sum over a head's columns is exactly the signed gradient of
its gate, ``sum_w w * dL/dw = dL/dz`` at z = 1, because the gate scales those columns. So the score is at least ``|E dL/dz|``;
HIS, ``E |dL/dz|``, takes the absolute value per example and after the sum over weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from gates.head_gates import HeadGates
from gates.hooks.metric import HeadMetric
from gates.sites import join_sites, weight_by_output
from gates.surgery.adapters import check_merged


def output_weights(gates: HeadGates) -> list[Tensor]:
    """The weight of every site's output projection, as its class stores it.

    Raises:
        GateError: where an adapter adds to it.
    """
    check_merged(gates.model)
    return [site.output.weight for site in gates.sites]


def weight_taylor(gates: HeadGates, gradients: Sequence[Tensor], *, absolute: bool = True) -> Tensor:
    """The score of every gate, ``[gates]``, float64.

    Args:
        gates: gates of the model.
        gradients: gradients of the loss with respect to :func:`output_weights`, in their order and shapes.
        absolute: whether to take ``|w * dL/dw|``; without it the result is the signed gradient of the gate.
    """
    scores = []
    for site, size, gradient in zip(gates.sites, gates.sizes, gradients, strict=True):
        by_output = gradient.T if isinstance(site.output, Conv1D) else gradient
        products = weight_by_output(site.output).detach().double() * by_output.double()
        scores.append((products.abs() if absolute else products).sum(0).unflatten(0, (size, -1)).sum(-1))
    return join_sites(scores)


class MeanGradients(HeadMetric):
    """The gradient of the mean loss over all examples with respect to some tensors; exact under DDP.

    Args:
        tensors: tensors that the loss is differentiated with respect to; only their shapes are used.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    examples: Tensor

    def __init__(self, tensors: Sequence[Tensor], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._names = [f"sum_{index}" for index in range(len(tensors))]
        for name, tensor in zip(self._names, tensors, strict=True):
            self.add_state(name, torch.zeros(tensor.shape), dist_reduce_fx="sum")
        self.add_state("examples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, gradients: Sequence[Tensor], examples: int) -> None:
        """Add a batch: gradients of its mean loss, and how many examples it has."""
        for name, gradient in zip(self._names, gradients, strict=True):
            getattr(self, name).add_(gradient, alpha=examples)
        self.examples += examples

    def compute(self) -> list[Tensor]:
        """The mean gradients, in the order and shapes of the tensors."""
        return [getattr(self, name) / self.examples for name in self._names]
