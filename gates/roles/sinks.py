"""Attention that says little: on separators, on the first token, or on all tokens alike (Clark et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gates.roles.shares import Counts, SentenceShares
from gates.roles.view import View
from gates.sites import AttentionSite

CONFIDENCE = 3


@torch.no_grad()
def sink_counts(weights: Tensor, view: View) -> Counts:
    """Attention on separators (special tokens but the first token) and on the first token, normalised entropy, and confidence
    (the largest weight, special tokens left out; Voita et al. 2019), summed over queries; the baseline is uniform attention,
    and the last two have none.

    A query counts for separators and first tokens where it sees one, and in all columns where it sees two keys.

    Args:
        weights: of attention, ``[batch, heads, query, key]``.
        view: of the batch.
    """
    visible, keys = view.visible, view.keys
    first = keys & (keys.cumsum(-1) == 1)
    separators = keys & ~view.text & ~first
    size = visible.sum(-1)
    counted = view.queries & (size > 1)
    hits, chances, uniform = [], [], []
    for among in (separators, first):
        seen = (visible & among.unsqueeze(1)).sum(-1)
        asks = counted & (seen > 0)
        on = torch.einsum("bhqk,bk,bq->bh", weights.double(), among.double(), asks.double())
        hits.append(on)
        chances.append(asks.sum(-1))
        uniform.append((seen / size.clamp(min=1) * asks).sum(-1))
    p = weights.double().clamp(min=0)
    entropy = -torch.xlogy(p, p).sum(-1) / size.clamp(min=2).log().unsqueeze(1)
    hits.append((entropy * counted.unsqueeze(1)).sum(-1))
    largest = (p * (visible & view.text.unsqueeze(1)).unsqueeze(1)).amax(-1)
    hits.append((largest * counted.unsqueeze(1)).sum(-1))
    for _ in range(2):
        chances.append(counted.sum(-1))
        uniform.append(torch.full_like(uniform[0], torch.nan))
    return Counts(torch.stack(hits, -1), torch.stack(chances, -1), torch.stack(uniform, -1).unsqueeze(1))


class SinkShares(SentenceShares):
    """:func:`sink_counts` over the data.

    Args:
        sites: attention modules of the model.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    names = ["separator", "first-token", "broad", "confidence"]

    def __init__(self, sites: tuple[AttentionSite, ...], **kwargs: Any) -> None:
        super().__init__(sites, columns=len(self.names), baselines=1, **kwargs)

    def observe(self, site: int, weights: Tensor, view: View) -> None:
        """Add the attention ``[batch, heads, query, key]`` of one site."""
        self.update(site, sink_counts(weights, view), view.weights)
