"""Find every attention module of a Transformer: its kind, layer, heads and projections.

Model families are data: one table of projection names, :data:`gates.surgery.layouts.LAYOUTS`. A module is an attention site
when it has all the projections of exactly one row; head counts follow from the shapes of the weights.

The kind of a site follows without running the model: see :mod:`gates.hooks.kinds`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gates.errors import GateError
from gates.hooks.kinds import is_causal, is_cross
from gates.surgery.adapters import without_adapter
from gates.surgery.layouts import LAYOUTS, SPARSE, Layout
from gates.surgery.pruned import Headless, Selected, is_of

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = ("encoder", "decoder", "cross")

HEAD_DIM_NAMES = ("v_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
DIFFERENCE = "each of its heads is the difference of two"
RELATIVE = "its table of position biases has an axis of heads that is not known how to cut"
WIDTH = "it takes the width of its input for that of its heads together"
GATE_ONLY_CLASSES = {
    "LongformerSelfAttention": SPARSE,
    "BigBirdBlockSparseAttention": SPARSE,
    "BigBirdSelfAttention": SPARSE,  # what a short text makes of it
    "PegasusXGlobalLocalAttention": SPARSE,
    "DiffLlamaAttention": DIFFERENCE,
    "BeitAttention": RELATIVE,
    "Data2VecVisionSelfAttention": RELATIVE,
    "Data2VecVisionSdpaSelfAttention": RELATIVE,
    "LayoutLMv3SelfAttention": RELATIVE,
    "LayoutLMv2SelfAttention": RELATIVE,
    "TrOCRAttention": WIDTH,
    "modeling_fsmt.Attention": WIDTH,
    "GPTNeoXJapaneseAttention": "it adds a bias of its own behind its output projection",
    "DogeAttention": "the scores of its dynamic mask have weights for each head that are not known how to cut",
}
"""Attention with the projections of a row above whose heads cannot be removed, with the reason; by the name of the class, or of
its file and the class where the name alone says little."""
REFUSED_CLASSES = {
    "ProphetNetNgramSelfAttention": "it predicts several future tokens by streams that share one attention module",
    "WavLMAttention": "it goes round its output projection, where a gate would be",
}
"""Attention that cannot be gated either, with the reason."""
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
        kind = type(self.core)
        names = (kind.__name__, f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}")
        return self.layout.gate_only or next((GATE_ONLY_CLASSES[name] for name in names if name in GATE_ONLY_CLASSES), "")

    def projection(self, path: str) -> Projection:
        module = self.module.get_submodule(path)
        assert isinstance(without_adapter(module), (nn.Linear, Conv1D))
        return module  # type: ignore[return-value]


def weight_by_output(projection: Projection) -> Tensor:
    """A projection's weight as ``[out, in]``, whichever way its class stores it (a view)."""
    return projection.weight.T if isinstance(projection, Conv1D) else projection.weight


def find_attention(model: nn.Module) -> tuple[AttentionSite, ...]:
    """All attention sites of ``model``, in module order, each shared module once.

    Raises:
        GateError: if the model has no attention this library knows, or some it does not know, so that gates
            would cover it only in part.

    >>> from transformers import BertConfig, BertModel
    >>> sites = find_attention(BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)))
    >>> [(site.name, site.kind, site.heads) for site in sites]
    [('encoder.layer.0.attention', 'encoder', 4), ('encoder.layer.1.attention', 'encoder', 4)]
    """
    sites = tuple(
        _site(model, name if layout is matched else f"{name}.{layout.output.split('.')[0]}", module, layout)
        for name, module in model.named_modules()
        if (matched := _match(module)) is not None
        for layout in matched.streams
    )
    covered = {id(part) for site in sites for part in (*site.module.modules(), *_ancestors(model, site.name))}
    uncovered = sorted(
        {type(module).__name__ for module in model.modules() if _is_attention(module) and id(module) not in covered}
    )
    if reason := next((_refused(module) for module in model.modules() if _refused(module)), ""):
        raise GateError(f"the heads of {type(model).__name__} cannot be gated: {reason}; use another model")
    if uncovered:
        raise GateError(
            f"{type(model).__name__} has attention modules of unknown structure ({', '.join(uncovered)}), so its heads cannot "
            "all be gated; use a model whose attention is in gates.surgery.layouts.LAYOUTS or add its projection names there"
        )
    if not sites:
        raise GateError(
            f"{type(model).__name__} has no attention module that gates.surgery.layouts.LAYOUTS describes; "
            "use a Transformer with multi-head attention or add its projection names there"
        )
    return sites


