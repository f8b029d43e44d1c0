"""The notebooks, executed top to bottom on what tiny runs leave, and scripts of ablations."""

import json
import re
from functools import partial
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from tests.models import script
from tests.training.runs import run_fit, write_config
from training.commands.table import run_command

compare = partial(run_command, "compare")

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = ("01_prune_your_model.ipynb", "02_compare_methods.ipynb", "03_what_heads_do.ipynb")


def execute(name, monkeypatch, **environment):
    """All outputs of a notebook's code cells; an error in one is raised."""
    for variable, value in environment.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
    notebook = script(NOTEBOOKS / "execute.py").execute(NOTEBOOKS / name)
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_kept_and_name_no_machine(name):
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    written = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp|Users)/", "\n".join(written))


def test_the_gates_over_time_are_gates_alone(tmp_path):
    """Beside them the table has what was expected and what a gate cost."""
    columns = "seed,method,budget,step,expected,price,price/cross,encoder.0.0,encoder.0.1"
    (tmp_path / "gates_over_time.csv").write_text(f"{columns}\n0,learned,1,5,2,0,0,1,1\n0,learned,1,9,1,0,0,1,0\n")
    notebook = nbformat.read(NOTEBOOKS / "01_prune_your_model.ipynb", as_version=4)
    [source] = [cell.source for cell in notebook.cells if 'read_csv(RUN / "gates_over_time.csv")' in cell.source]
    known = {"pd": pd, "RUN": tmp_path}
    exec(source, known)
    assert list(known["over_time"]) == ["encoder.0.0", "encoder.0.1"]
    assert known["axes"].get_title() == "1 of 2 gates end closed"


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of the Jupyter client itself
def test_prune_your_model(tmp_path, monkeypatch):
    done = run_fit("--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run"), "--compare", "full", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outputs = execute("01_prune_your_model.ipynb", monkeypatch, RUN=tmp_path / "run")
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert any("between masked and removed" in output.get("text", "") for output in outputs)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_compare_methods(tmp_path, monkeypatch):
    arguments = ["--config", write_config(tmp_path), "--methods", "learned,his", "--budgets", "4,2", "--seeds", "0,1"]
    assert compare([*arguments, "--run_dir", str(tmp_path / "run")]) == 0
    outputs = execute("02_compare_methods.ipynb", monkeypatch, COMPARISON=tmp_path / "run")
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert any("Verdict" in str(output.get("data", {}).get("text/markdown", "")) for output in outputs)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_what_heads_do(monkeypatch):
    outputs = execute("03_what_heads_do.ipynb", monkeypatch, COMPARISON=NOTEBOOKS / "results" / "agreement_seeds")
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    shown = "".join(str(output.get("data", {}).get("text/plain", "")) for output in outputs)
    assert "odds_ratio" in shown
    assert "entropy(keep=high)" in shown


@pytest.mark.nightly
def test_levers_are_judged_on_the_selection_split(tmp_path, capsys):
    levers = script(NOTEBOOKS / "levers.py")
    further = ["--", "--config", write_config(tmp_path), "--budgets", "2", "--seeds", "0,1"]
    assert levers.main([str(tmp_path / "out"), "--only", "as configured", "--only", "start by HIS", *further]) == 0
    table = pd.read_csv(tmp_path / "out" / "levers.csv")
    assert list(table["lever"]) == ["as configured"] * 2 + ["start by HIS"] * 2
    rows = pd.read_csv(tmp_path / "out" / "runs" / "start-by-HIS" / "comparison.csv").query("method == 'learned'")
    expected = rows.groupby("stage")["select_accuracy"].mean()
    dense = pd.read_csv(tmp_path / "out" / "runs" / "start-by-HIS" / "comparison.csv").query("method == 'dense'")
    assert table["dense"].iloc[-1] == pytest.approx(dense.groupby("stage")["select_accuracy"].mean()[table["stage"].iloc[-1]])
    for row in table.query("lever == 'start by HIS'").itertuples():
        assert row.mean == pytest.approx(expected[row.stage])
        assert f"{100 * row.mean:.1f}" in (tmp_path / "out" / "verdict.md").read_text()
    assert levers.main([str(tmp_path / "out"), "--only", "luck", *further]) == 2
    assert "--only has 'luck'" in capsys.readouterr().err


@pytest.mark.nightly
def test_heads_chosen_with_trained_projections_are_judged_on_dense_weights(tmp_path, monkeypatch, capsys):
    from transformers import BertConfig, BertModel

    from training.data.synthetic import build_tokenizer

    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    BertModel(BertConfig(**sizes, vocab_size=len(tokenizer))).save_pretrained(tmp_path / "backbone")
    tokenizer.save_pretrained(tmp_path / "backbone")
    words = [word for word in tokenizer.get_vocab() if word.isalpha()]
    texts = [f"{first} {second}\t{place % 2}" for place, first in enumerate(words[:20]) for second in words[:10]]
    (tmp_path / "train.tsv").write_text("\n".join(texts))
    command = [str(tmp_path / "train.tsv"), str(tmp_path / "rows.jsonl"), "--backbone", str(tmp_path / "backbone")]
    command += ["--rows", "80", "--heads", "3", "--seeds", "0,1", "--dense_steps", "4", "--steps", "3"]
    joint = script(NOTEBOOKS / "joint.py")
    joint.main(command)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["seed"], row["variant"]) for row in rows] == [(seed, name) for seed in (0, 1) for name in joint.VARIANTS]
    assert {len(row["kept"]) for row in rows} == {3}
    assert len({row["loss"] for row in rows if row["seed"] == 0}) == len({str(row["kept"]) for row in rows if row["seed"] == 0})
    printed = capsys.readouterr().out.splitlines()[-6:]
    monkeypatch.setattr(joint, "train_dense", None)  # nothing is left to train
    joint.main(command)
    assert capsys.readouterr().out.splitlines() == printed
