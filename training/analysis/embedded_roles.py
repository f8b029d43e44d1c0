"""Roles where the truth is known, in trained models: which heads of models of the generated language look along its gold arcs,
whether they are those that carry the facts, and which of both methods keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from gates.errors import GateError
from training.analysis.arc_roles import ARC, QUESTION_OF, ArcRoles, arc_roles
from training.analysis.dense_models import dense_of_seeds
from training.analysis.known_roles import MEASURED, group_table, told_of_groups
from training.analysis.model import Finding
from training.analysis.survival import Masks, read_masks
from training.comparison.carriers import CARRIES, LEARNED, ROWS, effects_on
from training.data.synthetic import QUESTIONS, SyntheticData
from training.report.role_table import NONE
from training.runs import progress
from training.scoring.subject import Subject
from training.stats.numbers import counted, listed
from training.stats.odds import cross_table, pooled_odds
from training.stats.significance import interval

CARRIERS, OTHERS = "carriers", "all others"
GROUPS = (CARRIERS, OTHERS)
ANY = "any"
KEPT = ("with an arc", CARRIERS, "neither")
"""Heads of which is said how many each method keeps."""


def of_question(question: str) -> str:
    """The role of a head that looks along an arc of a question."""
    return f"{ARC} of {question}"


def embedded_roles(run: str, overrides: Sequence[str] = ()) -> Finding:
    """Gold arcs, carriers and masks of the models of the generated language.

    Args:
        run: directory of a run or comparison of ``Synthetic``, with its models.
        overrides: arguments in place of its configuration's.

    Raises:
        GateError: if it has no masks or models, is of other data, or its models have learned nothing.
    """
    masks, models = read_masks(Path(run)), dense_of_seeds(run, overrides)
    found, arcs, unlearned = [], [], []
    for seed, subject in progress.track(models, "looking at models"):
        data = subject.data
        if not isinstance(data, SyntheticData):
            raise GateError(
                f"{run!r} is of {type(data.options).__name__}, which has no gold arcs; give a run or comparison of Synthetic, "
                "or a comparison of KnownTruth, which has a truth.csv"
            )
        effects = {fact: torch.tensor(own) for fact, own in effects_on(subject, data).items()}
        if not effects:
            unlearned.append(seed)
            continue
        roles = arc_roles(subject, data, ROWS)
        found.append(head_table(seed, subject, effects, roles))
        arcs.append(arc_table(seed, found[-1], roles))
    if not found:
        raise GateError(
            f"no dense model of {run!r} answers a question right in {LEARNED:.0%} of the cases, so no head can be told to "
            "carry a fact; train longer (--model.finetune)"
        )
    heads = pd.concat(found, ignore_index=True)
    names = [ARC, *map(of_question, QUESTIONS), *(rule.name for rule in MEASURED)]
    groups, facts, methods = group_table(heads, GROUPS, names), fact_table(heads), method_table(heads, masks)
    tables = {
        "known_roles": groups, "known_roles_heads": heads, "known_roles_methods": methods,
        "known_roles_arcs": pd.concat(arcs, ignore_index=True), "known_roles_facts": facts,
    }  # fmt: skip
    numbers = {"models": len(found), "heads": len(heads), "unlearned_seeds": unlearned}
    return Finding(tables, {}, _told(groups, facts, methods, len(found), unlearned), numbers)


def head_table(seed: int, subject: Subject, effects: dict[str, Tensor], roles: ArcRoles) -> pd.DataFrame:
    """A row for every head of a model: what it carries, its group, its arcs and its roles.

    Args:
        seed, subject: of the model.
        effects: interchange effects of every gate ``[gates]``, of the facts that the model has learned.
        roles: of its heads.
    """
    gates = subject.gates
    of_heads = {fact: gates.to_heads(own.to(subject.device).float()).cpu() for fact, own in effects.items()}
    places = [(site.label, site.layer, head) for site in gates.sites for head in range(site.heads)]
    rows = []
    for number, (site, layer, head) in enumerate(places):
        carries = [fact for fact, own in of_heads.items() if float(own[number]) >= CARRIES]
        arcs = roles.arcs_of(number)
        held = [ARC] if arcs else []
        held += [of_question(question) for question in dict.fromkeys(arcs.values())]
        held += [role.rule.name for role in roles.others if bool(role.holds[number])]
        rows.append(
            {
                "seed": seed, "site": site, "layer": layer, "head": head,
                "carries": ", ".join(carries) or NONE, "group": CARRIERS if carries else OTHERS,
                "arcs": ", ".join(arcs) or NONE, "roles": ", ".join(held) or NONE,
                "arc_by": roles.far.column[number],
                "arc_strength": float(roles.far.strength[number]), "arc_baseline": float(roles.far.baseline[number]),
                **{f"{name}_share": float(share[number]) for name, share in roles.shares.items()},
                **{f"{fact}_effect": float(of_heads[fact][number]) if fact in of_heads else np.nan for fact in QUESTIONS},
                **{f"{role.rule.name}_strength": float(role.strength[number]) for role in roles.others},
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def arc_table(seed: int, heads: pd.DataFrame, roles: ArcRoles) -> pd.DataFrame:
    """A row for every arc: how many heads of a model look along it, and how often the best one does and a fixed distance would.

    Args:
        seed: of the model.
        heads: its :func:`head_table`.
        roles: of its heads.
    """
    return pd.DataFrame(
        {
            "seed": seed, "question": question, "arc": name, "heads": int(has(heads["arcs"], name).sum()),
            "best_share": heads[f"{name}_share"].max(), "baseline": roles.baselines[name],
        }
        for name, question in QUESTION_OF.items()
    )  # fmt: skip


def has(column: pd.Series, name: str) -> pd.Series:
    """Whether a list in words has a name in it."""
    return column.str.split(", ").map(lambda held: name in held)


def fact_table(heads: pd.DataFrame) -> pd.DataFrame:
    """For every question, and for any of them, how many heads look along its arcs, how many carry its fact, and how many do
    both; of each the share with its exact interval over heads, and the odds ratio with that over seeds. Models that have not
    learned a question do not count there."""
    rows = []
    for question in (ANY, *QUESTIONS):
        own = heads if question == ANY else heads[heads[f"{question}_effect"].notna()]
        if not len(own):
            continue
        looks = has(own["roles"], ARC if question == ANY else of_question(question))
        carries = own["group"] == CARRIERS if question == ANY else has(own["carries"], question)
        odds = pooled_odds(
            [
                cross_table(np.asarray(carries[of_seed.index], dtype=np.float64), np.asarray(looks[of_seed.index], dtype=bool))
                for _, of_seed in own.groupby("seed")
            ]
        )
        rows.append(
            {
                "question": question, "models": own["seed"].nunique(), "heads": len(own), "with_arc": int(looks.sum()),
                "carriers": int(carries.sum()), "both": int((looks & carries).sum()),
                **_share("arcs_that_carry", looks & carries, looks), **_share("others_that_carry", ~looks & carries, ~looks),
                "odds_ratio": odds.ratio, "odds_low": odds.low, "odds_high": odds.high,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def _share(name: str, chosen: pd.Series, among: pd.Series) -> dict[str, float]:
    """A share with its exact interval; NaN of none."""
    count, of = int(chosen.sum()), int(among.sum())
    low, high = stats.binomtest(count, of).proportion_ci(method="exact") if of else (np.nan, np.nan)
    return {name: count / of if of else np.nan, f"{name}_low": low, f"{name}_high": high}


def method_table(heads: pd.DataFrame, masks: Masks) -> pd.DataFrame:
    """What each method keeps at each budget of the heads with an arc, of the carriers, and of those that are neither: the mean
    share over seeds with Student's interval, and of as many as the mask could keep.

    Args:
        heads: as :func:`head_table` has them, of all seeds.
        masks: of every head.
    """
    groups = {
        seed: {
            KEPT[0]: has(own["roles"], ARC).to_numpy(),
            CARRIERS: (own["group"] == CARRIERS).to_numpy(),
            KEPT[2]: (~has(own["roles"], ARC) & (own["group"] != CARRIERS)).to_numpy(),
        }
        for seed, own in heads.groupby("seed")
    }
    rows = []
    for (method, budget), of_seeds in masks.items():
        for name in KEPT:
            counts = [
                (int((mask > 0)[groups[seed][name]].sum()), int(groups[seed][name].sum()), int((mask > 0).sum()))
                for seed, mask in of_seeds.items()
                if seed in groups and groups[seed][name].any()
            ]
            if not counts:
                continue
            kept, of, most = np.array(counts, dtype=float).T
            found = interval(kept / of, bounds=(0.0, 1.0))
            rows.append(
                {
                    "method": method, "budget": budget, "heads": name, "seeds": found.seeds, "number": of.mean(),
                    "kept": found.mean, "low": found.low if found.std else np.nan, "high": found.high if found.std else np.nan,
                    "recall": (kept / np.minimum(of, most)).mean(),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def _told(groups: pd.DataFrame, facts: pd.DataFrame, methods: pd.DataFrame, models: int, unlearned: Sequence[int]) -> list[str]:
    sentences = [f"{counted(models, 'model')}; an arc leads to a word, as special tokens do not count as attended."]
    if unlearned:
        sentences.append(f"Left out, as their models have learned no question: seeds {listed(list(map(str, unlearned)))}.")
    sentences += told_of_groups(groups)
    for row in facts.to_dict("records"):
        what = "any question" if row["question"] == ANY else row["question"]
        odds = f"odds ratio {row['odds_ratio']:.2f}" if np.isfinite(row["odds_ratio"]) else "no odds ratio"
        sure = f" ({row['odds_low']:.2f} to {row['odds_high']:.2f})" if np.isfinite(row["odds_low"]) else ""
        sentences.append(
            f"Of {what}: {row['with_arc']} of {row['heads']} heads look along an arc, {row['carriers']} carry the fact, "
            f"{row['both']} do both; {odds}{sure}."
        )
    for (method, budget), rows in methods.groupby(["method", "budget"], sort=False):
        parts = [f"{row['kept']:.0%} of those {row['heads']}" for row in rows.to_dict("records")]
        parts = [part.replace("those carriers", "the carriers").replace("those neither", "the others") for part in parts]
        sentences.append(f"{method} keeps at {budget} heads {listed(parts)}.")
    return sentences
