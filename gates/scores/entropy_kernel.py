"""Attention entropy in one pass over the keys: a Triton kernel for NVIDIA GPUs.

Fused attention kernels hand out a log-sum-exp, but not the mean score, which the entropy also needs. This kernel computes both
from one matrix product of queries and keys. There are no values, so it does half of attention's work. Nothing is rounded to
half precision, and memory is linear in the length.

For the scores ``s_j`` of one query, their maximum ``m`` and ``d_j = s_j - m``, let ``l = sum_j exp(d_j)`` and
``t = sum_j exp(d_j) d_j``. The weights are ``p_j = exp(d_j) / l``, and the entropy is ``-sum_j p_j (d_j - log l)``:

    H = log l - t / l

Every ``d_j`` is at most zero and one of them is zero, so ``log l`` and ``-t / l`` are both at least zero. Nothing cancels. The
formula holds for any reference ``m``, so rounding of ``m`` does no harm. When a tile of keys raises the maximum by ``r``, all
earlier ``d_j`` fall by ``r``. With ``a = exp(-r)``, that turns ``t`` into ``a (t - r l)`` and ``l`` into ``a l``.

A sink is one more outcome with a score of its own: the sums begin with it. All scores are in units of ``log 2``, because the
hardware computes powers of two.

Triton is not a dependency of this package, but PyTorch's CUDA builds install it. Without Triton this module can be imported,
and :func:`supports` returns False.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    import triton
    import triton.language as tl

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MASKS = (torch.bool, *FLOATS)


def _jit(function: Callable[..., Any]) -> Any:
    """Compile a function with Triton where it is installed."""
    return triton.jit(function) if HAS_TRITON else function


def supports(query: Tensor, key: Tensor, scale: float, mask: Tensor | None = None, **more: Any) -> bool:
    """Return whether the kernel runs here, takes these inputs, the arguments of :func:`fits`, and is the fastest way.

    In float32 without a mask PyTorch's attention is faster. From 2,048 tokens on an H100 it takes 1.0 to 1.1 times as long as
    attention alone, and the kernel 1.4 to 1.5 times.
    """
    if query.device.type != "cuda" or (query.dtype == torch.float32 and mask is None):
        return False
    return fits(query, key, scale, mask, **more) and _runs_on(query.device)


def fits(
    query: Tensor,
    key: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> bool:
    """Return whether the kernel takes these inputs, on whatever device. For the arguments see :func:`kernel_entropy`."""
    together = [tensor for tensor in (key, mask, sink) if tensor is not None]
    return (
        query.dtype in FLOATS
        and key.dtype == query.dtype
        and 0 < query.shape[-1] <= 256
        and query.numel() > 0
        and scale > 0  # the largest product has the largest score
        and softcap is None
        and (mask is None or mask.dtype in MASKS)
        and all(tensor.device == query.device for tensor in together)
    )


@cache
def _runs_on(device: torch.device) -> bool:
    """Return whether Triton can compile for a GPU. It builds its launcher in C, which images for inference cannot always."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    return (
        HAS_TRITON
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)  # bfloat16, and what Triton supports
        and compiler is not None
        and headers.exists()
    )


