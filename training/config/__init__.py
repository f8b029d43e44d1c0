"""What commands are told: options grouped by subject, each group a frozen dataclass that checks itself.

The command line and configurations have the fields of :class:`PrunerOptions` as ``--model.NAME``, those of a kind of data as
``--data.NAME``, and so on; see the modules. Nothing here loads PyTorch, so that ``--help`` and a misspelt option are answered
at once.
"""

from training.config.comparison import ComparisonOptions
from training.config.launcher import LauncherOptions
from training.config.model import (
    BudgetOption,
    Decay,
    Distillation,
    Gating,
    Optimisation,
    Phases,
    PriceOption,
    PrunerOptions,
    Source,
)
from training.config.run import LARGEST_SEED, EndOfRun, Existing, RunOptions, ScratchTraining, WeightsKept
from training.config.search import DistilWeights, DrawSearch, RefitSearch, RestartSearch, SwapSearch
from training.config.setup import Setup, group_at, group_of
from training.config.tracking import WandbOptions

__all__ = [
    "LARGEST_SEED",
    "BudgetOption",
    "ComparisonOptions",
    "Decay",
    "DistilWeights",
    "Distillation",
    "DrawSearch",
    "EndOfRun",
    "Existing",
    "Gating",
    "LauncherOptions",
    "Optimisation",
    "Phases",
    "PriceOption",
    "PrunerOptions",
    "RefitSearch",
    "RestartSearch",
    "RunOptions",
    "ScratchTraining",
    "Setup",
    "Source",
    "SwapSearch",
    "WandbOptions",
    "WeightsKept",
    "group_at",
    "group_of",
]
