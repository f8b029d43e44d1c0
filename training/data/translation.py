"""What every data set of parallel text has in common: a tokenizer, a length filter, and batches of equally many tokens."""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gates.errors import GateError
from gates.export.vocabulary import check_known
from training.config.data import TranslationOptions
from training.data.base import SPLITS, TaskData
from training.data.languages import language_token, set_languages
from training.data.subwords import train_subwords
from training.data.token_batches import RunTokenBatches
from training.tasks.decoding import Decoding
from training.tasks.encoder_decoder import check_encoder_decoder
from training.tasks.encoding import IGNORED, encode_sources, encode_targets
from training.tasks.loading import read_tokenizer
from training.tasks.translation import Translation
from training.tasks.translation_metrics import make_scorer

TOKENIZER = "tokenizer"
"""Folder of the tokenizer in a run's directory."""
LENGTHS = {"source": "length", "target": "target_length"}
"""Columns of the splits with the tokens of each side."""
ENCODED_AT_ONCE = 10_000
"""Pairs: a tokenizer's answer takes some 10 kB for each, the ids that are kept of it a twentieth."""
LEAVE_OUT_AT_MOST = 0.5
"""Share of the training pairs that the length filter may leave out before it is taken for a mistake."""


class Pairs(NamedTuple):
    """Sentences and their translations, line by line."""

    source: list[str]
    target: list[str]


def chosen(pairs: Pairs, rows: np.ndarray) -> Pairs:
    """Some of the pairs, in the order of ``rows``."""
    return Pairs([pairs.source[row] for row in rows], [pairs.target[row] for row in rows])


