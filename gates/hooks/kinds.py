"""What kind of attention a module is, without running the model.

First by its name, then by what it says of itself, then by the masks that the code of the model around it makes, and last by
where it lies. A forward pass would need inputs, and time on a large model. :func:`gates.hooks.probe.seen_kinds` makes one, and
finds kinds by changing tokens: the coverage table and the tests demand that both agree on every architecture.
"""

from __future__ import annotations

import functools
import inspect
import re
from types import CodeType

from torch import nn
from transformers import PreTrainedModel

CROSS_NAMES = re.compile(r"cross_?att(n|ention)(_\w+)?|final_attn_token_to_image|encoder_att(n|ention)|EncDecAttention")
MASKS = re.compile(r"create_\w*(causal|bidirectional)\w*_mask")
"""Transformers' functions that make the masks of attention; most of their names say which kind of mask."""
CAUSAL_CLASSES = (
    "BloomAttention",
    "CodeGenAttention",
    "ImageGPTAttention",
    "modeling_openai.Attention",
    "T5Gemma2MergedAttention",
    "Glm5NextTextLinearAttention",
)
"""Causal attention that does not say so, in models that make their masks on their own."""
BIDIRECTIONAL_CLASSES = (
    "Aimv2Attention",
    "BridgeTowerSelfAttention",
    "FastSpeech2ConformerAttention",
    "FunnelRelMultiheadAttention",
    "Mask2FormerAttention",
    "OneFormerAttention",
)
"""Attention that looks causal by its place or its model's masks, and in which changed tokens change earlier ones."""


def is_cross(name: str) -> bool:
    """Whether attention at this path of a model reads keys from elsewhere, by the names of modules."""
    return any(CROSS_NAMES.fullmatch(part) for part in name.split("."))


def is_causal(name: str, core: nn.Module, owner: PreTrainedModel | None) -> bool:
    """Whether tokens of self-attention do not see later ones.

    Args:
        name: path of the attention module in the model.
        core: the module that computes attention.
        owner: the innermost model around it, which makes its masks.
    """
    said = [getattr(core, attribute) for attribute in ("is_causal", "is_decoder") if hasattr(core, attribute)]
    names = (type(core).__name__, f"{type(core).__module__.rpartition('.')[2]}.{type(core).__name__}")
    if type(core).__name__ in BIDIRECTIONAL_CLASSES or type(core).__name__.endswith("DeformableAttention"):
        return False
    if any(said) or any(name in CAUSAL_CLASSES for name in names):
        return True
    if getattr(getattr(owner, "config", None), "causal", None) is True:
        return True  # XLM and FlauBERT say it in their config
    if type(core).__name__ == "BlipTextSelfAttention":
        return "text_decoder" in name.split(".")  # one class for both, told at every call
    masks = _masks_for(core, owner)
    if masks == {"causal"}:  # also CLIP's text model, whose attention calls itself bidirectional
        return not _is_bidirectional(getattr(owner, "config", None))
    of_pictures = type(core) is nn.MultiheadAttention and "pixel_values" in getattr(owner, "main_input_name", "")
    return not said and not masks and "decoder" in name.split(".") and not of_pictures


def _masks_for(core: nn.Module, owner: PreTrainedModel | None) -> frozenset[str]:
    """The kinds of masks that the model around an attention module makes; none if the module is configured by another."""
    own = getattr(core, "config", None)
    if owner is None or (own is not None and type(own) is not type(owner.config)):
        return frozenset()
    return _masks(type(owner))  # type: ignore[arg-type]


def _is_bidirectional(config: object) -> bool:
    """Whether a configuration makes a causal model bidirectional."""
    return getattr(config, "use_bidirectional_attention", None) is True or getattr(config, "is_causal", None) is False


@functools.cache
def _masks(model: type[nn.Module]) -> frozenset[str]:
    """The kinds of masks, ``causal`` and ``bidirectional``, that the methods of a class make, as their code says."""
    functions = [inspect.unwrap(value) for part in model.__mro__ for value in vars(part).values() if inspect.isfunction(value)]
    names = {name for function in functions for name in _names(function.__code__)}
    return frozenset(found[1] for name in names if (found := MASKS.fullmatch(name)))


def _names(code: CodeType) -> set[str]:
    """The names that a function refers to, with those of the functions in it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
