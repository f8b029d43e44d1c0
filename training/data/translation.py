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
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gates.errors import GateError
from training.data.base import SPLITS, TaskData, check_positive
from training.data.languages import language_token, set_languages
from training.data.subwords import Subwords, train_subwords
from training.data.token_batches import RunTokenBatches
from training.tasks.decoding import Decoding
from training.tasks.encoder_decoder import check_encoder_decoder
from training.tasks.encoding import IGNORED, encode_sources, encode_targets
from training.tasks.translation import SentenceLoss, Translation
from training.tasks.translation_metrics import Tokenizer, make_scorer

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
        batch_tokens: tokens on the longer side of a batch, padding included, per step and device.
        eval_batch_size: pairs per batch in evaluation and when heads are scored.
        max_ratio: largest ratio of the lengths of a training pair's sides in tokens, at least 1.
        skip_unfit_pairs: leave selection and test pairs out that are too long or have an empty side, and say how many. Scores
            are then of the other pairs and not to be compared with those of the whole set.
        tokenizer: hub name or folder; by default the backbone's, and without a backbone one that is trained on the
            training pairs.
        subwords: kind of a trained tokenizer: ``bpe`` or ``unigram``.
        vocab_size: largest number of tokens of a trained tokenizer, for both languages together.
        source_prefix: text before every source, such as ``translate English to German: `` for T5.
        source_language, target_language: for multilingual models, their names in the tokenizer, such as ``en_XX``.
        label_smoothing, sentence_loss, bleu_tokenize, beam_splits: see :class:`training.tasks.translation.Translation`.
        beams, length_penalty: see :class:`training.tasks.decoding.Decoding`.
        validate_every: epochs between validations, each of which translates the selection split.
        kwargs: see :class:`training.data.base.TaskData`.
    """

    def __init__(
        self,
        *,
        batch_tokens: int = 4096,
        eval_batch_size: int = 64,
        max_ratio: float = 3.0,
        skip_unfit_pairs: bool = False,
        tokenizer: str | None = None,
        subwords: Subwords = "bpe",
        vocab_size: int = 8000,
        source_prefix: str = "",
        source_language: str | None = None,
        target_language: str | None = None,
        label_smoothing: float = 0.1,
        sentence_loss: SentenceLoss = "mean",
        bleu_tokenize: Tokenizer = "13a",
        beams: int = 4,
        length_penalty: float = 1.0,
        beam_splits: list[str] | None = None,
        validate_every: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(eval_batch_size=eval_batch_size, **kwargs)
        check_positive(batch_tokens=batch_tokens, vocab_size=vocab_size, beams=beams)
        if self.max_length > batch_tokens:
            raise GateError(
                f"max_length is {self.max_length} and batch_tokens {batch_tokens}; a batch must hold the longest sentence"
            )
        if not max_ratio >= 1:
            raise GateError(f"max_ratio is {max_ratio}; expected at least 1")
        if not 0 <= label_smoothing < 1:
            raise GateError(f"label_smoothing is {label_smoothing}; expected a share from 0 to below 1, such as 0.1")
        if not validate_every > 0:
            raise GateError(f"validate_every is {validate_every}; expected a number of epochs above 0")
        self.beam_splits = tuple(["test"] if beam_splits is None else beam_splits)
        if unknown := sorted({*self.beam_splits} - {"select", "test"}):
            raise GateError(f"beam_splits names {unknown[0]!r}; expected some of 'select' and 'test'")
        self.batch_tokens = batch_tokens
        self.max_ratio, self.skip_unfit_pairs = max_ratio, skip_unfit_pairs
        self.tokenizer_name = tokenizer
        self.subwords: Subwords = subwords
        self.vocab_size = vocab_size
        self.source_prefix = source_prefix
        self.source_language, self.target_language = source_language, target_language
        self.label_smoothing = label_smoothing
        self.sentence_loss: SentenceLoss = sentence_loss
        make_scorer("bleu", bleu_tokenize)  # raises where its package is missing
        self.bleu_tokenize: Tokenizer = bleu_tokenize
        self.decoding = Decoding(beams, length_penalty, self.max_length)
        self.validate_every = validate_every
        self.texts: dict[str, Pairs] = {}
        self.set_aside = False
        self.left_out = 0

    @property
    def score_batch_size(self) -> int:
        return self.eval_batch_size

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
                [*train.source, *train.target], kind=self.subwords, vocab_size=self.vocab_size, max_length=self.max_length
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except ImportError as error:
            raise GateError(
                f"the tokenizer of {name!r} needs a package that is not installed; pip install 'head-gates[translation]'"
            ) from error
        except (OSError, ValueError) as error:
            raise GateError(
                f"cannot load a tokenizer from {name!r}: it is neither a folder with tokenizer files nor a hub name that can "
                "be reached; check the path or the network"
            ) from error
        if tokenizer.pad_token_id is None:
            raise GateError(f"the tokenizer of {name!r} has no padding token, which an encoder-decoder needs; give another")
        set_languages(tokenizer, source=self.source_language, target=self.target_language)
        return tokenizer

    def _encode(self, pairs: Pairs) -> Dataset:
        assert self.tokenizer is not None
        parts = []
        for first in range(0, len(pairs.source), ENCODED_AT_ONCE):
            source, target = (texts[first : first + ENCODED_AT_ONCE] for texts in pairs)
            sources = encode_sources(self.tokenizer, source, prefix=self.source_prefix)
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
        sides = {side: np.asarray(self.splits[name][column]) for side, column in LENGTHS.items()}
        fits = np.maximum(*sides.values()) <= self.max_length
        if fits.all():
            return
        if not self.skip_unfit_pairs:
            side = max(sides, key=lambda side: sides[side].max())
            longest = int(np.argmax(sides[side]))
            raise GateError(
                f"the {side} of pair {longest + 1} of the {name} split has {sides[side][longest]} tokens, more than "
                f"{self.max_length}; raise --data.max_length, shorten the sentence, or set --data.skip_unfit_pairs true"
            )
        if not fits.any():
            raise GateError(f"every pair of the {name} split has more than {self.max_length} tokens; raise --data.max_length")
        self.notices.append(
            f"{(~fits).sum()} of {len(fits)} {name} pairs are left out: they have more than {self.max_length} tokens on a side"
        )
        self._keep(name, fits)

    def _keep(self, name: str, rows: np.ndarray) -> None:
        """Leave the other pairs of a split out, in texts and ids."""
        if not rows.all():
            self.texts[name] = chosen(self.texts[name], np.flatnonzero(rows))
            self.splits[name] = self._encode(self.texts[name])

    def _fit(self, name: str) -> np.ndarray:
        """Which pairs of a split are neither too long nor too unequal for training."""
        source, target = (np.asarray(self.splits[name][column]) for column in LENGTHS.values())
        longer, shorter = np.maximum(source, target), np.minimum(source, target)
        fits: np.ndarray = (longer <= self.max_length) & (longer <= self.max_ratio * shorter)
        if (~fits).sum() > LEAVE_OUT_AT_MOST * len(fits):
            raise GateError(
                f"{(~fits).sum()} of {len(fits)} training pairs have more than {self.max_length} tokens on a side, or sides "
                f"that differ by a factor of more than {self.max_ratio:g}; raise --data.max_length or --data.max_ratio, or "
                "check that the lines of both sides belong together"
            )
        return fits

    def _drop_unfit_pairs(self) -> None:
        """Training pairs that are too long or too unequal left out, unless they are too many."""
        fits = self._fit("train")
        self.left_out = int((~fits).sum())
        if self.left_out:
            self.notices.append(
                f"{self.left_out} of {len(fits)} training pairs are left out: they have more than {self.max_length} tokens on "
                f"a side, or sides that differ by a factor of more than {self.max_ratio:g}"
            )
            self.splits["train"] = self.splits["train"].select(np.flatnonzero(fits))

    @property
    def task(self) -> Translation:
        assert self.tokenizer is not None
        first = None if self.target_language is None else language_token(self.tokenizer, self.target_language)
        return Translation(
            self.tokenizer,
            label_smoothing=self.label_smoothing,
            sentence_loss=self.sentence_loss,
            bleu_tokenize=self.bleu_tokenize,
            decoding=replace(self.decoding, forced_first=first),
            beam_splits=self.beam_splits,
        )

    # -- batches -----------------------------------------------------------------------------------------------

    def batches_of_run(self, *, epochs: float, first: int, rank: int, world: int) -> RunTokenBatches:
        train = self.splits["train"]
        return RunTokenBatches(
            train["length"], train["target_length"], self.batch_tokens,
            epochs=epochs, seed=self.seed, first=first, rank=rank, world=world,
        )  # fmt: skip

    @property
    def order(self) -> str:
        return f"{super().order} {self.batch_tokens}"

    def fingerprint(self) -> str:
        """Of texts, order, and all that the task is told: how losses are computed and how translations are searched."""
        settings: list[Any] = [self.label_smoothing, self.sentence_loss, self.beam_splits, asdict(self.task.decoding)]
        settings += [self.bleu_tokenize] * (self.bleu_tokenize != "13a")  # as without the option, which cells on disk had not
        return xxhash.xxh3_128(json.dumps([super().fingerprint(), settings, self.texts]).encode()).hexdigest()

    def validation_interval(self, epochs: float) -> float:
        return min(1.0, self.validate_every / epochs)

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
