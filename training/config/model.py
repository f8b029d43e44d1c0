"""The options ``--model.NAME`` of the model, its gates and its training, grouped by subject."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from jsonargparse.typing import register_type

from gates.errors import GateError
from gates.gating.latency import TimeLimit, parse_time
from gates.options import MIN_SWAP_PASSES, NO_KIND, TOP_K_FAMILIES, DrawPer, GateFamily, Unit
from training.config.checks import check_range
from training.config.paths import HubName, LocalPath


class Time(str):
    """A time on a command line, such as ``12ms`` or ``0.7x``: a number with a unit.

    Raises:
        ValueError: For other texts. :func:`gates.gating.latency.parse_time` checks the number and the unit.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        if not isinstance(text, str) or re.fullmatch(r"[-+]?[0-9.]+ *[A-Za-z]+", text.strip(), flags=re.ASCII) is None:
            raise ValueError(f"{text!r} is no time")
        return super().__new__(cls, text)


register_type(Time, serializer=str)

AUTO = "auto"
"""The budget of the fewest heads that keep the quality of the dense model."""
GivenBudget = int | float | dict[str, int | float] | Literal["auto"] | Time
"""A budget on a command line or in a configuration."""
BudgetOption = GivenBudget | TimeLimit
"""A budget, with a limit by a latency table of the model in place of a time."""
PriceOption = float | dict[str, float]
Decay = Literal["linear", "noam"]
FREEZING = ("freeze", "freeze_while_pruning")


@dataclass(frozen=True)
class Source:
    """The model that a run starts from.

    Args:
        backbone: The hub name or local folder of a pretrained model.
        from_scratch: The config fields of a new model (``model_type`` and sizes), instead of a backbone.
        trust_remote_code: Whether code that comes with the backbone may run.
        allow_pickle: Whether the backbone may come as a ``pytorch_model.bin``; it is read without running code from it.
        dtype: The type of the backbone's weights. ``bfloat16`` takes half the memory and fixes all weights. Only the gates are
            trained then, in float32.
    """

    backbone: HubName | None = None
    from_scratch: dict[str, Any] | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.backbone is None and self.from_scratch is None:
            raise GateError(
                "there is no model: give a pretrained one (--model.backbone) or config fields (--model.from_scratch)"
            )
        if self.backbone is not None and self.from_scratch is not None:
            raise GateError(
                f"both a pretrained model ({self.backbone!r}) and config fields of a new one are given; add "
                "--model.from_scratch null, or start from a --config without it, such as configs/sst2_minilm_local.yaml"
            )
        if self.is_half and self.backbone is None:
            raise GateError(f"dtype is {self.dtype}, whose weights are fixed, but the model is new; train it in float32")

    @property
    def is_half(self) -> bool:
        """Return whether weights are kept in half precision."""
        return self.dtype != "float32"


