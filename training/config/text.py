"""Running text, for language models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gates.errors import GateError
from training.config.checks import check_range
from training.config.data_base import Generated, HubSplits, MoreTests, TrainedTokenizer
from training.config.paths import LocalPath

# Parallel text.

SentenceLoss = Literal["mean", "sum"]
BleuTokenizer = Literal["13a", "intl", "zh", "char", "ja-mecab", "ko-mecab"]
"""How BLEU cuts texts into tokens: ``13a`` is for languages with spaces between words."""


@dataclass(frozen=True)
class TranslationOptions(TrainedTokenizer):
    """Options of all parallel text.

    Args:
        batch_tokens: tokens on the longer side of a training batch, padding included, per step and device.
        max_ratio: largest ratio of the lengths of a training pair's sides in tokens, at least 1.
        skip_unfit_pairs: leave selection and test pairs out that are too long or have an empty side, and say how many. Scores
            are then of the other pairs and not to be compared with those of the whole set.
        source_prefix: text before every source, such as ``translate English to German: `` for T5.
        source_language: of multilingual models, its name in the tokenizer, such as ``en_XX``.
        target_language: the same of the translation.
        label_smoothing: of the training loss, 0 to below 1.
        sentence_loss: whether the loss of a sentence is the ``mean`` or the ``sum`` over its tokens when heads are scored.
        bleu_tokenize: how BLEU finds words; ``zh`` for Chinese, ``ja-mecab`` for Japanese.
        beams: translations that beam search keeps at a time; 1 for greedy decoding.
        length_penalty: power of the length by which a beam's score is divided; above 0 it favours longer translations.
        beam_splits: splits that are also translated with beams (default: test).
        validate_every: epochs between validations; each translates the selection split.
    """

    eval_batch_size: int = 64
    batch_tokens: int = 4096
    max_ratio: float = 3.0
    skip_unfit_pairs: bool = False
    source_prefix: str = ""
    source_language: str | None = None
    target_language: str | None = None
    label_smoothing: float = 0.1
    sentence_loss: SentenceLoss = "mean"
    bleu_tokenize: BleuTokenizer = "13a"
    beams: int = 4
    length_penalty: float = 1.0
    beam_splits: list[str] = field(default_factory=lambda: ["test"])
    validate_every: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "batch_tokens", "beams", least=1)
        if self.max_length > self.batch_tokens:
            raise GateError(
                f"max_length is {self.max_length} and batch_tokens {self.batch_tokens}; a batch must hold the longest sentence"
            )
        if not self.max_ratio >= 1:
            raise GateError(f"max_ratio is {self.max_ratio}; expected at least 1")
        if not 0 <= self.label_smoothing < 1:
            raise GateError(f"label_smoothing is {self.label_smoothing}; expected a share from 0 to below 1, such as 0.1")
        if not self.validate_every > 0:
            raise GateError(f"validate_every is {self.validate_every}; expected a number of epochs above 0")
        if unknown := sorted({*self.beam_splits} - {"select", "test"}):
            raise GateError(f"beam_splits names {unknown[0]!r}; expected some of 'select' and 'test'")


@dataclass(frozen=True)
class ParallelText(HubSplits, TranslationOptions):
    """Sentences and their translations, from local files or a data set of the hub.

    Args:
        train_source: training sentences: a text file with one on each line; ``.gz`` is unpacked. Implies
            ``--data ParallelText``.
        train_target: their translations: line i is the translation of line i.
        select_source: the same for every choice; without it a part of the training pairs is set aside.
        select_target: their translations.
        test_source: the same for the results.
        test_target: their translations.
        train_file: instead, a csv, tsv, jsonl or parquet file with a column for each side.
        select_file: the same for every choice.
        test_file: the same for the results.
        columns: names of the columns of a csv or tsv file that has no header line.
        check_header: whether a first line that looks like a header is refused where ``columns`` are given; false takes it for
            an example.
        source_column: column of the sentence; in data sets with one column ``translation``, the language in it.
        target_column: the same of the translation.
        skip_empty: leave out training pairs with an empty side, instead of refusing them. ``skip_unfit_pairs`` is the same for
            pairs of the other splits.
    """

    reader: ClassVar[str] = "training.data.translation:ParallelTextData"

    train_source: LocalPath | None = None
    train_target: LocalPath | None = None
    select_source: LocalPath | None = None
    select_target: LocalPath | None = None
    test_source: LocalPath | None = None
    test_target: LocalPath | None = None
    train_file: LocalPath | None = None
    select_file: LocalPath | None = None
    test_file: LocalPath | None = None
    columns: list[str] | None = None
    check_header: bool = True
    source_column: str = "source"
    target_column: str = "target"
    select_fraction: float = 0.02
    skip_empty: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train", "select", "test"):
            source, target = getattr(self, f"{name}_source"), getattr(self, f"{name}_target")
            if (source is None) != (target is None):
                given, lacking = ("source", "target") if target is None else ("target", "source")
                raise GateError(f"--data.{name}_{given} is given but --data.{name}_{lacking} is not; parallel text needs both")
            if source is not None and getattr(self, f"{name}_file") is not None:
                raise GateError(
                    f"--data.{name}_source and --data.{name}_file are both given; give aligned files or one file with columns"
                )
        self.check_source(self.local, named="source")

    @property
    def local(self) -> dict[str, tuple[str, ...]]:
        """The local files by split: two aligned ones, or one with columns."""
        found: dict[str, tuple[str, ...]] = {}
        for name in ("train", "select", "test"):
            aligned = (getattr(self, f"{name}_source"), getattr(self, f"{name}_target"))
            files = aligned if aligned[0] is not None else (getattr(self, f"{name}_file"),)
            if files[0] is not None:
                found[name] = files
        return found


@dataclass(frozen=True)
class SyntheticTranslation(Generated, TranslationOptions):
    """The embedded language pair: a small generated language and its translation.

    Args:
        max_modifiers: phrases behind the subject and behind the object, at most.
    """

    reader: ClassVar[str] = "training.data.synthetic_text:SyntheticTranslationData"

    train_rows: int = 8192
    max_modifiers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_modifiers", least=0)


DocumentsAre = Literal["blank_line", "line", "file"]


@dataclass(frozen=True)
class DocumentOptions(TrainedTokenizer):
    """Options of all running text. Documents are cut into blocks of ``max_length`` tokens, and a block is an example.

    Args:
        batch_size: blocks per training step and device, and blocks per batch when heads are scored.
        packing: whether a block is filled with several documents that do not see each other; false gives every document blocks
            of its own, filled up with padding.
    """

    max_length: int = 256
    batch_size: int = 16
    eval_batch_size: int = 16
    score_rows: int = 256
    packing: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "batch_size", least=1)
        if self.max_length < 2:
            raise GateError(f"max_length is {self.max_length}; expected at least 2 tokens")


@dataclass(frozen=True)
class Documents(MoreTests, DocumentOptions):
    """Running text for a language model, from local files or a data set of the hub.

    Args:
        train_file: training documents: a text file (``.txt``), or a csv, tsv, jsonl or parquet file with a column of documents;
            ``.gz`` is unpacked.
        test_file: the same for the results.
        select_file: the same for every choice; without it a part of the training documents is set aside.
        more_tests: further files for results by their names, such as {news: news.txt}, whose metrics are added to those of the
            test file, as test_news_perplexity; with ``dataset``, names of its splits.
        documents: where a document of a text file ends: at a ``blank_line``, with each ``line``, or with the ``file``.
        text_column: column of the documents in files and data sets that have columns (default: the one called text, or the only
            one).
        streaming: whether documents are read during the run, so that memory does not depend on their number.
        train_blocks: with streaming, blocks of a pass: what an epoch is.
        kept_blocks: with streaming, training blocks that are kept in memory for scores and searches.
        select_blocks: with streaming, blocks of the selection split, at most.
        test_blocks: with streaming, blocks of the test split, and of each further one, at most.
        shuffle_buffer: with streaming, documents among which the next one is drawn; 1 leaves them in their order.
    """

    reader: ClassVar[str] = "training.data.documents:documents_data"
    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "word_perplexity", "byte_perplexity", "accuracy", "loss")

    documents: DocumentsAre = "blank_line"
    text_column: str | None = None
    select_fraction: float = 0.05
    streaming: bool = False
    train_blocks: int | None = None
    kept_blocks: int = 2048
    select_blocks: int = 256
    test_blocks: int = 1024
    shuffle_buffer: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "kept_blocks", "select_blocks", "test_blocks", "shuffle_buffer", least=1)
        if not self.streaming:
            if self.train_blocks is not None:
                raise GateError(
                    f"train_blocks is {self.train_blocks}, which is of streams; add --data.streaming true, or leave it out"
                )
            return
        if self.train_blocks is None:
            raise GateError(
                "a stream has no length of its own; say with --data.train_blocks how many blocks an epoch has, such as 10000"
            )
        check_range(self, "train_blocks", least=1)
        if self.num_workers:
            raise GateError(
                f"num_workers is {self.num_workers}, but blocks of a stream come one behind the other; leave it at 0"
            )
        if self.documents == "file":
            raise GateError("documents is 'file', and a file that is one document cannot be streamed; give line or blank_line")


@dataclass(frozen=True)
class SyntheticDocuments(Generated, DocumentOptions):
    """The embedded running text: small stories in a generated language, whose words follow from words far before them.

    Args:
        max_distractors: nouns between subject and verb, at most.
    """

    reader: ClassVar[str] = "training.data.synthetic_text:SyntheticDocumentsData"

    max_distractors: int = 2
    max_length: int = 128
    batch_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_distractors", least=0)
