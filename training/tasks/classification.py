"""Sentence classification: the Auto class, the loss of every example and the metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import rankdata
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BaseImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from gates.attention.inputs import of_dtype
from gates.errors import GateError, first_line
from training.config import Source
from training.tasks.base import Batch, Task
from training.tasks.encoder_decoder import check_vocabulary
from training.tasks.loading import config_of, from_config, load_pretrained, read_config
from training.truth.compiler import compiled
from training.truth.program import PROGRAMS


class SentenceTask(Task):
    """Labels of sentences, classes, numbers or a tag for each word, by default by an ``AutoModelForSequenceClassification``.

    Attributes:
        auto: The Auto class of the model.
        what: The name of the model in errors.
    """

    auto: ClassVar[Any] = AutoModelForSequenceClassification
    what: ClassVar[str]

    @property
    @abstractmethod
    def label_fields(self) -> dict[str, Any]:
        """The config fields that describe the labels, ``num_labels`` among them."""

    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Load a pretrained backbone with a head for the labels, or make a new one; see :meth:`Task.build`."""
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
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tokenizer.pad_token_id
        model = self.load(source, config)
        check_vocabulary(model, tokenizer, repr(source.backbone))
        return model

    def load(self, source: Source, config: Any) -> PreTrainedModel:
        """Load a pretrained backbone, with the labels of this task in its config in place of those of another."""
        fields = self.label_fields
        resized = config.num_labels != fields["num_labels"]
        others = ("finetuning_task", "task_specific_params", "function_to_apply")  # which pipelines follow
        stale = {name: None for name in others if getattr(config, name, None) is not None}
        for name, value in (fields | stale).items():
            setattr(config, name, value)
        return load_pretrained(self.auto, source, config, what=self.what, resized=resized)

    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in batch.items() if name != "labels"}

    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        mask = batch.get("attention_mask")
        return {"encoder": mask, "decoder": mask, "cross": mask}


def label_names(labels: Sequence[str]) -> dict[str, Any]:
    """Return the config fields of classes by their names, whose positions are their numbers."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": None,
    }


Array = NDArray[np.float64]


def class_counts(predictions: NDArray[Any], targets: NDArray[Any], classes: int | None = None) -> NDArray[np.bool_]:
    """Return for each class whether it is predicted, is true, and both: ``[..., examples, 3 * classes]``.

    Args:
        predictions: The class numbers ``[..., examples]``.
        targets: The true ones, broadcastable to them.
    """
    names = np.arange(max(predictions.max(), targets.max()) + 1 if classes is None else classes)
    predicted, true = predictions[..., None] == names, np.broadcast_to(targets, predictions.shape)[..., None] == names
    return np.concatenate([predicted, true, predicted & true], axis=-1)


def accuracy(means: Array) -> Array:
    """Return the share of right answers from means of :func:`class_counts` ``[..., 3 * classes]``."""
    result: Array = np.split(means, 3, axis=-1)[2].sum(-1)
    return result


def macro_f1(means: Array) -> Array:
    """Return the mean F1 of the classes that occur, as target or as prediction."""
    predicted, true, both = np.split(means, 3, axis=-1)
    present = predicted + true > 0
    f1 = np.divide(2 * both, predicted + true, out=np.zeros_like(both), where=present)
    result: Array = f1.sum(-1) / present.sum(-1)
    return result


def binary_f1(means: Array) -> Array:
    """Return F1 of class 1, the second of two; 0 where it neither occurs nor is predicted."""
    parts = np.split(means, 3, axis=-1)
    if parts[0].shape[-1] == 1:  # the second class does not occur
        return np.zeros(means.shape[:-1])
    predicted, true, both = (part[..., 1] for part in parts)
    return np.divide(2 * both, predicted + true, out=np.zeros_like(both), where=predicted + true > 0)


def matthews(means: Array) -> Array:
    """Return Gorodkin's (2004) correlation for any number of classes; 0 where targets or predictions are of one class."""
    predicted, true, both = np.split(means, 3, axis=-1)
    covariance = both.sum(-1) - (predicted * true).sum(-1)
    variance = (1 - np.square(predicted).sum(-1)) * (1 - np.square(true).sum(-1))
    return np.divide(covariance, np.sqrt(variance), where=variance > 0, out=np.zeros_like(variance))


