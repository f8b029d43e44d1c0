"""A training step with gates against one without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from gates import GateConfig, GatedModel, get_gated_model
from training.benchmark.alternate import alternate_shown
from training.benchmark.memory import peak_megabytes, ratio
from training.benchmark.setting import Setting
from training.benchmark.size import Size

BUDGET = 0.5
PROGRESS = 0.5
"""Of the pruning: the gates are on their way, drawn and held to the budget in every step."""


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each size, uncompiled and compiled."""
    rows = []
    for compiled in (False, True):
        for size in (setting.compiled_size,) if compiled else setting.sizes:
            what = f"a training step, {size}{', compiled' * compiled}"
            work = {name: prepare_step(setting, size, name == "gated", compiled) for name in ("plain", "gated")}
            times = alternate_shown(what, work, setting.on, setting.effort)
            del work
            known = setting.device == "cuda" or not compiled  # on a CPU the compiler's own memory would be most of it
            plain, gated = (
                peak_megabytes(what, setting.on, setting.threads, prepare_step, setting, size, is_gated, compiled)
                if known
                else None
                for is_gated in (False, True)
            )
            rows.append(
                {
                    "size": str(size),
                    "compiled": "yes" if compiled else "no",
                    "plain_ms": asdict(times.milliseconds("plain")),
                    "gated_ms": asdict(times.milliseconds("gated")),
                    "time_ratio": asdict(times.ratio("gated", "plain")),
                    "plain_mb": plain,
                    "gated_mb": gated,
                    "memory_ratio": ratio(gated, plain),
                }
            )
    return rows


def prepare_step(setting: Setting, size: Size, gated: bool, compiled: bool) -> Callable[[], None]:
    """Forward, backward and AdamW on one batch, with dropout; with gates also what leads them to their budget."""
    model: Any = setting.classifier().train()
    batch = setting.batch(size, model.config.get_text_config().vocab_size)
    if not gated:
        return stepping(model, torch.optim.AdamW(model.parameters(), lr=1e-5), batch, compiled=compiled)
    model = get_gated_model(model, GateConfig(budget=BUDGET, draw_per="example")).train()
    model(**batch)  # the hooks' own checks, once, which are no part of a step
    return stepping(model, torch.optim.AdamW(model.parameter_groups(1e-5, 1e-5)), batch, compiled=compiled)


def stepping(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], *, compiled: bool = False
) -> Callable[[], None]:
    """Steps of a model, with gates or without."""
    run: Any = torch.compile(model) if compiled else model

    def step() -> None:
        run(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, GatedModel):
            model.step_(PROGRESS, optimizer)

    return step
