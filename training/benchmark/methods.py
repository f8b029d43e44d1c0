"""What the scoring methods of a comparison cost: the ways over the data that are behind them, against steps of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates import HeadGates
from training.benchmark.alternate import alternate_shown, as_cell
from training.benchmark.growth import SIZE, START
from training.benchmark.models import random_classifier
from training.benchmark.setting import Setting
from training.benchmark.step import stepping
from training.runs.cost import measured
from training.scoring.passes import PASSES
from training.scoring.scorers import SCORERS, Scores
from training.scoring.subject import Subject
from training.tasks import Classification, Task

BATCHES = 2
"""Of :data:`training.benchmark.growth.SIZE` that are scored, and trained on."""


class Scored(nn.Module):
    """A model at rest with its gates and its task, as a comparison scores it."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.gates = HeadGates(backbone).attach()
        self.task: Task = Classification(["no", "yes"])

    @property
    def device(self) -> torch.device:
        return self.backbone.device


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each way over the data."""
    return [_row(setting, name) for name in (list(PASSES)[:2] if setting.quick else PASSES)]


def _row(setting: Setting, name: str) -> dict[str, Any]:
    module = Scored(random_classifier(START).to(setting.on))  # type: ignore[arg-type]
    batches = [setting.batch(SIZE, START.vocabulary)] * BATCHES
    scored = subject_of(module, batches)
    run = way(scored, name)
    with measured(setting.on, module.gates) as meter:
        run()
    texts, cost = BATCHES * SIZE.batch, meter.cost
    effort = setting.effort if setting.quick else replace(setting.effort, turns=10, warm_up=1, seconds=5.0)
    times = alternate_shown(f"scores of {name}", {"scores": run, "training": training(setting, batches)}, setting.on, effort)
    return {
        "pass": name,
        "methods": ", ".join(method for method, found in SCORERS.items() if behind(found.raws, name)),
        "forward": round((cost.forward_examples or 0.0) / texts, 1),
        "backward": round((cost.backward_examples or 0.0) / texts, 1),
        "scores_ms": as_cell(times.milliseconds("scores")),
        "over_training": as_cell(times.ratio("scores", "training")),
    }


def behind(raws: tuple[str, ...], name: str) -> bool:
    """Whether a way over the data yields some of these raw scores."""
    return bool(set(raws) & set(PASSES[name].raws))


def subject_of(module: Scored, batches: list[dict[str, Tensor]]) -> Subject:
    """The module with data that are these batches, in one process."""
    data: Any = SimpleNamespace(
        score_dataloader=lambda: batches, score_places=lambda: range(sum(len(batch["labels"]) for batch in batches))
    )
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=module.device, reduce=lambda values, reduce_op: values))
    return Subject(module, data, trainer)


def way(subject: Subject, name: str) -> Callable[[], object]:
    """One way over the data; scores of other ways that it starts from are known beforehand."""
    scores = Scores(subject)

    def run() -> object:
        with subject.at_rest():
            return PASSES[name].run(subject, scores.raw)

    run()
    return run


def training(setting: Setting, batches: list[dict[str, Tensor]]) -> Callable[[], object]:
    """A step of plain training on each of the batches."""
    model = random_classifier(START).to(setting.on).train()  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    steps = [stepping(model, optimizer, batch) for batch in batches]
    return lambda: [step() for step in steps]
