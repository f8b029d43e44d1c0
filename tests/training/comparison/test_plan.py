"""What is compared with what, and that a run and a comparison of the same find the same."""

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.gating.budget import Budget
from gates.surgery.masks import load_mask
from tests.training.runs import make_pruner, make_setup, write_config
from training import fit
from training.analysis.model import setup_of
from training.commands.table import run_command
from training.comparison.methods import RIVALS, Method, parse_methods
from training.comparison.plan import (
    RUN_STAGE,
    Comparison,
    check_rows,
    cost_of,
    curve_budget,
    plan_of_comparison,
    plan_of_run,
    retrained_at_total_cost,
    run_seed,
)
from training.comparison.tables import Results
from training.config import EndOfRun
from training.config.comparison import AT_TOTAL_COST, FROM_DENSE
from training.pruner.checkpoints import read_checkpoint
from training.runs import progress
from training.runs.directory import RunDirectory
from training.setup import make_pruner as make_pruner_of
from training.setup import make_trainer, open_data

MEASURED = ["seconds", "peak_memory_mb"]
STAGES = ("post hoc", "retrained")
AS_A_RUN = ["--stages", "post hoc,retrained"]  # of a run without a refit


def rows_of(folder):
    table = pd.read_csv(folder / "comparison.csv").drop(columns=MEASURED)
    return table.set_index(["method", "stage"]).sort_index()


def masks_of(folder):
    masks = {entry["method"]: entry for entry in json.loads((folder / "masks.json").read_text())}
    return {method: {name: entry[name] for name in entry if name != "method"} for method, entry in masks.items()}


def assert_same(run, comparison, method):
    """All metrics, heads, steps and masks of a method, and the experiments behind its rows."""
    ours, theirs = rows_of(run), rows_of(comparison)
    metrics = [name for name in theirs if name.startswith(("select_", "test_"))]
    assert len(metrics) >= 8
    for stage in STAGES:
        pd.testing.assert_series_equal(ours.loc[(method, stage)], theirs.loc[(method, stage)], check_exact=True)
    assert masks_of(run)[method] == masks_of(comparison)[method]


# -- a run and a comparison -------------------------------------------------------------------------------------


def test_a_run_ends_with_the_weights_of_one_training_through_all_phases(full_run):
    """A run trains in pieces, each of which begins with the checkpoint that the one before left."""
    run = RunDirectory.finished(full_run[0])
    setup = setup_of(run, [])
    data = open_data(setup)
    pruner = make_pruner_of(setup, data)
    make_trainer(setup, limit_val_batches=0).fit(pruner, data)
    pieces = read_checkpoint(run.checkpoint("final"))["state_dict"]
    for name, tensor in pruner.state_dict().items():
        if torch.is_tensor(tensor):
            assert torch.equal(tensor, pieces[name]), name


def test_a_run_and_a_comparison_of_the_same_find_the_same(full_run, compared):
    for method in ("dense", "learned", *RIVALS):
        assert_same(full_run[0], compared[0], method)


def test_rows_of_learned_methods_alone_say_how_many_heads_gates_closed(full_run, compared):
    gates = json.loads((full_run[0] / "metrics.json").read_text())["run"]["gates"]
    assert gates["closed"] == 5
    for run, _ in (full_run, compared):
        found = rows_of(run)["closed_by_gates"]
        assert found["learned"].tolist() == [gates["closed_by_gates"] / 5] * 2
        assert found.drop("learned").isna().all()
        summary = pd.read_csv(run / "summary.csv").set_index("method")["closed_by_gates"]
        assert summary["learned"].tolist() == found["learned"].tolist()
        assert "Share of the closed heads that training itself closed" in (run / "verdict.md").read_text()


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """A run with a search by swaps, and the comparison's learned+swap."""
    folder = tmp_path_factory.mktemp("swapped")
    common = ["--config", write_config(folder), "--model.init_spread", "0", "--model.learning_rate", "0.01"]
    own = ["--model.swaps", "12", "--compare", "posthoc", "--curve", "[]"]
    assert fit.main([*common, *own, "--run_dir", str(folder / "fit")]) == 0
    theirs = ["--methods", "learned+swap", "--swap.passes", "12", "--budgets", "3", "--seeds", "0", *AS_A_RUN]
    assert (
        run_command("compare", [*common, *theirs, "--run_dir", str(folder / "compare"), "--experiments", str(folder / "cache")])
        == 0
    )
    return folder / "fit", folder / "compare"


