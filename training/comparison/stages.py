"""The stages of a comparison: what is done with a mask before the model is judged."""

from __future__ import annotations

from typing import Literal, get_args

Stage = Literal["post hoc", "post hoc with means", "post hoc with uniform attention", "retrained", "from scratch"]
STAGES: tuple[str, ...] = get_args(Stage)
"""In the second and third, closed heads are not zero but have their mean output, or attend uniformly."""


def is_post_hoc(stage: str) -> bool:
    """Whether the dense model is evaluated as it is, without training on."""
    return stage.startswith("post hoc")
