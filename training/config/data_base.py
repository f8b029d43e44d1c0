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
"""The prefix of the names of further test splits."""


class Data:
    """A kind of data.

    Attributes:
        reader: The ``module:class`` of the :class:`training.data.base.TaskData` that reads it.
    """

    reader: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the options; each class checks its own options and calls the next class."""


@dataclass(frozen=True)
class DataOptions(Data):
    """Options of all data.

    Args:
        max_length: The longest text in tokens. Longer texts to classify are truncated; longer sentences to translate are left
            out or refused, and translations end there.
        eval_batch_size: The number of examples per batch in evaluation.
        score_rows: The number of random training examples on which heads are scored.
        num_workers: The number of processes that prepare batches; 0 for the training process itself.
        seed: The seed of the order of training batches. The seed of the run is added to it.
    """

    max_length: int = 128
    eval_batch_size: int = 128
    score_rows: int = 2048
    num_workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(self, "eval_batch_size", "score_rows", "max_length", least=1)
        check_range(self, "num_workers", least=0, most=1024)
        check_range(self, "seed", least=0, most=LARGEST_SEED)

    @property
    def parts(self) -> Mapping[str, Mapping[str, Any]]:
        """The options of each dataset of a benchmark by name; empty for one dataset."""
        return {}

    @property
    def own_budgets(self) -> list[int] | None:
        """The budgets of a comparison, if the data decide on them."""
        return None


@dataclass(frozen=True)
class HubSplits(Data):
    """Datasets of the hub.

    Args:
        dataset: The hub name of a dataset, such as ``glue`` or ``wikitext``, instead of files.
        subset: The configuration of the dataset, such as ``sst2`` or ``wikitext-2-raw-v1``.
        train_split: The name of the training split.
        select_split: The name of the selection split.
        test_split: The name of the test split.
        select_fraction: The share of the training examples to set aside when there is no selection split; at most 2,000 pairs
            of parallel text.
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
        """The names of the splits of a hub dataset by this project's names."""
        return {"train": self.train_split, "select": self.select_split, "test": self.test_split}

    def check_source(self, local: Mapping[str, object], *, named: str = "file") -> None:
        """Raise :class:`GateError` unless there is one source, and a test file among local files by split.

        Args:
            named: The end of the options' names, such as ``file`` for ``--data.train_file``.
        """
        if (self.dataset is None) == ("train" not in local):
            raise GateError(f"expected either a hub dataset (--data.dataset) or local files (--data.train_{named}); give one")
        if self.dataset is None and "test" not in local:
            raise GateError(f"--data.train_{named} is given but --data.test_{named} is not; results need a test {named}")


@dataclass(frozen=True)
class FilesOrHub(HubSplits):
    """Local files, one for each split, or a dataset of the hub.

    Args:
        train_file: The file of training examples.
        test_file: The file of test examples, for the results.
        select_file: The file of selection examples, for every choice. Without it, a part of the training examples is set aside.
    """

    train_file: LocalPath | None = None
    test_file: LocalPath | None = None
    select_file: LocalPath | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_source(self.files)

    @property
    def files(self) -> dict[str, str]:
        """The local files by split."""
        files = {"train": self.train_file, "select": self.select_file, "test": self.test_file}
        return {name: file for name, file in files.items() if file is not None}


@dataclass(frozen=True)
class MoreTests(FilesOrHub):
    """Local files or a dataset of the hub, with further test files or splits.

    Args:
        more_tests: Further test files by name, such as {news: news.tsv}; with ``dataset``, names of its splits. Their metrics
            are added to the results, as test_news_accuracy.
    """

    metrics: ClassVar[tuple[str, ...]]
    """The metrics of results; the name of a further test split is no prefix of one."""
    more_tests: dict[str, LocalPath] | None = None

    def __post_init__(self) -> None:
        for name in self.more_tests or {}:
            if not isinstance(name, str) or re.fullmatch("[a-z][a-z0-9]*", name) is None:
                raise GateError(
                    f"--data.more_tests has the name {name!r}; expected lower-case letters and digits, a letter first, such as "
                    "mismatched"
                )
            if taken := [metric for metric in self.metrics if metric.startswith(f"{name}_")]:
                raise GateError(
                    f"--data.more_tests has the name {name!r}, a prefix of the metric {taken[0]}; give another name"
                )
        super().__post_init__()

    @property
    def files(self) -> dict[str, str]:
        return super().files | (self._more_tests if self.dataset is None else {})

    @property
    def split_names(self) -> dict[str, str | None]:
        return super().split_names | self._more_tests

    @property
    def _more_tests(self) -> dict[str, str]:
        return {f"{MORE}{name}": place for name, place in sorted((self.more_tests or {}).items())}


@dataclass(frozen=True)
class Generated(Data):
    """Datasets that are generated.

    Args:
        train_rows: The number of training examples, pairs or documents.
        select_rows: The number of selection examples, pairs or documents, for every choice.
        test_rows: The number of test examples, pairs or documents.
        text_seed: The seed of the generated text. Runs with different seeds see the same text.
    """

    least_rows: ClassVar[int] = 2
    train_rows: int = 2048
    select_rows: int = 256
    test_rows: int = 512
    text_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "train_rows", "select_rows", "test_rows", least=self.least_rows, most=10**8)
        check_range(self, "text_seed", least=0, most=LARGEST_SEED)

    @property
    def rows(self) -> dict[str, int]:
        return {"train": self.train_rows, "select": self.select_rows, "test": self.test_rows}


@dataclass(frozen=True)
class TrainedTokenizer(DataOptions):
    """Data whose tokenizer can be trained.

    Args:
        tokenizer: The hub name or folder of the tokenizer (default: the model's). For a new model, the default is to train one
            on the training data.
        subwords: The kind of a trained tokenizer: ``bpe`` or ``unigram``.
        vocab_size: The largest number of tokens of a trained tokenizer, of both languages together for translation.
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
