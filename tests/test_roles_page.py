"""The tables and numbers of roles.md and relevance.md in docs/explanation are those of the files in notebooks/results/roles."""

from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from tests.models import script
from training.analysis.survival import survival_of_roles
from training.truth.program import PREVIOUS, PROGRAMS

ROOT = Path(__file__).parents[1]
PAGE = " ".join((ROOT / "docs" / "explanation" / "roles.md").read_text(encoding="utf-8").split())
RELEVANCE = " ".join((ROOT / "docs" / "explanation" / "relevance.md").read_text(encoding="utf-8").split())
RESULTS = ROOT / "notebooks" / "results" / "roles"
ROLES = ["positional", "syntactic", "rare", "coreference", "separator", "first-token", "broad", "background"]
tables, known = (script(ROOT / "notebooks" / "roles" / f"{name}.py") for name in ("tables", "known"))


def test_the_map_is_that_of_the_file():
    table = pd.read_csv(RESULTS / "roles_by_layer.csv")
    for _, row in table.iterrows():
        assert f"| {row['layer']} | " + " | ".join(str(row[name]) for name in ROLES) + " |" in PAGE
    assert "| all | " + " | ".join(str(table[name].sum()) for name in ROLES) + " |" in PAGE
    roles = pd.read_csv(RESULTS / "roles.csv")
    background = int((~roles["specialised"]).sum())
    low, high = (100 * bound for bound in stats.binomtest(background, len(roles)).proportion_ci(method="exact"))
    share = f"({background / len(roles):.0%}, 95 % interval {low:.0f} to {high:.0f} %)".replace("67%", "67 %")
    assert f"{background} of {len(roles)} heads {share} are background" in PAGE
    assert f"{int((roles['roles'] == 'none').sum())} have no role at all" in PAGE
    assert f"{100 * roles['rare_strength'].max():.0f} %, in the first layer" in PAGE
    assert roles.loc[roles["rare_strength"].idxmax(), "layer"] == 0


def test_depths_are_those_of_the_roles():
    found, kept = (
        tables.depth_table(pd.read_csv(RESULTS / "roles.csv")),
        pd.read_csv(RESULTS / "depth.csv"),
    )
    pd.testing.assert_frame_equal(found, kept)
    rows = {str(row["role"]): row for row in kept.to_dict("records")}
    for role, said in (
        ("syntactic", "is {:.2f} ({:.2f} to {:.2f}) for syntactic"),
        ("coreference", "and {:.2f} ({:.2f} to {:.2f}) for coreference"),
        ("first-token", "({:.2f}, {:.2f} to {:.2f})"),
        ("background", "background ({:.2f}, {:.2f} to {:.2f})"),
    ):
        assert said.format(*(rows[role][name] for name in ("depth", "low", "high"))) in PAGE


def test_the_interval_of_a_depth_is_students_over_heads():
    table = pd.read_csv(RESULTS / "roles.csv")
    rows = tables.depth_table(table).set_index("role")
    depths = table.loc[table["syntactic_has"], "layer"] / 5
    low, high = stats.t.interval(0.95, len(depths) - 1, depths.mean(), stats.sem(depths))
    assert rows.loc["syntactic", ["depth", "low", "high"]].tolist() == pytest.approx([depths.mean(), low, high])
    assert rows.loc["positional", ["low", "high"]].isna().all()


def test_the_best_heads_are_those_of_the_relations():
    found, kept = (
        tables.clark_table(pd.read_csv(RESULTS / "relations.csv")),
        pd.read_csv(RESULTS / "clark.csv"),
    )
    pd.testing.assert_frame_equal(found, kept, check_dtype=False)
    for row in kept.to_dict("records"):
        share, low, high, baseline = (f"{100 * row[name]:.1f}" for name in ("share", "low", "high", "baseline"))
        there = f"{row['clark']} {100 * row['share_there']:.1f} / {100 * row['baseline_there']:.1f}"
        assert f"| {row['relation']} | {row['head']} | {share} ({low} to {high}) | {baseline} | {there} |" in PAGE


@pytest.mark.integration
def test_what_survives_is_that_of_the_comparisons():
    kept = pd.read_csv(RESULTS / "survival.csv")
    pd.testing.assert_frame_equal(kept, tables.survival_table().reset_index(drop=True))
    for _, row in kept[
        kept["method"].isin(["learned", "his", "entropy(keep=high)", "random"]) & (kept["budget"] > 4)
    ].iterrows():
        shares = f"{100 * row['specialised_kept']:.0f} % | {100 * row['others_kept']:.0f} %"
        over = f"{row['low']:.2f} to {row['high']:.2f}" if row["low"] == row["low"] else "seeds alike"
        assert (
            f"| {row['comparison']} | {row['budget']} | {row['method']} | {shares} | {row['odds_ratio']:.2f} ({over}) |" in PAGE
        )
    assert f"above 1 for {(kept['first_seed_low'] > 1).sum()} of the {len(kept)} masks" in PAGE


