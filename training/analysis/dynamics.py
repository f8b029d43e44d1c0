"""Roles through training: when a role appears, how long it stays, and in which order the heads of each role close."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from gates.roles.roles import RULES
from training.analysis.closing import Closing, closing_told, role_rows
from training.analysis.looks import Course
from training.analysis.model import Finding
from training.analysis.role_story_plots import roles_over_time
from training.report.role_table import NONE, SPECIALISED, roles_of_gates
from training.stats.numbers import counted, listed

KEYS = ["site", "head"]
COLUMNS = {SPECIALISED: SPECIALISED, **{rule.name: f"{rule.name}_has" for rule in RULES}}
"""Groups of heads by the columns that say who is in them."""
PRUNED = "pruned"


def dynamics_of(course: Course) -> Finding:
    """When roles appear, in tables, a picture and words.

    Args:
        course: two looks or more.
    """
    heads = heads_over_time(course)
    over_time, appearing = roles_by_look(heads), appearances(heads)
    sentences = [_looked(course), *_appeared(appearing, over_time, course.unit)]
    numbers: dict[str, Any] = {"looks": len(course.looks), "same_weights": course.same}
    tables = {"dynamics": over_time, "dynamics_heads": heads, "dynamics_appearing": appearing}
    if course.closing is not None:
        tables["dynamics_closing"] = closing = closing_by_role(course, course.closing)
        sentences += closing_told(closing)
    return Finding(tables, {"dynamics": roles_over_time(over_time, course.unit)}, sentences, numbers)


def heads_over_time(course: Course) -> pd.DataFrame:
    """A row for each look and head, pruned ones included, whose roles are then ``pruned``; strengths are those of the look."""
    everyone = course.looks[0].roles[[*KEYS, "kind", "layer"]]
    strengths = [f"{rule.name}_strength" for rule in RULES]
    parts = []
    for look in course.looks:
        own = everyone.merge(look.roles[[*KEYS, "roles", *COLUMNS.values(), *strengths]], on=KEYS, how="left")
        own["roles"] = own["roles"].fillna(PRUNED)
        for name in COLUMNS.values():
            own[name] = own[name].eq(True)
        own.insert(0, "time", look.time)
        own.insert(1, "phase", look.phase)
        parts.append(own.assign(gate=np.nan if look.gates is None else look.gates.numpy().astype(float)))
    return pd.concat(parts, ignore_index=True)


def roles_by_look(heads: pd.DataFrame) -> pd.DataFrame:
    """A row for each look and role: how many of the heads that are not pruned have it, with the exact interval of the share;
    how many have it newly and no more since the look before; and how many of them have a gate above 0."""
    rows = []
    looks = list(heads.groupby("time", sort=False))
    for name, column in COLUMNS.items():
        before = np.zeros(0, dtype=bool)
        for time, own in looks:
            there, has = own["roles"].ne(PRUNED).to_numpy(), own[column].to_numpy(dtype=bool)
            low, high = stats.binomtest(int(has.sum()), max(1, int(there.sum()))).proportion_ci(method="exact")
            known = before if before.size else has
            rows.append(
                {
                    "time": time,
                    "phase": own["phase"].iloc[0],
                    "role": name,
                    "heads": int(there.sum()),
                    "with_role": int(has.sum()),
                    "share": has.sum() / max(1, there.sum()),
                    "low": low,
                    "high": high,
                    "new": int((has & ~known).sum()),
                    "lost": int((known & ~has & there).sum()),
                    "open": int((has & (own["gate"].to_numpy() > 0)).sum()) if own["gate"].notna().all() else np.nan,
                }
            )
            before = has
    return pd.DataFrame(rows)


def appearances(heads: pd.DataFrame) -> pd.DataFrame:
    """A row for each head and each role that it has at some look: the first look with it; the look from which on it has it at
    every look, up to the last or to its pruning (NaN where it loses it); and at how many looks it has it."""
    times = heads["time"].unique()
    there = heads["roles"].ne(PRUNED).to_numpy().reshape(len(times), -1)
    first = heads.iloc[: there.shape[1]]
    rows = []
    for name, column in COLUMNS.items():
        held = heads[column].to_numpy(dtype=bool).reshape(len(times), -1)
        for head in np.flatnonzero(held.any(axis=0)):
            own = held[there[:, head], head]
            lost = np.flatnonzero(~own)
            since = 0 if not lost.size else lost[-1] + 1
            rows.append(
                {
                    "site": first["site"].iloc[head],
                    "head": first["head"].iloc[head],
                    "role": name,
                    "first": times[there[:, head]][own.argmax()],
                    "for_good": times[there[:, head]][since] if since < len(own) else np.nan,
                    "looks": int(own.sum()),
                }
            )
    return pd.DataFrame(rows, columns=["site", "head", "role", "first", "for_good", "looks"])


def closing_by_role(course: Course, closing: Closing) -> pd.DataFrame:
    """When the heads of each role close, by the roles that they had when pruning began."""
    dense = [look for look in course.looks if look.phase in ("start", "finetune")][-1].roles
    return role_rows(closing, roles_of_gates(dense, closing.sites, "this run"))


def _looked(course: Course) -> str:
    first, last = course.looks[0], course.looks[-1]
    span = f"from {course.unit} {first.time:g} to {course.unit} {last.time:g}"
    sentence = f"Roles at {counted(len(course.looks), 'look')}, {span}."
    if course.same is None:
        return sentence
    there = "is the run's to the last bit." if course.same else "is not the run's to the last bit, as on another machine."
    return f"{sentence} The model at the end of fine-tuning {there}"


def _appeared(appearing: pd.DataFrame, over_time: pd.DataFrame, unit: str) -> list[str]:
    """For every role when the heads that end with it got it for good."""
    start = over_time["time"].iloc[0]
    sentences, middles = [], {}
    for name, rows in appearing.groupby("role", sort=False):
        own, good = over_time[over_time["role"] == name], rows["for_good"].dropna()
        first, last = own.iloc[0], own.iloc[-1]
        counts = (f"{look['with_role']} of {look['heads']}" for look in (first, last))
        told = f"{name}: {' heads at first, '.join(counts)} at the end"
        if not len(good):
            sentences.append(f"{told}; {len(rows)} had it at some time and none kept it.")
            continue
        early = int((good == start).sum())
        low, high = stats.binomtest(early, len(good)).proportion_ci(method="exact")
        middles[str(name)] = float(np.median(good))
        lost = len(rows) - len(good)
        since = f"{early} ({early / len(good):.0%}, 95 % interval {low:.0%} to {high:.0%}) had it from the first look on"
        sentences.append(
            f"{told}; of the {counted(len(good), 'head')} that kept it to the end, or to their pruning, {since}, and the "
            f"middle one has it for good from {unit} {middles[str(name)]:g} on; {lost} had it for a while."
        )
    order = [
        f"{name} ({unit} {middle:g})"
        for name, middle in sorted(middles.items(), key=lambda pair: pair[1])
        if name != SPECIALISED
    ]
    if len(order) > 1:
        sentences.append(f"By when the middle head has its role for good: {listed(order)}.")
    return sentences or [f"No head has a role at any look; all are {NONE}."]
