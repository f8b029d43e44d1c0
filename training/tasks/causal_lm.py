"""Causal language modelling: the model, the loss of every block of text, and perplexities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from gates.attention.modes import evaluating
from gates.errors import GateError
from training.config import Source
from training.tasks.base import IGNORED, Batch, TokenMeans, end_token, start_token, tokens_of
from training.tasks.encoder_decoder import check_positions, check_vocabulary
from training.tasks.loading import config_of, from_config, load_pretrained

# Metrics of language models over a whole split.


class _Ratio(Metric):
    """A sum over a whole split, divided by the number of units."""

    is_differentiable = False
    full_state_update = False
    total: Tensor
    units: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "units"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        return self.total / self.units


class Perplexity(_Ratio):
    """``exp(total negative log likelihood / units)``: per token, or per word or byte of the same text, whose numbers do not
    depend on the tokenizer.

    The likelihood is that of all tokens of a document, the end token among them, given those before them.

    >>> per_token = Perplexity()
    >>> per_token.update(torch.tensor([2.0, 4.0]), torch.tensor([1, 2]))
    >>> per_token.compute()
    tensor(7.3891, dtype=torch.float64)
    """

    higher_is_better = False

    def update(self, surprise: Tensor, units: Tensor) -> None:
        """Add examples."""
        self.total += surprise.double().sum()
        self.units += units.double().sum()

    def compute(self) -> Tensor:
        return super().compute().exp()


class TokenAccuracy(_Ratio):
    """The share of tokens that are the most likely one.

    >>> accuracy = TokenAccuracy()
    >>> accuracy.update(torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[1, 1, -100]]))
    >>> accuracy.compute()
    tensor(0.5000, dtype=torch.float64)
    """

    higher_is_better = True

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add examples."""
        self.total += (logits.argmax(-1) == labels).sum()  # -100 is no token
        self.units += (labels != IGNORED).sum()


