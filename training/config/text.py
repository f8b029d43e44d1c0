"""Options of parallel text and of running text."""

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
"""The tokenizers of BLEU: ``13a`` is for languages with spaces between words."""


@dataclass(frozen=True)
class TranslationOptions(TrainedTokenizer):
    """Options of all parallel text.

    Args:
        batch_tokens: The number of tokens on the longer side of a training batch, with padding, per step and device.
        max_ratio: The largest ratio of the lengths of a training pair's sides in tokens. Must be at least 1.
        skip_unfit_pairs: Whether to leave out selection and test pairs that are too long or have an empty side. Scores are then
            not comparable with those of the whole set.
        source_prefix: The text before every source, such as ``translate English to German: `` for T5.
        source_language: The source language of a multilingual model, such as ``en_XX``.
        target_language: The target language of a multilingual model, such as ``ro_RO``.
        label_smoothing: The label smoothing of the training loss. Must be at least 0 and below 1.
        sentence_loss: Whether head scores use the ``mean`` or the ``sum`` of the losses of a sentence's tokens.
        bleu_tokenize: The tokenizer of BLEU; ``zh`` for Chinese, ``ja-mecab`` for Japanese.
        beams: The number of beams of beam search; 1 for greedy decoding.
        length_penalty: The power of the length by which the score of a beam is divided; above 0 it favours long translations.
        beam_splits: The splits to translate with beams too (default: test).
        validate_every: The number of epochs between validations; each translates the selection split.
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
    beam_splits: list[Literal["select", "test"]] = field(default_factory=lambda: ["test"])
    validate_every: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "batch_tokens", "beams", "max_ratio", least=1)
        check_range(self, "validate_every", above=0)
        if self.max_length > self.batch_tokens:
            raise GateError(
                f"max_length is {self.max_length}; expected at most batch_tokens ({self.batch_tokens}), which hold one sentence"
            )
        if not 0 <= self.label_smoothing < 1:
            raise GateError(f"label_smoothing is {self.label_smoothing}; expected a share from 0 to below 1, such as 0.1")


@dataclass(frozen=True)
class ParallelText(HubSplits, TranslationOptions):
    """Sentences and their translations, from local files or a dataset of the hub.

    Args:
        train_source: The file of training sentences, one on each line, also with ``.gz``. Implies ``--data ParallelText``.
        train_target: The file with the translation of line i of ``train_source`` in line i.
        select_source: The file of selection sentences, for every choice. Without it, a part of the training pairs is set aside.
        select_target: The file of their translations.
        test_source: The file of test sentences, for the results.
        test_target: The file of their translations.
        train_file: A csv, tsv, jsonl or parquet file with a column for each side, instead of two training files.
        select_file: The same for the selection pairs.
        test_file: The same for the test pairs.
        columns: The names of the columns of a csv or tsv file without a header line.
        check_header: Whether to refuse a first line that looks like a header although ``columns`` are given.
        source_column: The column of the sentence, or its language in a column ``translation``.
        target_column: The column of the translation, or its language in a column ``translation``.
        skip_empty: Whether to leave out training pairs with an empty side instead of refusing them. For other splits, use
            ``skip_unfit_pairs``.
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
                raise GateError(f"--data.{name}_{given} is given without --data.{name}_{lacking}; give both")
            if source is not None and getattr(self, f"{name}_file") is not None:
                raise GateError(f"--data.{name}_source and --data.{name}_file are both given; give one of them")
        self.check_source(self.local, named="source")

    @property
    def local(self) -> dict[str, tuple[str, ...]]:
        """The local files by split: two aligned files, or one with columns."""
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
        max_modifiers: The largest number of phrases after the subject, and after the object.
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
        batch_size: The number of blocks per training step and device, and per batch for head scores.
        packing: Whether several documents, which do not attend to each other, fill a block. Otherwise each document has its
            own blocks with padding.
    """

    max_length: int = 256
    batch_size: int = 16
    eval_batch_size: int = 16
    score_rows: int = 256
    packing: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "batch_size", least=1)
        check_range(self, "max_length", least=2)


@dataclass(frozen=True)
class Documents(MoreTests, DocumentOptions):
    """Running text for a language model, from local files or a dataset of the hub.

    Args:
        train_file: The file of training documents: a text file (``.txt``), or a csv, tsv, jsonl or parquet file with a column
            of documents, also with ``.gz``.
        documents: The end of a document in a text file: a ``blank_line``, each ``line``, or the ``file``.
        text_column: The column of the documents (default: the one called text, or the only one).
        streaming: Whether to read documents during the run, so that memory does not depend on their number.
        train_blocks: The number of blocks in an epoch of a stream.
        kept_blocks: The number of training blocks of a stream to keep in memory for scores and searches.
        select_blocks: The largest number of blocks of a stream's selection split.
        test_blocks: The largest number of blocks of a stream's test split, and of each further one.
        shuffle_buffer: The number of documents of a stream from which the next one is drawn; 1 keeps their order.
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
                    f"train_blocks is {self.train_blocks}, but only a stream uses it; add --data.streaming true, or remove it"
                )
            return
        if self.train_blocks is None:
            raise GateError("a stream has no length; give the number of blocks in an epoch, such as --data.train_blocks 10000")
        check_range(self, "train_blocks", least=1)
        if self.num_workers:
            raise GateError(f"num_workers is {self.num_workers}, but a stream is read by one process; expected 0")
        if self.documents == "file":
            raise GateError("documents is 'file', but a stream needs several documents in a file; give line or blank_line")


@dataclass(frozen=True)
class SyntheticDocuments(Generated, DocumentOptions):
    """The embedded running text: small stories in a generated language with dependencies between distant words.

    Args:
        max_distractors: The largest number of nouns between subject and verb.
    """

    reader: ClassVar[str] = "training.data.synthetic_text:SyntheticDocumentsData"

    max_distractors: int = 2
    max_length: int = 128
    batch_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_distractors", least=0)
