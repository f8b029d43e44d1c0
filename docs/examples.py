"""Doctests in docstrings become sections of examples, which the site shows as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^|\n\n)(>>> .*?)(?=\n\n|\Z)", re.DOTALL)


class Examples(griffe.Extension):
    """Read the docstrings of all that the API reference describes, which are the public names of ``gates``."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.path == "gates":  # its __all__ is computed from the names in its stub file
            pkg.exports = [
                name for name, member in pkg.members.items() if member.is_alias and member.target_path.startswith("gates.")
            ]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(_section, obj.docstring.value)


def _section(match: re.Match[str]) -> str:
    lines = [f"    {line}" for line in match[1].splitlines()]
    return "\n".join(["", "", "Examples:", *lines])