class TranslationData(TaskData):
    """Parallel text.

    Training pairs that are too long or too unequal in length are left out; selection and test pairs are not, since BLEU is
    of a whole test set: there a pair that is too long or has an empty side is an error, unless ``skip_unfit_pairs`` is set.

    Args:
        options: what the data are told.

    Raises:
        GateError: for a tokenizer of BLEU whose package is not installed.
    """

    options: TranslationOptions

    def __init__(self, options: TranslationOptions) -> None:
        super().__init__(options)
        make_scorer("bleu", options.bleu_tokenize)  # raises where its package is missing
        self.tokenizer_name: str | None = options.tokenizer
        self.decoding = Decoding(options.beams, options.length_penalty, options.max_length)
        self.texts: dict[str, Pairs] = {}
        self.set_aside = False
        self.left_out = 0

    @property
    def score_batch_size(self) -> int:
        return self.options.eval_batch_size

    @abstractmethod
    def load_pairs(self) -> dict[str, Pairs]:
        """The three splits, checked but not filtered; sets ``set_aside`` if the selection split is a part of the training
        pairs."""

    # -- building ----------------------------------------------------------------------------------------------

    def check_backbone(self, config: Any, name: str) -> None:
        check_encoder_decoder(config, name)

    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        if self.splits:
            return
        self.texts = self.load_pairs()
        self.tokenizer = self.load_tokenizer(backbone)
        for name in SPLITS:
            self.splits[name] = self._encode(self.texts[name])
        for side in LENGTHS:
            check_known(self.tokenizer, self.splits["train"][side], repr(self.tokenizer.name_or_path))
        if self.set_aside:
            self._keep("select", self._fit("select"))
        else:
            self._check_lengths("select")
        self._check_lengths("test")
        self._drop_unfit_pairs()

    def use_files_of(self, run: Path) -> None:
        """A vocabulary that was trained for the earlier run: its weights mean nothing with another."""
        if self.tokenizer_name is None and (run / TOKENIZER).is_dir():
            self.tokenizer_name = str(run / TOKENIZER)

    def write_files(self, run: Path) -> None:
        assert self.tokenizer is not None
        self.tokenizer.save_pretrained(run / TOKENIZER)

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        """The tokenizer that is named, the backbone's, or a new one for both languages."""
        name = self.tokenizer_name or backbone
        if name is None:
            train = self.texts["train"]
            return train_subwords(
                [*train.source, *train.target],
                kind=self.options.subwords,
                vocab_size=self.options.vocab_size,
                max_length=self.options.max_length,
            )
        tokenizer = read_tokenizer(name)
        if tokenizer.pad_token_id is None:
            raise GateError(f"the tokenizer of {name!r} has no padding token, which an encoder-decoder needs; give another")
        set_languages(tokenizer, source=self.options.source_language, target=self.options.target_language)
        return tokenizer

    def _encode(self, pairs: Pairs) -> Dataset:
        assert self.tokenizer is not None
        parts = []
        for first in range(0, len(pairs.source), ENCODED_AT_ONCE):
            source, target = (texts[first : first + ENCODED_AT_ONCE] for texts in pairs)
            sources = encode_sources(self.tokenizer, source, prefix=self.options.source_prefix)
            targets = encode_targets(self.tokenizer, target)
            columns = {
                "row": list(range(first, first + len(sources))),
                "source": sources,
                "target": targets,
                "length": [len(ids) for ids in sources],
                "target_length": [len(ids) for ids in targets],
            }
            parts.append(Dataset.from_dict(columns))
        return concatenate_datasets(parts)

    def _check_lengths(self, name: str) -> None:
        """Pairs for evaluation that are too long refused, or left out if that is asked for."""
        sides = {side: np.asarray(self.splits[name][column][:]) for side, column in LENGTHS.items()}
        longest_allowed = self.options.max_length
        fits = np.maximum(*sides.values()) <= longest_allowed
        if fits.all():
            return
        if not self.options.skip_unfit_pairs:
            side = max(sides, key=lambda side: sides[side].max())
            longest = int(np.argmax(sides[side]))
            raise GateError(
                f"the {side} of pair {longest + 1} of the {name} split has {sides[side][longest]} tokens, more than "
                f"{longest_allowed}; raise --data.max_length, shorten the sentence, or set --data.skip_unfit_pairs true"
            )
        if not fits.any():
            raise GateError(f"every pair of the {name} split has more than {longest_allowed} tokens; raise --data.max_length")
        self.notices.append(
            f"{(~fits).sum()} of {len(fits)} {name} pairs are left out: they have more than {longest_allowed} tokens on a side"
        )
        self._keep(name, fits)

    def _keep(self, name: str, rows: np.ndarray) -> None:
        """Leave the other pairs of a split out, in texts and ids."""
        if not rows.all():
            self.texts[name] = chosen(self.texts[name], np.flatnonzero(rows))
            self.splits[name] = self._encode(self.texts[name])

    def _fit(self, name: str) -> np.ndarray:
        """Which pairs of a split are neither too long nor too unequal for training."""
        source, target = (np.asarray(self.splits[name][column][:]) for column in LENGTHS.values())
        longer, shorter = np.maximum(source, target), np.minimum(source, target)
        longest, ratio = self.options.max_length, self.options.max_ratio
        fits: np.ndarray = (longer <= longest) & (longer <= ratio * shorter)
        if (~fits).sum() > LEAVE_OUT_AT_MOST * len(fits):
            raise GateError(
                f"{(~fits).sum()} of {len(fits)} training pairs have more than {longest} tokens on a side, or sides "
                f"that differ by a factor of more than {ratio:g}; raise --data.max_length or --data.max_ratio, or "
                "check that the lines of both sides belong together"
            )
        return fits

    def _drop_unfit_pairs(self) -> None:
        """Training pairs that are too long or too unequal left out, unless they are too many."""
        fits = self._fit("train")
        self.left_out = int((~fits).sum())
        if self.left_out:
            self.notices.append(
                f"{self.left_out} of {len(fits)} training pairs are left out: they have more than {self.options.max_length} "
                f"tokens on a side, or sides that differ by a factor of more than {self.options.max_ratio:g}"
            )
            self.splits["train"] = self.splits["train"].select(np.flatnonzero(fits))

    @property
    def task(self) -> Translation:
        assert self.tokenizer is not None
        first = None if self.options.target_language is None else language_token(self.tokenizer, self.options.target_language)
        return Translation(
            self.tokenizer,
            label_smoothing=self.options.label_smoothing,
            sentence_loss=self.options.sentence_loss,
            bleu_tokenize=self.options.bleu_tokenize,
            decoding=replace(self.decoding, forced_first=first),
            beam_splits=tuple(self.options.beam_splits),
        )

    # -- batches -----------------------------------------------------------------------------------------------

    def batches_of_run(self, *, epochs: float, first: int, rank: int, world: int) -> RunTokenBatches:
        train = self.splits["train"]
        return RunTokenBatches(
            train["length"][:], train["target_length"][:], self.options.batch_tokens,
            epochs=epochs, seed=self.seed, first=first, rank=rank, world=world,
        )  # fmt: skip

    @property
    def order(self) -> str:
        return f"{super().order} {self.options.batch_tokens}"

    def fingerprint(self) -> str:
        """Of texts, order, and all that the task is told: how losses are computed and how translations are searched."""
        options = self.options
        settings: list[Any] = [options.label_smoothing, options.sentence_loss, options.beam_splits, asdict(self.task.decoding)]
        # As without the option, which experiments on disk had not.
        settings += [options.bleu_tokenize] * (options.bleu_tokenize != "13a")
        return xxhash.xxh3_128(json.dumps([super().fingerprint(), settings, self.texts]).encode()).hexdigest()

    def validation_interval(self, epochs: float) -> float:
        return min(1.0, self.options.validate_every / epochs)

    def collate(self, split: str) -> PadPairs:
        assert self.tokenizer is not None
        assert self.tokenizer.pad_token_id is not None
        return PadPairs(int(self.tokenizer.pad_token_id), self.texts[split].target if split in ("select", "test") else None)


class PadPairs:
    """Makes a batch: sources and targets padded on the right to the longest; labels are -100 there.

    Args:
        pad: id of the padding token.
        references: target texts of the whole split, to go with the batches as they are; None for none.
    """

    def __init__(self, pad: int, references: list[str] | None = None) -> None:
        self.pad = pad
        self.references = references

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        source = _padded([row["source"] for row in rows], self.pad)
        mask = _padded([[1] * row["length"] for row in rows], 0)
        labels = _padded([row["target"] for row in rows], IGNORED)
        batch: dict[str, Any] = {"input_ids": source, "attention_mask": mask, "labels": labels}
        if self.references is not None:
            batch["row"] = torch.tensor([row["row"] for row in rows])
            batch["reference"] = [self.references[row["row"]] for row in rows]
        return batch


def _padded(rows: list[list[int]], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
