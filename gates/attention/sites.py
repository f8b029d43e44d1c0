"""Find every attention module of a Transformer: its kind, layer, heads and projections.

Model families are data: one table of projection names, :data:`gates.attention.layouts.LAYOUTS`. A module is an attention site
when it has all the projections of exactly one row. Head counts follow from the shapes of the weights.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gates.attention.layouts import (
    GATE_ONLY_CLASSES,
    LAYOUTS,
    NOT_ATTENTION,
    REFUSED_CLASSES,
    TIME_FIRST_CLASSES,
    Layout,
    without_adapter,
)
from gates.errors import GateError
from gates.modeling_pruned import Headless, Selected, is_of

# The kind of a site is found without running the model, because a forward pass needs inputs and time. The criteria are, in
# order: the module's name, its attributes, the masks that the surrounding model makes, and its place in the model.
# The tests find kinds by forward passes with changed tokens, and require that both agree on every architecture.

CROSS_NAMES = re.compile(r"cross_?att(n|ention)(_\w+)?|final_attn_token_to_image|encoder_att(n|ention)|EncDecAttention")
MASKS = re.compile(r"create_\w*(causal|bidirectional)\w*_mask")
"""The names of Transformers' functions that make attention masks. Most names contain the kind of the mask."""
CAUSAL_CLASSES = (
    "BloomAttention",
    "CodeGenAttention",
    "ImageGPTAttention",
    "modeling_openai.Attention",
    "T5Gemma2MergedAttention",
    "Glm5NextTextLinearAttention",
)
"""Causal attention without an attribute that says so, in models with their own code for masks."""
BIDIRECTIONAL_CLASSES = (
    "Aimv2Attention",
    "BridgeTowerSelfAttention",
    "FastSpeech2ConformerAttention",
    "FunnelRelMultiheadAttention",
    "Mask2FormerAttention",
    "OneFormerAttention",
)
"""Attention that appears causal by its place or its model's masks, but in which a token changes earlier ones."""


def is_causal(name: str, core: nn.Module, owner: PreTrainedModel | None) -> bool:
    """Return whether tokens of a self-attention module do not see later ones.

    Args:
        owner: The innermost model around it, which makes its masks.
    """
    flags = [getattr(core, attribute) for attribute in ("is_causal", "is_decoder") if hasattr(core, attribute)]
    if type(core).__name__ in BIDIRECTIONAL_CLASSES or type(core).__name__.endswith("DeformableAttention"):
        return False
    if any(flags) or any(name in CAUSAL_CLASSES for name in _class_names(core)):
        return True
    if getattr(getattr(owner, "config", None), "causal", None) is True:
        return True  # XLM and FlauBERT
    if type(core).__name__ == "BlipTextSelfAttention":
        return "text_decoder" in name.split(".")  # one class for both; an argument of the call decides
    masks = _masks_for(core, owner)
    if masks == {"causal"}:  # also CLIP's text model, whose attention calls itself bidirectional
        return not _is_bidirectional(getattr(owner, "config", None))
    of_pictures = type(core) is nn.MultiheadAttention and "pixel_values" in getattr(owner, "main_input_name", "")
    return not flags and not masks and "decoder" in name.split(".") and not of_pictures


def _masks_for(core: nn.Module, owner: PreTrainedModel | None) -> frozenset[str]:
    """Return the kinds of masks that the owner makes; none if the module has a config of another model."""
    own = getattr(core, "config", None)
    if owner is None or (own is not None and type(own) is not type(owner.config)):
        return frozenset()
    return _masks(type(owner))  # type: ignore[arg-type]


def _is_bidirectional(config: object) -> bool:
    return getattr(config, "use_bidirectional_attention", None) is True or getattr(config, "is_causal", None) is False


@functools.cache
def _masks(model: type[nn.Module]) -> frozenset[str]:
    """Return the kinds of masks, ``causal`` and ``bidirectional``, whose functions the methods of a class name."""
    functions = [inspect.unwrap(value) for part in model.__mro__ for value in vars(part).values() if inspect.isfunction(value)]
    names = {name for function in functions for name in _names(function.__code__)}
    return frozenset(found[1] for name in names if (found := MASKS.fullmatch(name)))


