"""A tiny random model of every family that relevance is claimed for, in double precision, with inputs for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as t
from torch import Tensor

from tests.models import FAMILIES, SEQ2SEQ, VOCABULARY, with_large_weights

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": VOCABULARY,
    "max_position_embeddings": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip

OTHERS: dict[str, Callable[[], t.PreTrainedModel]] = {
    "albert": lambda: t.AlbertForSequenceClassification(t.AlbertConfig(embedding_size=16, **SIZES)),
    "camembert": lambda: t.CamembertForSequenceClassification(t.CamembertConfig(**SIZES)),
    "deberta-v2": lambda: t.DebertaV2ForSequenceClassification(t.DebertaV2Config(**SIZES)),
    "deit": lambda: t.DeiTForImageClassification(t.DeiTConfig(**IMAGE)),
    "electra": lambda: t.ElectraForSequenceClassification(t.ElectraConfig(embedding_size=16, **SIZES)),
    "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(num_key_value_heads=2, head_dim=8, **SIZES)),
    "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(num_key_value_heads=2, head_dim=8, **SIZES)),
    "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SIZES)),
    "mbart": lambda: t.MBartForConditionalGeneration(t.MBartConfig(**SEQ2SEQ)),
    "modernbert": lambda: t.ModernBertForSequenceClassification(t.ModernBertConfig(cls_token_id=1, sep_token_id=2, **SIZES)),
    "mpnet": lambda: t.MPNetForSequenceClassification(t.MPNetConfig(**SIZES)),
    "mt5": lambda: t.MT5ForConditionalGeneration(t.MT5Config(**T5)),
    "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(num_key_value_heads=2, **SIZES)),
    "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(num_key_value_heads=2, **SIZES)),
    "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5)),
    "xlm-roberta": lambda: t.XLMRobertaForSequenceClassification(t.XLMRobertaConfig(**SIZES)),
}
NAMES = sorted({*FAMILIES, *OTHERS})


def build(name: str) -> t.PreTrainedModel:
    """A model of a family, by its ``model_type``, in evaluation mode."""
    torch.manual_seed(0)
    made = OTHERS[name]() if name in OTHERS else FAMILIES[name].build()
    return with_large_weights(made).double()


def inputs(model: t.PreTrainedModel, *, batch: int = 3, padding: bool = True) -> dict[str, Tensor]:
    """A batch; the second text is shorter, but for causal decoders, whose eager attention in double precision has no rows for
    padding on the left."""
    generator = torch.Generator().manual_seed(1)
    if "pixel_values" in model.main_input_name:
        return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64)}
    ids = torch.randint(3, VOCABULARY, (batch, 7), generator=generator)
    mask = torch.ones_like(ids)
    if padding:
        mask[1, 4:] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, 5), generator=generator)
    return found