def kernel_entropy(
    query: Tensor, key: Tensor, scale: float, mask: Tensor | None = None, *, causal: bool = False, sink: Tensor | None = None
) -> Tensor:
    """Return the entropy of each query's attention distribution, ``[batch, heads, query]``, float32.

    Args:
        query: The queries, ``[batch, heads, query, head_dim]``, in float32, bfloat16 or float16; ``head_dim`` at most 256.
        key: The keys, ``[batch, key heads, key, head_dim]``. Consecutive queries share a key head if there are fewer.
        scale: The positive factor of the scores.
        mask: See :func:`gates.scores.attention.attention_entropy`. Where ``mask / scale`` overflows, a key is hidden.
        causal: Whether query i sees the keys 0 to i alone.
        sink: The score of a further outcome, ``[heads]``.
    """
    query, key = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key))
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[2]
    entropy = query.new_empty(batch, heads, queries, dtype=torch.float32)
    blocks = launch_options(query.dtype, head_dim)
    tiles = math.ceil(queries / blocks["block_queries"])
    kind, lowest, first, last = "none", 0.0, None, None
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    seen_strides: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        mask = _plain(mask, keys)
        kind, lowest = _kind_and_lowest(mask)
        first, last, _ = seen_ranges(mask, keys)
        mask_strides = mask.expand(batch, heads, queries, keys).stride()
        seen_strides = first.expand(batch, heads, queries).stride()
        mask = mask.view(torch.uint8) if kind == "bool" else mask
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _entropy_kernel[(tiles * batch * heads,)](
            query, key, mask, first, last, sink, entropy,
            scale * math.log2(math.e), 1 / scale, queries, keys, heads, heads // key.shape[1], tiles,
            *query.stride()[:3], *key.stride()[:3], *mask_strides, *seen_strides,
            causal=causal, mask_kind=kind, one_row=mask_strides[2] == 0, has_sink=sink is not None, hiding=lowest,
            head_dim=head_dim, **blocks,
        )  # fmt: skip
    return entropy


def reads(mask: Tensor) -> bool:
    """Return whether :func:`seen_ranges` runs here and takes this mask."""
    return mask.device.type == "cuda" and mask.dtype in MASKS and mask.numel() > 0 and _runs_on(mask.device)


def seen_ranges(mask: Tensor, keys: int, *, causal_queries: int | None = None) -> Tensor:
    """Return the first visible key of each row of a mask, the last one plus 1, and how many there are.

    The mask is read once, and the result ``[3, batch or 1, heads or 1, query or 1]`` is int32. A row that sees no key has the
    number of keys as its first one and 0 as its last.

    Args:
        mask: See :func:`gates.scores.attention.attention_entropy`.
        keys: The number of keys.
        causal_queries: The number of queries of causal attention, in which row i sees the keys 0 to i alone; None if it is not.
    """
    mask = _plain(mask, keys)
    kind, lowest = _kind_and_lowest(mask)
    rows = mask if causal_queries is None else mask.expand(-1, -1, causal_queries, -1)
    seen = torch.empty(3, *rows.shape[:3], dtype=torch.int32, device=mask.device)
    with torch.cuda.device_of(mask):
        _seen_kernel[(math.prod(rows.shape[:2]) * math.ceil(rows.shape[2] / 16),)](
            rows.view(torch.uint8) if kind == "bool" else rows, seen, seen[0].numel(), *rows.shape[1:], *rows.stride(),
            causal=causal_queries is not None, mask_kind=kind, hiding=lowest, block_queries=16,
        )  # fmt: skip
    return seen


def _plain(mask: Tensor, keys: int) -> Tensor:
    """Return a mask with all keys and without repeated texts, heads and rows."""
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride()[:3])
    mask = mask[once][..., :keys]
    return mask.expand(*mask.shape[:-1], keys)


def _kind_and_lowest(mask: Tensor) -> tuple[str, float]:
    """Return which kind of mask the kernel reads, and the value that hides a key."""
    return ("bool", 0.0) if mask.dtype == torch.bool else ("summand", torch.finfo(mask.dtype).min)


