"""The whole job (fine-tune, prune, retrain) against plain fine-tuning for as many steps, and how long things take to start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from gates import GateConfig, get_gated_model
from training.benchmark.alternate import Effort, Times, Work, alternate_shown
from training.benchmark.setting import Setting
from training.benchmark.size import Size
from training.benchmark.step import BUDGET

PLAIN = "plain fine-tuning"
STEPS = 9
"""Of the job: a third in each phase."""
STARTS = {
    "python -m training --help": ["-m", "training", "--help"],
    "import gates, with the gates of a model": ["-c", "from gates import get_gated_model"],
}
LIBRARIES = "import of PyTorch and Transformers"
OF_LIBRARIES = ["-c", "import torch; from transformers import PreTrainedModel"]


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for the job, with the smallest batches of several examples, and one for each way to start."""
    size = min((size for size in setting.sizes if size.batch > 1), default=setting.sizes[0], key=lambda size: size.batch)
    steps = 6 if setting.quick else STEPS
    work = {"plain": prepare_plain(setting, size, steps), "job": prepare_job(setting, size, steps)}
    long = Effort(turns=5, warm_up=1, processor_time=setting.processor_time)
    times = alternate_shown(f"the whole job, {steps} steps", work, setting.on, long)
    rows = [_row(f"the whole job, {steps} steps of {size}", PLAIN, times, "job", "plain")]
    starts = {name: _starter(arguments) for name, arguments in (STARTS | {LIBRARIES: OF_LIBRARIES}).items()}
    times = alternate_shown("how long things take to start", starts, torch.device("cpu"), Effort(turns=3, warm_up=0))
    return rows + [_row(name, LIBRARIES, times, name, LIBRARIES) for name in STARTS]


def _row(what: str, over: str, times: Times, first: str, second: str) -> dict[str, Any]:
    return {
        "what": what,
        "over": over,
        "first_ms": asdict(times.milliseconds(first)),
        "second_ms": asdict(times.milliseconds(second)),
        "time_ratio": asdict(times.ratio(first, second)),
    }


def prepare_plain(setting: Setting, size: Size, steps: int) -> Callable[[], None]:
    """Fine-tuning without gates."""
    model = setting.classifier().train()
    batch = setting.batch(size, model.config.get_text_config().vocab_size)

    def run() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for _ in range(steps):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def prepare_job(setting: Setting, size: Size, steps: int) -> Callable[[], None]:
    """Fine-tuning, pruning with gates that are led to their budget, and retraining with the mask: a third of the steps each.
    The gates are put on at the start and taken off at the end, so that this counts too."""
    model = setting.classifier().train()
    batch = setting.batch(size, model.config.get_text_config().vocab_size)

    def run() -> None:
        gated = get_gated_model(model, GateConfig(budget=BUDGET, draw_per="example")).train()
        optimizer = torch.optim.AdamW(gated.parameter_groups(1e-5, gate_learning_rate=0.05))
        third = steps // 3
        for done in range(1, steps + 1):
            if done <= third:
                with gated.disable_gates():
                    gated(**batch).loss.backward()
            else:
                gated(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if third < done <= 2 * third:
                gated.step_((done - third) / third, optimizer)
            if done == 2 * third:
                gated.fix_mask_()
        gated.unload()

    return run


def _starter(arguments: list[str]) -> Work:
    return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
