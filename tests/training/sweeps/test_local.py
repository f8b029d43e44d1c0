"""Sweep files, W&B's agent on them, and running them here through to what is left after SIGKILL."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import optuna
import pandas as pd
import pytest
import yaml
from matplotlib.image import imread
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from wandb import wandb_agent
from wandb.proto import wandb_internal_pb2

from tests.training.runs import write_config
from training.cli.command_line import build_parser
from training.commands.table import run_command
from training.config.run import WandbOptions
from training.fit import main as fit
from training.runs.directory import only_writer
from training.sweeps.configurations import fingerprints
from training.sweeps.space import Sweep, fit_arguments, read_sweep

main = partial(run_command, "sweep")

SHIPPED = sorted((Path(__file__).parents[3] / "configs" / "sweeps").glob("*.yaml"))
COMMAND = ["${env}", "${interpreter}", "-m", "training.fit", "${args}"]
RANDOM = {
    "name": "tiny",
    "method": "random",
    "run_cap": 2,
    "metric": {"name": "select/loss", "goal": "minimize"},
    "parameters": {
        "model.gate_learning_rate": {"distribution": "log_uniform_values", "min": 0.01, "max": 0.5},
        "model.budget": {"values": [2, 0.5]},
        "model.retrain": {"value": 0.5},
        "model.learning_rate": {"value": 0.01},
    },
    "command": COMMAND,
}


def write_sweep(folder, **changes):
    path = folder / "sweep_file.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (RANDOM | changes).items() if value is not None}))
    return path


def one_thread(monkeypatch):
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)


# -- the file --------------------------------------------------------------------------------------------------


def in_agents_environment(folder, monkeypatch):
    """As on a machine where the agent was started in this folder; what the agent sets is undone after the test."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")


def agent_command(path, values, monkeypatch):
    """What W&B's agent would start for these values of a sweep file's parameters."""
    started = []
    monkeypatch.setattr(wandb_agent, "AgentProcess", lambda command, **_: started.append(command) or Started())
    start_with_agent(path, values)
    return started[0]


class Started:
    """Stands for the agent's process."""


def start_with_agent(path, values):
    """W&B's own agent is told to run one trial, as their server would tell it; returns the agent."""
    content = yaml.safe_load(path.read_text())
    agent = wandb_agent.Agent(api=None, queue=None, sweep_id="s1")
    agent._sweep_command = content["command"]
    args = {name: {"value": value} for name, value in values.items()}
    agent._command_run({"run_id": "trial7", "program": content.get("program"), "args": args})
    return agent


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweeps_are_what_the_agent_and_fit_understand(path, tmp_path, monkeypatch):
    """Every shipped file: fit takes all its options and the agent builds the command that is run here."""
    in_agents_environment(tmp_path, monkeypatch)
    sweep = read_sweep(path)
    assert path.read_text().startswith("# ")
    assert sweep.name == path.stem
    sweep.check([])
    study = optuna.create_study()
    study.sampler = sweep.sampler(sweep.count(None), 0)
    values = sweep.values(study.ask(sweep.space).params)
    command = agent_command(path, sweep.constants | values, monkeypatch)
    assert command[:4] == ["/usr/bin/env", "python", "-m", "training.fit"]
    assert command[2:] == sweep.trial_command(values)[1:]
    config = build_parser().parse_args(fit_arguments(command))
    for name, value in values.items():
        assert config[name] == value
    if path.stem == "lambda":
        assert config.model.budget is None


def test_further_arguments_come_before_the_trials_own(tmp_path):
    """A configuration read later would overwrite the options that are searched."""
    sweep = read_sweep(write_sweep(tmp_path))
    further = ["--config", write_config(tmp_path), "--model.budget=1"]
    command = sweep.trial_command({"model.gate_learning_rate": 0.1, "model.budget": 2}, further)
    assert command[:3] == [sys.executable, "-m", "training.fit"]
    config = build_parser().parse_args(fit_arguments(command))
    assert (config.name, config.model.budget, config.model.retrain) == ("tiny", 2, 0.5)


