"""Attention between words from attention between their pieces (Clark et al. 2019, section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor


def word_attention(weights: Tensor, words: Tensor, count: int) -> Tensor:
    """Attention from word to word, ``[batch, heads, words, words]``: summed over the pieces that are attended to, and averaged
    over the pieces that attend. Special tokens belong to no word, so their attention is left out.

    Args:
        weights: of attention between tokens, ``[batch, heads, token, token]``.
        words: the word that each token is a piece of, ``[batch, token]``; -1 for none.
        count: words of the longest example.
    """
    member = (words.unsqueeze(-1) == torch.arange(count, device=words.device)).to(weights.dtype)
    mean = member / member.sum(1, keepdim=True).clamp(min=1)
    return mean.transpose(1, 2).unsqueeze(1) @ (weights @ member.unsqueeze(1))


def other_words(words: Tensor, count: int, causal: bool) -> Tensor:
    """Words that each word may attend to, ``[batch, words, words]``: those with a piece, but itself; earlier ones if causal.

    Args:
        words, count: see :func:`word_attention`.
        causal: whether later words are not seen.
    """
    places = torch.arange(count, device=words.device)
    there = (words.unsqueeze(-1) == places).any(1)
    apart = places.unsqueeze(0) < places.unsqueeze(1) if causal else places.unsqueeze(0) != places.unsqueeze(1)
    return there.unsqueeze(1) & there.unsqueeze(2) & apart
