"""The interface of a task to the rest of the application."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError
from training.config import Source

Batch = Mapping[str, Any]
"""Tensors by name; for evaluation also lists of texts."""


class Task(ABC):
    """The Auto class, the loss of every example and the metrics of a kind of problem.

    Attributes:
        main_metric: The name of the metric by which choices are made.
        lower_is_better: Whether a lower value of it is better, as of a perplexity.
    """

    main_metric: str
    lower_is_better: bool = False

    def gain(self, value: float) -> float:
        """Return a value of the main metric turned so that more is better."""
        return -value if self.lower_is_better else value

    @abstractmethod
    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Load a pretrained model for the task, exports of this project too, or make a new one from config fields."""

    @abstractmethod
    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of every example ``[batch]``, float32, and the logits."""

    def batch_loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the loss that training minimises from the losses of a batch: by default their mean."""
        return losses.mean()

    def batch_weight(self, batch: Batch) -> float:
        """Return the weight of one process's batch in the mean over the batches of all processes; by default 1."""
        return 1.0

    def example_weights(self, batch: Batch) -> Tensor | float:
        """Return the weight of each example ``[batch]`` in the mean loss of a split; by default 1."""
        return 1.0

    @abstractmethod
    def metrics(self, split: str) -> MetricCollection:
        """Return new metrics of a split (``select`` or ``test``)."""

    def metric_types(self) -> dict[str, dict[str, Any]]:
        """Return those metrics that Hugging Face's ``evaluate`` has too, as :data:`gates.export.card.MetricTypes`."""
        return {}

    @abstractmethod
    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        """Add a batch to the metrics.

        Args:
            model: The model in evaluation mode, with the gates as they are.
        """

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[Tensor | list[str], Tensor | list[str]]:
        """Return the prediction and the target of each example ``[batch]``, numbers or texts, for statistics; by default
        classes."""
        return logits.argmax(-1), batch["labels"]

    def outputs(self, metrics: MetricCollection) -> dict[str, list[str]]:
        """Return the texts that the metrics saw the model generate, in the order of the split; none by default."""
        return {}

    @abstractmethod
    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Return the part of a batch that goes into one forward pass of the model."""

    @abstractmethod
    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return which queries are not padding ``[batch, query]``, for each kind of attention; None if all count."""


class TokenMeans(Task):
    """A task whose examples have as many predictions as tokens or words: every one of them counts alike."""

    def batch_loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the mean over all tokens of the batch from the means of its examples."""
        tokens = tokens_of(batch["labels"])
        return (losses * tokens).sum() / tokens.sum()

    def batch_weight(self, batch: Batch) -> float:
        return float(tokens_of(batch["labels"]).sum())

    def example_weights(self, batch: Batch) -> Tensor | float:
        return tokens_of(batch["labels"])


# How sentences, their translations and documents become token ids.

IGNORED = -100
"""Label of padding, which no loss counts."""


def encode_sources(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, prefix: str = "") -> list[list[int]]:
    """Return token ids of every text after the prefix, with the special tokens that the tokenizer puts around a source.

    Names of special tokens within a text are text, such as ``</s>`` in a line of a web page.
    """
    return _ids(tokenizer, texts, tokenizer, prefix)


def encode_targets(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return token ids of every target. Each has an end token, by which a model learns to stop: if the tokenizer puts none, it
    is added.
    """
    ids = _ids(tokenizer, texts, lambda texts, **more: tokenizer(text_target=texts, **more))
    ends = [end for end in (tokenizer.eos_token_id, tokenizer.sep_token_id) if end is not None]
    if not ends:
        raise GateError("the tokenizer has no end token, without which no translation ends; give another with --data.tokenizer")
    # After the end there may be one more token, the language in mBART.
    return [own if {*ends} & {*own[-2:]} else [*own, ends[0]] for own in ids]


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return token ids of every document, from its start token to its end token, if there is one."""
    start, end = start_token(tokenizer), end_token(tokenizer)
    ids = _ids(tokenizer, texts, partial(tokenizer.__call__, add_special_tokens=False))
    return [[start, *own, *([] if end is None else [end])] for own in ids]


def _ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], call: Callable[..., Any], prefix: str = ""
) -> list[list[int]]:
    ids: list[list[int]] = call([prefix + text for text in texts])["input_ids"]
    names = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens if token))
    for row, text in enumerate(texts):
        if names.search(text):
            ids[row] = call(prefix + text, split_special_tokens=True)["input_ids"]
    return ids


def start_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token from which a document's first token is predicted: a start token, or an end token before it."""
    known = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id)
    start = next((token for token in known if token is not None), None)
    if start is None:
        raise GateError(
            "the tokenizer has neither a start nor an end token, from which a document's first token could be predicted; give "
            "another with --data.tokenizer"
        )
    return int(start)


def end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that ends a document; None if the tokenizer has none."""
    known = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    return next((int(token) for token in known if token is not None), None)


def tokens_of(labels: Tensor) -> Tensor:
    """Return the number of tokens to predict of every example, ``[batch]``."""
    return (labels != IGNORED).sum(-1)


def shifted_right(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """Return the decoder's input ``[batch, target]``: the labels one place to the right, after the start token."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        own: Tensor = model.prepare_decoder_input_ids_from_labels(labels=labels)  # type: ignore[operator]
        return own
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED, pad)
