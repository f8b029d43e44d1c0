"""Attention confidence per head: how much a query attends to the key it attends to most (Voita et al. 2019, section 4.1).

The mean of the largest attention weight over all queries that are not padding. Voita et al. leave out attention to the
end-of-sentence symbol; here nothing is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gates.scores.attention_blocks import score_blocks
from gates.scores.attention_metric import AttentionMetric


@torch.no_grad()
def attention_confidence(
    query: Tensor,
    key: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """The largest attention weight of each query, ``[batch, heads, query]``, float32, in memory linear in the number of keys.

    It is 0 for a query that sees no key.

    Args:
        query: queries, ``[batch, heads, query, head_dim]``.
        key: keys, ``[batch, heads, key, head_dim]`` (grouped keys already repeated).
        scale: factor of the scores.
        mask: true at visible keys, or a summand of the scores, broadcastable to ``[batch, heads, query, key]``.
        causal: whether queries see no later keys.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the summand (Gemma 2).
        sink: score of a further outcome at which nothing is read, ``[heads]`` (GPT-OSS); its own weight is no confidence.
    """
    largest = []
    with torch.autocast(query.device.type, enabled=False):
        for scores in score_blocks(query.float(), key.float(), scale, mask, softcap, causal):
            log_sum_exp = scores.logsumexp(-1)
            if sink is not None:
                log_sum_exp = torch.logaddexp(log_sum_exp, sink.float().view(1, -1, 1))
            largest.append((scores.amax(-1) - log_sum_exp).exp().nan_to_num(0.0))
    return torch.cat(largest, dim=2)


class AttentionConfidence(AttentionMetric):
    """Mean largest attention weight of every head, in [0, 1].

    >>> from gates import find_attention, observe_attention
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> confidence = AttentionConfidence(sites := find_attention(model))
    >>> with torch.no_grad(), observe_attention(model, sites, [confidence], {"encoder": None}):
    ...     _ = model(torch.randint(50, (3, 7)))
    >>> confidence.compute().shape
    torch.Size([8])
    """

    def from_scores(self, query: Tensor, key: Tensor, scale: float, mask: Tensor | None, **more: Any) -> Tensor:
        return attention_confidence(query, key, scale, mask, **more)

    def from_matrix(self, weights: Tensor) -> Tensor:
        return weights.amax(-1)
