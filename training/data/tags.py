"""Sentences with a tag for each word, from a hub data set or from local files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
import xxhash
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerBase

from gates.errors import GateError
from gates.export.checkpoint import check_known
from training.config.data import Tags
from training.data.base import SPLITS, RunBatches, TaskData
from training.data.tagged_files import Tagged, check_tags, choose_lists, read_tagged, tagged_lists
from training.data.text import padding_tokenizer, read_hub, set_aside
from training.tasks import TokenClassification
from training.tasks.base import IGNORED
from training.tasks.loading import check_class
from training.tasks.token_classification import Scheme, scheme_of, stray_tag

# Sentences of words as pieces of a tokenizer, with the word that every piece belongs to.

AT_ONCE = 1000


@dataclass(frozen=True)
class Pieces:
    """A sentence as the model reads it.

    Args:
        ids: tokens, special ones included.
        words: the word of each token, by number; -1 for special tokens.
    """

    ids: list[int]
    words: list[int]


def encode_words(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sequence[str]], limit: int | None
) -> list[Pieces | None]:
    """The pieces of every sentence; None for a sentence that is longer than the model takes, or has no piece.

    A tokenizer that tells words apart by the space before them gets it before every word but the first.

    Args:
        tokenizer: a fast one, which alone says what belongs to which word.
        sentences: their words.
        limit: the most tokens that the model takes; None for any number.

    Raises:
        GateError: for a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise GateError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not say which pieces make a word; give a model with a "
            "tokenizer.json"
        )
    space = " " if _spaces_matter(tokenizer) else ""
    found: list[Pieces | None] = []
    for first in range(0, len(sentences), AT_ONCE):
        part = [[words[0], *(space + word for word in words[1:])] for words in sentences[first : first + AT_ONCE]]
        encoded = tokenizer(part, is_split_into_words=True, truncation=False, verbose=False)
        for row, ids in enumerate(encoded["input_ids"]):
            words = [-1 if word is None else word for word in encoded.word_ids(row)]
            fits = (limit is None or len(ids) <= limit) and max(words, default=-1) >= 0
            found.append(Pieces(list(ids), words) if fits else None)
    return found


