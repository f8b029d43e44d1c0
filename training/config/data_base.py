"""Options that several kinds of data share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gates.errors import GateError
from training.config.checks import check_range
from training.config.paths import HubName, LocalPath
from training.config.run import LARGEST_SEED

Subwords = Literal["bpe", "unigram"]
MORE = "test_"
"""The beginning of the name of a further test split."""
MOST_WORKERS, MOST_ROWS = 1024, 10**8
"""The largest numbers of processes, and of generated examples."""


class Data:
    """A kind of data.

    Attributes:
        reader: The ``module:class`` of the :class:`training.data.base.TaskData` that reads it.
    """

    reader: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the options; every class of the options checks its own and calls the next."""


@dataclass(frozen=True)
class DataOptions(Data):
    """Options of all data.

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
        check_range(self, "eval_batch_size", "score_rows", "max_length", least=1)
        check_range(self, "num_workers", least=0, most=MOST_WORKERS)
        check_range(self, "seed", least=0, most=LARGEST_SEED)

    @property
    def parts(self) -> Mapping[str, Mapping[str, Any]]:
        """Return, for a benchmark of several data sets, the options of each by name; empty for one data set."""
        return {}

    @property
    def own_budgets(self) -> list[int] | None:
        """Return the budgets of a comparison if the data decide on them, otherwise None."""
        return None


@dataclass(frozen=True)
class HubSplits(Data):
    """Data sets of the hub, whose splits have names of their own.

    Args:
        dataset: hub name of a data set, such as ``glue`` or ``wikitext``, instead of files.
        subset: its configuration, such as ``sst2`` or ``wikitext-2-raw-v1``.
        train_split: name of its training split.
        select_split: name of its selection split.
        test_split: name of its test split.
        select_fraction: share of the training examples set aside for selection when there is no split for it; of parallel text
            at most 2,000 pairs.
    """

    dataset: HubName | None = None
    subset: str | None = None
    train_split: str = "train"
    select_split: str | None = None
    test_split: str = "test"
    select_fraction: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.select_fraction)

    @property
    def split_names(self) -> dict[str, str | None]:
        """Return the splits of a hub data set by ours."""
        return {"train": self.train_split, "select": self.select_split, "test": self.test_split}

    def check_source(self, local: Mapping[str, object], *, named: str = "file") -> None:
        """Raise :class:`GateError` unless there is one source, and a test file among local files.

        Args:
            local: The local files by split.
            named: The end of the options' names, such as ``file`` for ``--data.train_file``.
        """
        if (self.dataset is None) == ("train" not in local):
            raise GateError(
                f"give either a hub data set (--data.dataset) or local files (--data.train_{named}), not both or neither"
            )
        if self.dataset is None and "test" not in local:
            raise GateError(f"--data.train_{named} is given but --data.test_{named} is not; results need a test {named}")


@dataclass(frozen=True)
class FilesOrHub(HubSplits):
    """Data sets that are local files, one for each split, or are on the hub."""

    train_file: LocalPath | None = None
    test_file: LocalPath | None = None
    select_file: LocalPath | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_source(self.files)

    @property
    def files(self) -> dict[str, str]:
        """Return the local files by split."""
        files = {"train": self.train_file, "select": self.select_file, "test": self.test_file}
        return {name: file for name, file in files.items() if file is not None}


@dataclass(frozen=True)
class MoreTests(FilesOrHub):
    """The same with further files for results, or splits of the hub's data set.

    Attributes:
        metrics: The metrics of results. No further file may have the beginning of one as its name.
    """

    metrics: ClassVar[tuple[str, ...]]
    more_tests: dict[str, LocalPath] | None = None

    def __post_init__(self) -> None:
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
        super().__post_init__()

    @property
    def files(self) -> dict[str, str]:
        """Return the local files by split."""
        return super().files | (self._more_tests if self.dataset is None else {})

    @property
    def split_names(self) -> dict[str, str | None]:
        """Return the splits of a hub data set by ours."""
        return super().split_names | self._more_tests

    @property
    def _more_tests(self) -> dict[str, str]:
        return {f"{MORE}{name}": place for name, place in sorted((self.more_tests or {}).items())}


@dataclass(frozen=True)
class Generated(Data):
    """Data sets that are generated.

    Args:
        train_rows: number of training examples, pairs or documents.
        select_rows: the same of the selection split, on which every choice is made.
        test_rows: the same of the test split.
        text_seed: seed of the generated text. Runs with other seeds see the same text, so that their results can be compared.
    """

    least_rows: ClassVar[int] = 2
    train_rows: int = 2048
    select_rows: int = 256
    test_rows: int = 512
    text_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "train_rows", "select_rows", "test_rows", least=self.least_rows, most=MOST_ROWS)
        check_range(self, "text_seed", least=0, most=LARGEST_SEED)

    @property
    def rows(self) -> dict[str, int]:
        """Return the number of examples, pairs or documents of each split."""
        return {"train": self.train_rows, "select": self.select_rows, "test": self.test_rows}


@dataclass(frozen=True)
class TrainedTokenizer(DataOptions):
    """Data whose tokenizer can be trained.

    Args:
        tokenizer: hub name or folder; by default the model's, and without a pretrained model one that is trained on the
            training data.
        subwords: kind of a trained tokenizer: ``bpe`` or ``unigram``.
        vocab_size: largest number of tokens of a trained tokenizer, of translations for both languages together.
    """

    tokenizer: HubName | None = None
    subwords: Subwords = "bpe"
    vocab_size: int = 8000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "vocab_size", least=1)


def check_share(select_fraction: float) -> None:
    """Raise :class:`GateError` for a share that leaves one side without examples."""
    if not 0 < select_fraction < 1:
        raise GateError(f"select_fraction is {select_fraction}; expected a share between 0 and 1")
