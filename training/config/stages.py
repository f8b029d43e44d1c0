"""The stages of a comparison: what is done with a mask before the model is judged."""

from __future__ import annotations

POST_HOC, RETRAINED, FROM_SCRATCH = "post hoc", "retrained", "from scratch"
STAGES = (POST_HOC, "post hoc with means", "post hoc with uniform attention", RETRAINED, FROM_SCRATCH)
"""In the second and third, closed heads are not zero but have their mean output, or attend uniformly."""


def is_post_hoc(stage: str) -> bool:
    """Whether the dense model is evaluated as it is, without training on."""
    return stage.startswith(POST_HOC)
