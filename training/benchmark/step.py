"""A training step with gates against one without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from gates import GateConfig, GatedModel, get_gated_model
from training.benchmark.alternate import alternate_shown, as_cell
from training.benchmark.memory import peaks_in_turn, ratio, spread_of
from training.benchmark.setting import Setting
from training.benchmark.size import Size

BUDGET = 0.5
PROGRESS = 0.5
"""Of the pruning: the gates are on their way, drawn and held to the budget in every step."""


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each model and size, uncompiled and compiled."""
    rows = []
    for kind in setting.kinds:
        for compiled in (False, True):
            rows += [_row(setting, kind, size, compiled) for size in ((setting.compiled_size,) if compiled else setting.sizes)]
    return rows


def _row(setting: Setting, kind: str, size: Size, compiled: bool) -> dict[str, Any]:
    what = f"a training step of the {kind}, {size}{', compiled' * compiled}"
    variants = {name: (prepare_step, (setting, kind, size, name == "gated", compiled)) for name in ("plain", "gated")}
    work = {name: prepare(*arguments) for name, (prepare, arguments) in variants.items()}
    times = alternate_shown(what, work, setting.on, setting.effort)
    del work
    known = setting.device == "cuda" or not compiled  # on a CPU the compiler's own memory would be most of it
    peaks = peaks_in_turn(what, setting.on, setting.threads, setting.memory_turns if known else 0, variants)
    return {
        "model": kind,
        "size": str(size),
        "compiled": "yes" if compiled else "no",
        "plain_ms": asdict(times.milliseconds("plain")),
        "gated_ms": asdict(times.milliseconds("gated")),
        "time_ratio": asdict(times.ratio("gated", "plain")),
        "plain_mb": as_cell(spread_of(peaks["plain"])),
        "gated_mb": as_cell(spread_of(peaks["gated"])),
        "memory_ratio": as_cell(ratio(peaks["gated"], peaks["plain"])),
    }


def prepare_step(
    setting: Setting, kind: str, size: Size, gated: bool, compiled: bool, *, bfloat16: bool = False
) -> Callable[[], None]:
    """Forward, backward and AdamW on one batch, with dropout; with gates also what leads them to their budget. With
    ``bfloat16`` the forward pass is under autocast, as ``--trainer.precision bf16-mixed`` has it."""
    model: Any = setting.trained(kind).train()
    batch = setting.batch_for(model, size, kind)
    if gated:
        model = get_gated_model(model, GateConfig(budget=BUDGET)).train()
        model(**batch)  # the hooks' own checks, once, which are no part of a step
    optimizer = torch.optim.AdamW(model.parameter_groups(1e-5, 1e-5) if gated else model.parameters(), lr=1e-5)
    return stepping(model, optimizer, batch, compiled=compiled, bfloat16=bfloat16)


def stepping(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    *,
    compiled: bool = False,
    bfloat16: bool = False,
) -> Callable[[], None]:
    """Steps of a model, with gates or without."""
    run: Any = torch.compile(model) if compiled else model
    device = batch["labels"].device.type

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, GatedModel):
            model.step_(PROGRESS, optimizer)

    return step
