"""Attention entropy per head, without storing an attention matrix where the model allows it.

For one query i, ``H_i = -sum_j p_ij log p_ij = lse_i - q_i . (sum_j p_ij k_j) * scale``, where lse is the
log-sum-exp of its scaled scores. The sum in brackets is attention with the keys as values. So one fused attention call that
also returns its log-sum-exp gives exact entropies, and memory is linear in the sequence length. Masks are read a block of
queries at a time. Each block attends only to the keys between its first and its last visible one. So causal masks with padding
cost half of a full matrix, and sliding windows and packed documents a part of it.

Where :mod:`gates.scores.entropy_kernel` supports the inputs, a kernel of this project computes the entropy on a GPU in half
of attention's work. Otherwise PyTorch's kernels do, always in float32. Half precision would be faster, but its kernels round
the mean key, and the entropy is a small difference of large numbers. An example are bfloat16 scores of standard deviation 8,
with a mean entropy of 0.8 nats. The CPU's kernel has errors of up to 0.07 nats in bfloat16, and 1e-5 in float32.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

from gates.attention.sites import AttentionSite
from gates.attention.valid import check_valid
from gates.scores import entropy_kernel
from gates.scores.metric import HeadMetric

# Attention scores and masks, a block of queries at a time, so that memory grows in proportion to the number of keys.
#
# Masks are those of PyTorch's attention: true at visible keys, or a summand of the scores. The summand is ``-inf``, or the
# lowest value of its type, at invisible keys. Under causal attention query i only sees the keys 0 to i.

BLOCK = 256
"""The number of queries whose scores, or whose part of a mask, are in memory at a time."""


def query_blocks(queries: int) -> Iterator[slice]:
    """Yield all queries, :data:`BLOCK` at a time."""
    for start in range(0, queries, BLOCK):
        yield slice(start, min(start + BLOCK, queries))


def bias_blocks(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield the queries of each block and the bias of their scores, :func:`bias_of`. For the arguments see
    :func:`attention_entropy`; the mask may have more keys than there are."""
    for at in query_blocks(query.shape[2]):
        yield at, bias_of(mask, causal, at, key.shape[2], query.device)


def bias_of(mask: Tensor | None, causal: bool, at: slice, keys: int, device: torch.device) -> Tensor | None:
    """Return the summand of the scores of some queries, float32, ``[batch or 1, heads or 1, query or 1, key]``.

    It is ``-inf`` at invisible keys; None if nothing is added.

    >>> bias_of(None, True, slice(1, 3), 4, torch.device("cpu"))
    tensor([[[[0., 0., -inf, -inf],
              [0., 0., 0., -inf]]]])
    """
    visible = _visible(mask, causal, at, keys, device)
    if visible is None:
        return None
    if mask is None or mask.dtype == torch.bool:
        return torch.where(visible, 0.0, -torch.inf).float()
    return torch.where(visible, _rows(mask, at, keys).float(), -torch.inf)


