"""Where families of models keep the projections of their attention: a table of names, one row for each way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
