"""Checkpoints the way Transformers 4 wrote them after ``prune_heads``, sliced by hand, with the logits they stand for.

Key names, shapes and config entries are those that releases 4.26 and 4.46 write; nothing here reads the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as t
from safetensors.torch import save_file
from torch import Tensor

HEADS, HEAD_DIM, LAYERS = 4, 4, 3
WIDTH = HEADS * HEAD_DIM
SOME = {0: [1, 2], 2: [0]}
"""Removed heads by layer."""
WHOLE_LAYER = {0: [3], 1: [0, 1, 2, 3]}


def features(heads: list[int]) -> list[int]:
    return [head * HEAD_DIM + i for head in heads for i in range(HEAD_DIM)]


def _bert_like(base: str) -> tuple[Callable[..., None], Callable[[int], tuple[str, int]]]:
    def cut(weights: dict[str, Tensor], layer: int, keep: list[int]) -> None:
        path = f"{base}.encoder.layer.{layer}.attention"
        for part in ("query", "key", "value"):
            weights[f"{path}.self.{part}.weight"] = weights[f"{path}.self.{part}.weight"][keep]
            weights[f"{path}.self.{part}.bias"] = weights[f"{path}.self.{part}.bias"][keep]
        weights[f"{path}.output.dense.weight"] = weights[f"{path}.output.dense.weight"][:, keep]

    return cut, lambda layer: (f"{base}.encoder.layer.{layer}.attention.output.dense.weight", 1)


def _cut_distilbert(weights: dict[str, Tensor], layer: int, keep: list[int]) -> None:
    path = f"distilbert.transformer.layer.{layer}.attention"
    for part in ("q_lin", "k_lin", "v_lin"):
        weights[f"{path}.{part}.weight"] = weights[f"{path}.{part}.weight"][keep]
        weights[f"{path}.{part}.bias"] = weights[f"{path}.{part}.bias"][keep]
    weights[f"{path}.out_lin.weight"] = weights[f"{path}.out_lin.weight"][:, keep]


def _cut_gpt2(weights: dict[str, Tensor], layer: int, keep: list[int]) -> None:
    path = f"transformer.h.{layer}.attn"
    weight, bias = weights[f"{path}.c_attn.weight"], weights[f"{path}.c_attn.bias"]
    query, key, value = weight[:, :WIDTH], weight[:, WIDTH : 2 * WIDTH], weight[:, 2 * WIDTH :]
    weights[f"{path}.c_attn.weight"] = torch.cat([query[:, keep], key[:, keep], value[:, keep]], dim=1)
    query, key, value = bias[:WIDTH], bias[WIDTH : 2 * WIDTH], bias[2 * WIDTH :]
    weights[f"{path}.c_attn.bias"] = torch.cat([query[keep], key[keep], value[keep]])
    weights[f"{path}.c_proj.weight"] = weights[f"{path}.c_proj.weight"][keep]


def _old_bert_names(weights: dict[str, Tensor]) -> None:
    for key in [key for key in weights if "LayerNorm" in key]:
        old = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        weights[old] = weights.pop(key)
    weights["bert.embeddings.position_ids"] = torch.arange(24).unsqueeze(0)
    del weights["cls.predictions.decoder.weight"], weights["cls.predictions.decoder.bias"]  # tied


def _old_gpt2_names(weights: dict[str, Tensor]) -> None:
    for layer in range(LAYERS):
        weights[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.uint8).tril()
        weights[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    del weights["lm_head.weight"]  # tied


BERT_SIZES = {
    "vocab_size": 50, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "intermediate_size": 8, "max_position_embeddings": 24, "position_embedding_type": "absolute",
}  # fmt: skip
_cut_bert, _bert_output = _bert_like("bert")
_cut_roberta, _roberta_output = _bert_like("roberta")


@dataclass(frozen=True)
class Version4:
    """One family: its config.json, how version 4 cut a layer, and where its output projection is.

    Args:
        auto: Auto class that loads it.
        config: entries of config.json beside those that every family has.
        cut: removes all but the given features from a layer of the state dict.
        output: key of a layer's output projection and the axis of its heads.
        old_names: turns keys into those of older releases.
    """

    auto: str
    config: dict[str, object]
    cut: Callable[[dict[str, Tensor], int, list[int]], None]
    output: Callable[[int], tuple[str, int]]
    old_names: Callable[[dict[str, Tensor]], None] = lambda weights: None


FAMILIES = {
    "bert": Version4(
        "AutoModelForMaskedLM",
        {"architectures": ["BertForMaskedLM"], "model_type": "bert", **BERT_SIZES},
        _cut_bert,
        _bert_output,
        _old_bert_names,
    ),
    "roberta": Version4(
        "AutoModelForSequenceClassification",
        {"architectures": ["RobertaForSequenceClassification"], "model_type": "roberta", **BERT_SIZES},
        _cut_roberta,
        _roberta_output,
    ),
    "distilbert": Version4(
        "AutoModelForSequenceClassification",
        {
            "architectures": ["DistilBertForSequenceClassification"], "model_type": "distilbert", "vocab_size": 50,
            "dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "hidden_dim": 8, "max_position_embeddings": 24,
        },
        _cut_distilbert,
        lambda layer: (f"distilbert.transformer.layer.{layer}.attention.out_lin.weight", 1),
    ),
    "gpt2": Version4(
        "AutoModelForCausalLM",
        {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50, "n_embd": WIDTH, "n_head": HEADS,
            "n_layer": LAYERS, "n_positions": 24, "bos_token_id": 0, "eos_token_id": 0,
        },
        _cut_gpt2,
        lambda layer: (f"transformer.h.{layer}.attn.c_proj.weight", 0),
        _old_gpt2_names,
    ),
}  # fmt: skip


def ids() -> Tensor:
    return torch.randint(5, 50, (2, 7), generator=torch.Generator().manual_seed(3))


def build(family: Version4) -> t.PreTrainedModel:
    """The dense model that is pruned, with weights large enough that every head matters."""
    settings = {key: value for key, value in family.config.items() if key not in ("architectures", "model_type")}
    config = t.AutoConfig.for_model(family.config["model_type"], **settings)
    torch.manual_seed(0)
    model = getattr(t, family.auto).from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def write(
    directory: Path, family: Version4, removed: dict[int, list[int]], *, pickle: bool = False, old_names: bool = False
) -> Tensor:
    """Write the checkpoint without the heads ``removed``, by layer; returns the logits of the model it is."""
    model = build(family)
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for layer, heads in removed.items():
        key, axis = family.output(layer)
        model.state_dict()[key].index_fill_(axis, torch.tensor(features(heads)), 0.0)
        family.cut(weights, layer, features([head for head in range(HEADS) if head not in heads]))
    with torch.no_grad():
        expected = model(ids()).logits
    if old_names:
        family.old_names(weights)
    directory.mkdir(parents=True)
    content = {
        **family.config,
        "pruned_heads": {str(layer): heads for layer, heads in removed.items()},
        "torch_dtype": "float32",
        "transformers_version": "4.46.3",
        "use_cache": True,
    }
    (directory / "config.json").write_text(json.dumps(content, indent=2))
    if pickle:
        torch.save(weights, directory / "pytorch_model.bin")
    else:
        save_file({key: w.contiguous() for key, w in weights.items()}, directory / "model.safetensors", {"format": "pt"})
    return expected
