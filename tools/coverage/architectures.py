"""Tiny random models of every architecture that is checked in full, from configurations alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

VOCABULARY = 50
Input = Literal["text", "text-to-text", "image", "image-and-text", "audio", "audio-to-text"]


@dataclass(frozen=True)
class Architecture:
    """One row of the coverage table.

    Args:
        model: The prefix of the classes in Transformers, such as ``Bert``.
        head: The suffix of the model class, such as ``ForMaskedLM``.
        config: The configuration: 4 heads of 8 features in 2 layers, unless ``head_dims`` differs.
        kinds: The number of heads of each kind.
        kv_heads: The key/value heads of each site.
        input: The kind of input.
        generates: Whether ``generate`` continues its text.
        gate_only: Whether its heads can be gated and scored but not removed.
        variant: A suffix of the name for a second row of the same model.
        head_dims: The features of the heads of all sites.
        idle: The number of last heads that no output depends on.
    """

    model: str
    head: str
    config: Mapping[str, Any]
    kinds: Mapping[str, int] = field(default_factory=lambda: {"encoder": 8})
    kv_heads: int = 4
    input: Input = "text"
    generates: bool = False
    gate_only: bool = False
    variant: str = ""
    head_dims: tuple[int, ...] = (8,)
    idle: int = 0

    @property
    def name(self) -> str:
        return f"{self.model} ({self.variant})" if self.variant else self.model

    @property
    def heads(self) -> int:
        return sum(self.kinds.values())


BERT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": VOCABULARY,
    "max_position_embeddings": 48, "pad_token_id": 0,
}  # fmt: skip
DECODER = {**BERT, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**DECODER, "num_key_value_heads": 2}
GROUPED_EXPLICIT = {**GROUPED, "head_dim": 8}
SLIDING = {**GROUPED_EXPLICIT, "query_pre_attn_scalar": 8, "sliding_window": 4}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "vocab_size": VOCABULARY, "max_position_embeddings": 48, "pad_token_id": 0,
    "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None, "forced_bos_token_id": None,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "pad_token_id": 0, "decoder_start_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48, "vocab_size": VOCABULARY, "bos_token_id": 1}
XLM = {
    "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": VOCABULARY, "max_position_embeddings": 48, "n_langs": 1,
    "pad_index": 0,
}  # fmt: skip
GPT_NEO = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 48, "intermediate_size": 40, "bos_token_id": 1,
}  # fmt: skip
XGLM = {
    "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 40, "vocab_size": VOCABULARY, "bos_token_id": 1,
    "max_position_embeddings": 48,
}  # fmt: skip
NLLB_MOE = {
    **BART, "num_experts": 2, "expert_capacity": 24, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "router_bias": False,
}  # fmt: skip
WAV2VEC2 = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": VOCABULARY,
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
FALCON = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DEBERTA = {**BERT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
SEAMLESS = {"hidden_size": 32, **{name: BART[name] for name in BART if name != "d_model" and not name.startswith("forced_")}}
LATENT = {
    **DECODER, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 2, "num_key_value_heads": 4,
}  # fmt: skip
ALL_KINDS = {"encoder": 8, "decoder": 8, "cross": 8}


def _encoder(model: str, config: Mapping[str, Any] = BERT, head: str = "ForMaskedLM", **more: Any) -> Architecture:
    return Architecture(model, head, config, **more)


def _decoder(model: str, config: Mapping[str, Any], kv_heads: int = 4, **more: Any) -> Architecture:
    config = {"pad_token_id": 0, "eos_token_id": 2, **config}
    return Architecture(model, "ForCausalLM", config, {"decoder": 8}, kv_heads, generates=True, **more)


def _encoder_decoder(model: str, config: Mapping[str, Any] = BART, **more: Any) -> Architecture:
    settings = {"input": "text-to-text", "generates": True, **more}
    return Architecture(model, "ForConditionalGeneration", config, ALL_KINDS, **settings)


ARCHITECTURES: tuple[Architecture, ...] = (
    # encoders
    *map(_encoder, ("Bert", "Roberta", "XLMRoberta", "Camembert", "Ernie", "MegatronBert", "LayoutLM", "Data2VecText")),
    _encoder("Electra", {**BERT, "embedding_size": 16}),
    _encoder("Esm", {**BERT, "mask_token_id": 1, "position_embedding_type": "rotary"}),
    _encoder("RoFormer", {**BERT, "embedding_size": 32}),
    _encoder("RemBert", {**BERT, "input_embedding_size": 16, "output_embedding_size": 16}),
    _encoder("DebertaV2", {**DEBERTA, "share_att_key": True}, variant="shared keys"),
    _encoder("DebertaV2", {**DEBERTA, "share_att_key": False}, variant="own keys"),
    _encoder("Albert", {**BERT, "embedding_size": 16}, kinds={"encoder": 4}),
    _encoder(
        "DistilBert",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "vocab_size": VOCABULARY, "max_position_embeddings": 48},
    ),
    _encoder("XLM", XLM, "WithLMHeadModel"),
    _encoder("Flaubert", XLM, "WithLMHeadModel"),
    _encoder("MPNet"),
    _encoder("ModernBert", {**BERT, "global_attn_every_n_layers": 2, "local_attention": 8}),
    _encoder("NomicBert"),
    _encoder("EuroBert", GROUPED, kv_heads=2),
    _encoder("Splinter", head="Model"),
    # decoders
    Architecture("GPT2", "LMHeadModel", {**GPT, "pad_token_id": 0, "eos_token_id": 2}, {"decoder": 8}, generates=True),
    _decoder("GPTNeo", GPT_NEO),
    _decoder("GPTJ", {**GPT, "rotary_dim": 4}),
    _decoder("GPTNeoX", DECODER),
    _decoder("CodeGen", {**GPT, "rotary_dim": 4, "n_ctx": 48}),
    _decoder("OPT", {**DECODER, "ffn_dim": 40, "word_embed_proj_dim": 32}),
    _decoder("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": 1}),
    _decoder("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, kv_heads=2, variant="new decoder"),
    _decoder("Falcon", {**FALCON, "multi_query": True}, kv_heads=1, variant="multi-query"),
    _decoder("Falcon", {**FALCON, "multi_query": False, "alibi": True, "bias": True}, variant="ALiBi"),
    _decoder("Llama", GROUPED, kv_heads=2),
    _decoder("Mistral", {**GROUPED, "num_key_value_heads": 1}, kv_heads=1),
    _decoder("Qwen2", GROUPED, kv_heads=2),
    _decoder("Qwen3", GROUPED_EXPLICIT, kv_heads=2),
    _decoder("Gemma", GROUPED_EXPLICIT, kv_heads=2),
    _decoder("Gemma2", SLIDING, kv_heads=2),
    Architecture("Gemma3", "ForCausalLM", SLIDING, {"decoder": 8}, 2, generates=True),
    _decoder("Phi", DECODER),
    _decoder("Phi3", {**GROUPED, "sliding_window": None}, kv_heads=2),
    _decoder("Olmo2", GROUPED, kv_heads=2),
    _decoder("SmolLM3", GROUPED, kv_heads=2),
    _decoder("Granite", GROUPED, kv_heads=2),
    _decoder("Starcoder2", GROUPED, kv_heads=2),
    _decoder("StableLm", {**GROUPED, "qk_layernorm": True}, kv_heads=2),
    _decoder("Cohere", {**GROUPED, "use_qk_norm": True}, kv_heads=2),
    _decoder("Mixtral", {**GROUPED, "num_local_experts": 2}, kv_heads=2),
    _decoder(
        "Qwen3Moe", {**GROUPED_EXPLICIT, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, kv_heads=2
    ),
    _decoder("GptOss", {**GROUPED_EXPLICIT, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 4}, kv_heads=2),
    _decoder("BioGpt", DECODER),
    _decoder("XGLM", XGLM),
    # encoder-decoders
    *(_encoder_decoder(name, T5) for name in ("T5", "MT5", "UMT5")),
    _encoder_decoder("SwitchTransformers", {**T5, "num_experts": 2}),
    *map(_encoder_decoder, ("Bart", "MBart", "Pegasus", "M2M100", "Blenderbot")),
    _encoder_decoder("NllbMoe", NLLB_MOE),
    *(
        Architecture(name, "ForTextToText", SEAMLESS, ALL_KINDS, input="text-to-text", generates=True)
        for name in ("SeamlessM4T", "SeamlessM4Tv2")
    ),
    Architecture("Marian", "MTModel", BART, ALL_KINDS, input="text-to-text", generates=True),
    _encoder_decoder(
        "Whisper",
        {**BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 24, "suppress_tokens": None},
        input="audio-to-text",
    ),
    # images and sound
    *(Architecture(name, "ForImageClassification", VIT, input="image") for name in ("ViT", "DeiT", "Dinov2")),
    Architecture(
        "CLIP",
        "Model",
        {"text_config": DECODER, "vision_config": VIT, "projection_dim": 16},
        {"encoder": 8, "decoder": 8},
        input="image-and-text",
    ),
    Architecture("Wav2Vec2", "ForCTC", WAV2VEC2, input="audio"),
    # gated only
    _decoder("DeepseekV3", {**LATENT, "n_group": 1, "topk_group": 1}, gate_only=True),
    _decoder(
        "HYV4",
        {**LATENT, "index_topk": 3, "index_n_heads": 2, "index_head_dim": 8, "mlp_layer_types": ["dense", "dense"]},
        gate_only=True,
    ),
    _decoder(
        "GPTNeoXJapanese",
        {**{name: value for name, value in DECODER.items() if name != "intermediate_size"}, "intermediate_multiple_size": 1},
        gate_only=True,
    ),
    _decoder("Doge", GROUPED, kv_heads=2, gate_only=True),
    Architecture(
        "Lilt",  # heads of 12 features for text and of 6 for layout; the outputs depend on the text of the last layer alone
        "ForTokenClassification",
        {**BERT, "hidden_size": 48, "channel_shrink_ratio": 2, "max_2d_position_embeddings": 16},
        {"encoder": 16},
        gate_only=True,
        head_dims=(12, 6),
        idle=4,
    ),
    _encoder("Longformer", {**BERT, "attention_window": 4}, gate_only=True),
    _encoder("BigBird", {**BERT, "block_size": 4, "num_random_blocks": 1}, gate_only=True),
    _encoder_decoder(
        "LED",
        {
            **{name: value for name, value in BART.items() if name != "max_position_embeddings"},
            "max_encoder_position_embeddings": 48,
            "max_decoder_position_embeddings": 48,
            "attention_window": 4,
        },
        gate_only=True,
    ),
)
BY_NAME: dict[str, Architecture] = {architecture.name: architecture for architecture in ARCHITECTURES}


def build(architecture: Architecture, *, seed: int = 0) -> PreTrainedModel:
    """Build the tiny model in evaluation mode, with weights and biases so large that every head matters."""
    torch.manual_seed(seed)
    config_class = getattr(
        transformers, architecture.model + ("TextConfig" if architecture.model in ("Gemma3", "Gemma4") else "Config")
    )
    model: PreTrainedModel = getattr(transformers, architecture.model + architecture.head)(config_class(**architecture.config))
    return randomise_(model).eval()


@torch.no_grad()
def randomise_(model: PreTrainedModel) -> PreTrainedModel:
    """Redraw all weights, so that no head, bias, norm or position table hides mistakes by its initial value."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if "relative_attention_bias" in name or "sinks" in name or "bias" in name:
                nn.init.normal_(parameter, std=0.1)
            elif isinstance(module, nn.Embedding) and module.embedding_dim <= 4:  # position biases, one column per head
                nn.init.normal_(parameter, std=0.5)
            elif parameter.dim() >= 2 and not isinstance(module, nn.Embedding):
                nn.init.normal_(parameter, mean=float("Norm" in type(module).__name__), std=0.15)
            elif parameter.dim() == 1 and bool((parameter == 1).all()):
                nn.init.normal_(parameter, mean=1.0, std=0.1)
            elif not torch.isfinite(parameter).all():
                nn.init.normal_(parameter, std=0.1)
    return model


