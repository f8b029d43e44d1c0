"""Translation: an encoder-decoder, the loss of every sentence, greedy and beam search, BLEU and chrF."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError
from training.tasks.base import Batch, Task
from training.tasks.loading import from_config, load_pretrained, read_config
from training.tasks.translation_metrics import SCORERS, TextScore, Tokenizer

SentenceLoss = Literal["mean", "sum"]
IGNORED = -100
"""Label of padding, which no loss counts."""
SCRATCH = {
    "model_type": "marian", "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "activation_function": "relu",
    "scale_embedding": True, "init_std": 0.02,
}  # fmt: skip
"""The Transformer of Vaswani et al. 2017 in the shape of Marian; ``model.from_scratch`` overrides any of it. Its weights start
small: with ``d_model ** -0.5``, 6 layers that normalise after every residual are long in leaving the unigram loss."""


@dataclass(frozen=True)
class Decoding:
    """How sentences are translated.

    Args:
        beams: of beam search.
        length_penalty: power of the length by which a beam's score is divided.
        max_length: longest translation in tokens. In any case it has at most as many as the model has positions, and at most
            twice the longest source of its batch and 10 more: a translation that does not end by itself is cut there, so its
            length depends on the sentences it is translated with.
        forced_first: token of the target language of a multilingual model, see :func:`begin_with_`.

    Raises:
        GateError: for a length penalty that is no finite number.
    """

    beams: int = 4
    length_penalty: float = 1.0
    max_length: int = 128
    forced_first: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.length_penalty):
            raise GateError(f"length_penalty is {self.length_penalty}; expected a finite number, such as 1")


@dataclass
class Translation(Task):
    """Translation with an ``AutoModelForSeq2SeqLM``.

    Args:
        tokenizer: of the data.
        label_smoothing: share of the target probability that is spread over the vocabulary, while training only: losses
            for evaluation and for scores of heads are plain.
        sentence_loss: a sentence's loss is the ``mean`` over its target tokens, or their ``sum``. It decides how much a long
            sentence counts in HIS; training minimises the mean over all tokens of a batch either way.
        bleu_tokenize: how BLEU cuts texts into tokens.
        decoding: of translations.
        beam_splits: splits (``select``, ``test``) that are translated by beam search too, next to greedy decoding.
    """

    tokenizer: PreTrainedTokenizerBase
    label_smoothing: float = 0.1
    sentence_loss: SentenceLoss = "mean"
    bleu_tokenize: Tokenizer = "13a"
    decoding: Decoding = Decoding()
    beam_splits: tuple[str, ...] = ("test",)
    main_metric: str = field(default="bleu", init=False)

    def build(
        self,
        backbone: str | None,
        from_scratch: Mapping[str, Any] | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ) -> PreTrainedModel:
        """A pretrained encoder-decoder, or a new Transformer whose sizes default to :data:`SCRATCH`; see :meth:`Task.build`."""
        if backbone is None:
            return self._new(from_scratch or {}, tokenizer)
        model = load_encoder_decoder(backbone, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        self._check_positions(model.config, repr(backbone), "")
        check_vocabulary(model, tokenizer, repr(backbone))
        if self.decoding.forced_first is not None:
            begin_with_(model, tokenizer, self.decoding.forced_first)
        return model

    def _new(self, fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        # A model that starts with a given model_type takes that type's own defaults.
        sizes = SCRATCH if fields.get("model_type", "marian") == "marian" else {}
        tokens = {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": pad, "forced_eos_token_id": None}
        positions = {"max_position_embeddings": self.decoding.max_length + 1} if sizes else {}
        own = {**sizes, **tokens, **positions, "vocab_size": len(tokenizer), **fields}
        model = from_config(AutoModelForSeq2SeqLM, own)
        check_encoder_decoder(model.config, str(own["model_type"]))
        self._check_positions(model.config, "the new model", ", or raise max_position_embeddings in --model.from_scratch")
        check_vocabulary(model, tokenizer, "the new model")
        model.generation_config = GenerationConfig(
            pad_token_id=pad,
            eos_token_id=end,
            decoder_start_token_id=own["decoder_start_token_id"],
            num_beams=self.decoding.beams,
            length_penalty=self.decoding.length_penalty,
            max_length=self.decoding.max_length,
            bad_words_ids=[[pad]],
        )
        if self.decoding.forced_first is not None:
            begin_with_(model, tokenizer, self.decoding.forced_first)
        return model

    def _check_positions(self, config: Any, name: str, mend: str) -> None:
        """Whether sources, targets and translations of ``max_length`` tokens fit into the model."""
        for side in ("encoder", "decoder"):
            limit = positions(config, side)
            if limit is not None and self.decoding.max_length > limit:
                raise GateError(
                    f"max_length is {self.decoding.max_length}, but the {side} of {name} has {limit} positions; set "
                    f"--data.max_length {limit} or lower{mend}"
                )

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy of every sentence ``[batch]``, float32, by ``sentence_loss``; logits ``[batch, target, vocabulary]``.

        With label smoothing (Szegedy et al. 2016) if the model is in training mode.
        """
        labels = batch["labels"]
        inputs = self.model_inputs(model, batch)
        logits = model(**inputs, use_cache=False).logits.float()
        per_token = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            reduction="none",
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing if model.training else 0.0,
        ).unflatten(0, labels.shape)
        total = per_token.sum(-1)
        return (total if self.sentence_loss == "sum" else total / _tokens(labels)), logits

    def batch_loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """The mean over all target tokens of the batch, whatever a sentence's loss is."""
        tokens = _tokens(batch["labels"])
        total = losses if self.sentence_loss == "sum" else losses * tokens
        return total.sum() / tokens.sum()

    def batch_weight(self, batch: Batch) -> float:
        """Its target tokens, so that every token counts alike in whatever process it is."""
        return float(_tokens(batch["labels"]).sum())

    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Source, its mask, and the target shifted by one: the decoder sees what comes before the token it predicts."""
        return {
            "input_ids": batch["input_ids"],
            "attention_mask": batch["attention_mask"],
            "decoder_input_ids": shifted_right(model, batch["labels"]),
        }

    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        """Source tokens ask in the encoder, target tokens in the decoder and across; padding does not count."""
        target = batch["labels"] != IGNORED
        return {"encoder": batch["attention_mask"], "decoder": target, "cross": target}

    def metrics(self, split: str) -> MetricCollection:
        """BLEU and chrF of greedy decoding, and as ``beam_bleu`` and ``beam_chrf`` of beam search where it is asked for."""
        searches = ("", "beam_") if split in self.beam_splits else ("",)
        names: dict[str, Any] = {
            f"{search}{name}": TextScore(name, self.bleu_tokenize) for search in searches for name in SCORERS
        }
        return MetricCollection(names, compute_groups=False)

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        """Translate the batch's sources, greedily and by beam search as the metrics ask."""
        for search in ("", "beam_"):
            if f"{search}bleu" in metrics:
                texts = self.translate(model, batch, beams=self.decoding.beams if search else 1)
                for name in SCORERS:
                    metrics[f"{search}{name}"].update(batch["row"], texts, batch["reference"])

    def outputs(self, metrics: MetricCollection) -> dict[str, list[str]]:
        """The translations, as ``greedy`` and ``beam``."""
        searches = {"greedy": "bleu", "beam": "beam_bleu"}
        return {
            search: metrics[name].translations()  # type: ignore[operator]
            for search, name in searches.items()
            if name in metrics
        }

    def translate(self, model: PreTrainedModel, batch: Batch, *, beams: int) -> list[str]:
        """Translations of a batch's sources, with the cache, by greedy decoding (1 beam) or beam search."""
        ids = generate(model, batch["input_ids"], batch["attention_mask"], self.decoding, beams=beams)
        return decode(self.tokenizer, ids)


