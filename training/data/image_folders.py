"""Folders with a folder of images for each class. Nothing here loads PyTorch, so that a wrong folder is told at once."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from gates.errors import GateError, first_line

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
UNBOUNDED = {"I": "whole numbers of 32 bits", "F": "decimal numbers"}
"""Pillow's modes whose values have no largest one."""


class Folder(NamedTuple):
    """The images of a folder.

    Args:
        files: paths, in order.
        classes: of each, the name of its folder.
        others: files in folders of classes that are no images by their endings.
    """

    files: list[str]
    classes: list[str]
    others: int


def read_folder(folder: str, split: str) -> Folder:
    """The images in a folder's folders, whose names are the classes; hidden files are passed over.

    Raises:
        GateError: if it is missing, has no folders, or one of them has no image.
    """
    if not Path(folder).is_dir():
        raise GateError(f"the {split} folder {folder!r} does not exist; check the path")
    found = Folder([], [], 0)
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise GateError(f"the {split} folder {folder!r} has no folders in it; expected one for each class, with its images")
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
    """The classes of the training images, sorted.

    Args:
        classes: of the images of each split, ``train`` among them.

    Raises:
        GateError: for one class alone, and a class of another split that is not among them.
    """
    known = sorted(set(classes["train"]), key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    if len(known) < 2:
        raise GateError(f"all training images have the class {known[0]!r}; expected at least two classes")
    for split, own in classes.items():
        if unknown := sorted(set(own) - set(known)):
            raise GateError(f"the {split} images have the class {unknown[0]!r}, which the training images have not; correct it")
    return known


def open_image(content: bytes, name: str) -> Image.Image:
    """An image in red, green and blue of 8 bits each, turned as its camera says. Of 16 bits the upper 8 are taken.

    Args:
        content: of the file.
        name: what an error calls it.

    Raises:
        GateError: if it is no image, not whole, or of numbers of which nobody knows how large they can be.
    """
    try:
        with Image.open(BytesIO(content)) as image:
            if image.mode not in UNBOUNDED:
                return _of_8_bits(ImageOps.exif_transpose(image)).convert("RGB")
            mode = image.mode
    except Exception as error:  # damaged files raise errors of many kinds
        raise GateError(f"the image {name} cannot be read ({first_line(error)}); replace it or take it away") from error
    raise GateError(
        f"the image {name} holds {UNBOUNDED[mode]}, whose black and white are not known; save it with 8 or 16 bits for "
        "each colour"
    )


def _of_8_bits(image: Image.Image) -> Image.Image:
    """The same image, of grey values of 16 bits the upper 8: Pillow's own conversion makes all above 255 white."""
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
