"""Describe where model families keep the projections of their attention: a table of names, one row per layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from gates.errors import GateError

Fusion = Literal["blocks", "groups", "quarters"]
"""The order of query, key and value in one projection. ``blocks``: one after another. ``groups``: for each key/value head its
queries, key and value. ``quarters``: four equal parts, each with query, value and key."""


@dataclass(frozen=True)
class Layout:
    """Describe where a family keeps its projections, as paths below the attention module."""

    # One path each, or the same path for weights fused in one projection.
    query: str
    key: str
    value: str
    output: str  # The path of the output projection
    core: str = ""  # The path of the submodule that computes attention. Empty for the attention module itself.
    fusion: Fusion = "blocks"  # The order of the parts in a fused projection
    # The paths of further projections with the rows of query or key, where the module has them.
    with_query: tuple[str, ...] = ()
    with_key: tuple[str, ...] = ()
    # The inputs of the core with an axis of heads (position biases), which a pruned site has to select.
    arguments: tuple[str, ...] = ()
    # The residual connection inside the module: ``residual`` (an argument), or the path of the norm over the sum with its
    # input. Empty if the caller adds the residual.
    adds: str = ""
    gate_only: str = ""  # The reason why heads of such attention can only be gated. Empty if they can be removed.
    narrowed_by: str = ""  # The attribute of the core with the factor by which its heads are narrower than its head size
    packed: str = ""  # The prefix of parameters that hold query, key and value one after another, where no projections do
    classes: tuple[str, ...] = ()  # The names of the classes that the row describes. Empty for any class.
    second: Layout | None = None  # A second stream of heads in the same module, with its own projections and gates

    @property
    def paths(self) -> tuple[str, ...]:
        paths = (self.query, self.key, self.value, self.output)
        return tuple(dict.fromkeys(path for path in paths if path))

    @property
    def streams(self) -> tuple[Layout, ...]:
        return (self,) if self.second is None else (self, *self.second.streams)


LATENT = "multi-head latent attention shares one compressed key and value between all heads"
SPARSE = "its block-sparse pattern has projections and buffers of its own"
POSITIONS = "its position scores have weights with an axis of heads that cannot be cut"
DEFORMABLE = "each head attends to its own points, by projections with an axis of heads that cannot be cut"
QUERY = "its query is not a projection"
STREAMS = "the heads of its two streams add their scores, so each needs the queries and keys of the other"


def _inside(core: str, query: str, key: str, value: str, output: str, **more: Any) -> Layout:
    """Return a row whose projections except the output are in the submodule that computes attention."""
    return Layout(f"{core}.{query}", f"{core}.{key}", f"{core}.{value}", output, core=core, **more)


def _fused(projection: str, output: str, **more: Any) -> Layout:
    return Layout(projection, projection, projection, output, **more)


LAYOUTS: tuple[Layout, ...] = (
    # PyTorch's own attention: pooling heads of SigLIP, decoders of MaskFormer, BridgeTower
    Layout("", "", "", "out_proj", packed="in_proj", classes=("MultiheadAttention",)),
    # LED's encoder
    _inside("longformer_self_attn", "query", "key", "value", "output", gate_only=SPARSE),
    # LiLT: text and layout, listed before BERT, whose paths it contains
    _inside(
        *("self", "query", "key", "value", "output.dense"),
        gate_only=STREAMS,
        second=_inside(
            *("self", "layout_query", "layout_key", "layout_value", "layout_output.dense"),
            gate_only=STREAMS,
            narrowed_by="channel_shrink_ratio",
        ),
    ),
    # DeBERTa
    _fused(
        "self.in_proj",
        "output.dense",
        core="self",
        fusion="groups",
        with_query=("self.pos_q_proj",),
        with_key=("self.pos_proj",),
    ),
    # LXMERT's attention from one modality to the other
    _inside("att", "query", "key", "value", "output.dense"),
    # BLIP-2's Q-Former, FLAVA, DPT, ViLT, ViTPose, MobileViT, Data2VecVision
    _inside("attention", "query", "key", "value", "output.dense"),
    # BERT, RoBERTa, ELECTRA, XLM-R, CamemBERT, ERNIE, ESM, MegatronBERT, RoFormer, LayoutLM, RemBERT, Data2VecText, ...
    _inside("self", "query", "key", "value", "output.dense", with_query=("self.continuous_position_bias_mlp.2",)),  # Swin v2
    # DeBERTa-v2
    _inside(
        *("self", "query_proj", "key_proj", "value_proj", "output.dense"),
        with_query=("self.pos_query_proj",),
        with_key=("self.pos_key_proj",),
    ),
    # ALBERT (one module for all its passes)
    Layout("query", "key", "value", "dense", adds="LayerNorm"),
    # DistilBERT, XLM, FlauBERT
    Layout("q_lin", "k_lin", "v_lin", "out_lin"),
    # Llama, Mistral, Qwen, Gemma, OLMo2, SmolLM3, Granite, GPT-OSS, Mixtral, NomicBERT, EuroBERT, ViT, DeiT, DINOv2, ...
    Layout("q_proj", "k_proj", "v_proj", "o_proj", with_query=("gate_proj", "g_proj", "r_proj", "relative_k_proj")),
    # BART, mBART, Marian, Pegasus, M2M100, Whisper, OPT, GPT-J, GPT-Neo, CLIP, Wav2Vec2, BioGPT, XGLM, ...
    Layout("q_proj", "k_proj", "v_proj", "out_proj"),
    # Phi
    Layout("q_proj", "k_proj", "v_proj", "dense"),
    # InternVL, Janus
    Layout("q_proj", "k_proj", "v_proj", "projection_layer"),
    # Kimi's pictures
    Layout("q_proj", "k_proj", "v_proj", "proj"),
    # ModernBERT as a decoder
    Layout("q_proj", "k_proj", "v_proj", "Wo"),
    # Moshi, Gemma 4's pictures: projections within modules of their own
    Layout("q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear"),
    # Conditional DETR: content and positions
    Layout(
        *("q_content_proj", "k_content_proj", "v_proj", "o_proj"),
        with_query=("q_pos_proj", "q_pos_sine_proj"),
        with_key=("k_pos_proj",),
    ),
    # AIMv2's pooling head, whose query is learned as it is
    Layout("", "k_proj", "v_proj", "output_proj", gate_only=QUERY, classes=("Aimv2AttentionPoolingHead",)),
    # Gemma's sound
    _inside("attn", "q_proj", "k_proj", "v_proj", "post", gate_only=POSITIONS),
    Layout("q_proj.linear", "k_proj.linear", "v_proj.linear", "post.linear", gate_only=POSITIONS),
    # Grounding DINO's fusion of pictures and text
    Layout(
        *("vision_proj", "text_proj", "values_text_proj", "out_vision_proj"),
        gate_only=STREAMS,
        second=Layout("text_proj", "vision_proj", "values_vision_proj", "out_text_proj", gate_only=STREAMS),
    ),
    # BigBird-Pegasus
    _inside("self", "query", "key", "value", "output", gate_only=SPARSE),
    # CvT
    _inside(
        *("attention", "projection_query", "projection_key", "projection_value", "output.dense"),
        gate_only="convolutions over the features of all heads come before its projections",
    ),
    # CTRL
    Layout("Wq", "Wk", "Wv", "dense"),
    # CPM-Ant
    Layout("project_q", "project_k", "project_v", "attention_out", arguments=("position_bias",)),
    # Conformers of speech: Wav2Vec2-BERT, SeamlessM4T, FastSpeech2
    Layout("linear_q", "linear_k", "linear_v", "linear_out", with_key=("linear_pos",)),
    # Qwen2.5-Omni
    Layout("q", "k", "v", "proj"),
    Layout("to_q", "to_k", "to_v", "to_out.0"),
    # Granite Speech
    Layout("to_q", "to_kv", "to_kv", "to_out"),
    # Grounding DINO, OmDet
    Layout("query", "key", "value", "out_proj"),
    # Kosmos-2.5, Pix2Struct
    Layout("query", "key", "value", "output"),
    # V-JEPA 2, PVTv2
    Layout("query", "key", "value", "proj"),
    # Funnel
    Layout("q_head", "k_head", "v_head", "post_proj", adds="layer_norm"),
    # attention to points: Deformable DETR, RT-DETR, Mask2Former, Grounding DINO
    Layout("sampling_offsets", "attention_weights", "value_proj", "output_proj", gate_only=DEFORMABLE),
    # DAB-DETR
    *(
        Layout(
            f"{core}_query_content_proj",
            f"{core}_key_content_proj",
            f"{core}_value_proj",
            f"{core}.output_proj",
            core=core,
            gate_only=POSITIONS,
        )
        for core in ("self_attn", "cross_attn")
    ),
    # T5, mT5, UMT5, Switch, MPNet
    Layout("q", "k", "v", "o", arguments=("position_bias",)),
    # DeepSeek V2 and V3, with and without a compressed query
    Layout("q_b_proj", "kv_b_proj", "kv_b_proj", "o_proj", gate_only=LATENT),
    Layout("q_proj", "kv_b_proj", "kv_b_proj", "o_proj", gate_only=LATENT),
    # ModernBERT
    _fused("Wqkv", "Wo"),
    # MPT, DBRX
    _fused("Wqkv", "out_proj", arguments=("position_bias",)),
    # pictures: Qwen2-VL and its successors, GLM-4V, SAM, ViTDet, Florence-2, Hiera
    _fused("qkv", "proj"),
    # BLIP, BLIP-2, InstructBLIP
    _fused("qkv", "projection"),
    # Bark
    _fused("att_proj", "out_proj"),
    # Phi-3
    _fused("qkv_proj", "o_proj"),
    # CodeGen
    _fused("qkv_proj", "out_proj", fusion="quarters"),
    # GPT-NeoX, BLOOM, Falcon
    _fused("query_key_value", "dense", fusion="groups", arguments=("alibi", "attention_mask"), adds="residual"),
    # GPT-2 cross-attention (listed before self-attention, whose paths it contains)
    Layout("q_attn", "c_attn", "c_attn", "c_proj"),
    # GPT-2
    _fused("c_attn", "c_proj"),
)


# Attention classes that are exceptions to the table of layouts, with the reasons.

DIFFERENCE = "each of its heads is the difference of two"
RELATIVE = "its table of position biases has an axis of heads that cannot be cut"
WIDTH = "it assumes that its heads together are as wide as its input"
GATE_ONLY_CLASSES = {
    "LongformerSelfAttention": SPARSE,
    "BigBirdBlockSparseAttention": SPARSE,
    "BigBirdSelfAttention": SPARSE,  # BigBird switches to this class on a short text
    "PegasusXGlobalLocalAttention": SPARSE,
    "DiffLlamaAttention": DIFFERENCE,
    "LayoutLMv3SelfAttention": RELATIVE,
    "LayoutLMv2SelfAttention": RELATIVE,
    "TrOCRAttention": WIDTH,
    "MgpstrAttention": WIDTH,
    "modeling_fsmt.Attention": WIDTH,
    "GPTNeoXJapaneseAttention": "it adds a separate bias after its output projection",
    "IBertSelfAttention": "its quantised projections also store their weights as integers",
    "ConvBertSelfAttention": "half of its heads are convolutions",
    "Pix2StructTextAttention": RELATIVE,
    "FastSpeech2ConformerAttention": POSITIONS,
    "Wav2Vec2ConformerSelfAttention": POSITIONS,
    "SeamlessM4TConformerSelfAttention": POSITIONS,
    "WavLMAttention": "the gate of its position biases has weights for each head that cannot be cut",
    "DogeAttention": "the scores of its dynamic mask have weights for each head that cannot be cut",
}
"""The reasons why heads of these classes cannot be removed although a row above fits. A key is the name of the class, or of its
file and the class."""
TIME_FIRST_CLASSES = ("modeling_fsmt.Attention", "MultiheadAttention", "WavLMAttention")
"""Attention whose heads are ``[query, batch, features]`` before the output projection."""
REFUSED_CLASSES = {
    "ProphetNetNgramSelfAttention": "it predicts several future tokens by streams that share one attention module",
}
"""The reasons why heads of these classes cannot be gated either."""
NOT_ATTENTION = ("AttentionMLP", "AttentionBias", "AttentionOutput", "AttentionGRUCell", "AttentionResidual")
"""The endings of class names that contain ``Attention`` without being attention by heads."""


def without_adapter(module: nn.Module) -> nn.Module:
    """Return the layer inside peft's adapters, such as LoRA; a module without an adapter is returned unchanged."""
    while isinstance(base := getattr(module, "base_layer", None), nn.Module):
        module = base
    return module


def check_merged(model: nn.Module) -> None:
    """Raise :class:`GateError` if a layer of the model has an adapter."""
    for name, module in model.named_modules():
        if without_adapter(module) is not module:
            raise GateError(
                f"the layer {name!r} has an adapter ({type(module).__module__.split('.')[0]}'s {type(module).__name__}); take "
                "the gates off (unload() or detach()), and continue with the model that peft's merge_and_unload() returns"
            )
