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
from gates.hooks.metric import HeadMetric
from gates.sites import AttentionSite, weight_by_output
from gates.surgery.adapters import check_merged


class HeadOutputVariance(HeadMetric):
    """The sample variance of every feature of the concatenated heads over all queries that are not padding; exact under DDP.

    Fed by :func:`gates.hooks.intercept.observe_head_outputs`.

    Args:
        sites: attention modules of the model that is observed.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    count: Tensor

    def __init__(self, sites: Sequence[AttentionSite], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._names = [(f"sum_{index}", f"square_{index}") for index in range(len(sites))]
        for names, site in zip(self._names, sites, strict=True):
            for name in names:
                self.add_state(name, torch.zeros(site.heads * site.head_dim, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(len(sites), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, site: int, heads: Tensor, valid: Tensor | None = None) -> None:
        """Add one forward pass of one site.

        Args:
            site: index of the site.
            heads: concatenated heads, ``[batch, query, heads * head_dim]``.
            valid: queries that are not padding, ``[batch, query]``.
        """
        keep = torch.ones(heads.shape[:2], dtype=torch.bool, device=heads.device) if valid is None else valid.bool()
        rows = heads.detach()[keep].double()
        for name, values in zip(self._names[site], (rows, rows.square()), strict=True):
            getattr(self, name).add_(values.sum(0))
        self.count[site] += len(rows)

    def compute(self) -> list[Tensor]:
        """For each site, the variances ``[heads * head_dim]``, float64."""
        variances = []
        for (total, square), count in zip(self._names, self.count, strict=True):
            mean = getattr(self, total) / count.clamp(min=1)
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
    return torch.cat(scores)


def _standardised(values: Tensor) -> Tensor:
    """To mean 0 and sample standard deviation 1; zeros where all are equal."""
    spread = values.std()
    return torch.where(spread > 0, (values - values.mean()) / spread, 0.0)
