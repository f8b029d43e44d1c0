"""Shares of heads in the relevance of their layers, streamed over predictions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gates.hooks.metric import HeadMetric
from gates.sites import AttentionSite


class Shares(NamedTuple):
    """Mean shares of heads in the relevance of their layers.

    Args:
        absolute: of absolute values, ``[heads]``; those of a layer sum to one.
        signed: the same with the sign of each prediction's relevance, ``[heads]``.
    """

    absolute: Tensor
    signed: Tensor


class RelevanceShares(HeadMetric):
    """Streams rows of relevance into :class:`Shares`; exact for any batching and under DDP.

    Args:
        layer_index: index of the site of every head, ``[heads]``.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> shares = RelevanceShares(torch.tensor([0, 0]))
    >>> shares.update(torch.tensor([[1.0, -3.0], [2.0, 0.0]]))  # two predictions
    >>> shares.compute().absolute.tolist(), shares.compute().signed.tolist()
    ([0.625, 0.375], [0.625, -0.375])
    """

    absolute: Tensor
    signed: Tensor
    predictions: Tensor
    layer_index: Tensor

    def __init__(self, layer_index: Tensor, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("layer_index", layer_index, persistent=False)
        for name in ("absolute", "signed"):
            self.add_state(name, torch.zeros(len(layer_index), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("predictions", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, rows: Tensor) -> None:
        """Add relevances ``[predictions, heads]`` as :func:`head_steps` gives them."""
        shares = layer_shares(rows.double(), self.layer_index)
        self.absolute += shares.abs().sum(0)
        self.signed += shares.sum(0)
        self.predictions += len(rows)

    def compute(self) -> Shares:
        return Shares(self.absolute / self.predictions, self.signed / self.predictions)


def layer_shares(rows: Tensor, layer_index: Tensor) -> Tensor:
    """Relevances ``[predictions, heads]`` divided by their layer's sum of absolute values; a layer of zeros stays zero."""
    sums = rows.new_zeros(len(rows), int(layer_index.max()) + 1).index_add(1, layer_index, rows.abs())[:, layer_index]
    return torch.where(sums > 0, rows / sums.clamp(min=torch.finfo(rows.dtype).tiny), 0.0)


def head_layers(sites: tuple[AttentionSite, ...]) -> Tensor:
    """The index of each head's site, ``[heads]``."""
    return torch.arange(len(sites)).repeat_interleave(torch.tensor([site.heads for site in sites]))
