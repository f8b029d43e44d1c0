"""What a comparison is of: methods, budgets, seeds, prices and stages as they stand on the command line."""

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

# The stages of a comparison: what is done with a mask before the model is judged.

POST_HOC, RETRAINED, FROM_SCRATCH = "post hoc", "retrained", "from scratch"
WITH_MEANS, WITH_CONSTANTS, WITH_UNIFORM = (
    f"{POST_HOC} with {what}" for what in ("means", "optimal constants", "uniform attention")
)
"""Closed heads are not zero but have their mean output, or the constants that cost least, or attend uniformly."""
FROM_DENSE = f"{RETRAINED} from dense"
"""The mask goes onto the dense model and is trained on for the steps of both phases, however many steps found it."""
AT_TOTAL_COST = f"{RETRAINED} at equal total cost"
"""Trained on for as many passes as finding the mask has left over."""
STAGES = (POST_HOC, WITH_MEANS, WITH_CONSTANTS, WITH_UNIFORM, RETRAINED, FROM_DENSE, AT_TOTAL_COST, FROM_SCRATCH)


def is_post_hoc(stage: str) -> bool:
    """Whether the dense model is evaluated as it is, without training on."""
    return stage.startswith(POST_HOC)


def is_of_dense(stage: str) -> bool:
    """Whether the mask goes onto the dense model, as it is or to train on, and not onto weights trained with gates."""
    return is_post_hoc(stage) or stage == FROM_DENSE


BY_RELEVANCE = ("relevance", "relevance(rule=gradient-x-input)")
"""Scored methods that follow a prediction back through the model, see :mod:`gates.relevance`."""
Listed = str | int | float | list[Any]
"""``a,b`` or ``[a, b]`` on a command line."""


@dataclass(frozen=True)
class ComparisonOptions:
    """What is compared.

    Args:
        methods: methods, separated by commas; --list_methods shows all.
        budgets: budgets, separated by commas, each as --model.budget takes it.
        seeds: of weights, data order and gates, separated by commas.
        stages: some of post hoc, post hoc with means, post hoc with optimal constants, post hoc with uniform
            attention, retrained, retrained from dense, retrained at equal total cost, from scratch.
        prices: prices of open heads for lambda, each trained with; at each budget the best on the selection split is taken
            (default: --model.price alone).
        experiments: where finished experiments lie (default: RUN_DIR/experiments).

    Attributes:
        all_methods, all_budgets, all_seeds, all_stages, all_prices: what the lists hold.
    """

    methods: Listed = "learned,his,hies,random"
    budgets: Listed = "0.5,0.25,0.125"
    seeds: Listed = "0,1,2"
    stages: Listed = "post hoc,retrained"
    prices: Listed | None = None
    experiments: LocalPath | None = None
    all_methods: list[str] = field(init=False, repr=False, default_factory=list)
    all_budgets: list[BudgetOption] = field(init=False, repr=False, default_factory=list)
    all_seeds: list[int] = field(init=False, repr=False, default_factory=list)
    all_stages: list[str] = field(init=False, repr=False, default_factory=list)
    all_prices: list[PriceOption] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        # A list in YAML has cut a name at the commas between its parameters.
        text = self.methods if isinstance(self.methods, str) else ",".join(map(str, split(self.methods)))
        names = split_methods(text)
        self.all_methods.extend(str(name).strip() for name in names if str(name).strip())
        self.all_seeds.extend(parse_seeds(split(self.seeds)))
        self.all_stages.extend(parse_stages(split(self.stages)))
        self.all_prices.extend(parse_prices([] if self.prices is None else split(self.prices)))
        if self.prices is not None and not self.all_prices:
            raise GateError("--prices is empty; give some, for example 0.003,0.01,0.03, or leave it out")
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
    """``a,b`` or ``[a, b]`` as a list; commas within braces or brackets do not separate."""
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


# Where the experiments of a comparison are done: in this process, or on a cluster of Ray.

AUTO = "auto"
"""The address of the cluster that runs on this machine."""


@dataclass(frozen=True)
class LauncherOptions:
    """Where experiments are done.

    Args:
        launcher: local for one after another in this process, or ray for several at a time on a cluster of Ray.
        ray_address: HOST:PORT of a cluster that this machine belongs to, or auto for the one that runs on it (default: one of
            this machine alone, for as long as the command runs).
        ray_cpus_per_task: processor cores, and threads, of each experiment.
        ray_gpus_per_task: GPUs of each experiment, such as 1, or 0.5 for two experiments on each (default: 1 where the cluster
            has any and --trainer.accelerator is not cpu, otherwise none).
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
        """What the address says."""
        host, _, port = (self.ray_address or "").rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise GateError(
                f"--ray_address is {self.ray_address!r}; expected HOST:PORT of a cluster that this machine belongs to, such as "
                "10.0.0.1:6379, or auto for the one that runs on it"
            )
        return host.strip("[]"), int(port)


def alone(setup: Setup) -> Setup:
    """The setup for experiments that are each done by one process."""
    trainer = setup.trainer
    several = trainer.devices not in ("auto", 1, "1") and not (isinstance(trainer.devices, list) and len(trainer.devices) == 1)
    for name, asked in (("devices", several), ("num_nodes", trainer.num_nodes > 1), ("strategy", trainer.strategy != "auto")):
        if asked:
            raise GateError(
                f"--trainer.{name} is {getattr(trainer, name)}, but with --launcher ray one process does each experiment, and "
                "several experiments are done at a time; remove one of them"
            )
    return replace(setup, trainer=replace(trainer, devices=1))
