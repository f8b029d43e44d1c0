"""``python notebooks/roles/known.py``: check roles on compiled programs, whose heads were built for something.

``known_roles.csv`` counts the roles of heads that were built for one distance, of other necessary heads and of all others.
``known_roles_methods.csv`` has the share of the necessary functions that each method keeps, for programs with and without a
head for one distance.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats

from gates.attention.sites import find_attention
from gates.roles.measures import positional_shares, sink_shares
from gates.roles.roles import BROAD, FIRST_TOKEN, POSITIONAL, SEPARATOR, Role, assign, observe_weights
from gates.roles.shares import View
from training.data.known_truth import build_tokenizer, generate
from training.stats.significance import interval
from training.truth.compiler import compiled
from training.truth.program import PLACE, PROGRAMS, Head, Program

RESULTS = Path(__file__).parents[1] / "results"
BUILT, NEEDED, OTHERS = "built for one distance", "other necessary heads", "all others"
RULES = (POSITIONAL, SEPARATOR, FIRST_TOKEN, BROAD)
"""The roles that need neither trees nor pronouns."""


def program_rows(program: Program, seed: int) -> list[dict[str, object]]:
    """Return a row for every head of the model that a seed makes of a program: its function, its group and its roles."""
    functions = list(dict.fromkeys(head.does for layer in program.layers for head in layer.heads))
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(program)
    model = compiled(replace(program, needed=tuple(functions)), vocabulary=tokenizer.get_vocab(), labels={"no": 0, "yes": 1})
    places = zip(functions, model.config.necessary_heads, strict=True)
    named = {tuple(place): does for does, of_function in places for place in of_function}
    distances = {head.does: distance_of(head, program) for layer in program.layers for head in layer.heads}
    roles = roles_of(model.eval(), tokenizer, program)
    rows: list[dict[str, object]] = []
    for place in range(program.total_heads):
        layer, head = divmod(place, program.heads)
        does = named.get((layer, head), "")
        group = BUILT if distances.get(does) is not None else NEEDED if does in program.needed else OTHERS
        held = [role.rule.name for role in roles if bool(role.holds[place])]
        where = {"program": program.name, "seed": seed, "layer": layer, "head": head}
        found = {"roles": ", ".join(held) or "none", "positional_by": roles[0].column[place]}
        rows.append({**where, "does": does, "needed": does in program.needed, "group": group, **found})
    return rows


def distance_of(head: Head, program: Program) -> int | None:
    """Return the one distance at which a head attends from every letter that finds something. None if there is no such one."""
    if head.query != PLACE or head.key != PLACE:
        return None
    letters = range(1, program.length + 1)
    matches = [[key - query for key in letters if head.match(query, key)] for query in letters]
    distances = {distance for found in matches for distance in found}
    return distances.pop() if len(distances) == 1 and sum(map(bool, matches)) >= program.length - 1 else None


@torch.no_grad()
def roles_of(model, tokenizer, program: Program) -> list[Role]:
    """Return the roles of :data:`RULES`, measured on 200 strings of the program. Special tokens do not count as attending."""
    ids = tokenizer(list(generate(program, 200, seed=1)["text"]), return_tensors="pt")["input_ids"]
    text = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    view, sites = View(torch.arange(len(ids)), text, torch.ones_like(text), text), find_attention(model)
    positional, sinks = positional_shares(sites), sink_shares(sites)

    def take(site: int, weights: torch.Tensor) -> None:
        positional.observe(site, weights, view)
        sinks.observe(site, weights, view)

    with observe_weights(model, sites, take):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    shares = sinks.compute()
    found = [assign(POSITIONAL, positional.compute(), positional.names)]
    return found + [assign(rule, shares.of(column), [rule.name]) for column, rule in enumerate(RULES[1:])]


def group_table(heads: pd.DataFrame) -> pd.DataFrame:
    """Return for every group of heads how many have each role, with the exact interval of the share."""
    rows = []
    for group in (BUILT, NEEDED, OTHERS):
        own = heads.loc[heads["group"] == group, "roles"].str.split(", ")
        for role in (*(rule.name for rule in RULES), "none") if len(own) else ():
            count = sum(role in held for held in own)
            low, high = stats.binomtest(count, len(own)).proportion_ci(method="exact")
            counts = {"heads": len(own), "with_role": count, "share": count / len(own), "low": low, "high": high}
            rows.append({"group": group, "role": role, **counts})
    return pd.DataFrame(rows)


def method_table(truth: pd.DataFrame, positional: set[str]) -> pd.DataFrame:
    """Return the share of necessary functions that each method keeps at as many heads, with Student's interval over seeds.

    Args:
        truth: The table ``truth.csv`` of a comparison.
        positional: The programs with a head that is built for one distance.
    """
    rows = []
    for method, own in truth[truth["budget"] == truth["needed"]].groupby("method", sort=False):
        has = own["program"].isin(positional)
        for name, part in (("with", own[has]), ("without", own[~has])):
            if len(part):
                found = interval(part.groupby("seed")["recall"].mean().to_numpy(), bounds=(0.0, 1.0))
                low, high = (found.low, found.high) if found.std else (np.nan, np.nan)
                counts = {"programs": part["program"].nunique(), "seeds": found.seeds}
                rows.append({"method": method, "positional": name, **counts, "recall": found.mean, "low": low, "high": high})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    truth = pd.read_csv(RESULTS / "known_truth" / "truth.csv")
    pairs = truth[["program", "seed"]].drop_duplicates().itertuples(index=False)
    heads = pd.DataFrame([row for name, seed in pairs for row in program_rows(PROGRAMS[name], int(seed))])
    positional = set(heads.loc[heads["group"] == BUILT, "program"])
    group_table(heads).to_csv(RESULTS / "roles" / "known_roles.csv", index=False)
    method_table(truth, positional).to_csv(RESULTS / "roles" / "known_roles_methods.csv", index=False)
