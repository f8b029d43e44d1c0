"""A run's own training as experiments, so that its comparison trains nothing again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from training.comparison.experiments import GATES_OVER_TIME, WEIGHTS, Experiments
from training.comparison.predictions import write_predictions
from training.comparison.weights import learned_result
from training.config import RefitSearch, SwapSearch
from training.pruner.callbacks import Predictions
from training.pruner.module import HeadPruner
from training.pruner.schedule import Phase
from training.runs import processes
from training.runs.cost import NOTHING, Cost


@dataclass(frozen=True)
class TrainedRun:
    """What one training through all phases has left, beside the module in its final state.

    Args:
        dense: checkpoint at the end of fine-tuning.
        costs: of the phases.
        steps: optimiser steps of each phase.
        gates: their course in the prune phase, one row per recorded step.
        metrics: of the final model, as ``select_accuracy`` and so on.
        predictions: of the final model.
    """

    dense: Path
    costs: Mapping[Phase, Cost]
    steps: Mapping[Phase, int]
    gates: pd.DataFrame
    metrics: Mapping[str, float]
    predictions: Predictions


def adopt(experiments: Experiments, pruner: HeadPruner, run: TrainedRun) -> None:
    """Keep what a run has trained as finished experiments: the dense model, the gates, the search, refits, and the retrained
    model; of a run that prunes nothing the dense model and its evaluation."""

    def cost(phase: Phase, *counted_apart: Mapping[str, Any]) -> dict[str, Any]:
        spent = reduce(Cost.without, map(Cost.of, counted_apart), run.costs.get(phase, NOTHING))
        taught = pruner.options.distils and phase != "finetune"
        return (spent.with_teacher() if taught else spent).as_row() | {"steps": run.steps[phase]}

    def dense(folder: Path) -> dict[str, Any]:
        if processes.is_first():
            _link(run.dense, folder / WEIGHTS)
        return cost("finetune")

    def learn(folder: Path) -> dict[str, Any]:
        if processes.is_first():
            run.gates.to_csv(folder / GATES_OVER_TIME, index=False)
        return cost("prune") | learned_result(pruner)

    def swap(folder: Path) -> dict[str, Any]:
        assert pruner.search is not None
        return {name: value for name, value in pruner.search.items() if name != "search"}

    def refit(mask: list[float], folder: Path) -> dict[str, Any]:
        assert pruner.refitted is not None
        done = next(one for one in (pruner.refitted, *pruner.refitted["others"]) if one["mask"] == mask)
        return {name: value for name, value in done.items() if name not in ("search", "mask", "others")}

    def evaluated(folder: Path) -> dict[str, Any]:
        write_predictions(folder, run.predictions)
        if pruner.options.prune == 0:
            return dict(run.metrics) | NOTHING.as_row()
        searched = [] if pruner.search is None else [pruner.search]
        refits = [] if pruner.refitted is None else [pruner.refitted, *pruner.refitted["others"]]
        began_it = [*searched, *refits] if run.steps["retrain"] > 0 else []  # the retrain phase; they are counted by themselves
        return dict(run.metrics) | cost("retrain", *began_it)

    makers = {"dense": dense, "learn": learn, "swap": swap, "retrain": evaluated, "post hoc": evaluated}
    for determined_by in _identities(experiments, pruner):
        what = determined_by["experiment"]
        make = partial(refit, determined_by["mask"]) if what == "refit" else makers[what]
        experiments.cache.get_or_make(determined_by, make)


def is_adopted(experiments: Experiments, pruner: HeadPruner) -> bool:
    """Whether all that :func:`adopt` keeps of a run in this final state is there."""
    if experiments.cache.get(experiments.dense_is) is None:
        return False  # the other identities build on the dense model
    return all(experiments.cache.get(determined_by) is not None for determined_by in _identities(experiments, pruner))


def seconds_of(experiments: Experiments, pruner: HeadPruner) -> float:
    """How long an adopted run has trained, in all its processes one after another."""
    found = [experiments.cache.get(determined_by) for determined_by in _identities(experiments, pruner)]
    return float(sum(one.result["seconds"] for one in found if one is not None))


def _identities(experiments: Experiments, pruner: HeadPruner) -> Iterator[dict[str, Any]]:
    """What is adopted, in the order in which one builds on the other."""
    yield experiments.dense_is
    final = pruner.gates.mask.detach().cpu()
    if pruner.options.prune == 0:
        yield experiments.post_hoc_is(torch.ones(pruner.gates.size))
        return
    learned = learned_result(pruner)
    learn_is = experiments.learn_is({})
    yield learn_is
    start = experiments.cache.get(learn_is)
    if start is None:
        return
    if pruner.options.swaps:
        mask = torch.tensor(learned["mask"])
        budget, search = pruner.steering.budget_of(mask), SwapSearch(passes=pruner.options.swaps)
        weights = experiments.dense() if experiments.rests({}) else start
        yield experiments.swap_is(mask, budget, search, start=weights)
    if pruner.options.refit:
        for other in (pruner.refitted or {}).get("others", []):
            yield experiments.refit_is(torch.tensor(other["mask"]), RefitSearch(), start=start)
        refit_is = experiments.refit_is(final, RefitSearch(), start=start)
        yield refit_is
        refitted = experiments.cache.get(refit_is)
        if refitted is None:
            return
        start = refitted
    yield experiments.retrain_is(final, start=start, changes={})


def _link(source: Path, target: Path) -> None:
    """The file under a second name, without taking space where the file system can."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with suppress(shutil.SameFileError):
            shutil.copyfile(source, target)
