"""Roles where the truth is known: whether heads of compiled programs have the roles that they were built for, what necessary
heads look like, and whether methods keep those that look like something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError
from gates.roles.observe import observe_weights
from gates.roles.positional import PositionalShares
from gates.roles.roles import BROAD, FIRST_TOKEN, POSITIONAL, SEPARATOR, Role, assign
from gates.roles.sinks import SinkShares
from gates.roles.view import View
from gates.sites import find_attention
from training.analysis.model import Finding
from training.data.known_truth import build_tokenizer, generate
from training.report.role_table import NONE
from training.runs import progress
from training.runs.stored import read_table
from training.stats.numbers import counted, listed
from training.stats.significance import interval
from training.truth.compiler import compiled
from training.truth.program import PLACE, Head, Program
from training.truth.programs import PROGRAMS
from training.truth.survival import with_program

SENTENCES = 200
"""Strings of every program, on which roles are measured."""
BUILT, NEEDED, OTHERS = "built for one distance", "other necessary heads", "all others"
GROUPS = (BUILT, NEEDED, OTHERS)
MEASURED = (POSITIONAL, SEPARATOR, FIRST_TOKEN, BROAD)
"""Roles that need neither trees nor pronouns."""


def known_roles(run: str) -> Finding:
    """Roles of the compiled models of a comparison of known truth, and what methods keep of their necessary heads.

    Args:
        run: directory with ``truth.csv``; its programs and seeds are compiled again.

    Raises:
        GateError: if it has none, or names a program that there is not.
    """
    truth = read_truth(Path(run))
    pairs = list(dict.fromkeys(zip(truth["program"], truth["seed"], strict=True)))
    tracked = progress.track(pairs, "compiling programs")
    rows = [row for name, seed in tracked for row in program_rows(PROGRAMS[name], int(seed))]
    heads = pd.DataFrame(rows)
    groups = group_table(heads, GROUPS, [rule.name for rule in MEASURED])
    methods = method_table(truth, set(heads.loc[heads["group"] == BUILT, "program"]))
    numbers = {"models": len(pairs), "heads": len(heads)}
    tables = {"known_roles": groups, "known_roles_heads": heads, "known_roles_methods": methods}
    return Finding(tables, {}, _told(groups, methods, len(pairs)), numbers)


def read_truth(run: Path) -> pd.DataFrame:
    """What each method found in each program.

    Raises:
        GateError: if the directory has no such table, or it is of other programs.
    """
    try:
        truth = read_table(run / "truth.csv", needed=("seed", "method", "budget", "needed", "recall"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GateError(
            f"{str(run)!r} has no truth.csv; give the directory of a comparison of KnownTruth, or that of a run or comparison "
            "of Synthetic"
        ) from error
    truth = with_program(truth)
    if unknown := sorted(set(map(str, truth["program"])) - set(PROGRAMS)):
        named = f"program {unknown[0]!r}, which there is not" if unknown[0] else "program without a name"
        raise GateError(f"truth.csv in {str(run)!r} has a {named}; give a comparison with --data.program all")
    if not len(truth):
        raise GateError(f"truth.csv in {str(run)!r} is empty; give a comparison that has ended")
    return truth


def program_rows(program: Program, seed: int) -> list[dict[str, object]]:
    """A row for every head of the model that a seed makes of a program: what it does, its group, and its roles."""
    functions = list(dict.fromkeys(head.does for layer in program.layers for head in layer.heads))
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(program)
    model = compiled(replace(program, needed=tuple(functions)), vocabulary=tokenizer.get_vocab(), labels={"no": 0, "yes": 1})
    places = zip(functions, model.config.necessary_heads, strict=True)
    named = {tuple(place): does for does, of_function in places for place in of_function}
    offsets = {head.does: offset_of(head, program) for layer in program.layers for head in layer.heads}
    roles = _roles(model.eval(), tokenizer, program)
    rows: list[dict[str, object]] = []
    for place in range(program.total_heads):
        layer, head = divmod(place, program.heads)
        does = named.get((layer, head), "")
        offset = offsets.get(does)
        group = BUILT if offset is not None else NEEDED if does in program.needed else OTHERS
        held = [role.rule.name for role in roles if bool(role.holds[place])]
        rows.append(
            {
                "program": program.name,
                "seed": seed,
                "layer": layer,
                "head": head,
                "does": does,
                "needed": does in program.needed,
                "group": group,
                "distance": np.nan if offset is None else offset,
                "roles": ", ".join(held) or NONE,
                "positional_by": roles[0].column[place],
                **{f"{role.rule.name}_strength": float(role.strength[place]) for role in roles},
            }
        )
    return rows


def offset_of(head: Head, program: Program) -> int | None:
    """The one distance at which a head looks from every letter that finds something; None if it looks for anything else.

    Args:
        head: of a program.
        program: whose places there are.
    """
    letters = range(1, program.length + 1)
    if head.query != PLACE or head.key != PLACE:
        return None
    matches = [[key - query for key in letters if head.match(query, key)] for query in letters]
    distances = {distance for found in matches for distance in found}
    finding = sum(bool(found) for found in matches)
    return distances.pop() if len(distances) == 1 and finding >= program.length - 1 else None


@torch.no_grad()
def _roles(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, program: Program) -> list[Role]:
    """Of the roles that need neither trees nor pronouns, on strings of the program."""
    texts = generate(program, SENTENCES, seed=1)["text"]
    ids = tokenizer(list(texts), return_tensors="pt")["input_ids"]
    text = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    view = View(torch.arange(len(ids)), text, torch.ones_like(text), text)
    sites = find_attention(model)
    positional, sinks = PositionalShares(sites), SinkShares(sites)

    def take(site: int, weights: torch.Tensor) -> None:
        positional.observe(site, weights, view)
        sinks.observe(site, weights, view)

    with observe_weights(model, sites, take):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return roles_without_trees(positional, sinks)


def roles_without_trees(positional: PositionalShares, sinks: SinkShares) -> list[Role]:
    """The roles of :data:`MEASURED`, in its order."""
    shares = sinks.compute()
    found = [assign(POSITIONAL, positional.compute(), positional.names)]
    return found + [assign(rule, shares.of(column), [rule.name]) for column, rule in enumerate(MEASURED[1:])]


def group_table(heads: pd.DataFrame, groups: Sequence[str], roles: Sequence[str]) -> pd.DataFrame:
    """For every group of heads how many have each role, and how many none at all, with the exact interval of the share.

    Args:
        heads: a row for each, with ``group`` and ``roles``.
        groups, roles: in the order of the rows.
    """
    rows = []
    for name in groups:
        own = heads[heads["group"] == name]
        if not len(own):
            continue
        for role in (*roles, NONE):
            count = int(own["roles"].str.split(", ").map(lambda held, role=role: role in held).sum())
            low, high = stats.binomtest(count, len(own)).proportion_ci(method="exact")
            counts = {"heads": len(own), "with_role": count, "share": count / len(own), "low": low, "high": high}
            rows.append({"group": name, "role": role, **counts})
    return pd.DataFrame(rows)


def method_table(truth: pd.DataFrame, positional: set[str]) -> pd.DataFrame:
    """The share of necessary functions that each method keeps at as many heads as there are: in programs with a necessary or
    other head that is built for one distance, and in those without, with Student's interval over seeds."""
    at_needed = truth[truth["budget"] == truth["needed"]]
    rows = []
    for method, own in at_needed.groupby("method", sort=False):
        for name, of_programs in (("with", own["program"].isin(positional)), ("without", ~own["program"].isin(positional))):
            means = own[of_programs].groupby("seed")["recall"].mean()
            if len(means):
                found = interval(means.to_numpy(), bounds=(0.0, 1.0))
                rows.append(
                    {
                        "method": method,
                        "positional": name,
                        "programs": own.loc[of_programs, "program"].nunique(),
                        "seeds": found.seeds,
                        "recall": found.mean,
                        "low": found.low if found.std else np.nan,
                        "high": found.high if found.std else np.nan,
                    }
                )
    return pd.DataFrame(rows)


def told_of_groups(groups: pd.DataFrame) -> list[str]:
    """A sentence for every group of :func:`group_table`."""
    sentences = []
    for name, rows in groups.groupby("group", sort=False):
        parts = [
            f"{row['with_role']} {row['role']} ({row['share']:.0%}, {row['low']:.0%} to {row['high']:.0%})"
            for row in rows.to_dict("records")
            if row["with_role"]
        ]
        sentences.append(f"Of {rows['heads'].iloc[0]} heads, {name}: {listed(parts)}.")
    return sentences


def _told(groups: pd.DataFrame, methods: pd.DataFrame, models: int) -> list[str]:
    sentences = [f"{counted(models, 'model')}; roles are seen from the letters, as special tokens do not count as attending."]
    sentences += told_of_groups(groups)
    for name, rows in methods.groupby("positional", sort=False):
        parts = []
        for row in rows.to_dict("records"):
            sure = f" ({row['low']:.2f} to {row['high']:.2f})" if np.isfinite(row["low"]) else ""
            parts.append(f"{row['method']} {row['recall']:.2f}{sure}")
        programs = counted(int(rows["programs"].max()), "program")
        sentences.append(f"Necessary functions kept in {programs} {name} a head for one distance: {listed(parts)}.")
    return sentences
