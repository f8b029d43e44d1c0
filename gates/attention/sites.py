"""Find every attention module of a Transformer: its kind, layer, heads and projections.

Model families are data: one table of projection names, :data:`gates.attention.layouts.LAYOUTS`. A module is an attention site
when it has all the projections of exactly one row; head counts follow from the shapes of the weights.

The kind of a site follows without running the model: see :mod:`gates.attention.sites`.
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
    BESIDE_ATTENTION,
    GATE_ONLY_CLASSES,
    LAYOUTS,
    REFUSED_CLASSES,
    TIME_FIRST_CLASSES,
    Layout,
    without_adapter,
)
from gates.errors import GateError
from gates.modeling_pruned import Headless, Selected, is_of

# What kind of attention a module is, without running the model.
#
# First by its name, then by what it says of itself, then by the masks that the code of the model around it makes, and last by
# where it lies. A forward pass would need inputs, and time on a large model. :func:`gates.attention.output_hooks.seen_kinds`
# makes one, and finds kinds by changing tokens: the coverage table and the tests demand that both agree on every architecture.

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


Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = ("encoder", "decoder", "cross")

HEAD_DIM_NAMES = ("v_head_dim", "values_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
HEAD_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "attention_heads", "heads")
Projection = nn.Linear | Conv1D


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of a model.

    Args:
        name: path of the attention module in the model; of a second stream of heads in it, the path of the stream's output.
        kind: ``encoder`` (bidirectional self-attention), ``decoder`` (causal) or ``cross``.
        layer: index of the layer in its stack (the first number in ``name``).
        heads: query heads.
        kv_heads: key/value heads; fewer than ``heads`` under grouped-query attention.
        head_dim: width of one head.
        layout: the row of the family table that matched.
        module: the attention module itself.

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
        """The module that calls the attention function (it carries scaling, head counts, layer index)."""
        return self.module.get_submodule(self.layout.core)

    @property
    def output(self) -> Projection:
        """The output projection; its input is the concatenated heads ``[batch, query, heads * head_dim]``.

        With an adapter on it (LoRA), it is the module that adds the two, whose input goes to both.
        """
        return self.projection(self.layout.output)

    @property
    def label(self) -> str:
        """Short name for tables and logs, such as ``encoder.3``."""
        return f"{self.kind}.{self.layer}"

    @property
    def gate_only(self) -> str:
        """Why its heads can be gated but not removed; empty if they can be removed."""
        if type(self.core).__name__ == "GPTBigCodeAttention" and self.kv_heads > 1:
            return "without multi-query attention its fused projection has another order"
        return self.layout.gate_only or _gate_only(self.core)

    @property
    def is_time_first(self) -> bool:
        """Whether its heads are ``[query, batch, features]`` before the output projection."""
        return any(name in TIME_FIRST_CLASSES for name in _class_names(self.core))

    def projection(self, path: str) -> Projection:
        module = self.module.get_submodule(path)
        assert is_linear(without_adapter(module))
        return module  # type: ignore[return-value]


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies its input by a matrix: a linear layer, also one that can quantise itself (I-BERT)."""
    return isinstance(module, (nn.Linear, Conv1D)) or type(module).__name__ == "QuantLinear"


def weight_by_output(projection: Projection) -> Tensor:
    """A projection's weight as ``[out, in]``, whichever way its class stores it (a view)."""
    return projection.weight.T if isinstance(projection, Conv1D) else projection.weight


def join_sites(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate values ``[..., heads of the site]`` along the last axis, on the device of the first: sites may be on several
    devices."""
    return torch.cat([part.to(parts[0].device) for part in parts], dim=-1)


def find_attention(model: nn.Module, *, only: str = "") -> tuple[AttentionSite, ...]:
    """All attention sites of ``model``, in module order, each shared module once.

    Args:
        model: any Transformer.
        only: path of a submodule whose attention alone is meant, such as ``language_model``; empty for the whole model.

    Raises:
        GateError: if the model has no attention this library knows, or some it does not know, so that gates
            would cover it only in part without that having been asked for.

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
            f"{type(model).__name__}{part} has attention modules of unknown structure ({', '.join(uncovered)}), so its heads "
            "cannot all be gated; add its projection names to gates.attention.layouts.LAYOUTS, find it by probe_attention of "
            "gates.attention.probing, or name the part that is to be gated, such as only='language_model'"
        )
    if not sites:
        raise GateError(
            f"{type(model).__name__}{part} has no attention module that gates.attention.layouts.LAYOUTS describes; "
            "use a Transformer with multi-head attention or add its projection names there"
        )
    return sites


def matched_sites(model: nn.Module, *, only: str = "") -> tuple[AttentionSite, ...]:
    """The attention sites that the table describes; see :func:`find_attention`."""
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
    """Modules that look like attention and belong to no site, by name."""
    covered = {id(part) for site in sites for part in (*site.module.modules(), *_ancestors(model, site.name))}
    modules = _modules(model, only)
    return {name: module for name, module in modules.items() if is_attention(module) and id(module) not in covered}


