"""For which families relevance is claimed: those on which its conservation is tested."""

from __future__ import annotations

import torch
from torch import nn

from gates.errors import GateError

FAMILIES = (
    "albert", "bart", "bert", "camembert", "deberta-v2", "deit", "distilbert", "electra", "gemma", "gemma2", "gpt2", "gpt_neox",
    "llama", "marian", "mbart", "mistral", "modernbert", "mpnet", "mt5", "opt", "phi3", "qwen2", "qwen3", "roberta", "t5",
    "vit", "xlm-roberta",
)  # fmt: skip
"""By ``model_type`` of the config."""


def check_family(model: nn.Module) -> None:
    """Whether relevance is claimed for a model.

    Raises:
        GateError: for a family that is not in :data:`FAMILIES`, and for half precision.
    """
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in FAMILIES:
        raise GateError(
            f"no relevance is claimed for models of type {family!r}: its conservation is tested on {', '.join(FAMILIES)} only; "
            "rank heads by another score, such as his"
        )
    half = {parameter.dtype for parameter in model.parameters()} & {torch.float16, torch.bfloat16}
    if half:
        raise GateError(
            f"the model has weights in {half.pop()}, in which relevance is lost to rounding; use model.float(), or rank heads "
            "by another score, such as his"
        )