class ClassMetric(Metric):
    """A metric of classes over a split, in any batching and under DDP, as statistics compute it.

    Args:
        value: The function from means of :func:`class_counts` to the metric, such as :func:`matthews`.

    >>> metric = ClassMetric(matthews, classes=2)
    >>> metric.update(torch.eye(2)[[1, 1, 1, 1]], torch.tensor([0, 1, 1, 1]))
    >>> float(metric.compute())
    0.0
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    counts: Tensor
    examples: Tensor

    def __init__(self, value: Callable[[Array], Array], classes: int) -> None:
        super().__init__()
        self.value = value
        self.classes = classes
        self.add_state("counts", torch.zeros(3 * classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("examples", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add examples."""
        counts = class_counts(logits.argmax(-1).cpu().numpy(), labels.cpu().numpy(), self.classes).sum(axis=0)
        self.counts += torch.from_numpy(counts).to(self.counts.device)
        self.examples += len(labels)

    def compute(self) -> Tensor:
        return torch.tensor(float(self.value(self.counts.cpu().numpy() / self.examples.cpu().numpy())), dtype=torch.float64)


@dataclass
class Classification(SentenceTask):
    """Sentence classification with an ``AutoModelForSequenceClassification``.

    Args:
        labels: The class names; a class's position is its number. With ``binary_f1`` the second one is the positive one.
    """

    what: ClassVar[str] = "a classifier"

    labels: list[str]
    main_metric: str = "accuracy"

    @property
    def label_fields(self) -> dict[str, Any]:
        return label_names(self.labels) | {"problem_type": "single_label_classification"}

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of every example ``[batch]``, float32, and the logits ``[batch, classes]``."""
        logits = model(**self.model_inputs(model, batch)).logits.float()
        return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none"), logits

    def metrics(self, split: str) -> MetricCollection:
        """Return accuracy, macro F1 and Matthews correlation, and binary F1 if it is the main metric, for any split."""
        functions = {"accuracy": accuracy, "f1": macro_f1, "matthews": matthews}
        if self.main_metric == "binary_f1":
            functions["binary_f1"] = binary_f1
        return MetricCollection({name: ClassMetric(value, len(self.labels)) for name, value in functions.items()})

    def metric_types(self) -> dict[str, dict[str, Any]]:
        return {
            "accuracy": {"type": "accuracy"},
            "f1": {"type": "f1", "args": {"average": "macro"}},
            "matthews": {"type": "matthews_correlation"},
            "binary_f1": {"type": "f1"},
        }

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        metrics.update(logits, batch["labels"])


def stated_labels(backbone: str | None, *, trust_remote_code: bool = False, placeholders: bool = False) -> list[str] | None:
    """Return the class names that a fine-tuned checkpoint states, in its order.

    Args:
        backbone: The hub name or folder; None for a new model, which states none.
        trust_remote_code: Whether code that comes with it may run.
        placeholders: Whether to return placeholders like LABEL_0 too, in place of None.
    """
    if backbone is None:
        return None
    names = _names_in(read_config(backbone, trust_remote_code=trust_remote_code))
    return None if not placeholders and all(name == f"LABEL_{index}" for index, name in enumerate(names)) else names


def _names_in(config: Any) -> list[str]:
    return [str(name) for _, name in sorted(config.id2label.items())]


def names_of_classes(labels: list[str], config: Any, backbone: str) -> list[str]:
    """Return the names of the classes for a model whose classifier is not trained: those that its config states.

    Args:
        labels: The classes of the data, in the order of their numbers.
        config: The config of the backbone. Without a classifier of its own the labels stay.

    Raises:
        GateError: If model and data name the classes differently.
    """
    stated = _names_in(config)
    same = [name.lower() for name in labels] == [name.lower() for name in stated]
    if same or not str((config.architectures or [""])[0]).endswith("Classification"):
        return labels
    if labels == [str(number) for number in range(len(stated))]:
        return labels if stated[0] == "LABEL_0" else stated
    own, given = (", ".join(names[:5]) + (" ..." if len(names) > 5 else "") for names in (stated, labels))
    raise GateError(
        f"{backbone!r} has the classes {own}, and the data have {given}, so it is not clear which is which; label the data "
        f"with the model's classes or their numbers, 0 to {len(stated) - 1}, or correct id2label in its config.json"
    )


@dataclass
class ImageClassification(Classification):
    """Image classification with an ``AutoModelForImageClassification``; see :class:`Classification`."""

    auto: ClassVar[Any] = AutoModelForImageClassification
    what: ClassVar[str] = "a classifier of images"

    def build(self, source: Source, tokenizer: Any) -> PreTrainedModel:
        """Load a pretrained backbone with a head for the classes, or make a new one for images of the size that the processor
        makes; see :meth:`Task.build`.
        """
        pixels = tokenizer(images=[Image.new("RGB", (64, 48))], return_tensors="pt")["pixel_values"]
        size = int(pixels.shape[-2]), int(pixels.shape[-1])
        if source.from_scratch is not None:
            fields = {**source.from_scratch, **self.label_fields}
            model = from_config(self.auto, fields, {"image_size": size[0], "num_channels": 3})
            check_images(model.config, size, "the new model", "set --data.image_size to it")
            return model
        config = config_of(source)
        check_images(config, size, repr(source.backbone), "correct its preprocessor_config.json")
        return self.load(source, config)

    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Return pixels as numbers of the type that the model computes with."""
        return of_dtype(super().model_inputs(model, batch), model.dtype)


