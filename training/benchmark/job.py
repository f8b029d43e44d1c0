"""The whole job (fine-tune, prune, retrain, remove heads) against plain fine-tuning for as many steps, and how long things take
to start."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from gates import GateConfig, get_gated_model
from gates.surgery import verify
from training.benchmark.alternate import Effort, Spread, Times, Work, alternate_shown, as_cell, stopwatch_by
from training.benchmark.setting import Setting
from training.benchmark.size import Size
from training.benchmark.step import BUDGET

PLAIN = "plain fine-tuning"
TURNS = {9: 5, 30: 3, 90: 3}
"""Of jobs of so many steps, a third in each phase; the shortest is done once before, so that all is loaded."""
STARTS = {
    "python -m training --help": ["-m", "training", "--help"],
    "import gates, with the gates of a model": ["-c", "from gates import get_gated_model"],
}
LIBRARIES = "import of PyTorch and Transformers"
OF_LIBRARIES = ["-c", "import torch; from transformers import PreTrainedModel"]


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each length of the job, with the smallest batches of several examples; two for what of it is done once and what
    in every step; and one for each way to start."""
    size = min((size for size in setting.sizes if size.batch > 1), default=setting.sizes[0], key=lambda size: size.batch)
    more: dict[int, Spread] = {}
    rows: list[dict[str, Any]] = []
    for steps, turns in ({6: 5, 9: 3} if setting.quick else TURNS).items():
        work = {"plain": prepare_plain(setting, size, steps), "job": prepare_job(setting, size, steps)}
        effort = Effort(turns=turns, warm_up=0 if more else 1, processor_time=setting.processor_time)
        times = alternate_shown(f"the whole job, {steps} steps", work, setting.on, effort)
        more[steps] = times.difference("job", "plain")
        rows.append(_row(f"the whole job, {steps} steps of {size}", PLAIN, times, "job", "plain"))
    starts = {name: _starter(arguments) for name, arguments in (STARTS | {LIBRARIES: OF_LIBRARIES}).items()}
    stopwatch = stopwatch_by(_time_of_children if setting.processor_time else time.perf_counter)
    effort = Effort(turns=3, warm_up=1)
    times = alternate_shown("how long things take to start", starts, torch.device("cpu"), effort, stopwatch=stopwatch)
    return rows + apart(more) + [_row(name, LIBRARIES, times, name, LIBRARIES) for name in STARTS]


def _row(what: str, over: str, times: Times, first: str, second: str) -> dict[str, Any]:
    return {
        "what": what,
        "over": over,
        "first_ms": as_cell(times.milliseconds(first)),
        "second_ms": as_cell(times.milliseconds(second)),
        "more_ms": as_cell(times.difference(first, second)),
        "time_ratio": as_cell(times.ratio(first, second)),
    }


def apart(more: Mapping[int, Spread]) -> list[dict[str, Any]]:
    """What the job takes more than plain fine-tuning, once and in every step: the straight line by least squares through the
    medians at several numbers of steps.

    >>> [row["more_ms"] for row in apart({10: Spread(30, 29, 31), 20: Spread(50, 49, 51)})]
    [10.0, 2.0]
    """
    each, once = np.polyfit(list(more), [spread.median for spread in more.values()], deg=1)
    return [
        {"what": f"of the jobs, by a straight line through these: {name}", "over": None, "more_ms": round(float(value), 3)}
        for name, value in (("once", once), ("in every step", each))
    ]


def prepare_plain(setting: Setting, size: Size, steps: int) -> Callable[[], object]:
    """Fine-tuning without gates, of a copy of the model."""
    dense = setting.classifier().train()
    batch = setting.batch_for(dense, size, setting.kinds[0])

    def run() -> object:
        model = copy.deepcopy(dense)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for _ in range(steps):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    return run


def prepare_job(setting: Setting, size: Size, steps: int) -> Callable[[], object]:
    """Fine-tuning, pruning with gates that are led to their budget, and retraining with the mask, a third of the steps each, of
    a copy of the model; then closed heads are removed, and the result is checked against the gated model."""
    dense = setting.classifier().train()
    batch = setting.batch_for(dense, size, setting.kinds[0])

    def run() -> object:
        gated = get_gated_model(copy.deepcopy(dense), GateConfig(budget=BUDGET)).train()
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
        with patch.object(verify, "_VERIFIED", set()):  # as in a process that has removed no heads yet, so that it is checked
            return gated.prune_and_unload()

    return run


def _time_of_children() -> float:
    """Seconds that processors worked for processes that this one started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _starter(arguments: list[str]) -> Work:
    return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
