"""Attention scores and masks, a block of queries at a time, so that memory grows in proportion to the number of keys.

A mask is what PyTorch's attention takes for one: true at visible keys, or a summand of the scores that is ``-inf``, or the
lowest value of its type, at invisible ones. Attention can also be causal: then query i sees the keys 0 to i alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 256
"""Queries whose scores, or whose part of a mask, are in memory at a time."""


def query_blocks(queries: int) -> Iterator[slice]:
    """All queries, :data:`BLOCK` at a time."""
    for start in range(0, queries, BLOCK):
        yield slice(start, min(start + BLOCK, queries))


def bias_blocks(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Iterator[tuple[slice, Tensor | None]]:
    """The queries of each block, and what is added to their scores: :func:`bias_of`.

    Args:
        query: queries, ``[batch, heads, query, head_dim]``.
        key: keys, ``[batch, heads, key, head_dim]``.
        mask: see above, broadcastable to ``[batch, heads, query, key]``; it may have more keys than there are.
        causal: whether queries see no later keys.
    """
    for at in query_blocks(query.shape[2]):
        yield at, bias_of(mask, causal, at, key.shape[2], query.device)


def bias_of(mask: Tensor | None, causal: bool, at: slice, keys: int, device: torch.device) -> Tensor | None:
    """What is added to the scores of some queries, float32, ``[batch or 1, heads or 1, query or 1, key]``.

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
    """How many keys each query sees, ``[batch or 1, 1, query]``; of a mask by heads, those that the first head sees.

    Args:
        query, key, mask, causal: see :func:`bias_blocks`.
    """
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        last = torch.arange(1, queries + 1, device=query.device).clamp(max=keys)
        return (last if causal else torch.full_like(last, keys)).view(1, 1, queries)
    counts = []
    for at in query_blocks(queries):
        visible = _visible(mask[:, :1], causal, at, keys, query.device)
        assert visible is not None, "a mask shows some keys and hides others"
        counts.append(visible.sum(-1, dtype=torch.int32).expand(-1, -1, at.stop - at.start))
    return torch.cat(counts, dim=2)


def score_blocks(
    query: Tensor, key: Tensor, scale: float, mask: Tensor | None, softcap: float | None, causal: bool = False
) -> Iterator[Tensor]:
    """Attention scores before the softmax, ``[batch, heads, BLOCK, key]`` at a time, ``-inf`` at invisible keys.

    Args:
        query: queries, ``[batch, heads, query, head_dim]``.
        key: keys, ``[batch, heads, key, head_dim]``.
        scale, mask, softcap, causal: see :func:`gates.scores.entropy.attention_entropy`.
    """
    for at, bias in bias_blocks(query, key, mask, causal):
        yield scores_of(query[:, :, at], key, scale, bias, softcap)


def scores_of(query: Tensor, key: Tensor, scale: float, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Attention scores of all queries that are given, ``[batch, heads, query, key]``."""
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return scores if bias is None else scores + bias


def _visible(mask: Tensor | None, causal: bool, at: slice, keys: int, device: torch.device) -> Tensor | None:
    """Whether queries see keys, ``[batch or 1, heads or 1, query or 1, key]``; None where they see all."""
    visible = None
    if mask is not None:
        rows = _rows(mask, at, keys)
        visible = rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min
    if causal:
        earlier = torch.arange(keys, device=device) <= torch.arange(at.start, at.stop, device=device).unsqueeze(1)
        visible = earlier[None, None] if visible is None else visible & earlier
    return visible


def _rows(mask: Tensor, at: slice, keys: int) -> Tensor:
    """Of a mask, with all keys, also where it says the same of each."""
    rows = (mask if mask.shape[2] == 1 else mask[:, :, at])[..., :keys]
    return rows.expand(*rows.shape[:-1], keys)
