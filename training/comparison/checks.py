"""What a comparison is asked for against itself, before anything is read or trained: options that nothing would use, and
methods, budgets and stages that do not go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jsonargparse import Namespace

from gates.errors import GateError
from gates.latency.table import LatencyTable, TimeLimit
from training.cli.comparison_parser import OF_A_RUN
from training.comparison.methods import Method
from training.config import BudgetOption, PrunerOptions
from training.config.comparison import BY_RELEVANCE
from training.config.setup import data_of
from training.config.stages import FROM_SCRATCH, is_post_hoc

INSTEAD = {
    "seed": "; --seeds has those of a comparison",
    "model.budget": "; --budgets has those of a comparison",
    "model.swaps": "; here swaps are a method, learned+swap",
    "model.refit": "; here it is a method, learned+refit",
    "model.gate": "; here other gates are methods, such as dsp",
    "model.pipelined": "; here it is a parameter, learned(pipelined=false)",
}
"""What some of these, and options of the module that methods and budgets set, are called in a comparison."""


def check_unused(config: Namespace, given: Sequence[str]) -> None:
    """Raises :class:`GateError` for what has no meaning in a comparison: options of single runs on its command line (a
    configuration, which also serves single runs, may hold them), a checkpoint to start from, and training for show."""
    for name, instead in (dict.fromkeys(OF_A_RUN, "") | INSTEAD).items():
        if any(argument.split("=")[0] == f"--{name}" for argument in given):
            raise GateError(f"--{name} is an option of training.fit, which a comparison does not use{instead}")
    if data_of(config.data).own_budgets is not None and any(argument.split("=")[0] == "--budgets" for argument in given):
        raise GateError("--budgets is given, but these data know how many heads are needed; --data.spare says how many more")
    if config.ckpt_path is not None:
        raise GateError("ckpt_path is set, but a comparison trains its own dense models; remove it from the configuration")


def check_needed(given: Sequence[str], methods: Sequence[Method], stages: Sequence[str]) -> None:
    """Raises :class:`GateError` for options on the command line that belong to methods or stages which are not compared."""
    modifiers = frozenset().union(*(method.modifiers for method in methods))
    used = {
        "--prices": (any(method.is_learned and method.learned.decides == "price" for method in methods), "lambda to --methods"),
        "--swap.": ("swap" in modifiers, "+swap to a method"),
        "--restarts.rows": (
            any("restarts" in method.modifiers and "refit" not in method.modifiers for method in methods),
            "+restarts to a method without +refit",
        ),
        "--restarts.": ("restarts" in modifiers, "+restarts to a method"),
        "--draws.": ("draws" in modifiers, "+draws to a method"),
        "--refit.": ("refit" in modifiers, "+refit to a method"),
        "--distil.": ("distil" in modifiers, "+distil to a method"),
        "--from_scratch_": ("from scratch" in stages, "from scratch to --stages"),
    }
    for beginning, (is_used, add) in used.items():
        for argument in given:
            if argument.startswith(beginning) and not is_used:
                raise GateError(f"{argument.split('=')[0]} is given, but nothing uses it; add {add}, or leave it away")


def check_methods(
    options: PrunerOptions, methods: Sequence[Method], budgets: Sequence[BudgetOption], distil: Mapping[str, float]
) -> None:
    """Whether the module will take the options that each method gives it, before hours of training.

    Raises:
        GateError: for the first that it will not take.
    """
    for method in methods:
        own: dict[str, Any] = dict(method.learned.options) if method.is_learned else {}
        if "distil" in method.modifiers:
            own |= distil
        if "refit" in method.modifiers:
            own["refit"] = True
        for budget in budgets:
            replace(options, **{"budget": budget, **own})  # raises


def check_fixed(options: PrunerOptions, methods: Sequence[Method], stages: Sequence[str]) -> None:
    """Raises :class:`GateError` for what weights that are fixed cannot have done with them."""
    for stage in stages:
        if options.nothing_trains and stage != FROM_SCRATCH and not is_post_hoc(stage):
            raise GateError(f"{options.nothing_trains}, but --stages has {stage!r}; give 'post hoc' alone")
    for method in methods:
        if options.is_half and method.base in BY_RELEVANCE:
            raise GateError(f"{options.nothing_trains}, but {method.base} needs weights in float32; take it out of --methods")


def check_times(options: PrunerOptions, budgets: Sequence[BudgetOption], *, launcher: str) -> None:
    """Raises :class:`GateError` for a table that no budget goes by, a time that it does not allow, and one that would be
    measured elsewhere than where models are trained."""
    times = [budget for budget in budgets if isinstance(budget, str)]
    if options.latency_table is not None:
        if not times:
            raise GateError("--model.latency_table is given, but no budget is a time; add one to --budgets, or leave it away")
        table = LatencyTable.read(options.latency_table)
        for time in times:
            TimeLimit.parse(time, table)  # raises
    elif times and launcher == "ray":
        raise GateError(
            f"--budgets has {times[0]}, and this machine need not be like those of the cluster; measure a table on one of them "
            "(python -m training latency) and give --model.latency_table"
        )


def check_kinds(methods: Sequence[Method], budgets: Sequence[BudgetOption]) -> None:
    """Raises :class:`GateError` if budgets are of different kinds, but a method learns for the smallest of them alone."""
    kinds = {frozenset(budget) if isinstance(budget, dict) else None for budget in budgets}
    once = [method.name for method in methods if method.is_learned and method.learned.decides == "once"]
    if once and len(kinds) > 1:
        raise GateError(
            f"{once[0]} learns once, for the smallest budget, and ranks only heads of the kinds that it prunes; make a "
            "comparison of each kind's budgets"
        )
