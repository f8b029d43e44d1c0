"""Budgets in time: the latency table of a run, and the time of its pruned model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import move_data_to_device
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.gating.latency import LatencyTable, TimeLimit
from training.config import BudgetOption, Setup
from training.data.base import TaskData
from training.latency import Inputs, check_reachable, inputs_shaped, measure_achieved, measure_table
from training.pruner.module import HeadPruner
from training.runs import processes
from training.runs.directory import LATENCY, RunDirectory
from training.setup import make_trainer

TOLERANCE = 0.05
"""The share of the target by which the achieved latency may exceed it."""


def timed(setup: Setup, run: RunDirectory, data: TaskData) -> Setup:
    """Return the setup with a latency limit in place of a budget in time. Write nothing.

    The table is the given one, that of the resumed run, or one that is measured here.
    """
    if not setup.model.is_timed:
        return setup
    kept = run.path / LATENCY if run.resumes else None
    return setup.within(table_of([str(setup.model.budget)], setup, kept, lambda: data))


def table_of(budgets: Sequence[str], setup: Setup, kept: Path | None, data: Callable[[], TaskData]) -> LatencyTable:
    """Return the given table, or that of an earlier call if its file exists, or one that is measured here."""
    if setup.model.latency_table is not None:
        return LatencyTable.read(setup.model.latency_table)
    if kept is not None and kept.is_file():
        return LatencyTable.read(kept)
    return measured_table(setup, data(), budgets=budgets)


def limits_of(
    budgets: Sequence[BudgetOption], setup: Setup, kept: Path | None, data: Callable[[], TaskData]
) -> list[BudgetOption]:
    """Return the budgets of a comparison with limits by one table in place of times. Data is only read to measure."""
    table = table_of([budget for budget in budgets if isinstance(budget, str)], setup, kept, data)
    return [TimeLimit.parse(budget, table) if isinstance(budget, str) else budget for budget in budgets]


def keep_table(budgets: Sequence[BudgetOption | None], run: RunDirectory) -> None:
    """Write the table of the first budget in time into the directory."""
    for budget in budgets:
        if isinstance(budget, TimeLimit) and processes.is_first():
            budget.table.write(run.path / LATENCY)
            return


def limit_of(setup: Setup) -> TimeLimit | None:
    """Return the limit of a run with a budget in time."""
    budget: Any = setup.model.budget
    return budget if isinstance(budget, TimeLimit) else None


def measured_table(
    setup: Setup, data: TaskData, *, budgets: Sequence[str] = (), batch: int | None = None, length: int | None = None
) -> LatencyTable:
    """Measure the table of a run's model on the run's device and in its precision.

    Args:
        batch: The number of examples. Default: as in the first batch of the test split.
        length: The number of tokens of each. Default: as in that batch.
    """
    trainer, options = make_trainer(setup), setup.model
    if trainer.world_size > 1:
        raise GateError(
            f"{trainer.world_size} processes would measure latency at once; measure it on one device (head-gates latency) "
            "and give --model.latency_table"
        )
    model = data.task.build(options, data.processor)
    device = trainer.strategy.root_device
    inputs = first_inputs(data, model, device)
    if batch is not None or length is not None:
        shapes = {name: list(tensor.shape) for name, tensor in inputs.items()}
        wished = {name: [batch or shape[0], length or shape[-1], *shape[2:]] for name, shape in shapes.items()}
        inputs = inputs_shaped(inputs, wished)
    on_device: PreTrainedModel = trainer.precision_plugin.convert_module(model.to(device))  # type: ignore[arg-type,assignment]
    converted = trainer.precision_plugin.convert_input(inputs)
    context = trainer.precision_plugin.forward_context
    if budgets:
        check_reachable(budgets, on_device, converted, options.unit, context)
    return measure_table(on_device, converted, options.unit, context=context)


def achieved(setup: Setup, pruner: HeadPruner, data: TaskData) -> dict[str, Any] | None:
    """Return the achieved and the requested latency of the pruned model; see :func:`measure_achieved`.

    The result is None without a budget in time, and in all processes but the first.
    """
    limit = limit_of(setup)
    if limit is None or not processes.is_first():
        return None
    gates, trainer = pruner.gates, make_trainer(setup)
    device = trainer.strategy.root_device
    gates.detach()
    try:
        dense: PreTrainedModel = trainer.precision_plugin.convert_module(copy.deepcopy(pruner.backbone).to(device))  # type: ignore[assignment]
    finally:
        gates.attach()
    inputs = trainer.precision_plugin.convert_input(inputs_shaped(first_inputs(data, dense, device), limit.table.inputs))
    mask = gates.to_heads(gates.mask.detach()).cpu()
    return measure_achieved(dense, mask, limit, inputs, context=trainer.precision_plugin.forward_context)


def first_inputs(data: TaskData, model: PreTrainedModel, device: torch.device) -> Inputs:
    """Return the model inputs of the first batch of the test split, on the device."""
    batch = next(iter(data.test_dataloader()))
    found: Inputs = move_data_to_device(data.task.model_inputs(model, batch), device)
    return found


def latency_sentence(latency: dict[str, Any]) -> str:
    """Return the requested and the achieved latency in a sentence."""
    expected, found = latency["expected_speedup"], latency["speedup"]["median"]
    text = (
        f"a forward pass was to take {latency['target_ms']:.4g} ms, {expected:.3g} times as fast as the dense model in "
        f"the table; predicted {latency['predicted_ms']:.4g} ms; achieved {latency['achieved_ms']:.4g} ms against "
        f"{latency['dense_ms']:.4g} ms of the dense model, {found:.3g} times as fast"
    )
    if expected <= (1 + TOLERANCE) * found:
        return text
    return (
        f"{text}. The requested speed is {expected / found - 1:.0%} higher; other work on the machine may have disturbed the "
        "table: measure one when it is idle (head-gates latency) and give it as --model.latency_table"
    )


def faster_with_more(latency: dict[str, Any]) -> str:
    """Return a sentence about the sites where more heads were faster in the table; empty if there are none.

    >>> faster_with_more({"faster_with_more": {"encoder.0": [3, 4]}})
    'in the latency table, more heads are faster at encoder.0 (4 than 3)'
    """
    sites = [f"{label} ({wider} than {count})" for label, (count, wider) in latency.get("faster_with_more", {}).items()]
    return f"in the latency table, more heads are faster at {', '.join(sites)}" if sites else ""
