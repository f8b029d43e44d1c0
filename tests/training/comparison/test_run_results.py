"""What a run says of itself beside the tables."""

from types import SimpleNamespace

import pytest

from training.comparison.methods import Method, mask_found_by
from training.comparison.run import source_of
from training.comparison.terminal import gates_sentence
from training.config import PrunerOptions
from training.config.data import ParallelText, Synthetic, Text
from training.report.captions import outcome
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
    gates = {"closed": 10, "closed_by_gates": 9, "price": [0.0125]}
    assert gates_sentence(gates) == ("of 10 closed gates, 9 had closed in training; price of an open one at the end: 0.0125")
    assert gates_sentence(gates | {"closed_by_gates": 8}) == (
        "of 10 closed gates, 8 had closed in training, and the rest was closed by their rank; a longer prune phase "
        "(a larger --model.prune) leaves less to the rank; price of an open one at the end: 0.0125"
    )
    assert gates_sentence(gates | {"price": []}) == gates_sentence({}) == ""


@pytest.mark.parametrize(("is_refitted", "said"), [(True, "refitted,"), (False, "not refitted, because a refit was worse;")])
def test_the_choice_says_whether_the_refit_was_applied(is_refitted, said):
    run = {"method": "obs+refit", "selection": {"learned+refit": 0.5, "obs+refit": 0.6}, "is_refitted": is_refitted}
    choice = outcome(run, "accuracy")["choice"]
    assert choice == f"kept the heads of obs+refit: {said} accuracy on the selection split is 60.00 % (learned+refit 50.00)"


def test_the_choice_says_whether_its_lead_may_be_chance():
    run = {"method": "obs+refit", "selection": {"learned+refit": 0.5, "obs+refit": 0.6}}
    lead = {"second": "learned+refit", "difference": 0.1, "low": -0.01, "high": 0.2}
    choices = [outcome(run | {"lead": lead | {"low": low}}, "accuracy")["choice"] for low in (-0.01, 0.01)]
    assert choices[0] == f"{choices[1]}; the difference to learned+refit is not significant"


@pytest.mark.parametrize("is_refitted", [True, False])
def test_a_model_card_names_a_refit_that_was_applied(is_refitted):
    found = mask_found_by(
        PrunerOptions(backbone="a/b", retrain=0.0, pipelined=True), Method.parse("obs+refit"), is_refitted=is_refitted
    )
    assert found.startswith("the heads of the highest obs; ")
    assert found.endswith("weights not trained with the mask")
    assert ("refitted" in found) == is_refitted
