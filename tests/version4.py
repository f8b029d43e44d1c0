"""Checkpoints the way Transformers 4 wrote them after ``prune_heads``, sliced by hand, with the logits they stand for.

Key names, shapes and config entries are those that releases 4.26 and 4.46 write; nothing here reads the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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


Cut = Callable[..., None]
Output = Callable[..., tuple[str, int]]
Place = int | tuple[int, ...]
"""Number of a layer, or the numbers in the path of its attention."""


def separate(attention: str, parts: tuple[str, str, str], output: str) -> tuple[Cut, Output]:
    """The cut of attention with a linear layer each for query, key, value and output; ``{}`` is a number of its place."""

    def path_of(place: Place) -> str:
        return attention.format(*(place if isinstance(place, tuple) else (place,)))

    def cut(weights: dict[str, Tensor], place: Place, keep: list[int]) -> None:
        path = path_of(place)
        for part in parts:
            weights[f"{path}.{part}.weight"] = weights[f"{path}.{part}.weight"][keep]
            weights[f"{path}.{part}.bias"] = weights[f"{path}.{part}.bias"][keep]
        weights[f"{path}.{output}.weight"] = weights[f"{path}.{output}.weight"][:, keep]

    return cut, lambda place: (f"{path_of(place)}.{output}.weight", 1)


def _bert_like(base: str) -> tuple[Cut, Output]:
    return separate(base + ".encoder.layer.{}.attention", ("self.query", "self.key", "self.value"), "output.dense")


def _vit_like(base: str) -> tuple[Cut, Output]:
    parts = ("attention.query", "attention.key", "attention.value")
    return separate(base + ".encoder.layer.{}.attention", parts, "output.dense")


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


def _old_vit_names(key: str) -> str:
    """The key that version 4 had for a key of a ViT or DeiT of version 5."""
    key = re.sub(r"^(vit|deit)\.layers\.", r"\1.encoder.layer.", key)
    key = re.sub(r"\.attention\.([qkv])_proj\.", lambda found: f".attention.attention.{PARTS[found[1]]}.", key)
    key = key.replace(".attention.o_proj.", ".attention.output.dense.")
    return key.replace(".mlp.fc1.", ".intermediate.dense.").replace(".mlp.fc2.", ".output.dense.")


PARTS = {"q": "query", "k": "key", "v": "value"}
BERT_SIZES = {
    "vocab_size": 50, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "intermediate_size": 8, "max_position_embeddings": 24, "position_embedding_type": "absolute",
}  # fmt: skip
VIT_SIZES = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": 8, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
XLM_SIZES = {
    "emb_dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "n_words": 50, "max_position_embeddings": 24, "n_langs": 1,
    "pad_index": 0,
}  # fmt: skip
MARKUP_SIZES = {
    "max_depth": 5, "xpath_unit_hidden_size": 8, "max_xpath_tag_unit_embeddings": 20, "max_xpath_subs_unit_embeddings": 20,
    "tag_pad_id": 16, "subs_pad_id": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Version4:
    """One family: its config.json, how version 4 cut a layer, and where its output projection is.

    Args:
        auto: Auto class that loads it.
        config: entries of config.json beside those that every family has.
        cut: removes all but the given features from a layer of the state dict.
        output: key of a layer's output projection and the axis of its heads.
        version4_key: the key that version 4 had for a key of version 5.
        old_names: turns keys into those of older releases.
    """

    auto: str
    config: dict[str, object]
    cut: Cut
    output: Output
    version4_key: Callable[[str], str] = lambda key: key
    old_names: Callable[[dict[str, Tensor]], None] = lambda weights: None


def _bert(name: str, base: str, task: str = "MaskedLM", model_type: str = "", **config: object) -> Version4:
    """A family with the layers of BERT."""
    stock = {"architectures": [f"{name}For{task}"], "model_type": model_type or base, **BERT_SIZES, **config}
    return Version4(f"AutoModelFor{task}", stock, *_bert_like(base))


def _xlm(name: str, model_type: str, task: str) -> Version4:
    stock = {"architectures": [name], "model_type": model_type, **XLM_SIZES}
    cut = separate("transformer.attentions.{}", ("q_lin", "k_lin", "v_lin"), "out_lin")
    return Version4(f"AutoModelFor{task}", stock, *cut)


def _vit(name: str, base: str) -> Version4:
    stock = {"architectures": [f"{name}ForImageClassification"], "model_type": base, **VIT_SIZES}
    return Version4("AutoModelForImageClassification", stock, *_vit_like(base), _old_vit_names)


FAMILIES = {
    "bert": replace(_bert("Bert", "bert"), old_names=_old_bert_names),
    "roberta": _bert("Roberta", "roberta", "SequenceClassification"),
    "distilbert": Version4(
        "AutoModelForSequenceClassification",
        {
            "architectures": ["DistilBertForSequenceClassification"], "model_type": "distilbert", "vocab_size": 50,
            "dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "hidden_dim": 8, "max_position_embeddings": 24,
        },
        *separate("distilbert.transformer.layer.{}.attention", ("q_lin", "k_lin", "v_lin"), "out_lin"),
    ),
    "gpt2": Version4(
        "AutoModelForCausalLM",
        {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50, "n_embd": WIDTH, "n_head": HEADS,
            "n_layer": LAYERS, "n_positions": 24, "bos_token_id": 0, "eos_token_id": 0,
        },
        _cut_gpt2,
        lambda layer: (f"transformer.h.{layer}.attn.c_proj.weight", 0),
        old_names=_old_gpt2_names,
    ),
    "albert": Version4(
        "AutoModelForMaskedLM",
        {
            "architectures": ["AlbertForMaskedLM"], "model_type": "albert", **BERT_SIZES, "embedding_size": 8,
            "num_hidden_groups": LAYERS,
        },
        *separate(
            "albert.encoder.albert_layer_groups.{}.albert_layers.0.attention", ("query", "key", "value"), "dense"
        ),
    ),
    "xlm": _xlm("XLMForSequenceClassification", "xlm", "SequenceClassification"),
    "flaubert": _xlm("FlaubertWithLMHeadModel", "flaubert", "MaskedLM"),
    "vit": _vit("ViT", "vit"),
    "deit": _vit("DeiT", "deit"),
    "ernie": _bert("Ernie", "ernie"),
    "layoutlm": _bert("LayoutLM", "layoutlm", "TokenClassification"),
    "markuplm": _bert("MarkupLM", "markuplm", "TokenClassification", **MARKUP_SIZES),
    "megatron-bert": _bert("MegatronBert", "bert", model_type="megatron-bert"),
    "data2vec-text": _bert("Data2VecText", "data2vec_text", model_type="data2vec-text"),
    "rembert": _bert("RemBert", "rembert", input_embedding_size=8, output_embedding_size=8),
    "roformer": _bert("RoFormer", "roformer", embedding_size=WIDTH),
    "splinter": _bert("Splinter", "splinter", "QuestionAnswering", question_token_id=4),
}  # fmt: skip


def ids() -> Tensor:
    return torch.randint(5, 50, (2, 7), generator=torch.Generator().manual_seed(3))


def inputs(family: Version4) -> dict[str, Tensor]:
    """Inputs of the family's model."""
    if "image_size" in family.config:
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))}
    return {"input_ids": ids()}