@pytest.mark.integration
def test_what_is_said_of_survival():
    kept = pd.read_csv(RESULTS / "survival.csv").set_index(["comparison", "method", "budget"])
    for method in ("learned", "his"):
        for budget in (18, 9):
            assert all(kept.loc[(task, method, budget), "low"] > 1 for task in ("agreement", "sst2", "trec"))
    assert all(kept.loc[("sick", "learned", budget), "low"] < 1 for budget in (18, 9))
    assert all(kept.loc[(task, "entropy(keep=high)", 18), "high"] < 1 for task in ("agreement", "sick", "sst2"))
    roles, less = str(RESULTS / "roles.csv"), {}
    for task in ("agreement", "sick", "sst2", "trec"):
        sentences = survival_of_roles(str(RESULTS.parent / f"{task}_seeds"), roles).sentences
        against = [line for line in sentences if line.startswith(("At 18 heads", "At 9 heads"))]
        assert len(against) == 2
        less[task] = [line for line in against if "keep specialised heads less than HIS does" in line]
        assert all("no difference is shown" in line for line in set(against) - set(less[task]))
    assert [len(found) for found in less.values()] == [0, 1, 0, 0]
    assert "is 0.46 times (95 % interval 0.24 to 0.90)" in less["sick"][0]
    assert "factor of 0.46 (0.24 to 0.90)" in PAGE


def test_relevance_and_other_scores_are_those_of_the_file():
    table = pd.read_csv(RESULTS / "relevance.csv")
    for one, other, said in (
        ("relevance", "gradient_x_input", "between relevance and gradient x input"),
        ("relevance", "his", "between relevance and HIS"),
        ("gradient_x_input", "his", "between gradient x input and HIS"),
    ):
        assert f"{stats.spearmanr(table[one], table[other]).statistic:.2f} {said}" in RELEVANCE


def test_the_translator_has_no_specialised_head():
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


def test_causal_roles_are_those_of_the_files():
    heads, closed = pd.read_csv(RESULTS / "causal.csv"), pd.read_csv(RESULTS / "causal_closed.csv").set_index("role")
    counts = heads["role"].value_counts()
    for role in ("facilitating", "irrelevant"):
        row = closed.loc[role]
        assert row["gates"] == counts[role]
        change, low, high = (f"{100 * row[name]:.1f}" for name in ("change", "low", "high"))
        assert f"| {role} | {counts[role]} | {change} points ({low} to {high}) |" in RELEVANCE
    assert "interfering" not in counts
    assert f"agree on {(heads['agreement'] == 1).sum()} of {len(heads)} heads" in RELEVANCE
    kept = 100 * closed.loc[["irrelevant", "interfering"], "metric"]
    assert f"accuracy is {kept['irrelevant']:.1f} % with the 15 facilitating heads alone" in RELEVANCE
    assert f"and {kept['interfering']:.1f} % with all 72" in RELEVANCE


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


def test_known_roles_of_one_program_are_found_again():
    for name in ("bigram-undone", "induction-copies"):
        rows = pd.DataFrame(known.program_rows(PROGRAMS[name], 0))
        assert len(rows) == PROGRAMS[name].total_heads
        built = rows[rows["group"] == known.BUILT]
        assert len(built) == sum(head == PREVIOUS for layer in PROGRAMS[name].layers for head in layer.heads)
        assert (built["roles"] == "positional").all()
        assert (built["positional_by"] == "-1").all()
        assert not rows.loc[rows["group"] != known.BUILT, "roles"].str.contains("positional").any()
    rows = pd.DataFrame(known.program_rows(PROGRAMS["majority"], 0))
    assert rows.loc[rows["group"] == known.NEEDED, "roles"].tolist() == ["first-token"]


def test_the_distance_that_a_head_is_built_for():
    heads = {head.does: head for layer in PROGRAMS["palindrome"].layers for head in layer.heads}
    assert known.distance_of(PREVIOUS, PROGRAMS["bigram"]) == -1
    assert known.distance_of(heads["mirror"], PROGRAMS["palindrome"]) is None  # another distance at every place
    assert known.distance_of(heads["seek"], PROGRAMS["palindrome"]) is None  # a flag, at any place
    (last,) = [head for head in PROGRAMS["induction"].layers[0].heads if head.does == "last"]
    assert known.distance_of(last, PROGRAMS["induction"]) is None  # from one place alone


def test_what_methods_keep_of_programs_follows_from_the_truth():
    truth = pd.read_csv(RESULTS.parent / "known_truth" / "truth.csv")
    with_one = {
        name
        for name in set(truth["program"])
        if any(known.distance_of(head, PROGRAMS[name]) is not None for layer in PROGRAMS[name].layers for head in layer.heads)
    }
    found = known.method_table(truth, with_one)
    pd.testing.assert_frame_equal(found, pd.read_csv(RESULTS / "known_roles_methods.csv"))