def visible_keys(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return the number of visible keys of each query, ``[batch or 1, 1, query]``, for the first head of a mask by heads."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        last = torch.arange(1, queries + 1, device=query.device).clamp(max=keys)
        return (last if causal else torch.full_like(last, keys)).view(1, 1, queries)
    if entropy_kernel.reads(mask):
        counts = entropy_kernel.seen_ranges(mask[:, :1], keys, causal_queries=queries if causal else None)[2]
        return counts.expand(-1, -1, queries)
    blocks = []
    for at in query_blocks(queries):
        visible = _visible(mask[:, :1], causal, at, keys, query.device)
        assert visible is not None, "a mask shows some keys and hides others"
        blocks.append(visible.sum(-1, dtype=torch.int32).expand(-1, -1, at.stop - at.start))
    return torch.cat(blocks, dim=2)


def distribution_blocks(
    query: Tensor,
    key: Tensor,
    scale: float,
    mask: Tensor | None,
    *,
    causal: bool = False,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the scores of each block, float32 ``[batch, heads, BLOCK, key]``, ``-inf`` at invisible keys, and their log-sum-exp
    with that of a sink, ``[batch, heads, BLOCK]``. For the arguments see :func:`attention_entropy`.

    The weight of a key is the exponential of their difference, which is NaN for a query that sees no key.
    """
    with torch.autocast(query.device.type, enabled=False):
        query, key = query.float(), repeated(key.float(), query)
        for at, bias in bias_blocks(query, key, mask, causal):
            scores = scores_of(query[:, :, at], key, scale, bias, softcap)
            log_sum_exp = scores.logsumexp(-1)
            if sink is not None:
                log_sum_exp = torch.logaddexp(log_sum_exp, sink.float().view(1, -1, 1))
            yield scores, log_sum_exp


def repeated(key: Tensor, query: Tensor) -> Tensor:
    """Return keys with as many heads as the queries that share them."""
    return repeat_kv(key, query.shape[1] // key.shape[1])


def scores_of(query: Tensor, key: Tensor, scale: float, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Return the attention scores of these queries before the softmax, ``[batch, heads, query, key]``."""
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return scores if bias is None else scores + bias


def _visible(mask: Tensor | None, causal: bool, at: slice, keys: int, device: torch.device) -> Tensor | None:
    """Return whether queries see keys, ``[batch or 1, heads or 1, query or 1, key]``; None where they see all."""
    visible = None
    if mask is not None:
        rows = _rows(mask, at, keys)
        visible = rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min
    if causal:
        earlier = torch.arange(keys, device=device) <= torch.arange(at.start, at.stop, device=device).unsqueeze(1)
        visible = earlier[None, None] if visible is None else visible & earlier
    return visible


def _rows(mask: Tensor, at: slice, keys: int) -> Tensor:
    """Return some rows of a mask, expanded to all keys."""
    rows = (mask if mask.shape[2] == 1 else mask[:, :, at])[..., :keys]
    return rows.expand(*rows.shape[:-1], keys)


class AttentionMetric(HeadMetric):
    """Average a measure of attention distributions for every head over all queries that count, exactly under DDP.

    Padded queries do not count, nor do those that see fewer than ``least_keys`` keys.
    """

    least_keys = 0
    total: Tensor
    count: Tensor

    def __init__(self, sites: tuple[AttentionSite, ...], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sizes = [site.heads for site in sites]
        self.add_sums(total=[sum(self._sizes)])
        self.add_state("count", torch.zeros(len(sites), dtype=torch.long), dist_reduce_fx="sum")

    @abstractmethod
    def from_scores(self, query: Tensor, key: Tensor, scale: float, mask: Tensor | None, **more: Any) -> Tensor:
        """Return the measure of every query, ``[batch, heads, query]``. For the arguments see :func:`attention_entropy`."""

    @abstractmethod
    def from_matrix(self, weights: Tensor) -> Tensor:
        """Return the measure of every query from attention weights ``[batch, heads, query, key]``."""

    def normalised(self, values: Tensor, visible: Tensor) -> Tensor:
        """Return the values to average; by default those of the measure."""
        return values

    def update(self, site: int, values: Tensor, visible: Tensor, valid: Tensor | None = None) -> None:
        """Add the measure of every query in one forward pass of a site, ``[batch, heads, query]``.

        Args:
            visible: The number of visible keys of each query, broadcastable to ``[batch, 1, query]``.
            valid: The queries that are not padding, ``[batch, query]``; None if all count.
        """
        counted = visible.expand(values.shape[0], 1, values.shape[2]) >= self.least_keys
        if valid is not None:
            check_valid(valid, counted[:, 0].shape)
            counted = counted & valid.bool().unsqueeze(1).to(counted.device)
        total = torch.where(counted, self.normalised(values, visible), 0.0).double().sum((0, 2))
        self.total.split(self._sizes)[site].add_(total.to(self.total.device))  # sites may be on several devices
        self.count[site] += counted.sum().to(self.count.device)

    def compute(self) -> Tensor:
        """Return the mean of the measure, ``[heads]``."""
        sizes = torch.tensor(self._sizes, device=self.count.device)
        return self.total / self.count.repeat_interleave(sizes, output_size=self.total.numel()).clamp(min=1)


@torch.no_grad()
def attention_entropy(
    query: Tensor,
    key: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return the entropy in nats of each query's attention distribution, ``[batch, heads, query]``, float32; 0 without a key.

    Args:
        query: The queries, ``[batch, heads, query, head_dim]``.
        key: The keys, ``[batch, heads, key, head_dim]``. With fewer heads, consecutive query heads share each.
        mask: The visible keys, bool, or a finite summand of the scores, ``-inf`` or its type's lowest value at invisible keys.
            It is broadcastable to ``[batch, heads, query, key]``.
        causal: Whether query i only sees the keys 0 to i, of those that the mask shows.
        softcap: The limit of scores, which become ``softcap * tanh(score / softcap)`` before the summand (Gemma 2).
        sink: The score of a further outcome at which nothing is read, ``[heads]`` (GPT-OSS). It counts as one more key.
    """
    if entropy_kernel.supports(query, key, scale, mask, softcap=softcap, sink=sink):
        return entropy_kernel.kernel_entropy(query, key, scale, mask, causal=causal, sink=sink)
    with torch.autocast(query.device.type, enabled=False):
        query, key = query.float(), repeated(key.float(), query)
        sink = None if sink is None else sink.float().view(1, -1, 1)
        if mask is None and softcap is None:  # the kernel hides later keys by itself
            whole = _fused(query, key, scale, None, sink, causal=causal)
            if whole is not None:
                return whole
        blocks = []
        for at, bias in bias_blocks(query, key, mask, causal):
            rows, fused = query[:, :, at], None
            if softcap is None and _only_hides(mask, bias):
                fused = _over_seen_keys(rows, key, scale, bias, sink)
            blocks.append(_explicit(scores_of(rows, key, scale, bias, softcap), sink) if fused is None else fused)
        return torch.cat(blocks, dim=2)


def _only_hides(mask: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether a mask only hides keys. A summand of other scores (T5, ALiBi) changes the entropy identity."""
    if mask is None or bias is None or mask.dtype == torch.bool:
        return True
    return bool(((bias == -torch.inf) | (bias == 0)).all())


def _over_seen_keys(query: Tensor, key: Tensor, scale: float, bias: Tensor | None, sink: Tensor | None) -> Tensor | None:
    """Return the entropy by a fused kernel over the keys that any of these queries sees."""
    if bias is None:
        return _fused(query, key, scale, None, sink)
    seen = (bias.amax((0, 1, 2)) > -torch.inf).nonzero()
    if not len(seen):
        return query.new_zeros(query.shape[:-1])
    near = slice(int(seen[0]), int(seen[-1]) + 1)
    entropy = _fused(query, key[:, :, near], scale, bias[..., near], sink)
    return None if entropy is None else entropy.masked_fill_(bias.amax(-1) == -torch.inf, 0.0)


def _from_moments(log_sum_exp: Tensor, mean_score: Tensor, sink: Tensor | None) -> Tensor:
    """Return the entropy from the log-sum-exp and the mean of the scores, with the sink as one more outcome."""
    if sink is None:
        return log_sum_exp - mean_score
    whole = torch.logaddexp(log_sum_exp, sink)
    p_sink = (sink - whole).exp()
    return whole - (1 - p_sink) * mean_score - p_sink * sink


def _explicit(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Return the entropy of a block of queries by its definition."""
    if sink is not None:
        scores = torch.cat([scores, sink.unsqueeze(-1).expand(*scores.shape[:-1], 1)], dim=-1)
    log_p = scores.log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)


def _fused(
    query: Tensor, key: Tensor, scale: float, bias: Tensor | None, sink: Tensor | None, *, causal: bool = False
) -> Tensor | None:
    """Return the entropy from attention with V = K and its log-sum-exp; None where no kernel of PyTorch returns them."""
    found = _kernel(query, key, scale, bias, causal)
    if found is None:
        return None
    mean_key, log_sum_exp = found
    return _from_moments(log_sum_exp, mean_key.mul_(query).sum(-1) * scale, sink).clamp(min=0)


def _kernel(query: Tensor, key: Tensor, scale: float, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor] | None:
    """Return attention with V = K and its log-sum-exp from PyTorch's fused kernels; None where there is none.

    The operators are not public, so any failure to call them falls back to the explicit blocks.
    """
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if bias is not None:
        bias = bias.float().clamp(min=torch.finfo(torch.float32).min / 2)
    try:
        if query.device.type == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, key, 0.0, causal, attn_mask=None if bias is None else bias.expand(shape), scale=scale
            )
        if query.device.type == "cuda":
            if bias is not None:
                bias = _aligned(bias).expand(shape)  # aligned before it is expanded, which costs no memory
            output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, key, bias, True, 0.0, causal, scale=scale
            )
            return output, log_sum_exp[:, :, : query.shape[2]]
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return None
    return None


def _aligned(bias: Tensor) -> Tensor:
    """Return a bias whose rows start at multiples of 16 elements, as the efficient kernel requires."""
    keys = bias.shape[-1]
    padded = bias.new_zeros(*bias.shape[:-1], math.ceil(keys / 16) * 16)
    padded[..., :keys] = bias
    return padded[..., :keys]


class AttentionEntropy(AttentionMetric):
    """Average the normalised attention entropy of every head. Queries that see one key do not count.

    >>> from gates import find_attention, observe_attention
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> entropy = AttentionEntropy(sites := find_attention(model))
    >>> with torch.no_grad(), observe_attention(model, sites, [entropy], {"encoder": None}):
    ...     _ = model(torch.randint(50, (3, 7)))
    >>> bool((entropy.compute() <= 1).all())  # 1 where a head attends to all keys alike
    True
    """

    least_keys = 2

    def from_scores(self, query: Tensor, key: Tensor, scale: float, mask: Tensor | None, **more: Any) -> Tensor:
        return attention_entropy(query, key, scale, mask, **more)

    def from_matrix(self, weights: Tensor) -> Tensor:
        return -(weights * weights.clamp(min=torch.finfo(weights.dtype).tiny).log()).sum(-1)

    def normalised(self, values: Tensor, visible: Tensor) -> Tensor:
        """Return entropies over their maximum, the log of the number of visible keys; 0 where fewer than two are visible."""
        return torch.where(visible > 1, values / visible.clamp(min=2).float().log(), torch.zeros_like(values))


# The attention confidence of a head is its mean largest attention weight over all queries that are not padding (Voita et al.
# 2019, section 4.1). Voita et al. exclude attention to the end-of-sentence symbol; here nothing is excluded.


@torch.no_grad()
def attention_confidence(query: Tensor, key: Tensor, scale: float, mask: Tensor | None = None, **more: Any) -> Tensor:
    """Return the largest attention weight of each query, ``[batch, heads, query]``, float32.

    Memory is linear in the number of keys. The weight of a sink does not count, and a query that sees no key has 0. For the
    arguments see :func:`attention_entropy`.
    """
    blocks = distribution_blocks(query, key, scale, mask, **more)
    return torch.cat([(scores.amax(-1) - log_sum_exp).exp().nan_to_num(0.0) for scores, log_sum_exp in blocks], dim=2)


class AttentionConfidence(AttentionMetric):
    """Average the largest attention weight of every head, in [0, 1].

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