@pytest.mark.integration
def test_a_run_with_swaps_is_the_method_of_the_same_name(swapped):
    """Also its mask without training: both are searched on the dense weights, on which gates are learned."""
    assert_same(*swapped, "learned+swap")
    assert "learned" not in rows_of(swapped[0]).index
    experiments = swapped[0] / "experiments"
    known = {file.parent.name: json.loads(file.read_text()) for file in experiments.glob("*/experiment.json")}
    starts = [known[one["start"]]["experiment"] for one in known.values() if one["experiment"] == "swap"]
    assert starts == ["dense"]
    assert json.loads((swapped[0] / "metrics.json").read_text())["run"]["method"] == "learned+swap"


FAMILIES = {
    "dsp(pipelined=true)": ["--model.gate", "relaxed-top-k", "--model.pipelined", "true"],
    "learned(start=obs)": ["--model.init_spread", "1", "--model.init_score", "obs"],
}


@pytest.mark.integration
@pytest.mark.parametrize("method", FAMILIES)
def test_every_family_of_gates_is_the_method_of_its_name(method, tmp_path):
    common = ["--config", write_config(tmp_path)]
    own = [*FAMILIES[method], "--compare", "posthoc", "--curve", "[]", "--run_dir", str(tmp_path / "fit")]
    assert fit.main([*common, *own]) == 0
    theirs = ["--methods", method, "--budgets", "3", "--seeds", "0", *AS_A_RUN, "--run_dir", str(tmp_path / "compare")]
    assert run_command("compare", [*common, *theirs]) == 0
    assert_same(tmp_path / "fit", tmp_path / "compare", method)


@pytest.mark.integration
def test_a_run_with_a_price_is_the_method_of_its_name(tmp_path):
    """A comparison at just that budget finds the same; here a price that leaves some heads, not all and not none."""
    priced = ["--config", write_config(tmp_path), "--model.price", "1e-3", "--model.gate_learning_rate", "0.5"]
    priced += ["--model.learning_rate", "0.01"]
    own = ["--model.budget", "null", "--model.draw_per", "example", "--compare", "posthoc", "--curve", "[0.5]"]
    assert fit.main([*priced, *own, "--run_dir", str(tmp_path / "fit")]) == 0
    metrics = json.loads((tmp_path / "fit" / "metrics.json").read_text())
    kept = metrics["run"]["kept"]
    assert 0 < kept < 8
    assert metrics["budgets"] == [kept]
    method = "lambda(noise=configured)"
    theirs = ["--methods", f"{method},his", "--budgets", str(kept), "--seeds", "0", *AS_A_RUN]
    assert run_command("compare", [*priced, *theirs, "--run_dir", str(tmp_path / "compare")]) == 0
    assert_same(tmp_path / "fit", tmp_path / "compare", method)
    his = [rows_of(tmp_path / name).loc[("his", "post hoc")] for name in ("fit", "compare")]
    pd.testing.assert_series_equal(*his, check_exact=True)
    curve = pd.read_csv(tmp_path / "fit" / "curve.csv")
    assert set(curve["method"]) == {method, *RIVALS}
    assert set(curve["heads"]) == {4}


# -- what is planned --------------------------------------------------------------------------------------------


def planned(methods, budgets, stages):
    plan = plan_of_comparison(parse_methods(methods), [Budget(count, {}) for count in budgets], stages)
    return [(one.method.name, one.budget and one.budget.total, one.stages) for one in plan]


def test_a_comparison_has_its_controls_once_and_every_method_at_every_budget():
    found = planned(["his", "dense+distil", "learned"], [4, 2], STAGES)
    assert found == [(name, None, STAGES) for name in ("dense", "dense+distil")] + [
        (name, budget, STAGES) for budget in (4, 2) for name in ("his", "learned")
    ]


def test_from_scratch_are_trained_the_dense_structure_and_learned_ones():
    found = planned(["his", "learned", "dense+distil", "learned+swap"], [2], (*STAGES, "from scratch"))
    assert {name for name, _, stages in found if "from scratch" in stages} == {"dense", "learned", "learned+swap"}


@pytest.mark.parametrize(("names", "stage"), [(["his+refit"], "post hoc with means"), (["his", "random"], "from scratch")])
def test_what_would_have_no_row_at_all_is_refused(names, stage):
    methods = [Method.parse(name) for name in names]
    with pytest.raises(
        GateError, match=rf"has '{stage}' alone, at which {', '.join(names)} would have no row".replace("+", r"\+")
    ):
        check_rows(methods, [stage])
    check_rows(methods, [stage, "post hoc"])
    check_rows([*methods, Method("learned")], [stage])
    check_rows([Method("dense")], [stage])


