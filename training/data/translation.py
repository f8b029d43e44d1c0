"""Parallel text: a joint vocabulary, a length filter, and batches of about equally many tokens."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from datasets import Dataset, concatenate_datasets
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gates.errors import GateError
from gates.export.checkpoint import check_known
from training.config.data_base import Subwords
from training.config.text import ParallelText, TranslationOptions
from training.data.base import SPLITS, RunTokenBatches, WithOwnTokenizer, distinct_aside, padded
from training.data.files import check_text, check_there, find_column, open_text
from training.data.text import read_file, read_hub
from training.tasks.base import IGNORED, encode_sources, encode_targets
from training.tasks.encoder_decoder import check_encoder_decoder
from training.tasks.translation import Decoding, Translation, make_scorer

# A vocabulary of subwords for both languages of a translator, trained on the training pairs.

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SPECIAL = [PAD, END, UNKNOWN]


def train_subwords(
    texts: Iterable[str], *, kind: Subwords = "bpe", vocab_size: int = 8000, max_length: int = 128
) -> PreTrainedTokenizerBase:
    """Train a joint vocabulary: byte-pair encoding (Sennrich et al. 2016) or a unigram model (Kudo 2018).

    Words keep a mark for the space before them, and punctuation marks are separate words, so decoded text is detokenised.
    Texts are put into Unicode's composed form, and white space becomes single spaces.

    Args:
        vocab_size: The largest number of tokens, special ones included.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN) if kind == "bpe" else models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    texts = list(texts)
    normal = tokenizer.normalizer.normalize_str
    characters = {character for text in texts for character in normal(text) if not character.isspace()}
    smallest = len(SPECIAL) + len(characters) + 1
    if vocab_size < smallest:
        raise GateError(
            f"vocab_size is {vocab_size}, but the training pairs have {len(characters)} different characters; expected at "
            f"least {smallest}, or training data in fewer alphabets"
        )
    common = {"vocab_size": vocab_size, "special_tokens": SPECIAL, "show_progress": False}
    trainer = (
        trainers.BpeTrainer(**common) if kind == "bpe" else trainers.UnigramTrainer(unk_token=UNKNOWN, **common)  # type: ignore[arg-type]
    )
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "unigram":
        # Order tokens by rounded scores, because the last digits depend on how threads shared the work.
        vocabulary = [(token, score) for token, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
        others = sorted(vocabulary[len(SPECIAL) :], key=lambda item: (-round(item[1], 6), item[0]))
        ordered = [*vocabulary[: len(SPECIAL)], *((token, round(score, 6)) for token, score in others)]
        tokenizer.model = models.Unigram(ordered, unk_id=SPECIAL.index(UNKNOWN))
    return wrapped(tokenizer, max_length=max_length)


def of_words(words: Iterable[str], *, max_length: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per word of a generated language, ``words </s>``."""
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(tokenizer, max_length=max_length)


def wrapped(tokenizer: Tokenizer, *, max_length: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer of Transformers, ``text </s>``, with the special tokens above."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=max_length
    )


# The languages of multilingual translators, as their tokenizers name them.


def set_languages(tokenizer: PreTrainedTokenizerBase, *, source: str | None, target: str | None) -> None:
    """Set the languages that a tokenizer reads and writes; None keeps a language."""
    for attribute, language in (("src_lang", source), ("tgt_lang", target)):
        if language is not None:
            language_token(tokenizer, language)
            setattr(tokenizer, attribute, language)


def language_token(tokenizer: PreTrainedTokenizerBase, language: str) -> int:
    """Return the id of a language's token."""
    try:  # M2M100 writes its language tokens differently from the names
        token = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)(language)
    except KeyError:
        token = None
    if token is None or token == tokenizer.unk_token_id:
        raise GateError(
            f"the tokenizer does not know the language {language!r}; expected a language token such as en_XX in mBART, "
            "eng_Latn in NLLB or en in M2M100"
        )
    assert isinstance(token, int)
    return token


LENGTHS = {"source": "length", "target": "target_length"}
"""The columns of the splits with the tokens of each side."""
ENCODED_AT_ONCE = 10_000
"""The number of pairs to encode at once: a tokenizer's output takes 10 kB for each, 20 times as much as the ids."""


class Pairs(NamedTuple):
    """Sentences and their translations, line by line."""

    source: list[str]
    target: list[str]


def chosen(pairs: Pairs, rows: np.ndarray) -> Pairs:
    """Return some of the pairs, in the order of ``rows``."""
    return Pairs([pairs.source[row] for row in rows], [pairs.target[row] for row in rows])


class TranslationData(WithOwnTokenizer):
    """Parallel text.

    Training pairs that are too long or too unequal in length are left out. In other splits a pair that is too long or has an
    empty side is an error, because BLEU needs the whole set; ``skip_unfit_pairs`` leaves it out.
    """

    options: TranslationOptions
    unit = "pairs"

    def __init__(self, options: TranslationOptions) -> None:
        super().__init__(options)
        make_scorer("bleu", options.bleu_tokenize)  # raises if its package is missing
        self.decoding = Decoding(options.beams, options.length_penalty, options.max_length)
        self.texts: dict[str, Pairs] = {}

    @property
    def score_batch_size(self) -> int:
        return self.options.eval_batch_size

    @abstractmethod
    def load_pairs(self) -> dict[str, Pairs]:
        """Return the three splits, checked but not filtered.

        Set ``set_aside`` if the selection split is a part of the training pairs.
        """

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
        fits = self._fit("train")
        if not fits.all():
            self.notices.append(
                f"{(~fits).sum()} of {len(fits)} training pairs are left out: a side has more than {self.options.max_length} "
                f"tokens, or the sides differ by a factor above {self.options.max_ratio:g}"
            )
            self.splits["train"] = self.splits["train"].select(np.flatnonzero(fits))

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the options, the backbone's, or a new one for both languages."""
        options, train = self.options, self.texts["train"]
        tokenizer = self.named_tokenizer(backbone)
        if tokenizer is None:
            texts = [*train.source, *train.target]
            return train_subwords(texts, kind=options.subwords, vocab_size=options.vocab_size, max_length=options.max_length)
        if tokenizer.pad_token_id is None:
            name = self.tokenizer_name or backbone
            raise GateError(f"the tokenizer of {name!r} has no padding token, which an encoder-decoder needs; give another")
        set_languages(tokenizer, source=options.source_language, target=options.target_language)
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
        """Refuse pairs for evaluation that are too long, or leave them out if the options say so."""
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
            f"{(~fits).sum()} of {len(fits)} {name} pairs are left out: a side has more than {longest_allowed} tokens"
        )
        self._keep(name, fits)

    def _keep(self, name: str, rows: np.ndarray) -> None:
        if not rows.all():
            self.texts[name] = chosen(self.texts[name], np.flatnonzero(rows))
            self.splits[name] = self._encode(self.texts[name])

    def _fit(self, name: str) -> np.ndarray:
        """Return which pairs of a split can be trained on; refuse a split if over half are too long or too unequal."""
        source, target = (np.asarray(self.splits[name][column][:]) for column in LENGTHS.values())
        longer, shorter = np.maximum(source, target), np.minimum(source, target)
        longest, ratio = self.options.max_length, self.options.max_ratio
        fits: np.ndarray = (longer <= longest) & (longer <= ratio * shorter)
        if (~fits).sum() > 0.5 * len(fits):
            raise GateError(
                f"{(~fits).sum()} of {len(fits)} training pairs have over {longest} tokens on a side, or sides that differ by "
                f"a factor above {ratio:g}; raise --data.max_length or --data.max_ratio, or check that lines match"
            )
        return fits

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
        """Return a hash of the texts, their order, and every option that affects the loss or decoding."""
        task = self.task
        settings = [task.label_smoothing, task.sentence_loss, task.beam_splits, asdict(task.decoding), task.bleu_tokenize]
        return xxhash.xxh3_128(json.dumps([super().fingerprint(), settings, self.texts]).encode()).hexdigest()

    def validation_interval(self, epochs: float) -> float:
        return min(1.0, self.options.validate_every / epochs)

    def collate(self, split: str) -> PadPairs:
        assert self.tokenizer is not None
        assert self.tokenizer.pad_token_id is not None
        return PadPairs(int(self.tokenizer.pad_token_id), self.texts[split].target if split in ("select", "test") else None)


