"""Write the results as Markdown tables, with the goals of the project."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tools.benchmark.setting import Row

PERCENT = {"heads_kept": 1, "of_ideal": 0, "of_roofline": 0, "parameters_left": 0, "difference": 2}
"""Columns that are shown in percent, with their decimals."""


@dataclass(frozen=True)
class Goal:
    """A bound for the median of a column in every row of a part, or in those with the columns and values of ``where``."""

    part: str
    text: str
    column: str
    bound: float
    sense: Literal["at most", "at least"] = "at most"
    where: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None


def _on_gpu(
    part: str, text: str, column: str, bound: float, sense: Literal["at most", "at least"] = "at most", **where: Any
) -> Goal:
    text = ", ".join([text, *(str(value) if name != "length" else f"{value:,} tokens" for name, value in where.items())])
    return Goal(part, text, column, bound, sense, where, "cuda")


STEP, STEP_MEMORY = "time of a gated step over a plain one", "peak memory of a gated step over a plain one"
ENTROPY = "time of the entropy over that of attention itself"
GOALS = (
    Goal("step", STEP, "time_ratio", 1.02, device="cpu"),
    Goal("step", STEP_MEMORY, "memory_ratio", 1.02, device="cpu"),
    _on_gpu("step_bfloat16", STEP, "time_ratio", 1.02, model="encoder", dtype="bfloat16", size="32 x 512"),
    _on_gpu("step_bfloat16", STEP, "time_ratio", 1.05, model="encoder", dtype="bfloat16", size="32 x 128"),
    _on_gpu("step_bfloat16", STEP, "time_ratio", 1.05, model="encoder", dtype="bfloat16", size="8 x 64"),
    _on_gpu("step", STEP, "time_ratio", 1.02, model="encoder", dtype="float32", size="32 x 512"),
    _on_gpu("step_bfloat16", STEP_MEMORY, "memory_ratio", 1.01, model="encoder", dtype="bfloat16", size="32 x 512"),
    _on_gpu("step", STEP_MEMORY, "memory_ratio", 1.01, model="encoder", dtype="float32", size="32 x 512"),
    Goal("counts", "operations of a gated step more than of a plain one", "more_operations", 60),
    Goal("counts", "values that a gated step copies to the host more than a plain one", "more_to_host", 0),
    _on_gpu("counts", "kernels of a gated step more than of a plain one", "more_kernels", 60),
    _on_gpu("counts", "waits of the host in a gated step more than in a plain one", "more_waits", 0),
    Goal("gates_alone", "time of a step of gates alone over a plain one", "time_ratio", 0.70),
    Goal("scores", "time of exact HIS over a plain forward and backward pass", "his_ratio", 0.70),
    _on_gpu("scores", "speed of exact HIS over one example at a time", "one_by_one_speedup", 20, "at least", size="32 x 128"),
    Goal("entropy", ENTROPY, "over_attention", 1.3, device="cpu"),
    *(
        _on_gpu("entropy", ENTROPY, "over_attention", 1.0 if length > 512 and dtype == "bfloat16" else 1.3, dtype=dtype,
                length=length) for dtype in ("bfloat16", "float32") for length in (128, 512, 2048, 8192)
    ),
    Goal("stock", "speed of a pruned model over a stock model of its size", "of_stock", 0.98, "at least"),
    Goal("pruned", "share of the ideal speed-up, PyTorch", "of_ideal", 0.95, "at least", {"how": "eager"}),
    Goal("pruned", "share of the ideal speed-up, compiled", "of_ideal", 0.95, "at least", {"how": "compiled"}, "cpu"),
    Goal("pruned", "share of the ideal speed-up, ONNX Runtime", "of_ideal", 0.95, "at least", {"how": "onnx"}, "cpu"),
    Goal("pruned", "share of the ideal speed-up, decoding", "of_ideal", 0.95, "at least", {"how": "decode"}),
    Goal("compiled", f"{STEP}, compiled", "time_ratio", 1.02),
    Goal("job", "time of the whole job over plain fine-tuning", "time_ratio", 1.03, where={"over": "plain fine-tuning"}),
    Goal("growth", "time of a gated step over a plain one, of small models of other shapes", "time_ratio", 1.02),
    _on_gpu("seconds", "seconds that a part takes", "seconds", 180),
)  # fmt: skip


def judge(goal: Goal, rows: Sequence[Row]) -> Row:
    """Compare the medians of rows with a goal.

    >>> rows = [{"time_ratio": {"median": 1.0, "low": 0.9, "high": 1.1}}, {"time_ratio": 1.3}, {"time_ratio": None}]
    >>> judge(GOALS[0], rows)["kept_in"], judge(GOALS[0], rows)["verdict"]
    ('1 of 2', 'missed')
    """
    found = [row[goal.column] for row in rows if goal.where.items() <= row.items()
             if row.get(goal.column) is not None]  # fmt: skip
    values = [cell["median"] if isinstance(cell, Mapping) else cell for cell in found]
    keeps, worst = (operator.le, max) if goal.sense == "at most" else (operator.ge, min)
    kept = sum(keeps(value, goal.bound) for value in values)
    undecided = sum(isinstance(cell, Mapping) and cell["low"] <= goal.bound < cell["high"] for cell in found)
    row: Row = {"goal": goal.text, "bound": f"{goal.sense} {goal.bound:g}"}
    if not values:
        return row | {"worst": "", "kept_in": "", "quartiles_on_both_sides": "", "verdict": "not measured"}
    counts = {"kept_in": f"{kept} of {len(values)}", "quartiles_on_both_sides": f"{undecided} of {len(values)}"}
    return row | {"worst": f"{worst(values):.3g}"} | counts | {"verdict": "met" if kept == len(values) else "missed"}


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table, with the columns of all of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    headings = [name.replace("_", " ").replace(" ms", ", ms").replace(" mb", ", MB").replace(" gb", ", GB") for name in names]
    lines = [headings, ["---"] * len(names), *([shown(row.get(name), name) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Any, column: str = "") -> str:
    """Return a cell as text: a median with its quartiles, and a share in percent.

    >>> shown({"median": 1.0042, "low": 0.998, "high": 1.0119}), shown(1234567), shown(0.125, "heads_kept"), shown(None)
    ('1.004 (0.998 to 1.012)', '1,234,567', '12.5 %', '')
    """
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return f"{shown(value['median'], column)} ({shown(value['low'], column)} to {shown(value['high'], column)})"
    if not isinstance(value, int | float):
        return str(value)
    if column in PERCENT:
        return f"{100 * value:.{PERCENT[column]}f} %"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def markdown(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the machine of a record with the tables of these parts; ``goals`` names that of the goals."""
    setting, seconds = record["setting"], record.get("seconds", {})
    parts = record["parts"] | {"seconds": [{"part": name, "seconds": taken} for name, taken in seconds.items()]}
    blocks = [f"{record['machine']['hardware']} ({record['machine']['cores']} cores); random models, {setting['shape']}; "
              + ", ".join(f"{name} {version}" for name, version in record["versions"].items())
              + f"; code {record['code']}"
              + "; time that the processor worked" * setting["processor_time"]
              + "; a quick look, no measurement" * setting["quick"] + ":"]  # fmt: skip
    for name in names:
        rows = parts.get(name, [])
        if name == "goals":
            goals = [goal for goal in GOALS if goal.part in parts and goal.device in (None, setting["device"])]
            rows = [judge(goal, parts[goal.part]) for goal in goals]
        if rows:
            blocks += [f"### {name}" + (f", in {seconds[name]:.0f} s" if name in seconds else ""), table(rows)]
    return "\n\n".join(blocks)