def read_image_processor(name: str) -> BaseImageProcessor:
    """Return the processor of a hub name or local folder, which makes a model's input of an image. No code from it is run."""
    try:
        processor: BaseImageProcessor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # damaged files raise errors of many kinds
        raise GateError(
            f"{name!r} has no image processor that can be read ({first_line(error)}); save the model's "
            "preprocessor_config.json there"
        ) from error
    return processor


def check_images(config: Any, size: tuple[int, int], name: str, mend: str) -> None:
    """Raise :class:`GateError` if a model of this config sees images of another size, or not of three colours."""
    stated = getattr(config, "image_size", None)
    wanted = tuple(stated) if isinstance(stated, (list, tuple)) else (stated, stated)
    if stated is not None and wanted != size:
        raise GateError(f"{name} sees images of {wanted[0]} x {wanted[1]} pixels, and they have {size[0]} x {size[1]}; {mend}")
    if (channels := getattr(config, "num_channels", 3)) != 3:
        raise GateError(f"{name} sees images of {channels} channels; expected 3, red, green and blue")


# A number for each sentence: the Auto class, the loss of every example and the metrics.

ROUNDING = 1e-12
"""The part of a mean square up to which a variance is what rounding leaves of values that are all the same."""


def products(predictions: NDArray[Any], targets: NDArray[Any]) -> Array:
    """Return the parts of a correlation, ``[..., examples, 5]``. :func:`pearson_of_means` takes their means over examples.

    A correlation depends on neither origin nor unit. Deviations from the median, relative to the largest, lose little, and
    those of equal values are exactly 0.

    Args:
        predictions: The numbers ``[..., examples]``.
        targets: The true numbers, broadcastable to them.
    """
    x, y = _deviations(predictions), np.broadcast_to(_deviations(targets), predictions.shape)
    return np.stack([x, y, x * x, y * y, x * y], axis=-1)


def _deviations(values: NDArray[Any]) -> Array:
    exact = values.astype(np.float64)
    found: Array = exact - np.median(exact, axis=-1, keepdims=True)
    largest = np.abs(found).max(axis=-1, keepdims=True)
    return np.divide(found, largest, out=found, where=largest > 0)