def launch_options(dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    """Return the sizes of tiles, and how many warps work on one.

    Powers of two and the sums after them take as long as the product, so they decide. They are computed in registers. A tile of
    128 queries and 64 keys gives each thread of 8 warps 32 scores of 2 queries. That takes about 128 registers at most, so two
    programs share a multiprocessor: one multiplies while the other one sums. With 128 keys it would take up to 219. Shared
    memory holds the queries and two or three tiles of keys and masks. It must stay below 99 KB, the limit of all GPUs since
    8.0. So there are two tiles from 128 features on, and smaller ones with 256.

    Tensor cores would round float32 to TF32, so its products are sums of ordinary multiplications. These keep their operands in
    registers, and 64 features at once would spill them. So queries and keys are read 16 features at a time. With 168 registers
    three programs of 4 warps share a multiprocessor.
    """
    features = max(16, 1 << (head_dim - 1).bit_length())
    options: dict[str, Any] = {"width": features, "enable_fp_fusion": True}
    if dtype == torch.float32:
        return options | {"block_queries": 64, "block_keys": 64, "part_width": 16, "num_warps": 4, "num_stages": 3}
    options |= {"part_width": features, "num_stages": 3 if features < 128 else 2}
    if features <= 128:
        return options | {"block_queries": 128, "block_keys": 64, "num_warps": 8}
    return options | {"block_queries": 64, "block_keys": 32, "num_warps": 4}


@_jit
def _seen_kernel(  # type: ignore[no-untyped-def]
    mask, seen, number, heads, rows, keys, mask_b, mask_h, mask_row, mask_key,
    causal: tl.constexpr, mask_kind: tl.constexpr, hiding: tl.constexpr, block_queries: tl.constexpr,
):  # fmt: skip
    """Find the visible keys of block_queries rows of a mask: the first, the last plus 1, and their number."""
    tiles = tl.cdiv(rows, block_queries)
    which = tl.program_id(0) // tiles  # of the texts and heads
    row = tl.program_id(0) % tiles * block_queries + tl.arange(0, block_queries)
    mask += (which // heads).to(tl.int64) * mask_b + (which % heads).to(tl.int64) * mask_h
    read = mask + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * mask_row
    first = tl.zeros([block_queries], tl.int32) + keys
    last = tl.zeros([block_queries], tl.int32)
    count = tl.zeros([block_queries], tl.int32)
    stop = tl.minimum(keys, tl.max(row, 0) + 1) if causal else keys
    for start in range(0, stop, 256):
        cols = (start + tl.arange(0, 256))[None, :]
        there = (cols <= row[:, None]) & (cols < keys) if causal else cols < keys
        values = tl.load(read + cols.to(tl.int64) * mask_key, mask=there, other=0)
        visible = (values != 0 if mask_kind == "bool" else values.to(tl.float32) > hiding) & there
        first = tl.minimum(first, tl.min(tl.where(visible, cols, keys), 1))
        last = tl.maximum(last, tl.max(tl.where(visible, cols + 1, 0), 1))
        count += tl.sum(visible.to(tl.int32), 1)
    store = seen + which.to(tl.int64) * rows + row
    tl.store(store, first, mask=row < rows)
    tl.store(store + number, last, mask=row < rows)
    tl.store(store + 2 * number, count, mask=row < rows)


@_jit
def _entropy_kernel(  # type: ignore[no-untyped-def]
    query, key, mask, seen_first, seen_last, sink, entropy,
    scale, one_over_scale, queries, keys, heads, group, tiles,
    query_b, query_h, query_row, key_b, key_h, key_row, mask_b, mask_h, mask_row, mask_key, seen_b, seen_h, seen_row,
    causal: tl.constexpr, mask_kind: tl.constexpr, one_row: tl.constexpr, has_sink: tl.constexpr, hiding: tl.constexpr,
    head_dim: tl.constexpr, width: tl.constexpr, part_width: tl.constexpr,
    block_queries: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    """Compute the entropies of block_queries queries of one head. The scale contains the factor from nats to bits."""
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # the last queries first: they see the most keys of causal attention
    batch = (program // tiles // heads).to(tl.int64)  # offsets may be beyond 2**31
    head = (program // tiles % heads).to(tl.int64)
    start = tile * block_queries
    rows = start + tl.arange(0, block_queries)
    real = rows < queries
    features = tl.arange(0, width)
    key += batch * key_b + head // group * key_h
    queried = query + batch * query_b + head * query_h + rows.to(tl.int64)[:, None] * query_row
    if part_width == width:
        queried = tl.load(queried + features[None, :], mask=real[:, None] & (features < head_dim)[None, :], other=0.0)

    lowest: tl.constexpr = -3.4028234663852886e38  # finite, so that differences are numbers where a row sees no key
    top = tl.full([block_queries], lowest, tl.float32)
    total = tl.zeros([block_queries], tl.float32)
    weighted = tl.zeros([block_queries], tl.float32)
    if has_sink:
        top = tl.maximum(top, tl.load(sink + head).to(tl.float32) * 1.4426950408889634)
        total += 1.0

    first = 0
    last = tl.cdiv(tl.minimum(keys, start + block_queries) if causal else keys, block_keys)
    if mask_kind == "none":
        # Tiles whose keys are all seen by all queries, without the checks.
        clear = (tl.minimum(keys, start + 1) if causal else keys) // block_keys
        top, total, weighted = _over_keys(
            top, total, weighted, queried, key, mask, rows, first, clear, queries, keys, key_row, mask_key, scale,
            one_over_scale, False, causal, mask_kind, hiding, head_dim, width, part_width, block_queries, block_keys,
        )  # fmt: skip
        first = clear
    else:
        mask += batch * mask_b + head * mask_h
        if not one_row:
            mask = mask + tl.minimum(rows, queries - 1).to(tl.int64)[:, None] * mask_row
        seen = batch * seen_b + head * seen_h + rows * seen_row
        first = tl.min(tl.load(seen_first + seen, mask=real, other=keys), 0) // block_keys
        last = tl.minimum(last, tl.cdiv(tl.max(tl.load(seen_last + seen, mask=real, other=0), 0), block_keys))
    top, total, weighted = _over_keys(
        top, total, weighted, queried, key, mask, rows, first, last, queries, keys, key_row, mask_key, scale, one_over_scale,
        True, causal, mask_kind, hiding, head_dim, width, part_width, block_queries, block_keys,
    )  # fmt: skip

    found = (tl.log2(total) - weighted / total) * 0.6931471805599453
    found = tl.where((total == 0) | (found < 0), 0.0, found)  # NaN stays NaN
    tl.store(entropy + (batch * heads + head) * queries + rows, found, mask=real)


@_jit
def _over_keys(  # type: ignore[no-untyped-def]
    top, total, weighted, queried, key, mask, rows, first, last, queries, keys, key_row, mask_key, scale, one_over_scale,
    hides: tl.constexpr, causal: tl.constexpr, mask_kind: tl.constexpr, hiding: tl.constexpr,
    head_dim: tl.constexpr, width: tl.constexpr, part_width: tl.constexpr,
    block_queries: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    """Add some tiles of keys to the maximum, the sum and the weighted sum.

    ``queried`` has the queries, or their places where ``part_width`` features are read at a time. ``hides`` says whether some
    keys may be invisible, or not there.
    """
    features = tl.arange(0, part_width)
    for tile in range(first, last):
        cols = tile * block_keys + tl.arange(0, block_keys)
        read = key + cols.to(tl.int64)[:, None] * key_row + features[None, :]
        there = (cols < keys)[:, None] if hides else cols[:, None] >= 0
        if part_width == width:
            keyed = tl.load(read, mask=there & (features < head_dim)[None, :], other=0.0)
            scores = tl.dot(queried, tl.trans(keyed), input_precision="ieee")
        else:
            scores = tl.zeros([block_queries, block_keys], tl.float32)
            for part in range(0, width, part_width):
                inside = (part + features < head_dim)[None, :]
                some = tl.load(queried + (part + features)[None, :], mask=(rows < queries)[:, None] & inside, other=0.0)
                keyed = tl.load(read + part, mask=there & inside, other=0.0)
                scores = tl.dot(some, tl.trans(keyed), scores, input_precision="ieee")
        if hides:
            visible = (cols < keys)[None, :]
            if mask_kind != "none":
                values = tl.load(mask + cols.to(tl.int64)[None, :] * mask_key, mask=visible, other=0)
                if mask_kind == "bool":
                    visible = visible & (values != 0)
                else:
                    visible = visible & (values.to(tl.float32) > hiding)
                    scores += values.to(tl.float32) * one_over_scale
            if causal:
                visible = visible & (cols[None, :] <= rows[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        apart = scores * scale - higher[:, None]
        if hides:  # a finite number whose power is 0, since 0 times infinity is none
            apart = tl.maximum(apart, -200.0, propagate_nan=tl.PropagateNan.ALL)
        power = tl.exp2(apart)
        fall = tl.maximum(top - higher, -200.0)
        weighted = tl.exp2(fall) * (weighted + fall * total) + tl.sum(power * apart, 1)
        total = tl.exp2(fall) * total + tl.sum(power, 1)
        top = higher
    return top, total, weighted
