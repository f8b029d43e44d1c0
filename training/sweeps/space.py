"""Read a sweep file in W&B's format: which trials there are, and the command of each.

``wandb sweep FILE`` and ``wandb agent ID`` take the same file. W&B's own code writes the arguments of a trial, so that a trial
is the same command here and under their agent.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from gates.errors import GateError, first_line
from training.cli.command_line import build_parser, complaint_of, with_config
from training.config import WandbOptions, group_of
from training.config.run import check_name
from training.config.yaml_text import read_yaml

METHODS = ("grid", "random", "bayes")
KEYS = ("name", "description", "project", "entity", "program", "command", "method", "metric", "parameters", "run_cap")
ONLY_WANDB = ("early_terminate", "controller", "settings")
"""Keys of W&B's format that mean nothing here."""
OWN = ("run_dir", "existing", "wandb.group", "wandb.name")
"""Options that the sweep gives every trial."""
MAX_CELLS = 10_000
DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
"""W&B's own."""


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep file.

    Args:
        method: ``grid``, ``random`` or ``bayes``.
        metric: The metric as ``training.fit`` logs it, on the selection split, such as ``select/accuracy``.
        space: The distribution of each searched option. The choices of a categorical one are JSON texts.
        constants: The options with one value.
        program: The text that ``${program}`` stands for.
        run_cap: The number of trials, or None if the file does not say.
        unused: The keys that mean something to W&B only.
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
        """Return the metric as ``comparison.csv`` and ``metrics.json`` call it."""
        return self.metric.replace("/", "_")

    def values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a trial from Optuna's parameters, in the order of the file."""
        return {
            name: json.loads(params[name]) if isinstance(drawn, CategoricalDistribution) else params[name]
            for name, drawn in self.space.items()
            if name in params
        }

    def grid(self) -> dict[str, list[Any]]:
        """Return the values of every searched option, as Optuna has them."""
        found, cells = {}, 1
        for name, drawn in self.space.items():
            if isinstance(drawn, CategoricalDistribution):
                found[name] = list(drawn.choices)
            elif isinstance(drawn, IntDistribution | FloatDistribution) and drawn.step is not None:
                steps = round((drawn.high - drawn.low) / drawn.step)
                found[name] = [drawn.low + step * drawn.step for step in range(min(steps, MAX_CELLS) + 1)]
            else:
                raise GateError(f"a grid needs a list of values for {name!r}, which is continuous; give values, or random")
            cells *= len(found[name])
        if cells > MAX_CELLS:
            raise GateError(f"the grid has more than {MAX_CELLS} cells; give fewer values, or method: random")
        return found

    def count(self, trials: int | None) -> int:
        """Return the number of trials: as requested or as the file says, and no more than the grid has."""
        wanted = self.run_cap if trials is None else trials
        if self.method == "grid":
            cells = math.prod(map(len, self.grid().values()))
            return cells if wanted is None else min(wanted, cells)
        if wanted is None:
            raise GateError(f"a {self.method} search has no end of its own; give --trials, or run_cap in the file")
        return wanted

    def fixed_parameters(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Return Optuna's parameters of the first ``count`` trials, where they do not depend on results."""
        if self.method == "bayes":
            return []
        if self.method == "grid":
            cells = itertools.product(*self.grid().values())
            return [dict(zip(self.space, cell, strict=True)) for cell in itertools.islice(cells, count)]
        drawing = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        return [drawing.ask(self.space).params for _ in range(count)]

    def trial_command(self, values: Mapping[str, Any], further: Sequence[str] = ()) -> list[str]:
        """Return the command of a trial on this machine.

        Args:
            further: Arguments of ``training.fit`` that come before the trial's own, which win.
        """
        args = {"args": {name: {"value": value} for name, value in (self.constants | dict(values)).items()}}
        parts = {f"${{{name}}}": [*further, *text] for name, text in create_sweep_command_args(args).items()}
        parts |= {"${env}": [], "${interpreter}": [sys.executable], "${program}": [str(self.program)]}
        return [word for part in create_sweep_command(list(self.command)) for word in parts.get(part, [str(part)])]

    def trial_commands(self, further: Sequence[str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Yield a trial for every value of every option, and for both ends of a range: the value, and its command."""
        values = {name: _ends(drawn) for name, drawn in self.space.items()}
        first = {name: ends[0] for name, ends in values.items()}
        changes: list[dict[str, Any]] = [{name: value} for name, ends in values.items() for value in ends]
        for change in changes or [{}]:
            yield change, self.trial_command(self.values(first | change), further)

    def check(self, further: Sequence[str]) -> WandbOptions:
        """Check that ``training.fit`` takes every option and value, and return how the trials appear in W&B."""
        parser = build_parser()
        parser.exit_on_error = False
        for change, command in self.trial_commands(further):
            try:
                options = parser.parse_args(fit_arguments(command))
            except ArgumentError as error:
                reason = complaint_of(error, parser)
                if "Given value: None" in str(error):  # W&B's agent writes null in the same way
                    reason += "; to make an option null, put it into command, such as --model.budget=null"
                named = ", ".join(f"{name}={value!r}" for name, value in (self.constants | self.values(change)).items())
                raise GateError(f"head-gates fit does not take a trial of the sweep ({named}): {reason}") from error
        return group_of(WandbOptions, options.wandb)


def fit_arguments(command: Sequence[str]) -> list[str]:
    """Return the arguments after ``training.fit`` in a command, with the default configuration if none is named."""
    place = next(i for i, part in enumerate(command) if _is_fit(part))
    return with_config(list(command[place + 1 :]))


def check_own(arguments: Sequence[str]) -> None:
    """Raise :class:`GateError` for an argument, or a parameter with ``--`` before it, that the sweep decides on."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("--") and option.removeprefix("--") in OWN:
            raise GateError(f"{option} is given to trials, and the sweep decides on it; remove it")


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file."""
    try:
        content = read_yaml(path, "the sweep file")
    except yaml.YAMLError as error:
        raise GateError(f"the sweep file {str(path)!r} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise GateError(f"the sweep file {str(path)!r} holds {content!r}; expected method, metric, parameters and command")
    if unknown := [key for key in content if key not in (*KEYS, *ONLY_WANDB)]:
        raise GateError(f"the sweep file has the key {unknown[0]!r}; expected some of {', '.join((*KEYS, *ONLY_WANDB))}")
    if content.get("method") not in METHODS:
        raise GateError(f"the sweep's method is {content.get('method')!r}; expected one of {', '.join(METHODS)}")
    metric, goal = _metric(content.get("metric"))
    parameters = dict[str, Mapping[str, Any]]()
    for name, spec in _flat(content.get("parameters")):
        check_own([f"--{name}"])
        if name in parameters:
            raise GateError(f"the sweep has the parameter {name!r} twice; give it once")
        parameters[name] = spec
    run_cap = content.get("run_cap")
    if run_cap is not None and not (_is_int(run_cap) and run_cap > 0):
        raise GateError(f"the sweep's run_cap is {run_cap!r}; expected a number of trials")
    name = str(content.get("name") or path.stem)
    check_name(name, "the sweep's name")
    return Sweep(
        name=name,
        method=content["method"],
        metric=metric,
        maximize=goal == "maximize",
        space={name: _distribution(name, spec) for name, spec in parameters.items() if "value" not in spec},
        constants={name: spec["value"] for name, spec in parameters.items() if "value" in spec},
        command=_command(content),
        program=content.get("program"),
        run_cap=run_cap,
        unused=tuple(key for key in ONLY_WANDB if key in content),
    )


def _metric(metric: Any) -> tuple[str, str]:
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        raise GateError(f"the sweep's metric is {metric!r}; expected {{name: select/accuracy, goal: maximize}} or the like")
    name, goal = metric["name"], metric.get("goal", "minimize")  # W&B's default
    if not name.startswith("select/") or name == "select/":
        raise GateError(f"the sweep's metric is {name!r}; choices are made on the selection split only: give select/accuracy")
    if goal not in ("minimize", "maximize"):
        raise GateError(f"the goal of the sweep's metric is {goal!r}; expected minimize or maximize")
    return name, goal


def _command(content: Mapping[str, Any]) -> tuple[str, ...]:
    command = content.get("command", list(DEFAULT_COMMAND))
    if not isinstance(command, list) or not all(isinstance(part, str) for part in command):
        raise GateError(f"the sweep's command is {command!r}; expected a list of texts such as {list(DEFAULT_COMMAND)!r}")
    if not any(_is_fit(str(content.get("program")) if part == "${program}" else part) for part in command):
        raise GateError(
            "the sweep does not run training.fit; give command: [${env}, ${interpreter}, -m, training.fit, ${args}]"
        )
    if sum(part in ("${args}", "${args_no_equals}") for part in command) != 1:
        raise GateError(f"the sweep's command is {command!r}; expected ${{args}} in it once, where the trial's options go")
    check_own(command)
    return tuple(command)


def _is_fit(part: str) -> bool:
    return part == "training.fit" or part.endswith("training/fit.py")


def _flat(parameters: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names with dots and their specifications; W&B nests with ``parameters:`` under a name."""
    if not isinstance(parameters, dict) or not parameters:
        raise GateError(f"the sweep's parameters are {parameters!r}; expected options such as model.gate_learning_rate")
    for key, spec in parameters.items():
        if not isinstance(spec, dict):
            raise GateError(f"the parameter {prefix}{key} is {spec!r}; expected {{values: [...]}}, {{min, max}} or {{value}}")
        if "parameters" in spec:
            yield from _flat(spec["parameters"], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", spec


def _distribution(name: str, spec: Mapping[str, Any]) -> BaseDistribution:
    """Return Optuna's counterpart of a parameter, whose distribution W&B may infer."""
    low: Any = spec.get("min")
    high: Any = spec.get("max")
    step: Any = spec.get("q")
    values: Any = spec.get("values")
    whole = _is_int(low) and _is_int(high)
    kind = spec.get("distribution") or ("categorical" if "values" in spec else "int_uniform" if whole else "uniform")
    expected = "values: [...], value: ..., or numbers min < max of one of the distributions uniform, int_uniform, q_uniform, "
    expected += "log_uniform_values (write 1.0e-4, because YAML reads 1e-4 as text)"
    known = {"distribution", "min", "max", "q", "values"}
    try:
        if not spec.keys() <= known:
            raise ValueError(f"it has {min(spec.keys() - known)!r}")
        if kind == "categorical" and isinstance(values, list) and values:
            return CategoricalDistribution(list(dict.fromkeys(json.dumps(value) for value in values)))
        if not (_is_number(low) and _is_number(high) and low < high):
            raise ValueError(f"it goes from {low!r} to {high!r}")
        if kind == "int_uniform" and whole:
            return IntDistribution(low, high)
        if kind == "q_uniform" and whole and _is_int(step):
            return IntDistribution(low, high, step=step)
        if kind == "q_uniform" and _is_number(step):
            return FloatDistribution(low, high, step=step)
        if kind in ("uniform", "log_uniform_values"):
            return FloatDistribution(low, high, log=kind != "uniform")
        raise ValueError(f"it is {kind}")
    except ValueError as error:
        raise GateError(f"the parameter {name!r} is {dict(spec)!r} ({first_line(error)}); expected {expected}") from error


def _ends(distribution: BaseDistribution) -> list[Any]:
    """Return all choices, or both ends of a range, as Optuna has them."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return [distribution.low, distribution.high]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))
