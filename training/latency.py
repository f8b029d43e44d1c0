"""Time models in turn: latency tables by the heads left at each site, and the latency that a pruned model achieves.

Variants take turns in one process, so that other work on the machine falls on all of them alike. For a table, the whole model
is timed without some heads of all sites of one shape, in turn with the dense model. The saving of a site then includes its
share of overheads and caches. ZipLM (Kurtic et al. 2023) times attention by itself instead.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from transformers import PreTrainedModel

from gates.attention.inputs import resized
from gates.attention.modes import evaluating
from gates.attention.sites import AttentionSite, find_attention, site_labels
from gates.errors import GateError
from gates.export.cost import hardware
from gates.gating.head_gates import HeadGates
from gates.gating.latency import LatencyTable, SiteTimes, TimeLimit, parse_time
from gates.options import Unit
from gates.surgery.remove import check_removable, remove_heads_
from training.runs import progress

MIN_TURNS = 5
"""Turns that are timed however long they take, so that there are quartiles."""
MAX_COUNTS = 16
"""Most numbers of heads that are timed for a kind of site, not counting all heads. Straight lines lie between them."""
DENSE = "dense"

Work = Callable[[], object]
Stopwatch = Callable[[Work], float]
Inputs = Mapping[str, Tensor]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Effort:
    """The length of a measurement.

    Args:
        turns: The largest number of timed calls of each variant.
        warm_up: The number of calls of each variant before these, whose times are not kept.
        seconds: The time after the first timed call when no further turn begins, but for the first :data:`MIN_TURNS`.
    """

    turns: int = 30
    warm_up: int = 2
    seconds: float = 10.0


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles.

    >>> Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
    Spread(median=3.0, low=2.0, high=4.0)
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = np.quantile(np.asarray(values, dtype=np.float64), [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))


@dataclass(frozen=True)
class Times:
    """The milliseconds of each turn, by variant."""

    of: Mapping[str, Sequence[float]]

    def milliseconds(self, variant: str) -> Spread:
        """Return the time of one call of a variant."""
        return Spread.of(self.of[variant])

    def ratio(self, variant: str, over: str) -> Spread:
        """Return the time of a variant over that of another, from the ratios within each turn. Other work on the machine
        changes neighbours alike."""
        return Spread.of([a / b for a, b in zip(self.of[variant], self.of[over], strict=True)])

    def difference(self, variant: str, less: str) -> Spread:
        """Return how many milliseconds longer a variant takes than another, from the differences within each turn."""
        return Spread.of([a - b for a, b in zip(self.of[variant], self.of[less], strict=True)])


def order_of(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of the variants in a turn. It changes with every turn, so that none always follows the same one.

    >>> order_of(["a", "b"], 0), order_of(["a", "b"], 1)
    (['a', 'b'], ['b', 'a'])
    """
    return list(names) if turn % 2 == 0 else list(names)[::-1]


def alternate(
    what: str,
    variants: Mapping[str, Work],
    device: torch.device,
    effort: Effort,
    *,
    stopwatch: Stopwatch | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Times:
    """Time variants in turn.

    Args:
        what: The subject of the measurement, shown to the user.
    """
    measure = stopwatch or stopwatch_of(device)
    taken: dict[str, list[float]] = {name: [] for name in variants}
    with progress.stage(f"measuring {what}"):
        for turn in range(effort.warm_up):
            for name in order_of(list(variants), turn):
                variants[name]()
        start = clock()
        for turn in range(effort.turns):
            if turn >= MIN_TURNS and clock() - start > effort.seconds:
                break
            for name in order_of(list(variants), turn):
                taken[name].append(measure(variants[name]))
    return Times(taken)


def stopwatch_of(device: torch.device) -> Stopwatch:
    """Return the stopwatch of a device: by events on the stream of a GPU, by the wall clock elsewhere."""
    return partial(_by_events, device) if device.type == "cuda" else stopwatch_by(time.perf_counter)


def stopwatch_by(clock: Callable[[], float]) -> Stopwatch:
    """Return a stopwatch that reads a clock in seconds."""

    def by_clock(work: Work) -> float:
        start = clock()
        work()
        return 1000 * (clock() - start)

    return by_clock


def _by_events(device: torch.device, work: Work) -> float:
    with torch.cuda.device(device):  # events belong to the current device
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end))


