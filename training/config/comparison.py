"""Options of a comparison: methods, budgets, seeds, prices and stages, and the launcher of its experiments."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import yaml

from gates.errors import GateError
from gates.gating.latency import EXPECTED, parse_time
from gates.options import NO_KIND
from training.config.checks import check_range
from training.config.model import BudgetOption, PriceOption, Time
from training.config.paths import LocalPath
from training.config.run import LARGEST_SEED
from training.config.setup import Setup
from training.config.yaml_text import load_yaml

# The stages of a comparison: the treatment of the model between pruning and evaluation.

POST_HOC, RETRAINED, FROM_SCRATCH = "post hoc", "retrained", "from scratch"
WITH_MEANS, WITH_CONSTANTS, WITH_UNIFORM = (
    f"{POST_HOC} with {what}" for what in ("means", "optimal constants", "uniform attention")
)
"""Closed heads output their mean or the optimal constants instead of zero, or attend uniformly."""
FROM_DENSE = f"{RETRAINED} from dense"
"""The dense model is retrained with the mask for the steps of both phases, however many steps found the mask."""
AT_TOTAL_COST = f"{RETRAINED} at equal total cost"
"""The model is retrained for the passes that finding the mask has left over."""
STAGES = (POST_HOC, WITH_MEANS, WITH_CONSTANTS, WITH_UNIFORM, RETRAINED, FROM_DENSE, AT_TOTAL_COST, FROM_SCRATCH)


def is_post_hoc(stage: str) -> bool:
    """Return whether a stage evaluates the dense model without training."""
    return stage.startswith(POST_HOC)


def is_retrained(stage: str) -> bool:
    """Return whether a stage trains the weights of the dense model further with the mask."""
    return stage.startswith(RETRAINED)


def is_of_dense(stage: str) -> bool:
    """Return whether a stage puts the mask onto the dense model, not onto weights that were trained with gates."""
    return is_post_hoc(stage) or stage == FROM_DENSE


BY_RELEVANCE = ("relevance", "relevance(rule=gradient-x-input)")
"""Scored methods that propagate a prediction back through the model, see :mod:`gates.relevance`."""
Listed = str | int | float | list[Any]
"""The type of ``a,b`` or ``[a, b]`` on a command line."""


@dataclass(frozen=True)
class ComparisonOptions:
    """The grid of a comparison.

    Args:
        methods: The methods, separated by commas; --list_methods shows all.
        budgets: The budgets, separated by commas, each as for --model.budget.
        seeds: The seeds of weights, data order and gates, separated by commas.
        stages: The stages: post hoc, post hoc with means, post hoc with optimal constants, post hoc with uniform attention;
            retrained, retrained from dense, retrained at equal total cost; from scratch.
        prices: The prices of open heads (lambda) to train with. At each budget the best on the selection split counts
            (default: --model.price alone).
        experiments: The directory of finished experiments (default: RUN_DIR/experiments).

    Attributes:
        all_methods, all_budgets, all_seeds, all_stages, all_prices: The lists, parsed.
    """

    methods: Listed = "learned,his,hies,random"
    budgets: Listed = "0.5,0.25,0.125"
    seeds: Listed = "0,1,2"
    stages: Listed = f"{POST_HOC},{FROM_DENSE}"
    prices: Listed | None = None
    experiments: LocalPath | None = None
    all_methods: list[str] = field(init=False, repr=False, default_factory=list)
    all_budgets: list[BudgetOption] = field(init=False, repr=False, default_factory=list)
    all_seeds: list[int] = field(init=False, repr=False, default_factory=list)
    all_stages: list[str] = field(init=False, repr=False, default_factory=list)
    all_prices: list[PriceOption] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        # YAML splits a list at the commas between a method's parameters.
        text = self.methods if isinstance(self.methods, str) else ",".join(map(str, split(self.methods)))
        self.all_methods.extend(filter(None, split_methods(text)))
        self.all_seeds.extend(parse_seeds(split(self.seeds)))
        self.all_stages.extend(parse_stages(split(self.stages)))
        self.all_prices.extend(parse_prices([] if self.prices is None else split(self.prices)))
        if self.prices is not None and not self.all_prices:
            raise GateError("--prices is empty; give some, for example 0.003,0.01,0.03, or remove the option")
        if not self.all_methods:
            raise GateError("--methods is empty; give some, for example learned,his; --list_methods shows all")
        self.all_budgets.extend(parse_budget(value) for value in split(self.budgets))
        if not self.all_budgets:
            raise GateError("--budgets is empty; give numbers of heads or fractions, for example 0.5,0.25")


def split_methods(text: str) -> list[str]:
    """Return the names in a list; commas between the brackets of a method's parameters do not separate.

    >>> split_methods("learned, his(granularity=token, steps=10)")
    ['learned', 'his(granularity=token, steps=10)']
    """
    return [name.strip() for name in re.split(r",(?![^()]*\))", text.strip("[] "))]


def split(value: Any) -> list[Any]:
    """Return ``a,b`` or ``[a, b]`` as a list; commas within braces or brackets do not separate."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, (list, tuple)) else [value]
    try:
        parsed = load_yaml(f"[{value}]", repr(value[:60]))
    except yaml.YAMLError as error:
        raise GateError(f"{value!r} is not a list; expected values separated by commas") from error
    return parsed[0] if len(parsed) == 1 and isinstance(parsed[0], list) else parsed