def check_width(site: AttentionSite, heads: Tensor) -> None:
    """Raises :class:`GateError` for heads ``[..., heads * head_dim]`` of a site that has lost some since it was found."""
    if heads.shape[-1] != site.heads * site.head_dim:
        raise GateError(
            f"the attention at {site.name!r} had {site.heads} heads of {site.head_dim} features when these gates or sites were "
            f"made, and now gives {heads.shape[-1]} features: heads were removed since; make new ones of the model"
        )


def describe_kinds(sites: tuple[AttentionSite, ...]) -> dict[str, int]:
    """Heads of each kind that the model has, such as ``{"encoder": 72}``."""
    return {kind: count for kind in KINDS if (count := sum(site.heads for site in sites if site.kind == kind))}


def _refused(module: nn.Module) -> str:
    """Why this attention cannot be gated; empty if it can, as far as its class tells."""
    if getattr(module, "slow_but_exact", False) and getattr(module, "pretraining_tp", 1) > 1:
        return "with slow_but_exact and pretraining_tp above 1, BLOOM goes round its output projection"
    return REFUSED_CLASSES.get(type(module).__name__, "")


def _match(module: nn.Module) -> Layout | None:
    for layout in LAYOUTS:
        paths = [path for stream in layout.streams for path in stream.paths]
        if all(_projection(module, path) is not None for path in paths):
            return layout
    return None


def _projection(module: nn.Module, path: str) -> Projection | None:
    """The projection at ``path`` without adapters; None if there is none."""
    found = find_module(module, path)
    found = None if found is None else without_adapter(found)
    return found if isinstance(found, (nn.Linear, Conv1D)) else None


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


def _is_attention(module: nn.Module) -> bool:
    if not any(True for _ in module.parameters()) or any(is_of(type(part), Headless) for part in module.modules()):
        return False
    return isinstance(module, nn.MultiheadAttention) or "Attention" in type(module).__name__


def _site(model: nn.Module, name: str, module: nn.Module, layout: Layout) -> AttentionSite:
    core = module.get_submodule(layout.core)
    head_dim = next((getattr(core, attribute) for attribute in HEAD_DIM_NAMES if hasattr(core, attribute)), None)
    if not isinstance(head_dim, int):
        raise GateError(f"{type(core).__name__} at {name!r} does not state its head size ({' or '.join(HEAD_DIM_NAMES)})")
    head_dim //= getattr(core, layout.narrowed_by) if layout.narrowed_by else 1
    heads, odd = divmod(weight_by_output(_linear(module, layout.output)).shape[1], head_dim)
    kv_heads = heads if layout.gate_only else _kv_heads(module, layout, heads, head_dim)
    if odd or kv_heads < 1 or heads % kv_heads or not (layout.gate_only or _feeds(module, layout, heads, kv_heads, head_dim)):
        sizes = {path: tuple(weight_by_output(_linear(module, path)).shape) for path in layout.paths}
        raise GateError(
            f"{type(core).__name__} at {name!r} has projections of [out, in] features {sizes}, which are not those of heads of "
            f"{head_dim} features each; gates for such attention are not implemented"
        )
    return AttentionSite(
        name=name,
        kind=_kind(model, name, core),
        layer=int(numbers[0]) if (numbers := re.findall(r"(?<=\.)\d+(?=\.|$)", "." + name)) else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layout=layout,
        module=module,
    )


def _linear(module: nn.Module, path: str) -> Projection:
    found = _projection(module, path)
    assert found is not None
    return found


def _kv_heads(module: nn.Module, layout: Layout, heads: int, head_dim: int) -> int:
    """Key/value heads, from the value's projection (a norm over all heads may leave more of query and key in place)."""
    features = weight_by_output(_linear(module, layout.value)).shape[0] // head_dim
    parts = (layout.query, layout.key, layout.value).count(layout.value)
    return {1: features, 2: features // 2, 3: (features - heads) // 2}[parts]


def _feeds(module: nn.Module, layout: Layout, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the input projections have the features that these heads need."""
    expected: dict[str, int] = {}
    for path, count in ((layout.query, heads), (layout.key, kv_heads), (layout.value, kv_heads)):
        expected[path] = expected.get(path, 0) + count * head_dim
    selected = {name for name, part in module.named_modules() if is_of(type(part), Selected)}
    return all(
        features == weight_by_output(_linear(module, path)).shape[0] or (selected and path in (layout.query, layout.key))
        for path, features in expected.items()
    )


def _kind(model: nn.Module, name: str, core: nn.Module) -> Kind:
    if is_cross(name):
        return "cross"
    owner = next((part for part in reversed(_ancestors(model, name)) if isinstance(part, PreTrainedModel)), None)
    return "decoder" if is_causal(name, core, owner) else "encoder"
