"""The memory that gates on large language models need, by arithmetic, and the largest model that fits here, tried.

With frozen weights there are no gradients and moments of weights. A gate takes 16 bytes: itself, its gradient and AdamW's two
moments in float32. Activations come on top.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gates import GateConfig, get_gated_model
from tools.benchmark.memory import peak_megabytes
from tools.benchmark.setting import Row, Setting, Size, cell
from tools.benchmark.steps import BUDGET, stepping

BYTES = {"float32": 4, "bfloat16": 2}
MODELS = {
    "tiny": (2, 4, 2, 64, 128),
    "0.1B": (12, 12, 12, 768, 2048),
    "1.1B (as TinyLlama)": (22, 32, 4, 2048, 5632),
    "3.4B (as OpenLLaMA)": (26, 32, 32, 3200, 8640),
    "7B (as Llama 2)": (32, 32, 32, 4096, 11008),
    "13B (as Llama 2)": (40, 40, 40, 5120, 13824),
    "70B (as Llama 2)": (80, 64, 8, 8192, 28672),
}
"""Layers, query heads, key heads, width and width of the feed-forward block by name."""


def config_of(name: str) -> LlamaConfig:
    layers, heads, key_heads, width, inner = MODELS[name]
    return LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, dtype=torch.bfloat16,
    )  # fmt: skip


def parameters_of(name: str) -> int:
    with torch.device("meta"):
        return LlamaForCausalLM(config_of(name)).num_parameters()


def gigabytes(name: str, dtype: str, copies: int = 1) -> float:
    """Return the memory to train the gates alone; with four copies, which are gradients and two moments too, all weights."""
    layers, heads, *_ = MODELS[name]
    return (copies * BYTES[dtype] * parameters_of(name) + 16 * layers * heads) / 1e9


def measure_large(setting: Setting) -> list[Row]:
    """Return a row for each model and precision. The largest that fits is tried in bfloat16."""
    names = ["tiny"] if setting.quick else [name for name in MODELS if name != "tiny"]
    spare = 4 if setting.device == "cpu" else 8  # for activations, and on a CPU for other programs
    fitting = [name for name in names if gigabytes(name, "bfloat16") <= free_gigabytes(setting.on) - spare]
    return [
        {
            "model": name,
            "parameters": parameters_of(name),
            "gates": MODELS[name][0] * MODELS[name][1],
            "dtype": dtype,
            "weights_gb": parameters_of(name) * BYTES[dtype] / 1e9,
            "frozen_gb": gigabytes(name, dtype),
            "full_gb": gigabytes(name, dtype, copies=4),
            **(_tried(setting, name) if name in fitting[-1:] and dtype == "bfloat16" else {"tried": "no"}),
        }
        for name in names
        for dtype in BYTES
    ]


def _tried(setting: Setting, name: str) -> Row:
    times = setting.times(f"gates on {name}", {"gated": prepare_frozen(setting, name)}, turns=3, warm_up=1)
    gc.collect()  # model and hooks refer to each other, and another process builds the model once more
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    peak = peak_megabytes(f"gates on {name}", setting, prepare_frozen, setting, name)
    measured = None if peak is None else peak * 2**20 / 1e9
    return {"tried": "1 x 128", "measured_gb": measured, "step_ms": cell(times.milliseconds("gated"))}


def prepare_frozen(setting: Setting, name: str) -> Callable[[], None]:
    """Return a step of the gates on frozen random weights in bfloat16, with one text of 128 tokens."""
    with setting.on:
        model = LlamaForCausalLM._from_config(config_of(name))
    gated = get_gated_model(model.requires_grad_(False), GateConfig(budget=BUDGET)).train()
    ids = setting.batch_for(model, Size(1, 128))["input_ids"]
    return stepping(gated, torch.optim.AdamW([gated.gates.log_alpha], lr=0.05), {"input_ids": ids, "labels": ids})


def free_gigabytes(device: torch.device) -> float:
    """Return the free memory; 0 where the system does not tell it."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0]) / 1e9
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    found = re.search(r"^MemAvailable: *(\d+) kB", text, re.MULTILINE)
    return 1.024 * int(found[1]) / 1e6 if found else 0.0
