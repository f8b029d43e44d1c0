"""The command line of a comparison: that of a run, and what is compared."""

from __future__ import annotations

from jsonargparse import ArgumentParser

from training.cli.run_parser import build_parser
from training.config import (
    ComparisonOptions,
    DistilWeights,
    DrawSearch,
    LauncherOptions,
    RefitSearch,
    RestartSearch,
    SwapSearch,
)

COMPARISON_GROUPS: tuple[tuple[type, str], ...] = (
    (ComparisonOptions, ""),
    (LauncherOptions, ""),
    (RestartSearch, "restarts."),
    (SwapSearch, "swap."),
    (DrawSearch, "draws."),
    (RefitSearch, "refit."),
    (DistilWeights, "distil."),
)
OF_A_RUN = ("seed", "existing", "ckpt_path", "compare", "retrained", "curve", "patience", "from_scratch")
"""Options of ``training.fit`` that a configuration may hold and a comparison does not use."""
LIST_METHODS = "Show every method with its source, and end."


def build_comparison_parser() -> ArgumentParser:
    """What reads the options of a comparison from a command line and configurations."""
    parser = build_parser(prog="python -m training compare")
    for group, prefix in COMPARISON_GROUPS:
        parser.add_class_arguments(group, prefix.removesuffix(".") or None)
    parser.add_argument("--list_methods", action="store_true", help=LIST_METHODS)
    return parser
