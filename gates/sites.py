"""Find every attention module of a Transformer: its kind, layer, heads and projections.

Model families are data: one table of projection names. A module is an attention site when it has all the
projections of exactly one row; head counts follow from the shapes of the weights.

The kind of a site follows, without running the model, from its own name and attributes and from the masks that the model around
it makes. :func:`gates.hooks.probe.seen_kinds` finds it by changing tokens; the coverage table and the tests hold both together.
"""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from types import CodeType
from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel
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
        narrowed_by: attribute of the core that says how many times narrower its heads are than the core's head size.
        beside: a second stream of heads in the same module, with projections and gates of its own.
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
    narrowed_by: str = ""
    beside: Layout | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.query, self.key, self.value, self.output)))

    @property
    def streams(self) -> tuple[Layout, ...]:
        """The layouts of all streams of heads that the module has."""
        return (self,) if self.beside is None else (self, *self.beside.streams)


LATENT = "multi-head latent attention shares one compressed key and value between all heads"
SPARSE = "its block-sparse pattern has projections and buffers of its own"
STREAMS = "the heads of its two streams add their scores, so each needs the queries and keys of the other"

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
    # LiLT: text and layout, listed before BERT, whose paths it contains
    Layout(
        "self.query",
        "self.key",
        "self.value",
        "output.dense",
        core="self",
        gate_only=STREAMS,
        beside=Layout(
            "self.layout_query",
            "self.layout_key",
            "self.layout_value",
            "layout_output.dense",
            core="self",
            gate_only=STREAMS,
            narrowed_by="channel_shrink_ratio",
        ),
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
CROSS_NAMES = re.compile(r"cross_?att(n|ention)|encoder_att(n|ention)|EncDecAttention")
MASKS = re.compile(r"create_\w*(causal|bidirectional)\w*_mask")
"""Transformers' functions that make the masks of attention; most of their names say which kind of mask."""
CAUSAL_CLASSES = ("BloomAttention", "CodeGenAttention")
"""Causal attention that does not say so, in models that make their masks on their own."""
DIFFERENCE = "each of its heads is the difference of two"
RELATIVE = "its table of position biases has an axis of heads that is not known how to cut"
WIDTH = "it takes the width of its input for that of its heads together"
GATE_ONLY_CLASSES = {
    "LongformerSelfAttention": SPARSE,
    "BigBirdBlockSparseAttention": SPARSE,
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
    if not any(True for _ in module.parameters()) or any(isinstance(part, Headless) for part in module.modules()):
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
    selected = {name for name, part in module.named_modules() if isinstance(part, Selected)}
    return all(
        features == weight_by_output(_linear(module, path)).shape[0] or (selected and path in (layout.query, layout.key))
        for path, features in expected.items()
    )


def _kind(model: nn.Module, name: str, core: nn.Module) -> Kind:
    """By what attention is called, what it says of itself, the masks it is given, and last by where it is."""
    parts = name.split(".")
    if any(CROSS_NAMES.fullmatch(part) for part in parts):
        return "cross"
    said = [getattr(core, attribute) for attribute in ("is_causal", "is_decoder") if hasattr(core, attribute)]
    if any(said) or type(core).__name__ in CAUSAL_CLASSES:
        return "decoder"
    owner = next((part for part in reversed(_ancestors(model, name)) if isinstance(part, PreTrainedModel)), None)
    masks = _masks_for(core, owner)
    if masks == {"causal"}:  # also CLIP's text model, whose attention calls itself bidirectional
        return "encoder" if _is_bidirectional(getattr(owner, "config", None)) else "decoder"
    return "decoder" if not said and not masks and "decoder" in parts else "encoder"


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
