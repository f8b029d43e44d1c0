"""Training: a gated step against a plain one, gates alone, bfloat16 against float32, and the whole job against fine-tuning."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from gates import GateConfig, GatedModel, HeadGates, get_gated_model
from gates.surgery import verify
from tools.benchmark.memory import memory_columns, peaks_in_turn
from tools.benchmark.scores import head_scores, losses_of
from tools.benchmark.setting import KINDS, Row, Setting, Size, cell, columns
from training.latency import Times, Work

BUDGET = 0.5
PROGRESS = 0.5
"""A share of the pruning at which gates are drawn and held to the budget in every step."""
PLAIN = "plain fine-tuning"
LIBRARIES = "import of PyTorch and Transformers"
STARTS = {
    "python -m training --help": ["-m", "training", "--help"],
    "import gates, with the gates of a model": ["-c", "from gates import get_gated_model"],
    LIBRARIES: ["-c", "import torch; from transformers import PreTrainedModel"],
}


def measure_steps(setting: Setting) -> list[Row]:
    """Return a row for each model and size, uncompiled and compiled."""
    compiled = [(size, False) for size in setting.sizes] + [(setting.compiled_size, True)]
    return [_step_row(setting, kind, *one) for kind in KINDS for one in compiled]


def measure_bfloat16_steps(setting: Setting) -> list[Row]:
    """Return a row for each model and size, uncompiled, with the forward pass in bfloat16."""
    return [_step_row(setting, kind, size, False, bfloat16=True) for kind in KINDS for size in setting.sizes]


def _step_row(setting: Setting, kind: str, size: Size, compiled: bool, *, bfloat16: bool = False) -> Row:
    what = f"a training step of the {kind}, {size}{', compiled' * compiled}{', bfloat16' * bfloat16}"
    variants = {name: (prepare_step, (setting, kind, size, name == "gated", compiled, bfloat16)) for name in ("plain", "gated")}
    times = setting.times(what, {name: prepare(*arguments) for name, (prepare, arguments) in variants.items()})
    known = setting.device == "cuda" or not compiled  # on a CPU most would be the compiler's own memory
    peaks = peaks_in_turn(what, setting, setting.memory_turns if known else 0, variants)
    row = {"model": kind, "size": str(size), "compiled": "yes" if compiled else "no"}
    row["dtype"] = "bfloat16" if bfloat16 else "float32"
    row |= columns(times, "plain", "gated", time_ratio=("gated", "plain"))
    return row | memory_columns(peaks, "gated", "plain")


def prepare_step(setting: Setting, kind: str, size: Size, gated: bool, compiled: bool = False, bfloat16: bool = False) -> Work:
    """Return a training step with dropout on one batch; with gates it also holds them to their budget."""
    model: Any = setting.trained(kind).train()
    batch = setting.batch_for(model, size, kind)
    if gated:
        model = get_gated_model(model, GateConfig(budget=BUDGET)).train()
        model(**batch)  # the hooks check the model once, which is no part of a step
    optimizer = torch.optim.AdamW(model.parameter_groups(1e-5, 1e-5) if gated else model.parameters(), lr=1e-5)
    return stepping(model, optimizer, batch, compiled=compiled, bfloat16=bfloat16)


def stepping(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Mapping[str, Tensor],
    *,
    compiled: bool = False,
    bfloat16: bool = False,
    priced: bool = True,
) -> Callable[[], None]:
    """Return a step of a model with or without gates. With ``bfloat16`` the forward pass is under autocast. Without ``priced``
    the gates are not held to their budget."""
    run: Any = torch.compile(model) if compiled else model
    device = batch["labels"].device.type

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if priced and isinstance(model, GatedModel):
            model.step_(PROGRESS, optimizer)

    return step


def measure_gates_alone(setting: Setting) -> list[Row]:
    """Return a row for each precision and size: a step that trains only the gates of a frozen encoder, and a plain step."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        for size in setting.sizes:
            rounded = dtype == "bfloat16"
            work = {
                "plain": prepare_step(setting, "encoder", size, False, bfloat16=rounded),
                "gates_alone": prepare_gates_alone(setting, size, bfloat16=rounded),
            }
            times = setting.times(f"gates alone, {size}, {dtype}", work)
            ratios = {"time_ratio": ("gates_alone", "plain")}
            rows.append({"dtype": dtype, "size": str(size)} | columns(times, *work, **ratios))
    return rows


