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
from gates.surgery.adapters import without_adapter
from gates.surgery.pruned import Headless, Selected

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = ("encoder", "decoder", "cross")


Fusion = Literal["blocks", "groups", "quarters"]
"""How one projection holds query, key and value: one after another (``blocks``); for each key/value head its queries, its
key and its value (``groups``); or in four equal parts of query, value and key each (``quarters``)."""


@dataclass(frozen=True)
class Layout:
    """Where a family keeps its projections, as paths below the attention module.

    Args:
        query, key, value: one path each, or the same path for weights fused in one projection.
        output: the output projection.
        core: the submodule that computes attention, when it is not the attention module itself.
        fusion: how a fused projection holds its parts.
        with_query, with_key: further projections with the same rows as query or key, where the module has them.
        arguments: inputs of the core that have an axis of heads (position biases), which a pruned site has to select.
        adds: what the module adds to its output itself: ``residual`` (an argument) or the path of the norm over the sum with
            its input; empty if the caller does it.
        gate_only: why heads of such attention cannot be removed, only gated; empty if they can.
    """

    query: str
    key: str
    value: str
    output: str
    core: str = ""
    fusion: Fusion = "blocks"
    with_query: tuple[str, ...] = ()
    with_key: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    adds: str = ""
    gate_only: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.query, self.key, self.value, self.output)))


LATENT = "multi-head latent attention shares one compressed key and value between all heads"
SPARSE = "its block-sparse pattern has projections and buffers of its own"

LAYOUTS: tuple[Layout, ...] = (
    # LED's encoder
    Layout(
        "longformer_self_attn.query",
        "longformer_self_attn.key",
        "longformer_self_attn.value",
        "output",
        core="longformer_self_attn",
        gate_only=SPARSE,
    ),
    # BERT, RoBERTa, ELECTRA, XLM-R, CamemBERT, ERNIE, ESM, MegatronBERT, RoFormer, LayoutLM, RemBERT, Data2VecText, ...
    Layout("self.query", "self.key", "self.value", "output.dense", core="self"),
    # DeBERTa-v2
    Layout(
        "self.query_proj",
        "self.key_proj",
        "self.value_proj",
        "output.dense",
        core="self",
        with_query=("self.pos_query_proj",),
        with_key=("self.pos_key_proj",),
    ),
    # ALBERT (one module for all its passes)
    Layout("query", "key", "value", "dense", adds="LayerNorm"),
    # DistilBERT, XLM, FlauBERT
    Layout("q_lin", "k_lin", "v_lin", "out_lin"),
    # Llama, Mistral, Qwen, Gemma, OLMo2, SmolLM3, Granite, GPT-OSS, Mixtral, NomicBERT, EuroBERT, ViT, DeiT, DINOv2, ...
    Layout("q_proj", "k_proj", "v_proj", "o_proj"),
    # BART, mBART, Marian, Pegasus, M2M100, Whisper, OPT, GPT-J, GPT-Neo, CLIP, Wav2Vec2, BioGPT, XGLM, ...
    Layout("q_proj", "k_proj", "v_proj", "out_proj"),
    # Phi
    Layout("q_proj", "k_proj", "v_proj", "dense"),
    # T5, mT5, UMT5, Switch, MPNet
    Layout("q", "k", "v", "o", arguments=("position_bias",)),
    # DeepSeek V2 and V3, with and without a compressed query
    Layout("q_b_proj", "kv_b_proj", "kv_b_proj", "o_proj", gate_only=LATENT),
    Layout("q_proj", "kv_b_proj", "kv_b_proj", "o_proj", gate_only=LATENT),
    # ModernBERT
    Layout("Wqkv", "Wqkv", "Wqkv", "Wo"),
    # Phi-3
    Layout("qkv_proj", "qkv_proj", "qkv_proj", "o_proj"),
    # CodeGen
    Layout("qkv_proj", "qkv_proj", "qkv_proj", "out_proj", fusion="quarters"),
    # GPT-NeoX, BLOOM, Falcon
    Layout(*("query_key_value",) * 3, output="dense", fusion="groups", arguments=("alibi", "attention_mask"), adds="residual"),
    # GPT-2 cross-attention (listed before self-attention, whose paths it contains)
    Layout("q_attn", "c_attn", "c_attn", "c_proj"),
    # GPT-2
    Layout("c_attn", "c_attn", "c_attn", "c_proj"),
)

