"""The tables of docs/roles.md are those of the files beside the results."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from training.analysis.closing import closing_of_roles
from training.analysis.depth import depth_table, depths_of
from training.analysis.disagreement import disagreement
from training.analysis.embedded_roles import fact_table, method_table
from training.analysis.published import beside_clark
from training.analysis.survival import read_masks

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


def with_interval(row, name="value", low="low", high="high", sign=""):
    value, least, most = (f"{100 * row[column]:{sign}.0f}" for column in (name, low, high))
    return f"{value} ({least} to {most})"


def of_quadrants():
    for row in pd.read_csv(RESULTS / "disagreement_quadrants.csv").to_dict("records"):
        share = f"{row['specialised']} ({100 * row['low']:.0f} to {100 * row['high']:.0f} %)"
        odds = f"{row['odds_ratio']:.2f} ({row['odds_low']:.2f} to {row['odds_high']:.2f})"
        roles = " | ".join(str(row[name]) for name in ("syntactic", "coreference", "first-token", "none"))
        yield f"| {row['comparison']} | {row['quadrant']} | {row['heads']} | {share} | {odds} | {roles} |"


def of_combined():
    table = pd.read_csv(RESULTS / "disagreement_combined.csv")
    for (comparison, budget), rows in table.groupby(["comparison", "budget"], sort=False):
        rows = rows.set_index("score")
        cells = [f"{100 * rows.loc['his', 'ahead']:.0f}"]
        cells += [with_interval(rows.loc[name], "ahead") for name in ("entropy-high-first", "entropy-low-first")]
        beyond = ("beyond_his", "beyond_low", "beyond_high", "+")
        cells += [with_interval(rows.loc[name], *beyond) for name in ("rank-sum", "rank-sum-broad")]
        yield f"| {comparison} | {budget} | " + " | ".join(cells) + " |"


def of_closing():
    table = pd.read_csv(RESULTS / "closing.csv").query("method == 'learned'")
    for (comparison, budget), rows in table.groupby(["comparison", "budget"], sort=False):
        rows, names = rows.set_index("role"), ("specialised", "syntactic", "coreference", "first-token", "none")
        yield f"| {comparison} | {budget} | " + " | ".join(with_interval(rows.loc[name], "later") for name in names) + " |"


@pytest.mark.parametrize("comparison", ["sst2", "agreement", "sick"])
def test_the_tables_of_scores_and_closing_are_what_the_experiments_find(comparison):
    run, roles = str(RESULTS.parent / comparison), str(RESULTS / "roles.csv")
    found = disagreement(run, roles).tables | closing_of_roles(run, roles).tables
    for name in ("disagreement_quadrants", "disagreement_combined", "disagreement_correlation", "closing"):
        kept = pd.read_csv(RESULTS / f"{name}.csv").query(f"comparison == '{comparison}'").drop(columns="comparison")
        numbers = kept.select_dtypes("number").columns
        np.testing.assert_allclose(kept[numbers].to_numpy(), found[name][numbers].to_numpy(float), rtol=1e-4, atol=1e-5)


def test_tables_are_those_of_the_files():
    for line in (*of_layers(), *of_relations(), *of_survival(), *of_quadrants(), *of_combined(), *of_closing()):
        assert line in PAGE


def test_the_figures_beside_clarks_are_those_of_the_relations():
    found, kept = beside_clark(pd.read_csv(RESULTS / "relations.csv")), pd.read_csv(RESULTS / "clark.csv")
    pd.testing.assert_frame_equal(found.reset_index(drop=True), kept, check_dtype=False)
    for row in kept.to_dict("records"):
        there = f"{row['clark']} {100 * row['share_there']:.1f} / {100 * row['baseline_there']:.1f}"
        assert PUBLISHED[row["relation"]] == there


def test_depths_are_those_of_the_roles():
    found, kept = depth_table(depths_of(pd.read_csv(RESULTS / "roles.csv"))), pd.read_csv(RESULTS / "depth.csv")
    pd.testing.assert_frame_equal(found, kept)
    rows = {str(row["role"]): row for row in kept.to_dict("records")}
    for role, before in (("syntactic", "is "), ("coreference", "and "), ("first-token", "("), ("background", "(")):
        depth, low, high = (f"{rows[role][name]:.2f}" for name in ("depth", "low", "high"))
        assert f"{before}{depth}" in PAGE
        assert f"{low} to {high}" in PAGE.replace("\n  ", " ")


def test_the_course_of_a_short_training_is_that_of_its_file():
    table = pd.read_csv(RESULTS / "dynamics.csv")
    names = ["specialised", "positional", "syntactic", "coreference", "first-token"]
    for (time, phase), rows in table.groupby(["time", "phase"], sort=False):
        counts = rows.set_index("role")["with_role"][names]
        assert f"| {time:g} | {phase} | {rows['heads'].iloc[0]} | " + " | ".join(map(str, counts)) + " |" in PAGE
    appearing = pd.read_csv(RESULTS / "dynamics_appearing.csv").dropna()
    for role, said in (
        ("syntactic", "6 of 6 syntactic"),
        ("coreference", "3 of 4 coreference"),
        ("first-token", "12 of 13 first"),
    ):
        good = appearing[appearing["role"] == role]["for_good"]
        assert f"{int((good == 0).sum())} of {len(good)} " in said
        assert said in PAGE.replace("\n  ", " ")
    assert table.set_index(["role", "time"]).loc[("coreference", 1), "lost"] == 10


def test_relevance_and_other_scores_are_those_of_the_file():
    table = pd.read_csv(RESULTS / "relevance.csv")
    page = " ".join((ROOT / "docs" / "relevance.md").read_text(encoding="utf-8").split())
    for one, other, said in (
        ("relevance", "gradient_x_input", "between relevance and gradient x input"),
        ("relevance", "his", "between relevance and HIS"),
        ("gradient_x_input", "his", "between gradient x input and HIS"),
    ):
        assert f"{stats.spearmanr(table[one], table[other]).statistic:.2f} {said}" in page


def test_how_many_heads_of_each_role_stay():
    table = pd.read_csv(RESULTS / "survival_by_role.csv")
    for (comparison, budget, method), rows in table.groupby(["comparison", "budget", "method"]):
        if method in ("learned", "his", "random"):
            kept = rows.set_index("role")["kept"]
            cells = [f"{kept[role]:.1f}" for role in ("positional", "syntactic", "coreference", "first-token", "broad")]
            assert f"| {comparison} | {budget} | {method} | {' | '.join(cells)} |" in PAGE


def test_the_translator_is_told_as_it_was_found():
    table = pd.read_csv(RESULTS / "roles_multi30k.csv", keep_default_na=False, na_values=[""])
    assert not table["specialised"].any()
    first = table["first-token_has"]
    assert first.sum() == 6
    assert table.loc[first, "site"].unique().tolist() == ["decoder.0"]
    assert not table.loc[first, "kept"].any()
    assert not (table["syntactic_strength"] > table["syntactic_baseline"]).any()
    for kind, rows in table.groupby("kind"):
        strongest = [f"{100 * rows[f'{role}_strength'].max():.1f}" for role in ("positional", "rare")]
        counts = [str(len(rows)), str(rows["kept"].sum())]
        assert f"| {kind} | {' | '.join([*counts, *strongest, str(rows['first-token_has'].sum())])} |" in PAGE


def test_what_entropy_keeps_is_that_of_the_file():
    rows, page = pd.read_csv(RESULTS / "survival_entropy.csv").set_index(["method", "budget"]), " ".join(PAGE.split())
    shares = (100 * rows[["specialised_kept", "others_kept"]]).map("{:.0f}".format)
    low, high, learned = (shares.loc[name] for name in ("entropy-low-first", "entropy-high-first", "learned"))
    assert f"keeps {low.loc[18].iloc[0]} % of the specialised heads and {low.loc[18].iloc[1]} % of the others" in page
    assert rows.loc[("entropy-low-first", 9), "specialised_kept"] == 0
    assert f"exact interval up to {rows.loc[('entropy-low-first', 9), 'high']:.2f})" in page
    assert f"keeps {' and '.join(high.loc[18])} % at 18 heads, {' and '.join(high.loc[9])} % at 9" in page
    assert f"learned gates {' and '.join(learned.loc[18])} %, {' and '.join(learned.loc[9])} %" in page


def test_causal_roles_are_those_of_the_files():
    page = (ROOT / "docs" / "relevance.md").read_text(encoding="utf-8")
    heads, closed = pd.read_csv(RESULTS / "causal.csv"), pd.read_csv(RESULTS / "causal_closed.csv").set_index("role")
    counts = heads["role"].value_counts()
    for role in ("facilitating", "irrelevant"):
        row = closed.loc[role]
        assert row["gates"] == counts[role]
        change, low, high = (f"{100 * row[name]:.1f}" for name in ("change", "low", "high"))
        assert f"| {role} | {counts[role]} | {change} points ({low} to {high}) |" in page
    assert "interfering" not in counts
    assert f"agree on {(heads['agreement'] == 1).sum()} of {len(heads)} heads" in page
    kept = 100 * closed.loc[["irrelevant", "interfering"], "metric"]
    said = f"alone the accuracy is {kept['irrelevant']:.1f} %, with all 72 it is {kept['interfering']:.1f} %"
    assert said in " ".join(page.split())


def test_known_roles_are_those_of_the_files():
    table = pd.read_csv(RESULTS / "known_roles.csv")
    for group, rows in table.groupby("group", sort=False):
        rows, cells = rows.set_index("role"), []
        for name in ("positional", "first-token", "none"):
            row = rows.loc[name]
            cells.append(f"{row['with_role']:.0f} ({100 * row['low']:.0f} to {100 * row['high']:.0f} %)")
        assert f"| {group} | {rows['heads'].iloc[0]} | " + " | ".join(cells) + " |" in PAGE
    methods = pd.read_csv(RESULTS / "known_roles_methods.csv").set_index(["method", "positional"])
    for key in (("learned", "with"), ("his", "with")):
        row = methods.loc[key]
        assert f"{row['recall']:.2f} ({row['low']:.2f} to {row['high']:.2f}" in PAGE
    assert methods.loc[("learned", "without"), "recall"] == 1


def of_arcs():
    for arc, rows in pd.read_csv(RESULTS / "known_roles_embedded_arcs.csv").groupby("arc", sort=False):
        found, best = (rows["heads"].sum(), (rows["heads"] > 0).sum()), 100 * rows["best_share"]
        shares = f"{best.mean():.0f} ({best.min():.0f} to {best.max():.0f}) | {100 * rows['baseline'].mean():.0f}"
        yield f"| {rows['question'].iloc[0]} | {arc} | {found[0]} | {found[1]} | {shares} |"


def of_facts():
    for row in pd.read_csv(RESULTS / "known_roles_embedded_facts.csv").to_dict("records"):
        cells = [str(row[name]) for name in ("question", "with_arc", "carriers", "both")]
        for name in ("arcs_that_carry", "others_that_carry"):
            cells.append(f"{100 * row[name]:.0f} % ({100 * row[f'{name}_low']:.0f} to {100 * row[f'{name}_high']:.0f})")
        yield f"| {' | '.join(cells)} | {row['odds_ratio']:.2f} ({row['odds_low']:.2f} to {row['odds_high']:.2f}) |"


def of_kept():
    table = pd.read_csv(RESULTS / "known_roles_embedded_methods.csv")
    for (budget, method), rows in table.groupby(["budget", "method"], sort=False):
        rows = rows.set_index("heads")
        cells = [with_interval(rows.loc[name], "kept") for name in ("with an arc", "carriers")]
        yield f"| {budget} | {method} | " + " | ".join(cells) + " |"


def test_known_roles_of_trained_models_are_those_of_the_files():
    for line in (*of_arcs(), *of_facts(), *of_kept()):
        assert line in PAGE


def test_known_roles_of_trained_models_follow_from_their_heads():
    """And from the masks of the comparison beside them, whose carriers are the same."""
    heads, truth = (
        pd.read_csv(RESULTS / "known_roles_embedded_heads.csv", keep_default_na=False, na_values=[""]),
        RESULTS.parent / "embedded_truth",
    )
    pd.testing.assert_frame_equal(fact_table(heads), pd.read_csv(RESULTS / "known_roles_embedded_facts.csv"))
    kept = pd.read_csv(RESULTS / "known_roles_embedded_methods.csv").set_index(["method", "budget", "heads"])
    again = method_table(heads, read_masks(truth)).set_index(["method", "budget", "heads"])
    pd.testing.assert_frame_equal(kept, again.loc[kept.index])
    recall = pd.read_csv(truth / "interchange.csv").groupby(["method", "budget"])["recall"].mean()
    for (method, budget, group), row in kept.iterrows():
        if group == "carriers":
            assert row["recall"] == pytest.approx(recall[(method, budget)])
    carriers = heads[heads["group"] == "carriers"]
    assert (carriers["arcs"] == "none").sum() == 1  # all but one
    assert not heads["roles"].str.contains("positional").any()


def test_what_fine_tuning_keeps_is_that_of_the_file():
    table = pd.read_csv(RESULTS / "role_changes.csv")
    rows, pruned = (table[table["model"] == name].set_index("role") for name in ("fine-tuned", "pruned"))
    special, named = rows.loc["specialised"], rows.loc["coreference"]
    assert f"All {special['kept']:.0f} specialised heads" in PAGE
    assert special["kept"] == special["before"]
    row = pruned.loc["specialised"]
    share = f"({100 * row['share']:.0f} %, {100 * row['low']:.0f} to {100 * row['high']:.0f} %)"
    found = f"{row['before']:.0f} were specialised before and {row['kept']:.0f} are after {share}"
    assert found in " ".join(PAGE.split())
    assert pruned.loc["coreference", ["before", "kept"]].tolist() == [7, 0]
    assert pruned.loc["syntactic", ["before", "kept"]].tolist() == [5, 5]
    assert f"({100 * special['low']:.0f} to 100 %" in PAGE.replace("95 % interval ", "")
    assert f"with {special['gained']:.0f} more" in PAGE
    assert f"{named['kept']:.0f} of {named['before']:.0f} stay, and {named['gained']:.0f} are" in PAGE


def test_how_often_specialised_heads_are_kept_more_often():
    above = pd.read_csv(RESULTS / "survival.csv").assign(above=lambda rows: rows["low"] > 1).groupby("comparison")["above"]
    page = " ".join(PAGE.split())
    assert f"above 1 in {above.sum()['agreement']} of the {above.size()['agreement']} rows of `survival.csv`" in page
    assert above.sum()["sick"] == 0
    assert f"On SICK it is so in none of {above.size()['sick']}." in page


def test_what_fine_tuning_on_agreement_keeps_is_that_of_the_file():
    table = pd.read_csv(RESULTS / "role_changes_agreement.csv")
    rows, pruned = (table[table["model"] == name].set_index("role") for name in ("fine-tuned", "pruned"))
    page = " ".join(PAGE.split())
    syntactic, named, first = rows.loc["syntactic"], rows.loc["coreference"], rows.loc["first-token"]
    assert syntactic["kept"] == syntactic["before"]
    assert f"keeps all {syntactic['kept']} syntactic heads and makes {syntactic['gained']} more" in page
    assert f"{named['kept']} of {named['before']} coreference heads stay and {named['gained']} are new" in page
    assert f"first-token heads go from {first['before']} to {first['after']}" in page
    kept = pruned.loc["syntactic"]
    share = f"({100 * kept['share']:.0f} %, {100 * kept['low']:.0f} to {100 * kept['high']:.0f} %), with {kept['gained']} more"
    assert f"{kept['before']} are syntactic in the fine-tuned model (SST-2: 5) and {kept['kept']} of them" in page
    assert f"after pruning and retraining {share}" in page
    assert pruned.loc["positional", ["before", "kept"]].tolist() == [2, 2]
    named = pruned.loc["coreference"]
    assert f"{named['before']} are coreference heads and {named['kept']} stay so" in page
    assert pruned.loc["first-token", "before"] == 0


def test_what_is_said_is_what_was_found():
    roles = pd.read_csv(RESULTS / "roles.csv")
    background = int((~roles["specialised"]).sum())
    assert f"{background} of {len(roles)} heads" in PAGE
    assert f"{int((roles['roles'] == 'none').sum())} have no role at all" in PAGE
    assert f"{100 * roles['rare_strength'].max():.0f} %" in PAGE
