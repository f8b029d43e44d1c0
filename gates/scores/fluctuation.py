"""FLAP's score of a head (An et al. 2024, arXiv 2312.11983): how much of what it adds to a layer changes from input to input.

What a head puts out on average can be had without it, as a constant in the bias of the output projection; what is lost is its
fluctuation. Feature f of the concatenated heads scores ``Var(x_f) * |W_f|^2``, with the sample variance over positions and the
squared norm of its column of the output projection. The scores of a layer's features are standardised, to mean 0 and standard
deviation 1, so that layers can be compared, and a head's score is the mean over its features. This is the paper's metric WIFV
with its structure AL, for attention alone. The constant itself is mean replacement (:mod:`gates.hooks.replacement`).

The released code updates the variance sequence by sequence and starts with the second one. Here it is that of all positions
that are not padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gates.head_gates import HeadGates
from gates.hooks.replacement import MeanHeadOutput
from gates.sites import AttentionSite, join_sites, weight_by_output
from gates.surgery.adapters import check_merged


class HeadOutputVariance(MeanHeadOutput):
    """The sample variance of every feature of the concatenated heads over all queries that are not padding; exact under DDP.

    Fed by :func:`gates.hooks.intercept.observe_head_outputs`.

    Args:
        sites: attention modules of the model that is observed.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(self, sites: Sequence[AttentionSite], **kwargs: Any) -> None:
        super().__init__(sites, **kwargs)
        self._squares = [f"square_{index}" for index in range(len(sites))]
        self._add_sums(self._squares, sites)

    def _add(self, site: int, rows: Tensor) -> None:
        super()._add(site, rows)
        getattr(self, self._squares[site]).add_(rows.square().sum(0).to(self.count.device))

    def compute(self) -> list[Tensor]:
        """For each site, the variances ``[heads * head_dim]``, float64."""
        variances = []
        for mean, square, count in zip(super().compute(), self._squares, self.count, strict=True):
            spread = getattr(self, square) - count * mean.square()
            variances.append(spread.clamp(min=0) / (count - 1).clamp(min=1))
        return variances


def fluctuation(gates: HeadGates, variances: Sequence[Tensor]) -> Tensor:
    """The score of every gate, ``[gates]``, float64: the mean over its features.

    Args:
        gates: gates of the model.
        variances: of the features of every site, ``[heads * head_dim]``, from :class:`HeadOutputVariance`.

    Raises:
        GateError: where an adapter adds to an output projection.
    """
    check_merged(gates.model)
    scores = []
    for site, size, variance in zip(gates.sites, gates.sizes, variances, strict=True):
        features = variance * weight_by_output(site.output).detach().to(variance).square().sum(0)
        scores.append(_standardised(features).unflatten(0, (size, -1)).mean(-1))
    return join_sites(scores)


def _standardised(values: Tensor) -> Tensor:
    """To mean 0 and sample standard deviation 1; zeros where all are equal."""
    spread = values.std()
    return torch.where(spread > 0, (values - values.mean()) / spread, 0.0)
