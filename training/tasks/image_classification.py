"""Image classification: the Auto class, and images of the size that the model sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageClassification, BaseImageProcessor, PreTrainedModel
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from gates.errors import GateError, first_line
from gates.export.example_inputs import of_dtype
from training.config import Source
from training.tasks.base import Batch
from training.tasks.classification import Classification
from training.tasks.loading import config_of, from_config, load_pretrained
from training.tasks.sentences import set_labels_

CHANNELS = 3
"""Red, green and blue."""


@dataclass
class ImageClassification(Classification):
    """Image classification with an ``AutoModelForImageClassification``; see :class:`Classification`."""

    auto: ClassVar[Any] = AutoModelForImageClassification
    what: ClassVar[str] = "a classifier of images"

    def build(self, source: Source, tokenizer: Any) -> PreTrainedModel:
        """A pretrained backbone with a head for the classes, or a new one for images of the size that the processor makes; see
        :meth:`Task.build`.

        Args:
            source: of the model.
            tokenizer: the image processor of the data.
        """
        fields, size = self.label_fields, size_of(tokenizer)
        if source.from_scratch is not None:
            model = from_config(self.auto, {**source.from_scratch, **fields}, {"image_size": size[0], "num_channels": CHANNELS})
            check_images(model.config, size, "the new model", "set --data.image_size to it")
            return model
        config = config_of(source)
        check_images(config, size, repr(source.backbone), "correct its preprocessor_config.json")
        resized = config.num_labels != fields["num_labels"]
        set_labels_(config, fields)
        return load_pretrained(self.auto, source, config, what=self.what, resized=resized)

    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Pixels as numbers of the type that the model computes with."""
        return of_dtype(super().model_inputs(model, batch), model.dtype)


def read_image_processor(name: str) -> BaseImageProcessor:
    """What makes a model's input of an image, of a hub name or local folder. No code from it is run.

    Raises:
        GateError: if there is none, or it needs a package that is not installed.
    """
    try:
        processor: BaseImageProcessor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # damaged files raise errors of many kinds
        raise GateError(
            f"{name!r} has no image processor that can be read ({first_line(error)}); save the model's "
            "preprocessor_config.json there"
        ) from error
    return processor


def size_of(processor: BaseImageProcessor) -> tuple[int, int]:
    """Height and width of what a processor makes of an image."""
    pixels = processor(images=[Image.new("RGB", (64, 48))], return_tensors="pt")["pixel_values"]
    return int(pixels.shape[-2]), int(pixels.shape[-1])


def check_images(config: Any, size: tuple[int, int], name: str, mend: str) -> None:
    """Raises :class:`GateError` if a model of this config sees images of another size, or not of three colours.

    Args:
        config: of the model.
        size: height and width of the images.
        name: what an error calls the model.
        mend: how the size can be made right.
    """
    stated = getattr(config, "image_size", None)
    wanted = tuple(stated) if isinstance(stated, (list, tuple)) else (stated, stated)
    if stated is not None and wanted != size:
        raise GateError(f"{name} sees images of {wanted[0]} x {wanted[1]} pixels, and they have {size[0]} x {size[1]}; {mend}")
    if (channels := getattr(config, "num_channels", CHANNELS)) != CHANNELS:
        raise GateError(f"{name} sees images of {channels} channels; expected {CHANNELS}, red, green and blue")
