"""Runs with a budget in time, by a table that is given: from the command line to the files."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertModel

from gates.errors import GateError
from gates.gating.budget import counts_by_site
from gates.gating.latency import SLACK, LatencyTable, SiteTimes, TimeLimit
from tests.gates.latency_tables import table_of
from tests.training.runs import MODEL, make_data, make_setup, run_fit, shared_folder, write_config
from training.commands.table import run_command
from training.comparison import latency as in_time
from training.comparison.latency import latency_sentence, limit_of, measured_table, timed
from training.fit import main
from training.runs.directory import LATENCY, RunDirectory

TIMES = [0.0, 2.0, 3.0, 3.0, 5.0]
BUDGET = "0.6x"


def tiny_table():
    """Of the tiny configuration's model; the first site is twice as dear as the second."""
    table = table_of(BertModel(BertConfig(**{name: value for name, value in MODEL.items() if name != "model_type"})), TIMES)
    return replace(table, sites=[SiteTimes("encoder.0", [2 * one for one in TIMES]), table.sites[1]])


def arguments(folder):
    tiny_table().write(folder / "table.json")
    own = ["--model.budget", BUDGET, "--model.latency_table", str(folder / "table.json"), "--model.swaps", "8"]
    return ["--config", write_config(folder), "--run_dir", str(folder / "run"), *own, "--compare", "posthoc"]