def _names(code: CodeType) -> set[str]:
    """Return the names that a function and its inner functions refer to."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = ("encoder", "decoder", "cross")

HEAD_DIM_NAMES = ("v_head_dim", "values_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
HEAD_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "attention_heads", "heads")
Projection = nn.Linear | Conv1D


@dataclass(frozen=True)
class AttentionSite:
    """Describe one attention module of a model.

    Args:
        name: The path of the attention module in the model. For a second stream of heads, the path of the stream's output.
        kind: ``encoder`` (bidirectional self-attention), ``decoder`` (causal) or ``cross``.
        layer: The index of the layer in its stack (the first number in ``name``).
        heads: The number of query heads.
        kv_heads: The number of key/value heads, fewer than ``heads`` under grouped-query attention.
        head_dim: The number of features of one head.
        layout: The row of the family table that matched.
        module: The attention module itself.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    >>> (site,) = find_attention(LlamaModel(LlamaConfig(num_key_value_heads=2, vocab_size=50, **size)))
    >>> site.kind, site.layer, site.heads, site.kv_heads, site.head_dim
    ('decoder', 0, 4, 2, 8)
    """

    name: str
    kind: Kind
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: Layout
    module: nn.Module

    @property
    def core(self) -> nn.Module:
        """Return the module that calls the attention function and has scaling, head counts and layer index."""
        return self.module.get_submodule(self.layout.core)

    @property
    def output(self) -> Projection:
        """Return the output projection, whose input is the concatenated heads ``[batch, query, heads * head_dim]``.

        With a LoRA adapter, this is the module that adds the projection and the adapter.
        """
        return self.projection(self.layout.output)

    @property
    def label(self) -> str:
        """Return a short name for tables and logs, such as ``encoder.3``."""
        return f"{self.kind}.{self.layer}"

    @property
    def gate_only(self) -> str:
        """Return why the heads can be gated but not removed; empty if they can be removed."""
        if type(self.core).__name__ == "GPTBigCodeAttention" and self.kv_heads > 1:
            return "without multi-query attention its fused projection has another order"
        return self.layout.gate_only or _gate_only(self.core)

    @property
    def is_time_first(self) -> bool:
        """Return whether the heads are ``[query, batch, features]`` before the output projection."""
        return any(name in TIME_FIRST_CLASSES for name in _class_names(self.core))

    def projection(self, path: str) -> Projection:
        module = self.module.get_submodule(path)
        assert is_linear(without_adapter(module))
        return module  # type: ignore[return-value]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, including I-BERT's, which can quantise itself."""
    return isinstance(module, (nn.Linear, Conv1D)) or type(module).__name__ == "QuantLinear"


def weight_by_output(projection: Projection) -> Tensor:
    """Return a view of a projection's weight as ``[out, in]``, however its class stores it."""
    return projection.weight.T if isinstance(projection, Conv1D) else projection.weight


def join_sites(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate values ``[..., heads of the site]`` along the last axis, on the device of the first part."""
    return torch.cat([part.to(parts[0].device) for part in parts], dim=-1)


def find_attention(model: nn.Module, *, only: str = "") -> tuple[AttentionSite, ...]:
    """Return all attention sites of ``model`` in module order, each shared module once.

    Args:
        model: A Transformer.
        only: The path of a submodule to search, such as ``language_model``. Empty for the whole model.

    Raises:
        GateError: If the model has no known attention, or some unknown attention, which gates would not cover.

    >>> from transformers import BertConfig, BertModel
    >>> sites = find_attention(BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)))
    >>> [(site.name, site.kind, site.heads) for site in sites]
    [('encoder.layer.0.attention', 'encoder', 4), ('encoder.layer.1.attention', 'encoder', 4)]
    """
    sites = matched_sites(model, only=only)
    uncovered = sorted({type(module).__name__ for module in unknown_attention(model, sites, only=only).values()})
    part = f" at {only!r}" if only else ""
    if uncovered:
        raise GateError(
            f"{type(model).__name__}{part} has attention modules of unknown structure ({', '.join(uncovered)}); add them to "
            "gates.attention.layouts.LAYOUTS, find them by gates.attention.probing.probe_attention, or name the part to gate, "
            "such as only='language_model'"
        )
    if not sites:
        raise GateError(
            f"{type(model).__name__}{part} has no attention module that gates.attention.layouts.LAYOUTS describes; "
            "use a Transformer with multi-head attention or add its projection names there"
        )
    return sites


def matched_sites(model: nn.Module, *, only: str = "") -> tuple[AttentionSite, ...]:
    """Return the attention sites that the table of layouts describes; see :func:`find_attention`."""
    modules = _modules(model, only)
    if reason := next((_refused(module) for module in modules.values() if _refused(module)), ""):
        raise GateError(f"the heads of {type(model).__name__} cannot be gated: {reason}; use another model")
    return tuple(
        _site(model, name if layout is matched else f"{name}.{layout.output.split('.')[0]}", module, layout)
        for name, module in modules.items()
        if (matched := _match(module)) is not None
        for layout in matched.streams
    )


def unknown_attention(model: nn.Module, sites: Iterable[AttentionSite], *, only: str = "") -> dict[str, nn.Module]:
    """Return the modules, by name, that look like attention and belong to no site."""
    covered = {id(part) for site in sites for part in (*site.module.modules(), *_ancestors(model, site.name))}
    modules = _modules(model, only)
    return {name: module for name, module in modules.items() if is_attention(module) and id(module) not in covered}


def _modules(model: nn.Module, only: str) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if not only:
        return modules
    if only not in modules:
        known = ", ".join(name for name in modules if name and "." not in name)
        raise GateError(f"only={only!r} is no part of {type(model).__name__}; its parts are {known}")
    return {name: module for name, module in modules.items() if name == only or name.startswith(f"{only}.")}


def check_width(site: AttentionSite, heads: Tensor) -> None:
    """Raise :class:`GateError` if a site has lost heads since it was found, judged by ``[..., heads * head_dim]``."""
    if heads.shape[-1] != site.heads * site.head_dim:
        raise GateError(
            f"the attention at {site.name!r} gives {heads.shape[-1]} features, but had {site.heads} heads of {site.head_dim} "
            "features when it was found; make new gates or sites after removing heads"
        )


def _refused(module: nn.Module) -> str:
    """Return why this attention cannot be gated; empty if it can."""
    if getattr(module, "slow_but_exact", False) and getattr(module, "pretraining_tp", 1) > 1:
        return "with slow_but_exact and pretraining_tp above 1, BLOOM does not call its output projection"
    return REFUSED_CLASSES.get(type(module).__name__, "")


def _match(module: nn.Module) -> Layout | None:
    for layout in LAYOUTS if module._modules else ():
        if layout.classes and type(module).__name__ not in layout.classes:
            continue
        if all(_projection(module, path) is not None for stream in layout.streams for path in stream.paths):
            return layout
    return None


def _projection(module: nn.Module, path: str) -> Projection | None:
    """Return the projection at ``path`` without adapters; None if there is none."""
    found = find_module(module, path)
    found = None if found is None else without_adapter(found)
    return found if found is not None and is_linear(found) else None  # type: ignore[return-value]


def find_module(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule at ``path``; None if there is none."""
    for part in path.split("."):
        found = module._modules.get(part)
        if found is None:
            return None
        module = found
    return module