@pytest.fixture
def mask(tmp_path):
    (tmp_path / "mask.json").write_text("[0, 1, 0, 0, 1, 0, 0, 1]")
    return f"mask:{tmp_path / 'mask.json'}"


def own_score(subject):
    """Is only named here."""


def test_a_given_mask_comes_once_with_all_its_stages(mask):
    found = planned(["his", mask], [4, 3], (*STAGES, "from scratch"))
    assert [(name, stages) for name, _, stages in found if name == mask] == [(mask, (*STAGES, "from scratch"))]
    assert [budget for name, budget, _ in found if name == "his"] == [4, 3]


def test_a_run_is_compared_with_scores_and_masks_that_are_named(mask):
    score = f"{__name__}:own_score"
    found = of_run(compare="full", retrained=["learned", score], from_scratch=[mask])
    assert found[score] == STAGES
    assert found[mask] == ("post hoc", "from scratch")
    assert list(found)[-2:] == [score, mask]
    assert score not in of_run(compare="full")
    for own, name, said in (
        ("learned", f"{score}+swap", "has a modifier, which only the methods of a comparison have"),
        ("learned", "nowhere:score", "there is no module 'nowhere'"),
        ("lambda(noise=configured)", mask, "a run with a price ends with a number that is not known before"),
    ):
        with pytest.raises(GateError, match=said):
            of_run(own, compare="full", retrained=[name])


def of_run(own="learned", **end):
    plan = plan_of_run(Method.parse(own), Budget(3, {}), EndOfRun(**end), stage="retrained")
    return {one.method.name: one.stages for one in plan}


def test_a_run_is_compared_as_far_as_it_is_asked():
    assert of_run(compare="none") == {"dense": ("post hoc",), "learned": STAGES}
    assert of_run(compare="posthoc") == dict.fromkeys(("dense", "learned", *RIVALS), ("post hoc",)) | {"learned": STAGES}
    assert of_run(compare="full") == dict.fromkeys(("dense", "learned", *RIVALS), STAGES)
    some = of_run(compare="full", retrained=["his"], from_scratch=["learned", "random"])
    assert {name for name, stages in some.items() if "retrained" in stages} == {"learned", "his"}
    assert {name for name, stages in some.items() if "from scratch" in stages} == {"learned", "random"}


def test_a_run_trains_the_heads_it_keeps_and_shows_those_of_its_gates():
    own, kept, end = Method.parse("learned+refit"), Method.parse("obs+refit"), EndOfRun(compare="none")
    plan = {one.method.name: one.stages for one in plan_of_run(own, Budget(3, {}), end, kept, stage="retrained")}
    assert plan == {"dense": ("post hoc",), "obs+refit": STAGES, "learned+refit": ("post hoc",)}


@pytest.mark.parametrize("compare", ["none", "posthoc", "full"])
def test_a_run_that_prunes_nothing_has_one_row(compare):
    assert of_run("dense", compare=compare) == {"dense": ("post hoc",)}
    assert of_run("dense", compare=compare, from_scratch=["learned"], retrained=["his+swap"]) == {"dense": ("post hoc",)}


def test_a_runs_own_method_is_named_with_its_search_or_without():
    for name in ("learned", "learned+swap"):
        found = of_run("learned+swap", compare="full", retrained=[], from_scratch=[name])
        assert found["learned+swap"] == (*STAGES, "from scratch")
        assert found["his"] == ("post hoc",)


def test_names_that_are_compared_with_nothing_are_named():
    with pytest.raises(GateError, match="unknown method 'best'; expected some of dense, learned, his"):
        of_run(compare="full", retrained=["best"])
    with pytest.raises(GateError, match="'fisher' is a method of comparisons, not of this run; expected some of dense"):
        of_run(compare="posthoc", from_scratch=["fisher"])
    with pytest.raises(GateError, match="unknown method 'best'"):
        of_run("dense", compare="none", from_scratch=["best"])
    with pytest.raises(GateError, match="'fisher' is a method of comparisons"):
        of_run(compare="none", from_scratch=["fisher"])
    with pytest.raises(GateError, match=r"unknown method 'learned\+swpa'"):
        of_run(compare="full", retrained=["learned+swpa"])


@pytest.mark.parametrize(
    ("budget", "fraction", "expected"),
    [
        (3, 0.5, 8),
        (3, 0.01, 1),
        ({"encoder": 3}, 0.5, {"encoder": 4}),
        ({"encoder": 3, "cross": 1}, 0.25, {"encoder": 2, "cross": 1}),
    ],
)
def test_points_of_the_curve_are_of_the_kinds_that_the_run_prunes(budget, fraction, expected):
    sizes = {"encoder": 8, "decoder": 4, "cross": 4}
    assert curve_budget(Budget.parse(budget, sizes), fraction, sizes) == Budget.parse(expected, sizes)


