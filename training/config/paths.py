"""Options that name a place on this machine."""

from __future__ import annotations

import os
import re

from jsonargparse.typing import register_type

from gates.errors import GateError

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of an address such as ``s3://``; one letter before the colon is a drive."""


class LocalPath(str):
    """The type of an option that names a file or folder; its value is a plain text, see :func:`local_path`."""

    __slots__ = ()


class HubName(LocalPath):
    """The same for an option that takes a name on the Hugging Face Hub too."""

    __slots__ = ()


def local_path(text: str) -> str:
    """Return a path with the home directory in place of ``~``."""
    if not isinstance(text, str) or URL.match(text) or (path := os.path.expanduser(text)).startswith("~"):
        raise GateError(f"{text!r} is not on this machine; expected the path of a file or folder here")
    return path


def _is_local(value: object, _: object) -> bool:
    return isinstance(value, str) and URL.match(value) is None and not value.startswith("~")


for kind in (LocalPath, HubName):
    register_type(kind, deserializer=local_path, type_check=_is_local)