def _ancestors(model: nn.Module, name: str) -> list[nn.Module]:
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:length])) for length in range(len(parts))]


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is attention or contains some, judged by the name of its class."""
    if type(module).__name__.endswith(NOT_ATTENTION):
        return False
    if not any(True for _ in module.parameters()) or any(is_of(type(part), Headless) for part in module.modules()):
        return False
    return isinstance(module, nn.MultiheadAttention) or "Attention" in type(module).__name__


def _site(model: nn.Module, name: str, module: nn.Module, layout: Layout) -> AttentionSite:
    core = module.get_submodule(layout.core)
    if packed := next((path for path in layout.paths if _is_packed(_linear(module, path))), None):
        raise GateError(
            f"{packed!r} of {type(core).__name__} at {name!r} is quantised: its weight is packed to "
            f"{tuple(_linear(module, packed).weight.shape)}; load the model in 8 bits or more to gate its heads"
        )
    width = weight_by_output(_linear(module, layout.output)).shape[1]
    head_dim = _head_dim(core, width)
    if head_dim is None:
        names = " or ".join((*HEAD_DIM_NAMES, *HEAD_COUNT_NAMES))
        raise GateError(f"{type(core).__name__} at {name!r} states neither its head size nor its number of heads ({names})")
    head_dim //= getattr(core, layout.narrowed_by) if layout.narrowed_by else 1
    heads, odd = divmod(width, head_dim)
    gate_only = layout.gate_only or _gate_only(core)
    kv_heads = heads if layout.gate_only else _kv_heads(module, layout, heads, head_dim)
    if odd or kv_heads < 1 or heads % kv_heads or not (gate_only or _feeds(module, layout, heads, kv_heads, head_dim)):
        sizes = {path: tuple(weight_by_output(_linear(module, path)).shape) for path in layout.paths}
        raise GateError(
            f"{type(core).__name__} at {name!r} has projections of [out, in] features {sizes}, which do not fit heads of "
            f"{head_dim} features; gates for such attention are not implemented"
        )
    return AttentionSite(
        name=name,
        kind=kind_of(model, name, core),
        layer=layer_of(name),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layout=layout,
        module=module,
    )


def _gate_only(core: nn.Module) -> str:
    return next((GATE_ONLY_CLASSES[name] for name in _class_names(core) if name in GATE_ONLY_CLASSES), "")


def _class_names(module: nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__name__, f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


def _head_dim(core: nn.Module, width: int) -> int | None:
    """Return the features of one head, from the module's head size or number of heads; None if it has neither."""
    for name in HEAD_DIM_NAMES:
        if isinstance(found := getattr(core, name, None), int):
            return found
    for place in (core, getattr(core, "config", None)):
        for name in HEAD_COUNT_NAMES:
            if isinstance(heads := getattr(place, name, None), int) and 0 < heads <= width:
                return width // heads if width % heads == 0 else None
    return None


