"""Folders with a folder of images for each class. This module does not load PyTorch, so a wrong folder is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from gates.errors import GateError, first_line
from training.data.labels import in_order

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
UNBOUNDED = {"I": "whole numbers of 32 bits", "F": "decimal numbers"}
"""Pillow's modes without a largest value."""


class Folder(NamedTuple):
    """The images of a folder."""

    files: list[str]
    classes: list[str]
    others: int
    """The number of files without the ending of an image."""


def read_folder(folder: str, split: str) -> Folder:
    """Return the images in a folder's folders, whose names are the classes; skip hidden files."""
    if not Path(folder).is_dir():
        raise GateError(f"the {split} folder {folder!r} does not exist; check the path")
    found = Folder([], [], 0)
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise GateError(f"the {split} folder {folder!r} has no folders; expected one for each class, with its images")
    others = 0
    for own in classes:
        files = [path for path in sorted(own.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        images = [str(path) for path in files if path.suffix.lower() in ENDINGS]
        if not images:
            raise GateError(f"the folder {str(own)!r} has no images; expected files such as .png or .jpg")
        found.files.extend(images)
        found.classes.extend([own.name] * len(images))
        others += len(files) - len(images)
    return found._replace(others=others)


def check_image_classes(classes: Mapping[str, list[str]]) -> list[str]:
    """Return the classes of the training images, in order."""
    known = in_order(classes["train"])
    if len(known) < 2:
        raise GateError(f"all training images have the class {known[0]!r}; expected at least two classes")
    for split, own in classes.items():
        if unknown := sorted(set(own) - set(known)):
            raise GateError(f"the {split} images have the class {unknown[0]!r}, but no training image has it; correct it")
    return known


def open_image(content: bytes, name: str) -> Image.Image:
    """Return an image in 8-bit RGB, rotated as its camera states. Of 16 bits, the upper 8 are used."""
    try:
        with Image.open(BytesIO(content)) as image:
            mode = image.mode
            if mode not in UNBOUNDED:
                turned = ImageOps.exif_transpose(image)
                if mode.startswith("I;16"):  # Pillow's own conversion makes all grey values above 255 white
                    turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
                return turned.convert("RGB")
    except Exception as error:  # damaged files raise errors of many kinds
        raise GateError(f"the image {name} cannot be read ({first_line(error)}); replace or remove it") from error
    raise GateError(
        f"the image {name} holds {UNBOUNDED[mode]}, whose black and white are unknown; save it with 8 or 16 bits per colour"
    )
