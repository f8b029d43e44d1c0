"""What labels of sentences have in common, classes, numbers or a tag for each word: the model, and what goes into it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from training.config import Source
from training.tasks.base import Batch, Task
from training.tasks.encoder_decoder import check_vocabulary
from training.tasks.loading import config_of, from_config, load_pretrained


class SentenceTask(Task):
    """Labels of sentences, by default by an ``AutoModelForSequenceClassification``.

    Attributes:
        auto: Auto class of the model.
        what: the model as errors call it.
    """

    auto: ClassVar[Any] = AutoModelForSequenceClassification
    what: ClassVar[str]

    @property
    @abstractmethod
    def label_fields(self) -> dict[str, Any]:
        """Config fields that say what the model tells of a sentence, ``num_labels`` among them."""

    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """A pretrained backbone with a head for the labels, or a new one; see :meth:`Task.build`."""
        fields = self.label_fields
        if source.from_scratch is not None:
            tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
            model = from_config(self.auto, {**source.from_scratch, **fields}, tokens)
            if model.config.is_encoder_decoder:  # which reads its answer at the end of the text, and begins as T5 does
                ends = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
                for name, value in {"eos_token_id": ends, "decoder_start_token_id": tokenizer.pad_token_id}.items():
                    setattr(model.config, name, source.from_scratch.get(name, value))
            check_vocabulary(model, tokenizer, "the new model")
            return model
        config = config_of(source)
        resized = config.num_labels != fields["num_labels"]
        set_labels_(config, fields)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tokenizer.pad_token_id
        model = load_pretrained(self.auto, source, config, what=self.what, resized=resized)
        check_vocabulary(model, tokenizer, repr(source.backbone))
        return model

    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in batch.items() if name != "labels"}

    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        mask = batch.get("attention_mask")
        return {"encoder": mask, "decoder": mask, "cross": mask}


def set_labels_(config: Any, fields: Mapping[str, Any]) -> None:
    """Set the config fields of the task that the run trains, and clear those of another task.

    Args:
        config: The config of the backbone.
        fields: The fields of the labels.
    """
    for name, value in fields.items():
        setattr(config, name, value)
    for name in ("finetuning_task", "task_specific_params", "function_to_apply"):  # which pipelines follow
        if getattr(config, name, None) is not None:
            setattr(config, name, None)


def label_names(labels: Sequence[str]) -> dict[str, Any]:
    """Config fields of classes by their names, whose positions are their numbers."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": None,
    }