def _spaces_matter(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a word has other pieces behind a space."""
    alone, spaced = (
        tokenizer([["a", word]], is_split_into_words=True, add_special_tokens=False)["input_ids"][0] for word in ("a", " a")
    )
    return bool(alone != spaced)


LEAVE_OUT_AT_MOST = 0.5
"""Share of the training sentences that may be too long."""


class TagsData(TaskData):
    """Sentences with a tag for each word. The tag of a word is the label of its first piece; its other pieces and the special
    tokens have none.

    Args:
        options: what the data are told.

    Attributes:
        labels: the tags, in their order.
        scheme: how they stand for entities; None where they do not.
    """

    options: Tags

    def __init__(self, options: Tags) -> None:
        super().__init__(options)
        self.labels: list[str] = []
        self.scheme: Scheme | None = None

    @property
    def score_batch_size(self) -> int:
        return self.options.batch_size

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
            hub = read_hub(options.dataset, options.subset, options.split_names, instead="--data.train_file")
            found = {name: self._of_hub(name, split) for name, split in hub.items()}
        if "select" not in found:
            columns = {"words": [own.words for own in found["train"]], "tags": [own.tags for own in found["train"]]}
            try:
                halves = set_aside(Dataset.from_dict(columns), options.select_fraction)
            except ValueError as error:
                raise GateError(
                    f"select_fraction is {options.select_fraction}, which leaves nothing of {len(found['train'])} sentences to "
                    "train on; give a smaller share, or a --data.select_file"
                ) from error
            found |= {
                name: [Tagged(*own) for own in zip(half["words"][:], half["tags"][:], strict=True)]
                for name, half in halves.items()
            }
        return found

    def _of_hub(self, name: str, split: Dataset) -> list[Tagged]:
        where = f"the {name} split"
        words, tags = choose_lists(where, split.column_names, self.options)
        inner = getattr(split.features[tags], "feature", None)
        values = split[tags][:]
        if isinstance(inner, datasets.ClassLabel):
            if any(number < 0 for row in values for number in row):
                raise GateError(f"{where} has hidden tags; choose another")
            values = [[inner.names[number] for number in row] for row in values]
        found = tagged_lists(split[words][:], values, where)
        if not found:
            raise GateError(f"{where} is empty; expected at least one sentence")
        return found

    def _find_scheme(self, sentences: dict[str, list[Tagged]]) -> Scheme | None:
        """How the tags stand for entities, if they do and all of them are whole.

        Raises:
            GateError: if they do not, and entities are what is to be measured.
        """
        asked, scheme = self.options.metric == "entity_f1", scheme_of(self.labels)
        if scheme is None:
            if asked:
                raise GateError(
                    "--data.metric entity_f1 is of BIO or IOBES tags such as B-PER, and the tags are "
                    f"{', '.join(self.labels[:8])}; choose token_accuracy"
                )
            return None
        for name, split in sentences.items():
            for row, sentence in enumerate(split, 1):
                if (place := stray_tag(sentence.tags, scheme)) is not None:
                    said = (
                        f"the {name} split has the tag {sentence.tags[place]!r} (sentence {row}, word {place + 1}) outside "
                        f"of a whole {scheme} entity"
                    )
                    if asked:
                        raise GateError(f"{said}; correct it, in IOB1 write B- at the first word of every entity")
                    self.notices.append(f"{said}, so that no F1 of entities is told")
                    return None
        return scheme

    def _encode(self, name: str, sentences: list[Tagged]) -> Dataset:
        """The pieces of a split's sentences with their labels, without those that are too long."""
        assert self.tokenizer is not None
        number = {tag: position for position, tag in enumerate(self.labels)}
        limit = min(self.options.max_length, self.tokenizer.model_max_length)
        pieces = encode_words(self.tokenizer, [sentence.words for sentence in sentences], None)
        self._check_lengths(name, [0 if own is None else len(own.ids) for own in pieces], limit)
        ids, labels, lost = [], [], 0
        for own, sentence in zip(pieces, sentences, strict=True):
            lost += len(sentence.words) - (0 if own is None else len({*own.words} - {-1}))
            if own is not None and len(own.ids) <= limit:
                ids.append(own.ids)
                labels.append(_first_pieces(own, [number[tag] for tag in sentence.tags]))
        if lost:
            self.notices.append(f"{lost} words of the {name} split are nothing to the tokenizer, and have no part in results")
        return Dataset.from_dict({"input_ids": ids, "labels": labels, "length": [len(own) for own in ids]})

    def _check_lengths(self, name: str, lengths: list[int], limit: int) -> None:
        """Raises :class:`GateError` for sentences that are too long, unless they may be left out."""
        long, longest = np.flatnonzero(np.array(lengths) > limit), int(np.argmax(lengths))
        if not max(lengths):
            raise GateError(f"the tokenizer makes nothing of the {name} split's words; give the model's own tokenizer")
        if not len(long):
            return
        mend = "raise --data.max_length as far as the model allows, or shorten it"
        if name != "train" and not self.options.skip_long_sentences:
            raise GateError(
                f"sentence {longest + 1} of the {name} split has {lengths[longest]} tokens, more than {limit}; {mend}, or set "
                "--data.skip_long_sentences true"
            )
        if len(long) > (LEAVE_OUT_AT_MOST if name == "train" else 1) * len(lengths) or len(long) == len(lengths):
            raise GateError(f"{len(long)} of {len(lengths)} {name} sentences have more than {limit} tokens; {mend}")
        self.notices.append(f"{len(long)} of {len(lengths)} {name} sentences are left out: they have more than {limit} tokens")

    @property
    def task(self) -> TokenClassification:
        return TokenClassification(self.labels, self.scheme, self.options.metric)

    def fingerprint(self) -> str:
        """Of the encoded splits and their order, of the tags' names, and of the metric."""
        return xxhash.xxh3_128(json.dumps([super().fingerprint(), self.labels, self.options.metric]).encode()).hexdigest()

    def collate(self, split: str) -> PadWords:
        assert self.tokenizer is not None
        return PadWords(int(self.tokenizer.pad_token_id))

    def batches_of_run(self, *, epochs: float, first: int, rank: int, world: int) -> RunBatches:
        lengths = self.splits["train"]["length"][:]
        return RunBatches(lengths, self.options.batch_size, epochs=epochs, seed=self.seed, first=first, rank=rank, world=world)


class PadWords:
    """Makes a batch: sentences padded on the right to the longest; labels are -100 there.

    Args:
        pad: id of the padding token.
    """

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "input_ids": _padded([row["input_ids"] for row in rows], self.pad),
            "attention_mask": _padded([[1] * row["length"] for row in rows], 0),
            "labels": _padded([row["labels"] for row in rows], IGNORED),
        }


def _first_pieces(pieces: Pieces, numbers: list[int]) -> list[int]:
    """The label of every token: that of its word at the word's first piece, and none elsewhere."""
    before = [-1, *pieces.words[:-1]]
    return [
        numbers[word] if word >= 0 and word != previous else IGNORED
        for word, previous in zip(pieces.words, before, strict=True)
    ]


def _padded(rows: list[list[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
