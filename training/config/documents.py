"""Running text, for language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gates.errors import GateError
from training.config.checks import at_least_0, at_least_1
from training.config.data_base import DataOptions, Generated, MoreTests, check_rows, check_text_seed
from training.config.paths import HubName, LocalPath
from training.config.translation import Subwords

DocumentsAre = Literal["blank_line", "line", "file"]


@dataclass(frozen=True)
class DocumentOptions(DataOptions):
    """What all running text is told. Documents are cut into blocks of ``max_length`` tokens, and a block is an example.

    Args:
        batch_size: blocks per training step and device, and blocks per batch when heads are scored.
        packing: whether a block is filled with several documents, none of which sees another; false gives every document blocks
            of its own, filled up with padding.
        tokenizer: hub name or folder; by default the model's, and without a pretrained model one that is trained on the
            training documents.
        subwords: kind of a trained tokenizer: ``bpe`` or ``unigram``.
        vocab_size: largest number of tokens of a trained tokenizer.
    """

    max_length: int = 256
    batch_size: int = 16
    eval_batch_size: int = 16
    score_rows: int = 256
    packing: bool = True
    tokenizer: HubName | None = None
    subwords: Subwords = "bpe"
    vocab_size: int = 8000

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_1(self, "batch_size", "vocab_size")
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
        more_tests: further files for results by their names, such as {news: news.txt}, whose metrics stand beside those of the
            test file, as test_news_perplexity; with ``dataset``, names of its splits.
        documents: where a document of a text file ends: at a ``blank_line``, with each ``line``, or with the ``file``.
        text_column: column of the documents in files and data sets that have columns (default: the one called text, or the only
            one).
        select_fraction: share of the training documents set aside for selection when there is no split for it.
        dataset: hub name of a data set, such as ``wikitext``, instead of files.
        subset: its configuration, such as ``wikitext-2-raw-v1``.
        train_split: name of its training split.
        select_split: name of its selection split.
        test_split: name of its test split.
        streaming: whether documents are read while the run goes on, so that memory does not depend on how many there are.
        train_blocks: with streaming, blocks of a pass: what an epoch is.
        kept_blocks: with streaming, training blocks that are kept in memory, of which scores and searches take theirs.
        select_blocks: with streaming, blocks of the selection split, at most.
        test_blocks: with streaming, blocks of the test split, and of each further one, at most.
        shuffle_buffer: with streaming, documents among which the next one is drawn; 1 leaves them in their order.
    """

    reader: ClassVar[str] = "training.data.streamed_documents:documents_data"
    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "word_perplexity", "byte_perplexity", "accuracy", "loss")

    train_file: LocalPath | None = None
    test_file: LocalPath | None = None
    select_file: LocalPath | None = None
    more_tests: dict[str, LocalPath] | None = None
    documents: DocumentsAre = "blank_line"
    text_column: str | None = None
    select_fraction: float = 0.05
    dataset: HubName | None = None
    subset: str | None = None
    train_split: str = "train"
    select_split: str | None = None
    test_split: str = "test"
    streaming: bool = False
    train_blocks: int | None = None
    kept_blocks: int = 2048
    select_blocks: int = 256
    test_blocks: int = 1024
    shuffle_buffer: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_source()
        at_least_1(self, "kept_blocks", "select_blocks", "test_blocks", "shuffle_buffer")
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
        at_least_1(self, "train_blocks")
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
        train_rows: training documents.
        select_rows: documents of the selection split, on which every choice is made.
        test_rows: test documents.
        max_distractors: nouns between subject and verb, at most.
        text_seed: of the generated text. Runs with other seeds see the same text, so that their results can be compared.
    """

    reader: ClassVar[str] = "training.data.synthetic_documents:SyntheticDocumentsData"

    train_rows: int = 2048
    select_rows: int = 256
    test_rows: int = 512
    max_distractors: int = 2
    text_seed: int = 0
    max_length: int = 128
    batch_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rows(self.rows, least=2)
        check_text_seed(self.text_seed)
        at_least_0(self, "max_distractors")
