"""bfloat16 autocast against float32: how long a step, a forward pass and exact HIS take, and how far what they give differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gates import HeadGates
from training.benchmark.alternate import Work, alternate_shown
from training.benchmark.scores import head_scores, losses_of
from training.benchmark.setting import Setting
from training.benchmark.size import Size
from training.benchmark.step import prepare_step

FLOAT32, BFLOAT16 = "float32", "bfloat16"
Pass = Callable[[], Tensor]


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each model and size, and for a gated training step, a forward pass and exact HIS."""
    rows = []
    for kind in setting.kinds:
        for size in setting.sizes:
            steps: dict[str, Work] = {
                name: prepare_step(setting, kind, size, gated=True, compiled=False, bfloat16=name == BFLOAT16)
                for name in (FLOAT32, BFLOAT16)
            }
            rows.append(_row(setting, kind, size, "a gated training step", steps))
            for what, exact in passes(setting, kind, size).items():
                both = {FLOAT32: exact, BFLOAT16: in_bfloat16(exact, setting.device)}
                rows.append(_row(setting, kind, size, what, both) | {"difference": distance(both[FLOAT32](), both[BFLOAT16]())})
    return rows


def passes(setting: Setting, kind: str, size: Size) -> dict[str, Pass]:
    """Ways over one batch in evaluation mode, with what they give: the losses of a forward pass, ``[batch]``, and the gradients
    that exact HIS is made of, ``[batch, heads]``."""
    model = setting.trained(kind).eval()
    batch, gates = setting.batch_for(model, size, kind), HeadGates(model)

    @torch.no_grad()
    def forward() -> Tensor:
        return losses_of(model, batch)

    return {"a forward pass": forward, "exact HIS": lambda: head_scores(gates, batch)}


def in_bfloat16(exact: Pass, device: str) -> Pass:
    """The same under autocast."""

    def rounded() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return exact()

    return rounded


def distance(exact: Tensor, rounded: Tensor) -> float:
    """Root mean square of the differences, as a share of that of the exact ones."""
    return float(torch.linalg.vector_norm(rounded.float() - exact) / torch.linalg.vector_norm(exact))


def _row(setting: Setting, kind: str, size: Size, what: str, work: dict[str, Any]) -> dict[str, Any]:
    times = alternate_shown(f"{what} of the {kind}, {size}", work, setting.on, setting.effort)
    return {
        "model": kind,
        "size": str(size),
        "what": what,
        "float32_ms": asdict(times.milliseconds(FLOAT32)),
        "bfloat16_ms": asdict(times.milliseconds(BFLOAT16)),
        "time_ratio": asdict(times.ratio(BFLOAT16, FLOAT32)),
    }
