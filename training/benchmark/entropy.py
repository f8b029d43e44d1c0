"""The entropy of attention by length and mask, against attention itself and against the definition, which makes the matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gates.scores.attention_blocks import visible_keys
from gates.scores.entropy import attention_entropy
from training.benchmark.alternate import Work, alternate_shown, as_cell
from training.benchmark.memory import peaks_in_turn, ratio, spread_of
from training.benchmark.setting import Setting

LENGTHS = {"cpu": (128, 512, 2048, 8192), "cuda": (128, 512, 2048, 8192), "quick": (32, 64)}
DTYPES = {"cpu": ("float32",), "cuda": ("float32", "bfloat16")}
HEADS, HEAD_DIM = 4, 64
CAUSAL, PADDED = "causal", "padded"
MASKS = ("none", CAUSAL, PADDED, f"{CAUSAL}, {PADDED}")
"""What hides keys: nothing; that they are later; a mask of two texts, of which the second is padded; both."""
LARGEST_MATRIX = {"cpu": 2**28, "cuda": 2**32}
"""Bytes of attention matrices, beyond which they are not made."""
MEMORY_FROM = 2048
"""Tokens of the shortest text whose memory is measured; shorter ones take less than what cannot be told from noise."""


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each precision, mask and length."""
    lengths = LENGTHS["quick" if setting.quick else setting.device]
    return [_row(setting, dtype, mask, length) for dtype in DTYPES[setting.device] for mask in MASKS for length in lengths]


def _row(setting: Setting, dtype: str, mask: str, length: int) -> dict[str, Any]:
    what = f"entropy of {length} tokens, mask: {mask}, {dtype}"
    explicit = 4 * _texts(mask) * HEADS * length**2 <= LARGEST_MATRIX[setting.device]
    names = ("attention", "entropy", *(("definition",) if explicit else ()))
    variants = {name: (prepare, (setting, dtype, mask, length, name)) for name in names}
    work = {name: make(*arguments) for name, (make, arguments) in variants.items()}
    times = alternate_shown(what, work, setting.on, setting.effort)
    del work
    turns = setting.memory_turns if length >= MEMORY_FROM else 0
    peaks = peaks_in_turn(what, setting.on, setting.threads, turns, variants)
    return {
        "dtype": dtype,
        "mask": mask,
        "length": length,
        "attention_ms": as_cell(times.milliseconds("attention")),
        "entropy_ms": as_cell(times.milliseconds("entropy")),
        "over_attention": as_cell(times.ratio("entropy", "attention")),
        "definition_speedup": as_cell(times.ratio("definition", "entropy")) if explicit else None,
        "attention_mb": as_cell(spread_of(peaks["attention"])),
        "entropy_mb": as_cell(spread_of(peaks["entropy"])),
        "definition_mb": as_cell(spread_of(peaks.get("definition", []))),
        "memory_ratio": as_cell(ratio(peaks["entropy"], peaks["attention"])),
    }


def prepare(setting: Setting, dtype: str, mask: str, length: int, name: str) -> Work:
    """``attention`` as PyTorch computes it fastest, its ``entropy``, or that from the ``definition``."""
    draw = torch.Generator().manual_seed(0)
    shape = (_texts(mask), HEADS, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, generator=draw).to(setting.on, getattr(torch, dtype)) for _ in range(3))
    scale, causal = HEAD_DIM**-0.5, mask == CAUSAL
    hiding = visible(mask, length, setting.on) if PADDED in mask else None
    shown = visible(mask, length, setting.on) if name == "definition" else None

    def entropy() -> tuple[Tensor, Tensor]:
        """With the number of keys that each query sees, by which it is divided."""
        return attention_entropy(query, key, scale, hiding, causal=causal), visible_keys(query, key, hiding, causal)

    work: dict[str, Callable[[], object]] = {
        "attention": lambda: scaled_dot_product_attention(query, key, value, hiding, is_causal=causal, scale=scale),
        "entropy": entropy,
        "definition": lambda: explicit_entropy(query, key, scale, shown),
    }
    return work[name]


def visible(mask: str, length: int, device: torch.device) -> Tensor:
    """Whether queries see keys, ``[texts, 1, length, length]``: the second text of a padded batch has three quarters of the
    length of the first."""
    seen = torch.ones(_texts(mask), 1, length, length, dtype=torch.bool, device=device)
    if PADDED in mask:
        seen[1, :, :, 3 * length // 4 :] = False
    return seen.tril() if CAUSAL in mask else seen


def _texts(mask: str) -> int:
    return 2 if PADDED in mask else 1


@torch.no_grad()
def explicit_entropy(query: Tensor, key: Tensor, scale: float, shown: Tensor | None = None) -> Tensor:
    """``-sum_j p_ij log p_ij`` ``[batch, heads, query]`` from the whole attention matrix; every query sees some key."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if shown is not None:
        scores = scores.masked_fill(~shown, torch.finfo(torch.float32).min)
    log_p = scores.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)
