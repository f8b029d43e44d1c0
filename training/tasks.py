"""What a task adds to a backbone: the Auto class, the per-example loss and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassMatthewsCorrCoef
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError
from gates.pruned import pruned_class
from gates.safe_load import check_pruned_config, verify_checksums


@dataclass
class Classification:
    """Sentence classification with an ``AutoModelForSequenceClassification``.

    Args:
        labels: class names; a class's position is its number.
    """

    labels: list[str]
    main_metric: str = field(default="accuracy", init=False)

    def build(
        self,
        backbone: str | None,
        from_scratch: Mapping[str, Any] | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ) -> PreTrainedModel:
        """A pretrained backbone with a classifier for the labels, or a new one from config fields.

        Exports of this project can be backbones too.

        Args:
            backbone: hub name or local folder.
            from_scratch: instead of a backbone, config fields.
            tokenizer: of the data.
            trust_remote_code: whether code that comes with the backbone may run.
            allow_pickle: whether ``pytorch_model.bin`` may be read where there are no safetensors.

        Raises:
            GateError: if the backbone cannot be loaded.
        """
        names = {
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }
        if from_scratch is not None:
            fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **from_scratch, **names}
            return from_config(fields)
        assert backbone is not None
        config = read_config(backbone, trust_remote_code=trust_remote_code)
        resized = config.num_labels != len(self.labels)
        for name, value in names.items():
            setattr(config, name, value)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tokenizer.pad_token_id
        loader: Any = AutoModelForSequenceClassification
        more: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if hasattr(config, "pruned_attention"):  # an export of this project, whose own code is not needed
            check_pruned_config(config)
            verify_checksums(backbone)
            loader, more = pruned_class(loader._model_mapping[type(config)]), {}
        try:
            model: PreTrainedModel = loader.from_pretrained(
                backbone, config=config, ignore_mismatched_sizes=resized, use_safetensors=None if allow_pickle else True, **more
            )
        except Exception as error:  # damaged weights raise errors of many kinds
            reason = str(error).strip().splitlines()[0]
            if not allow_pickle and "safetensors" in reason:
                reason += " (a pytorch_model.bin is read only with --model.allow_pickle true)"
            raise GateError(f"cannot load a classifier from {backbone!r}: {reason}") from error
        return model.float()

    def losses(self, model: torch.nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy of every example ``[batch]``, float32, and the logits ``[batch, classes]``."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**inputs).logits.float()
        return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none"), logits

    def metrics(self) -> MetricCollection:
        """Accuracy, macro F1 and Matthews correlation, fed with logits and labels."""
        classes = len(self.labels)
        return MetricCollection(
            {
                "accuracy": MulticlassAccuracy(classes, average="micro"),
                "f1": MulticlassF1Score(classes, average="macro"),
                "matthews": MulticlassMatthewsCorrCoef(classes),
            }
        )

    def valid_queries(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Which queries are not padding, for each kind of attention."""
        mask = batch.get("attention_mask")
        return {"encoder": mask, "decoder": mask, "cross": mask}


def read_config(backbone: str, *, trust_remote_code: bool = False) -> Any:
    """The config of a hub name or local folder.

    Raises:
        GateError: if there is none, or it needs code that comes with it and is not trusted.
    """
    try:
        return AutoConfig.from_pretrained(backbone, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise GateError(f"cannot load a model from {backbone!r}: {str(error).strip().splitlines()[0]}") from error
        raise GateError(
            f"{backbone!r} comes with code of its own; read that code, and if you trust it, pass --model.trust_remote_code true"
        ) from error
    except (OSError, KeyError) as error:
        raise GateError(
            f"cannot load a model from {backbone!r}: it is neither a folder with a config.json of a known architecture nor a "
            "hub name that can be reached; check the path or the network"
        ) from error


def from_config(fields: Mapping[str, Any]) -> PreTrainedModel:
    """A new classifier from config fields, ``model_type`` among them."""
    fields = dict(fields)
    model_type = fields.pop("model_type", None)
    try:
        return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **fields))
    except Exception as error:  # configs and models raise errors of their own kinds
        raise GateError(f"model.from_scratch is not a config of Transformers: {str(error).strip().splitlines()[0]}") from error


def stated_labels(backbone: str | None, *, trust_remote_code: bool = False) -> list[str] | None:
    """The class names that a fine-tuned checkpoint states, in its order; None for placeholders like LABEL_0."""
    if backbone is None:
        return None
    config = read_config(backbone, trust_remote_code=trust_remote_code)
    names = [str(name) for _, name in sorted(config.id2label.items())]
    return None if all(name == f"LABEL_{index}" for index, name in enumerate(names)) else names


def base_model_name(settings: Mapping[str, Any]) -> str:
    """What a run's model is called, from its settings: a hub name as it is; a local folder by its last part alone, since
    paths mean nothing elsewhere; a new model by its type."""
    if settings["backbone"] is None:
        return str(settings["from_scratch"]["model_type"])
    name = str(settings["backbone"])
    return Path(name).name if Path(name).exists() else name