def inputs(
    architecture: Architecture, *, batch: int = 3, length: int = 8, padding: bool = True, seed: int = 1
) -> dict[str, Tensor]:
    """Return a batch for the tiny model. The second text is shorter and padded on the side of its kind."""
    generator = torch.Generator().manual_seed(seed)

    def ids(tokens: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)

    if architecture.input == "image":
        return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator)}
    if architecture.input == "audio":
        return {"input_values": torch.randn(batch, 80, generator=generator)}
    if architecture.input == "audio-to-text":
        return {"input_features": torch.randn(batch, 8, 16, generator=generator), "decoder_input_ids": ids(length - 2)}
    found = {"input_ids": ids(length)}
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    if padding and batch > 1:
        found["attention_mask"][1, length - 3 :] = 0
        if architecture.generates and architecture.input == "text":
            found["attention_mask"][1] = found["attention_mask"][1].flip(0)
    if architecture.input == "text-to-text":
        found["decoder_input_ids"] = ids(length - 2)
    if architecture.input == "image-and-text":
        found["input_ids"][:, -1] = 2  # the token whose state the text tower pools
        found["attention_mask"].fill_(1)
        found["pixel_values"] = torch.randn(batch, 3, 8, 8, generator=generator)
    return found


def random_mask(architecture: Architecture, *, seed: int = 2) -> Tensor:
    """Return a random mask ``[heads]`` with a site without heads and a site with all heads."""
    mask = (torch.rand(architecture.heads, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
    if architecture.heads > 4:
        first = 4 * (seed % 2)
        mask[first : first + 4], mask[4 - first : 8 - first] = 0.0, 1.0
    return mask
