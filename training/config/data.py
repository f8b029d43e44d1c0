"""The data of a run: the options ``--data NAME`` and ``--data.OPTION``.

Each kind of data is a class with the options of its reader. The readers are in :mod:`training.data`; they are imported when the
data are opened. For data of your own, write a subclass with your reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, get_args

from gates.errors import GateError
from training.config.checks import check_range
from training.config.data_base import DataOptions, FilesOrHub, Generated, HubSplits, MoreTests, check_share
from training.config.paths import HubName, LocalPath
from training.config.text import Documents, ParallelText, SyntheticDocuments, SyntheticTranslation
from training.truth.program import PROGRAMS

# Sentences with a class or a number each.

ClassMetric = Literal["accuracy", "f1", "binary_f1", "matthews"]
RatingMetric = Literal["pearson", "spearman"]
POSITIVE = "1"
"""The default name of the positive class."""


@dataclass(frozen=True)
class SentenceOptions(DataOptions):
    """Options of sentences, or pairs of sentences.

    Args:
        batch_size: The number of training examples per step and device, and of examples per batch for head scores.
    """

    batch_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "batch_size", least=1)


@dataclass(frozen=True)
class ClassificationOptions(SentenceOptions):
    """Options of data with a class for each example.

    Args:
        metric: The metric of choices and tables: ``accuracy``, ``f1`` (the mean over classes), ``binary_f1`` (of the positive
            class) or ``matthews`` (the correlation).
        positive: The positive class of ``binary_f1`` (default: the class called 1).
    """

    metric: ClassMetric = "accuracy"
    positive: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positive is not None and self.metric != "binary_f1":
            raise GateError(f"positive is {self.positive!r}, but only --data.metric binary_f1 uses it; give both or neither")


@dataclass(frozen=True)
class SentenceFiles(MoreTests, SentenceOptions):
    """Sentences or pairs of sentences from local files or a dataset of the hub.

    Args:
        train_file: The file of training examples: csv, tsv, jsonl or parquet, also with ``.gz``.
        text_column: The column of the sentence (default: the one called sentence or text, or the remaining one of two).
        label_column: The column of the class or number (default: the one called label, or the remaining one of two).
        pair_column: The column of the second sentence of pairs.
        columns: The names of the columns of a csv or tsv file without a header line.
        check_header: Whether to refuse a first line that looks like a header although ``columns`` are given.
        quoting: Whether fields of a csv or tsv file may be in double quotes (default: csv yes, tsv no).
        tokenizer: The hub name or folder of the tokenizer (default: the model's).
    """

    metrics: ClassVar[tuple[str, ...]] = (*get_args(ClassMetric), *get_args(RatingMetric))

    text_column: str | None = None
    label_column: str | None = None
    pair_column: str | None = None
    columns: list[str] | None = None
    check_header: bool = True
    quoting: bool | None = None
    tokenizer: HubName | None = None

    @property
    def has_labels(self) -> bool:
        """Whether the files have labels."""
        return True


@dataclass(frozen=True)
class Text(SentenceFiles, ClassificationOptions):
    """Sentences or pairs of sentences with a class, a number or a word, from local files or a dataset of the hub.

    A training file (``train_file``) without a kind of data implies ``--data Text``.

    Args:
        unlabelled: Whether the predictions of the fine-tuned model serve as labels, so that files need none. Metrics say how
            often a pruned model agrees with it.
    """

    reader: ClassVar[str] = "training.data.text:TextData"

    unlabelled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unlabelled and self.label_column is not None:
            raise GateError(f"label_column is {self.label_column!r}, but unlabelled is true; give one of them")

    @property
    def has_labels(self) -> bool:
        return not self.unlabelled


@dataclass(frozen=True)
class Ratings(SentenceFiles):
    """Sentences or pairs of sentences with a number to predict, from local files or a dataset of the hub.

    Args:
        metric: The metric of choices and tables: ``pearson`` (of numbers) or ``spearman`` (of their ranks).
    """

    reader: ClassVar[str] = "training.data.text:RatingsData"

    metric: RatingMetric = "pearson"


@dataclass(frozen=True)
class Synthetic(Generated, ClassificationOptions):
    """The embedded examples: a small generated language with questions that need particular heads.

    Args:
        max_distractors: The largest number of nouns between subject and verb.
        interchange: Whether a comparison finds the heads that carry the facts behind the answers by interchange interventions
            on each dense model. Every mask is then measured against them (``interchange.csv``).
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
        program: The program that states the question, and from which the model is compiled. A comparison takes ``all``.
        spare: The budgets of a comparison, as numbers of heads above those that the program needs.
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


# The tasks of GLUE (Wang et al. 2019) with their columns and usual metrics.

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
"""The usual metrics other than accuracy."""


@dataclass(frozen=True)
class Glue(SentenceOptions):
    """A task of the GLUE benchmark. The labels of its test split are hidden, so the validation split gives the results. A part
    of the training examples is set aside for choices.

    Args:
        subset: The task: ``cola``, ``sst2``, ``mrpc``, ``qqp``, ``stsb``, ``mnli``, ``qnli``, ``rte`` or ``wnli``.
        metric: The metric of choices and tables (default: the usual one of the task).
        mismatched: Whether the main results of ``mnli`` are on the mismatched texts. The other set is added, as
            test_matched_accuracy or test_mismatched_accuracy.
        dataset: The hub name or folder of GLUE.
        select_fraction: The share of the training examples to set aside for selection.
        tokenizer: The hub name or folder of the tokenizer (default: the model's).
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
        if self.mismatched and self.subset != "mnli":
            raise GateError(f"mismatched is for mnli only, but subset is {self.subset!r}; remove the option")
        rates = self.subset == "stsb"
        if self.metric is not None and (self.metric in ("pearson", "spearman")) != rates:
            expected = "pearson or spearman" if rates else "accuracy, f1, binary_f1 or matthews"
            raise GateError(f"metric is {self.metric!r}; expected {expected} for {self.subset}")

    @property
    def sentences(self) -> Text | Ratings:
        """The task as options of sentences with a class or a number."""
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
    """Images with a class each, from local folders or a dataset of the hub.

    Args:
        train_folder: The folder of training images, with a folder for each class.
        test_folder: The folder of test images, for the results.
        select_folder: The folder of selection images, for every choice. Without it, a part of the training images is set aside.
        image_column: The column of the images in a dataset of the hub (default: the one called image or img).
        label_column: The column of the class in a dataset of the hub (default: the one called label or labels).
        image_size: The side of the images of a new model, in pixels (default: 224). A pretrained model has its own.
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
        folders = {"train": self.train_folder, "select": self.select_folder, "test": self.test_folder}
        return {name: folder for name, folder in folders.items() if folder is not None}


# Words with a tag each.


@dataclass(frozen=True)
class Tags(FilesOrHub, SentenceOptions):
    """Sentences with a tag for each word (named entities, parts of speech), from local files or a dataset of the hub.

    Args:
        train_file: The file of training sentences: CoNLL columns (``.conll``, ``.txt``, ``.tsv``, ``.bio``, ``.iob``), CoNLL-U
            (``.conllu``), or jsonl or parquet with lists of words and tags. It may end in ``.gz``.
        words_column: The column of the words: a number from 1 in CoNLL columns (default: 1), form in CoNLL-U, else a name
            (default: tokens or words).
        tags_column: The column of the tags: a number from 1 in CoNLL columns (default: the last), else a name. Default names
            are tags, ner_tags, upos, pos_tags and labels; CoNLL-U has upos (default), xpos and deprel.
        metric: The metric of choices and tables: ``token_accuracy`` (the share of words with the right tag) or ``entity_f1``
            (of whole entities, for BIO or IOBES tags).
        skip_long_sentences: Whether to leave sentences of more than ``max_length`` tokens out of selection and test; otherwise
            they are refused there. Training always leaves them out.
        tokenizer: The hub name or folder of the tokenizer (default: the model's).
    """

    reader: ClassVar[str] = "training.data.tags:TagsData"

    words_column: str | None = None
    tags_column: str | None = None
    metric: Literal["token_accuracy", "entity_f1"] = "token_accuracy"
    skip_long_sentences: bool = False
    tokenizer: HubName | None = None


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model",
    "sentencepiece.model", "source.spm",
)  # fmt: skip
"""The files of tokenizers; a folder with a tokenizer has at least one."""
KINDS = {
    kind.__name__: kind
    for kind in (
        Text, Ratings, Glue, Tags, Images, ParallelText, Documents, Synthetic, SyntheticTranslation, SyntheticDocuments,
        KnownTruth,
    )
}  # fmt: skip
"""The built-in kinds of data by name."""