@dataclass(frozen=True)
class PadPairs:
    """Make a batch of sources and targets, padded on the right to the longest; labels are -100 there.

    Args:
        references: The target texts of the whole split, to add to each batch.
    """

    pad: int
    references: list[str] | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {
            "input_ids": padded([row["source"] for row in rows], self.pad),
            "attention_mask": padded([[1] * row["length"] for row in rows], 0),
            "labels": padded([row["target"] for row in rows], IGNORED),
        }
        if self.references is not None:
            batch["row"] = torch.tensor([row["row"] for row in rows])
            batch["reference"] = [self.references[row["row"]] for row in rows]
        return batch


class ParallelTextData(TranslationData):
    """Sentences and their translations: a hub dataset, two aligned files for each split, or files with a column per side."""

    options: ParallelText

    def load_pairs(self) -> dict[str, Pairs]:
        options = self.options
        if options.dataset is None:
            pairs = {name: self._read_local(name, files) for name, files in options.local.items()}
        else:
            hub = read_hub(options, instead="--data.train_source and --data.train_target")
            pairs = {name: self._from_columns(name, split) for name, split in hub.items()}
        pairs = {name: self._without_empty(name, split) for name, split in pairs.items()}
        if "select" not in pairs:
            pairs["train"], pairs["select"] = set_aside(pairs["train"], options.select_fraction)
            self.set_aside = True
        return pairs

    def _read_local(self, name: str, files: tuple[str, ...]) -> Pairs:
        if len(files) == 2:
            return read_aligned(*files)
        (file,) = files
        more = {"checked": self.options.check_header, "may_skip": self._may_skip_empty(name)}
        return self._from_columns(name, read_file(file, self.options.columns, **more))

    def _from_columns(self, name: str, split: Dataset) -> Pairs:
        found = {column: list(split[column]) for column in split.column_names}
        if "translation" in found and self.options.source_column not in found:
            rows = [{} if row is None else row for row in found["translation"]]
            if any(rows) and all(isinstance(row, dict) for row in rows):
                found = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
        roles = {"source": self.options.source_column, "target": self.options.target_column}
        columns = [find_column(f"the {name} split", role, [*found], given, ()) for role, given in roles.items()]
        return Pairs(*(_texts(name, column, found[column]) for column in columns))

    def _may_skip_empty(self, name: str) -> bool:
        return self.options.skip_empty if name == "train" else self.options.skip_unfit_pairs

    def _without_empty(self, name: str, pairs: Pairs) -> Pairs:
        """Refuse empty lines, or leave them out if the options say so."""
        whole = [bool(source and target) for source, target in zip(*pairs, strict=True)]
        if not any(whole):
            raise GateError(f"the {name} split is empty; expected at least one pair of sentences")
        if all(whole):
            return pairs
        if not self._may_skip_empty(name):
            at = whole.index(False)
            side = "target" if pairs.source[at] else "source"
            option = "skip_empty" if name == "train" else "skip_unfit_pairs"
            raise GateError(
                f"the {side} of pair {at + 1} of the {name} split is empty ({whole.count(False)} in all); remove that pair "
                f"from both sides, or set --data.{option} true"
            )
        self.notices.append(f"{whole.count(False)} of {len(whole)} {name} pairs are left out: a side is empty")
        return chosen(pairs, np.flatnonzero(whole))


