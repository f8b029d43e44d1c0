"""The size of a batch, as a command line says it; without PyTorch, so that mistakes are told at once."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gates.errors import GateError


@dataclass(frozen=True)
class Size:
    """A batch.

    >>> Size.parse("8x128")
    Size(batch=8, length=128)
    """

    batch: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """Raises :class:`GateError` for another text than two numbers with an x between them."""
        found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text)
        if found is None:
            raise GateError(f"--sizes has {text!r}; expected a batch size and a length, such as 8x128")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}"
