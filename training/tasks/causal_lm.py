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
from training.tasks.base import IGNORED, Batch, Task, end_token, start_token, tokens_of
from training.tasks.encoder_decoder import check_vocabulary, positions
from training.tasks.loading import config_of, from_config, load_pretrained

# Metrics of language models over a whole split.


class Perplexity(Metric):
    """``exp(total negative log likelihood / units)``: per token, or per word or byte of the same text, whose numbers do not
    depend on the tokenizer.

    The likelihood is that of all tokens of a document, the end token among them, given those before them.

    >>> per_token = Perplexity()
    >>> per_token.update(torch.tensor([2.0, 4.0]), torch.tensor([1, 2]))
    >>> per_token.compute()
    tensor(7.3891, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    surprise: Tensor
    units: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("surprise", "units"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, surprise: Tensor, units: Tensor) -> None:
        """Add examples.

        Args:
            surprise: negative log likelihoods in nats ``[batch]``.
            units: tokens, words or bytes of each ``[batch]``.
        """
        self.surprise += surprise.double().sum()
        self.units += units.double().sum()

    def compute(self) -> Tensor:
        return (self.surprise / self.units).exp()


class TokenAccuracy(Metric):
    """The share of tokens that are the most likely one.

    >>> accuracy = TokenAccuracy()
    >>> accuracy.update(torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[1, 1, -100]]))
    >>> accuracy.compute()
    tensor(0.5000, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    correct: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("correct", "tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add examples.

        Args:
            logits: ``[batch, position, vocabulary]``.
            labels: tokens to predict ``[batch, position]``; -100 where nothing is.
        """
        self.correct += (logits.argmax(-1) == labels).sum()  # -100 is no token
        self.tokens += (labels != IGNORED).sum()

    def compute(self) -> Tensor:
        return self.correct / self.tokens


@dataclass
class CausalLM(Task):
    """Language modelling with an ``AutoModelForCausalLM``. An example is a block of text.

    Args:
        packing: whether a block holds several documents, which are kept apart by positions that start again with each:
            Transformers makes a block-diagonal mask of them.
        max_length: longest block in tokens.
    """

    packing: bool = True
    max_length: int = 256
    main_metric: str = field(default="perplexity", init=False)
    lower_is_better: bool = field(default=True, init=False)

    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """A pretrained decoder, or a new one, that is seen to predict from earlier tokens of the same document alone; see
        :meth:`Task.build`."""
        if source.backbone is None:
            model, name = _new(source.from_scratch or {}, tokenizer, self.max_length), "the new model"
        else:
            config = config_of(source)
            check_causal(config, source.backbone)
            name = repr(source.backbone)
            model = load_pretrained(AutoModelForCausalLM, source, config, what="a language model")
        check_vocabulary(model, tokenizer, name)
        limit = positions(model.config, "decoder")
        if limit is not None and self.max_length > limit:
            raise GateError(
                f"max_length is {self.max_length}, but {name} has {limit} positions; set --data.max_length {limit} or lower"
            )
        self._check_sight(model, name)
        return model

    @torch.no_grad()
    def _check_sight(self, model: PreTrainedModel, name: str) -> None:
        """Raises :class:`GateError` for a model whose predictions depend on later tokens or on other documents of a block."""
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
                both, beside_another = (
                    model(block, position_ids=torch.cat([restart, restart], dim=1), use_cache=False).logits
                    for block in (ids, torch.cat([ends_otherwise, second], dim=1))
                )
            except TypeError:
                both = beside_another = None
            # What differs in half precision may be the shape's doing, so there the first document alone is another one.
            is_half = alone.dtype == torch.bfloat16
            apart = both is not None and _are_same(both[:, length:], beside_another[:, length:])
            if not apart or (not is_half and not _are_same(both, torch.cat([alone, other], dim=1))):
                raise GateError(
                    f"{name} does not keep the documents of a block apart by their positions; set --data.packing false, which "
                    "gives every document blocks of its own"
                )

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy of every block's tokens ``[batch]``, float32; logits ``[batch, position, vocabulary]``."""
        sight = "position_ids" if self.packing else "attention_mask"
        # Transformers makes no mask of positions where a model keeps a cache.
        logits = model(input_ids=batch["input_ids"], **{sight: batch[sight]}, use_cache=False).logits.float()
        labels = batch["labels"]
        return token_losses(logits, labels).sum(-1) / tokens_of(labels), logits

    def batch_loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """The mean over all tokens of the batch."""
        tokens = tokens_of(batch["labels"])
        return (losses * tokens).sum() / tokens.sum()

    def batch_weight(self, batch: Batch) -> float:
        """Its tokens, so that every token counts alike in whatever process it is."""
        return float(tokens_of(batch["labels"]).sum())

    def example_weights(self, batch: Batch) -> Tensor:
        """Its tokens: the loss of a split is a mean over tokens."""
        return tokens_of(batch["labels"])

    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """The tokens with a mask of padding, as everybody calls a language model."""
        return {"input_ids": batch["input_ids"], "attention_mask": (batch["labels"] != IGNORED).long()}

    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        """All but padding."""
        valid = batch["labels"] != IGNORED
        return {"encoder": valid, "decoder": valid, "cross": valid}

    def metrics(self, split: str) -> MetricCollection:
        """Perplexity per token, per word and per byte of the text, and the share of tokens that are predicted right."""
        named: dict[str, Any] = {name: Perplexity() for name in ("perplexity", "word_perplexity", "byte_perplexity")}
        return MetricCollection({**named, "accuracy": TokenAccuracy()}, compute_groups=False)

    def metric_types(self) -> dict[str, dict[str, Any]]:
        """Of tokens; the perplexity of ``evaluate`` is another, with tokens and texts of its own."""
        return {"accuracy": {"type": "accuracy"}}

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        surprise, tokens = self.predictions(logits, batch)
        for name, units in (("perplexity", tokens), ("word_perplexity", batch["words"]), ("byte_perplexity", batch["bytes"])):
            metrics[name].update(surprise, units)
        metrics["accuracy"].update(logits, batch["labels"])

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The negative log likelihood of every block in nats, and its tokens, ``[batch]`` each."""
        labels = batch["labels"]
        return token_losses(logits, labels).double().sum(-1), tokens_of(labels)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of every token ``[batch, position]`` in nats; 0 where nothing is to be predicted."""
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return flat.unflatten(0, labels.shape)


def _are_same(logits: Tensor, others: Tensor) -> bool:
    """Whether logits differ no more than by the order in which they were computed; in half precision, where that can be much,
    they are to be of passes of equal shape, and the same."""
    if logits.dtype == torch.bfloat16:
        return torch.equal(logits, others)
    return torch.allclose(logits, others, rtol=1e-3, atol=1e-4)


def _new(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int) -> PreTrainedModel:
    """A new decoder, by default a GPT-2, that knows the tokens which a document begins and ends with."""
    given = {"model_type": "gpt2", **fields}
    start, end = start_token(tokenizer), end_token(tokenizer)
    tokens = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    model = from_config(AutoModelForCausalLM, given, {"vocab_size": len(tokenizer), **tokens})
    model.generation_config = GenerationConfig(**tokens)
    return model


def check_causal(config: Any, name: str) -> None:
    """Raises :class:`GateError` if there is no language model of this config, called ``name``, that predicts the next token."""
    if type(config) not in AutoModelForCausalLM._model_mapping or getattr(config, "is_encoder_decoder", False):
        raise GateError(
            f"{name!r} is a {config.model_type} model, which does not predict the next token; language modelling needs a "
            "decoder such as GPT-2, Llama or Qwen"
        )
