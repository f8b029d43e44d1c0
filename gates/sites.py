"""Find every attention module of a Transformer: its kind, layer, heads and projections.

Model families are data: one table of projection names. A module is an attention site when it has all the
projections of exactly one row; head counts follow from the shapes of the weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gates.errors import GateError
from gates.pruned import Headless

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class Layout:
    """Where a family keeps its projections, as paths below the attention module.

    Args:
        query, key, value: one path each, or the same path for weights fused in one projection.
        output: the output projection.
        core: the submodule that computes attention, when it is not the attention module itself.
    """

    query: str
    key: str
    value: str
    output: str
    core: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.query, self.key, self.value, self.output)))


LAYOUTS: tuple[Layout, ...] = (
    # BERT, RoBERTa, ELECTRA, XLM-R, CamemBERT, ERNIE, MegatronBERT, ...
    Layout("self.query", "self.key", "self.value", "output.dense", core="self"),
    # DistilBERT
    Layout("q_lin", "k_lin", "v_lin", "out_lin"),
    # Llama, Mistral, Qwen, Gemma, ViT, ...
    Layout("q_proj", "k_proj", "v_proj", "o_proj"),
    # BART, mBART, Marian, Pegasus, M2M100, OPT, ...
    Layout("q_proj", "k_proj", "v_proj", "out_proj"),
    # Phi
    Layout("q_proj", "k_proj", "v_proj", "dense"),
    # GPT-2 cross-attention (listed before self-attention, whose paths it contains)
    Layout("q_attn", "c_attn", "c_attn", "c_proj"),
    # GPT-2
    Layout("c_attn", "c_attn", "c_attn", "c_proj"),
)

HEAD_DIM_NAMES = ("head_dim", "attention_head_size")
CROSS_NAMES = ("crossattention", "encoder_attn", "cross_attn", "EncDecAttention")
Projection = nn.Linear | Conv1D


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of a model.

    Args:
        name: path of the attention module in the model.
        kind: ``encoder`` (bidirectional self-attention), ``decoder`` (causal) or ``cross``.
        layer: index of the layer in its stack.
        heads: query heads.
        kv_heads: key/value heads; fewer than ``heads`` under grouped-query attention.
        head_dim: width of one head.
        layout: the row of the family table that matched.
        module: the attention module itself.
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
        """The output projection; its input is the concatenated heads ``[batch, query, heads * head_dim]``."""
        return self.projection(self.layout.output)

    @property
    def label(self) -> str:
        """Short name for tables and logs, such as ``encoder.3``."""
        return f"{self.kind}.{self.layer}"

    def projection(self, path: str) -> Projection:
        module = self.module.get_submodule(path)
        assert isinstance(module, (nn.Linear, Conv1D))
        return module


def weight_by_output(projection: Projection) -> Tensor:
    """A projection's weight as ``[out, in]``, whichever way its class stores it (a view)."""
    return projection.weight.T if isinstance(projection, Conv1D) else projection.weight


def find_attention(model: nn.Module) -> tuple[AttentionSite, ...]:
    """All attention sites of ``model``, in module order, each shared module once.

    Raises:
        GateError: if the model has no attention this library knows, or some it does not know, so that gates
            would cover it only in part.
    """
    sites = tuple(
        _site(name, module, layout) for name, module in model.named_modules() if (layout := _match(module)) is not None
    )
    covered = {id(part) for site in sites for part in (*site.module.modules(), *_ancestors(model, site.name))}
    uncovered = sorted(
        {type(module).__name__ for module in model.modules() if _is_attention(module) and id(module) not in covered}
    )
    if uncovered:
        raise GateError(
            f"{type(model).__name__} has attention modules of unknown structure ({', '.join(uncovered)}), so its heads "
            "cannot all be gated; use a model whose attention is in gates.sites.LAYOUTS or add its projection names there"
        )
    if not sites:
        raise GateError(
            f"{type(model).__name__} has no attention module that gates.sites.LAYOUTS describes; "
            "use a Transformer with multi-head attention or add its projection names there"
        )
    return sites


def describe_kinds(sites: tuple[AttentionSite, ...]) -> dict[str, int]:
    """Heads of each kind that the model has, such as ``{"encoder": 72}``."""
    return {kind: count for kind in KINDS if (count := sum(site.heads for site in sites if site.kind == kind))}


def _match(module: nn.Module) -> Layout | None:
    for layout in LAYOUTS:
        if all(isinstance(_find(module, path), (nn.Linear, Conv1D)) for path in layout.paths):
            return layout
    return None


def _find(module: nn.Module, path: str) -> nn.Module | None:
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
    if not any(True for _ in module.parameters()) or any(isinstance(part, Headless) for part in module.modules()):
        return False
    return isinstance(module, nn.MultiheadAttention) or "Attention" in type(module).__name__


def _site(name: str, module: nn.Module, layout: Layout) -> AttentionSite:
    core = module.get_submodule(layout.core)
    head_dim = next((getattr(core, attribute) for attribute in HEAD_DIM_NAMES if hasattr(core, attribute)), None)
    if not isinstance(head_dim, int):
        raise GateError(f"{type(core).__name__} at {name!r} does not state its head size ({' or '.join(HEAD_DIM_NAMES)})")
    width = weight_by_output(_linear(module, layout.output)).shape[1]
    key_width = weight_by_output(_linear(module, layout.key)).shape[0]
    kv_width = key_width // _times_fused(layout)
    query_width = weight_by_output(_linear(module, layout.query)).shape[0]
    if layout.query == layout.key:
        query_width -= 2 * kv_width
    if query_width != width:
        raise GateError(
            f"{type(core).__name__} at {name!r} projects to {query_width} query features but feeds {width} into its output "
            "projection; gates for such attention are not implemented"
        )
    if width % head_dim or kv_width % head_dim or width % kv_width:
        raise GateError(
            f"{type(core).__name__} at {name!r} projects to {width} query and {kv_width} key features, "
            f"which heads of {head_dim} features do not divide"
        )
    return AttentionSite(
        name=name,
        kind=_kind(name, core),
        layer=int(numbers[-1]) if (numbers := re.findall(r"(?<=\.)\d+(?=\.|$)", "." + name)) else 0,
        heads=width // head_dim,
        kv_heads=kv_width // head_dim,
        head_dim=head_dim,
        layout=layout,
        module=module,
    )


def _linear(module: nn.Module, path: str) -> Projection:
    found = _find(module, path)
    assert isinstance(found, (nn.Linear, Conv1D))
    return found


def _times_fused(layout: Layout) -> int:
    """How many of query, key and value share the key's projection."""
    return (layout.query, layout.key, layout.value).count(layout.key)


def _kind(name: str, core: nn.Module) -> Kind:
    if any(part in CROSS_NAMES for part in name.split(".")):
        return "cross"
    causal = getattr(core, "is_causal", False) or getattr(core, "is_decoder", False)
    return "decoder" if causal else "encoder"
