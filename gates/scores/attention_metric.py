"""What measures of attention distributions have in common: a mean over queries for every head."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from gates.hooks.metric import HeadMetric
from gates.hooks.valid import check_valid
from gates.sites import AttentionSite


def _mean_update(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Sum ``[heads]`` of ``[batch, heads, query]`` over queries that count (``[batch, 1, query]``), and their number."""
    return torch.where(counted, values, 0.0).double().sum((0, 2)), counted.sum()


def _mean_compute(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1)


class AttentionMetric(HeadMetric):
    """Mean of a measure of attention distributions for every head, over all queries that count; exact under DDP.

    Padded queries do not count, nor do those that see fewer than ``least_keys`` keys.

    Args:
        sites: attention modules of the model that is observed.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    least_keys = 0
    total: Tensor
    count: Tensor

    def __init__(self, sites: tuple[AttentionSite, ...], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sizes = [site.heads for site in sites]
        self.add_state("total", torch.zeros(sum(self._sizes), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(len(sites), dtype=torch.long), dist_reduce_fx="sum")

    @abstractmethod
    def from_scores(
        self,
        query: Tensor,
        key: Tensor,
        scale: float,
        mask: Tensor | None,
        *,
        causal: bool = False,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """The measure of every query, ``[batch, heads, query]``; arguments: :func:`gates.scores.entropy.attention_entropy`."""

    @abstractmethod
    def from_matrix(self, weights: Tensor) -> Tensor:
        """The same from attention weights ``[batch, heads, query, key]``."""

    def normalised(self, values: Tensor, visible: Tensor) -> Tensor:
        """The measure as it is averaged; by default as it is."""
        return values

    def update(self, site: int, values: Tensor, visible: Tensor, valid: Tensor | None = None) -> None:
        """Add one forward pass of one site.

        Args:
            site: index of the site.
            values: measure of every query, ``[batch, heads, query]``.
            visible: keys each query sees, broadcastable to ``[batch, 1, query]``.
            valid: queries that are not padding, ``[batch, query]``; None if all count.

        Raises:
            GateError: for a mask of another shape.
        """
        counted = visible.expand(values.shape[0], 1, values.shape[2]) >= self.least_keys
        if valid is not None:
            check_valid(valid, counted[:, 0].shape)
            counted = counted & valid.bool().unsqueeze(1).to(counted.device)
        total, count = _mean_update(self.normalised(values, visible), counted)
        self.total.split(self._sizes)[site].add_(total.to(self.total.device))  # sites may be on several devices
        self.count[site] += count.to(self.count.device)

    def compute(self) -> Tensor:
        """Mean of the measure, ``[heads]``."""
        sizes = torch.tensor(self._sizes, device=self.count.device)
        return _mean_compute(self.total, self.count.repeat_interleave(sizes, output_size=self.total.numel()))
