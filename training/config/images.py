"""Images with a class each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gates.errors import GateError
from training.config.checks import at_least_1, at_most
from training.config.classification import ClassificationOptions
from training.config.data_base import WithSplits, check_share
from training.config.paths import HubName, LocalPath

LARGEST_SIDE = 4096
"""Pixels."""


@dataclass(frozen=True)
class Images(WithSplits, ClassificationOptions):
    """Images with a class each, from local folders or a data set of the hub.

    Args:
        train_folder: training images: a folder that has a folder of images for each class.
        test_folder: the same for the results.
        select_folder: the same for every choice; without it a part of the training images is set aside.
        image_column: column of the images in a data set of the hub (default: the one called image or img).
        label_column: column of the class there (default: the one called label or labels).
        image_size: side of the images that a new model sees, in pixels (default: 224); a pretrained one knows its own.
        select_fraction: share of the training images set aside for selection when there is no split for it.
        dataset: hub name of a data set instead of folders.
        subset: its configuration.
        train_split: name of its training split.
        select_split: name of its selection split.
        test_split: name of its test split.
    """

    reader: ClassVar[str] = "training.data.images:ImagesData"

    train_folder: LocalPath | None = None
    test_folder: LocalPath | None = None
    select_folder: LocalPath | None = None
    image_column: str | None = None
    label_column: str | None = None
    image_size: int | None = None
    select_fraction: float = 0.1
    dataset: HubName | None = None
    subset: str | None = None
    train_split: str = "train"
    select_split: str | None = None
    test_split: str = "test"
    eval_batch_size: int = 64
    score_rows: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.dataset is None) == (self.train_folder is None):
            raise GateError(
                "give either a hub data set (--data.dataset) or local folders (--data.train_folder), not both or neither"
            )
        if self.train_folder is not None and self.test_folder is None:
            raise GateError("--data.train_folder is given but --data.test_folder is not; results need test images")
        check_share(self.select_fraction)
        if self.image_size is not None:
            at_least_1(self, "image_size")
            at_most(self, LARGEST_SIDE, "image_size")

    @property
    def folders(self) -> dict[str, str]:
        """The local folders by split."""
        folders = {"train": self.train_folder, "select": self.select_folder, "test": self.test_folder}
        return {name: folder for name, folder in folders.items() if folder is not None}
