"""Measure how costs grow with heads, layers, length and texts, and the cost of a comparison's scoring methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates import GateConfig, HeadGates, get_gated_model
from tools.benchmark.scores import attend, head_scores
from tools.benchmark.setting import Row, Setting, Shape, Size, cell, columns, random_classifier
from tools.benchmark.steps import BUDGET, PROGRESS, stepping
from training.latency import Times, Work
from training.runs.cost import measured
from training.scoring.passes import PASSES
from training.scoring.scorers import SCORERS, Scores
from training.scoring.subject import ScoringContext
from training.tasks import Classification, Task

START, SIZE = Shape(layers=4, heads=8, width=256, vocabulary=1000), Size(8, 64)
VALUES = {"heads": (4, 8, 16, 32), "layers": (2, 4, 8, 16, 32), "tokens": (32, 64, 128, 256), "batches": (1, 2, 4, 8)}


def measure_growth(setting: Setting) -> list[Row]:
    """Return a row for each value of heads, layers, tokens and batches that are scored."""
    rows = []
    for varied, values in VALUES.items():
        for value in values[:2] if setting.quick else values:
            if varied == "batches":
                texts = value * SIZE.batch
                rows.append(_growth_row("texts scored", texts, setting.times(f"{texts} texts", _scoring(setting, value))))
                continue
            shape = START if varied == "tokens" else replace(START, **{varied: value})
            size = Size(SIZE.batch, value) if varied == "tokens" else SIZE
            rows.append(_growth_row(varied, value, setting.times(f"{value} {varied}", _work(setting, shape, size))))
    return rows


def _growth_row(varied: str, value: int, times: Times) -> Row:
    row: Row = {"varied": varied, "value": value}
    row |= columns(times, "plain", "gated", "steering", "his", "attention", time_ratio=("gated", "plain"))
    return row | ({"more_ms": cell(times.difference("gated", "plain"))} if "gated" in times.of else {})


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
    model = random_classifier(shape).to(setting.on).eval()  # type: ignore[arg-type]
    gates, batch = HeadGates(model), setting.batch(size, shape.vocabulary)

    def attended() -> None:
        for _ in range(batches):
            attend(model, gates, batch)

    return {"his": lambda: [head_scores(gates, batch) for _ in range(batches)], "attention": attended}


class Scored(nn.Module):
    """A model in evaluation mode with its gates and its task, as a comparison scores it."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.gates = HeadGates(backbone).attach()
        self.task: Task = Classification(["no", "yes"])

    @property
    def device(self) -> torch.device:
        return self.backbone.device


def measure_methods(setting: Setting) -> list[Row]:
    """Return a row for each pass over the data that scores are made of, against training on the same batches."""
    return [_method_row(setting, name) for name in (list(PASSES)[:2] if setting.quick else PASSES)]


def _method_row(setting: Setting, name: str) -> Row:
    module = Scored(random_classifier(START).to(setting.on))  # type: ignore[arg-type]
    batches = [setting.batch(SIZE, START.vocabulary)] * 2
    run = prepare_pass(subject_of(module, batches), name)
    with measured(setting.on, module.gates) as meter:
        run()
    texts, cost = len(batches) * SIZE.batch, meter.cost
    work = {"scores": run, "training": _training(setting, batches)}
    times = setting.times(f"scores of {name}", work, turns=10, warm_up=1, seconds=5.0)
    return {
        "pass": name,
        "methods": ", ".join(method for method, scorer in SCORERS.items() if set(scorer.raws) & set(PASSES[name].raws)),
        "forward": round((cost.forward_examples or 0.0) / texts, 1),
        "backward": round((cost.backward_examples or 0.0) / texts, 1),
        **columns(times, "scores", over_training=("scores", "training")),
    }


def subject_of(module: Scored, batches: Sequence[dict[str, Tensor]]) -> ScoringContext:
    """Return the module with these batches as its data, in one process."""
    texts = sum(len(batch["labels"]) for batch in batches)
    data: Any = SimpleNamespace(score_dataloader=lambda: batches, score_places=lambda: range(texts))
    strategy = SimpleNamespace(root_device=module.device, reduce=lambda values, reduce_op: values)
    trainer: Any = SimpleNamespace(strategy=strategy)
    return ScoringContext(module, data, trainer)


def prepare_pass(subject: ScoringContext, name: str) -> Callable[[], object]:
    """Return one pass over the data. The scores that it starts from are computed before."""
    scores = Scores(subject)

    def run() -> object:
        with subject.at_rest():
            return PASSES[name].run(subject, scores.raw)

    run()
    return run


def _training(setting: Setting, batches: Sequence[dict[str, Tensor]]) -> Work:
    model = random_classifier(START).to(setting.on).train()  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    steps = [stepping(model, optimizer, batch) for batch in batches]
    return lambda: [step() for step in steps]
