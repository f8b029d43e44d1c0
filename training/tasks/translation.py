"""Translation: the model, the loss of every sentence, and the metrics of what it translates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from training.config import Source
from training.config.data import BleuTokenizer, SentenceLoss
from training.tasks.base import Batch, Task
from training.tasks.decoding import Decoding, begin_with_, decode, generate
from training.tasks.encoder_decoder import check_encoder_decoder, check_positions, check_vocabulary, load_encoder_decoder
from training.tasks.encoding import IGNORED, shifted_right, tokens_of
from training.tasks.loading import from_config
from training.tasks.translation_metrics import SCORERS, TextScore

SCRATCH = {
    "model_type": "marian", "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "activation_function": "relu",
    "scale_embedding": True, "init_std": 0.02,
}  # fmt: skip
"""The Transformer of Vaswani et al. 2017 in the shape of Marian; ``model.from_scratch`` overrides any of it. Its weights start
small: with ``d_model ** -0.5``, 6 layers that normalise after every residual are long in leaving the unigram loss."""


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
    bleu_tokenize: BleuTokenizer = "13a"
    decoding: Decoding = field(default_factory=Decoding)
    beam_splits: tuple[str, ...] = ("test",)
    main_metric: str = field(default="bleu", init=False)

    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """A pretrained encoder-decoder, or a new Transformer whose sizes default to :data:`SCRATCH`; see :meth:`Task.build`."""
        if source.backbone is None:
            return self._new(source.from_scratch or {}, tokenizer)
        model = load_encoder_decoder(source)
        check_positions(model.config, repr(source.backbone), self.decoding.max_length)
        check_vocabulary(model, tokenizer, repr(source.backbone))
        if self.decoding.forced_first is not None:
            begin_with_(model, tokenizer, self.decoding.forced_first)
        return model

    def _new(self, fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        # A model that starts with a given model_type takes that type's own defaults.
        sizes = SCRATCH if fields.get("model_type", "marian") == "marian" else {}
        tokens = {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": pad, "forced_eos_token_id": None}
        positions = {"max_position_embeddings": self.decoding.max_length + 1} if sizes else {}
        ours = {**tokens, **positions, "vocab_size": len(tokenizer)}
        given = {**sizes, **fields}
        own = ours | given
        model = from_config(AutoModelForSeq2SeqLM, given, ours)
        check_encoder_decoder(model.config, str(own["model_type"]))
        mend = ", or raise max_position_embeddings in --model.from_scratch"
        check_positions(model.config, "the new model", self.decoding.max_length, mend=mend)
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
        return (total if self.sentence_loss == "sum" else total / tokens_of(labels)), logits

    def batch_loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """The mean over all target tokens of the batch, whatever a sentence's loss is."""
        tokens = tokens_of(batch["labels"])
        total = losses if self.sentence_loss == "sum" else losses * tokens
        return total.sum() / tokens.sum()

    def batch_weight(self, batch: Batch) -> float:
        """Its target tokens, so that every token counts alike in whatever process it is."""
        return float(tokens_of(batch["labels"]).sum())

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

    def metric_types(self) -> dict[str, dict[str, Any]]:
        bleu = {"type": "sacrebleu", "args": {"tokenize": self.bleu_tokenize}}
        return {"bleu": bleu, "beam_bleu": bleu, "chrf": {"type": "chrf"}, "beam_chrf": {"type": "chrf"}}

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