def pearson_of_means(means: Array) -> Array:
    """Return Pearson's correlation from means of :func:`products` ``[..., 5]``; 0 where predictions or targets do not vary."""
    x, y, xx, yy, xy = np.moveaxis(means, -1, 0)
    variance_x, variance_y = xx - x * x, yy - y * y
    varies = (variance_x > ROUNDING * xx) & (variance_y > ROUNDING * yy)
    scale = np.sqrt(variance_x * variance_y, where=varies, out=np.ones_like(xx))
    return np.divide(xy - x * y, scale, where=varies, out=np.zeros_like(xx)).clip(-1, 1)


def pearson(predictions: NDArray[Any], targets: NDArray[Any]) -> Array:
    """Return Pearson's correlation ``[...]`` of numbers ``[..., examples]``; 0 where one of them does not vary."""
    return pearson_of_means(products(predictions, targets).mean(axis=-2))


def spearman(predictions: NDArray[Any], targets: NDArray[Any]) -> Array:
    """Return Pearson's correlation of ranks, equal values having their mean rank."""
    return pearson(rankdata(predictions, axis=-1), rankdata(targets, axis=-1))


class Correlation(Metric):
    """A correlation over a split, in any batching and under DDP, as statistics compute it.

    Args:
        value: The function of predictions and targets, :func:`pearson` or :func:`spearman`.

    >>> metric = Correlation(spearman)
    >>> metric.update(torch.tensor([0.1, 0.2, 7.0]), torch.tensor([1.0, 2.0, 3.0]))
    >>> float(metric.compute())
    1.0
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    predictions: list[Tensor]
    targets: list[Tensor]

    def __init__(self, value: Callable[[NDArray[Any], NDArray[Any]], Array]) -> None:
        super().__init__()
        self.value = value
        for name in ("predictions", "targets"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add examples: predictions and targets, ``[batch]`` each."""
        self.predictions.append(predictions)
        self.targets.append(targets)

    def compute(self) -> Tensor:
        rows = (dim_zero_cat(part).cpu().numpy() for part in (self.predictions, self.targets))
        return torch.tensor(float(self.value(*rows)), dtype=torch.float64)


@dataclass
class Regression(SentenceTask):
    """A number for each sentence, by an ``AutoModelForSequenceClassification`` with one output."""

    what: ClassVar[str] = "a model of sentences"

    main_metric: str = "pearson"

    @property
    def label_fields(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the squared error of every example ``[batch]``, float32, and the predictions ``[batch, 1]``."""
        logits = model(**self.model_inputs(model, batch)).logits.float()
        return torch.square(logits[:, 0] - batch["labels"]), logits

    def metrics(self, split: str) -> MetricCollection:
        """Return Pearson's correlation and Spearman's, of ranks, the same for every split.

        A model may predict the same for every sentence, as without its heads. Then both are undefined, and 0 here.
        """
        return MetricCollection({"pearson": Correlation(pearson), "spearman": Correlation(spearman)}, compute_groups=False)

    def metric_types(self) -> dict[str, dict[str, Any]]:
        return {"pearson": {"type": "pearsonr"}, "spearman": {"type": "spearmanr"}}

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        metrics.update(logits[:, 0], batch["labels"])

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the predicted and the true numbers."""
        return logits[:, 0], batch["labels"]


@dataclass
class KnownAnswer(Classification):
    """The classifier that is compiled from a program, with its weights and the heads that it needs."""

    program: str = ""

    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Return the compiled model; rotation, places of heads and noise come from torch's seed. See :meth:`Task.build`."""
        if source.backbone is not None or source.from_scratch is None:
            raise GateError(
                f"the model of the program {self.program!r} is compiled, and {source.backbone!r} is given; give "
                "--model.from_scratch '{model_type: bert}' alone"
            )
        names = {label: index for index, label in enumerate(self.labels)}
        model = compiled(
            PROGRAMS[self.program],
            vocabulary=tokenizer.get_vocab(),
            labels=names,
            id2label={index: label for label, index in names.items()},
            label2id=names,
        )
        fields = model.config.to_dict()
        for name, value in source.from_scratch.items():
            if name not in fields or fields[name] != value:
                raise GateError(
                    f"model.from_scratch has {name}: {value}, but the program {self.program!r} decides on the model "
                    f"({name}: {fields.get(name)}); remove the option"
                )
        return model
