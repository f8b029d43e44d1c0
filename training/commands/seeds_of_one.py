"""Whether directories whose results are averaged differ in their seeds alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gates.errors import GateError
from training.runs.resolved_options import is_among, read_options, same_value
from training.runs.resuming import FREE_WHEN_RESUMED
from training.runs.run_directory import CONFIG

CELL = ["stage", "method", "heads", "kinds"]
"""Columns whose values a mean has in common."""
SEEDS = ("seed", "seeds", "data.init_args.seed")
TOLD_BY_THE_CELL = (
    "budgets", "methods", "stages", "model.budget", "model.gate", "model.swaps", "model.refit", "model.pipelined",
)  # fmt: skip
"""Options that a mean's own columns tell, such as what a method is called after."""
WITHOUT_EFFECT = (
    "experiments", "list_methods", "launcher", "ray_", "data.init_args.eval_batch_size", "trainer.accelerator",
)  # fmt: skip
OF_RESULTS = ("ckpt_path", "from_scratch_epochs", "from_scratch_learning_rate")
"""Options that a run may change when it is resumed, and that all the same change results of which a mean is taken."""
FREE = ({*FREE_WHEN_RESUMED} - {*OF_RESULTS}) | {*SEEDS, *TOLD_BY_THE_CELL, *WITHOUT_EFFECT}


def check_seeds_of_one(paths: Sequence[Path], tables: Sequence[pd.DataFrame]) -> None:
    """Raises :class:`GateError` for the first option in which two directories differ that have results of which a mean would be
    taken. Directories without a configuration, and options that one of the two does not know, are not compared.

    Args:
        paths: of the directories.
        tables: their rows, with the columns of :data:`CELL`.
    """
    known: list[tuple[Path, set[tuple[Any, ...]], dict[str, Any]]] = []
    for path, table in zip(paths, tables, strict=True):
        if len(paths) == 1 or not (path / CONFIG).is_file():
            continue
        cells = set(table[CELL].itertuples(index=False, name=None))
        options = read_options(path / CONFIG, mend="start the command that wrote it again")
        for other, its_cells, its_options in known:
            if cells & its_cells:
                _compare(other, its_options, path, options)
        known.append((path, cells, options))


def _compare(one: Path, options: dict[str, Any], other: Path, others: dict[str, Any]) -> None:
    for name in sorted(options.keys() & others.keys()):
        first, second = options[name], others[name]
        own = name == "ckpt_path" and first is not None and second is not None  # each seed may go on from its own
        if not own and not is_among(name, FREE) and not same_value(first, second):
            raise GateError(
                f"{str(one)!r} and {str(other)!r} differ in more than their seeds: {name} is {first!r} in the first and "
                f"{second!r} in the second; a mean is taken over seeds of one experiment, so make a table of each"
            )
