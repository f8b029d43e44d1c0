"""The entropy of attention by length, against attention itself and against the definition, which makes the matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gates.scores.entropy import attention_entropy
from training.benchmark.alternate import Work, alternate_shown
from training.benchmark.memory import peak_megabytes, ratio
from training.benchmark.setting import Setting

LENGTHS = {"cpu": (128, 512, 2048, 8192), "cuda": (128, 512, 2048, 8192), "quick": (32, 64)}
DTYPES = {"cpu": ("float32",), "cuda": ("float32", "bfloat16")}
HEADS, HEAD_DIM = 4, 64
LARGEST_MATRIX = {"cpu": 2**28, "cuda": 2**32}
"""Bytes of attention matrices, beyond which they are not made."""


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each precision and length: one text, :data:`HEADS` heads."""
    rows = []
    lengths = LENGTHS["quick" if setting.quick else setting.device]
    for dtype in DTYPES[setting.device]:
        for length in lengths:
            rows.append(_row(setting, dtype, length))
    return rows


def _row(setting: Setting, dtype: str, length: int) -> dict[str, Any]:
    what = f"entropy of {length} tokens, {dtype}"
    explicit = 4 * HEADS * length**2 <= LARGEST_MATRIX[setting.device]
    names = ("attention", "entropy", *(("definition",) if explicit else ()))
    times = alternate_shown(what, {name: prepare(setting, dtype, length, name) for name in names}, setting.on, setting.effort)
    peaks = {name: peak_megabytes(what, setting.on, setting.threads, prepare, setting, dtype, length, name) for name in names}
    return {
        "dtype": dtype,
        "length": length,
        "attention_ms": asdict(times.milliseconds("attention")),
        "entropy_ms": asdict(times.milliseconds("entropy")),
        "over_attention": asdict(times.ratio("entropy", "attention")),
        "definition_speedup": asdict(times.ratio("definition", "entropy")) if explicit else None,
        "attention_mb": peaks["attention"],
        "entropy_mb": peaks["entropy"],
        "definition_mb": peaks.get("definition"),
        "memory_ratio": ratio(peaks["entropy"], peaks["attention"]),
    }


def prepare(setting: Setting, dtype: str, length: int, name: str) -> Work:
    """``attention`` as PyTorch computes it fastest, its ``entropy``, or that from the ``definition``."""
    draw = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, generator=draw).to(setting.on, getattr(torch, dtype)) for _ in range(3))
    scale = HEAD_DIM**-0.5
    work: dict[str, Callable[[], Tensor]] = {
        "attention": lambda: scaled_dot_product_attention(query, key, value, scale=scale),
        "entropy": lambda: attention_entropy(query, key, scale),
        "definition": lambda: explicit_entropy(query, key, scale),
    }
    return work[name]


@torch.no_grad()
def explicit_entropy(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """``-sum_j p_ij log p_ij`` ``[batch, heads, query]`` from the whole attention matrix."""
    log_p = (query.float() @ key.float().transpose(-1, -2) * scale).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)