@dataclass
class CausalLM(TokenMeans):
    """Language modelling with an ``AutoModelForCausalLM``. An example is a block of text.

    Args:
        packing: Whether a block holds several documents. They are kept apart by positions that start again with each:
            Transformers makes a block-diagonal mask of them.
    """

    packing: bool = True
    max_length: int = 256
    main_metric: str = field(default="perplexity", init=False)
    lower_is_better: bool = field(default=True, init=False)

    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Load or make a decoder, and check that it predicts from earlier tokens of the same document alone; see
        :meth:`Task.build`."""
        if source.backbone is None:
            model, name = _new(source.from_scratch or {}, tokenizer, self.max_length), "the new model"
        else:
            config = config_of(source)
            check_causal(config, source.backbone)
            name = repr(source.backbone)
            model = load_pretrained(AutoModelForCausalLM, source, config, what="a language model")
        check_vocabulary(model, tokenizer, name)
        check_positions(model.config, name, self.max_length, sides=("decoder",))
        self._check_sight(model, name)
        return model

    @torch.no_grad()
    def _check_sight(self, model: PreTrainedModel, name: str) -> None:
        """Refuse a model whose predictions depend on later tokens or on other documents of a block."""
        length = min(6, self.max_length)
        tokens = model.config.get_text_config().vocab_size - 1
        ids = (torch.arange(2 * length, device=model.device) % tokens)[None] + 1
        first, second = ids[:, :length], ids[:, length:]
        ends_otherwise = torch.cat([first[:, :-1], first[:, -1:] % tokens + 1], dim=1)
        with evaluating(model):
            alone = model(first, use_cache=False).logits
            if not _are_same(alone[:, :-1], model(ends_otherwise, use_cache=False).logits[:, :-1]):
                raise GateError(
                    f"{name} sees tokens that come later, so it is no causal language model; use a decoder, or set is_decoder: "
                    "true in --model.from_scratch"
                )
            if not self.packing:
                return
            restart = torch.arange(length, device=model.device)[None]
            other = model(second, use_cache=False).logits
            try:
                both, after_another = (
                    model(block, position_ids=torch.cat([restart, restart], dim=1), use_cache=False).logits
                    for block in (ids, torch.cat([ends_otherwise, second], dim=1))
                )
            except TypeError:
                both = after_another = None
            # In half precision the shape may change results, so only the first document differs there.
            is_half = alone.dtype == torch.bfloat16
            apart = both is not None and _are_same(both[:, length:], after_another[:, length:])
            if not apart or (not is_half and not _are_same(both, torch.cat([alone, other], dim=1))):
                raise GateError(
                    f"{name} does not keep the documents of a block apart by their positions; set --data.packing false, which "
                    "gives every document blocks of its own"
                )

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy of every block's tokens ``[batch]``, float32, and the logits ``[batch, position,
        vocabulary]``."""
        sight = "position_ids" if self.packing else "attention_mask"
        # Transformers makes no mask of positions where a model keeps a cache.
        logits = model(input_ids=batch["input_ids"], **{sight: batch[sight]}, use_cache=False).logits.float()
        labels = batch["labels"]
        return token_losses(logits, labels).sum(-1) / tokens_of(labels), logits

    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Return the tokens with a mask of padding, as a language model is usually called."""
        return {"input_ids": batch["input_ids"], "attention_mask": (batch["labels"] != IGNORED).long()}

    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        valid = batch["labels"] != IGNORED
        return {"encoder": valid, "decoder": valid, "cross": valid}

    def metrics(self, split: str) -> MetricCollection:
        """Return perplexity per token, per word and per byte of the text, and the share of tokens that are predicted right."""
        named: dict[str, Any] = {name: Perplexity() for name in ("perplexity", "word_perplexity", "byte_perplexity")}
        return MetricCollection({**named, "accuracy": TokenAccuracy()}, compute_groups=False)

    def metric_types(self) -> dict[str, dict[str, Any]]:
        """Return the accuracy alone: the perplexity of ``evaluate`` loads a model and tokenizes texts by itself."""
        return {"accuracy": {"type": "accuracy"}}

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        surprise, tokens = self.predictions(logits, batch)
        for name, units in (("perplexity", tokens), ("word_perplexity", batch["words"]), ("byte_perplexity", batch["bytes"])):
            metrics[name].update(surprise, units)
        metrics["accuracy"].update(logits, batch["labels"])

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the negative log likelihood of every block in nats, and its number of tokens, ``[batch]`` each."""
        labels = batch["labels"]
        return token_losses(logits, labels).double().sum(-1), tokens_of(labels)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of every token ``[batch, position]`` in nats; 0 where there is nothing to predict."""
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return flat.unflatten(0, labels.shape)


def _are_same(logits: Tensor, others: Tensor) -> bool:
    """Return whether logits differ no more than by the order in which they were computed. In half precision that can be much,
    so there they must be of passes of equal shape, and equal."""
    if logits.dtype == torch.bfloat16:
        return torch.equal(logits, others)
    return torch.allclose(logits, others, rtol=1e-3, atol=1e-4)


def _new(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int) -> PreTrainedModel:
    """Return a new decoder, by default a GPT-2, that knows the tokens which a document begins and ends with."""
    given = {"model_type": "gpt2", **fields}
    start, end = start_token(tokenizer), end_token(tokenizer)
    tokens = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    model = from_config(AutoModelForCausalLM, given, {"vocab_size": len(tokenizer), **tokens})
    model.generation_config = GenerationConfig(**tokens)
    return model


def check_causal(config: Any, name: str) -> None:
    """Raise :class:`GateError` if no language model of this config, called ``name``, predicts the next token."""
    if type(config) not in AutoModelForCausalLM._model_mapping or getattr(config, "is_encoder_decoder", False):
        raise GateError(
            f"{name!r} is a {config.model_type} model, which does not predict the next token; language modelling needs a "
            "decoder such as GPT-2, Llama or Qwen"
        )
