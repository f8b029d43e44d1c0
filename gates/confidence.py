"""Attention confidence per head: how much a query attends to the key it attends to most (Voita et al. 2019, section 4.1).

The mean of the largest attention weight over all queries that are not padding. Voita et al. leave out attention to the
end-of-sentence symbol; here nothing is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from gates.entropy import BLOCK, head_slices
from gates.sites import AttentionSite


@torch.no_grad()
def attention_confidence(
    query: Tensor,
    key: Tensor,
    scale: float,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """The largest attention weight of each query, ``[batch, heads, query]``, float32, in ``O(BLOCK * keys)`` memory.

    Args:
        query: ``[batch, heads, query, head_dim]``.
        key: ``[batch, heads, key, head_dim]`` (grouped keys already repeated).
        scale: factor of the scores.
        bias: what is added to the scores, broadcastable to ``[batch, heads, query, key]``.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the bias (Gemma 2).
        sink: score of a further outcome at which nothing is read, ``[heads]`` (GPT-OSS); its own weight is no confidence.
    """
    largest = []
    with torch.autocast(query.device.type, enabled=False):
        transposed = key.float().transpose(-1, -2)
        for start in range(0, query.shape[2], BLOCK):
            scores = query[:, :, start : start + BLOCK].float() @ transposed * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if bias is not None:
                scores = scores + (bias if bias.shape[2] == 1 else bias[:, :, start : start + BLOCK]).float()
            log_sum_exp = scores.logsumexp(-1)
            if sink is not None:
                log_sum_exp = torch.logaddexp(log_sum_exp, sink.float().view(1, -1, 1))
            largest.append((scores.amax(-1) - log_sum_exp).exp())
    return torch.cat(largest, dim=2)


def _confidence_update(confidence: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum over queries ``[heads]`` and their number; padded queries (``valid`` False, ``[batch, query]``) do not count."""
    batch, _, queries = confidence.shape
    counted = torch.ones(batch, queries, dtype=torch.bool, device=confidence.device) if valid is None else valid.bool()
    return torch.where(counted.unsqueeze(1), confidence, 0.0).double().sum((0, 2)), counted.sum()


class AttentionConfidence(Metric):
    """Mean largest attention weight of every head, over all queries that are not padding; exact under DDP.

    Args:
        sites: of the model that is observed.
        kwargs: passed to :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, sites: tuple[AttentionSite, ...], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._slices = head_slices(sites)
        self.add_state("total", torch.zeros(sum(site.heads for site in sites), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(len(sites), dtype=torch.long), dist_reduce_fx="sum")

    def from_scores(self, query: Tensor, key: Tensor, scale: float, bias: Tensor | None, **more: Any) -> Tensor:
        """:func:`attention_confidence`, for :func:`gates.observe.observe_attention`."""
        return attention_confidence(query, key, scale, bias, **more)

    def from_matrix(self, weights: Tensor) -> Tensor:
        """The largest of weights ``[batch, heads, query, key]``, ``[batch, heads, query]``."""
        return weights.amax(-1)

    def update(self, site: int, confidence: Tensor, visible: Tensor, valid: Tensor | None = None) -> None:
        """Add one forward pass of one site.

        Args:
            site: index of the site.
            confidence: ``[batch, heads, query]``.
            visible: keys each query sees; of no account here.
            valid: queries that are not padding, ``[batch, query]``.
        """
        total, count = _confidence_update(confidence, valid)
        self.total[self._slices[site]] += total
        self.count[site] += count

    def compute(self) -> Tensor:
        """Mean confidence, ``[heads]``, in [0, 1]."""
        sizes = [piece.stop - piece.start for piece in self._slices]
        return self.total / self.count.clamp(min=1).repeat_interleave(torch.tensor(sizes, device=self.count.device))
