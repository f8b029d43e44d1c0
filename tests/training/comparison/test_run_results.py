"""What a run says of itself beside the tables."""

from types import SimpleNamespace

import pytest

from training.comparison.methods import Method, mask_found_by
from training.comparison.run import source_of
from training.comparison.terminal import gates_sentence, table_of
from training.config import PrunerOptions
from training.config.data import ParallelText, Synthetic, Text
from training.report.captions import outcome
from training.stats.numbers import signed
from training.tasks.classification import Regression


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Text(dataset="glue", subset="sst2"), {"dataset": "glue", "subset": "sst2"}),
        (
            Text(train_file="/home/me/reviews.csv", test_file="/home/me/test.csv"),
            {"dataset": "test.csv", "subset": ""},
        ),
        (ParallelText(dataset="someone/pairs"), {"dataset": "someone/pairs", "subset": ""}),
        (Synthetic(), {"dataset": "Synthetic", "subset": ""}),
    ],
)
def test_the_data_are_named_without_paths_of_this_machine(options, expected):
    types = {"accuracy": {"type": "accuracy"}}
    data = SimpleNamespace(options=options, task=SimpleNamespace(metric_types=lambda: types), more_tests=[])
    assert source_of(data) == {**expected, "metric_types": types}


def test_a_local_folder_is_named_by_its_last_part(tmp_path):
    (tmp_path / "reviews").mkdir()
    options = Text(dataset=str(tmp_path / "reviews"))
    assert source_of(SimpleNamespace(options=options, task=Regression(), more_tests=[]))["dataset"] == "reviews"


def test_the_end_of_a_run_says_how_many_gates_closed_by_themselves_and_what_to_do_where_these_are_few():
    gates, price = {"closed": 10, "closed_by_gates": 10, "price": [0.0125]}, "price of an open gate at the end: 0.0125"
    assert gates_sentence(gates) == f"training closed 10 of 10 gates; {price}"
    nine = "training closed 9 of 10 gates, and the remaining 1 closed at its end"
    assert gates_sentence(gates | {"closed_by_gates": 9}) == f"{nine}; {price}"
    assert gates_sentence(gates | {"closed_by_gates": 8}) == (
        "training closed 8 of 10 gates, and the remaining 2 closed at its end; more steps (--model.prune, "
        f"--model.min_steps) close more in training; {price}"
    )
    assert gates_sentence(gates | {"price": []}) == gates_sentence({}) == ""


def test_the_choice_and_the_refits_that_were_dropped_are_stated():
    run = {"method": "obs+refit", "kept": 3, "selection": {"learned+refit": 0.5, "obs+refit": 0.6}, "refits_dropped": []}
    said = outcome(run, "accuracy")
    assert (
        said["choice"] == "kept 3 heads, those of obs+refit: accuracy on the selection split is 60.00 % (learned+refit 50.00)"
    )
    assert "refit" not in said
    said = outcome(run | {"refits_dropped": ["learned+refit", "random+refit"]}, "accuracy")
    left_out = "is left out, because it was clearly worse on the selection split than the mask alone"
    assert said["refit"] == f"the refit of learned+refit and random+refit {left_out}"
    trained = outcome(run | {"result": {"select_accuracy": 0.7}}, "accuracy")["choice"]
    assert trained.endswith("is 60.00 % (learned+refit 50.00); after training it is 70.00 %")


def test_the_choice_says_whether_its_lead_may_be_chance():
    run = {"method": "obs+refit", "kept": 3, "selection": {"learned+refit": 0.5, "obs+refit": 0.6}}
    lead = {"second": "learned+refit", "difference": 0.1, "low": -0.01, "high": 0.2}
    choices = [outcome(run | {"lead": lead | {"low": low}}, "accuracy")["choice"] for low in (-0.01, 0.01)]
    assert choices[0] == f"{choices[1]}; the difference to learned+refit there is not significant"


@pytest.mark.parametrize("is_refitted", [True, False])
def test_a_model_card_names_a_refit_that_was_applied(is_refitted):
    found = mask_found_by(
        PrunerOptions(backbone="a/b", retrain=0.0, pipelined=True), Method.parse("obs+refit"), is_refitted=is_refitted
    )
    assert found.startswith("the heads of the highest obs; ")
    assert found.endswith("weights not trained with the mask")
    assert ("refitted" in found) == is_refitted


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_row_is_compared_with_the_dense_model_of_its_stage(is_trained):
    """With the one that trained as long, if the dense model was trained too."""
    known = {("dense", "post hoc"): 0.6, ("his", "post hoc"): 0.5, ("dense", "retrained"): 0.8, ("his", "retrained"): 0.7}
    if not is_trained:
        known.pop(("dense", "retrained"))
    common = {"heads": 3, "select_accuracy": 0.5, "test_loss": 1.0, "steps": 0, "seconds": 0.0}
    rows = [
        SimpleNamespace(
            stage=stage,
            as_columns=lambda one=(method, stage): (
                dict(zip(("method", "stage"), one, strict=True)) | common | {"test_accuracy": known[one]}
            ),
        )
        for method, stage in known
    ]
    pruner = SimpleNamespace(gates=SimpleNamespace(heads=8), options=SimpleNamespace(retrain=1.0))
    table = table_of(SimpleNamespace(rows=rows, pruner=pruner), {"kept": 3, "method": "his"}, "accuracy", {})
    column = next(column for column in table.columns if column.header == "- dense")
    expected = {("his", "post hoc"): -10.0, ("his", "retrained"): -10.0 if is_trained else 10.0}
    assert list(column.cells) == [signed(expected[one]) if one in expected else "" for one in known]
