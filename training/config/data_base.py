"""What all kinds of data are told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gates.errors import GateError
from training.config.checks import at_least_0, at_least_1, at_most
from training.config.paths import LocalPath
from training.config.run import LARGEST_SEED

MORE = "test_"
"""What the name of a further test split begins with."""
MOST_WORKERS, MOST_ROWS = 1024, 10**8
"""Processes, and generated examples."""


class Data:
    """Kinds of data.

    Attributes:
        reader: ``module:class`` of the :class:`training.data.base.TaskData` that reads them.
    """

    reader: ClassVar[str]


class WithSplits:
    """Data sets whose splits have names of their own."""

    train_split: str
    select_split: str | None
    test_split: str

    @property
    def split_names(self) -> dict[str, str | None]:
        """The splits of a hub data set by ours."""
        return {"train": self.train_split, "select": self.select_split, "test": self.test_split}


class FilesOrHub(WithSplits):
    """Data sets that are local files of one each per split, or are on the hub."""

    train_file: str | None
    test_file: str | None
    select_file: str | None
    select_fraction: float
    dataset: str | None

    def check_source(self) -> None:
        """Raises :class:`GateError` unless there is one source, a test file among local files, and a share to select on."""
        if (self.dataset is None) == (self.train_file is None):
            raise GateError(
                "give either a hub data set (--data.dataset) or local files (--data.train_file), not both or neither"
            )
        if self.train_file is not None and self.test_file is None:
            raise GateError("--data.train_file is given but --data.test_file is not; results need a test file")
        check_share(self.select_fraction)

    @property
    def files(self) -> dict[str, str]:
        """The local files by split."""
        files = {"train": self.train_file, "select": self.select_file, "test": self.test_file}
        return {name: file for name, file in files.items() if file is not None}


class MoreTests(FilesOrHub):
    """The same with further files for results, or splits of the hub's data set.

    Attributes:
        metrics: that results are told in, so that no further file can have the beginning of one as its name.
    """

    metrics: ClassVar[tuple[str, ...]]
    more_tests: dict[str, LocalPath] | None

    def check_source(self) -> None:
        """Raises :class:`GateError` unless there is one source with all that it needs, and for a name of a further test file
        that no column could have, or whose columns would have the name of others."""
        super().check_source()
        for name in self.more_tests or {}:
            if not isinstance(name, str) or re.fullmatch("[a-z][a-z0-9]*", name) is None:
                raise GateError(
                    f"--data.more_tests has the name {name!r}; expected a lower-case letter, and then lower-case letters and "
                    "digits, such as mismatched"
                )
            if taken := [metric for metric in self.metrics if metric.startswith(f"{name}_")]:
                raise GateError(
                    f"--data.more_tests has the name {name!r}, with which the metric {taken[0]} begins; give another name"
                )

    @property
    def files(self) -> dict[str, str]:
        """The local files by split."""
        return super().files | (self._more_tests if self.dataset is None else {})

    @property
    def split_names(self) -> dict[str, str | None]:
        """The splits of a hub data set by ours."""
        return super().split_names | self._more_tests

    @property
    def _more_tests(self) -> dict[str, str]:
        return {f"{MORE}{name}": place for name, place in sorted((self.more_tests or {}).items())}


class Generated:
    """Data sets that are generated, of as many rows in each split as asked for."""

    train_rows: int
    select_rows: int
    test_rows: int

    @property
    def rows(self) -> dict[str, int]:
        """How many examples, pairs or documents each split has."""
        return {"train": self.train_rows, "select": self.select_rows, "test": self.test_rows}


@dataclass(frozen=True)
class DataOptions(Data):
    """What all data are told.

    Args:
        max_length: longest text in tokens. Longer texts of a class are truncated; longer sentences to translate are left out
            or refused, and translations end there.
        eval_batch_size: examples per batch in evaluation.
        score_rows: training examples, chosen at random, on which heads are scored.
        num_workers: processes that prepare batches; 0 to prepare them in the process that trains.
        seed: of the order of training batches; the seed of the run is added to it.
    """

    max_length: int = 128
    eval_batch_size: int = 128
    score_rows: int = 2048
    num_workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_1(self, "eval_batch_size", "score_rows", "max_length")
        at_least_0(self, "num_workers", "seed")
        at_most(self, MOST_WORKERS, "num_workers")
        at_most(self, LARGEST_SEED, "seed")

    @property
    def parts(self) -> Mapping[str, Mapping[str, Any]]:
        """Of a benchmark of several data sets, by name the options that make each of them; empty for one data set."""
        return {}

    @property
    def own_budgets(self) -> list[int] | None:
        """The budgets of a comparison where the data decide on them; None where the command line does."""
        return None


def check_share(select_fraction: float) -> None:
    """Raises :class:`GateError` for a share that leaves one side without examples."""
    if not 0 < select_fraction < 1:
        raise GateError(f"select_fraction is {select_fraction}; expected a share between 0 and 1")


def check_rows(rows: dict[str, int], *, least: int) -> None:
    """Raises :class:`GateError` for a generated split of fewer rows."""
    for name, count in rows.items():
        if count < least:
            raise GateError(f"{name}_rows is {count}; expected at least {least}")
        if count > MOST_ROWS:
            raise GateError(f"{name}_rows is {count}; expected at most {MOST_ROWS:,}")


def check_text_seed(seed: int) -> None:
    """Raises :class:`GateError` for a seed that no generator of random numbers takes."""
    if not 0 <= seed <= LARGEST_SEED:
        raise GateError(f"text_seed is {seed}; expected a whole number from 0 to {LARGEST_SEED}")
