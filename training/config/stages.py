"""The stages of a comparison: what is done with a mask before the model is judged."""

from __future__ import annotations

POST_HOC, RETRAINED, FROM_SCRATCH = "post hoc", "retrained", "from scratch"
WITH_MEANS, WITH_CONSTANTS, WITH_UNIFORM = (
    f"{POST_HOC} with {what}" for what in ("means", "optimal constants", "uniform attention")
)
"""Closed heads are not zero but have their mean output, or the constants that cost least, or attend uniformly."""
FROM_DENSE = f"{RETRAINED} from dense"
"""The mask goes onto the dense model and is trained on for the steps of both phases, whatever steps went into finding it."""
AT_TOTAL_COST = f"{RETRAINED} at equal total cost"
"""Trained on for as many passes as finding the mask has left over."""
STAGES = (POST_HOC, WITH_MEANS, WITH_CONSTANTS, WITH_UNIFORM, RETRAINED, FROM_DENSE, AT_TOTAL_COST, FROM_SCRATCH)


def is_post_hoc(stage: str) -> bool:
    """Whether the dense model is evaluated as it is, without training on."""
    return stage.startswith(POST_HOC)


def is_of_dense(stage: str) -> bool:
    """Whether the mask goes onto the dense model, as it is or to train on, and not onto weights trained with gates."""
    return is_post_hoc(stage) or stage == FROM_DENSE