def prepare_gates_alone(setting: Setting, size: Size, *, bfloat16: bool = False) -> Work:
    """Return a step of the gates of a frozen encoder in evaluation mode, as in the prune phase of a run."""
    model = setting.trained("encoder").requires_grad_(False)
    batch = setting.batch_for(model, size)
    gated = get_gated_model(model, GateConfig(budget=BUDGET)).train()
    model.eval()
    gated(**batch)  # the hooks check the model once, which is no part of a step
    optimizer = torch.optim.AdamW([weight for weight in gated.parameters() if weight.requires_grad], lr=0.05)
    return stepping(gated, optimizer, batch, bfloat16=bfloat16)


class Dispatched(TorchDispatchMode):
    """Count the operations that PyTorch dispatches, and those that copy a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.to_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.to_host += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def measure_counts(setting: Setting) -> list[Row]:
    """Return a row for each precision and step of the encoder: plain, gated without a new price, and gated."""
    size = setting.sizes[0]
    rows: list[Row] = []
    for dtype in ("float32", "bfloat16"):
        found: dict[str, Row] = {}
        for name in ("plain", "gated, no new price", "gated"):
            found[name] = counts_of(setting, prepare_counted(setting, size, name, bfloat16=dtype == "bfloat16"))
            more = found[name]["operations"] - found["plain"]["operations"]
            more_to_host = found[name]["to_host"] - found["plain"]["to_host"]
            rows.append({"dtype": dtype, "step": name} | found[name] | {"more": more, "more_to_host": more_to_host})
    return rows


def prepare_counted(setting: Setting, size: Size, name: str, *, bfloat16: bool) -> Work:
    """Return a step with the fused AdamW, whose operations do not depend on the number of weights."""
    model: Any = setting.trained("encoder").train()
    batch = setting.batch_for(model, size)
    if name != "plain":
        model = get_gated_model(model, GateConfig(budget=BUDGET)).train()
    groups = model.parameters() if name == "plain" else model.parameter_groups(1e-5, 1e-5)
    optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)
    return stepping(model, optimizer, batch, bfloat16=bfloat16, priced=name == "gated")


def counts_of(setting: Setting, step: Work) -> Row:
    """Count the operations of one step after two others, and on a GPU its kernels and waits of the host."""
    for _ in range(2):
        step()
    with Dispatched() as counted:
        step()
    row: Row = {"operations": counted.operations, "to_host": counted.to_host}
    if setting.device != "cuda":
        return row
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
    events = seen.events() or ()
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    return row | {"kernels": kernels, "waits": sum(event.name.endswith("StreamSynchronize") for event in events)}


def measure_precision(setting: Setting) -> list[Row]:
    """Return a row for each model and size, and for a gated training step, a forward pass and exact HIS."""
    rows = []
    for kind in KINDS:
        for size in setting.sizes:
            exact, rounded = (prepare_step(setting, kind, size, True, False, rounded) for rounded in (False, True))
            rows.append(_precision_row(setting, kind, size, "a gated training step", exact, rounded))
            model = setting.trained(kind).eval()
            scored = partial(head_scores, HeadGates(model), setting.batch_for(model, size, kind))
            passed = torch.no_grad()(partial(losses_of, model, setting.batch_for(model, size, kind)))
            for what, own in (("a forward pass", passed), ("exact HIS", scored)):
                in_bfloat16 = torch.autocast(setting.device, torch.bfloat16)(own)
                row = _precision_row(setting, kind, size, what, own, in_bfloat16)
                rows.append(row | {"difference": distance(own(), in_bfloat16())})
    return rows


def distance(exact: Tensor, rounded: Tensor) -> float:
    """Return the root mean square of the differences over that of the exact numbers."""
    return float(torch.linalg.vector_norm(rounded.float() - exact) / torch.linalg.vector_norm(exact))


def _precision_row(setting: Setting, kind: str, size: Size, what: str, exact: Work, rounded: Work) -> Row:
    times = setting.times(f"{what} of the {kind}, {size}", {"float32": exact, "bfloat16": rounded})
    ratios = {"time_ratio": ("bfloat16", "float32")}
    return {"model": kind, "size": str(size), "what": what} | columns(times, "float32", "bfloat16", **ratios)


def measure_job(setting: Setting) -> list[Row]:
    """Return a row for each length of the job, and one for each way to start."""
    size = min((size for size in setting.sizes if size.batch > 1), default=setting.sizes[0], key=lambda size: size.batch)
    rows: list[Row] = []
    for steps, turns in ({6: 5, 9: 3} if setting.quick else {9: 5, 30: 3, 90: 3}).items():
        work = {"plain": prepare_plain(setting, size, steps), "job": prepare_job(setting, size, steps)}
        times = setting.times(f"the whole job, {steps} steps", work, turns=turns, warm_up=0 if rows else 1)
        rows.append(_job_row(f"the whole job, {steps} steps of {size}", PLAIN, times, "job", "plain"))
    starts: dict[str, Work] = {
        name: partial(subprocess.run, [sys.executable, *arguments], check=True, capture_output=True)
        for name, arguments in STARTS.items()
    }
    clock = (lambda: sum(os.times()[2:4])) if setting.processor_time else time.perf_counter  # of processes that have ended
    times = setting.times("how long things take to start", starts, clock=clock, turns=3, warm_up=1)
    return rows + [_job_row(name, LIBRARIES, times, name, LIBRARIES) for name in STARTS if name != LIBRARIES]


def _job_row(what: str, over: str, times: Times, first: str, second: str) -> Row:
    milliseconds = {"first_ms": cell(times.milliseconds(first)), "second_ms": cell(times.milliseconds(second))}
    more, ratio = times.difference(first, second), times.ratio(first, second)
    return {"what": what, "over": over, **milliseconds, "more_ms": cell(more), "time_ratio": cell(ratio)}


def prepare_plain(setting: Setting, size: Size, steps: int) -> Callable[[], PreTrainedModel]:
    """Return the fine-tuning of a copy of the model without gates."""
    dense = setting.trained("encoder").train()
    batch = setting.batch_for(dense, size)

    def run() -> PreTrainedModel:
        model = copy.deepcopy(dense)
        step = stepping(model, torch.optim.AdamW(model.parameters(), lr=1e-5), batch)
        for _ in range(steps):
            step()
        return model

    return run


def prepare_job(setting: Setting, size: Size, steps: int) -> Callable[[], PreTrainedModel]:
    """Return fine-tuning, pruning and retraining of a copy of the model, a third of the steps each, with heads removed and the
    result checked at the end."""
    dense = setting.trained("encoder").train()
    batch = setting.batch_for(dense, size)

    def run() -> PreTrainedModel:
        gated = get_gated_model(copy.deepcopy(dense), GateConfig(budget=BUDGET)).train()
        optimizer = torch.optim.AdamW(gated.parameter_groups(1e-5, gate_learning_rate=0.05))
        third = steps // 3
        for done in range(1, steps + 1):
            with gated.disable_gates() if done <= third else nullcontext():
                gated(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if third < done <= 2 * third:
                gated.step_((done - third) / third, optimizer)
            if done == 2 * third:
                gated.fix_mask_()
        with patch.object(verify, "_VERIFIED", set()):  # as in a new process, so that the removal is checked
            return gated.prune_and_unload()

    return run
