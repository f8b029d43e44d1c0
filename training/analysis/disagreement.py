"""Importance against entropy: where HIS and attention entropy disagree, what those heads are, and whether combining the two
helps, and in which direction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats

from gates.errors import GateError
from gates.roles.roles import RULES
from gates.scores.importance import normalise_by_layer
from gates.scores.ranking import ranks
from training.analysis.model import Finding
from training.analysis.role_story_plots import ranks_of_roles
from training.analysis.survival import LEARNED, RIVAL, read_gate_masks
from training.report.contents import Contents
from training.report.reading import read_contents
from training.report.role_table import NONE, read_roles, roles_of_gates
from training.stats.bootstrap import Array
from training.stats.heads import Estimate, estimate, spearman, superiority
from training.stats.numbers import counted, listed, quantity
from training.stats.odds import Table, exact_odds
from training.stats.significance import interval

QUADRANTS = ("important, focused", "important, broad", "unimportant, focused", "unimportant, broad")
"""By HIS above its median or not, and entropy above its median (broad) or not."""
FOCUSED, BROAD = "focused", "broad"
DIRECTIONS = {
    "entropy-high-first": FOCUSED, "hies": FOCUSED, "rank-sum": FOCUSED,
    "entropy-low-first": BROAD, "hies-broad": BROAD, "rank-sum-broad": BROAD,
}  # fmt: skip
"""Methods with entropy by the heads that it speaks for."""


def disagreement(run: str, roles: str) -> Finding:
    """Ranks by HIS and by entropy of every gate with its roles, the roles of the quadrants, and what a sum of the ranks says of
    the gates that learned ones keep, and of results.

    Args:
        run: directory of a run or comparison, with its scores.
        roles: ``roles.csv`` of the same model.

    Raises:
        GateError: if one of them is missing, or they are not of the same heads.
    """
    contents = read_contents(Path(run))
    his, entropy, places = read_scores(contents)
    sites = [(str(site), len(rows)) for site, rows in places.groupby("site", sort=False)]
    table = roles_of_gates(read_roles(Path(roles)), sites, f"the scores in {run!r}")
    heads = head_table(table, his, entropy)
    correlations = correlation_table(heads, his, entropy)
    quadrants, kept = quadrant_table(heads), kept_table(contents, his, entropy)
    quality = quality_table(contents)
    tables = {"disagreement": heads, "disagreement_correlation": correlations, "disagreement_quadrants": quadrants}
    if len(kept):
        tables["disagreement_combined"] = kept
    if len(quality):
        tables["disagreement_quality"] = quality
    unit = contents.unit
    sentences = [*_correlated(correlations, len(his), unit), *_quadrants_told(quadrants, unit)]
    sentences += [*_kept_told(kept), *_quality_told(quality, contents.metric)]
    numbers = {"heads": len(heads), "seeds": len(his), "spearman": float(correlations["spearman"].iloc[0])}
    return Finding(tables, {"disagreement": ranks_of_roles(heads)}, sentences, numbers)


def read_scores(contents: Contents) -> tuple[Array, Array, pd.DataFrame]:
    """HIS, normalised by layer as the method ``his`` has it, and entropy, ``[seeds, gates]``, with the site of each gate.

    Raises:
        GateError: if they were not both scored.
    """
    where, scores = str(contents.path), contents.scores
    if scores is None or not {"his", "entropy", "site"} <= set(scores.columns):
        raise GateError(
            f"{where!r} has no scores.csv with HIS and entropy; give a run of fit with --compare full, or a comparison whose "
            "methods have both, such as his,entropy-low-first"
        )
    by_seed = [rows.sort_values("gate") for _, rows in scores.groupby("seed", sort=True)]
    places = by_seed[0][["site"]].reset_index(drop=True)
    if any(rows["site"].tolist() != places["site"].tolist() for rows in by_seed):
        raise GateError(f"scores.csv in {where!r} does not have the same gates for every seed; start the comparison again")
    his, entropy = (np.stack([rows[name].to_numpy(dtype=float) for rows in by_seed]) for name in ("his", "entropy"))
    if not (np.isfinite(his).all() and np.isfinite(entropy).all()):
        raise GateError(f"HIS or entropy of some gates in {where!r} is not known; start the comparison again")
    layer = torch.from_numpy(pd.factorize(places["site"])[0])
    return np.stack([normalise_by_layer(torch.from_numpy(row), layer).numpy() for row in his]), entropy, places


def head_table(roles: pd.DataFrame, his: Array, entropy: Array) -> pd.DataFrame:
    """A row for every gate: its roles, both scores and their ranks (1 is the largest), means over seeds, and its quadrant."""
    mean_ranks = [_ranked(values).mean(axis=0) for values in (his, entropy)]
    above = [values > np.median(values) for values in mean_ranks]
    names = [QUADRANTS[2 * (not important) + int(broad)] for important, broad in zip(*above, strict=True)]
    size = his.shape[1]
    return roles.assign(
        his=his.mean(axis=0),
        entropy=entropy.mean(axis=0),
        his_rank=size - mean_ranks[0],
        entropy_rank=size - mean_ranks[1],
        rank_difference=mean_ranks[0] - mean_ranks[1],
        quadrant=names,
    )


def _ranked(values: Array) -> Array:
    """Ranks of every seed's row, 0 for the lowest."""
    return np.stack([ranks(torch.from_numpy(row)).double().numpy() for row in values])


