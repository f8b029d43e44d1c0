"""Inputs of the entropy kernel with the exact sum in float64, on a GPU or in Triton's interpreter.

``TRITON_INTERPRET=1 python -m tests.gates.scores.kernel_cases`` prints the largest error of each case. The interpreter has to
be chosen before Triton is imported, so tests start a process for it.
"""

import json
import sys

import torch

from gates import AttentionEntropy, find_attention, observe_attention
from gates.scores import entropy_kernel
from tests import models

QUERIES, KEYS = 150, 170
"""More than a tile of queries and two of keys, and no multiples of them."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADS = 2
"""They share one head of keys."""


def masks(dtype):
    """Masks by name, each with whether attention is causal."""
    draw, place = torch.Generator().manual_seed(1), torch.arange(KEYS)
    right, left = place < torch.tensor([[KEYS], [90]]), place >= torch.tensor([[0], [140]])
    window = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(20).triu(-30)
    document = place // 60  # three texts in a row
    bias = (torch.randn(1, HEADS, QUERIES, KEYS, generator=draw) * 3).to(dtype)
    return {
        "no mask": (None, False),
        "causal": (None, True),
        "padded": (right[:, None, None], False),
        "padded, expanded": (right[:, None, None].expand(2, 1, QUERIES, KEYS), False),
        "causal, padded on the left": (left[:, None, None], True),  # whole tiles see no key
        "padded queries": ((torch.arange(QUERIES) < 100).view(1, 1, QUERIES, 1), False),
        "sliding window": (window[None, None], False),
        "packed documents": ((document[:QUERIES, None] == document)[None, None], False),
        "by heads, with keys to come": (torch.rand(2, HEADS, QUERIES, KEYS + 9, generator=draw) < 0.02, False),
        "summand": (bias, False),
        "summand, causal": (bias, True),
        "summand, padded": (bias.masked_fill(~right[:, None, None], torch.finfo(dtype).min), False),
        "summand that is low": (torch.where(window, 0.0, -1e4)[None, None].to(dtype), False),
        "summand that is infinite": (torch.where(window, 0.0, -torch.inf)[None, None].to(dtype), False),
    }


def cases():
    """The name, the query and key, and the other arguments of each case. Float16 takes the way of bfloat16."""
    for name, dtype in DTYPES.items():
        for mask_name, (mask, causal) in masks(dtype).items():
            if name != "float16" or mask_name in ("causal", "padded", "summand, padded"):
                yield f"{name}, {mask_name}", inputs(dtype), {"mask": mask, "causal": causal}
        yield f"{name}, large scores", inputs(dtype, spread=40.0), {}
        yield f"{name}, 80 features", inputs(dtype, features=80), {}
        yield f"{name}, sink", inputs(dtype), {"sink": torch.tensor([0.5, 30.0]), "causal": True}
        yield f"{name}, other strides", [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(dtype)], {}
    yield "bfloat16, 256 features", inputs(torch.bfloat16, features=256), {}
    yield "one query", [x[:, :, :1] for x in inputs(torch.bfloat16)], {}


def inputs(dtype, *, features=24, spread=2.0):
    draw = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, length, features, generator=draw) for heads, length in ((HEADS, QUERIES), (1, KEYS)))
    return (query * spread).to(dtype), key.to(dtype)


def exact(query, key, scale, mask=None, causal=False, sink=None):
    """The attention weights, with that of a sink last, and the numbers of visible keys, by their definitions."""
    scores = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    visible = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        mask = mask[..., : key.shape[2]]
        visible &= mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        scores = scores if mask.dtype == torch.bool else scores + mask.double()
    visible = visible.tril() if causal else visible
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1).nan_to_num(0.0), visible[:, :1].sum(-1)


def errors(device):
    """The largest error of each case; infinite where the numbers of visible keys are wrong."""
    found = {}
    for name, (query, key), more in cases():
        more = {what: value.to(device) if isinstance(value, torch.Tensor) else value for what, value in more.items()}
        query, key = query.to(device), key.to(device)
        weights, counts = exact(query, key, 0.3, **more)
        entropies = torch.special.entr(weights).sum(-1)
        error = (entropy_kernel.kernel_entropy(query, key, 0.3, **more) - entropies).abs().max()
        if more.get("mask") is not None:
            ranges = entropy_kernel.seen_ranges(more["mask"][:, :1], KEYS, causal_queries=QUERIES if more["causal"] else None)
            error = error if torch.equal(ranges[2].expand_as(counts), counts.int()) else torch.tensor(torch.inf)
        found[name] = float(error)
    return found


def interpreted_bfloat16():
    """Let the interpreter multiply bfloat16, which it takes for integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    dot = Builder.create_dot

    def widened(self, a, b, *more):
        return dot(self, *(self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *more)

    Builder.create_dot = widened


def observed():
    """The scores of a model with grouped queries and padding by the kernel, and by PyTorch's kernels."""
    found = []
    for runs in (False, True):
        entropy_kernel.supports = lambda query, key, scale, mask, runs=runs, **more: (
            runs and entropy_kernel.fits(query, key, scale, mask, **more)
        )
        entropy_kernel.reads = lambda mask, runs=runs: runs
        model, batch = models.build("llama"), models.inputs("llama")
        entropy = AttentionEntropy(sites := find_attention(model))
        with torch.no_grad(), observe_attention(model, sites, [entropy], {"decoder": batch["attention_mask"]}):
            model(**batch)
        found.append(entropy.compute())
    return float((found[0] - found[1]).abs().max())


if __name__ == "__main__":
    interpreted_bfloat16()
    query, _ = inputs(torch.float32)
    query[0, 0, 3] = torch.nan
    unknown = entropy_kernel.kernel_entropy(query, inputs(torch.float32)[1], 0.3).isnan().nonzero().tolist()
    json.dump({"errors": errors(torch.device("cpu")), "unknown": unknown, "observed": observed()}, sys.stdout)
