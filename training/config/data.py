"""The data of a run: the options ``--data NAME`` and ``--data.OPTION``.

One class for each kind of data has the options of its reader. The readers are in :mod:`training.data`; they are imported when
the data are opened. Data of your own are a subclass of one of these with a reader of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, get_args

from gates.errors import GateError
from training.config.checks import check_range
from training.config.data_base import Data, DataOptions, FilesOrHub, Generated, HubSplits, MoreTests, Subwords, check_share
from training.config.paths import HubName, LocalPath
from training.config.text import (
    BleuTokenizer,
    DocumentOptions,
    Documents,
    ParallelText,
    SentenceLoss,
    SyntheticDocuments,
    SyntheticTranslation,
    TranslationOptions,
)
from training.truth.program import PROGRAMS

# Sentences with a class or a number each.

ClassMetric = Literal["accuracy", "f1", "binary_f1", "matthews"]
RatingMetric = Literal["pearson", "spearman"]
POSITIVE = "1"
"""The default of the positive class."""


@dataclass(frozen=True)
class SentenceOptions(DataOptions):
    """Options of sentences, or pairs of sentences.

    Args:
        batch_size: training examples per step and device, and examples per batch when heads are scored.
    """

    batch_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "batch_size", least=1)


@dataclass(frozen=True)
class ClassificationOptions(SentenceOptions):
    """Options of data with a class for each example.

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
        more_tests: further files for results by their names, such as {mismatched: mm.tsv}, whose metrics are added to those of
            the test file, as test_mismatched_accuracy; with ``dataset``, names of its splits.
        text_column: column of the sentence (default: the one called sentence or text, or what is left of two columns).
        label_column: column of the class or number (default: the one called label, or what is left of two columns).
        pair_column: column of the second sentence, if there is one.
        columns: names of the columns of a csv or tsv file that has no header line.
        check_header: whether a first line that looks like a header is refused where ``columns`` are given; false takes it for
            an example.
        quoting: whether fields of a csv or tsv file may be in double quotes; by default csv yes, tsv no.
        tokenizer: hub name or folder; by default the model's.
    """

    metrics: ClassVar[tuple[str, ...]] = (*get_args(ClassMetric), *get_args(RatingMetric))

    text_column: str | None = None
    label_column: str | None = None
    pair_column: str | None = None
    columns: list[str] | None = None
    check_header: bool = True
    quoting: bool | None = None
    tokenizer: HubName | None = None


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

    reader: ClassVar[str] = "training.data.text:RatingsData"

    metric: RatingMetric = "pearson"


@dataclass(frozen=True)
class Synthetic(Generated, ClassificationOptions):
    """The embedded examples: a small generated language with questions that need particular heads.

    Args:
        max_distractors: nouns between subject and verb, at most.
        interchange: in a comparison, whether the heads that carry the facts behind the answers are found on each dense model by
            interchange interventions, and every mask is measured against them (``interchange.csv``).
    """

    reader: ClassVar[str] = "training.data.synthetic:SyntheticData"

    least_rows: ClassVar[int] = 3
    train_rows: int = 12288
    select_rows: int = 1536
    test_rows: int = 3072
    max_distractors: int = 3
    interchange: bool = False
    batch_size: int = 64
    score_rows: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_distractors", least=0)


@dataclass(frozen=True)
class KnownTruth(Generated, ClassificationOptions):
    """Questions that compiled programs answer, so that the necessary heads are known (see the page Known truth).

    Args:
        program: whose question; the model is compiled from it too. ``all``, in a comparison, is one comparison for each.
        spare: budgets of a comparison: the numbers of heads above those that the program needs. Budgets above the heads of the
            model are left out.
    """

    reader: ClassVar[str] = "training.data.known_truth:KnownTruthData"

    program: str = "all"
    spare: list[int] = field(default_factory=lambda: [0, 2])
    train_rows: int = 4096
    batch_size: int = 32
    score_rows: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.program != "all" and self.program not in PROGRAMS:
            raise GateError(f"there is no program {self.program!r}; expected all or one of {', '.join(PROGRAMS)}")
        if 0 not in self.spare or min(self.spare) < 0 or len(set(self.spare)) < len(self.spare):
            raise GateError(f"spare is {self.spare}; expected numbers of heads, each once and 0 among them, such as [0, 2]")

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


# The tasks of GLUE (Wang et al. 2019), each with its columns and the metric that it is known by.

GlueTask = Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]
COLUMNS = {
    "cola": ("sentence",), "sst2": ("sentence",), "mrpc": ("sentence1", "sentence2"), "qqp": ("question1", "question2"),
    "stsb": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis"), "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"), "wnli": ("sentence1", "sentence2"),
}  # fmt: skip
METRICS: Mapping[str, Mapping[str, str]] = {
    "cola": {"metric": "matthews"},
    "mrpc": {"metric": "binary_f1", "positive": "equivalent"},
    "qqp": {"metric": "binary_f1", "positive": "duplicate"},
    "stsb": {"metric": "pearson"},
}
"""Of those that are not known by accuracy."""


@dataclass(frozen=True)
class Glue(SentenceOptions):
    """A task of the GLUE benchmark. The labels of its test split are hidden, so results are on its validation split, and
    choices are made on a part of the training examples.

    Args:
        subset: name of the task: ``cola``, ``sst2``, ``mrpc``, ``qqp``, ``stsb``, ``mnli``, ``qnli``, ``rte`` or ``wnli``.
        metric: by which choices are made (default: the one that the task is known by).
        mismatched: with ``mnli``, whether results are on texts of other kinds than those trained on; those on the others are
            added, as test_matched_accuracy or test_mismatched_accuracy.
        dataset: hub name of GLUE, or a folder that holds it.
        select_fraction: share of the training examples set aside for selection.
        tokenizer: hub name or folder; by default the model's.
    """

    reader: ClassVar[str] = "training.data.text:glue_data"

    subset: GlueTask = "sst2"
    metric: Literal["accuracy", "f1", "binary_f1", "matthews", "pearson", "spearman"] | None = None
    mismatched: bool = False
    dataset: HubName = field(default=HubName("nyu-mll/glue"))
    select_fraction: float = 0.1
    tokenizer: HubName | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.select_fraction)
        if self.subset not in get_args(GlueTask):
            raise GateError(f"subset is {self.subset!r}; expected one of {', '.join(get_args(GlueTask))}")
        if self.mismatched and self.subset != "mnli":
            raise GateError(f"mismatched is of mnli alone, and subset is {self.subset!r}; leave it out")
        rates = self.subset == "stsb"
        if self.metric is not None and (self.metric in ("pearson", "spearman")) != rates:
            expected = "pearson or spearman" if rates else "accuracy, f1, binary_f1 or matthews"
            raise GateError(f"metric is {self.metric!r}; expected {expected} for {self.subset}")

    @property
    def sentences(self) -> Text | Ratings:
        """The same as options of sentences with a class, or with a number."""
        options: dict[str, Any] = {name: value for name, value in asdict(self).items() if name not in ("metric", "mismatched")}
        options |= zip(("text_column", "pair_column"), COLUMNS[self.subset], strict=False)
        options |= METRICS.get(self.subset, {})
        if self.metric is not None:
            options["metric"] = self.metric
            if self.metric != "binary_f1":
                options.pop("positive", None)
        options["test_split"] = "validation"
        if self.subset == "mnli":
            judged, other = ("mismatched", "matched") if self.mismatched else ("matched", "mismatched")
            options |= {"test_split": f"validation_{judged}", "more_tests": {other: f"validation_{other}"}}
        kind = Ratings if self.subset == "stsb" else Text
        return kind(**options, label_column="label")


# Images with a class each.


@dataclass(frozen=True)
class Images(HubSplits, ClassificationOptions):
    """Images with a class each, from local folders or a data set of the hub.

    Args:
        train_folder: training images: a folder that has a folder of images for each class.
        test_folder: the same for the results.
        select_folder: the same for every choice; without it a part of the training images is set aside.
        image_column: column of the images in a data set of the hub (default: the one called image or img).
        label_column: column of the class there (default: the one called label or labels).
        image_size: side of the images that a new model sees, in pixels (default: 224); a pretrained one knows its own.
    """

    reader: ClassVar[str] = "training.data.images:ImagesData"

    train_folder: LocalPath | None = None
    test_folder: LocalPath | None = None
    select_folder: LocalPath | None = None
    image_column: str | None = None
    label_column: str | None = None
    image_size: int | None = None
    eval_batch_size: int = 64
    score_rows: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_source(self.folders, named="folder")
        check_range(self, "image_size", least=1, most=4096)

    @property
    def folders(self) -> dict[str, str]:
        """The local folders by split."""
        folders = {"train": self.train_folder, "select": self.select_folder, "test": self.test_folder}
        return {name: folder for name, folder in folders.items() if folder is not None}


# Words with a tag each.

TagMetric = Literal["token_accuracy", "entity_f1"]


@dataclass(frozen=True)
class Tags(FilesOrHub, SentenceOptions):
    """Sentences with a tag for each word (named entities, parts of speech), from local files or a data set of the hub.

    Args:
        train_file: training sentences: CoNLL columns (``.conll``, ``.txt``, ``.tsv``, ``.bio``, ``.iob``), CoNLL-U
            (``.conllu``), or jsonl or parquet with lists of words and tags; ``.gz`` is unpacked.
        test_file: the same for the results.
        select_file: the same for every choice; without it a part of the training sentences is set aside.
        words_column: column of the words: in CoNLL columns a number from 1 (default 1); elsewhere a name (default: tokens or
            words; in CoNLL-U the forms).
        tags_column: column of the tags: in CoNLL columns a number from 1 (default: the last); in CoNLL-U upos (default), xpos
            or deprel; elsewhere a name (default: the one called tags, ner_tags, upos, pos_tags or labels).
        metric: by which choices are made, and which tables show: ``token_accuracy``, the share of words whose tag is right; or
            ``entity_f1``, of whole entities, where tags are BIO or IOBES.
        skip_long_sentences: whether sentences of more than ``max_length`` tokens are left out of selection and results too;
            otherwise they are refused there. In training they are always left out.
        tokenizer: hub name or folder; by default the model's.
    """

    reader: ClassVar[str] = "training.data.tags:TagsData"

    words_column: str | None = None
    tags_column: str | None = None
    metric: TagMetric = "token_accuracy"
    skip_long_sentences: bool = False
    tokenizer: HubName | None = None


__all__ = [
    "KINDS",
    "TOKENIZER_FILES",
    "BleuTokenizer",
    "ClassMetric",
    "ClassificationOptions",
    "Data",
    "DataOptions",
    "DocumentOptions",
    "Documents",
    "Glue",
    "Images",
    "KnownTruth",
    "ParallelText",
    "RatingMetric",
    "Ratings",
    "SentenceFiles",
    "SentenceLoss",
    "SentenceOptions",
    "Subwords",
    "Synthetic",
    "SyntheticDocuments",
    "SyntheticTranslation",
    "Tags",
    "Text",
    "TranslationOptions",
]

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model",
    "sentencepiece.model", "source.spm",
)  # fmt: skip
"""A folder with a tokenizer has at least one of these files."""
KINDS = {
    kind.__name__: kind
    for kind in (
        Text,
        Ratings,
        Glue,
        Tags,
        Images,
        ParallelText,
        Documents,
        Synthetic,
        SyntheticTranslation,
        SyntheticDocuments,
        KnownTruth,
    )
}
"""The kinds of data that come with the product, by name."""
