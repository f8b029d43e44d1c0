"""What the rest of the application asks of a task."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
        main_metric: name of the metric by which choices are made.
        lower_is_better: whether a lower value of it is better, as of a perplexity.
    """

    main_metric: str
    lower_is_better: bool = False

    def gain(self, value: float) -> float:
        """A value of the main metric turned so that more is better."""
        return -value if self.lower_is_better else value

    @abstractmethod
    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """A pretrained model for the task, exports of this project too, or a new one from config fields.

        Args:
            source: of the model.
            tokenizer: of the data.

        Raises:
            GateError: if the backbone cannot be loaded or is not for this task.
        """

    @abstractmethod
    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of every example ``[batch]``, float32, and the logits."""

    def batch_loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """What training minimises, from the losses of a batch: by default their mean."""
        return losses.mean()

    def batch_weight(self, batch: Batch) -> float:
        """How much the batch of one process counts in the mean over the batches of all; they count alike by default."""
        return 1.0

    def example_weights(self, batch: Batch) -> Tensor | float:
        """How much each example ``[batch]`` counts in the mean loss of a split; they count alike by default."""
        return 1.0

    @abstractmethod
    def metrics(self, split: str) -> MetricCollection:
        """New metrics of a split (``select`` or ``test``)."""

    def metric_types(self) -> dict[str, dict[str, Any]]:
        """Those metrics that Hugging Face's ``evaluate`` has too, as :data:`gates.export.card.MetricTypes`; none by
        default."""
        return {}

    @abstractmethod
    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        """Add a batch to the metrics.

        Args:
            metrics: that :meth:`metrics` made.
            model: in evaluation mode, with the gates as they are.
            batch: of a split's loader.
            logits: as :meth:`losses` returned them.
        """

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[Tensor | list[str], Tensor | list[str]]:
        """What statistics keep of each example ``[batch]``, numbers or texts: what is predicted, and what would have been
        right; by default classes."""
        return logits.argmax(-1), batch["labels"]

    def outputs(self, metrics: MetricCollection) -> dict[str, list[str]]:
        """What the metrics saw the model say, by example of the split in its order; nothing by default."""
        return {}

    @abstractmethod
    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """What of a batch goes into one forward pass of the model."""

    @abstractmethod
    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        """Which queries are not padding ``[batch, query]``, for each kind of attention; None if all count."""


# How sentences, their translations and documents become token ids.

IGNORED = -100
"""Label of padding, which no loss counts."""


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


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of every document, from its start token to its end token, if there is one.

    Names of special tokens within a text are text.

    Raises:
        GateError: for a tokenizer without a token that a document can begin with.
    """
    start, end = start_token(tokenizer), end_token(tokenizer)
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    for row in _naming_special_tokens(tokenizer, texts):
        ids[row] = tokenizer(texts[row], add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [[start, *own, *([] if end is None else [end])] for own in ids]


def start_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of the token from which a document's first token is predicted: that of a beginning, or that of an end before it.

    Raises:
        GateError: if the tokenizer has neither.
    """
    known = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id)
    start = next((token for token in known if token is not None), None)
    if start is None:
        raise GateError(
            "the tokenizer has neither a start nor an end token, from which a document's first token could be predicted; give "
            "another with --data.tokenizer"
        )
    return int(start)


def end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of the token that ends a document; None if the tokenizer has none."""
    known = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    return next((int(token) for token in known if token is not None), None)


def tokens_of(labels: Tensor) -> Tensor:
    """Tokens to predict of every example, ``[batch]``."""
    return (labels != IGNORED).sum(-1)


def _naming_special_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Rows of the texts that contain the name of a special token."""
    names = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens if token))
    return [row for row, text in enumerate(texts) if names.search(text)]


def shifted_right(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """The decoder's input ``[batch, target]``: the labels one place to the right, behind the start token, padding as pad."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        own: Tensor = model.prepare_decoder_input_ids_from_labels(labels=labels)  # type: ignore[operator]
        return own
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED, pad)
