"""Sweep files, and W&B's agent on them."""

import sys
from pathlib import Path

import optuna
import pytest
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from gates.errors import GateError
from tests.training.runs import write_config
from tests.training.sweeps.agent import agent_command, in_agents_environment
from tests.training.sweeps.files import write_sweep
from training.cli.command_line import build_parser
from training.commands.table import run_command
from training.sweeps.local import description_of
from training.sweeps.space import check_own, fit_arguments, read_sweep

SHIPPED = sorted((Path(__file__).parents[3] / "configs" / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweeps_are_what_the_agent_and_fit_understand(path, tmp_path, monkeypatch):
    """Every shipped file: fit takes all its options and the agent builds the command that is run here."""
    in_agents_environment(tmp_path, monkeypatch)
    sweep = read_sweep(path)
    assert path.read_text().startswith("# ")
    assert sweep.name == path.stem
    sweep.check([])
    params = (sweep.fixed_parameters(sweep.count(None), 0) or [optuna.create_study().ask(sweep.space).params])[0]
    values = sweep.values(params)
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
    nested = {"model": {"parameters": {"gate_learning_rate": {"values": [0.1]}, "from_scratch": size}}, "seed": {"value": 3}}
    path = write_sweep(tmp_path, method="grid", run_cap=None, parameters=nested)
    sweep = read_sweep(path)
    assert list(sweep.space) == ["model.gate_learning_rate"]
    assert sweep.constants == {"model.from_scratch.hidden_size": 8, "seed": 3}
    here = build_parser().parse_args(fit_arguments(sweep.trial_command({"model.gate_learning_rate": 0.1})))
    in_agents_environment(tmp_path, monkeypatch)
    values = {"model": {"gate_learning_rate": 0.1, "from_scratch": {"hidden_size": 8}}, "seed": 3}
    there = build_parser().parse_args(fit_arguments(agent_command(path, values, monkeypatch)))
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


@pytest.mark.filterwarnings("ignore:The distribution is specified by")
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
    cells = [tuple(sweep.values(params).values()) for params in sweep.fixed_parameters(24, 0)]
    assert len(set(cells)) == 24
    assert cells[:2] == [("example", 0.1, 1), ("example", 0.1, 2)]


def test_values_keep_their_kind(tmp_path):
    values = [1, 1.0, True, "1", {"encoder": 2}, [1, 2]]
    sweep = read_sweep(write_sweep(tmp_path, parameters={"model.budget": {"values": values}}))
    kept = [sweep.values({"model.budget": choice})["model.budget"] for choice in sweep.space["model.budget"].choices]
    assert [(type(value), value) for value in kept] == [(type(value), value) for value in values]


def test_random_trials_follow_from_the_seed(tmp_path):
    sweep = read_sweep(write_sweep(tmp_path))
    assert sweep.fixed_parameters(5, 0)[:3] == sweep.fixed_parameters(3, 0)
    assert sweep.fixed_parameters(3, 0) != sweep.fixed_parameters(3, 1)


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
    "parameter without a range": ({"parameters": {"model.price": 0.1}}, "model.price is 0.1"),
    "unknown distribution": ({"parameters": {"model.price": {"distribution": "beta", "min": 0, "max": 1}}}, "it is beta"),
    "range backwards": ({"parameters": {"model.price": {"min": 1, "max": 0}}}, "from 1 to 0"),
    "number that YAML reads as text": ({"parameters": {"model.price": {"min": "1e-4", "max": 1}}}, "1.0e-4"),
    "logarithm of 0": ({"parameters": {"model.price": {"distribution": "log_uniform_values", "min": 0, "max": 1}}}, "low > 0"),
    "no values": ({"parameters": {"model.price": {"values": []}}}, "expected values"),
    "the same twice": ({"parameters": PRICE | {"model": {"parameters": {"price": {"value": 1}}}}}, "twice"),
    "continuous grid": ({"method": "grid", "parameters": {"model.price": {"min": 0.1, "max": 1.0}}}, "continuous"),
    "endless": ({"run_cap": None}, "--trials"),
    "run_cap": ({"run_cap": 0}, "run_cap is 0"),
    "another program": ({"command": ["python", "train.py", "${args}"]}, "does not run training.fit"),
    "command without options": ({"command": ["python", "-m", "training.fit"]}, "${args}"),
    "unknown option": ({"parameters": {"model.bugdet": {"values": [3]}}}, "--model.bugdet=3"),
    "value of a wrong kind": ({"parameters": {"model.temperature": {"values": [0.3, "warm"]}}}, "warm"),
    "name that leaves the folder": ({"name": "../../esc"}, "the sweep's name is '../../esc'"),
    "long range in a grid": ({"method": "grid", "parameters": {"seed": {"min": 0, "max": 10**15}}}, "more than 10000 cells"),
    "null by the agent": ({"parameters": {"model.budget": {"values": [None]}}}, "--model.budget=null"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD))
def test_bad_files_are_one_sentence(case, tmp_path):
    changes, expected = BAD[case]

    def planned():
        sweep = read_sweep(write_sweep(tmp_path, **changes))
        return sweep.count(None), sweep.check([])

    with pytest.raises(GateError) as caught:
        planned()
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        (b"[1, 2]", r"\[1, 2\]"),
        (b"a: [", "not YAML"),
    ],
)
def test_what_is_no_sweep_file(tmp_path, text, said):
    if text is not None:
        (tmp_path / "x.yaml").write_bytes(text)
    with pytest.raises(GateError, match=said):
        read_sweep(tmp_path / "x.yaml")


@pytest.mark.parametrize("argument", ["--run_dir=x", "--existing=overwrite", "--wandb.group=x", "--wandb.name"])
def test_arguments_of_trials_leave_what_the_sweep_decides_on(argument):
    with pytest.raises(GateError, match=f"{argument.split('=')[0]} is given to trials, and the sweep decides on it"):
        check_own([argument, "x"])


@pytest.mark.parametrize("option", ["--jobs", "--trials", "--timeout_minutes"])
def test_counts_are_above_0(tmp_path, capsys, option):
    assert run_command("sweep", [str(write_sweep(tmp_path)), option, "0", "--run_dir", str(tmp_path / "run")]) == 2
    assert f"{option} is 0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_every_configuration_of_a_trial_is_noted(tmp_path, monkeypatch):
    """However it is given, and also one that is searched for."""
    monkeypatch.chdir(tmp_path)
    for name in "abcd":
        Path(f"{name}.yaml").write_text(f"seed: {ord(name)}\n")
    sweep = read_sweep(write_sweep(tmp_path, parameters={"config": {"values": ["c.yaml", "d.yaml"]}}, method="grid"))
    further = ["--config", "a.yaml", "--config=b.yaml", "--model.budget", "3"]
    found = description_of(sweep, further, 0, "postgresql://me:secret@host/a")
    assert set(found["configurations"]) == {"a.yaml", "b.yaml", "c.yaml", "d.yaml"}
    assert len(set(found["configurations"].values())) == 4
    assert found["storage"] == "postgresql://me:***@host/a"
    assert yaml.safe_load(yaml.safe_dump(found)) == found
