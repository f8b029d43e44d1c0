"""Gates, scores, masks and surgery for the attention heads of Hugging Face Transformers.

The public names are imported on first use, so that ``import gates`` alone is fast.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

# The stub file, which type checkers read too, is the only list of the public names.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULE_OF = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, flags=re.MULTILINE)}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
