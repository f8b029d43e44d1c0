"""Search, rearrange and rescale a mask of heads (the pruning framework of Kwon et al. 2022, arXiv 2204.09656).

With z = 1 at a minimum of the loss, closing the gates c changes it by ``1/2 c^T F c`` with the Fisher information
``F = E_x (dL/dz)(dL/dz)^T``. There are three steps:

1. *search* uses F's diagonal. Without a limit on FLOPs the best mask keeps the highest ``E (dL/dz)^2``.
2. *rearrangement* chooses among the gates of a layer by its whole block of F, and keeps their number.
3. *rescaling* gives the kept gates real values, by least squares between a layer's output and the dense model's.

Their released code computes a gradient per mini-batch. Here each example has its own, as in the paper.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from gates.errors import GateError
from gates.scores.importance import check_rows
from gates.scores.metric import HeadMetric

ALL_SUBSETS = 20_000
"""The number of candidate masks up to which all are tried: any layer of up to 16 gates."""


class FisherInformation(HeadMetric):
    """Stream rows of gate gradients into the matrix ``E g g^T``, exactly for any batching and under DDP.

    ``kwargs`` are the arguments of :class:`torchmetrics.Metric`.

    >>> fisher = FisherInformation(gates=2)
    >>> fisher.update(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))  # gradients of two examples
    >>> fisher.compute().tolist()
    [[5.0, 1.0], [1.0, 2.0]]
    """

    products: Tensor
    samples: Tensor

    def __init__(self, gates: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums(products=[gates, gates])
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, gradients: Tensor) -> None:
        """Add rows ``[samples, gates]``, such as those per example of :func:`gates.scores.importance.head_gradients`."""
        check_rows(gradients, len(self.products))
        gradients = gradients.double()
        self.products += gradients.T @ gradients
        self.samples += gradients.shape[0]

    def compute(self) -> Tensor:
        """Return the matrix ``[gates, gates]``, whose diagonal is the score of the mask search."""
        return self.products / self.samples


def removal_cost(mask: Tensor, fisher: Tensor, layer_index: Tensor) -> Tensor:
    """Return the increase of the loss by closed gates, to second order and layer by layer: the sum of ``1/2 c^T F_layer c``.

    c is the complement of the mask ``[..., gates]``. Blocks of F between layers are ignored, as in the paper.
    """
    same = layer_index.unsqueeze(0) == layer_index.unsqueeze(1)
    closed = 1 - mask.to(fisher)
    return torch.einsum("...i,ij,...j->...", closed, torch.where(same, fisher, 0.0), closed) / 2


def rearrange(mask: Tensor, fisher: Tensor, layer_index: Tensor) -> Tensor:
    """Return a mask with the same number of gates in each layer and a lower :func:`removal_cost` (their rearrangement).

    The paper exchanges gates greedily. Here a layer with few masks tries all, which is exact. A larger one repeats the best
    exchange until none helps. The cost never rises, and an optimal layer does not change.

    Args:
        mask: The mask of 0 and 1 from the search, ``[gates]``.
        fisher: The Fisher information of the gates, ``[gates, gates]``.
    """
    result = mask.clone()
    for layer in layer_index.unique():
        members = (layer_index == layer).nonzero().flatten()
        block, closed = fisher[members][:, members].double(), (mask[members] == 0)
        if 0 < int(closed.sum()) < len(members):
            result[members] = (~_cheapest(closed, block)).to(mask.dtype)
    return result


def _cheapest(closed: Tensor, block: Tensor) -> Tensor:
    """Return the gates to close, bool ``[members]``: as many as in ``closed``, at the lowest ``c^T F c``."""
    size, count = len(closed), int(closed.sum())
    if math.comb(size, count) > ALL_SUBSETS:
        return _exchange(closed, block)
    subsets = torch.tensor(list(combinations(range(size), count)), device=block.device)
    candidates = torch.zeros(len(subsets), size, dtype=block.dtype, device=block.device).scatter_(1, subsets, 1.0)
    candidates = torch.cat([closed.to(block).unsqueeze(0), candidates])  # first, so that it wins ties
    return candidates[((candidates @ block) * candidates).sum(1).argmin()] > 0


def _exchange(closed: Tensor, block: Tensor) -> Tensor:
    """Make the best exchange of a closed gate for a kept one until none lowers the cost."""
    while True:
        to_closed = block @ closed.to(block)
        out, into = closed.nonzero().flatten(), (~closed).nonzero().flatten()
        # (c + e_j - e_i)^T F (c + e_j - e_i) - c^T F c for i in out and j in into
        opens = block.diagonal()[out] - 2 * to_closed[out]
        closes = block.diagonal()[into] + 2 * to_closed[into]
        change = opens.unsqueeze(1) + closes.unsqueeze(0) - 2 * block[out][:, into]
        best = int(change.argmin())
        if float(change.flatten()[best]) >= -1e-12 * float(block.diagonal().sum()):
            return closed
        closed = closed.clone()
        closed[out[best // len(into)]], closed[into[best % len(into)]] = False, True


def gram_and_cross(second: Tensor, cross: Tensor, weight: Tensor, gates: int) -> tuple[Tensor, Tensor]:
    """Return inner products of the heads' contributions to a site's output, from moments of its input.

    Head h adds ``W_h x_h`` at a position. So ``sum <W_h x_h, W_k x_k>`` is the sum over the elementwise product of
    ``W_h^T W_k`` and ``sum x_h x_k^T``, and no output is stored.

    Args:
        second: The sum ``x x^T`` over positions, ``[features, features]``, of the concatenated heads before their gates.
        cross: The sum ``x d^T``, with d the same position in the dense model.
        weight: The weight of the output projection, ``[out, features]``.
        gates: The number of gates of the site, each with ``features / gates`` adjacent features.

    Returns:
        The Gram matrix ``[gates, gates]`` and the inner products with the dense model's output without bias, ``[gates]``.
    """
    products = weight.double().T @ weight.double()
    gram = (products * second).unflatten(1, (gates, -1)).sum(-1).unflatten(0, (gates, -1)).sum(1)
    return gram, (products * cross).sum(1).unflatten(0, (gates, -1)).sum(-1)


def rescale(mask: Tensor, gram: Tensor, cross: Tensor, *, damping: float = 1e-6) -> Tensor:
    """Return values of a site's kept gates by least squares between its output and the dense model's (their mask tuning).

    They minimise ``|sum_h s_h a_h - y|^2 + damping * mean(diagonal of the Gram matrix) * |s - 1|^2``. The damping pulls to 1,
    as theirs does, so heads without effect stay at 1. The squared error is never above that of s = 1.

    Args:
        mask: The mask of 0 and 1 of the site, ``[gates]``.
        gram, cross: The results of :func:`gram_and_cross`. Must be finite.
        damping: The ridge, relative to the mean squared contribution of a kept gate.

    Returns:
        The gate values ``[gates]``, float64, 0 where closed. If one is beyond [-10, 10], the fit is unreliable, and the mask
        is returned unchanged.
    """
    if not (bool(gram.isfinite().all()) and bool(cross.isfinite().all())):
        raise GateError(
            "the contributions of heads to a site's output are not finite, so gates cannot be rescaled; look for infinite "
            "weights or inputs, or a learning rate that was too high"
        )
    kept = (mask > 0).nonzero().flatten()
    values = mask.to(gram.device, torch.float64, copy=True)
    if len(kept) == 0:
        return values
    matrix = gram[kept][:, kept].double()
    ridge = damping * matrix.diagonal().mean() + torch.finfo(torch.float64).tiny
    damped = matrix + ridge * torch.eye(len(kept), dtype=matrix.dtype, device=matrix.device)
    change = torch.linalg.lstsq(damped, (cross[kept].double() - matrix.sum(1)).unsqueeze(1)).solution.squeeze(1)
    scales = 1 + change
    if bool(torch.isfinite(scales).all()) and float(scales.abs().max()) <= 10:  # as in Kwon et al.
        values[kept] = scales
    return values