def _texts(name: str, column: str, values: list[Any]) -> list[str]:
    """Return a column as stripped texts; an empty text for None."""
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str | int | float | None):
            raise GateError(f"{column!r} of pair {row} of the {name} split is {shorten(repr(value), 60)}; expected a sentence")
    return ["" if value is None else str(value).strip() for value in values]


def read_aligned(source: str, target: str) -> Pairs:
    """Read two text files, line by line."""
    pairs = Pairs(read_lines(source), read_lines(target))
    if len(pairs.source) != len(pairs.target):
        raise GateError(
            f"{source!r} has {len(pairs.source)} lines and {target!r} has {len(pairs.target)}; expected the translation of "
            "line i in line i"
        )
    return pairs


def read_lines(file: str, what: str = "data") -> list[str]:
    """Read the stripped lines of a text file, ``.gz`` too.

    Only a line feed ends a line. Other line ends of Unicode stay within it, so that line i stays line i.
    """
    check_there(file, what)
    check_text(file)
    with open_text(file) as stream:
        return [line.strip() for line in stream]


def set_aside(pairs: Pairs, fraction: float) -> tuple[Pairs, Pairs]:
    """Choose a part of the pairs for selection at random; pairs with the same source are all on one side."""
    if len(set(pairs.source)) < 2:
        raise GateError("the train split has one source sentence; expected more, or a separate selection split")
    taken = distinct_aside(pairs.source, fraction, most=2000)  # every validation translates them
    aside = np.array([source in taken for source in pairs.source])
    return chosen(pairs, np.flatnonzero(~aside)), chosen(pairs, np.flatnonzero(aside))
