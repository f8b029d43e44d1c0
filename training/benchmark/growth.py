"""How the costs of gates and of scores grow with heads, layers and length, one of them varied at a time."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from gates import GateConfig, HeadGates, get_gated_model
from training.benchmark.alternate import Work, alternate_shown
from training.benchmark.scores import attend, head_scores
from training.benchmark.setting import Setting, Shape, random_classifier
from training.benchmark.size import Size
from training.benchmark.step import BUDGET, stepping

START, SIZE = Shape(layers=4, heads=8, width=256, vocabulary=1000), Size(8, 64)
VALUES = {"heads": (4, 8, 16, 32), "layers": (2, 4, 8, 16), "tokens": (32, 64, 128, 256)}


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each value, always with random models: heads of a layer of the same width, layers, or tokens of a text."""
    rows = []
    for varied, values in VALUES.items():
        for value in values[:2] if setting.quick else values:
            shape = replace(START, **{varied: value}) if varied != "tokens" else START
            size = replace(SIZE, length=value) if varied == "tokens" else SIZE
            times = alternate_shown(f"{value} {varied}", _work(setting, shape, size), setting.on, setting.effort)
            rows.append(
                {
                    "varied": varied,
                    "value": value,
                    "plain_ms": asdict(times.milliseconds("plain")),
                    "gated_ms": asdict(times.milliseconds("gated")),
                    "time_ratio": asdict(times.ratio("gated", "plain")),
                    "his_ms": asdict(times.milliseconds("his")),
                    "attention_ms": asdict(times.milliseconds("attention")),
                }
            )
    return rows


def _work(setting: Setting, shape: Shape, size: Size) -> dict[str, Work]:
    batch = setting.batch(size, shape.vocabulary)
    plain, under_gates, at_rest = (random_classifier(shape).to(setting.on) for _ in range(3))  # type: ignore[arg-type]
    gated = get_gated_model(under_gates, GateConfig(budget=BUDGET, draw_per="example"))
    gates = HeadGates(at_rest.eval())
    return {
        "plain": stepping(plain.train(), torch.optim.AdamW(plain.parameters(), lr=1e-5), batch),
        "gated": stepping(gated.train(), torch.optim.AdamW(gated.parameter_groups(1e-5, 1e-5)), batch),
        "his": lambda: head_scores(gates, batch),
        "attention": lambda: attend(at_rest, gates, batch),
    }
