"""The tables of docs/roles.md are those of the files beside the results."""

from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "roles.md").read_text(encoding="utf-8")
RESULTS = ROOT / "notebooks" / "results" / "roles"
ROLES = ["positional", "syntactic", "rare", "coreference", "separator", "first-token", "broad", "background"]
PUBLISHED = {
    "det": "det 94.3 / 51.7", "obj": "dobj 86.8 / 40.0", "nsubj": "nsubj 58.5 / 45.5", "nmod:poss": "poss 80.5 / 47.7",
    "amod": "amod 75.6 / 68.3", "aux": "aux 81.1 / 71.5", "advmod": "advmod 48.8 / 40.2", "conj": "conj 53.3 / 26.8",
}  # fmt: skip
"""Best head / best fixed offset, from the notebook with Clark et al.'s table 1."""


def of_layers():
    table = pd.read_csv(RESULTS / "roles_by_layer.csv")
    for _, row in table.iterrows():
        yield f"| {row['layer']} | " + " | ".join(str(row[name]) for name in ROLES) + " |"
    yield "| all | " + " | ".join(str(table[name].sum()) for name in ROLES) + " |"


def of_relations():
    table = pd.read_csv(RESULTS / "relations.csv")
    for relation, published in PUBLISHED.items():
        best = table[table["relation"] == relation].sort_values("share").iloc[-1]
        share, low, high, baseline = (f"{100 * best[name]:.1f}" for name in ("share", "low", "high", "baseline"))
        yield f"| {relation} | {best['head']} | {share} ({low} to {high}) | {baseline} | {published} |"


def of_survival():
    table = pd.read_csv(RESULTS / "survival.csv")
    for _, row in table[table["method"].isin(["learned", "his", "random"])].iterrows():
        shares = f"{100 * row['specialised_kept']:.0f} % | {100 * row['others_kept']:.0f} %"
        over = f"{row['low']:.2f} to {row['high']:.2f}" if row["low"] == row["low"] else "seeds alike"
        odds = f"{row['odds_ratio']:.2f} ({over}) | {row['first_seed_low']:.2f} to {row['first_seed_high']:.2f}"
        yield f"| {row['comparison']} | {row['budget']} | {row['method']} | {shares} | {odds} |"


def test_tables_are_those_of_the_files():
    for line in (*of_layers(), *of_relations(), *of_survival()):
        assert line in PAGE


def test_what_is_said_is_what_was_found():
    roles = pd.read_csv(RESULTS / "roles.csv")
    background = int((~roles["specialised"]).sum())
    assert f"{background} of {len(roles)} heads" in PAGE
    assert f"{int((roles['roles'] == 'none').sum())} have no role at all" in PAGE
    assert f"{100 * roles['rare_strength'].max():.0f} %" in PAGE
