"""What all running text has in common: a tokenizer, documents cut into blocks, and batches of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from gates.errors import GateError
from gates.export.vocabulary import check_known
from training.config.data import DocumentOptions
from training.config.data_base import MORE
from training.data.base import Batches, TaskData, with_more_tests
from training.data.batches import RunBatches
from training.data.packing import packed, positions
from training.data.subwords import train_subwords
from training.tasks.causal_lm import CausalLM, check_causal
from training.tasks.encoding import IGNORED, encode_documents
from training.tasks.loading import read_tokenizer

TOKENIZER = "tokenizer"
"""Folder of the tokenizer in a run's directory."""
ENCODED_AT_ONCE = 1000
"""Documents."""


def text_column(split: str, columns: Sequence[str], wanted: str | None) -> str:
    """The column of documents in a split: the one that is wanted, the one called text, or the only one.

    Raises:
        GateError: if there is none.
    """
    if wanted is None:
        wanted = "text" if "text" in columns or len(columns) != 1 else columns[0]
    if wanted not in columns:
        mend = "Set --data.text_column" if not split.startswith(MORE) else "Rename it: all files have one name for it"
        raise GateError(f"the {split} split has no column {wanted!r}; it has {', '.join(map(repr, columns))}. {mend}")
    return wanted


class TextBlocks(TaskData):
    """Documents of running text, cut into blocks of ``max_length`` tokens. Subclasses read the documents.

    Args:
        options: what the data are told.
    """

    options: DocumentOptions

    def __init__(self, options: DocumentOptions) -> None:
        super().__init__(options)
        self.tokenizer_name: str | None = options.tokenizer

    @property
    def score_batch_size(self) -> int:
        return self.options.batch_size

    @abstractmethod
    def load_documents(self) -> dict[str, list[str]]:
        """The texts of the three splits, and of further test splits."""

    def check_backbone(self, config: Any, name: str) -> None:
        check_causal(config, name)

    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        if self.splits:
            return
        documents = self.load_documents()
        names = with_more_tests(documents)
        for name in names:
            if not any(map(str.strip, documents[name])):
                raise GateError(f"the {name} split has no text; expected at least one document")
        self.tokenizer = self.load_tokenizer(backbone, documents["train"])
        self.splits = {name: self._encode(name, documents[name]) for name in names}
        check_known(self.tokenizer, self.splits["train"]["input_ids"], repr(self.tokenizer.name_or_path))

    def use_files_of(self, run: Path) -> None:
        """A vocabulary that was trained for the earlier run: its weights mean nothing with another."""
        if self.tokenizer_name is None and (run / TOKENIZER).is_dir():
            self.tokenizer_name = str(run / TOKENIZER)

    def write_files(self, run: Path) -> None:
        assert self.tokenizer is not None
        self.tokenizer.save_pretrained(run / TOKENIZER)

    def load_tokenizer(self, backbone: str | None, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        """The tokenizer that is named, the backbone's, or a new one of the training texts."""
        name = self.tokenizer_name or backbone
        if name is not None:
            return read_tokenizer(name)
        options = self.options
        return train_subwords(texts, kind=options.subwords, vocab_size=options.vocab_size, max_length=options.max_length)

    def _encode(self, name: str, texts: Iterable[str]) -> Dataset:
        """The blocks of a split."""
        return self.as_split(name, self.rows_of(texts, at_once=ENCODED_AT_ONCE))

    def rows_of(self, texts: Iterable[str], *, at_once: int) -> Iterator[dict[str, Any]]:
        """Blocks of texts as they come, each with the bytes and words of the text that it stands for.

        Args:
            texts: of documents; those that say nothing are left out.
            at_once: documents that are read and tokenized together.
        """
        assert self.tokenizer is not None
        tokenizer, sizes = self.tokenizer, dict[int, tuple[int, int]]()

        def encoded() -> Iterator[list[int]]:
            said, number = (text for text in texts if text.strip()), count()
            while several := list(islice(said, at_once)):
                for text, ids in zip(several, encode_documents(tokenizer, several), strict=True):
                    sizes[next(number)] = (len(text.encode()), len(text.split()))
                    yield ids

        for block in packed(encoded(), self.options.max_length, packing=self.options.packing):
            yield {
                "input_ids": block.input_ids,
                "labels": block.labels,
                "starts": block.starts,
                "bytes": sum(sizes[number][0] * part for number, part in block.shares),
                "words": sum(sizes[number][1] * part for number, part in block.shares),
                "length": len(block.input_ids),
            }
            last, _ = block.shares[-1]  # which may go on in the next block
            while (oldest := next(iter(sizes))) < last:
                del sizes[oldest]

    def as_split(self, name: str, rows: Iterable[Mapping[str, Any]]) -> Dataset:
        """Blocks as a split."""
        rows = list(rows)
        if name != "train":
            self._notice_unknown(name, [row["labels"] for row in rows])
        columns = ("input_ids", "labels", "starts", "bytes", "words", "length")
        return Dataset.from_dict({column: [row[column] for row in rows] for column in columns})

    def _notice_unknown(self, name: str, labels: Sequence[Sequence[int]]) -> None:
        """A model predicts one unknown token for all that the tokenizer does not know, so perplexities leave that out."""
        unknown = None if self.tokenizer is None else self.tokenizer.unk_token_id
        if unknown is None or unknown == getattr(self.tokenizer, "eos_token_id", None):  # GPT-2 names its end token so too
            return
        found, total = sum(list(own).count(unknown) for own in labels), sum(map(len, labels))
        if found:
            self.notices.append(
                f"{found} of {total} tokens of the {name} split are unknown to the tokenizer; a perplexity per word or byte is "
                "too low by what they would have said"
            )

    @property
    def task(self) -> CausalLM:
        return CausalLM(packing=self.options.packing, max_length=self.options.max_length)

    def collate(self, split: str) -> StackBlocks:
        return StackBlocks(packing=self.options.packing)

    def batches_of_run(self, *, epochs: float, first: int, rank: int, world: int) -> Batches:
        lengths = self.splits["train"]["length"][:]
        return RunBatches(lengths, self.options.batch_size, epochs=epochs, seed=self.seed, first=first, rank=rank, world=world)


class StackBlocks:
    """Makes a batch: blocks padded on the right to the longest; labels are -100 there.

    Args:
        packing: whether blocks hold several documents; they have positions that start again with each, and no mask then.
    """

    def __init__(self, *, packing: bool) -> None:
        self.packing = packing

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = {
            "input_ids": _padded([row["input_ids"] for row in rows], 0),
            "labels": _padded([row["labels"] for row in rows], IGNORED),
            "bytes": torch.tensor([row["bytes"] for row in rows], dtype=torch.float64),
            "words": torch.tensor([row["words"] for row in rows], dtype=torch.float64),
        }
        longest = batch["input_ids"].shape[1]
        if not self.packing:
            return batch | {"attention_mask": (batch["labels"] != IGNORED).long()}
        # Padding is one more document, which none of the others sees.
        starts = [row["starts"] + [row["length"]] * (row["length"] < longest) for row in rows]
        return batch | {"position_ids": torch.tensor([positions(own, longest) for own in starts])}


def _padded(rows: list[list[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
