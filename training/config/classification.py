"""Sentences with a class or a number each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from gates.errors import GateError
from training.config.checks import at_least_0, at_least_1
from training.config.data_base import DataOptions, Generated, MoreTests, check_rows, check_text_seed
from training.config.paths import HubName, LocalPath
from training.truth.programs import PROGRAMS

ClassMetric = Literal["accuracy", "f1", "binary_f1", "matthews"]
RatingMetric = Literal["pearson", "spearman"]
POSITIVE = "1"
"""The class that counts as positive where nobody says."""


@dataclass(frozen=True)
class SentenceOptions(DataOptions):
    """What sentences, or pairs of sentences, are told.

    Args:
        batch_size: training examples per step and device, and examples per batch when heads are scored.
    """

    batch_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_1(self, "batch_size")


@dataclass(frozen=True)
class ClassificationOptions(SentenceOptions):
    """What data with a class for each example are told.

    Args:
        metric: by which choices are made, and which tables show: ``accuracy``; ``f1``, the mean over classes; ``binary_f1``, of
            the positive one of two classes; or ``matthews``, the correlation.
        positive: with ``binary_f1``, the positive class (default: the one called 1).
    """

    metric: ClassMetric = "accuracy"
    positive: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positive is not None and self.metric != "binary_f1":
            raise GateError(f"positive is {self.positive!r}, which only --data.metric binary_f1 uses; give both or neither")


@dataclass(frozen=True)
class SentenceFiles(MoreTests, SentenceOptions):
    """Sentences or pairs of sentences from local files or a data set of the hub.

    Args:
        train_file: training examples: a csv, tsv, jsonl or parquet file; ``.gz`` is unpacked.
        test_file: the same for the results.
        select_file: the same for every choice; without it a part of the training examples is set aside.
        more_tests: further files for results by their names, such as {mismatched: mm.tsv}, whose metrics stand beside those of
            the test file, as test_mismatched_accuracy; with ``dataset``, names of its splits.
        text_column: column of the sentence (default: the one called sentence or text, or what is left of two columns).
        label_column: column of the class or number (default: the one called label, or what is left of two columns).
        pair_column: column of the second sentence, if there is one.
        columns: names of the columns of a csv or tsv file that has no header line.
        check_header: whether a first line that looks like a header is refused where ``columns`` are given; false takes it for
            an example.
        quoting: whether fields of a csv or tsv file may be in double quotes; by default csv yes, tsv no.
        select_fraction: share of the training examples set aside for selection when there is no split for it.
        tokenizer: hub name or folder; by default the model's.
        dataset: hub name of a data set, such as ``glue``, instead of files.
        subset: its configuration, such as ``sst2``.
        train_split: name of its training split.
        select_split: name of its selection split.
        test_split: name of its test split.
    """

    metrics: ClassVar[tuple[str, ...]] = (*get_args(ClassMetric), *get_args(RatingMetric))

    train_file: LocalPath | None = None
    test_file: LocalPath | None = None
    select_file: LocalPath | None = None
    more_tests: dict[str, LocalPath] | None = None
    text_column: str | None = None
    label_column: str | None = None
    pair_column: str | None = None
    columns: list[str] | None = None
    check_header: bool = True
    quoting: bool | None = None
    select_fraction: float = 0.1
    tokenizer: HubName | None = None
    dataset: HubName | None = None
    subset: str | None = None
    train_split: str = "train"
    select_split: str | None = None
    test_split: str = "test"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_source()


@dataclass(frozen=True)
class Text(SentenceFiles, ClassificationOptions):
    """Sentences or pairs of sentences with a class, a number or a word, from local files or a data set of the hub.

    A training file (``train_file``) without a kind of data implies ``--data Text``.
    """

    reader: ClassVar[str] = "training.data.text:TextData"


@dataclass(frozen=True)
class Ratings(SentenceFiles):
    """Sentences or pairs of sentences with a number to predict, from local files or a data set of the hub.

    Args:
        metric: by which choices are made, and which tables show: ``pearson`` or ``spearman``, the correlation of numbers or of
            their ranks.
    """

    reader: ClassVar[str] = "training.data.ratings:RatingsData"

    metric: RatingMetric = "pearson"


@dataclass(frozen=True)
class Synthetic(Generated, ClassificationOptions):
    """The embedded examples: a small generated language with questions that need particular heads.

    Args:
        train_rows: training examples.
        select_rows: examples of the selection split, on which every choice is made.
        test_rows: test examples.
        max_distractors: nouns between subject and verb, at most.
        text_seed: of the generated text. Runs with other seeds see the same text, so that their results can be compared.
        interchange: in a comparison, whether the heads that carry the facts behind the answers are found on each dense model by
            interchange interventions, and every mask is measured against them (``interchange.csv``).
    """

    reader: ClassVar[str] = "training.data.synthetic:SyntheticData"

    train_rows: int = 12288
    select_rows: int = 1536
    test_rows: int = 3072
    max_distractors: int = 3
    text_seed: int = 0
    interchange: bool = False
    batch_size: int = 64
    score_rows: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rows(self.rows, least=3)
        check_text_seed(self.text_seed)
        at_least_0(self, "max_distractors")


@dataclass(frozen=True)
class KnownTruth(ClassificationOptions):
    """Questions that compiled programs answer, so that the necessary heads are known (see the page Known truth).

    Args:
        program: whose question; the model is compiled from it too. ``all``, in a comparison, is one comparison for each.
        spare: budgets of a comparison: so many heads more than the program needs. Those that the model does not have are left
            out.
        train_rows: training examples, for gates and scores.
        select_rows: examples of the selection split.
        test_rows: test examples.
        text_seed: of the strings. Runs with other seeds see the same ones, in models with other noise.
    """

    reader: ClassVar[str] = "training.data.known_truth:KnownTruthData"

    program: str = "all"
    spare: list[int] = field(default_factory=lambda: [0, 2])
    train_rows: int = 4096
    select_rows: int = 256
    test_rows: int = 512
    text_seed: int = 0
    batch_size: int = 32
    score_rows: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rows(self.rows, least=2)
        check_text_seed(self.text_seed)
        if self.program != "all" and self.program not in PROGRAMS:
            raise GateError(f"there is no program {self.program!r}; expected all or one of {', '.join(PROGRAMS)}")
        if 0 not in self.spare or min(self.spare) < 0 or len(set(self.spare)) < len(self.spare):
            raise GateError(f"spare is {self.spare}; expected numbers of heads, each once and 0 among them, such as [0, 2]")

    @property
    def rows(self) -> dict[str, int]:
        """How many examples each split has."""
        return {"train": self.train_rows, "select": self.select_rows, "test": self.test_rows}

    @property
    def parts(self) -> Mapping[str, Mapping[str, Any]]:
        return {name: {"program": name} for name in PROGRAMS} if self.program == "all" else {}

    @property
    def own_budgets(self) -> list[int] | None:
        if self.parts:
            return None
        program = PROGRAMS[self.program]
        budgets = sorted(len(program.needed) + spare for spare in self.spare)
        return [budget for budget in budgets if budget < program.total_heads]