def measure_table(
    model: PreTrainedModel,
    inputs: Inputs,
    unit: Unit,
    effort: Effort = Effort(turns=30, warm_up=2, seconds=60.0),
    context: Context = nullcontext,
) -> LatencyTable:
    """Measure the latency table of a model on its device, with these inputs.

    Args:
        model: A dense model without attached gates. Copies share its weights except those of attention.
        inputs: The inputs of one forward pass, on the device.
        context: A context in which the model runs, such as one of mixed precision.
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
        times = alternate("latency by heads", variants, model.device, effort)
    of_kind = {}
    for kind, members in kinds.items():
        raw = _measured(times, kind, counts[kind])
        fitted = site_times(raw, counts[kind], len(members))
        of_kind[kind] = fitted, _between((np.asarray(raw) - raw[0]) / len(members), counts[kind])
    of_site = {site: of_kind[kind] for kind, members in kinds.items() for site in members}
    rest = times.milliseconds(DENSE).median - sum(fitted[-1] for fitted, _ in of_site.values())
    labels = site_labels(gates.sites)
    return LatencyTable(
        rest=max(0.0, round(rest, 6)),
        sites=[SiteTimes(label, *of_site[index]) for index, label in enumerate(labels)],
        unit=unit,
        inputs={name: list(tensor.shape) for name, tensor in inputs.items()},
        hardware=hardware(model.device),
    )


def check_reachable(
    budgets: Sequence[str],
    model: PreTrainedModel,
    inputs: Inputs,
    unit: Unit,
    context: Context = nullcontext,
    effort: Effort = Effort(turns=MIN_TURNS, warm_up=1, seconds=0.0),
) -> None:
    """Raise :class:`GateError` for a time far below that of the model without heads, before a whole table is measured."""
    gates = HeadGates(model, unit)
    check_removable(gates.sites)
    pruned = without_heads(model, torch.zeros(gates.heads), inputs)
    work = {DENSE: _forward(model, inputs, context), "without heads": _forward(pruned, inputs, context)}
    with evaluating(model):
        times = alternate("the model without heads", work, model.device, effort)
    dense, least = (times.milliseconds(name).median for name in work)
    for text in budgets:
        number, measure = parse_time(text)
        if (number * dense if measure == "x" else number) < 0.8 * least:  # the table decides on nearer times
            raise GateError(
                f"the budget is {text}, but the model takes about {least:.3g} ms without any {unit} and {dense:.3g} ms with "
                "all of them; give a time between these"
            )


def measure_achieved(
    dense: PreTrainedModel,
    mask: Tensor,
    limit: TimeLimit,
    inputs: Inputs,
    effort: Effort = Effort(turns=50, warm_up=3, seconds=20.0),
    context: Context = nullcontext,
) -> dict[str, Any]:
    """Measure the pruned model in turn with the dense one, and compare with the target and the prediction of the table.

    Args:
        dense: The dense model on the device, without attached gates. It is not changed.
        context: A context in which the models run.

    Returns:
        ``target_ms``, ``predicted_ms``, ``achieved_ms`` and ``dense_ms``, medians; ``table_dense_ms``, that of the table;
        ``speedup`` over the dense model, the median of the ratios within a turn with its quartiles; ``expected_speedup``, that
        of the table for the target; ``faster_with_more``, the sites where more heads were faster; the ``inputs`` and the
        ``hardware``.
    """
    gates = HeadGates(dense, limit.table.unit)  # type: ignore[arg-type]
    counts = [int(part.sum()) for part in gates.to_gates(mask).split(gates.sizes)]
    pruned = without_heads(dense, mask, inputs)
    work = {DENSE: _forward(dense, inputs, context), "pruned": _forward(pruned, inputs, context)}
    with evaluating(dense, pruned):
        times = alternate("the latency that is achieved", work, dense.device, effort)
    return {
        "target_ms": round(limit.milliseconds, 4),
        "predicted_ms": round(limit.table.time_of(counts), 4),
        "achieved_ms": round(times.milliseconds("pruned").median, 4),
        "dense_ms": round(times.milliseconds(DENSE).median, 4),
        "table_dense_ms": round(limit.table.dense, 4),
        "speedup": {name: round(value, 4) for name, value in asdict(times.ratio(DENSE, "pruned")).items()},
        "expected_speedup": round(limit.table.dense / limit.milliseconds, 4),
        "faster_with_more": limit.table.faster_with_more(counts),
        "inputs": {name: list(tensor.shape) for name, tensor in inputs.items()},
        "hardware": hardware(dense.device),
    }


def kinds_of_sites(gates: HeadGates) -> dict[int, list[int]]:
    """Group the positions of sites that take equally long: those of one kind of attention, class and shape."""
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, (site, size) in enumerate(zip(gates.sites, gates.sizes, strict=True)):
        found[_shape_of(site, size)].append(index)
    return dict(enumerate(found.values()))


def _shape_of(site: AttentionSite, gates: int) -> tuple[Any, ...]:
    window = getattr(site.core, "sliding_window", None)
    shape = tuple(site.output.weight.shape)
    return site.kind, type(site.core).__name__, gates, site.heads, site.kv_heads, site.head_dim, shape, window


def counts_of(size: int) -> list[int]:
    """Return the numbers of open gates that are timed at a site of this size: from none to all, in nearly equal steps.

    >>> counts_of(4), counts_of(32)[:4]
    ([0, 1, 2, 3, 4], [0, 2, 4, 6])
    """
    steps = min(size, MAX_COUNTS)
    return [round(step * size / steps) for step in range(steps + 1)]


def first_gates(sizes: Sequence[int], kept: Sequence[int]) -> Tensor:
    """Return the mask ``[gates]`` that keeps the first ``kept`` gates of each site."""
    return torch.cat([(torch.arange(size) < count).float() for size, count in zip(sizes, kept, strict=True)])


def without_heads(model: PreTrainedModel, mask: Tensor, inputs: Inputs) -> PreTrainedModel:
    """Return a pruned copy in evaluation mode, which shares all weights with the model except those of attention.

    Args:
        inputs: Inputs on which the removal is checked.
    """
    of_attention = {id(one) for site in find_attention(model) for one in _tensors(site.module)}
    shared: dict[int, Any] = {id(one): one for one in _tensors(model) if id(one) not in of_attention}
    return remove_heads_(copy.deepcopy(model, shared).eval(), mask, example=dict(inputs))


def site_times(milliseconds: Sequence[float], counts: Sequence[int], sites: int) -> list[float]:
    """Return the times of one of several equal sites with 0, 1, ... open gates, from those of the whole model.

    Isotonic regression makes the times not fall. The dense model's time stays, because all others were in turn with it.

    >>> site_times([4.0, 8.0, 7.0, 10.0], [0, 1, 2, 3], sites=2)
    [0.0, 1.75, 1.75, 3.0]
    """
    weights = np.ones(len(counts))
    weights[-1] = 1e9
    fitted = isotonic_regression(milliseconds, weights=weights).x
    of_site = (fitted - fitted[0]) / sites
    return _between(of_site, counts)


def _between(times: np.ndarray, counts: Sequence[int]) -> list[float]:
    """Return the times with 0, 1, ... open gates, on straight lines between those of the counts."""
    return [float(one) for one in np.interp(range(counts[-1] + 1), counts, times).round(6)]


def inputs_shaped(inputs: Inputs, shapes: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Return inputs with the stated numbers of rows, and of columns for matrices. Others stay as they are."""
    stated = {name: list((shapes or {}).get(name, tensor.shape)) for name, tensor in inputs.items()}
    return {
        name: resized({name: tensor}, stated[name][0], stated[name][1] if tensor.dim() == 2 else None)[name]
        for name, tensor in inputs.items()
    }


def _measured(times: Times, kind: int, counts: list[int]) -> list[float]:
    """Return the milliseconds with each of the counts, from the ratios within a turn."""
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