# -- what a run leaves ------------------------------------------------------------------------------------------


def test_mask_files_are_those_of_the_table(full_run):
    sites = find_attention(make_pruner().backbone)
    for method, entry in masks_of(full_run[0]).items():
        assert load_mask(full_run[0] / "masks" / f"{method}.json", sites).tolist() == entry["mask"]


def test_the_curve_is_post_hoc_quality_on_the_selection_split(full_run):
    """At the run's own budget, were it asked for, it would be the table's."""
    curve = pd.read_csv(full_run[0] / "curve.csv")
    assert set(curve["heads"]) == {4, 2}
    assert set(curve["method"]) == {"learned", *RIVALS}
    assert set(curve["stage"]) == {"post hoc"}
    assert not [name for name in curve if name.startswith("test_")]
    masks = {}
    for row in curve.itertuples():
        identity = json.loads((full_run[0] / "experiments" / row.experiment / "experiment.json").read_text())
        masks[row.method, row.heads] = identity["values"]
        assert sum(identity["values"]) == row.heads == row.budget
        assert identity["splits"] == ["select"]
    for method in ("learned", *RIVALS):
        assert all(more >= less for more, less in zip(masks[method, 4], masks[method, 2], strict=True))


# -- what finding a mask costs is paid for ----------------------------------------------------------------------


LONG = {"finetune": 0.5, "prune": 1.0, "retrain": 1.5, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def at_total_cost(tmp_path_factory):
    """Rows of a comparison in which every pass counts, by method and stage, and its experiments."""
    folder = tmp_path_factory.mktemp("total")
    asked = Comparison(
        setup=make_setup(**LONG),
        methods=parse_methods(["learned", "learned+refit", "his+distil", "hies+refit", "random"]),
        budgets=[3],
        seeds=[0],
        stages=["retrained", AT_TOTAL_COST],
        experiments=folder,
        searches={"distil": {"distil": 0.5}},
    )
    experiments, selector = asked.of_seed(0)
    with progress.stage("comparison") as shown:
        rows = list(run_seed(experiments, selector, asked.plan(selector.budgets), Results(), shown))
    return {(row.method, row.stage): row.as_columns() for row in rows}, experiments, selector


def passes(row):
    return row["forward_examples"] + 2 * row["backward_examples"]


@pytest.mark.integration
@pytest.mark.parametrize("method", ["learned", "learned+refit", "his+distil", "hies+refit"])
def test_finding_a_mask_and_training_on_cost_what_training_the_dense_model_on_costs(at_total_cost, method):
    """To within half a step, of 16 examples forwards and backwards, and forwards through a teacher."""
    rows, *_ = at_total_cost
    found, usual, whole = rows[method, AT_TOTAL_COST], rows[method, "retrained"], rows["dense", AT_TOTAL_COST]
    assert abs(passes(whole) - passes(found)) <= (64 if "distil" in method else 48) / 2
    if method == "learned":  # whose gates are paid for by the steps that all have
        assert found["experiment"] == usual["experiment"]
    else:
        assert 0 < found["steps"] < usual["steps"] <= whole["steps"]


@pytest.mark.integration
def test_the_dense_row_is_the_same_whichever_stage_is_asked_for(at_total_cost, tmp_path):
    """And its learning rate falls from the first step on, as that of a mask that is known."""
    rows, *_ = at_total_cost
    alone = Comparison(
        setup=make_setup(**LONG), methods=parse_methods(["random"]), budgets=[3], seeds=[0], stages=[AT_TOTAL_COST],
        experiments=tmp_path, searches={},
    )  # fmt: skip
    experiments, selector = alone.of_seed(0)
    retrained_at_total_cost(experiments, selector.select(Method("random"), Budget(3, {})))  # before the dense row is asked for
    with progress.stage("comparison") as shown:
        rows_of_alone = run_seed(experiments, selector, alone.plan(selector.budgets), Results(), shown)
        (row,) = [row.as_columns() for row in rows_of_alone if row.method == "dense"]
    usual = rows["dense", "retrained"]
    assert {name: row[name] for name in usual if name not in (*MEASURED, "stage")} == {
        name: value for name, value in usual.items() if name not in (*MEASURED, "stage")
    }


@pytest.mark.integration
@pytest.mark.parametrize("trainer", [{"limit_train_batches": 0.43}, {"accumulate_grad_batches": 3}], ids=["share", "sums"])
def test_steps_are_as_many_as_are_paid_for_however_long_a_run_is_said_to_be(tmp_path, trainer):
    """With a teacher too, who has to know where fine-tuning ended."""
    setup = make_setup(**LONG)
    asked = Comparison(
        setup=replace(setup, trainer=replace(setup.trainer, **trainer)), methods=parse_methods(["his", "his+distil"]),
        budgets=[3], seeds=[0], stages=["retrained", AT_TOTAL_COST], experiments=tmp_path, searches={"distil": {"distil": 0.5}},
    )  # fmt: skip
    with progress.stage("comparison") as shown:
        experiments, selector = asked.of_seed(0)
        found = run_seed(experiments, selector, asked.plan(selector.budgets), Results(), shown)
        rows = {(row.method, row.stage): row.as_columns() for row in found}
    whole = rows["dense", "retrained"]
    for method in ("his", "his+distil"):
        found = rows[method, AT_TOTAL_COST]
        assert found["steps"] < rows[method, "retrained"]["steps"] == whole["steps"]
        assert abs(passes(whole) - passes(found)) <= passes(whole) / whole["steps"] * 4 / 3 / 2


@pytest.mark.integration
def test_from_the_dense_model_all_masks_are_trained_on_equally_long(at_total_cost, tmp_path):
    """Those of gates, which rested the weights or trained them, as the same masks from a file are; and those of scores
    as ever."""
    rows, experiments, selector = at_total_cost
    for name in ("learned", "learned(pipelined=false)", "learned+distil"):
        chosen = selector.select(Method.parse(name), Budget(3, {}), post_hoc=True)
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(chosen.mask.tolist()))
        given = selector.select(Method(f"mask:{file}", Method.parse(name).modifiers), Budget(3, {}))
        found, of_file = RUN_STAGE[FROM_DENSE](experiments, chosen), RUN_STAGE["retrained"](experiments, given)
        assert found.key == of_file.key
        assert found.result["steps"] == rows["dense", "retrained"]["steps"]
    refitted = selector.select(Method.parse("learned+refit"), Budget(3, {}), post_hoc=True)
    assert RUN_STAGE[FROM_DENSE](experiments, refitted).result["steps"] == rows["dense", "retrained"]["steps"]
    assert rows["learned", "retrained"]["steps"] == rows["dense", "retrained"]["steps"]  # of gates and weights together
    for name in ("his+distil", "hies+refit"):
        selection = selector.select(Method.parse(name), Budget(3, {}), post_hoc=True)
        assert RUN_STAGE[FROM_DENSE](experiments, selection).key == rows[name, "retrained"]["experiment"]