def _is_packed(projection: Projection) -> bool:
    """Return whether a linear layer stores several weights in one number, as 4-bit weights do."""
    sizes = (getattr(projection, "out_features", None), getattr(projection, "in_features", None))
    return isinstance(projection, nn.Linear) and projection.weight.numel() != 0 and tuple(projection.weight.shape) != sizes


def _linear(module: nn.Module, path: str) -> Projection:
    found = _projection(module, path)
    assert found is not None
    return found


def _kv_heads(module: nn.Module, layout: Layout, heads: int, head_dim: int) -> int:
    """Count key/value heads from the value's projection, since a norm over all heads may keep more of query and key."""
    if layout.packed:
        return heads
    features = weight_by_output(_linear(module, layout.value)).shape[0] // head_dim
    parts = (layout.query, layout.key, layout.value).count(layout.value)
    return {1: features, 2: features // 2, 3: (features - heads) // 2}[parts]


def _feeds(module: nn.Module, layout: Layout, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Return whether the input projections have the features that these heads need. Separate projections of queries and keys
    may be wider than the heads' outputs: Qwen3-Next computes a gate with the query."""
    if layout.packed:
        return tuple(getattr(module, f"{layout.packed}_weight", torch.empty(0)).shape[:1]) == (3 * heads * head_dim,)
    expected: dict[str, int] = {}
    parts = ((layout.query, heads), (layout.key, kv_heads), (layout.value, kv_heads))
    for path, count in parts:
        expected[path] = expected.get(path, 0) + count * head_dim
    selected = {name for name, part in module.named_modules() if is_of(type(part), Selected)}
    alone = {path: count for path, count in parts[:2] if [other for other, _ in parts].count(path) == 1}
    for path, features in expected.items():
        found = weight_by_output(_linear(module, path)).shape[0]
        fits = found == features or (path in alone and found % alone[path] == 0)
        if not fits and not (selected and path in (layout.query, layout.key)):
            return False
    return True


def layer_of(name: str) -> int:
    """Return the index of the layer in its stack: the first number in the name of a module, or 0."""
    return int(numbers[0]) if (numbers := re.findall(r"(?<=\.)\d+(?=\.|$)", "." + name)) else 0


def kind_of(model: nn.Module, name: str, core: nn.Module) -> Kind:
    """Return the kind of an attention module, judged by its name, its attributes and the model around it."""
    around = _ancestors(model, name)
    is_named_cross = any(CROSS_NAMES.fullmatch(part) for part in name.split("."))
    if is_named_cross or any(type(part).__name__.endswith("PoolingHead") for part in (*around, core)):
        return "cross"
    owner = next((part for part in reversed(around) if isinstance(part, PreTrainedModel)), None)
    return "decoder" if is_causal(name, core, owner) else "encoder"


def site_labels(sites: Sequence[AttentionSite]) -> tuple[str, ...]:
    """Return a unique name for each site: its label, such as ``encoder.3``, extended by parts of its path where necessary.

    Two stacks of one kind get the first word in which their paths differ (``text_model.encoder.3``,
    ``vision_model.encoder.3``). Layers in groups get all their numbers (``encoder.0.1``).
    """
    labels: dict[str, str] = {}
    for kind in KINDS:
        own = [site for site in sites if site.kind == kind]
        found = next(names for names in _candidate_labels(own) if len(set(names)) == len(own))
        labels.update(zip((site.name for site in own), found, strict=True))
    return tuple(labels[site.name] for site in sites)


def _candidate_labels(sites: Sequence[AttentionSite]) -> Iterator[list[str]]:
    """Yield names for sites of one kind, from the shortest to the full path, which is unique."""
    shared = set.intersection(*(set(_words(site)) for site in sites)) if sites else set()
    for words, numbers in ((0, 1), (1, 1), (0, None), (1, None), (None, None)):
        yield [
            ".".join([*[word for word in _words(site) if word not in shared][:words], site.kind, *_numbers(site)[:numbers]])
            for site in sites
        ]
    yield [site.name for site in sites]


def _words(site: AttentionSite) -> list[str]:
    return [part for part in site.name.split(".") if not part.isdecimal()]


def _numbers(site: AttentionSite) -> list[str]:
    return [part for part in site.name.split(".") if part.isdecimal()] or [str(site.layer)]
