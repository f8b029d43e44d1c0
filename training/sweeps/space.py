"""A sweep file in W&B's format, read for running it here: which trials there are, and the command of each.

``wandb sweep FILE`` and ``wandb agent ID`` take the same file: the arguments of a trial are written by W&B's own code, so
that a trial is the same command here and under their agent.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from gates.errors import GateError
from training.cli.command_line import build_parser, one_sentence, shortened, with_config
from training.config import WandbOptions, group_of
from training.config.run import check_name
from training.config.yaml_text import read_yaml

METHODS = ("grid", "random", "bayes")
DISTRIBUTIONS = ("categorical", "constant", "uniform", "int_uniform", "q_uniform", "log_uniform_values")
SPEC_KEYS = ("distribution", "values", "value", "min", "max", "q")
KEYS = ("name", "description", "project", "entity", "program", "command", "method", "metric", "parameters", "run_cap")
ONLY_WANDB = ("early_terminate", "controller", "settings")
"""Keys of W&B's format that mean nothing here."""
OWN = ("run_dir", "existing", "wandb.group", "wandb.name")
"""Options that the sweep gives every trial."""
MOST_VALUES, MOST_CELLS = 1000, 10_000
"""Of one parameter, each of which is tried on the parser, and of a grid, which Optuna lists."""
STARTUP_TRIALS = 10
"""Random trials with which TPE begins (Optuna's default), or a third of all where that is fewer."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    Args:
        name: of the sweep; the file's own name unless it gives one.
        method: ``grid``, ``random`` or ``bayes``.
        metric: as ``training.fit`` logs it, on the selection split, such as ``select/accuracy``.
        maximize: whether more of it is better.
        space: what each searched option is drawn from. The choices of a categorical one are JSON texts.
        constants: options with one value.
        command: with W&B's macros, such as ``${args}``.
        program: what ``${program}`` stands for.
        run_cap: number of trials, None if the file does not say.
        unused: keys that mean something to W&B only.
    """

    name: str
    method: str
    metric: str
    maximize: bool
    space: dict[str, BaseDistribution]
    constants: dict[str, Any]
    command: tuple[str, ...]
    program: str | None
    run_cap: int | None
    unused: tuple[str, ...]

    @property
    def column(self) -> str:
        """The metric as ``comparison.csv`` and ``metrics.json`` call it."""
        return self.metric.replace("/", "_")

    def values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a trial, in the order of the file's searched ones, from what Optuna drew."""
        categorical = {name for name, drawn in self.space.items() if isinstance(drawn, CategoricalDistribution)}
        return {
            name: json.loads(params[name]) if name in categorical else params[name] for name in self.space if name in params
        }

    def grid(self) -> dict[str, list[Any]]:
        """Every searched option's values, as Optuna has them.

        Raises:
            GateError: for an option without a finite list of them.
        """
        return {name: _listed(name, distribution) for name, distribution in self.space.items()}

    def count(self, trials: int | None) -> int:
        """How many trials there are: as many as asked for, or as the file says, and no more than the grid has.

        Raises:
            GateError: if nothing says when a random or a Bayesian search ends.
        """
        asked = self.run_cap if trials is None else trials
        if self.method == "grid":
            size = math.prod(len(values) for values in self.grid().values())
            return size if asked is None else min(asked, size)
        if asked is None:
            raise GateError(f"a {self.method} search has no end of its own; say how many --trials, or run_cap in the file")
        return asked

    def sampler(self, count: int, seed: int) -> BaseSampler:
        """Optuna's sampler for one trial of so many."""
        if self.method == "grid":
            return GridSampler(self.grid())
        if self.method == "random":
            return RandomSampler(seed=seed)
        return TPESampler(seed=seed, n_startup_trials=min(STARTUP_TRIALS, math.ceil(count / 3)), constant_liar=True)

    def trial_command(self, values: Mapping[str, Any], further: Sequence[str] = ()) -> list[str]:
        """The command of a trial, for this machine.

        Args:
            values: of the searched options.
            further: arguments of ``training.fit`` that come before the trial's own, which win.
        """
        args = {"args": {name: {"value": value} for name, value in (self.constants | dict(values)).items()}}
        macros = {f"${{{name}}}": text for name, text in create_sweep_command_args(args).items()}
        own: dict[str, list[str]] = {
            "${env}": [], "${interpreter}": [sys.executable], "${program}": [str(self.program)],
        }  # fmt: skip
        command: list[str] = []
        for part in create_sweep_command(list(self.command)):
            if part in macros:
                command += [*further, *macros[part]]
            elif part in own:
                command += own[part]
            else:
                command.append(str(part))
        return command

    def extremes(self, further: Sequence[str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Commands of trials with every value of every option once (both ends of a range), each behind the value it is for."""
        candidates = {name: [json.loads(value) for value in _ends(drawn)] for name, drawn in self.space.items()}
        first = {name: values[0] for name, values in candidates.items()}
        changes: list[dict[str, Any]] = [{name: value} for name, values in candidates.items() for value in values]
        for change in changes or [{}]:
            yield change, self.trial_command(first | change, further)

    def check(self, further: Sequence[str]) -> WandbOptions:
        """See that ``training.fit`` takes every option and value (both ends of a range), before hours go by; returns how its
        trials appear in W&B.

        Raises:
            GateError: naming the option and the value that it does not take.
        """
        parser = build_parser()
        parser.exit_on_error = False
        for change, command in self.extremes(further):
            try:
                options = parser.parse_args(fit_arguments(command))
            except ArgumentError as error:
                reason = shortened(one_sentence(str(error), parser))
                if "Given value: None" in str(error):  # which is how W&B's agent writes null, too
                    reason += "; to make an option null, put it into command, such as --model.budget=null"
                named = ", ".join(f"{name}={value!r}" for name, value in (self.constants | change).items())
                raise GateError(f"training.fit does not take a trial of the sweep ({named}): {reason}") from error
        return group_of(WandbOptions, options.wandb)


def fit_arguments(command: Sequence[str]) -> list[str]:
    """What follows ``training.fit`` in a command, with the default configuration where it has none."""
    place = next(i for i, part in enumerate(command) if part == "training.fit" or part.endswith("training/fit.py"))
    arguments = list(command[place + 1 :])
    return with_config(arguments)


def check_own(arguments: Sequence[str]) -> None:
    """Raises :class:`GateError` for an argument of a trial, or a parameter with ``--`` before it, that the sweep decides on."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("--") and option.removeprefix("--") in OWN:
            raise GateError(f"{option} is given to trials, and the sweep decides on it; leave it out")


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file.

    Raises:
        GateError: if it is not there, not YAML, or says something that cannot be run here.
    """
    try:
        content = read_yaml(path, "the file")
    except GateError as error:
        raise GateError(f"cannot read the sweep file: {error}") from error
    except yaml.YAMLError as error:
        raise GateError(f"the sweep file {str(path)!r} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise GateError(f"the sweep file {str(path)!r} holds {content!r}; expected method, metric, parameters and command")
    if unknown := [key for key in content if key not in (*KEYS, *ONLY_WANDB)]:
        raise GateError(f"the sweep file has the key {unknown[0]!r}; expected some of {', '.join((*KEYS, *ONLY_WANDB))}")
    if content.get("method") not in METHODS:
        raise GateError(f"the sweep's method is {content.get('method')!r}; expected one of {', '.join(METHODS)}")
    metric, maximize = _read_metric(content.get("metric"))
    space: dict[str, BaseDistribution] = {}
    constants: dict[str, Any] = {}
    for name, spec in _flat(content.get("parameters")):
        check_own([f"--{name}"])
        if name in space or name in constants:
            raise GateError(f"the sweep has the parameter {name!r} twice; give it once")
        if "value" in spec:
            constants[name] = spec["value"]
        else:
            space[name] = _distribution(name, spec)
    run_cap = content.get("run_cap")
    if run_cap is not None and not (_is_int(run_cap) and run_cap > 0):
        raise GateError(f"the sweep's run_cap is {run_cap!r}; expected a number of trials")
    name = str(content.get("name") or path.stem)
    check_name(name, "the sweep's name")
    sweep = Sweep(
        name=name,
        method=content["method"],
        metric=metric,
        maximize=maximize,
        space=space,
        constants=constants,
        command=_read_command(content),
        program=content.get("program"),
        run_cap=run_cap,
        unused=tuple(key for key in ONLY_WANDB if key in content),
    )
    if sweep.method == "grid" and (cells := math.prod(map(len, sweep.grid().values()))) > MOST_CELLS:
        raise GateError(f"the grid has {cells} cells; expected at most {MOST_CELLS}: give fewer values, or method: random")
    return sweep


def _read_metric(metric: Any) -> tuple[str, bool]:
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        raise GateError(f"the sweep's metric is {metric!r}; expected {{name: select/accuracy, goal: maximize}} or the like")
    name, goal = metric["name"], metric.get("goal", "minimize")  # as W&B has it
    if not name.startswith("select/") or name == "select/":
        raise GateError(f"the sweep's metric is {name!r}; choices are made on the selection split only: give select/accuracy")
    if goal not in ("minimize", "maximize"):
        raise GateError(f"the goal of the sweep's metric is {goal!r}; expected minimize or maximize")
    return name, goal == "maximize"


def _read_command(content: Mapping[str, Any]) -> tuple[str, ...]:
    default = ["${env}", "${interpreter}", "${program}", "${args}"]  # W&B's
    command = content.get("command", default)
    if not isinstance(command, list) or not all(isinstance(part, str) for part in command):
        raise GateError(f"the sweep's command is {command!r}; expected a list of texts such as {default!r}")
    runs = [content.get("program") or "" if part == "${program}" else part for part in command]
    if not any(part == "training.fit" or part.endswith("training/fit.py") for part in runs):
        raise GateError(
            "the sweep does not run training.fit; give command: [${env}, ${interpreter}, -m, training.fit, ${args}]"
        )
    if sum(part in ("${args}", "${args_no_equals}") for part in command) != 1:
        raise GateError(f"the sweep's command is {command!r}; expected ${{args}} in it once, where the trial's options go")
    check_own(command)
    return tuple(command)


def _flat(parameters: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Names with dots and what they are drawn from; W&B nests with ``parameters:`` under a name."""
    if not isinstance(parameters, dict) or not parameters:
        raise GateError(f"the sweep's parameters are {parameters!r}; expected options such as model.gate_learning_rate")
    for key, spec in parameters.items():
        name = f"{prefix}{key}"
        if not isinstance(spec, dict):
            raise GateError(f"the parameter {name!r} is {spec!r}; expected {{values: [...]}}, {{min, max}} or {{value}}")
        if "parameters" in spec:
            yield from _flat(spec["parameters"], f"{name}.")
            continue
        if unknown := [word for word in spec if word not in SPEC_KEYS]:
            raise GateError(f"the parameter {name!r} has {unknown[0]!r}; expected some of {', '.join(SPEC_KEYS)}")
        if spec.get("distribution", "uniform") not in DISTRIBUTIONS:
            raise GateError(
                f"the distribution of {name!r} is {spec['distribution']!r}; expected one of {', '.join(DISTRIBUTIONS)}"
            )
        yield name, spec


def _distribution(name: str, spec: Mapping[str, Any]) -> BaseDistribution:
    """Optuna's counterpart of a parameter in W&B's format, which may leave the distribution's name out."""
    if "values" in spec:
        values = spec["values"]
        if not isinstance(values, list) or not values:
            raise GateError(f"the values of {name!r} are {values!r}; expected a list")
        _check_number(name, len(values))
        return CategoricalDistribution(list(dict.fromkeys(json.dumps(value) for value in values)))
    low: Any = spec.get("min")
    high: Any = spec.get("max")
    if not (_is_number(low) and _is_number(high) and low < high):
        text = " (YAML reads 1e-4 as text; write 1.0e-4)" if str in (type(low), type(high)) else ""
        raise GateError(f"{name!r} goes from {low!r} to {high!r}; expected numbers min < max, or values, or value{text}")
    kind = spec.get("distribution") or ("int_uniform" if _is_int(low) and _is_int(high) else "uniform")
    step: Any = spec.get("q", 1)
    match kind:
        case "uniform":
            return FloatDistribution(low, high)
        case "int_uniform" if _is_int(low) and _is_int(high):
            return IntDistribution(low, high)
        case "q_uniform" if _is_number(step) and 0 < step <= high - low:
            if all(map(_is_int, (low, high, step))):
                return IntDistribution(low, low + (high - low) // step * step, step=step)
            return FloatDistribution(low, low + math.floor((high - low) / step + 1e-9) * step, step=step)
        case "log_uniform_values" if low > 0:
            return FloatDistribution(low, high, log=True)
    needs = {
        "int_uniform": "whole numbers",
        "q_uniform": "a step q above 0 and at most max - min",
        "log_uniform_values": "min above 0",
    }
    raise GateError(f"{name!r} is {kind} with {dict(spec)!r}; it needs {needs.get(kind, 'values or value')}")


def _listed(name: str, distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    if distribution.step is None:
        raise GateError(f"a grid needs a list of values for {name!r}, which is continuous; give values, or method: random")
    steps = round((distribution.high - distribution.low) / distribution.step)
    _check_number(name, steps + 1)
    return [distribution.low + step * distribution.step for step in range(steps + 1)]


def _check_number(name: str, values: int) -> None:
    """Raises :class:`GateError` for more values of a parameter than can be listed."""
    if values > MOST_VALUES:
        raise GateError(
            f"{name!r} has {values} values; expected at most {MOST_VALUES}: give fewer, or min and max with method: random"
        )


def _ends(distribution: BaseDistribution) -> list[str]:
    """All choices, or both ends of a range, as JSON."""
    if isinstance(distribution, CategoricalDistribution):
        return [str(choice) for choice in distribution.choices]
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return [json.dumps(distribution.low), json.dumps(distribution.high)]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))
