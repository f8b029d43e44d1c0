"""Images with a class each, from local folders or a hub dataset."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import xxhash
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForImageClassification, BaseImageProcessor, ViTImageProcessor

from gates.errors import GateError
from training.config.data import Images
from training.data.base import SPLITS, TaskData, set_aside_rows
from training.data.files import find_column
from training.data.image_folders import check_image_classes, open_image, read_folder
from training.data.text import named_labels, ordered_classes, read_hub
from training.tasks import ImageClassification
from training.tasks.classification import read_image_processor
from training.tasks.loading import check_class


class ImagesData(TaskData):
    """Images with a class each. Batches read them; ``build`` reads each of them once, to refuse a damaged one at once.

    Attributes:
        images: The processor that turns an image into the model's input.
    """

    options: Images
    unit = "images"

    def __init__(self, options: Images) -> None:
        super().__init__(options)
        self.images: BaseImageProcessor | None = None

    @property
    def processor(self) -> BaseImageProcessor | None:
        return self.images

    def check_backbone(self, config: Any, name: str) -> None:
        check_class(AutoModelForImageClassification, config, name, "classify images; give one such as ViT")

    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        if self.splits:
            return
        side = self.options.image_size
        if backbone is not None and side is not None:
            raise GateError(f"image_size is {side}, but a pretrained model has its own size of images; remove the option")
        if backbone is None:
            side = side or 224
            self.images = ViTImageProcessor(size={"height": side, "width": side})
        else:
            self.images = read_image_processor(backbone)
        if self.options.dataset is None:
            found = self._read_folders()
        else:
            hub = read_hub(self.options, instead="--data.train_folder")
            found = {name: self._columns_of(name, split) for name, split in hub.items()}
        classes = check_image_classes({name: split["class"][:] for name, split in found.items()})
        numbers, self.labels = ordered_classes(classes, stated_labels, self.options)
        self.splits = {name: _checked(name, split, numbers) for name, split in self._with_selection(found).items()}

    def _read_folders(self) -> dict[str, Dataset]:
        found = {}
        for name, folder in self.options.folders.items():
            files, classes, others = read_folder(folder, name)
            if others:
                self.notices.append(f"{others} files in the {name} folder are left out: their endings are not those of images")
            held = [{"path": file, "bytes": None} for file in files]
            features = datasets.Features({"image": datasets.Image(decode=False), "class": datasets.Value("string")})
            found[name] = Dataset.from_dict({"image": held, "class": classes}, features=features)
        return found

    def _columns_of(self, name: str, split: Dataset) -> Dataset:
        """Return the columns of stored images and of class names."""
        where = f"the {name} split"
        image = find_column(where, "image", split.column_names, self.options.image_column, ("image", "img"))
        label = find_column(where, "label", split.column_names, self.options.label_column, ("label", "labels"))
        if not isinstance(split.features[image], datasets.Image):
            raise GateError(f"{image!r} of {where} holds no images; give --data.image_column")
        if split.num_rows == 0:
            raise GateError(f"{where} is empty; expected at least one image")
        labels = named_labels(split[label][:], split.features[label], where)
        own = split.select_columns(image).cast_column(image, datasets.Image(decode=False))
        own = own.rename_column(image, "image") if image != "image" else own
        return own.add_column("class", list(map(str, labels)))

    def _with_selection(self, found: dict[str, Dataset]) -> dict[str, Dataset]:
        if "select" in found:
            return {name: found[name] for name in SPLITS}
        train = found["train"]
        halves = set_aside_rows(train.num_rows, self.options.select_fraction, "images", "folder")
        kept, aside = (train.select(np.sort(rows)) for rows in halves)
        self.set_aside = True
        return {"train": kept, "select": aside, "test": found["test"]}

    @property
    def task(self) -> ImageClassification:
        return ImageClassification(self.labels, self.options.metric)

    def fingerprint(self) -> str:
        """Return a hash of all images, their classes, the processor, and the order of batches."""
        assert self.images is not None
        content: list[Any] = [self.order, self.labels, self.options.metric, self.images.to_dict()]
        content += [[split["digest"][:], split["labels"][:]] for split in (self.splits[name] for name in SPLITS)]
        return xxhash.xxh3_128(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    def collate(self, split: str) -> StackImages:
        assert self.images is not None
        return StackImages(self.images)


@dataclass(frozen=True)
class StackImages:
    """Make a batch of images and the numbers of their classes."""

    processor: BaseImageProcessor

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        images = [open_image(_content(row["image"]), repr(row["image"]["path"])) for row in rows]
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows])}


def _content(stored: dict[str, Any]) -> bytes:
    """Return the file of an image that ``datasets`` stores by its bytes or its path."""
    return bytes(Path(stored["path"]).read_bytes() if stored["bytes"] is None else stored["bytes"])


def _checked(name: str, split: Dataset, numbers: dict[str, float]) -> Dataset:
    """Return a split with the number of each class, after opening every image."""
    digests = []
    for row in range(split.num_rows):
        stored = split[row]["image"]
        if stored is None:
            raise GateError(f"example {row + 1} of the {name} split has no image; remove it")
        content = _content(stored)
        open_image(content, repr(stored["path"]) if stored["path"] else f"{row + 1} of the {name} split")
        digests.append(xxhash.xxh3_64(content).hexdigest())
    labels = [int(numbers[label]) for label in split["class"][:]]
    named = split.remove_columns("class").add_column("labels", labels).add_column("digest", digests)
    return named.add_column("length", [1] * split.num_rows)
