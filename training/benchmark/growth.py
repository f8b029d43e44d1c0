"""How the costs of gates and of scores grow: with heads, layers and length, those of scores also with texts and processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gates import GateConfig, HeadGates, get_gated_model
from training.benchmark.alternate import Times, Work, alternate_shown, as_cell
from training.benchmark.models import Shape, random_classifier
from training.benchmark.scores import attend, head_scores
from training.benchmark.setting import Setting
from training.benchmark.shared_out import PROCESSES, share_out
from training.benchmark.size import Size
from training.benchmark.step import BUDGET, PROGRESS, stepping

START, SIZE = Shape(layers=4, heads=8, width=256, vocabulary=1000), Size(8, 64)
VALUES = {"heads": (4, 8, 16, 32), "layers": (2, 4, 8, 16, 32), "tokens": (32, 64, 128, 256)}
BATCHES = (1, 2, 4, 8)
"""That are scored, of :data:`SIZE`."""


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each value, always with random models: heads of a layer of the same width, layers, tokens of a text, texts that
    are scored; on a CPU also processes that score as many texts together."""
    rows = []
    for varied, values in VALUES.items():
        for value in values[:2] if setting.quick else values:
            shape = replace(START, **{varied: value}) if varied != "tokens" else START
            size = replace(SIZE, length=value) if varied == "tokens" else SIZE
            times = alternate_shown(f"{value} {varied}", _work(setting, shape, size), setting.on, setting.effort)
            rows.append(_row(varied, value, times))
    for batches in BATCHES[:2] if setting.quick else BATCHES:
        texts = batches * SIZE.batch
        times = alternate_shown(f"{texts} texts", _scoring(setting, batches), setting.on, setting.effort)
        rows.append(_row("texts scored", texts, times))
    if setting.device == "cpu":
        times = share_out(START, SIZE, BATCHES[-1], setting.effort)
        rows += [_row("processes", count, Times({"his": times.of[f"{count}"]})) for count in PROCESSES]
    return rows


def _row(varied: str, value: int, times: Times) -> dict[str, Any]:
    def cell(name: str) -> dict[str, float] | None:
        return as_cell(times.milliseconds(name)) if name in times.of else None

    return {
        "varied": varied,
        "value": value,
        "plain_ms": cell("plain"),
        "gated_ms": cell("gated"),
        "time_ratio": as_cell(times.ratio("gated", "plain")) if "gated" in times.of else None,
        "more_ms": as_cell(times.difference("gated", "plain")) if "gated" in times.of else None,
        "steering_ms": cell("steering"),
        "his_ms": cell("his"),
        "attention_ms": cell("attention"),
    }


def _work(setting: Setting, shape: Shape, size: Size) -> dict[str, Work]:
    batch = setting.batch(size, shape.vocabulary)
    plain, under_gates = (random_classifier(shape).to(setting.on) for _ in range(2))  # type: ignore[arg-type]
    gated = get_gated_model(under_gates, GateConfig(budget=BUDGET)).train()
    optimizer = torch.optim.AdamW(gated.parameter_groups(1e-5, 1e-5))
    return {
        "plain": stepping(plain.train(), torch.optim.AdamW(plain.parameters(), lr=1e-5), batch),
        "gated": stepping(gated, optimizer, batch),
        "steering": lambda: gated.step_(PROGRESS, optimizer),
        **_scoring(setting, 1, shape, size),
    }


def _scoring(setting: Setting, batches: int, shape: Shape = START, size: Size = SIZE) -> dict[str, Work]:
    """Scores of so many batches, which are the same one."""
    model = random_classifier(shape).to(setting.on).eval()  # type: ignore[arg-type]
    gates, batch = HeadGates(model), setting.batch(size, shape.vocabulary)

    def attended() -> None:
        for _ in range(batches):
            attend(model, gates, batch)

    return {
        "his": lambda: [head_scores(gates, batch) for _ in range(batches)],
        "attention": attended,
    }
