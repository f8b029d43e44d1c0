"""Translations that a run leaves as text."""

import numpy as np
import pandas as pd

from tests.training.comparison.rows import make_row
from tests.training.runs import make_data as make_classification_data
from tests.training.translation_runs import make_data, read_texts
from training.comparison.experiments import PREDICTIONS
from training.comparison.tables import Results, save_translations
from training.runs.directory import RunDirectory


def new_run(folder):
    run = RunDirectory(folder / "run")
    run.create("")
    return run


def kept(folder, name, texts, beam=None):
    """The folder of an experiment with predictions."""
    arrays = {"test_prediction": np.array(texts)} | ({} if beam is None else {"test_prediction_beam": np.array(beam)})
    (folder / name).mkdir(exist_ok=True)
    np.savez_compressed(folder / name / PREDICTIONS, **arrays)
    return folder / name


def results_of(folder, data, **systems):
    """Rows of systems that are called METHOD__STAGE here, with their texts."""
    rows = []
    for name, texts in systems.items():
        method, stage = name.split("__")
        rows.append(make_row(0, method, stage.replace("_", " "), 3, name, kept(folder, name, *texts)))
    return Results(rows=rows, data=data)


def test_every_system_is_one_line_a_sentence_and_tested_against_the_dense_one(tmp_path):
    data = make_data()
    right = data.texts["test"].target
    wrong = ["nothing\nof this", *(" ".join(reversed(text.split())) for text in right[1:])]
    run = new_run(tmp_path)
    save_translations(run, results_of(tmp_path, data, dense__post_hoc=(right, wrong), his__retrained=(wrong, wrong)))
    folder = run.path / "translations"
    assert read_texts(folder / "dense.post hoc.greedy.txt") == right
    assert read_texts(folder / "his.retrained.beam.txt") == ["nothing of this", *wrong[1:]]
    assert read_texts(folder / "reference.txt") == right
    table = pd.read_csv(folder / "significance.csv")
    assert set(table["baseline"]) == {"dense.post hoc"}
    assert set(table["search"]) == {"greedy", "beam"}
    greedy = table[table["search"] == "greedy"].set_index("system")["bleu"]
    assert greedy["dense.post hoc"] > 99 > 50 > greedy["his.retrained"]


def test_systems_that_are_no_longer_compared_go(tmp_path):
    data = make_data()
    right, run = data.texts["test"].target, new_run(tmp_path)
    save_translations(run, results_of(tmp_path, data, dense__retrained=(right,), his__retrained=(right,)))
    save_translations(run, results_of(tmp_path, data, dense__retrained=(right,)))
    assert {path.name for path in (run.path / "translations").iterdir()} == {
        "source.txt", "reference.txt", "dense.retrained.greedy.txt",
    }  # fmt: skip


def test_a_system_of_a_part_is_named_and_not_kept(tmp_path, capsys):
    data = make_data()
    right, run = data.texts["test"].target, new_run(tmp_path)
    save_translations(run, results_of(tmp_path, data, dense__retrained=(right,), his__retrained=(right[:9],)))
    assert "9 of 24 test sentences were translated by his.retrained; these are not kept" in capsys.readouterr().out
    assert not (run.path / "translations" / "his.retrained.greedy.txt").exists()
    assert (run.path / "translations" / "dense.retrained.greedy.txt").exists()


def test_classes_are_no_translations(tmp_path):
    save_translations(RunDirectory(tmp_path / "run"), Results(data=make_classification_data()))
    assert not (tmp_path / "run").exists()