def test_nested_parameters_are_the_same_as_names_with_dots(tmp_path, monkeypatch):
    """Also for the agent, which passes a nested group as one dictionary."""
    size = {"parameters": {"hidden_size": {"value": 8}}}
    nested = {
        "model": {"parameters": {"gate_learning_rate": {"values": [0.1]}, "from_scratch": size}},
        "seed": {"value": 3},
    }
    path = write_sweep(tmp_path, method="grid", run_cap=None, parameters=nested)
    sweep = read_sweep(path)
    assert list(sweep.space) == ["model.gate_learning_rate"]
    assert sweep.constants == {"model.from_scratch.hidden_size": 8, "seed": 3}
    here = build_parser().parse_args(fit_arguments(sweep.trial_command({"model.gate_learning_rate": 0.1})))
    in_agents_environment(tmp_path, monkeypatch)
    told = {"model": {"gate_learning_rate": 0.1, "from_scratch": {"hidden_size": 8}}, "seed": 3}
    there = build_parser().parse_args(fit_arguments(agent_command(path, told, monkeypatch)))
    assert (there.model.gate_learning_rate, there.seed) == (here.model.gate_learning_rate, here.seed) == (0.1, 3)
    assert here.model.from_scratch["hidden_size"] == 8


@pytest.mark.parametrize(
    "spec",
    [
        {"min": 1, "max": 8},
        {"min": 0, "max": 0.5},
        {"distribution": "int_uniform", "min": 1, "max": 3},
        {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 0.25},
        {"distribution": "q_uniform", "min": 2, "max": 10, "q": 4},
        {"distribution": "log_uniform_values", "min": 1.0e-4, "max": 1.0},
        {"distribution": "uniform", "min": 0.1, "max": 0.9},
    ],
)
def test_ranges_are_what_wandb_makes_of_them_for_optuna(tmp_path, spec):
    theirs = pytest.importorskip("wandb.sdk.sweeps.scheduler.optuna").sweep_parameter_to_distribution(spec)
    assert read_sweep(write_sweep(tmp_path, parameters={"model.price": spec})).space["model.price"] == theirs


def test_a_grid_is_every_combination_and_ends_of_uneven_steps_are_met(tmp_path):
    parameters = {
        "model.price": {"distribution": "q_uniform", "min": 0.1, "max": 0.45, "q": 0.1},
        "seed": {"min": 1, "max": 3},
        "model.draw_per": {"values": ["example", "batch"]},
    }
    sweep = read_sweep(write_sweep(tmp_path, method="grid", run_cap=None, parameters=parameters))
    assert sweep.space["model.price"] == FloatDistribution(0.1, 0.4, step=0.1)
    assert sweep.space["seed"] == IntDistribution(1, 3)
    assert sweep.space["model.draw_per"] == CategoricalDistribution(['"example"', '"batch"'])
    assert (sweep.count(None), sweep.count(100), sweep.count(5)) == (24, 24, 5)
    study = optuna.create_study()
    drawn = set()
    for _ in range(24):
        study.sampler = sweep.sampler(24, 0)
        drawn.add(tuple(sweep.values(study.ask(sweep.space).params).values()))
    assert len(drawn) == 24


def test_values_keep_their_kind(tmp_path):
    values = [1, 1.0, True, "1", {"encoder": 2}, [1, 2]]
    sweep = read_sweep(write_sweep(tmp_path, parameters={"model.budget": {"values": values}}))
    kept = [sweep.values({"model.budget": choice})["model.budget"] for choice in sweep.space["model.budget"].choices]
    assert [(type(value), value) for value in kept] == [(type(value), value) for value in values]


