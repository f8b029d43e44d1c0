"""Measure how costs grow with heads, layers, length and texts."""

from __future__ import annotations

from dataclasses import replace

import torch

from gates import GateConfig, HeadGates, get_gated_model
from tools.benchmark.scores import attend, head_scores
from tools.benchmark.setting import Row, Setting, Shape, Size, cell, columns, random_classifier
from tools.benchmark.steps import BUDGET, PROGRESS, stepping
from training.latency import Work

START, SIZE = Shape(layers=4, heads=8, width=256, vocabulary=1000), Size(8, 64)
VALUES = {"heads": (4, 8, 16, 32), "layers": (2, 4, 8, 16, 32), "tokens": (32, 64, 128, 256)}


def measure_growth(setting: Setting) -> list[Row]:
    """Return a row for each value of heads, layers and tokens."""
    rows = []
    for varied, values in VALUES.items():
        for value in values[:2] if setting.quick else values:
            shape = START if varied == "tokens" else replace(START, **{varied: value})
            size = Size(SIZE.batch, value) if varied == "tokens" else SIZE
            times = setting.times(f"{value} {varied}", _work(setting, shape, size))
            row = columns(times, *times.of, time_ratio=("gated", "plain"))
            rows.append({"varied": varied, "value": value} | row | {"more_ms": cell(times.difference("gated", "plain"))})
    return rows


def _work(setting: Setting, shape: Shape, size: Size) -> dict[str, Work]:
    batch = setting.batch(size, shape.vocabulary)
    plain, under_gates, scored = (random_classifier(shape).to(setting.on) for _ in range(3))  # type: ignore[arg-type]
    gated, gates = get_gated_model(under_gates, GateConfig(budget=BUDGET)).train(), HeadGates(scored.eval())
    optimizer = torch.optim.AdamW(gated.parameter_groups(1e-5, 1e-5))
    return {
        "plain": stepping(plain.train(), torch.optim.AdamW(plain.parameters(), lr=1e-5), batch),
        "gated": stepping(gated, optimizer, batch),
        "steering": lambda: gated.step_(PROGRESS, optimizer),
        "his": lambda: head_scores(gates, batch),
        "attention": lambda: attend(scored, gates, batch),
    }