def load_encoder_decoder(backbone: str, *, trust_remote_code: bool = False, allow_pickle: bool = False) -> PreTrainedModel:
    """The encoder-decoder of a hub name or local folder, in float32; see :meth:`training.tasks.base.Task.build`."""
    config = read_config(backbone, trust_remote_code=trust_remote_code)
    check_encoder_decoder(config, backbone)
    model = load_pretrained(
        AutoModelForSeq2SeqLM,
        backbone,
        config,
        what="an encoder-decoder",
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    if model.config.decoder_start_token_id is None:
        raise GateError(f"{backbone!r} does not say how its decoder starts; set decoder_start_token_id in its config.json")
    return model


def check_encoder_decoder(config: Any, name: str) -> None:
    """Raises :class:`GateError` if a model of this config, called ``name``, cannot translate."""
    if type(config) not in AutoModelForSeq2SeqLM._model_mapping or not getattr(config, "is_encoder_decoder", False):
        raise GateError(
            f"{name!r} is a {config.model_type} model, which has no encoder and decoder; translation needs one that "
            "has, such as Marian, BART or T5"
        )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raises :class:`GateError` if the tokenizer has a token that the model, called ``name``, has no embedding for."""
    embeddings: Any = model.get_input_embeddings()
    rows, highest = int(embeddings.weight.shape[0]), max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise GateError(
            f"the tokenizer has tokens up to number {highest}, but {name} has embeddings of {rows}; a model needs its own "
            "tokenizer (see --data.tokenizer), and a new one a vocab_size that suffices"
        )


def begin_with_(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, language: int) -> None:
    """Have the model translate into a language: its translations begin as the targets it is trained on do.

    Most models see the language's token first in every target. The first mBART sees it as the decoder's start, since its
    targets end in it and are shifted around.

    Args:
        model: whose generation config is set, and goes into exports.
        tokenizer: that is set to this target language.
        language: id of its token.
    """
    assert model.generation_config is not None
    targets = torch.tensor(encode_targets(tokenizer, ["a"]))
    starts = int(shifted_right(model, targets)[0, 0]) == language
    model.generation_config.forced_bos_token_id = None if starts else language
    if starts:
        model.generation_config.decoder_start_token_id = language


def positions(config: Any, side: str) -> int | None:
    """The most tokens that the ``encoder`` or ``decoder`` takes; None where nothing limits them, as in T5."""
    stated = (
        getattr(config, f"max_{side}_position_embeddings", None),  # LED
        getattr(config, "max_position_embeddings", None),
        getattr(getattr(config, side, None), "max_position_embeddings", None),  # two models in one
    )
    return next((limit for limit in stated if isinstance(limit, int)), None)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    decoding: Decoding,
    *,
    beams: int,
    exactly: int | None = None,
) -> Tensor:
    """Token ids ``[batch, target]`` of translations, padded on the right, beginning with the decoder's start token.

    Args:
        model: an encoder-decoder in evaluation mode.
        input_ids, attention_mask: sources ``[batch, source]``.
        decoding: lengths and penalty.
        beams: 1 for greedy decoding.
        exactly: tokens that every translation is to have, for measurements of speed; None lets each end where it will.
    """
    searching = {"length_penalty": decoding.length_penalty, "early_stopping": False} if beams > 1 else {}
    longest = min(decoding.max_length, 2 * input_ids.shape[1] + 10)
    if (limit := positions(model.config, "decoder")) is not None:
        longest = min(longest, limit)
    with torch.no_grad():
        ids: Tensor = model.generate(  # type: ignore[operator]
            input_ids=input_ids,
            attention_mask=attention_mask,
            num_beams=beams,
            do_sample=False,
            use_cache=True,
            max_length=None,
            min_length=0,
            min_new_tokens=exactly,
            max_new_tokens=longest if exactly is None else exactly,
            **searching,
        )
    return ids


def encode_sources(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, prefix: str = "") -> list[list[int]]:
    """Token ids of every text behind the prefix, with the special tokens that the tokenizer puts around a source.

    Names of special tokens within a text are text, such as ``</s>`` in a line of a web page.
    """
    ids: list[list[int]] = tokenizer([prefix + text for text in texts])["input_ids"]
    for row in _naming_special_tokens(tokenizer, texts):
        ids[row] = tokenizer(prefix + texts[row], split_special_tokens=True)["input_ids"]
    return ids


def encode_targets(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The same of targets. Each has an end token, by which a model learns to stop: if the tokenizer puts none, it is added.

    Raises:
        GateError: for a tokenizer that has no end token.
    """
    ids: list[list[int]] = tokenizer(text_target=list(texts))["input_ids"]
    for row in _naming_special_tokens(tokenizer, texts):
        ids[row] = tokenizer(text_target=texts[row], split_special_tokens=True)["input_ids"]
    ends = [end for end in (tokenizer.eos_token_id, tokenizer.sep_token_id) if end is not None]
    if not ends:
        raise GateError("the tokenizer has no end token, without which no translation ends; give another with --data.tokenizer")
    # Behind the end there may be one more token, the language in mBART.
    return [own if {*ends} & {*own[-2:]} else [*own, ends[0]] for own in ids]


def _naming_special_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Rows of the texts that contain the name of a special token."""
    names = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens if token))
    return [row for row, text in enumerate(texts) if names.search(text)]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> list[str]:
    """Texts of generated ids, on one line each."""
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [" ".join(text.split()) for text in texts]


def shifted_right(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """The decoder's input ``[batch, target]``: the labels one place to the right, behind the start token, padding as pad."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        own: Tensor = model.prepare_decoder_input_ids_from_labels(labels=labels)  # type: ignore[operator]
        return own
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED, pad)


def _tokens(labels: Tensor) -> Tensor:
    """Target tokens of every sentence, ``[batch]``."""
    return (labels != IGNORED).sum(-1)