PRICE = {"model.price": {"values": [0.1]}}
BAD = {
    "no method": ({"method": None}, "method is None"),
    "unknown method": ({"method": "anneal"}, "'anneal'"),
    "unknown key": ({"parmeters": {}}, "'parmeters'"),
    "no metric": ({"metric": None}, "metric is None"),
    "metric without a name": ({"metric": {"goal": "maximize"}}, "select/accuracy"),
    "choosing on the test split": ({"metric": {"name": "test/accuracy"}}, "'test/accuracy'"),
    "goal": ({"metric": {"name": "select/loss", "goal": "maximise"}}, "'maximise'"),
    "no parameters": ({"parameters": None}, "parameters are None"),
    "parameter without a range": ({"parameters": {"model.price": 0.1}}, "'model.price' is 0.1"),
    "unknown distribution": ({"parameters": {"model.price": {"distribution": "beta", "min": 0, "max": 1}}}, "'beta'"),
    "unknown word": ({"parameters": {"model.price": {"values": [1], "probabilities": [1]}}}, "'probabilities'"),
    "range backwards": ({"parameters": {"model.price": {"min": 1, "max": 0}}}, "from 1 to 0"),
    "number that YAML reads as text": ({"parameters": {"model.price": {"min": "1e-4", "max": 1}}}, "1.0e-4"),
    "logarithm of 0": ({"parameters": {"model.price": {"distribution": "log_uniform_values", "min": 0, "max": 1}}}, "above 0"),
    "half a head": ({"parameters": {"model.budget": {"distribution": "int_uniform", "min": 0.5, "max": 2}}}, "whole numbers"),
    "no values": ({"parameters": {"model.price": {"values": []}}}, "expected a list"),
    "the same twice": ({"parameters": PRICE | {"model": {"parameters": {"price": {"value": 1}}}}}, "twice"),
    "continuous grid": ({"method": "grid", "parameters": {"model.price": {"min": 0.1, "max": 1.0}}}, "continuous"),
    "endless": ({"run_cap": None}, "--trials"),
    "run_cap": ({"run_cap": 0}, "run_cap is 0"),
    "another program": ({"command": ["python", "train.py", "${args}"]}, "does not run training.fit"),
    "command without options": ({"command": ["python", "-m", "training.fit"]}, "${args}"),
    "unknown option": ({"parameters": {"model.bugdet": {"values": [3]}}}, "--model.bugdet=3"),
    "value of a wrong kind": ({"parameters": {"model.temperature": {"values": [0.3, "warm"]}}}, "warm"),
    "name that leaves the folder": ({"name": "../../esc"}, "the sweep's name is '../../esc'"),
    "name that is a path": ({"name": "/esc"}, "the sweep's name is '/esc'"),
    "grid beyond all time": (
        {"method": "grid", "parameters": {f"model.{name}": {"values": [*range(30)]} for name in ("price", "retrain", "swaps")}},
        "the grid has 27000 cells; expected at most 10000: give fewer values, or method: random",
    ),
    "many values": ({"parameters": {"seed": {"values": [*range(1001)]}}}, "'seed' has 1001 values"),
    "long range in a grid": ({"method": "grid", "parameters": {"seed": {"min": 0, "max": 10**15}}}, "at most 1000"),
    "directory of trials": ({"parameters": PRICE | {"run_dir": {"values": ["a", "b"]}}}, "--run_dir is given to trials"),
    "existing runs": ({"parameters": PRICE | {"existing": {"value": "overwrite"}}}, "--existing is given to trials"),
    "group": ({"parameters": PRICE | {"wandb": {"parameters": {"group": {"value": "x"}}}}}, "--wandb.group is given to trials"),
    "name in W&B": ({"command": [*COMMAND, "--wandb.name=x"]}, "--wandb.name is given to trials"),
    "null by the agent": ({"parameters": {"model.budget": {"values": [None]}}}, "--model.budget=null"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD))
