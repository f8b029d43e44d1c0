"""Tokens per second and bytes of cache of a Llama-shaped random model, dense, pruned, and padded to a stock class."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gates.errors import first_line
from gates.export.checkpoint import load_pruned, save_pruned
from gates.export.cost import count_parameters, hardware
from gates.export.kv_cache import cache_bytes_of
from training.coverage.markdown import table
from training.coverage.writers import Way, Write, prepared
from training.runs import progress

LAYERS, HEADS, KEYS = 8, 16, 8
KEPT = (8, 6, 4, 2, 4, 2, 6, 4)
"""Heads that stay in each layer, by whole groups of two."""


@dataclass(frozen=True)
class Effort:
    """What is timed.

    Args:
        prompt, new: tokens that are read and written.
        repeats: timed calls of each, after one that is not.
    """

    prompt: int = 128
    new: int = 64
    repeats: int = 5


Cell = tuple[str, str]
"""A way to run a model and which one, ``dense``, ``pruned`` or ``padded``."""


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
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def kept_mask() -> Tensor:
    """:data:`KEPT` as a mask ``[heads]``: the first heads of each layer."""
    return torch.cat([(torch.arange(HEADS) < count).float() for count in KEPT])


def exports(folder: Path) -> dict[str, Path]:
    """The dense model, the same without the other heads, and padded with heads of zeros until all layers are equal."""
    made = {name: folder / name for name in ("dense", "pruned", "padded")}
    save_pruned(llama(), made["dense"], torch.ones(LAYERS * HEADS), form="stock", tokenizer=None)
    save_pruned(llama(), made["pruned"], kept_mask(), form="pruned", tokenizer=None)
    save_pruned(llama(), made["padded"], kept_mask(), form="stock", pad_heads=True, tokenizer=None)
    return made


def measure(cells: Mapping[Cell, Write | str], batch_size: int, effort: Effort) -> dict[Cell, str]:
    """What stands in the table: tokens written per second, the median over calls in turn, or why there are none.

    Args:
        cells: what writes, or why nothing does.
        batch_size: texts at a time.
        effort: how much they read and write, and how often.
    """
    ids = torch.randint(3, 1000, (batch_size, effort.prompt), generator=torch.Generator().manual_seed(1))
    found = dict(cells)
    seconds: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for turn in progress.track(range(effort.repeats + 1), f"timing batches of {batch_size}"):
        for cell in list(found) if turn % 2 else reversed(list(found)):
            write = found[cell]
            if isinstance(write, str):
                continue
            start = time.perf_counter()
            try:
                write(ids, effort.new)
            except Exception as error:  # of any library; the message is what the table is for
                found[cell] = f"no: {type(error).__name__}: {first_line(error)}"
            if turn:
                seconds[cell].append(time.perf_counter() - start)
    speeds = {cell: batch_size * effort.new / statistics.median(took) for cell, took in seconds.items() if took}
    return {cell: write if isinstance(write, str) else f"{speeds[cell]:.0f}" for cell, write in found.items()}


def speed_table(ways: Sequence[Way], batch_sizes: Sequence[int], effort: Effort) -> list[str]:
    """Lines of Markdown: the models, a row for each way to run them, and what they were measured on."""
    with tempfile.TemporaryDirectory() as folder:
        models = exports(Path(folder))
        cells: dict[Cell, Write | str] = {}
        for way in progress.track(ways, "preparing", name_of=lambda one: one.name):
            cells.update({(way.name, name): prepared(way, export) for name, export in models.items()})
        found = {size: measure(cells, size, effort) for size in batch_sizes}
        columns = [(name, size) for size in batch_sizes for name in models]
        rows = [[way.name, *(found[size][way.name, name] for name, size in columns)] for way in ways]
        return [
            *_sizes(models),
            "",
            *table(["tokens / s", *(f"{name}, batch {size}" for name, size in columns)], rows),
            "",
            f"{effort.prompt} tokens read, {effort.new} written, greedily, float32, on {hardware(torch.device('cpu'))}.",
            f"Medians of {effort.repeats} calls in turn. Whatever else the machine did slowed all, so compare them with each",
            "other alone.",
        ]


def _sizes(models: Mapping[str, Path]) -> list[str]:
    loaded = {name: load_pruned(export) for name, export in models.items()}
    rows = [[name, f"{count_parameters(model):,}", f"{cache_bytes_of(model):,}"] for name, model in loaded.items()]
    return table(["model", "parameters", "bytes of KV cache per token"], rows)