def _modules(model: nn.Module, only: str) -> dict[str, nn.Module]:
    """The modules of a model, or of a part of it, by their names in the model."""
    modules = dict(model.named_modules())
    if not only:
        return modules
    if only not in modules:
        known = ", ".join(name for name in modules if name and "." not in name)
        raise GateError(f"only={only!r} is no part of {type(model).__name__}; its parts are {known}")
    return {name: module for name, module in modules.items() if name == only or name.startswith(f"{only}.")}


def check_width(site: AttentionSite, heads: Tensor) -> None:
    """Raises :class:`GateError` for heads ``[..., heads * head_dim]`` of a site that has lost some since it was found."""
    if heads.shape[-1] != site.heads * site.head_dim:
        raise GateError(
            f"the attention at {site.name!r} had {site.heads} heads of {site.head_dim} features when these gates or sites were "
            f"made, and now gives {heads.shape[-1]} features: heads were removed since; make new ones of the model"
        )


def _refused(module: nn.Module) -> str:
    """Why this attention cannot be gated; empty if it can, as far as its class tells."""
    if getattr(module, "slow_but_exact", False) and getattr(module, "pretraining_tp", 1) > 1:
        return "with slow_but_exact and pretraining_tp above 1, BLOOM goes round its output projection"
    return REFUSED_CLASSES.get(type(module).__name__, "")


def _match(module: nn.Module) -> Layout | None:
    for layout in LAYOUTS if module._modules else ():
        if layout.classes and type(module).__name__ not in layout.classes:
            continue
        if all(_projection(module, path) is not None for stream in layout.streams for path in stream.paths):
            return layout
    return None


def _projection(module: nn.Module, path: str) -> Projection | None:
    """The projection at ``path`` without adapters; None if there is none."""
    found = find_module(module, path)
    found = None if found is None else without_adapter(found)
    return found if found is not None and is_linear(found) else None  # type: ignore[return-value]


def find_module(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule at ``path``; None if there is none."""
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
    """Whether a module is attention, or has some in it, by the name of its class."""
    if type(module).__name__.endswith(BESIDE_ATTENTION):
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
            f"{type(core).__name__} at {name!r} has projections of [out, in] features {sizes}, which are not those of heads of "
            f"{head_dim} features each; gates for such attention are not implemented"
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
    """Features of one head, as the module states them or from the number of its heads; None if it states neither."""
    for name in HEAD_DIM_NAMES:
        if isinstance(found := getattr(core, name, None), int):
            return found
    for place in (core, getattr(core, "config", None)):
        for name in HEAD_COUNT_NAMES:
            if isinstance(heads := getattr(place, name, None), int) and 0 < heads <= width:
                return width // heads if width % heads == 0 else None
    return None


def _is_packed(projection: Projection) -> bool:
    """Whether a linear layer holds several numbers of its matrix in one, as 4-bit weights do."""
    sizes = (getattr(projection, "out_features", None), getattr(projection, "in_features", None))
    return isinstance(projection, nn.Linear) and projection.weight.numel() != 0 and tuple(projection.weight.shape) != sizes


def _linear(module: nn.Module, path: str) -> Projection:
    found = _projection(module, path)
    assert found is not None
    return found


def _kv_heads(module: nn.Module, layout: Layout, heads: int, head_dim: int) -> int:
    """Key/value heads, from the value's projection (a norm over all heads may leave more of query and key in place)."""
    if layout.packed:
        return heads
    features = weight_by_output(_linear(module, layout.value)).shape[0] // head_dim
    parts = (layout.query, layout.key, layout.value).count(layout.value)
    return {1: features, 2: features // 2, 3: (features - heads) // 2}[parts]


def _feeds(module: nn.Module, layout: Layout, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the input projections have the features that these heads need; those of queries and keys alone may be wider than
    the heads' outputs, as where a gate is computed beside the query (Qwen3-Next)."""
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
    """The index of the layer in its stack: the first number in the name of a module, or 0."""
    return int(numbers[0]) if (numbers := re.findall(r"(?<=\.)\d+(?=\.|$)", "." + name)) else 0


def kind_of(model: nn.Module, name: str, core: nn.Module) -> Kind:
    """The kind of an attention module, by its name, what it says of itself and what the model around it does."""
    around = _ancestors(model, name)
    if is_cross(name) or any(type(part).__name__.endswith("PoolingHead") for part in (*around, core)):
        return "cross"
    owner = next((part for part in reversed(around) if isinstance(part, PreTrainedModel)), None)
    return "decoder" if is_causal(name, core, owner) else "encoder"


# Short names of attention sites for tables, each unique in its model.


def site_labels(sites: Sequence[AttentionSite]) -> tuple[str, ...]:
    """A name for each site: its label, such as ``encoder.3``, with as much of its path as tells it from sites of the same kind.

    Two stacks of one kind are told apart by the first word in which their paths differ (``text_model.encoder.3``,
    ``vision_model.encoder.3``), and layers in groups by all their numbers (``encoder.0.1``).
    """
    labels: dict[str, str] = {}
    for kind in KINDS:
        own = [site for site in sites if site.kind == kind]
        found = next(names for names in _ways(own) if len(set(names)) == len(own))
        labels.update(zip((site.name for site in own), found, strict=True))
    return tuple(labels[site.name] for site in sites)


def _ways(sites: Sequence[AttentionSite]) -> Iterator[list[str]]:
    """Names for sites of one kind, from the shortest to those that are surely unique."""
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
