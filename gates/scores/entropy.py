"""Attention entropy per head, without storing an attention matrix where the model allows it.

For one query i, ``H_i = -sum_j p_ij log p_ij = lse_i - q_i . (sum_j p_ij k_j) * scale``, where lse is the
log-sum-exp of its scaled scores. The sum in brackets is attention with the keys as values, so one fused attention
call that also returns its log-sum-exp gives exact entropies in memory linear in the sequence length.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gates.scores.attention_metric import AttentionMetric, score_blocks


@torch.no_grad()
def attention_entropy(
    query: Tensor,
    key: Tensor,
    scale: float,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Entropy in nats of each query's attention distribution, ``[batch, heads, query]``, float32.

    Args:
        query: queries, ``[batch, heads, query, head_dim]``.
        key: keys, ``[batch, heads, key, head_dim]`` (grouped keys already repeated).
        scale: factor of the scores.
        bias: summand of the scores, broadcastable to ``[batch, heads, query, key]``: ``-inf`` or the
            dtype's lowest value at invisible keys, anything finite elsewhere.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the bias (Gemma 2).
        sink: score of a further outcome at which nothing is read, ``[heads]`` (GPT-OSS); it counts as one more key.
    """
    with torch.autocast(query.device.type, enabled=False):
        query, key = query.float(), key.float()
        sink = None if sink is None else sink.float().view(1, -1, 1)
        plain = softcap is None and (bias is None or _is_binary(bias))
        fused = _fused(query, key, scale, bias) if plain else None
        if fused is not None:
            mean_key, log_sum_exp = fused
            return _from_moments(log_sum_exp, (query * mean_key).sum(-1) * scale, sink).clamp(min=0)
        return torch.cat([_explicit(scores, sink) for scores in score_blocks(query, key, scale, bias, softcap)], dim=2)


def _from_moments(log_sum_exp: Tensor, mean_score: Tensor, sink: Tensor | None) -> Tensor:
    """Entropy from the log-sum-exp and the mean of the scores, with the sink as one more outcome."""
    if sink is None:
        return log_sum_exp - mean_score
    whole = torch.logaddexp(log_sum_exp, sink)
    p_sink = (sink - whole).exp()
    return whole - (1 - p_sink) * mean_score - p_sink * sink


def _is_binary(bias: Tensor) -> bool:
    """Whether a bias only hides keys; a finite bias (T5, ALiBi) changes the entropy identity."""
    hidden = bias <= torch.finfo(bias.dtype).min
    return bool((hidden | (bias == 0)).all())


def _explicit(scores: Tensor, sink: Tensor | None) -> Tensor:
    """The definition, for a block of queries."""
    if sink is not None:
        scores = torch.cat([scores, sink.unsqueeze(-1).expand(*scores.shape[:-1], 1)], dim=-1)
    log_p = scores.log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)


def _fused(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Attention with V = K and its log-sum-exp from PyTorch's fused kernels; None where they are not to be had.

    The operators are not public: any failure to call them falls back to the explicit blocks.
    """
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if bias is not None:
        bias = bias.float().clamp(min=torch.finfo(torch.float32).min / 2)
    try:
        if query.device.type == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, key, 0.0, False, attn_mask=None if bias is None else bias.expand(shape), scale=scale
            )
        if query.device.type == "cuda":
            if bias is not None:
                bias = _aligned(bias).expand(shape)  # aligned before it is expanded, which costs no memory
            output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, key, bias, True, 0.0, False, scale=scale
            )
            return output, log_sum_exp[:, :, : query.shape[2]]
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return None
    return None


def _aligned(bias: Tensor) -> Tensor:
    """The efficient kernel wants rows of the bias to start at multiples of 16 elements."""
    keys = bias.shape[-1]
    padded = bias.new_zeros(*bias.shape[:-1], math.ceil(keys / 16) * 16)
    padded[..., :keys] = bias
    return padded[..., :keys]


def normalised_entropy(entropy: Tensor, visible: Tensor) -> Tensor:
    """Entropy over its maximum, the log of the number of visible keys; in [0, 1].

    Args:
        entropy: entropy of every query, ``[batch, heads, query]``.
        visible: keys each query may attend to, broadcastable to ``entropy``; where fewer than two, the result is 0
            and should not be counted.
    """
    return torch.where(visible > 1, entropy / visible.clamp(min=2).float().log(), torch.zeros_like(entropy))


class AttentionEntropy(AttentionMetric):
    """Mean normalised attention entropy of every head; queries that see one key do not count.

    >>> from gates import find_attention, observe_entropy
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> entropy = AttentionEntropy(sites := find_attention(model))
    >>> with torch.no_grad(), observe_entropy(model, sites, entropy, {"encoder": None}):
    ...     _ = model(torch.randint(50, (3, 7)))
    >>> bool((entropy.compute() <= 1).all())  # 1 where a head attends to all keys alike
    True
    """

    least_keys = 2

    def from_scores(self, query: Tensor, key: Tensor, scale: float, bias: Tensor | None, **more: Any) -> Tensor:
        return attention_entropy(query, key, scale, bias, **more)

    def from_matrix(self, weights: Tensor) -> Tensor:
        return -(weights * weights.clamp(min=torch.finfo(weights.dtype).tiny).log()).sum(-1)

    def normalised(self, values: Tensor, visible: Tensor) -> Tensor:
        return normalised_entropy(values, visible)
