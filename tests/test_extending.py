"""The page on a user's own scores, masks, data and tasks: its files are written, and its commands run."""

import json
import re
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest

from training.__main__ import main

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]
PAGE = (Path(__file__).parents[1] / "docs" / "howto" / "extending.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', flags=re.DOTALL | re.MULTILINE)
FILES = {title: text for _, title, text in BLOCK.findall(PAGE) if title}
COMMANDS = [shlex.split(line) for kind, _, text in BLOCK.findall(PAGE) if kind == "bash" for line in text.splitlines()]
SHORTER = {"finetune: 20": "finetune: 1", "rows: 1024": "rows: 64", "  retrain: 1\n": "  retrain: 1\n  min_steps: 0\n"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder with the files of the page, where its commands ran with less data. It is the working directory, which is not on
    Python's path, as in the installed program."""
    folder, own = tmp_path_factory.mktemp("extending"), [Path(name).stem for name in FILES]
    for name, text in FILES.items():
        for whole, less in SHORTER.items() if name == "small.yaml" else ():
            assert whole in text
            text = text.replace(whole, less)
        (folder / name).write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", [entry for entry in sys.path if entry])
        for command in COMMANDS:
            run(*command)
        yield folder
    for name in own:
        sys.modules.pop(name, None)


def run(program, *arguments):
    assert program == "head-gates"
    assert main(list(arguments)) == 0


def rows(folder, name):
    return pd.read_csv(folder / "runs" / name / "comparison.csv").set_index(["method", "stage", "budget"])


def masks(folder, name):
    entries = json.loads((folder / "runs" / name / "masks.json").read_text())
    return {(entry["method"], entry["budget"]): entry["mask"] for entry in entries}


def test_an_own_score_decides_at_every_budget(ran):
    scores, found = pd.read_csv(ran / "runs" / "scores" / "scores.csv"), masks(ran, "scores")
    best = scores["ranking:my_scores:gain"].sort_values(ascending=False, kind="stable").index
    for budget in (4, 2):
        assert {gate for gate, kept in enumerate(found["my_scores:gain", budget]) if kept} == set(best[:budget])
        assert set(rows(ran, "scores").loc["my_scores:gain+swap"].xs(budget, level="budget").index) == {
            "post hoc",
            "retrained from dense",
        }


def test_a_given_mask_stands_at_its_own_number_of_heads(ran):
    found = masks(ran, "mask")
    assert {budget for method, budget in found if method == "mask:mask.json"} == {3}
    assert found["mask:mask.json", 3] == [0, 1, 0, 0, 1, 0, 0, 1]
    assert {budget for method, budget in found if method == "his"} == {4, 3}
    assert set(rows(ran, "mask").loc["mask:mask.json"].index) == {("post hoc", 3), ("retrained from dense", 3)}


def test_an_own_task_has_its_own_loss(ran):
    """That of its data's other task is another one for the same model; labels are smoothed in evaluation too."""
    plain, smoothed = rows(ran, "scores"), rows(ran, "task")
    assert smoothed.loc[("dense", "post hoc", 8), "test_loss"] != plain.loc[("dense", "post hoc", 8), "test_loss"]


def test_a_run_has_an_own_score_and_a_given_mask_among_its_rivals(ran):
    asked = ["--compare", "full", "--retrained", "[learned, my_scores:gain, mask:mask.json]", "--curve", "[0.5]"]
    run("head-gates", "fit", "--config", "small.yaml", "--run_dir", "runs/fit", *asked)
    table = rows(ran, "fit")
    for method in ("my_scores:gain", "mask:mask.json"):
        assert set(table.loc[method].index) == {("post hoc", 3), ("retrained from dense", 3)}
    kept = json.loads((ran / "runs" / "fit" / "masks" / "mask_mask.json.json").read_text())["sites"]
    assert [site["kept"] for site in kept] == [[1], [0, 3]]
    assert "my_scores:gain" in set(pd.read_csv(ran / "runs" / "fit" / "curve.csv")["method"])
    export = ["--ranking", "my_scores:gain", "--format", "gates", "--output", "exported"]
    run("head-gates", "export", "runs/fit", *export)
    assert (ran / "exported" / "mask.json").is_file()