HEAD_DIM_NAMES = ("v_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
CROSS_NAMES = ("crossattention", "encoder_attn", "cross_attn", "EncDecAttention")
CAUSAL_CLASSES = ("BloomAttention", "CodeGenAttention")
"""Causal attention that does not say so."""
CAUSAL_CONFIGS = ("CLIPTextConfig",)
"""Configurations whose model hands a causal mask to attention that calls itself bidirectional."""
RELATIVE = "its table of position biases has an axis of heads that is not known how to cut"
GATE_ONLY_CLASSES = {
    "LongformerSelfAttention": SPARSE,
    "BigBirdBlockSparseAttention": SPARSE,
    "PegasusXGlobalLocalAttention": SPARSE,
    "DiffLlamaAttention": "each of its heads is the difference of two",
    "BeitAttention": RELATIVE,
    "Data2VecVisionSelfAttention": RELATIVE,
    "Data2VecVisionSdpaSelfAttention": RELATIVE,
    "LayoutLMv3SelfAttention": RELATIVE,
    "LayoutLMv2SelfAttention": RELATIVE,
}
"""Attention with the projections of a row above whose heads cannot be removed, with the reason."""
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
        name: path of the attention module in the model.
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
        return self.layout.gate_only or GATE_ONLY_CLASSES.get(type(self.core).__name__, "")

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
        _site(name, module, layout) for name, module in model.named_modules() if (layout := _match(module)) is not None
    )
    covered = {id(part) for site in sites for part in (*site.module.modules(), *_ancestors(model, site.name))}
    uncovered = sorted(
        {type(module).__name__ for module in model.modules() if _is_attention(module) and id(module) not in covered}
    )
    if reason := next((_refused(module) for module in model.modules() if _refused(module)), ""):
        raise GateError(f"the heads of {type(model).__name__} cannot be gated: {reason}; use another model")
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


def _refused(module: nn.Module) -> str:
    """Why this attention cannot be gated; empty if it can, as far as its class tells."""
    if getattr(module, "slow_but_exact", False) and getattr(module, "pretraining_tp", 1) > 1:
        return "with slow_but_exact and pretraining_tp above 1, BLOOM goes round its output projection"
    return REFUSED_CLASSES.get(type(module).__name__, "")


def _match(module: nn.Module) -> Layout | None:
    for layout in LAYOUTS:
        if all(_projection(module, path) is not None for path in layout.paths):
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
    if not any(True for _ in module.parameters()) or any(isinstance(part, Headless) for part in module.modules()):
        return False
    return isinstance(module, nn.MultiheadAttention) or "Attention" in type(module).__name__


def _site(name: str, module: nn.Module, layout: Layout) -> AttentionSite:
    core = module.get_submodule(layout.core)
    head_dim = next((getattr(core, attribute) for attribute in HEAD_DIM_NAMES if hasattr(core, attribute)), None)
    if not isinstance(head_dim, int):
        raise GateError(f"{type(core).__name__} at {name!r} does not state its head size ({' or '.join(HEAD_DIM_NAMES)})")
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
        kind=_kind(name, core),
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
    selected = {name for name, part in module.named_modules() if isinstance(part, Selected)}
    return all(
        features == weight_by_output(_linear(module, path)).shape[0] or (selected and path in (layout.query, layout.key))
        for path, features in expected.items()
    )


def _kind(name: str, core: nn.Module) -> Kind:
    if any(part in CROSS_NAMES for part in name.split(".")):
        return "cross"
    causal = getattr(core, "is_causal", False) or getattr(core, "is_decoder", False)
    causal = causal or type(core).__name__ in CAUSAL_CLASSES
    causal = causal or type(getattr(core, "config", None)).__name__ in CAUSAL_CONFIGS
    return "decoder" if causal else "encoder"
