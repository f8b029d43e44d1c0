"""What each head does: its roles with strength, baseline and interval, and the best head of each relation."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from gates.roles.measures import WORD_OFFSETS
from gates.roles.roles import LEAST_COUNT, RULES, TWO_SIDED, Role, specialised
from training.analysis.model import AnalysisResult, ObservedModel, place_columns
from training.analysis.role_measures import (
    Measured,
    RolePasses,
    RoleTexts,
    Shown,
    maps_of_heads,
    shown_sentences,
    strongest_maps,
)
from training.report.page import render_page
from training.report.pictures import role_map
from training.report.reading import ATTENTION, as_text
from training.stats.numbers import counted, listed


def role_page(figure: Figure, sentences: Sequence[str], attention: dict[str, Any]) -> str:
    """Return a page that needs nothing else: the map of roles, the results, and the attention of any head."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    shown = {"picture": base64.b64encode(picture.getvalue()).decode(), "sentences": sentences, "attention": as_text(attention)}
    return render_page("roles.html", ("roles", "attention"), ("attention",), **shown)


def attention_of(table: pd.DataFrame, shown: Sequence[Shown], places: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return weights in whole percent, with names of heads, roles and tokens."""
    rows = list(zip(table["site"], table["head"], table["kind"], table["roles"], places, strict=True))
    specialised = table["specialised"].to_numpy()
    return {
        "heads": [
            {"name": f"{site}.{head}", "kind": kind, "roles": roles, "site": place[0], "head": place[1]}
            for site, head, kind, roles, place in rows
        ],
        "first": int(specialised.argmax()),
        "sentences": [
            {
                "name": " ".join(next(iter(one.tokens.values()))[0])[:80],
                "tokens": one.tokens,
                "weights": [(100 * weights).round().int().tolist() for weights in one.weights],
            }
            for one in shown
        ],
    }


CAUSAL = "of causal self-attention alone"
SPECIALISED = [rule.name for rule in RULES if rule.specialised]
NEEDS = {"coreference": "needs --coref FILE", "induction": CAUSAL, "duplicate": CAUSAL}


def roles_of_heads(observed: ObservedModel, texts: RoleTexts) -> AnalysisResult:
    """Return every head's roles with tables, pictures and sentences."""
    measured = RolePasses(observed, texts).run()
    table, relations = role_table(observed, measured), best_heads(observed, measured)
    kept, total = len(observed.kept), sum(site.heads for site in observed.sites)
    pruned = f"The weights are those of the end of the run; of {total} heads it kept {kept}, and these alone count."
    sentences = [
        *([] if observed.mask is None else [pruned]),
        *_role_sentences(table, measured),
        *_text_sentences(texts, measured),
        *_relation_sentences(relations),
    ]
    numbers = {
        "heads": len(table),
        "specialised": int(table["specialised"].sum()),
        "roles": {role.rule.name: int(role.holds.sum()) for role in measured.roles},
    }
    figures = {"roles": role_map(table, [role.rule.name for role in measured.roles])}
    shown = shown_sentences(observed, texts)
    figures |= strongest_maps(observed, shown[0], measured.roles) | maps_of_heads(observed, shown, texts.maps)
    attention = attention_of(table, shown, observed.heads)
    pages = {"roles.html": role_page(figures["roles"], sentences, attention), ATTENTION: as_text(attention)}
    syntactic = syntactic_table(table, measured)
    tables = {"roles": table, "roles_by_layer": by_layer(table), "relations": relations, "syntactic": syntactic}
    return AnalysisResult(tables, figures, sentences, numbers, pages)


def role_table(observed: ObservedModel, measured: Measured) -> pd.DataFrame:
    """Return a row for every head: its roles, and the measurement of each; NaN where a role is not defined."""
    found = {role.rule.name: role for role in measured.roles}
    names = [[role.rule.name for role in measured.roles if bool(role.holds[head])] for head in range(len(measured.confidence))]
    table = place_columns(observed.sites, observed.heads).assign(
        roles=[", ".join(own) or "none" for own in names],
        specialised=specialised(measured.roles).cpu().numpy(),
        confidence=measured.confidence.cpu().numpy(),
    )
    columns = {}
    for rule in RULES:
        for name, values in _columns(found.get(rule.name), len(table)).items():
            columns[f"{rule.name}_{name}"] = values
    return pd.concat([table, pd.DataFrame(columns)], axis=1)


def _columns(role: Role | None, heads: int) -> dict[str, object]:
    numbers = ("strength", "low", "high", "baseline", "p")
    if role is None:
        return {"has": False, "by": "", **dict.fromkeys(numbers, np.full(heads, np.nan))}
    return {
        "has": role.holds.cpu().numpy(),
        "by": role.column,
        **{name: getattr(role, name).cpu().numpy() for name in numbers},
    }


def by_layer(table: pd.DataFrame) -> pd.DataFrame:
    """Return the heads with each role, by kind and layer; heads with several count for each."""
    grouped = table.groupby(["kind", "layer"], sort=False)
    counts = grouped[[f"{rule.name}_has" for rule in RULES]].sum().astype(int)
    counts.columns = [rule.name for rule in RULES]
    counts["background"] = grouped["specialised"].apply(lambda own: int((~own).sum()))
    counts.insert(0, "heads", grouped.size())
    return counts.reset_index()


def syntactic_table(table: pd.DataFrame, measured: Measured) -> pd.DataFrame:
    """Return the shares of every head for every relation and direction."""
    shares = pd.DataFrame(measured.syntactic.value.cpu().numpy(), columns=measured.columns)
    return pd.concat([table[["site", "kind", "layer", "head"]], shares], axis=1)


def best_heads(observed: ObservedModel, measured: Measured) -> pd.DataFrame:
    """Return the best head of every relation and direction that occurs often enough, against the best fixed offset.

    The best head is chosen on the sentences that it is measured on, so its share is a little too high.
    """
    places, shares = place_columns(observed.sites, observed.heads), measured.syntactic
    passing = next(role.passing for role in measured.roles if role.rule.name == "syntactic")
    rows = []
    for column, name in enumerate(measured.columns):
        values, counts = shares.value[:, column], shares.count[:, column]
        if float(counts.max()) < LEAST_COUNT:
            continue
        best = int(values.nan_to_num(-1.0).argmax())
        place, half = places.iloc[best], TWO_SIDED * float(shares.error[best, column])
        relation, direction = name.rsplit(", ", 1)
        rows.append(
            {
                "relation": relation,
                "direction": direction,
                "count": int(counts[best]),
                "head": f"{place['site']}.{place['head']}",
                "share": float(values[best]),
                "low": max(0.0, float(values[best]) - half),
                "high": min(1.0, float(values[best]) + half),
                "offset": f"{WORD_OFFSETS[shares.which[best, column]]:+d}",
                "baseline": float(shares.baseline[best, column]),
                "heads_with_role": int(passing[:, column].sum()),
            }
        )
    names = ["relation", "direction", "count", "head", "share", "low", "high", "offset", "baseline", "heads_with_role"]
    return pd.DataFrame(rows, columns=names)


def _role_sentences(table: pd.DataFrame, measured: Measured) -> list[str]:
    total, count = len(table), int(table["specialised"].sum())
    background = total - count
    roles = [f"{int(role.holds.sum())} {role.rule.name}" for role in measured.roles]
    low, high = stats.binomtest(background, total).proportion_ci(method="exact")
    several = int((table[[f"{rule.name}_has" for rule in RULES if rule.specialised]].sum(axis=1) > 1).sum())
    absent = [rule.name for rule in RULES if rule.name not in {role.rule.name for role in measured.roles}]
    could_be = [name for name in (*absent, *measured.unknown) if NEEDS.get(name) != CAUSAL and name in SPECIALISED]
    fits = "within" if low <= 0.5 <= high else "outside"
    about_half = (
        f"{listed(could_be).capitalize()} heads could be among them, so this is at most how many there are."
        if could_be
        else f"That about half of all heads are background is {fits} the interval."
    )
    sentences = [
        f"Of {total} heads: {', '.join(roles)}; {several} have more than one specialised role.",
        f"{background} of {total} heads ({background / total:.0%}, 95 % interval {low:.0%} to {high:.0%}) are background, with "
        f"no specialised role; {int((table['roles'] == 'none').sum())} have no role at all, not even as sinks or broad heads. "
        + about_half,
    ]
    if absent:
        sentences.append(f"Not measured: {listed([f'{name} ({NEEDS[name]})' for name in absent])}.")
    if measured.unknown:
        sentences.append(f"No head has enough opportunities for {listed(measured.unknown)}, so it has no result.")
    if (table["kind"] == "cross").any():
        sentences.append(
            "For cross attention only positional, rare (of the source) and the sinks are defined; in an encoder-decoder trees "
            "and pronouns are of the source."
        )
    return sentences


def _text_sentences(texts: RoleTexts, measured: Measured) -> list[str]:
    source = "of the treebank" if texts.parser is None else f"parsed by {texts.parser}, so that their trees are not gold"
    parts = [f"{counted(len(texts.trees.pieces), 'sentence')} {source}"]
    if texts.pronouns is not None:
        parts.append(counted(len(texts.pronouns.pieces), "text") + " with a pronoun")
    left = [
        one for one in (texts.trees.omissions("sentence"), texts.pronouns.omissions("text") if texts.pronouns else "") if one
    ]
    sentence = f"Measured on {listed(parts)}; rare is by frequency in {texts.frequencies_from}."
    if left:
        sentence += f" Left out: {', '.join(left)}."
    found = [sentence]
    if measured.coreference is not None:
        shares, best = measured.coreference, int(measured.coreference.value[:, 0].nan_to_num(-1.0).argmax())
        if float(shares.count[best, 2]):
            choice = shares.value[:, 2].nan_to_num(-1.0)
            found.append(
                f"The best head's maximum is on the antecedent for {100 * shares.value[best, 0]:.1f} % of the pronouns and on "
                f"the wrong candidate for {100 * shares.value[best, 1]:.1f} %."
            )
            found.append(f"The best fixed offset is on the antecedent for {100 * shares.baseline[best, 0]:.1f} %.")
            found.append(
                f"Between the two candidates the best head is right for {100 * choice.max():.1f} % and the nearer one for "
                f"{100 * shares.baseline[int(choice.argmax()), 2]:.1f} %."
            )
    return found


def _relation_sentences(relations: pd.DataFrame) -> list[str]:
    if not len(relations):
        return [f"No relation occurs {LEAST_COUNT} times, so there is no result on syntax; give a larger treebank."]
    above = relations[relations["share"] >= relations["baseline"] + 0.1]
    top = above.assign(gain=above["share"] - above["baseline"]).sort_values("gain", ascending=False).head(3)
    named = [
        f"{row['relation']}, {row['direction']} ({row['head']}: {100 * row['share']:.1f} %, offset {row['offset']}: "
        f"{100 * row['baseline']:.1f} %)"
        for _, row in top.iterrows()
    ]
    largest = f"; the largest distances: {listed(named)}" if named else ""
    return [
        f"For {len(above)} of {len(relations)} relations and directions the best head is 10 points or more above the best "
        f"fixed offset{largest}."
    ]
