"""Masks against known necessary heads, and ``truth.csv`` as tables of methods and of programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import Tensor

Functions = Sequence[Sequence[int]]
"""For each necessary function the gates that perform it; any one of them is enough."""


@dataclass(frozen=True)
class Judgement:
    """The necessary functions that a mask keeps.

    Args:
        covered: The number of necessary functions with at least one kept head.
    """

    needed: int
    kept: int
    covered: int

    @property
    def recall(self) -> float:
        """The share of the necessary functions that are kept."""
        return self.covered / self.needed

    @property
    def precision(self) -> float:
        """The share of the kept heads that are needed; of interchangeable heads the second is not."""
        return self.covered / self.kept if self.kept else 0.0

    @property
    def exact(self) -> bool:
        """Whether it keeps every necessary function once and nothing else."""
        return self.needed == self.covered == self.kept


def judged(mask: Tensor, functions: Functions) -> Judgement:
    """Compare a 0/1 mask ``[gates]`` with the necessary functions, each with heads of its own."""
    covered = sum(any(bool(mask[gate] > 0) for gate in gates) for gates in functions)
    return Judgement(len(functions), int((mask > 0).sum()), covered)


def smallest_budgets(truth: pd.DataFrame) -> pd.DataFrame:
    """Return the smallest budget from which on the function survives at every larger one that was tried, NaN without one.

    Returns:
        ``program``, ``method``, ``seed``, ``needed``, ``smallest``.
    """
    rows = []
    for (program, method, seed), tried in with_program(truth).groupby(["program", "method", "seed"], sort=False):
        falling = tried.sort_values("budget", ascending=False)
        alive = falling[falling["survives"].cumprod().astype(bool)]
        smallest = float(alive["budget"].min()) if len(alive) else float("nan")
        rows.append((program, method, seed, int(tried["needed"].iloc[0]), smallest))
    return pd.DataFrame(rows, columns=["program", "method", "seed", "needed", "smallest"])


def with_program(truth: pd.DataFrame) -> pd.DataFrame:
    """Add the column ``program``, which a comparison of one program lacks."""
    return truth if "program" in truth else truth.assign(program="")


TICK, CROSS = "✓", "✗"
COLUMNS = ("seed", "method", "budget", "needed", "recall", "precision", "exact", "survives")
"""Of ``truth.csv`` that the tables need."""
OF_FACTS = ("seed", "method", "budget", "carried", "at_best", "recall")
"""Of ``interchange.csv``."""


def ticks(truth: pd.DataFrame) -> pd.DataFrame:
    """Return what each method found where the budget is the number of necessary functions: programs by methods.

    A tick is where it found exactly the necessary heads in all seeds, a cross where in none, otherwise it says in how many.
    """
    at_needed = with_program(truth[truth["budget"] == truth["needed"]])
    found = at_needed.groupby(["program", "method"], sort=False)["exact"].agg(["sum", "size"])
    found["cell"] = [tick_or_count(int(exact), int(seeds)) for exact, seeds in zip(found["sum"], found["size"], strict=True)]
    programs = pd.Index(at_needed["program"].unique(), name="program")
    return found["cell"].unstack("method").reindex(index=programs, columns=at_needed["method"].unique())


def summary_of_truth(truth: pd.DataFrame) -> pd.DataFrame:
    """Return one row per method over all programs.

    Returns:
        ``method``; where the budget is the number of necessary functions, ``exact``, ``recall`` and ``precision``, means over
        programs and seeds, and ``survives``, the share; ``spare``, how many more heads the function needs to survive, the mean
        over programs and seeds in which it survives at all; ``lost``, the share in which it survives at no budget.
    """
    whole = with_program(truth)
    rows = []
    for method, of_method in whole.groupby("method", sort=False):
        at_needed = of_method[of_method["budget"] == of_method["needed"]]
        smallest = smallest_budgets(of_method)
        rows.append(
            {
                "method": method, "exact": at_needed["exact"].mean(), "recall": at_needed["recall"].mean(),
                "precision": at_needed["precision"].mean(), "survives": at_needed["survives"].mean(),
                "spare": (smallest["smallest"] - smallest["needed"]).mean(), "lost": smallest["smallest"].isna().mean(),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def as_markdown(truth: pd.DataFrame) -> str:
    """Return ticks and summary as two tables."""
    return f"{by_program(truth)}\n\n{by_method(truth)}\n"


def by_program(truth: pd.DataFrame) -> str:
    """Return :func:`ticks` as a Markdown table."""
    return _table(ticks(truth).reset_index())


def by_method(truth: pd.DataFrame) -> str:
    """Return :func:`summary_of_truth` as a Markdown table."""
    return _table(summary_of_truth(truth))


def by_facts(carried: pd.DataFrame) -> str:
    """Return ``interchange.csv`` as a Markdown table.

    Each method and budget has the kept share of the effects of all heads, relative to the best mask of its size. It is the mean
    over seeds with its standard deviation. Next to it is the mean share of the carriers that are kept.
    """
    shares = carried.assign(share=carried["carried"] / carried["at_best"])
    budgets = sorted(shares["budget"].unique(), reverse=True)
    rows = []
    for method, of_method in shares.groupby("method", sort=False):
        at = {budget: of_method[of_method["budget"] == budget] for budget in budgets}
        kept = {f"share, {budget} heads": _spread(found["share"]) for budget, found in at.items()}
        recall = {f"carriers, {budget} heads": found["recall"].mean() for budget, found in at.items()}
        rows.append({"method": method} | kept | recall)
    return _table(pd.DataFrame(rows))


def _spread(values: pd.Series) -> str:
    return f"{values.mean():.2f} ± {values.std():.2f}" if len(values) > 1 else f"{values.mean():.2f}"


def tick_or_count(exact: int, seeds: int) -> str:
    """Return a tick where all seeds are exact, a cross where none is, otherwise their number."""
    return TICK if exact == seeds else CROSS if exact == 0 else f"{exact}/{seeds}"


def _table(frame: pd.DataFrame) -> str:
    def text(value: Any) -> str:
        if isinstance(value, float):
            return "" if math.isnan(value) else f"{value:.2f}"
        return str(value)

    rows: Sequence[Sequence[Any]] = [list(frame.columns), ["---"] * frame.shape[1], *frame.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(map(text, row))} |" for row in rows)
