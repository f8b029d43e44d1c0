"""Sentences with a tag for each word, from a hub dataset or from local files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerBase

from gates.errors import GateError
from gates.export.checkpoint import check_known
from training.config.data import Tags
from training.data.base import SPLITS, TaskData, padded, set_aside_rows
from training.data.tagged_files import Tagged, check_tags, choose_lists, read_tagged, tagged_lists
from training.data.text import named_labels, padding_tokenizer, read_hub
from training.tasks import TokenClassification
from training.tasks.base import IGNORED
from training.tasks.loading import check_class
from training.tasks.token_classification import Scheme, scheme_of, stray_tag


@dataclass(frozen=True)
class Pieces:
    """The tokens of a sentence with special ones, and the word of each token, by number; -1 for special tokens."""

    ids: list[int]
    words: list[int]


def encode_words(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sequence[str]], limit: int | None
) -> list[Pieces | None]:
    """Return the pieces of every sentence; None for a sentence of more than ``limit`` tokens, or without a piece.

    A tokenizer that marks the space before a word gets a space before every word but the first.
    """
    if not tokenizer.is_fast:
        raise GateError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not map pieces to words; give a model with a "
            "tokenizer.json"
        )
    alone, spaced = (
        tokenizer([["a", word]], is_split_into_words=True, add_special_tokens=False)["input_ids"][0] for word in ("a", " a")
    )
    space = " " if alone != spaced else ""
    found: list[Pieces | None] = []
    for first in range(0, len(sentences), 1000):
        part = [[words[0], *(space + word for word in words[1:])] for words in sentences[first : first + 1000]]
        encoded = tokenizer(part, is_split_into_words=True, truncation=False, verbose=False)
        for row, ids in enumerate(encoded["input_ids"]):
            words = [-1 if word is None else word for word in encoded.word_ids(row)]
            fits = (limit is None or len(ids) <= limit) and max(words, default=-1) >= 0
            found.append(Pieces(list(ids), words) if fits else None)
    return found


class TagsData(TaskData):
    """Sentences with a tag for each word, the label of its first piece. Other pieces and special tokens have no label.

    Attributes:
        scheme: The scheme by which the tags mark entities; None if they do not.
    """

    options: Tags
    unit = "sentences"

    def __init__(self, options: Tags) -> None:
        super().__init__(options)
        self.scheme: Scheme | None = None

    def check_backbone(self, config: Any, name: str) -> None:
        check_class(AutoModelForTokenClassification, config, name, "tag words; give one such as BERT")

    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        if self.splits:
            return
        self.tokenizer = padding_tokenizer(self.options.tokenizer or backbone)
        sentences = self._read()
        self.labels = check_tags(sentences, stated_labels)
        self.scheme = self._find_scheme(sentences)
        self.splits = {name: self._encode(name, sentences[name]) for name in SPLITS}
        check_known(self.tokenizer, self.splits["train"]["input_ids"], repr(self.tokenizer.name_or_path))

    def _read(self) -> dict[str, list[Tagged]]:
        options = self.options
        if options.dataset is None:
            found = {name: read_tagged(file, options) for name, file in options.files.items()}
        else:
            found = {name: self._of_hub(name, split) for name, split in read_hub(options, instead="--data.train_file").items()}
        if "select" not in found:
            halves = set_aside_rows(len(found["train"]), options.select_fraction, "sentences")
            found["train"], found["select"] = ([found["train"][row] for row in rows] for rows in halves)
            self.set_aside = True
        return found

    def _of_hub(self, name: str, split: Dataset) -> list[Tagged]:
        where = f"the {name} split"
        words, tags = choose_lists(where, split.column_names, self.options)
        inner = getattr(split.features[tags], "feature", None)
        values = [named_labels(row, inner, where) for row in split[tags][:]]
        found = tagged_lists(split[words][:], values, where)
        if not found:
            raise GateError(f"{where} is empty; expected at least one sentence")
        return found

    def _find_scheme(self, sentences: dict[str, list[Tagged]]) -> Scheme | None:
        """Return the scheme by which the tags mark entities, if all entities are whole."""
        measured, scheme = self.options.metric == "entity_f1", scheme_of(self.labels)
        if scheme is None:
            if measured:
                raise GateError(
                    "--data.metric entity_f1 needs BIO or IOBES tags such as B-PER, but the tags are "
                    f"{', '.join(self.labels[:8])}; choose token_accuracy"
                )
            return None
        for name, split in sentences.items():
            for row, sentence in enumerate(split, 1):
                if (place := stray_tag(sentence.tags, scheme)) is not None:
                    stray = (
                        f"the {name} split has the tag {sentence.tags[place]!r} (sentence {row}, word {place + 1}) outside "
                        f"of a whole {scheme} entity"
                    )
                    if measured:
                        raise GateError(f"{stray}; correct it (in IOB1, write B- at the first word of every entity)")
                    self.notices.append(f"{stray}, so there is no F1 of entities")
                    return None
        return scheme

    def _encode(self, name: str, sentences: list[Tagged]) -> Dataset:
        assert self.tokenizer is not None
        number = {tag: position for position, tag in enumerate(self.labels)}
        limit = min(self.options.max_length, self.tokenizer.model_max_length)
        pieces = encode_words(self.tokenizer, [sentence.words for sentence in sentences], None)
        self._check_lengths(name, [0 if own is None else len(own.ids) for own in pieces], limit)
        ids, labels, lost = [], [], 0
        for own, sentence in zip(pieces, sentences, strict=True):
            lost += len(sentence.words) - (0 if own is None else len({*own.words} - {-1}))
            if own is not None and len(own.ids) <= limit:
                before = [-1, *own.words[:-1]]
                ids.append(own.ids)
                labels.append(
                    [
                        number[sentence.tags[word]] if word >= 0 and word != previous else IGNORED
                        for word, previous in zip(own.words, before, strict=True)
                    ]
                )
        if lost:
            self.notices.append(f"{lost} words of the {name} split have no token, and do not count in results")
        return Dataset.from_dict({"input_ids": ids, "labels": labels, "length": [len(own) for own in ids]})

    def _check_lengths(self, name: str, lengths: list[int], limit: int) -> None:
        """Refuse sentences that are too long, unless the options allow to leave them out."""
        long, longest = np.flatnonzero(np.array(lengths) > limit), int(np.argmax(lengths))
        if not max(lengths):
            raise GateError(f"no word of the {name} split has a token; give the model's own tokenizer")
        if not len(long):
            return
        mend = "raise --data.max_length as far as the model allows, or shorten it"
        if name != "train" and not self.options.skip_long_sentences:
            raise GateError(
                f"sentence {longest + 1} of the {name} split has {lengths[longest]} tokens, more than {limit}; {mend}, or set "
                "--data.skip_long_sentences true"
            )
        if len(long) > (0.5 if name == "train" else 1) * len(lengths) or len(long) == len(lengths):
            raise GateError(f"{len(long)} of {len(lengths)} {name} sentences have more than {limit} tokens; {mend}")
        self.notices.append(f"{len(long)} of {len(lengths)} {name} sentences are left out: they have more than {limit} tokens")

    @property
    def task(self) -> TokenClassification:
        return TokenClassification(self.labels, self.scheme, self.options.metric)

    def fingerprint(self) -> str:
        """Return a hash of the encoded splits, their order, the tags' names, and the metric."""
        return xxhash.xxh3_128(json.dumps([super().fingerprint(), self.labels, self.options.metric]).encode()).hexdigest()

    def collate(self, split: str) -> PadWords:
        assert self.tokenizer is not None
        return PadWords(int(self.tokenizer.pad_token_id))


@dataclass(frozen=True)
class PadWords:
    """Make a batch of sentences, padded on the right to the longest; labels are -100 there."""

    pad: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "input_ids": padded([row["input_ids"] for row in rows], self.pad),
            "attention_mask": padded([[1] * row["length"] for row in rows], 0),
            "labels": padded([row["labels"] for row in rows], IGNORED),
        }