def parse_seeds(values: list[Any]) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_SEED:
            raise GateError(f"--seeds has {value!r}; expected whole numbers from 0 to {LARGEST_SEED}, separated by commas")
    if not values or len(set(values)) < len(values):
        raise GateError(f"--seeds is {','.join(map(str, values))!r}; expected at least one, and each once")
    return values


def parse_stages(values: list[Any]) -> list[str]:
    for value in values:
        if value not in STAGES:
            raise GateError(f"--stages has {value!r}; expected some of {', '.join(STAGES)}")
    if not values:
        raise GateError(f"--stages is empty; expected some of {', '.join(STAGES)}")
    return [stage for stage in STAGES if stage in values]


def parse_budget(value: Any) -> BudgetOption:
    if isinstance(value, str) and value.strip().endswith(("ms", "x")):
        parse_time(value)  # raises
        return Time(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, dict)):
        raise GateError(f"--budgets has {value!r}; expected numbers of heads, fractions, one of these per kind, or {EXPECTED}")
    return value


def parse_prices(values: list[Any]) -> list[PriceOption]:
    for index, value in enumerate(values):
        of_kinds = value.values() if isinstance(value, dict) else [value]
        for price in of_kinds:
            if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price < math.inf:
                raise GateError(f"--prices has {value!r}; expected numbers from 0, or one of these per kind")
        if value == {}:
            raise GateError(NO_KIND.format("--prices has", 0.01))
        if value in values[:index]:
            raise GateError(f"--prices has {value!r} twice; give each price once")
    return values


AUTO = "auto"
"""The address of the Ray cluster that runs on this machine."""


@dataclass(frozen=True)
class LauncherOptions:
    """The launcher of experiments.

    Args:
        launcher: The launcher: local for one experiment after another in this process, or ray for several at a time.
        ray_address: The HOST:PORT of a Ray cluster with this machine, or auto for the one that runs on it. By default the
            command starts its own cluster on this machine.
        ray_cpus_per_task: The number of cores and threads per experiment.
        ray_gpus_per_task: The number of GPUs per experiment, such as 1, or 0.5 for two experiments on each. The default is 1 if
            the cluster has GPUs and --trainer.accelerator is not cpu, otherwise 0.
    """

    launcher: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    ray_cpus_per_task: int = 1
    ray_gpus_per_task: int | float | None = None

    def __post_init__(self) -> None:
        check_range(self, "ray_cpus_per_task", least=1, prefix="--")
        gpus = self.ray_gpus_per_task
        if gpus is not None and not (0 <= gpus <= 1 or gpus == int(gpus) > 0):
            raise GateError(
                f"--ray_gpus_per_task is {gpus}; expected a share of one GPU, such as 0.5, or a whole number of them"
            )
        if self.ray_address not in (None, AUTO):
            self.host_and_port  # noqa: B018 (raises)

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = (self.ray_address or "").rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise GateError(
                f"--ray_address is {self.ray_address!r}; expected HOST:PORT of a cluster with this machine, such as "
                "10.0.0.1:6379, or auto for the one that runs on it"
            )
        return host.strip("[]"), int(port)


def alone(setup: Setup) -> Setup:
    """Return the setup for experiments with one process each."""
    trainer = setup.trainer
    several = trainer.devices not in ("auto", 1, "1") and not (isinstance(trainer.devices, list) and len(trainer.devices) == 1)
    given = (("devices", several), ("num_nodes", trainer.num_nodes > 1), ("strategy", trainer.strategy != "auto"))
    for name, is_given in given:
        if is_given:
            raise GateError(
                f"--trainer.{name} is {getattr(trainer, name)}, but --launcher ray runs each experiment in one process; remove "
                "one of these options"
            )
    return replace(setup, trainer=replace(trainer, devices=1))