def build(family: Version4) -> t.PreTrainedModel:
    """The dense model that is pruned, with weights large enough that every head matters."""
    settings = {key: value for key, value in family.config.items() if key not in ("architectures", "model_type")}
    config = t.AutoConfig.for_model(family.config["model_type"], **settings)
    torch.manual_seed(0)
    model: t.PreTrainedModel = getattr(t, family.config["architectures"][0])(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def weights_of(family: Version4, model: t.PreTrainedModel) -> dict[str, Tensor]:
    """The model's own weights under the keys of version 4."""
    return {family.version4_key(key): tensor for key, tensor in model.state_dict().items()}


def write(
    directory: Path, family: Version4, removed: Mapping[Place, list[int]], *, pickle: bool = False, old_names: bool = False
) -> Tensor:
    """Write the checkpoint without the heads ``removed``, by layer; returns the first output of the model it is."""
    model = build(family)
    own = weights_of(family, model)
    weights = {key: tensor.clone() for key, tensor in own.items()}
    for layer, heads in removed.items():
        key, axis = family.output(layer)
        own[key].index_fill_(axis, torch.tensor(features(heads)), 0.0)
        family.cut(weights, layer, features([head for head in range(HEADS) if head not in heads]))
    with torch.no_grad():
        expected = model(**inputs(family))[0]
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