@pytest.fixture(scope="session")
def timed_run(tmp_path_factory):
    """A run within a time, compared post hoc, and what it said."""

    def make(folder):
        done = run_fit(*arguments(folder), "--curve", "[0.5]", cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        (folder / "stdout").write_text(done.stdout)

    folder = shared_folder(tmp_path_factory, "in-time", make)
    return folder / "run", (folder / "stdout").read_text()


@pytest.mark.integration
def test_every_method_ends_within_the_time_and_no_head_could_be_added(timed_run):
    run, _ = timed_run
    limit = TimeLimit.parse(BUDGET, tiny_table())
    masks = {entry["method"]: torch.tensor(entry["mask"]) for entry in json.loads((run / "masks.json").read_text())}
    assert {"learned+swap", "his", "random", "hies"} <= set(masks)
    for method, mask in masks.items():
        if method == "dense":
            continue
        assert limit.allows(counts_by_site(mask, limit)), method
        for closed in (mask == 0).nonzero().flatten() if method != "learned+swap" else ():  # a swap may leave room
            more = mask.clone()
            more[closed] = 1
            assert not limit.allows(counts_by_site(more, limit)), method


@pytest.mark.integration
def test_the_run_says_what_was_to_be_what_was_predicted_and_what_is(timed_run):
    run, said = timed_run
    limit = TimeLimit.parse(BUDGET, tiny_table())
    metrics = json.loads((run / "metrics.json").read_text())
    told = metrics["run"]["latency"]
    mask = next(
        torch.tensor(row["mask"]) for row in json.loads((run / "masks.json").read_text()) if row["method"] == "learned+swap"
    )
    assert told["target_ms"] == pytest.approx(limit.milliseconds)
    assert told["predicted_ms"] == pytest.approx(limit.table.time_of(counts_by_site(mask, limit)))
    assert told["predicted_ms"] <= told["target_ms"]
    assert told["achieved_ms"] > 0
    assert told["dense_ms"] > 0
    assert told["inputs"]["input_ids"][0] == 96
    assert f"a forward pass was to take {told['target_ms']:.4g} ms" in said
    assert f"achieved {told['achieved_ms']:.4g} ms" in said
    assert "price of a millisecond at the end" in said
    assert LatencyTable.read(run / LATENCY) == tiny_table()


@pytest.mark.integration
def test_a_run_that_is_resumed_goes_by_its_own_table(timed_run, tmp_path, capsys):
    """Also where all but the table is given anew, and with nothing trained twice; with another table it is refused."""
    given = arguments(tmp_path)
    assert main([*given, "--compare", "none", "--trainer.limit_train_batches", "6"]) == 0
    run = tmp_path / "run"
    before = {path.name: path.stat().st_mtime_ns for path in (run / "experiments").iterdir()}
    (run / "finished.json").unlink()
    again = [*given, "--compare", "none", "--trainer.limit_train_batches", "6", "--existing", "resume"]
    assert main(again) == 0
    assert {path.name: path.stat().st_mtime_ns for path in (run / "experiments").iterdir()} == before
    (run / "finished.json").unlink()
    replace(tiny_table(), rest=1.5).write(tmp_path / "table.json")
    assert main(again) == 2
    assert "this has changed since" in capsys.readouterr().err


def test_a_table_is_measured_where_none_is_given_and_read_where_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(in_time, "measured_table", lambda setup, data, **_: tiny_table())
    setup, data = make_setup(budget="7ms"), make_data()
    assert limit_of(timed(setup, RunDirectory(tmp_path), data)) == TimeLimit(7.0, tiny_table())
    assert list(tmp_path.iterdir()) == []
    kept = replace(tiny_table(), rest=2.0)
    kept.write(tmp_path / LATENCY)
    assert limit_of(timed(setup, RunDirectory(tmp_path, resumes=True), data)) == TimeLimit(7.0, kept)
    assert limit_of(timed(setup, RunDirectory(tmp_path), data)) == TimeLimit(7.0, tiny_table())
    counted = make_setup(budget=3)
    assert timed(counted, RunDirectory(tmp_path), data) is counted


@pytest.mark.parametrize("budget", ["0.0001ms", "0.0001x"])
def test_a_time_far_below_that_of_the_model_is_refused_before_the_measurement(budget, tmp_path, monkeypatch):
    monkeypatch.setattr(in_time, "measure_table", None)
    with pytest.raises(GateError, match=f"the budget is {budget}, but the model takes about .* without any head"):
        timed(make_setup(budget=budget), RunDirectory(tmp_path), make_data())


def test_several_processes_do_not_measure_at_once():
    setup = make_setup(budget="7ms")
    several = replace(setup, trainer=replace(setup.trainer, devices=2, strategy="ddp"))
    with pytest.raises(GateError, match=r"2 processes would measure latency at once.*--model.latency_table"):
        measured_table(several, make_data())


def test_what_is_achieved_too_late_is_told_with_what_to_do():
    told = {"target_ms": 7.0, "predicted_ms": 6.9, "achieved_ms": 9.0, "dense_ms": 10.0, "expected_speedup": 10 / 7}
    assert latency_sentence({**told, "speedup": {"median": 1.4}}).endswith("1.4 times as fast")
    assert "29% higher" in latency_sentence({**told, "speedup": {"median": 10 / 9}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--model.budget=0.05x"], "without any head"),
        (["--model.budget=99ms"], "nothing would be pruned"),
        (["--model.budget=1.5x"], "a share of the dense model's time"),
        (["--model.budget=12 s"], "'12 s'; expected a number of heads, a fraction such as 0.25, or a time such as 12ms"),
        (["--model.budget=-3ms"], "'-3ms'; expected"),
        (["--model.gate", "relaxed-top-k"], "relaxed-top-k gates are not held to a time"),
        (["--model.minimum_per_layer", "3"], "a minimum of 3 heads in each layer takes 10 ms"),
        (["--model.latency_table", "nowhere.json"], "cannot read the latency table 'nowhere.json'"),
        (["--compare", "full", "--retrained", "[mask:{folder}/mask.json]"], "own number of heads, but the budget is a time"),
        (["--model.from_scratch.num_attention_heads", "2"], "measure one of this model"),
    ],
)
def test_a_time_that_cannot_be_kept_is_one_sentence_and_nothing_is_written(given, said, tmp_path, capsys):
    (tmp_path / "mask.json").write_text("[[0, 1, 0, 0], [1, 1, 0, 1]]")
    given = [one.format(folder=tmp_path) for one in given]
    assert main([*arguments(tmp_path), *given]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
def test_all_masks_of_a_comparison_are_within_their_times(tmp_path, undrawn):
    """Of all seeds and methods, by the one table that is given and kept; beside a budget that counts heads."""
    table = tiny_table()
    table.write(tmp_path / "table.json")
    folder = tmp_path / "comparison"
    own = ["--config", write_config(tmp_path), "--run_dir", str(folder), "--model.latency_table", str(tmp_path / "table.json")]
    methods = ["--methods", "learned+swap,lambda(noise=configured),his,random", "--prices", "50", "--stages", "post hoc"]
    assert run_command("compare", [*own, *methods, "--seeds", "0,1", "--budgets", "7ms,2,0.85x"]) == 0
    assert LatencyTable.read(folder / LATENCY) == table
    limits = {table.most_within(time): time for time in (7.0, 0.85 * table.dense)}
    masks, counted = json.loads((folder / "masks.json").read_text()), []
    for entry in masks:
        counts = [sum(entry["mask"][:4]), sum(entry["mask"][4:])]
        if entry["budget"] in limits:
            assert table.time_of(counts) <= limits[entry["budget"]] + SLACK
            if "+swap" not in entry["method"]:  # a swap may leave room
                fuller = [[counts[0] + 1, counts[1]], [counts[0], counts[1] + 1]]
                assert all(max(more) > 4 or table.time_of(more) > limits[entry["budget"]] for more in fuller), entry["method"]
            counted.append(sum(counts))
        elif entry["method"] != "dense":
            assert sum(counts) == entry["budget"] == 2
    assert len(counted) == 2 * 2 * 4
    assert json.loads((folder / "metrics.json").read_text())["within"] == {
        str(most): f"{ms:.4g} ms" for most, ms in limits.items()
    }
    assert "within 7 ms" in (folder / "verdict.md").read_text()


@pytest.mark.integration
def test_a_comparison_measures_one_table_and_goes_on_with_it(tmp_path, monkeypatch, undrawn):
    own = ["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "comparison"), "--methods", "random,his"]
    line = [*own, "--budgets", "0.9x", "--seeds", "0", "--stages", "post hoc"]
    measured = []
    monkeypatch.setattr(in_time, "measured_table", lambda *given, **_: measured.append(given) or tiny_table())
    assert run_command("compare", line) == 0
    assert run_command("compare", line) == 0
    assert len(measured) == 1
    (tmp_path / "comparison" / "metrics.json").unlink()  # as of a call that was stopped, with other inputs
    assert run_command("compare", [*line, "--data.eval_batch_size", "4"]) == 0
    assert len(measured) == 2
    assert LatencyTable.read(tmp_path / "comparison" / LATENCY) == tiny_table()