def correlation_table(heads: pd.DataFrame, his: Array, entropy: Array) -> pd.DataFrame:
    """Spearman's correlation of HIS and entropy: of all gates, of each kind, of specialised and of other ones."""
    kinds, special = heads["site"].str.partition(".")[0], heads["specialised"]
    groups = {"all": np.ones(len(heads), dtype=bool)}
    groups |= {str(kind): (kinds == kind).to_numpy() for kind in dict.fromkeys(kinds) if kinds.nunique() > 1}
    groups |= {"specialised": special.to_numpy(), "others": ~special.to_numpy()}
    rows = []
    for name, members in groups.items():
        found = Estimate(np.nan, np.nan, np.nan)
        if members.sum() > 2:
            found = estimate(spearman(his[:, members], entropy[:, members]), int(members.sum()))
        low_high = {"low": found.low, "high": found.high}
        rows.append({"group": name, "heads": int(members.sum()), "seeds": len(his), "spearman": found.value, **low_high})
    return pd.DataFrame(rows)


def quadrant_table(heads: pd.DataFrame) -> pd.DataFrame:
    """For every quadrant its gates, how many are specialised (with the exact interval of the share), the odds ratio against all
    other gates, and how many have each role."""
    special = heads["specialised"].to_numpy()
    rows = []
    for name in QUADRANTS:
        inside = (heads["quadrant"] == name).to_numpy()
        count, of = int((special & inside).sum()), int(inside.sum())
        bounds = stats.binomtest(count, of).proportion_ci(method="exact") if of else (np.nan, np.nan)
        cells = (special & inside, ~special & inside, special & ~inside, ~special & ~inside)
        odds = exact_odds(Table(*(int(cell.sum()) for cell in cells)))
        rows.append(
            {
                "quadrant": name,
                "heads": of,
                "specialised": count,
                "share": count / of if of else np.nan,
                "low": bounds[0],
                "high": bounds[1],
                "odds_ratio": odds.ratio,
                "odds_low": odds.low,
                "odds_high": odds.high,
                **{rule.name: int(heads.loc[inside, f"{rule.name}_has"].sum()) for rule in RULES},
                NONE: int((heads.loc[inside, "roles"] == NONE).sum()),
            }
        )
    return pd.DataFrame(rows)


def kept_table(contents: Contents, his: Array, entropy: Array) -> pd.DataFrame:
    """For the gates that learned ones keep at each budget: how often a kept one has the higher score than a closed one, by HIS,
    by entropy and by the sums of their ranks in both directions; and what a sum adds to HIS. Empty without learned masks."""
    by_his, by_entropy = _ranked(his), _ranked(entropy)
    scores = {
        RIVAL: by_his,
        "entropy-high-first": -by_entropy,
        "entropy-low-first": by_entropy,
        "rank-sum": by_his - by_entropy,
        "rank-sum-broad": by_his + by_entropy,
    }
    if not contents.masks:
        return pd.DataFrame()
    numbers = sorted(contents.scores["seed"].unique()) if contents.scores is not None else []
    rows = []
    for (method, budget), of_seeds in read_gate_masks(contents.path)[1].items():
        own = [(place, of_seeds[seed] > 0) for place, seed in enumerate(numbers) if seed in of_seeds]
        if method != LEARNED or not own or len(own[0][1]) != his.shape[1]:
            continue
        places, masks = [place for place, _ in own], np.stack([mask for _, mask in own])
        smaller = int(np.minimum(masks.sum(axis=1), (~masks).sum(axis=1)).min())
        of_his = superiority(by_his[places], masks)
        for name, values in scores.items():
            found = superiority(values[places], masks)
            level, gain = estimate(found, smaller), estimate(found - of_his, smaller)
            beside = {} if name == RIVAL else {"beyond_his": gain.value, "beyond_low": gain.low, "beyond_high": gain.high}
            where: dict[str, Any] = {"budget": budget, "seeds": len(own), "score": name, "direction": DIRECTIONS.get(name, "")}
            rows.append({**where, "ahead": level.value, "low": level.low, "high": level.high, **beside})
    return pd.DataFrame(rows)


