"""Whether methods keep specialised heads more often than others, by budget (Voita et al. 2019, figures 7 and 8)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from gates.errors import GateError
from training.analysis.model import AnalysisResult
from training.report.pictures import survivors
from training.report.reading import Masks, read_masks, read_roles, role_counts
from training.stats.numbers import counted, listed
from training.stats.significance import Odds, Table, cross_table, exact_odds, pooled_odds, ratio_of_odds

Tables = Mapping[tuple[str, int], Mapping[int, Table]]


def survival_of_roles(run: str, roles: str) -> AnalysisResult:
    """Compare which of the specialised and of the other heads every method keeps."""
    table, masks = read_roles(Path(roles)), masks_of_heads(Path(run))
    heads = len(next(iter(next(iter(masks.values())).values())))
    if heads != len(table):
        raise GateError(f"{roles!r} has {len(table)} heads and the masks in {run!r} {heads}; give the roles of the same model")
    special = table["specialised"].to_numpy(dtype=bool)
    tables = {key: {seed: cross_table(mask, special) for seed, mask in own.items()} for key, own in masks.items()}
    kept, by_role = kept_table(tables), role_counts(table, masks)
    sure = int((kept["first_seed_low"] > 1).sum())
    sentences = [
        f"Of {heads} heads {int(special.sum())} are specialised. Odds ratios above 1 mean that they are kept more often than "
        "the others; intervals are exact for one seed, and Student's over seeds, which are the unit, for several.",
        f"By the exact interval of the first seed alone, {sure} of {len(kept)} masks keep specialised heads more often.",
        *_kept_sentences(kept),
        *_against_his(tables),
    ]
    numbers = {"specialised": int(special.sum()), "heads": heads}
    found = {"survival": kept, "survival_by_role": by_role}
    return AnalysisResult(found, {"survival": survivors(table, by_role)}, sentences, numbers)


def masks_of_heads(run: Path) -> Masks:
    """Read the masks of a run or comparison, for every head. A gate of a group stands for all of its heads."""
    try:
        sites, masks, _ = read_masks(run)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GateError(
            f"{str(run)!r} has no masks.json and sites.json; give the directory of a finished run or comparison"
        ) from error
    if not masks:
        raise GateError(f"{str(run)!r} has no mask but the dense one; give a run that prunes")
    repeats = [heads // gates for _, gates, heads in sites for _ in range(gates)]
    return {key: {seed: np.repeat(mask, repeats) for seed, mask in of_seeds.items()} for key, of_seeds in masks.items()}


def kept_table(tables: Tables) -> pd.DataFrame:
    """Return for every method and budget the shares kept, means over seeds, and the odds ratio.

    The interval over seeds is about other seeds of the same model. The exact one of the first seed is about the few heads
    of one model.
    """
    rows = []
    for (method, budget), of_seeds in tables.items():
        own = np.array(list(of_seeds.values()), dtype=float)
        with np.errstate(invalid="ignore"):
            shares = own[:, [0, 2]] / (own[:, [0, 2]] + own[:, [1, 3]])
        odds, first = pooled_odds(list(of_seeds.values())), exact_odds(next(iter(of_seeds.values())))
        rows.append(
            {
                "method": method,
                "budget": budget,
                "seeds": len(own),
                "specialised_kept": shares[:, 0].mean(),
                "others_kept": shares[:, 1].mean(),
                "odds_ratio": odds.ratio,
                "low": odds.low,
                "high": odds.high,
                "first_seed_low": first.low,
                "first_seed_high": first.high,
            }
        )
    return pd.DataFrame(rows)


def _kept_sentences(kept: pd.DataFrame) -> list[str]:
    sentences = []
    for method, rows in kept.groupby("method", sort=False):
        parts = [
            f"at {row.budget} heads {row.specialised_kept:.0%} of the specialised and {row.others_kept:.0%} of the others, "
            + _odds_text(Odds(*of_row))
            for row, of_row in zip(rows.itertuples(), rows[["odds_ratio", "low", "high"]].to_numpy(), strict=True)
        ]
        sentences.append(f"{method} keeps {listed(parts)}.")
    return sentences


def _odds_text(odds: Odds) -> str:
    if not np.isfinite(odds.ratio):
        return "no odds ratio, as the numbers leave no choice"
    return f"odds ratio {odds.ratio:.2f}{_interval(odds)}"


def _interval(odds: Odds) -> str:
    return f" (95 % interval {odds.low:.2f} to {odds.high:.2f})" if np.isfinite(odds.low) else ""


def _against_his(tables: Tables) -> list[str]:
    """Say whether learned gates keep specialised heads more than HIS does."""
    sentences = []
    for (method, budget), own in tables.items():
        rival = tables.get(("his", budget), {})
        if method != "learned" or not (seeds := sorted(own.keys() & rival.keys())):
            continue
        factor = ratio_of_odds([own[seed] for seed in seeds], [rival[seed] for seed in seeds])
        times = f"{factor.ratio:.2f} times{_interval(factor)}" if np.isfinite(factor.ratio) else "not comparable with"
        if not np.isfinite(factor.low):
            result = "these seeds do not say how sure that is"
        elif factor.low > 1:
            result = "they keep specialised heads more than HIS does"
        else:
            result = "they keep specialised heads less than HIS does" if factor.high < 1 else "no difference is shown"
        seeds_text = counted(len(seeds), "seed")
        sentences.append(
            f"At {budget} heads the odds ratio of learned gates is {times} that of HIS over {seeds_text}: {result}."
        )
    return sentences
