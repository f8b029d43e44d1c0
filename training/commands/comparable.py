"""Check that directories whose results are averaged differ only in their seeds."""

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
"""The columns whose values a mean has in common."""
IN_THE_CELL = (
    "seed", "seeds", "data.init_args.seed", "budgets", "methods", "stages", "model.budget", "model.gate", "model.swaps",
    "model.refit", "model.pipelined",
)  # fmt: skip
"""Seeds, and options that the columns of a mean show, for example in the name of a method."""
WITHOUT_EFFECT = (
    "experiments", "list_methods", "launcher", "ray_", "data.init_args.eval_batch_size", "trainer.accelerator",
)  # fmt: skip
FREE_YET_DECISIVE = {"ckpt_path", "from_scratch_epochs", "from_scratch_learning_rate"}
"""Options that may change when a run is resumed, and that change results."""
FREE = ({*FREE_WHEN_RESUMED} - FREE_YET_DECISIVE) | {*IN_THE_CELL, *WITHOUT_EFFECT}


def check_comparable(paths: Sequence[Path], tables: Sequence[pd.DataFrame]) -> None:
    """Check the options of directories that have results in one mean. Directories without a configuration, and options that
    only one of two configurations has, are not compared.

    Args:
        paths: The directories.
        tables: Their rows, with the columns of :data:`CELL`.

    Raises:
        GateError: for the first option in which two directories differ.
    """
    known: list[tuple[Path, set[tuple[Any, ...]], dict[str, Any]]] = []
    for path, table in zip(paths, tables, strict=True):
        if len(paths) == 1 or not (path / CONFIG).is_file():
            continue
        cells = set(table[CELL].itertuples(index=False, name=None))
        options = read_options(path / CONFIG, mend="start the command that wrote it again")
        for other, its_cells, its_options in known:
            if cells & its_cells:
                _check_options(other, its_options, path, options)
        known.append((path, cells, options))


def _check_options(one: Path, options: dict[str, Any], other: Path, others: dict[str, Any]) -> None:
    for name in sorted(options.keys() & others.keys()):
        first, second = options[name], others[name]
        own = name == "ckpt_path" and first is not None and second is not None  # each seed may go on from its own
        if not own and not is_among(name, FREE) and not same_value(first, second):
            raise GateError(
                f"{str(one)!r} and {str(other)!r} differ in more than their seeds: {name} is {first!r} in the first and "
                f"{second!r} in the second; a mean is taken over seeds of one experiment, so make a table of each"
            )
