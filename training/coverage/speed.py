"""Tokens per second and bytes of cache of a Llama-shaped random model, dense, pruned, and padded to a stock class."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gates.export.cost import count_parameters, hardware
from gates.export.kv_cache import cache_bytes_of
from gates.export.padding import pad_heads
from gates.surgery.remove import remove_heads_
from training.runs import progress

LAYERS, HEADS, KEYS = 8, 16, 8
KEPT = (8, 6, 4, 2, 4, 2, 6, 4)
"""Heads that stay in each layer, by whole groups of two."""
PROMPT, NEW = 128, 64
"""Tokens that are read and written."""


def llama() -> LlamaForCausalLM:
    """A random model of 8 layers with 16 heads of 32 features, two to a group."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        head_dim=32,
        intermediate_size=1024,
        vocab_size=1000,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def kept_mask() -> Tensor:
    """:data:`KEPT` as a mask ``[heads]``: the first heads of each layer."""
    return torch.cat([(torch.arange(HEADS) < count).float() for count in KEPT])


def systems() -> dict[str, PreTrainedModel]:
    """The dense model, the same without the other heads, and padded with heads of zeros until all layers are equal."""
    mask = kept_mask()
    padded = llama()
    return {
        "dense": llama(),
        "pruned": remove_heads_(llama(), mask),
        "padded": remove_heads_(padded, pad_heads(padded, mask), values=mask),
    }


def measure(models: Mapping[str, PreTrainedModel], batch_size: int, *, prompt: int, new: int, repeats: int) -> dict[str, float]:
    """Tokens written per second, by system: the median over calls of ``generate`` in turn.

    Args:
        models: by name, on one device.
        batch_size: texts at a time.
        prompt, new: tokens that are read and written.
        repeats: timed calls of each model, after one that is not.
    """
    ids = torch.randint(3, 1000, (batch_size, prompt), generator=torch.Generator().manual_seed(1))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in progress.track(range(repeats + 1), f"timing batches of {batch_size}"):
        for name in list(models) if turn % 2 else reversed(list(models)):
            took = _timed(models[name], ids.to(models[name].device), new)
            if turn:
                seconds[name].append(took)
    return {name: batch_size * new / statistics.median(took) for name, took in seconds.items()}


def _timed(model: PreTrainedModel, ids: Tensor, new: int) -> float:
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)  # type: ignore[operator]
    return time.perf_counter() - start


def speed_table(
    models: Mapping[str, PreTrainedModel], batch_sizes: Sequence[int], *, prompt: int = PROMPT, new: int = NEW, repeats: int = 5
) -> list[str]:
    """Lines of Markdown: a row for each system, and what they were measured on."""
    found = {size: measure(models, size, prompt=prompt, new=new, repeats=repeats) for size in batch_sizes}
    speeds = [f"tokens / s at batch size {size}" for size in batch_sizes]
    rows = [
        f"| {name} | {count_parameters(model):,} | {cache_bytes_of(model):,} | "
        + " | ".join(f"{found[size][name]:.0f}" for size in batch_sizes)
        + " |"
        for name, model in models.items()
    ]
    device = next(iter(models.values())).device
    return [
        f"| system | parameters | bytes of KV cache per token | {' | '.join(speeds)} |",
        "| --- | --: | --: |" + " --: |" * len(batch_sizes),
        *rows,
        "",
        f"{prompt} tokens read, {new} written, greedily, float32, on {hardware(device)}; medians of {repeats} calls in turn.",
        "Whatever else the machine did slowed all of them, so compare them with each other alone.",
    ]
