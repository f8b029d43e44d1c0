"""Methods, budgets, seeds, prices and stages as they stand on the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from gates.budget import Budget
from gates.errors import GateError
from training.config import LARGEST_SEED, BudgetOption, PriceOption
from training.stats.stages import STAGES


def split(value: Any) -> list[Any]:
    """``a,b`` or ``[a, b]`` as a list; commas within braces or brackets do not separate."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, (list, tuple)) else [value]
    try:
        parsed = yaml.safe_load(f"[{value}]")
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
    if isinstance(value, bool) or not isinstance(value, (int, float, dict)):
        raise GateError(f"--budgets has {value!r}; expected numbers of heads, fractions, or one of these per kind")
    return value


def parse_prices(values: list[Any]) -> list[PriceOption]:
    for index, value in enumerate(values):
        of_kinds = value.values() if isinstance(value, dict) else [value]
        for price in of_kinds:
            if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price < math.inf:
                raise GateError(f"--prices has {value!r}; expected numbers from 0, or one of these per kind")
        if value in values[:index]:
            raise GateError(f"--prices has {value!r} twice; give each price once")
    return values


def check_budgets(budgets: Sequence[BudgetOption], sizes: Mapping[str, int]) -> None:
    totals = [Budget.parse(value, sizes).total for value in budgets]
    for index, total in enumerate(totals):
        if total in totals[:index]:
            same = f"{budgets[totals.index(total)]} and {budgets[index]}"
            raise GateError(
                f"--budgets has {same}, which both keep {total} heads in all; tables tell budgets by this number, so give each "
                "number once, or make a comparison of each"
            )
        if total in (0, sum(sizes.values())):
            raise GateError(f"--budgets has {budgets[index]!r}, which is {total} heads; nothing can be compared there")
    if not totals:
        raise GateError("--budgets is empty; give numbers of heads or fractions, for example 0.5,0.25")
