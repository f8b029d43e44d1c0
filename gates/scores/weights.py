"""Score a head by its output weights: the sum of ``|w * dL/dw|`` over its columns of the output projection.

This is the first-order (Taylor) criterion of Molchanov et al. 2017 and 2019 on weights. The gradient is averaged over the
scoring set *before* the product. The gate scales a head's columns. So without the absolute value their sum is exactly its
signed gradient, ``sum_w w * dL/dw = dL/dz`` at z = 1, and the score is at least ``|E dL/dz|``. HIS, ``E |dL/dz|``, takes the
absolute value per example and after the sum over weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from gates.attention.layouts import check_merged
from gates.attention.sites import AttentionSite, join_sites, weight_by_output
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.ablation import MeanHeadOutput
from gates.scores.metric import HeadMetric
from gates.surgery.slices import rows_of_parts


def output_weights(gates: HeadGates) -> list[Tensor]:
    """Return the weight of every site's output projection, as its class stores it."""
    check_merged(gates.model)
    return [site.output.weight for site in gates.sites]


def weight_taylor(gates: HeadGates, gradients: Sequence[Tensor], *, absolute: bool = True) -> Tensor:
    """Return the score of every gate, ``[gates]``, float64, from gradients of the loss with respect to :func:`output_weights`.
    Without the absolute value of ``w * dL/dw`` it is the signed gradient of the gate."""
    scores = []
    for site, size, gradient in zip(gates.sites, gates.sizes, gradients, strict=True):
        by_output = gradient.T if isinstance(site.output, Conv1D) else gradient
        products = weight_by_output(site.output).detach().double() * by_output.double()
        scores.append((products.abs() if absolute else products).sum(0).unflatten(0, (size, -1)).sum(-1))
    return join_sites(scores)


class MeanGradients(HeadMetric):
    """Average gradients of the loss over all examples, exactly under DDP."""

    examples: Tensor

    def __init__(self, tensors: Sequence[Tensor], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._names = [f"sum_{index}" for index in range(len(tensors))]
        for name, tensor in zip(self._names, tensors, strict=True):
            self.add_state(name, torch.zeros(tensor.shape), dist_reduce_fx="sum")
        self.add_state("examples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, gradients: Sequence[Tensor], examples: int) -> None:
        """Add the gradients of a batch's mean loss, and the number of its examples."""
        for name, gradient in zip(self._names, gradients, strict=True):
            getattr(self, name).add_(gradient, alpha=examples)
        self.examples += examples

    def compute(self) -> list[Tensor]:
        """Return the mean gradients, in the order and shapes of the tensors."""
        return [getattr(self, name) / self.examples for name in self._names]


# FLAP (An et al. 2024, arXiv 2312.11983) scores the fluctuation of a head's contribution from input to input. The mean
# contribution can be a constant in the bias of the output projection (mean replacement, :mod:`gates.scores.ablation`).
#
# Feature f of the concatenated heads scores ``Var(x_f) * |W_f|^2``: the sample variance over positions times the squared norm
# of its column of the output projection. To compare layers, the scores of a layer's features are standardised to mean 0 and
# standard deviation 1. A head's score is the mean over its features. This is the paper's metric WIFV with its structure AL,
# only for attention. The released code updates the variance by sequence, from the second one. Here it is that of all positions
# without padding.


class HeadOutputVariance(MeanHeadOutput):
    """Compute the sample variance of every feature of the heads over all queries that are not padding, exactly under DDP. Its
    input comes from :func:`gates.attention.intercept.observe_head_outputs`."""

    def __init__(self, sites: Sequence[AttentionSite], **kwargs: Any) -> None:
        super().__init__(sites, **kwargs)
        self._squares = self._add_sites("square", sites)

    def _add(self, site: int, rows: Tensor) -> None:
        super()._add(site, rows)
        getattr(self, self._squares[site]).add_(rows.square().sum(0).to(self.count.device))

    def compute(self) -> list[Tensor]:
        """Return for each site the variances ``[heads * head_dim]``, float64."""
        variances = []
        for mean, square, count in zip(super().compute(), self._squares, self.count, strict=True):
            spread = getattr(self, square) - count * mean.square()
            variances.append(spread.clamp(min=0) / (count - 1).clamp(min=1))
        return variances


def fluctuation(gates: HeadGates, variances: Sequence[Tensor]) -> Tensor:
    """Return the score of every gate, ``[gates]``, float64: the mean over its features, from the variances ``[heads *
    head_dim]`` of :class:`HeadOutputVariance` at every site."""
    check_merged(gates.model)
    scores = []
    for site, size, variance in zip(gates.sites, gates.sizes, variances, strict=True):
        features = variance * weight_by_output(site.output).detach().to(variance).square().sum(0)
        scores.append(_standardised(features).unflatten(0, (size, -1)).mean(-1))
    return join_sites(scores)


def _standardised(values: Tensor) -> Tensor:
    """Scale to mean 0 and sample standard deviation 1; zeros if all values are equal."""
    spread = values.std()
    return torch.where(spread > 0, (values - values.mean()) / spread, 0.0)


# Greedy-Gnorm (Guo and Sheridan 2026, arXiv 2602.04491) scores a head by ``|dL/dW_Q| * |dL/dW_K| * |dL/dW_V|``. These are the
# l2 norms of the gradients of its own blocks of the three projections. The head with the lowest score is removed, and all
# others are scored again (:func:`gates.scores.importance.removal_ranking`, one head in each step).
#
# The product and the loop follow the abstract. The objective L follows the released code (Sheridan-Stable/greedy-gnorm): the
# norm of the logits, which needs no labels. The code takes the norm of all logits of a batch, with dropout, and averages the
# norms of gradients over batches. Here L is the mean over examples of the norm of an example's logits, without dropout. The
# norms are those of its whole gradient, so the score does not depend on the batches or the number of processes.


def input_weights(gates: HeadGates) -> list[Tensor]:
    """Return the weights of every site's query, key and value projections, as their classes store them; each once."""
    check_merged(gates.model)
    without = next((site for site in gates.sites if site.gate_only), None)
    if without is not None:
        raise GateError(
            f"{type(without.core).__name__} has no separate query, key and value weights for each head "
            f"({without.gate_only}); rank its heads by another score, such as his"
        )
    return [site.projection(path).weight for site in gates.sites for path in _paths(site)]


def _paths(site: AttentionSite) -> list[str]:
    """Return the paths of the projections, each once, since a fused one has several parts."""
    return list(dict.fromkeys(path for path, _ in rows_of_parts(site).values()))


def gradient_norms(gates: HeadGates, gradients: Sequence[Tensor]) -> Tensor:
    """Return the score of every gate, ``[gates]``, float64, from the gradients of the objective with respect to
    :func:`input_weights`. Heads that share a key/value head share the norms of its blocks."""
    waiting, scores = iter(gradients), []
    for site, size in zip(gates.sites, gates.sizes, strict=True):
        squares: dict[str, Tensor] = {}
        for path in _paths(site):
            gradient = next(waiting).double()
            squares[path] = gradient.square().sum(0 if isinstance(site.projection(path), Conv1D) else 1)
        product = torch.ones(size, dtype=torch.float64)
        for path, rows in rows_of_parts(site).values():
            by_head = squares[path].cpu()[rows].sum(-1)
            sharing = max(1, size // len(by_head))  # gates that have one key/value head
            product *= by_head.repeat_interleave(sharing).unflatten(0, (size, -1)).sum(-1).sqrt()
        scores.append(product)
    return torch.cat(scores)