def test_bad_files_are_one_sentence_and_exit_code_2(case, tmp_path, capsys):
    changes, expected = BAD[case]
    assert main([str(write_sweep(tmp_path, **changes)), "--run_dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "expected"), [(None, "cannot read"), ("[1, 2]", "[1, 2]"), ("a: [", "not YAML"), ("\udce9", "cannot read")]
)
def test_what_is_no_sweep_file(tmp_path, capsys, text, expected):
    if text is not None:
        (tmp_path / "x.yaml").write_bytes(text.encode(errors="surrogateescape"))
    assert main([str(tmp_path / "x.yaml")]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "x" * 1_000_001, "[" * 100, "a: &a [1, 1, 1]\nb: [" + "*a, " * 9000 + "*a]"])
def test_a_sweep_file_is_read_within_limits(text, tmp_path, capsys):
    (tmp_path / "x.yaml").write_text(text)
    assert main([str(tmp_path / "x.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot read the sweep file: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("argument", ["--run_dir=x", "--existing=overwrite", "--wandb.group=x", "--wandb.name=x"])
@pytest.mark.parametrize("apart", [False, True])
def test_arguments_of_trials_leave_what_the_sweep_decides_on(argument, apart, tmp_path, capsys):
    given = argument.split("=") if apart else [argument]
    assert main([str(write_sweep(tmp_path)), "--run_dir", str(tmp_path / "run"), "--", *given]) == 2
    assert f"error: {argument.split('=')[0]} is given to trials, and the sweep decides on it" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--jobs", "--trials", "--timeout_minutes"])
def test_counts_are_above_0(tmp_path, capsys, option):
    assert main([str(write_sweep(tmp_path)), option, "0"]) == 2
    assert f"{option} is 0" in capsys.readouterr().err


# -- running, with a stand-in for training -----------------------------------------------------------------------

QUICK = """
import json, os, pathlib, sys, time, yaml

options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
run = pathlib.Path(options["run_dir"])
run.mkdir(parents=True)
rate = float(options["model.price"])
run.joinpath("config.yaml").write_text(yaml.safe_dump({"name": "x", "run_dir": str(run), "existing": "refuse", "wandb": {}}))
while len(list(run.parent.glob("*/config.yaml"))) < int(options.get("meets", 0)):
    time.sleep(0.05)
at_once = sum(not path.with_name("metrics.json").exists() for path in run.parent.glob("*/config.yaml"))
time.sleep(float(options.get("sleep", 0)))
while not os.path.exists(options.get("waits_for", "/")):
    time.sleep(0.05)
if rate > 0.8:
    sys.exit("Traceback\\n  somewhere\\nerror: the price is too high\\nand so on")
row = {"heads": round(10 * rate), "select_loss": (rate - 0.3) ** 2, "test_loss": -rate}
metrics = {"run": {"result": row}, "heads": 16, "at_once": at_once, "threads": os.environ["OMP_NUM_THREADS"]}
run.joinpath("metrics.json").write_text(json.dumps(metrics))
"""


@pytest.fixture
def quick(monkeypatch):
    """Trials take no time: the loss is a parabola of the price, whose top fails."""
    stand_in(monkeypatch)


def stand_in(monkeypatch):
    """From now on."""

    def command(self, values, further=()):
        options = [f"--{name}={value}" for name, value in (self.constants | dict(values)).items()]
        return [sys.executable, "-c", QUICK, *further, *options]

    monkeypatch.setattr(Sweep, "trial_command", command)
    monkeypatch.setattr(Sweep, "check", lambda self, further: WandbOptions(mode="disabled"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def quick_sweep(folder, **changes):
    return str(write_sweep(folder, **({"parameters": {"model.price": {"min": 0.0, "max": 1.0}}, "run_cap": 4} | changes)))


def test_a_failed_trial_is_recorded_and_the_best_is_chosen_without_the_test_split(tmp_path, capsys, quick):
    grid = {"model.price": {"values": [0.9, 0.5, 0.2]}}
    file = quick_sweep(tmp_path, method="grid", parameters=grid, run_cap=None, early_terminate={"type": "hyperband"})
    assert main([file, "--run_dir", str(tmp_path / "run"), "--jobs", "2"]) == 0
    shown = capsys.readouterr()
    assert "early_terminate" in shown.err
    assert "the price is too high" in shown.out
    table = pd.read_csv(tmp_path / "run" / "sweep.csv").set_index("model.price")
    assert table["state"].to_dict() == {0.9: "failed", 0.5: "complete", 0.2: "complete"}
    assert table.loc[0.9, "error"] == "the price is too high"
    assert table.loc[0.2, "select_loss"] == pytest.approx(0.01)
    assert table.loc[0.2, "heads"] == 2
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best == {"name": "tiny-best", "run_dir": None, "existing": "refuse", "wandb": {"group": None, "name": None}}
    assert f"trial {table.loc[0.2, 'trial']}," in (tmp_path / "run" / "best.yaml").read_text()  # 0.5 is better on test
    assert imread(tmp_path / "run" / "sweep.png").std() > 0


def test_all_failed_is_an_error(tmp_path, capsys, quick):
    file = quick_sweep(tmp_path, parameters={"model.price": {"values": [0.9]}}, run_cap=2)
    assert main([file, "--run_dir", str(tmp_path / "run")]) == 2
    assert "all 2 trials failed, the last with: the price is too high" in capsys.readouterr().err


def test_a_metric_that_trials_do_not_have_ends_the_sweep_at_once(tmp_path, capsys, quick):
    file = quick_sweep(tmp_path, metric={"name": "select/bleu", "goal": "maximize"}, parameters={"model.price": {"value": 0.1}})
    assert main([file, "--run_dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "'select/bleu'" in error
    assert "it has select/loss" in error
    assert len(pd.read_csv(tmp_path / "run" / "sweep.csv")) == 1


def test_jobs_run_at_the_same_time_and_share_the_cores(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    file = quick_sweep(tmp_path, parameters={"model.price": {"values": [0.1]}, "meets": {"value": 2}}, run_cap=5)
    assert main([file, "--run_dir", str(tmp_path / "run"), "--jobs", "2"]) == 0
    ended = [json.loads(path.read_text()) for path in (tmp_path / "run" / "trials").glob("*/metrics.json")]
    assert {metrics["threads"] for metrics in ended} == {"3"}
    assert max(metrics["at_once"] for metrics in ended) == 2


def test_a_trial_that_takes_too_long_is_ended_and_recorded(tmp_path, quick, monkeypatch):
    """Three minutes pass when the other trial is in the table."""

    def clock():
        table = tmp_path / "run" / "sweep.csv"
        return 180.0 if table.is_file() and "complete" in table.read_text() else 0.0

    monkeypatch.setattr("training.sweeps.local.time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    parameters = {"model.price": {"value": 0.1}, "sleep": {"values": [0, 1_000_000]}}
    file = quick_sweep(tmp_path, method="grid", parameters=parameters, run_cap=None)
    assert main([file, "--run_dir", str(tmp_path / "run"), "--jobs", "2", "--timeout_minutes", "2"]) == 0
    table = pd.read_csv(tmp_path / "run" / "sweep.csv").set_index("sleep")
    assert table.loc[0, "state"] == "complete"
    assert table.loc[1_000_000, "error"] == "not done after 2 minutes"


@pytest.mark.integration
def test_bayes_comes_closer_than_random(tmp_path, quick):
    """16 trials on a parabola: TPE gathers at its minimum, which random draws do not."""
    found = {}
    for method in ("random", "bayes"):
        file = quick_sweep(tmp_path, method=method, parameters={"model.price": {"min": 0.0, "max": 0.8}}, run_cap=16)
        assert main([file, "--run_dir", str(tmp_path / method), "--jobs", "3"]) == 0
        found[method] = (pd.read_csv(tmp_path / method / "sweep.csv")["model.price"] - 0.3).abs().iloc[8:].median()
    assert found["bayes"] < 0.5 * found["random"]


@pytest.mark.integration
def test_another_seed_draws_other_trials(tmp_path, quick):
    found = set()
    for seed in range(3):
        assert main([quick_sweep(tmp_path), "--run_dir", str(tmp_path / str(seed)), "--seed", str(seed), "--jobs", "2"]) == 0
        found |= set(pd.read_csv(tmp_path / str(seed) / "sweep.csv")["model.price"])
    assert len(found) == 3 * 4


@pytest.mark.parametrize("damage", ["garbage", "half", "bits", "gone"])
def test_a_sweep_whose_trials_cannot_be_read_ends_with_one_sentence(damage, tmp_path, capsys, quick):
    file, database = quick_sweep(tmp_path), tmp_path / "run" / "study.db"
    assert main([file, "--run_dir", str(tmp_path / "run"), "--trials", "1"]) == 0
    content = database.read_bytes()
    changed = {
        "garbage": b"garbage" * 1000,
        "half": content[: len(content) // 2],
        "bits": bytes(255 - byte for byte in content),
    }
    database.unlink()
    if damage in changed:
        database.write_bytes(changed[damage])
    kept = (tmp_path / "run" / "sweep.csv").read_bytes()
    capsys.readouterr()
    assert main([file, "--run_dir", str(tmp_path / "run"), "--trials", "2"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "study.db" in error
    assert "give another --run_dir" in error
    assert (tmp_path / "run" / "sweep.csv").read_bytes() == kept


def test_a_directory_whose_name_would_end_that_of_the_database_is_refused(tmp_path, capsys, quick):
    assert main([quick_sweep(tmp_path), "--run_dir", str(tmp_path / "a?b"), "--trials", "1"]) == 2
    assert "has a question mark" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_sweep_goes_on_and_repeats_nothing(tmp_path, capsys, quick):
    """Three trials, then five: the table of five at once. Another sweep, or another's directory, is refused."""
    file = quick_sweep(tmp_path, parameters={"model.price": {"min": 0.0, "max": 0.8}})
    assert main([file, "--run_dir", str(tmp_path / "whole"), "--trials", "5"]) == 0
    assert main([file, "--run_dir", str(tmp_path / "parts"), "--trials", "3"]) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts" / "trials").glob("*/metrics.json")}
    assert main([file, "--run_dir", str(tmp_path / "parts"), "--trials", "5"]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    whole, parts = (pd.read_csv(tmp_path / name / "sweep.csv").drop(columns="seconds") for name in ("whole", "parts"))
    pd.testing.assert_frame_equal(whole, parts)
    capsys.readouterr()
    with only_writer(tmp_path / "parts"):
        assert main([file, "--run_dir", str(tmp_path / "parts"), "--trials", "5"]) == 2
    assert "another process is at work" in capsys.readouterr().err
    for more in (["--seed", "1"], ["--", "--model.retrain=2"]):
        assert main([file, "--run_dir", str(tmp_path / "parts"), *more]) == 2
        assert "give another --run_dir" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    assert main([file, "--run_dir", str(tmp_path / "mine")]) == 2
    assert "does not hold a sweep" in capsys.readouterr().err


def test_a_sweep_goes_on_with_the_configurations_that_it_began_with(tmp_path, capsys, quick, monkeypatch):
    """A file may change under the same name."""
    monkeypatch.chdir(tmp_path)
    Path("more.yaml").write_text("seed: 1\n")
    line = [quick_sweep(tmp_path), "--run_dir", "sweep", "--trials", "2", "--", "--config=more.yaml"]
    assert main(line) == 0
    assert main(line) == 0
    before = Path("sweep/sweep.csv").read_bytes()
    Path("more.yaml").write_text("seed: 2\n")
    capsys.readouterr()
    assert main(line) == 2
    assert "the configuration 'more.yaml' has changed since the sweep in 'sweep' began" in capsys.readouterr().err
    assert Path("sweep/sweep.csv").read_bytes() == before
    Path("more.yaml").write_text("seed: 1\n")
    assert main(line) == 0
    note = yaml.safe_load(Path("sweep/sweep.yaml").read_text())
    del note["configurations"]
    Path("sweep/sweep.yaml").write_text(yaml.safe_dump(note))
    assert main(line) == 2
    assert "begun by an earlier version, which did not note what configurations hold" in capsys.readouterr().err


def test_every_configuration_of_a_trial_is_noted(tmp_path, quick, monkeypatch):
    """However it is given, and also one that is searched for."""
    monkeypatch.chdir(tmp_path)
    for name in "abcd":
        Path(f"{name}.yaml").write_text(f"seed: {ord(name)}\n")
    sweep = read_sweep(write_sweep(tmp_path, parameters={"config": {"values": ["c.yaml", "d.yaml"]}}, method="grid"))
    found = fingerprints(sweep, ["--config", "a.yaml", "--config=b.yaml", "--model.budget", "3"])
    assert set(found) == {"a.yaml", "b.yaml", "c.yaml", "d.yaml"}
    assert len(set(found.values())) == 4


def test_a_trial_killed_before_it_had_its_options_gets_them(tmp_path, quick):
    """Killed between taking a number and drawing: with a grid, no point of it is lost."""
    grid = {"model.price": {"values": [0.1, 0.2]}, "seed": {"values": [0, 1]}}
    file = quick_sweep(tmp_path, method="grid", parameters=grid, run_cap=None)
    assert main([file, "--run_dir", str(tmp_path / "run"), "--trials", "1"]) == 0
    sweep = read_sweep(Path(file))
    study = optuna.load_study(
        study_name="sweep", storage=f"sqlite:///{tmp_path / 'run' / 'study.db'}", sampler=sweep.sampler(4, 1)
    )
    assert study.ask().params == {}
    assert main([file, "--run_dir", str(tmp_path / "run")]) == 0
    table = pd.read_csv(tmp_path / "run" / "sweep.csv")
    assert set(table["state"]) == {"complete"}
    assert {*zip(table["model.price"], table["seed"], strict=True)} == {(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)}


def wait_for(condition, *processes):
    """Wait for a condition that these processes bring about, however long they take."""
    while not condition():
        assert [process.poll() for process in processes] == [None] * len(processes)
        time.sleep(0.05)


def alive(pid):
    """Whether a process that is not a child of this one runs."""
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")


@needs_proc
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)
def test_ctrl_c_ends_the_trials_and_the_same_command_goes_on(sent, tmp_path, capsys, quick):
    trials, gate = tmp_path / "run" / "trials", tmp_path / "go"
    parameters = {"model.price": {"min": 0.0, "max": 0.8}, "waits_for": {"value": str(gate)}}
    arguments = [quick_sweep(tmp_path, parameters=parameters), "--run_dir", str(tmp_path / "run"), "--jobs", "2"]
    pids = []

    def interrupt():
        wait_for(lambda: len(list(trials.glob("*/config.yaml"))) == 2)
        pids.extend(int(path.read_text()) for path in trials.glob("*.pid"))
        os.kill(os.getpid(), sent)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    assert main(arguments) == 130
    watcher.join()
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert "stopped; the same command goes on" in capsys.readouterr().err
    before = pd.read_csv(tmp_path / "run" / "sweep.csv")
    assert list(before["state"]) == ["running"] * 2
    gate.touch()
    assert main(arguments) == 0
    table = pd.read_csv(tmp_path / "run" / "sweep.csv")
    assert list(table["state"]) == ["complete"] * 4
    assert list(table["model.price"][:2]) == list(before["model.price"])


# -- running, for real -------------------------------------------------------------------------------------------


def read_wandb(run):
    """Group, name, sweep, configuration and summary of an offline run, from W&B's own transaction log."""
    from tests.training.test_fit import wandb_records

    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    found, summary = None, {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "run":
            found = record.run
        elif record.WhichOneof("record_type") == "summary":
            summary |= {item.key or "/".join(item.nested_key): item.value_json for item in record.summary.update}
    config = {item.key: json.loads(item.value_json) for item in found.config.update}
    return found, config, summary


def sweep_command(file, folder, *more):
    return [str(file), "--run_dir", str(folder), "--jobs", "2", *more, "--", "--config", write_config(file.parent)]


@pytest.fixture(scope="module")
def real_sweep(tmp_path_factory):
    """Two real trials at a time, each with an offline W&B run."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        one_thread(patch)
        assert main([*sweep_command(write_sweep(folder), folder / "tiny"), "--wandb.mode=auto"]) == 0
    return folder / "tiny"


@pytest.mark.nightly
def test_trials_are_runs_of_one_wandb_group_with_their_options(real_sweep):
    table = pd.read_csv(real_sweep / "sweep.csv")
    assert list(table["state"]) == ["complete"] * 2
    for row in table.to_dict("records"):
        run = real_sweep / "trials" / str(row["trial"])
        found, config, summary = read_wandb(run)
        assert (found.run_group, found.display_name) == ("tiny", f"tiny-{row['trial']}")
        assert config["model"]["gate_learning_rate"] == pytest.approx(row["model.gate_learning_rate"])
        assert config["model"]["budget"] == row["model.budget"]
        assert config["model"]["retrain"] == 0.5
        assert "select/loss" in summary  # what the file's metric names, for W&B's own agent
        comparison = pd.read_csv(run / "comparison.csv").query("method == 'learned' and stage == 'retrained'").iloc[0]
        for name in ("heads", "select_loss", "select_accuracy", "test_accuracy"):
            assert row[name] == pytest.approx(comparison[name])
        assert row["heads"] == {2.0: 2, 0.5: 4}[row["model.budget"]]
    gates = [pd.read_csv(real_sweep / "trials" / str(trial) / "gates_over_time.csv") for trial in table["trial"]]
    assert not gates[0].equals(gates[1])


@pytest.mark.nightly
def test_the_best_configuration_gives_the_best_result_again(real_sweep, tmp_path):
    table = pd.read_csv(real_sweep / "sweep.csv")
    arguments = ["--config", str(real_sweep / "best.yaml"), "--run_dir", str(tmp_path / "again"), "--wandb.mode=disabled"]
    assert fit(arguments) == 0
    again = json.loads((tmp_path / "again" / "metrics.json").read_text())["run"]["result"]
    assert again["select_loss"] == pytest.approx(table["select_loss"].min(), rel=1e-6)


@pytest.mark.nightly
@needs_proc
@pytest.mark.nightly
def test_a_sweep_that_was_killed_gives_the_same_table(real_sweep, tmp_path, monkeypatch, capfd):
    """SIGKILL while two trials train: their processes live on, are ended by the sweep that goes on, and go on themselves;
    a third follows."""
    one_thread(monkeypatch)
    shutil.copy(real_sweep.parent / "sweep_file.yaml", tmp_path)
    arguments = [*sweep_command(tmp_path / "sweep_file.yaml", tmp_path / "run", "--trials", "3"), "--save_every=4"]
    sweep = subprocess.Popen([sys.executable, "-m", "training", "sweep", *arguments])
    trials = tmp_path / "run" / "trials"
    try:
        wait_for(lambda: len(list(trials.glob("*/checkpoints/last.ckpt"))) == 2, sweep)
    finally:
        sweep.kill()
        sweep.wait()
    orphans = [int(path.read_text()) for path in trials.glob("*.pid")]
    assert all(map(alive, orphans))
    (trials / "0" / "mark").touch()  # a run that begins anew empties its directory
    assert main(arguments) == 0
    assert not any(map(alive, orphans))
    assert "2 begun before" in capfd.readouterr().out
    assert (trials / "0" / "mark").is_file()
    table = pd.read_csv(tmp_path / "run" / "sweep.csv").drop(columns=["seconds", "error"])
    whole = pd.read_csv(real_sweep / "sweep.csv").drop(columns=["seconds", "error"])
    assert list(table["state"]) == ["complete"] * 3
    pd.testing.assert_frame_equal(table[:2], whole, rtol=1e-6)


@pytest.mark.nightly
def test_the_agents_trial_is_an_offline_run_of_the_sweep(tmp_path, monkeypatch):
    """W&B's own agent starts training.fit with its own command and environment; their server alone is left out."""
    one_thread(monkeypatch)
    in_agents_environment(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    more = ["--config", write_config(tmp_path), "--wandb.mode=auto", "--run_dir=run", "--model.budget=null"]
    path = write_sweep(tmp_path, command=[*COMMAND[:-1], *more, "${args}"])
    agent = start_with_agent(path, {"model.price": 0.25, "model.gate_learning_rate": 0.2})
    assert agent._run_processes["trial7"].wait() == 0
    found, config, summary = read_wandb(tmp_path / "run")
    assert (found.run_id, found.sweep_id) == ("trial7", "s1")
    assert (config["model.price"], config["model"]["price"], config["model"]["budget"]) == (0.25, 0.25, None)
    assert {"select/loss", "select/accuracy"} <= set(summary)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["gate_learning_rate"] == 0.2
