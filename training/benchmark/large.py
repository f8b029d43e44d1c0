"""What gates on large language models need: arithmetic, and the largest model that fits here, tried.

Gates can be trained on weights that rest: then there are neither gradients nor moments of the weights, and a gate takes 16
bytes (itself, its gradient and AdamW's two moments, in float32). Activations come on top; they grow with batch and length.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gates import GateConfig, get_gated_model
from training.benchmark.alternate import alternate_shown
from training.benchmark.memory import peak_megabytes
from training.benchmark.setting import Setting
from training.benchmark.step import BUDGET, stepping

BYTES = {"float32": 4, "bfloat16": 2}
BYTES_PER_GATE = 16
COPIES = 4
"""Of the weights where all are trained: themselves, gradients and AdamW's two moments, which PyTorch keeps as precise."""
TOKENS = 128
MEMORY_INFO = Path("/proc/meminfo")
LEFT_FREE = {"cpu": 4e9, "cuda": 8e9}
"""Bytes that are left free beside the weights of the model that is tried: for activations, and on a CPU for others."""
TRIED_IN = "bfloat16"


@dataclass(frozen=True)
class Decoder:
    """A language model of the Llama family (Touvron et al. 2023), whose input and output embeddings are two.

    Args:
        name: in the table.
        layers: of attention and a gated feed-forward block.
        heads: queries of a layer.
        key_heads: keys and values of a layer.
        width: of the model.
        inner: width of the feed-forward block.
        vocabulary: tokens.
    """

    name: str
    layers: int
    heads: int
    key_heads: int
    width: int
    inner: int
    vocabulary: int = 32000

    @property
    def gates(self) -> int:
        return self.layers * self.heads

    @property
    def parameters(self) -> int:
        keys = self.key_heads * (self.width // self.heads)
        attention = 2 * self.width**2 + 2 * self.width * keys
        norms = 2 * self.width
        layer = attention + 3 * self.width * self.inner + norms
        return self.layers * layer + 2 * self.vocabulary * self.width + self.width


TINY = Decoder("tiny", 2, 4, 2, 64, 128, 1000)
LADDER = (
    Decoder("0.1B", 12, 12, 12, 768, 2048),
    Decoder("1.1B (as TinyLlama)", 22, 32, 4, 2048, 5632),
    Decoder("3.4B (as OpenLLaMA)", 26, 32, 32, 3200, 8640),
    Decoder("7B (as Llama 2)", 32, 32, 32, 4096, 11008),
    Decoder("13B (as Llama 2)", 40, 40, 40, 5120, 13824),
    Decoder("70B (as Llama 2)", 80, 64, 8, 8192, 28672),
)


def bytes_frozen(decoder: Decoder, dtype: str) -> int:
    """To train the gates alone, without activations: the weights and the gates with their moments."""
    return decoder.parameters * BYTES[dtype] + decoder.gates * BYTES_PER_GATE


def bytes_full(decoder: Decoder, dtype: str) -> int:
    """To train all weights too, without activations."""
    return COPIES * decoder.parameters * BYTES[dtype] + decoder.gates * BYTES_PER_GATE


def largest_fitting(dtype: str, memory: float) -> Decoder | None:
    """The largest model whose gates can be trained alone in so many bytes."""
    fitting = [decoder for decoder in LADDER if bytes_frozen(decoder, dtype) <= memory]
    return max(fitting, key=lambda decoder: decoder.parameters, default=None)


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each model and precision; the largest that fits was tried."""
    memory = free_bytes(setting.on) - LEFT_FREE[setting.device]
    tried = TINY if setting.quick else largest_fitting(TRIED_IN, memory)
    decoders = (TINY,) if setting.quick else LADDER
    return [
        {
            "model": decoder.name,
            "parameters": decoder.parameters,
            "gates": decoder.gates,
            "dtype": dtype,
            "weights_gb": decoder.parameters * BYTES[dtype] / 1e9,
            "frozen_gb": bytes_frozen(decoder, dtype) / 1e9,
            "full_gb": bytes_full(decoder, dtype) / 1e9,
            **(_tried(setting, decoder, dtype) if decoder == tried and dtype == TRIED_IN else {"tried": "no"}),
        }
        for decoder in decoders
        for dtype in BYTES
    ]


def _tried(setting: Setting, decoder: Decoder, dtype: str) -> dict[str, Any]:
    what = f"gates on {decoder.name}"
    work = {"gated": prepare_frozen(setting, decoder, dtype)}
    times = alternate_shown(what, work, setting.on, replace(setting.effort, turns=3, warm_up=1))
    del work
    gc.collect()  # model and hooks refer to each other, and the process that measures memory makes the model once more
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    peak = peak_megabytes(what, setting.on, setting.threads, prepare_frozen, setting, decoder, dtype)
    return {
        "tried": f"1 x {TOKENS}",
        "measured_gb": None if peak is None else peak * 2**20 / 1e9,
        "step_ms": asdict(times.milliseconds("gated")),
    }


def prepare_frozen(setting: Setting, decoder: Decoder, dtype: str) -> Callable[[], None]:
    """A step of the gates on random weights that rest, one text of :data:`TOKENS`."""
    config = LlamaConfig(
        vocab_size=decoder.vocabulary, hidden_size=decoder.width, intermediate_size=decoder.inner,
        num_hidden_layers=decoder.layers, num_attention_heads=decoder.heads, num_key_value_heads=decoder.key_heads,
        dtype=getattr(torch, dtype),
    )  # fmt: skip
    with setting.on:
        model = LlamaForCausalLM._from_config(config)
    gated = get_gated_model(model.requires_grad_(False), GateConfig(budget=BUDGET)).train()
    ids = torch.randint(decoder.vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0)).to(setting.on)
    return stepping(gated, torch.optim.AdamW([gated.gates.log_alpha], lr=0.05), {"input_ids": ids, "labels": ids})


def free_bytes(device: torch.device) -> float:
    """Memory that nobody uses now; 0 where the system does not tell it."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if not MEMORY_INFO.exists():
        return 0.0
    lines = [line.split() for line in MEMORY_INFO.read_text().splitlines() if line.startswith("MemAvailable:")]
    return 1024.0 * int(lines[0][1]) if lines else 0.0
