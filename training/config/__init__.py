"""The options of commands, grouped by subject: each group is a frozen dataclass that checks itself.

The command line and configurations have the fields of :class:`PrunerOptions` as ``--model.NAME``, those of a kind of data as
``--data.NAME``, and so on. This package does not load PyTorch, so that ``--help`` is fast.
"""

from training.config.comparison import ComparisonOptions, LauncherOptions
from training.config.model import (
    BudgetOption,
    Decay,
    DistilWeights,
    DrawSearch,
    PriceOption,
    PrunerOptions,
    RefitOptions,
    RestartSearch,
    Source,
    SwapSearch,
)
from training.config.run import EndOfRun, Existing, RunOptions, ScratchTraining, WandbOptions, WeightsKept
from training.config.setup import Setup, group_at, group_of

__all__ = [
    "BudgetOption",
    "ComparisonOptions",
    "Decay",
    "DistilWeights",
    "DrawSearch",
    "EndOfRun",
    "Existing",
    "LauncherOptions",
    "PriceOption",
    "PrunerOptions",
    "RefitOptions",
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
