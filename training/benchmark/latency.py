"""Latency tables: how long a model takes with 0, 1, ... heads left at each site, and what a pruned model does take.

The whole model is timed without some heads of all sites of one shape, in turn with the dense model: what a site saves is then
what it saves in its place, with its share of overheads and caches, where ZipLM (Kurtic et al. 2023) times attention by itself.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from transformers import PreTrainedModel

from gates.export.cost import hardware
from gates.export.example_inputs import resized
from gates.head_gates import HeadGates
from gates.hooks.evaluating import evaluating
from gates.latency.table import LatencyTable, SiteTimes, TimeLimit
from gates.options import Unit
from gates.sites import AttentionSite, find_attention
from gates.surgery.labels import site_labels
from gates.surgery.remove import check_removable, remove_heads_
from training.benchmark.alternate import Effort, Times, Work, alternate_shown

DENSE = "dense"
MOST_COUNTS = 16
"""Numbers of heads that are measured for each kind of site, beside all of them; between those there are straight lines."""
TABLE = Effort(turns=30, warm_up=2, seconds=60.0)
ACHIEVED = Effort(turns=50, warm_up=3, seconds=20.0)

Inputs = Mapping[str, Tensor]
Context = Callable[[], AbstractContextManager[Any]]


def measure_table(
    model: PreTrainedModel, inputs: Inputs, unit: Unit, effort: Effort = TABLE, context: Context = nullcontext
) -> LatencyTable:
    """The table of a model on its device, with these inputs.

    Args:
        model: dense, without attached gates. Copies share its weights but those of attention.
        inputs: of one forward pass, on the device.
        unit: what a gate closes.
        effort: how long is measured.
        context: in which the model runs, such as one of mixed precision.

    Raises:
        GateError: if no heads can be removed from it.
    """
    gates = HeadGates(model, unit)
    check_removable(gates.sites)
    kinds = kinds_of_sites(gates)
    variants: dict[str, Work] = {DENSE: _forward(model, inputs, context)}
    counts = {kind: counts_of(gates.sizes[members[0]]) for kind, members in kinds.items()}
    for kind, members in kinds.items():
        for count in counts[kind][:-1]:
            kept = [count if site in members else size for site, size in enumerate(gates.sizes)]
            pruned = without_heads(model, gates.to_heads(first_gates(gates.sizes, kept)), inputs)
            variants[_variant(kind, count)] = _forward(pruned, inputs, context)
    with evaluating(model):
        times = alternate_shown("latency by heads", variants, model.device, effort)
    of_kind = {kind: site_times(_measured(times, kind, counts[kind]), counts[kind], len(kinds[kind])) for kind in kinds}
    of_site = {site: of_kind[kind] for kind, members in kinds.items() for site in members}
    rest = times.milliseconds(DENSE).median - sum(float(of_site[site][-1]) for site in of_site)
    labels = site_labels(gates.sites)
    return LatencyTable(
        rest=max(0.0, round(rest, 6)),
        sites=[SiteTimes(label, of_site[index]) for index, label in enumerate(labels)],
        unit=unit,
        inputs={name: list(tensor.shape) for name, tensor in inputs.items()},
        hardware=hardware(model.device),
    )


def measure_achieved(
    dense: PreTrainedModel,
    mask: Tensor,
    limit: TimeLimit,
    inputs: Inputs,
    effort: Effort = ACHIEVED,
    context: Context = nullcontext,
) -> dict[str, Any]:
    """What a mask was to take, what it was predicted to take, and what the pruned model does take, in turn with the dense one.

    Args:
        dense: the dense model, on the device, without attached gates; it is left as it is.
        mask: 0/1 per head, ``[heads]``.
        limit: the budget.
        inputs: as those of the table.
        effort: how long is measured.
        context: in which the models run.

    Returns:
        ``target_ms``, ``predicted_ms``, ``achieved_ms`` and ``dense_ms``, medians; ``table_dense_ms``, that of the table;
        ``speedup`` over the dense model, the median of the ratios within a turn with its quartiles; ``expected_speedup``, that
        of the table for the target; the ``inputs`` and the ``hardware``.
    """
    gates = HeadGates(dense, limit.table.unit)  # type: ignore[arg-type]
    counts = [int(part.sum()) for part in gates.to_gates(mask).split(gates.sizes)]
    pruned = without_heads(dense, mask, inputs)
    work = {DENSE: _forward(dense, inputs, context), "pruned": _forward(pruned, inputs, context)}
    with evaluating(dense, pruned):
        times = alternate_shown("the latency that is achieved", work, dense.device, effort)
    return {
        "target_ms": round(limit.milliseconds, 4),
        "predicted_ms": round(limit.table.time_of(counts), 4),
        "achieved_ms": round(times.milliseconds("pruned").median, 4),
        "dense_ms": round(times.milliseconds(DENSE).median, 4),
        "table_dense_ms": round(limit.table.dense, 4),
        "speedup": {name: round(value, 4) for name, value in asdict(times.ratio(DENSE, "pruned")).items()},
        "expected_speedup": round(limit.table.dense / limit.milliseconds, 4),
        "inputs": {name: list(tensor.shape) for name, tensor in inputs.items()},
        "hardware": hardware(dense.device),
    }


def kinds_of_sites(gates: HeadGates) -> dict[int, list[int]]:
    """Sites that take as long as each other, as positions: those of one kind of attention, class and shape."""
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, (site, size) in enumerate(zip(gates.sites, gates.sizes, strict=True)):
        found[_shape_of(site, size)].append(index)
    return dict(enumerate(found.values()))


def _shape_of(site: AttentionSite, gates: int) -> tuple[Any, ...]:
    window = getattr(site.core, "sliding_window", None)
    shape = tuple(site.output.weight.shape)
    return site.kind, type(site.core).__name__, gates, site.heads, site.kv_heads, site.head_dim, shape, window


def counts_of(size: int) -> list[int]:
    """The numbers of gates, of so many, that are measured: from none to all, in nearly equal steps.

    >>> counts_of(4), counts_of(32)[:4]
    ([0, 1, 2, 3, 4], [0, 2, 4, 6])
    """
    steps = min(size, MOST_COUNTS)
    return [round(step * size / steps) for step in range(steps + 1)]


def first_gates(sizes: list[int] | tuple[int, ...], kept: list[int]) -> Tensor:
    """The mask ``[gates]`` that keeps the first so many of each site."""
    return torch.cat([(torch.arange(size) < count).float() for size, count in zip(sizes, kept, strict=True)])


def without_heads(model: PreTrainedModel, mask: Tensor, inputs: Inputs) -> PreTrainedModel:
    """A copy in evaluation mode without some heads, which shares all weights with the model but those of attention.

    Args:
        model: dense.
        mask: 0/1 per head, ``[heads]``.
        inputs: on which its removal is checked.
    """
    of_attention = {id(one) for site in find_attention(model) for one in _tensors(site.module)}
    shared: dict[int, Any] = {id(one): one for one in _tensors(model) if id(one) not in of_attention}
    return remove_heads_(copy.deepcopy(model, shared).eval(), mask, example=dict(inputs))


def site_times(milliseconds: list[float], counts: list[int], sites: int) -> list[float]:
    """The times of one of several equal sites with 0, 1, ... gates open, from those of the whole model.

    What was measured is made not to fall by isotonic regression, in which the dense model's time, with which all others were in
    turn, stays.

    Args:
        milliseconds: of the model with each of the counts at all these sites.
        counts: from 0 to all.
        sites: how many there are.

    >>> site_times([4.0, 8.0, 7.0, 10.0], [0, 1, 2, 3], sites=2)
    [0.0, 1.75, 1.75, 3.0]
    """
    weights = np.ones(len(counts))
    weights[-1] = 1e9
    fitted = isotonic_regression(milliseconds, weights=weights).x
    of_site = (fitted - fitted[0]) / sites
    return [float(one) for one in np.interp(range(counts[-1] + 1), counts, of_site).round(6)]


def inputs_shaped(inputs: Inputs, shapes: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Inputs with as many rows, and columns where they have these alone, as stated; those without a statement as they are."""
    stated = {name: list((shapes or {}).get(name, tensor.shape)) for name, tensor in inputs.items()}
    return {
        name: resized({name: tensor}, stated[name][0], stated[name][1] if tensor.dim() == 2 else None)[name]
        for name, tensor in inputs.items()
    }


def _measured(times: Times, kind: int, counts: list[int]) -> list[float]:
    """Milliseconds with each of the counts, from the ratios within a turn."""
    dense = times.milliseconds(DENSE).median
    return [*(dense * times.ratio(_variant(kind, count), DENSE).median for count in counts[:-1]), dense]


def _variant(kind: int, count: int) -> str:
    return f"{kind}: {count}"


def _forward(model: PreTrainedModel, inputs: Inputs, context: Context) -> Work:
    def work() -> object:
        with torch.inference_mode(), context():
            return model(**inputs)

    return work


def _tensors(module: torch.nn.Module) -> Any:
    return chain(module.parameters(), module.buffers())