@pytest.mark.integration
@pytest.mark.parametrize("method", ["dense", "random"])
def test_what_cost_nothing_to_find_is_trained_as_long_as_ever(at_total_cost, method):
    rows, *_ = at_total_cost
    assert rows[method, AT_TOTAL_COST]["experiment"] == rows[method, "retrained"]["experiment"]


@pytest.mark.integration
def test_where_nothing_is_left_the_mask_is_evaluated_as_it_is(at_total_cost):
    """And only what was spent on it counts."""
    _, experiments, selector = at_total_cost
    selection = selector.select(Method.parse("learned+refit"), Budget(3, {}))
    spent = replace(selection, cost=replace(selection.cost, forward_examples=1e6))
    found = retrained_at_total_cost(experiments, spent)
    assert found.key == experiments.post_hoc(selection.mask, start=selection.refit).key
    row = spent.cost.as_row()
    of_selection = {f"selection_{name}": row[name] for name in ("forward_examples", "backward_examples")}
    assert cost_of(found, AT_TOTAL_COST, spent) == row | of_selection


@pytest.mark.integration
def test_without_a_retrain_phase_frozen_weights_are_trained_for_no_method(tmp_path):
    setup = make_setup(**LONG | {"retrain": 0.0, "pipelined": True})
    asked = Comparison(
        setup=setup, methods=parse_methods(["learned", "his", "obs+refit"]), budgets=[3], seeds=[0], stages=["retrained"],
        experiments=tmp_path, searches={},
    )  # fmt: skip
    experiments, selector = asked.of_seed(0)
    for name in ("dense", "his", "obs+refit", "learned"):
        selection = selector.select(Method.parse(name), None if name == "dense" else Budget(3, {}))
        found = RUN_STAGE["retrained"](experiments, selection)
        alone = RUN_STAGE["post hoc"](experiments, selection)
        assert found.result["steps"] == 0
        assert found.result["test_loss"] == pytest.approx(alone.result["test_loss"], rel=1e-6)
