"""What a comparison is of: methods, budgets, seeds, prices and stages as they stand on the command line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from gates.errors import GateError
from gates.latency.table import EXPECTED, parse_time
from gates.options import NO_KIND
from training.config.model import BudgetOption, PriceOption, Time
from training.config.paths import LocalPath
from training.config.run import LARGEST_SEED
from training.config.stages import STAGES
from training.config.yaml_text import load_yaml

BY_RELEVANCE = ("relevance", "relevance(rule=gradient-x-input)")
"""Scored methods that follow a prediction back through the model, see :mod:`gates.relevance`."""
Listed = str | int | float | list[Any]
"""``a,b`` or ``[a, b]`` on a command line."""


@dataclass(frozen=True)
class ComparisonOptions:
    """What is compared.

    Args:
        methods: methods, separated by commas; --list_methods shows all.
        budgets: budgets, separated by commas, each as --model.budget takes it.
        seeds: of weights, data order and gates, separated by commas.
        stages: some of post hoc, post hoc with means, post hoc with optimal constants, post hoc with uniform
            attention, retrained, retrained from dense, retrained at equal total cost, from scratch.
        prices: prices of open heads for lambda, each trained with; at each budget the best on the selection split is taken
            (default: --model.price alone).
        experiments: where finished experiments lie (default: RUN_DIR/experiments).

    Attributes:
        all_methods, all_budgets, all_seeds, all_stages, all_prices: what the lists hold.
    """

    methods: Listed = "learned,his,hies,random"
    budgets: Listed = "0.5,0.25,0.125"
    seeds: Listed = "0,1,2"
    stages: Listed = "post hoc,retrained"
    prices: Listed | None = None
    experiments: LocalPath | None = None
    all_methods: list[str] = field(init=False, repr=False, default_factory=list)
    all_budgets: list[BudgetOption] = field(init=False, repr=False, default_factory=list)
    all_seeds: list[int] = field(init=False, repr=False, default_factory=list)
    all_stages: list[str] = field(init=False, repr=False, default_factory=list)
    all_prices: list[PriceOption] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        names = split_methods(self.methods) if isinstance(self.methods, str) else split(self.methods)
        self.all_methods.extend(str(name).strip() for name in names if str(name).strip())
        self.all_seeds.extend(parse_seeds(split(self.seeds)))
        self.all_stages.extend(parse_stages(split(self.stages)))
        self.all_prices.extend(parse_prices([] if self.prices is None else split(self.prices)))
        if self.prices is not None and not self.all_prices:
            raise GateError("--prices is empty; give some, for example 0.003,0.01,0.03, or leave it out")
        if not self.all_methods:
            raise GateError("--methods is empty; give some, for example learned,his; --list_methods shows all")
        self.all_budgets.extend(parse_budget(value) for value in split(self.budgets))
        if not self.all_budgets:
            raise GateError("--budgets is empty; give numbers of heads or fractions, for example 0.5,0.25")


def split_methods(text: str) -> list[str]:
    """Return the names in a list; commas between the brackets of a method's parameters do not separate.

    >>> split_methods("learned, his(granularity=token, steps=10)")
    ['learned', 'his(granularity=token, steps=10)']
    """
    return [name.strip() for name in re.split(r",(?![^()]*\))", text.strip("[] "))]


def split(value: Any) -> list[Any]:
    """``a,b`` or ``[a, b]`` as a list; commas within braces or brackets do not separate."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, (list, tuple)) else [value]
    try:
        parsed = load_yaml(f"[{value}]", repr(value[:60]))
    except yaml.YAMLError as error:
        raise GateError(f"{value!r} is not a list; expected values separated by commas") from error
    return parsed[0] if len(parsed) == 1 and isinstance(parsed[0], list) else parsed


def parse_seeds(values: list[Any]) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_SEED:
            raise GateError(f"--seeds has {value!r}; expected whole numbers from 0 to {LARGEST_SEED}, separated by commas")
    if not values or len(set(values)) < len(values):
        raise GateError(f"--seeds is {','.join(map(str, values))!r}; expected at least one, and each once")
    return values


def parse_stages(values: list[Any]) -> list[str]:
    for value in values:
        if value not in STAGES:
            raise GateError(f"--stages has {value!r}; expected some of {', '.join(STAGES)}")
    if not values:
        raise GateError(f"--stages is empty; expected some of {', '.join(STAGES)}")
    return [stage for stage in STAGES if stage in values]


def parse_budget(value: Any) -> BudgetOption:
    if isinstance(value, str) and value.strip().endswith(("ms", "x")):
        parse_time(value)  # raises
        return Time(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, dict)):
        raise GateError(f"--budgets has {value!r}; expected numbers of heads, fractions, one of these per kind, or {EXPECTED}")
    return value


def parse_prices(values: list[Any]) -> list[PriceOption]:
    for index, value in enumerate(values):
        of_kinds = value.values() if isinstance(value, dict) else [value]
        for price in of_kinds:
            if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price < math.inf:
                raise GateError(f"--prices has {value!r}; expected numbers from 0, or one of these per kind")
        if value == {}:
            raise GateError(NO_KIND.format("--prices has", 0.01))
        if value in values[:index]:
            raise GateError(f"--prices has {value!r} twice; give each price once")
    return values