def quality_table(contents: Contents) -> pd.DataFrame:
    """Results of methods with entropy against HIS at the same stage, budget and seeds: the mean difference of the main metric
    with Student's interval over seeds, but for one seed and for seeds that are all alike. Empty where there are none."""
    metric, rows = f"test_{contents.metric}", []
    for (stage, budget), cells in _rounds(contents.comparison):
        by_seed = cells.drop_duplicates(["method", "seed"]).pivot(index="seed", columns="method", values=metric)
        for name, direction in DIRECTIONS.items():
            if name not in by_seed or RIVAL not in by_seed:
                continue
            pair = by_seed[[name, RIVAL]].dropna()
            if not len(pair):
                continue
            found = interval((pair[name] - pair[RIVAL]).to_numpy())
            rows.append(
                {
                    "stage": stage,
                    "budget": budget,
                    "method": name,
                    "direction": direction,
                    "seeds": found.seeds,
                    "mean": pair[name].mean(),
                    "his": pair[RIVAL].mean(),
                    "difference": found.mean,
                    "low": found.low if found.std else np.nan,
                    "high": found.high if found.std else np.nan,
                }
            )
    return pd.DataFrame(rows)


def _rounds(comparison: pd.DataFrame) -> Iterator[tuple[tuple[str, int], pd.DataFrame]]:
    if not len(comparison):
        return
    for (stage, budget), cells in comparison.groupby(["stage", "budget"], sort=False):
        yield (str(stage), int(str(budget))), cells


# -- in words ------------------------------------------------------------------------------------------------------


def _correlated(table: pd.DataFrame, seeds: int, unit: str) -> list[str]:
    parts = []
    for row in table.to_dict("records"):
        found = Estimate(row["spearman"], row["low"], row["high"])
        if np.isfinite(found.value):
            of = counted(row["heads"], unit) if row["group"] == "all" else row["group"]
            parts.append(f"{found.value:.2f}{found.sure} over {of}")
    if not parts:
        return ["HIS and entropy cannot be correlated, as one of them is constant."]
    first = table.iloc[0]
    word = "go against each other" if first["high"] < 0 else "are not shown to go together"
    word = "go together" if first["low"] > 0 else word
    mean = "" if seeds == 1 else f", means of {counted(seeds, 'seed')}"
    return [f"HIS and entropy {word}: Spearman's rho {listed(parts)}{mean}; intervals are over {unit}s."]


def _quadrants_told(table: pd.DataFrame, unit: str) -> list[str]:
    sentences = []
    for row in table.to_dict("records"):
        if not row["heads"]:
            continue
        roles = [f"{row[name]} {name}" for name in (*(rule.name for rule in RULES), NONE) if row[name]]
        odds = f"; odds ratio {row['odds_ratio']:.2f} ({row['odds_low']:.2f} to {row['odds_high']:.2f})"
        odds = odds if np.isfinite(row["odds_ratio"]) else ""
        sentences.append(
            f"{row['quadrant'].capitalize()}: {counted(row['heads'], unit)}, {row['specialised']} of them specialised "
            f"({row['share']:.0%}, 95 % interval {row['low']:.0%} to {row['high']:.0%}{odds}): {listed(roles)}."
        )
    return sentences


def _kept_told(table: pd.DataFrame) -> list[str]:
    sentences = []
    for budget, rows in table.groupby("budget", sort=False) if len(table) else ():
        named = {row["score"]: row for row in rows.to_dict("records")}
        level = Estimate(*(named[RIVAL][name] for name in ("ahead", "low", "high")))
        parts = []
        for name in ("rank-sum", "rank-sum-broad"):
            gain = Estimate(*(named[name][key] for key in ("beyond_his", "beyond_low", "beyond_high")))
            parts.append(f"the sum with {DIRECTIONS[name]} heads first {_gained(gain)}")
        sentences.append(
            f"At {budget} heads one that learned gates keep has a higher HIS than one that they close in "
            f"{100 * level.value:.0f} % of all pairs{_percent(level)}; {listed(parts)}."
        )
    return sentences


def _percent(found: Estimate) -> str:
    return f" (95 % interval {100 * found.low:.0f} to {100 * found.high:.0f} %)" if np.isfinite(found.low) else ""


def _gained(gain: Estimate) -> str:
    word = "tells more" if gain.low > 0 else "tells less" if gain.high < 0 else "is not shown to tell more or less"
    sure = f", 95 % interval {100 * gain.low:+.0f} to {100 * gain.high:+.0f}" if np.isfinite(gain.low) else ""
    return f"{word} ({100 * gain.value:+.0f} points{sure})"


def _quality_told(table: pd.DataFrame, metric: str) -> list[str]:
    if not len(table):
        return ["No result of this directory combines HIS with entropy or uses entropy alone."]
    sentences = []
    for (method, direction), rows in table.groupby(["method", "direction"], sort=False):
        parts = []
        for row in rows.to_dict("records"):
            sure = f", 95 % interval {quantity(metric, row['low'])} to {quantity(metric, row['high'])}"
            sure = sure if np.isfinite(row["low"]) else ""
            sure = ", all alike" if row["seeds"] > 1 and not sure else sure
            at = f"at {row['budget']}, {row['stage']}"
            parts.append(f"{quantity(metric, row['difference'])} {at} ({counted(row['seeds'], 'seed')}{sure})")
        sentences.append(f"Test {metric} of {method}, which speaks for {direction} heads, less that of HIS: {listed(parts)}.")
    return sentences
