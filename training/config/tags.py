"""Words with a tag each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from training.config.classification import SentenceOptions
from training.config.data_base import FilesOrHub
from training.config.paths import HubName, LocalPath

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
        select_fraction: share of the training sentences set aside for selection when there is no split for it.
        tokenizer: hub name or folder; by default the model's.
        dataset: hub name of a data set instead of files.
        subset: its configuration.
        train_split: name of its training split.
        select_split: name of its selection split.
        test_split: name of its test split.
    """

    reader: ClassVar[str] = "training.data.tags:TagsData"

    train_file: LocalPath | None = None
    test_file: LocalPath | None = None
    select_file: LocalPath | None = None
    words_column: str | None = None
    tags_column: str | None = None
    metric: TagMetric = "token_accuracy"
    skip_long_sentences: bool = False
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