@dataclass(frozen=True)
class Gating:
    """The gates, their training, and the number of heads that stay.

    Args:
        budget: The heads to keep: a count (18), a fraction (0.25), one of these per kind ({encoder: 10}), ``auto``, or a time
            (12ms, 0.7x of dense). Then ``hard-concrete`` gates pay a price for each expected open head, or for its
            milliseconds. The price is solved for after every step, so that their number falls to the budget. ``auto`` keeps the
            fewest heads that hold the quality of the dense model to within ``max_loss``.
        max_loss: The allowed loss on the selection split with ``budget: auto``, in points of the main metric, or in percent of
            a perplexity. The end of the 95 % interval counts.
        latency_table: The file of ``head-gates latency`` for a budget in time (default: measured when the run begins, and kept
            as RUN_DIR/latency.json).
        price: The price of one expected open head, or one per kind (lambda of Voita et al. 2019). It must be given with
            ``budget: null``, and the number of heads follows from it. ``clamped-linear`` gates pay it with a budget too
            (default: 0.01).
        gate: The family of gates. ``hard-concrete``: Louizos et al. 2018. ``relaxed-top-k``: Differentiable Subset Pruning, Li
            et al. 2021. ``straight-through-top-k``: the top K forward, a sigmoid's gradient backward; K falls over the ramp.
            ``clamped-linear``: a number clamped to [0, 1] with an L1 price, as in DuoAttention, Xiao et al. 2024.
        unit: The unit of gates and budgets: a ``head``, or under grouped-query attention a ``group``, which is a key/value head
            with all its query heads. A closed group shrinks the cache.
        minimum_per_layer: The number of heads that every layer keeps, whatever their gates.
        gate_learning_rate: The learning rate of log_alpha.
        draw_per: The unit of one draw of gates: each ``example``, or the whole ``batch``, as in the papers.
        temperature: The temperature of the Hard-Concrete distribution.
        anneal: The temperature of ``hard-concrete`` gates at the end of the prune phase, reached log-linearly, so that training
            gates become hard; null for a constant temperature.
        initial_log_alpha: The first log_alpha of ``hard-concrete`` gates. At 2.5 the evaluation gates start at exactly 1.
        init_spread: Initialise log_alpha from a head score (``init_score``): this many units per standard deviation of the log
            score. 0 starts all gates equal. Default: 0, or 1 for the top-k families. Not used by clamped-linear gates.
        init_score: The score: ``his`` (Michel et al. 2019), or ``obs``, the loss of a removal after the kept heads have made up
            for it (ZipLM, Kurtic et al. 2023), as they do with ``refit``.
        straight_through: Whether to train with ``hard-concrete`` gates rounded to 0 and 1.
        straight_through_from: The share of the prune phase after which gates are rounded; 1 for never.
    """

    budget: GivenBudget | None = 0.25
    max_loss: float = 1.0
    latency_table: LocalPath | None = None
    price: PriceOption | None = None
    gate: GateFamily = "hard-concrete"
    unit: Unit = "head"
    minimum_per_layer: int = 0
    gate_learning_rate: float = 0.05
    draw_per: DrawPer = "example"
    temperature: float = 0.33
    anneal: float | None = None
    initial_log_alpha: float = 2.5
    init_spread: float | None = None
    init_score: Literal["his", "obs"] = "his"
    straight_through: bool = False
    straight_through_from: float = 1.0

    def __post_init__(self) -> None:
        check_range(self, "minimum_per_layer", "gate_learning_rate", "init_spread", least=0)
        check_range(self, "temperature", "anneal", "max_loss", above=0)
        if self.init_spread is None:
            object.__setattr__(self, "init_spread", 1.0 if self.gate in TOP_K_FAMILIES else 0.0)
        for name, example in (("budget", 10), ("price", 0.01)):
            if getattr(self, name) == {}:
                raise GateError(NO_KIND.format(f"the {name} is", example))
        prices = 0.01 if self.price is None else self.price  # enough to keep clamped gates moving
        object.__setattr__(self, "price", prices)
        if not all(0 <= price < math.inf for price in (prices.values() if isinstance(prices, Mapping) else [prices])):
            raise GateError(f"price is {prices}; expected numbers of at least 0, such as 0.01")
        if self.gate in TOP_K_FAMILIES and self.budget is None:
            raise GateError(f"{self.gate} gates need a budget, and it is null; give one, for example --model.budget 0.25")
        if self.is_timed:
            parse_time(str(self.budget))  # raises
        if self.gate == "hard-concrete":
            return
        if self.is_timed or isinstance(self.budget, TimeLimit):
            raise GateError(
                f"the budget is {self.budget}, but {self.gate} gates are not held to a time; use --model.gate hard-concrete, "
                "or give a number of heads or a fraction"
            )
        for name, unused in (("anneal", None), ("straight_through", False), ("straight_through_from", 1.0)):
            if (value := getattr(self, name)) != unused:
                raise GateError(f"{name} is {value}, but {self.gate} gates do not use it; remove the option")

    @property
    def is_timed(self) -> bool:
        """Whether the budget is a time, which needs a table to become a limit."""
        return isinstance(self.budget, str) and self.budget != AUTO


@dataclass(frozen=True)
class Phases:
    """The three phases of a run, in epochs; fractions are allowed.

    Args:
        finetune: The length of the finetune phase in epochs.
        prune: The length of the prune phase in epochs. With 0, ``retrain: 0`` and ``budget: null``, only a dense model is
            trained.
        retrain: The length of the retrain phase in epochs; after a refit that of the prune phase is added. With 0 no weight is
            trained.
        ramp: The share of the prune phase over which the target, the price or the temperature of the relaxed top K reaches its
            final value.
        pipelined: Whether the backbone is frozen in the prune phase (as in the pipelined variant of Li et al. 2021). Otherwise
            gates and weights are trained together (as by Voita et al. 2019). Default: true for ``hard-concrete`` gates with a
            budget.
        swaps: The number of passes over training data (1,024 examples) of a search by swaps, such as 40; 0 for no search. It
            refines the learned mask before the weights are retrained (see :mod:`gates.search.swaps`).
        min_steps: The least number of optimiser steps of the finetune and prune phases that are not 0. On small data, few
            epochs are too few for the weights to learn the task and for the gates to close. A short phase is then longer, and
            the run says so.
        refit: Whether to refit the projections behind the heads to the dense model's outputs before they are retrained: by
            least squares, without training. With weights in bfloat16, ``freeze`` or ``freeze_while_pruning``, the run skips
            the refit and says so.
        keep: The heads that a run with ``refit`` keeps: ``best``, the best of the learned heads, HIS and obs on the selection
            split, each refitted; or ``learned``, those of the gates.
    """

    finetune: float = 2.0
    prune: float = 1.2
    retrain: float = 0.8
    ramp: float = 0.6
    pipelined: bool | None = None
    swaps: float = 0.0
    min_steps: int = 100
    refit: bool = True
    keep: Literal["best", "learned"] = "best"

    def __post_init__(self) -> None:
        check_range(self, "finetune", "prune", "retrain", least=0, most=1_000_000)
        check_range(self, "min_steps", least=0)
        if self.swaps != 0 and not MIN_SWAP_PASSES <= self.swaps < math.inf:
            raise GateError(
                f"swaps is {self.swaps}; expected 0 for no search, or at least {MIN_SWAP_PASSES} passes, for example 40"
            )
        if not 0 < self.ramp <= 1:
            raise GateError(f"ramp is {self.ramp}; expected a share of the prune phase above 0 and at most 1")

    @property
    def epochs(self) -> float:
        """Return the length of the whole run."""
        return float(self.finetune + self.prune + self.retrain)


