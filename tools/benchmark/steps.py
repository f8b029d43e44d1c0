"""Training: a gated step against a plain one, in operations too, gates alone, and the whole job against fine-tuning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from gates import GateConfig, GatedModel, get_gated_model
from gates.surgery import verify
from tools.benchmark.memory import memory_columns, peaks_in_turn
from tools.benchmark.setting import DTYPES, KINDS, Row, Setting, Size, cell, columns
from training.latency import Work

BUDGET = 0.5
PROGRESS = 0.5
"""A share of the pruning at which gates are drawn and held to the budget in every step."""


def measure_steps(setting: Setting, dtype: str = "float32") -> list[Row]:
    """Return a row for each model and size. The precision is that of the forward pass."""
    return [_step_row(setting, kind, size, dtype=dtype) for kind in KINDS for size in setting.sizes]


def measure_compiled_steps(setting: Setting) -> list[Row]:
    """Return a row for each model, compiled, on a GPU for the encoder alone."""
    kinds = KINDS[:1] if setting.device == "cuda" else KINDS
    return [_step_row(setting, kind, setting.compiled_size, compiled=True) for kind in kinds]


def _step_row(setting: Setting, kind: str, size: Size, *, compiled: bool = False, dtype: str = "float32") -> Row:
    what = f"a training step of the {kind}, {size}{', compiled' * compiled}, {dtype}"
    variants = {name: (prepare_step, (setting, kind, size, name == "gated", compiled, dtype)) for name in ("plain", "gated")}
    times = setting.times(what, {name: prepare(*arguments) for name, (prepare, arguments) in variants.items()})
    turns = 0 if compiled else setting.memory_turns  # most would be the compiler's own memory
    row = {"model": kind, "size": str(size), "compiled": "yes" if compiled else "no", "dtype": dtype}
    row |= columns(times, "plain", "gated", time_ratio=("gated", "plain"))
    return row | memory_columns(peaks_in_turn(what, setting, turns, variants), "gated", "plain")


def prepare_step(
    setting: Setting, kind: str, size: Size, gated: bool, compiled: bool = False, dtype: str = "float32", **how: Any
) -> Work:
    """Return a training step with dropout on one batch; with gates it also holds them to their budget.

    ``how`` are the arguments of :func:`stepping` and of the optimiser.
    """
    model: Any = setting.trained(kind).train()
    batch = setting.batch_for(model, size, kind)
    if gated:
        model = get_gated_model(model, GateConfig(budget=BUDGET)).train()
        model(**batch)  # the hooks check the model once, which is no part of a step
    groups = model.parameter_groups(1e-5, 1e-5) if gated else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=how.pop("fused", None))
    return stepping(model, optimizer, batch, dtype=dtype, compiled=compiled, **how)


def stepping(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Mapping[str, Tensor],
    *,
    dtype: str = "float32",
    compiled: bool = False,
    is_enforced: bool = True,
) -> Callable[[], None]:
    """Return a step of a model with or without gates. Without ``is_enforced`` the gates are not held to their budget."""
    run: Any = torch.compile(model) if compiled else model
    device = batch["labels"].device.type

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_enforced and isinstance(model, GatedModel):
            model.step_(PROGRESS, optimizer)

    return step


def measure_gates_alone(setting: Setting) -> list[Row]:
    """Return a row for each precision and size: a step that trains only the gates of a frozen encoder, and a plain step."""
    rows = []
    for dtype in DTYPES:
        for size in setting.sizes:
            plain = prepare_step(setting, "encoder", size, False, dtype=dtype)
            work = {"plain": plain, "gates_alone": prepare_gates_alone(setting, size, dtype)}
            times = setting.times(f"gates alone, {size}, {dtype}", work)
            row = columns(times, *work, time_ratio=("gates_alone", "plain"))
            rows.append({"dtype": dtype, "size": str(size)} | row)
    return rows


def prepare_gates_alone(setting: Setting, size: Size, dtype: str = "float32") -> Work:
    """Return a step of the gates of a frozen encoder in evaluation mode, as in the prune phase of a run."""
    model = setting.trained("encoder").requires_grad_(False)
    batch = setting.batch_for(model, size)
    gated = get_gated_model(model, GateConfig(budget=BUDGET)).train()
    model.eval()
    gated(**batch)  # the hooks check the model once, which is no part of a step
    optimizer = torch.optim.AdamW([gated.gates.log_alpha], lr=0.05)
    return stepping(gated, optimizer, batch, dtype=dtype)


class Dispatched(TorchDispatchMode):
    """Count the operations that PyTorch dispatches, and those that copy a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.to_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.to_host += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


STEPS = {"plain": False, "gated, no new price": True, "gated": True}
"""Each step that is counted, and whether the model has gates."""


def measure_counts(setting: Setting) -> list[Row]:
    """Return a row for each precision and step of the encoder, with the fused AdamW, whose operations do not depend on the
    number of weights."""
    rows: list[Row] = []
    for dtype in DTYPES:
        plain: Row = {}
        for name, gated in STEPS.items():
            how: dict[str, Any] = {"is_enforced": name == "gated", "fused": True}
            step = prepare_step(setting, "encoder", setting.sizes[0], gated, dtype=dtype, **how)
            found = counts_of(setting, step)
            plain = plain or found
            rows.append({"dtype": dtype, "step": name} | found | {f"more_{key}": found[key] - plain[key] for key in found})
    return rows


def counts_of(setting: Setting, step: Work) -> Row:
    """Count the operations of one step after two others, and on a GPU its kernels, their time and the waits of the host."""
    for _ in range(2):
        step()
    with Dispatched() as counted:
        step()
    row: Row = {"operations": counted.operations, "to_host": counted.to_host}
    if setting.device != "cuda":
        return row
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    events = seen.events() or ()
    kernels = [event.device_time for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    waits = sum(event.name.endswith("StreamSynchronize") for event in events)
    return row | {"kernels": len(kernels), "waits": waits, "kernels_ms": sum(kernels) / 1000}


def measure_job(setting: Setting) -> list[Row]:
    """Return a row for each length of the job."""
    size = min((size for size in setting.sizes if size.batch > 1), default=setting.sizes[0], key=lambda size: size.batch)
    rows: list[Row] = []
    for steps, turns in ({6: 5, 9: 3} if setting.quick else {9: 5, 30: 3, 90: 3}).items():
        work = {"plain": prepare_plain(setting, size, steps), "job": prepare_job(setting, size, steps)}
        times = setting.times(f"the whole job, {steps} steps", work, turns=turns, warm_up=0 if rows else 1)
        row: Row = {"what": f"{steps} steps of {size}", "over": "plain fine-tuning"}
        row |= columns(times, "plain", "job", time_ratio=("job", "plain"))
        rows.append(row | {"more_ms": cell(times.difference("job", "plain"))})
    return rows


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
    """Return fine-tuning, pruning and retraining of a copy of the model, a third of the steps each.

    At the end heads are removed and the result is checked.
    """
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