@dataclass(frozen=True)
class Optimisation:
    """How the backbone's weights are trained.

    Args:
        learning_rate: The peak learning rate of the backbone in each cycle. A cycle is fine-tuning, or the training after it.
        lr_warm_up: The share of a cycle's steps over which the backbone's learning rate rises.
        lr_decay: The decay of the learning rate: ``linear`` to 0, or ``noam``, with the inverse square root of the step
            (Vaswani et al. 2017).
        prune_learning_rate: The peak learning rate of the second cycle (default: that of the first cycle).
        weight_decay: The weight decay of the backbone's matrices.
        freeze: The patterns (regular expressions) of the names of frozen backbone parameters; ``[".*"]`` trains the gates
            alone.
        freeze_while_pruning: The patterns of parameters that are frozen from the end of fine-tuning on. With ``["decoder"]``
            and a budget of encoder heads, the decoder cannot replace the closed heads (Voita et al. 2019).
        checkpoint_activations: Whether to compute a layer's activations again in the backward pass: less memory, about a third
            more time, the same results.
    """

    learning_rate: float = 5e-5
    lr_warm_up: float = 0.06
    lr_decay: Decay = "linear"
    prune_learning_rate: float | None = None
    weight_decay: float = 0.01
    freeze: list[str] | None = None
    freeze_while_pruning: list[str] | None = None
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        check_range(self, "learning_rate", "weight_decay", "prune_learning_rate", least=0)
        check_range(self, "lr_warm_up", least=0, most=1)


@dataclass(frozen=True)
class Distillation:
    """Distillation from the dense model at the end of fine-tuning.

    Args:
        distil: The weight of the divergence from the dense model's predictions in the prune and retrain phases. The task loss
            has 1 minus this weight (Hinton et al. 2015).
        distil_temperature: The temperature of both models' logits.
        distil_hidden: The weight of the squared distance from the dense model's hidden states, in units of their variance (as
            in CoFi, Xia et al. 2022). It is added to the other losses.
    """

    distil: float = 0.0
    distil_temperature: float = 2.0
    distil_hidden: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "distil_hidden", least=0)
        if not 0 <= self.distil <= 1:
            raise GateError(f"distil is {self.distil}; expected a weight from 0 (labels alone) to 1 (the dense model alone)")
        check_range(self, "distil_temperature", above=0)

    @property
    def distils(self) -> bool:
        """Return whether the dense model teaches."""
        return bool(self.distil or self.distil_hidden)


@dataclass(frozen=True)
class PrunerOptions(Distillation, Optimisation, Phases, Gating, Source):
    """All options of :class:`training.pruner.module.HeadPruner` except the seed."""

    def __post_init__(self) -> None:
        for group in (Source, Gating, Phases, Optimisation, Distillation):
            group.__post_init__(self)
        if self.pipelined is None:
            object.__setattr__(self, "pipelined", self.gate == "hard-concrete" and self.budget is not None)
        if self.is_half:
            for phase in ("finetune", "retrain"):
                if (epochs := getattr(self, phase)) != 0:
                    raise GateError(
                        f"{self.nothing_trains}, but {phase} is {epochs:g} epochs; set it to 0, so that gates alone "
                        "are learned, or leave out dtype and set --trainer.precision bf16-mixed"
                    )
            object.__setattr__(self, "freeze", [".*"])
        if self.prune == 0 and (self.retrain > 0 or self.budget is not None or self.finetune == 0):
            raise GateError(
                "prune is 0 epochs, but the gates need some training, for example 1; to train a dense model alone, set retrain "
                "to 0 and budget to null too"
            )
        if self.from_scratch is not None and self.finetune == 0 and self.distils:
            raise GateError(
                "distillation learns from the model at the end of fine-tuning, but finetune is 0 and the model is new; give it "
                "a finetune phase, or leave out distil and distil_hidden"
            )

    @property
    def trains_with_mask(self) -> bool:
        """Return whether the run trains weights after the mask is known, or together with it."""
        return self.retrain > 0 or not self.pipelined

    @property
    def refits(self) -> bool:
        """Return whether the run refits the weights behind its heads."""
        return self.refit and self.prune > 0 and not self.why_not_refitted

    @property
    def why_not_refitted(self) -> str:
        """Return why the weights of this run cannot be refitted; empty if they can."""
        if self.is_half:
            return f"{self.nothing_trains}, but a refit changes weights"
        if self.freeze or self.freeze_while_pruning:
            return "freeze or freeze_while_pruning fixes weights that a refit changes"
        if self.from_scratch is not None and self.finetune == 0:
            return "a refit aims at the dense model, but the model is new and finetune is 0"
        return ""

    @property
    def nothing_trains(self) -> str:
        """Return why no weight of the model can be trained after fine-tuning; empty if some can."""
        if self.is_half:
            return f"dtype is {self.dtype}, in which weights are fixed"
        for option in FREEZING:
            if ".*" in (getattr(self, option) or []):
                return f"{option} has '.*', which fixes all weights"
        return ""


# The options of the modifiers of methods: ``--restarts.NAME``, ``--draws.NAME``, ``--swap.NAME``,
# ``--refit.NAME`` and ``--distil.NAME``.


@dataclass(frozen=True)
class SwapSearch:
    """The search by swaps.

    Args:
        rows: The largest number of training examples; one half proposes swaps, the other decides on them.
        passes: The number of passes over a half after which no new swap is tried.
        significance: The level of the paired tests by which the deciding half takes swaps.
    """

    rows: int = 2048
    passes: float = 40.0
    significance: float = 0.05

    def __post_init__(self) -> None:
        check_range(self, "rows", least=4, prefix="--swap.")
        check_range(self, "passes", least=MIN_SWAP_PASSES, prefix="--swap.")
        if not 0 < self.significance < 1:
            raise GateError(f"--swap.significance is {self.significance}; expected a level between 0 and 1, such as 0.05")


@dataclass(frozen=True)
class DrawSearch:
    """The search by draws around a ranking.

    Args:
        rows: The number of training examples; one half of them decides on the masks by its loss, as for swaps.
        count: The number of masks to draw.
        temperature: The temperature of the draws, for log_alpha or for ranks on its scale.
    """

    rows: int = 1024
    count: int = 64
    temperature: float = 0.5

    def __post_init__(self) -> None:
        check_range(self, "rows", least=2, prefix="--draws.")
        check_range(self, "count", least=1, prefix="--draws.")
        check_range(self, "temperature", above=0, prefix="--draws.")


@dataclass(frozen=True)
class RestartSearch:
    """The search by restarts.

    Args:
        count: The number of times that gates are learned, each with other noise. They start from equal gates and from optimal
            brain surgeon in turn.
        rows: The number of training examples; one half of them decides on the masks by its loss, as for swaps. With +refit the
            selection split decides after a refit to each mask.
    """

    count: int = 4
    rows: int = 2048

    def __post_init__(self) -> None:
        check_range(self, "rows", least=2, prefix="--restarts.")
        check_range(self, "count", least=1, prefix="--restarts.")


@dataclass(frozen=True)
class RefitOptions:
    """The refit of weights to a mask.

    Args:
        ridges: The ridge penalties for changes of the weights. Each projection takes the best for training examples that its
            fit leaves out.
        rows: The largest number of training examples to fit on, spread over all lengths.
        feed_forward: Whether the second projections of feed-forward layers are refitted too.
    """

    ridges: list[float] = field(default_factory=lambda: [0.01, 0.1, 1.0])
    rows: int = 512
    feed_forward: bool = True

    def __post_init__(self) -> None:
        if not self.ridges or not all(0 < ridge < math.inf for ridge in self.ridges):
            raise GateError(f"--refit.ridges is {self.ridges}; expected numbers above 0, such as [0.01,0.1]")
        check_range(self, "rows", least=1, prefix="--refit.")


@dataclass(frozen=True)
class DistilWeights:
    """The weights of ``+distil``; the module checks them as its own options.

    Args:
        weight: The weight of the dense model's predictions with +distil.
        hidden: The weight of the dense model's hidden states with +distil.
    """

    weight: float = 0.5
    hidden: float = 0.0

    @property
    def changes(self) -> dict[str, float]:
        """Return the weights as options of the module."""
        return {"distil": self.weight, "distil_hidden": self.hidden}
