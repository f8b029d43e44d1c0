"""Checkpoints the way Transformers 4 wrote them after ``prune_heads``, sliced by hand, with the outputs they stand for.

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
Place = int | tuple[int, ...]
"""The number of a layer, or the numbers in the path of its attention."""
Weights = dict[str, Tensor]


def features(heads: list[int]) -> list[int]:
    return [head * HEAD_DIM + i for head in heads for i in range(HEAD_DIM)]


@dataclass(frozen=True)
class Version4:
    """One family.

    Args:
        auto: The Auto class that loads it.
        config: The entries of config.json that not every family has.
        attention: The path of an attention, with ``{}`` for the numbers of its place.
        parts: The paths of query, key and value below it; none if they are fused as in GPT-2.
        output: The path of the output projection below it.
        version4_key: The key that version 4 had for a key of version 5.
        old_names: A function that turns keys into those of older releases.
    """

    auto: str
    config: dict[str, object]
    attention: str
    parts: tuple[str, ...]
    output: str
    version4_key: Callable[[str], str] = lambda key: key
    old_names: Callable[[Weights], None] = lambda weights: None

    def path(self, place: Place) -> str:
        return self.attention.format(*(place if isinstance(place, tuple) else (place,)))

    def output_of(self, place: Place) -> tuple[str, int]:
        """Return the key of a layer's output projection and the axis of its heads."""
        return f"{self.path(place)}.{self.output}.weight", int(bool(self.parts))

    def cut(self, weights: Weights, place: Place, removed: list[int]) -> None:
        """Remove heads from a layer."""
        keep = features([head for head in range(HEADS) if head not in removed])
        for part in self.parts:
            for kind in ("weight", "bias"):
                key = f"{self.path(place)}.{part}.{kind}"
                weights[key] = weights[key][keep]
        if not self.parts:
            for kind in ("weight", "bias"):
                key = f"{self.path(place)}.c_attn.{kind}"
                weights[key] = torch.cat([third[..., keep] for third in weights[key].split(WIDTH, dim=-1)], dim=-1)
        key, axis = self.output_of(place)
        weights[key] = weights[key][:, keep] if axis else weights[key][keep]


def _old_bert_names(weights: Weights) -> None:
    for key in [key for key in weights if "LayerNorm" in key]:
        old = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        weights[old] = weights.pop(key)
    weights["bert.embeddings.position_ids"] = torch.arange(24).unsqueeze(0)
    del weights["cls.predictions.decoder.weight"], weights["cls.predictions.decoder.bias"]  # tied


def _old_gpt2_names(weights: Weights) -> None:
    for layer in range(LAYERS):
        weights[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.uint8).tril()
        weights[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    del weights["lm_head.weight"]  # tied


def _old_vit_names(key: str) -> str:
    parts = {"q": "query", "k": "key", "v": "value"}
    key = re.sub(r"^(vit|deit)\.layers\.", r"\1.encoder.layer.", key)
    key = re.sub(r"\.attention\.([qkv])_proj\.", lambda found: f".attention.attention.{parts[found[1]]}.", key)
    key = key.replace(".attention.o_proj.", ".attention.output.dense.")
    return key.replace(".mlp.fc1.", ".intermediate.dense.").replace(".mlp.fc2.", ".output.dense.")


BERT_SIZES = {
    "vocab_size": 50, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "intermediate_size": 8, "max_position_embeddings": 24, "position_embedding_type": "absolute",
}  # fmt: skip


def _bert(name: str, base: str, task: str = "MaskedLM", model_type: str = "", **config: object) -> Version4:
    """Return a family with the layers of BERT."""
    stock = {"architectures": [f"{name}For{task}"], "model_type": model_type or base, **BERT_SIZES, **config}
    parts = ("self.query", "self.key", "self.value")
    return Version4(f"AutoModelFor{task}", stock, base + ".encoder.layer.{}.attention", parts, "output.dense")


def _xlm(name: str, model_type: str, task: str) -> Version4:
    sizes = {"emb_dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "n_words": 50, "max_position_embeddings": 24,
             "n_langs": 1, "pad_index": 0}  # fmt: skip
    stock = {"architectures": [name], "model_type": model_type, **sizes}
    return Version4(f"AutoModelFor{task}", stock, "transformer.attentions.{}", ("q_lin", "k_lin", "v_lin"), "out_lin")


def _vit(name: str, base: str) -> Version4:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": 8,
             "image_size": 8, "patch_size": 4}  # fmt: skip
    stock = {"architectures": [f"{name}ForImageClassification"], "model_type": base, **sizes}
    parts, path = ("attention.query", "attention.key", "attention.value"), base + ".encoder.layer.{}.attention"
    return Version4("AutoModelForImageClassification", stock, path, parts, "output.dense", _old_vit_names)


FAMILIES = {
    "bert": replace(_bert("Bert", "bert"), old_names=_old_bert_names),
    "roberta": _bert("Roberta", "roberta", "SequenceClassification"),
    "distilbert": Version4(
        "AutoModelForSequenceClassification",
        {
            "architectures": ["DistilBertForSequenceClassification"], "model_type": "distilbert", "vocab_size": 50,
            "dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "hidden_dim": 8, "max_position_embeddings": 24,
        },
        "distilbert.transformer.layer.{}.attention", ("q_lin", "k_lin", "v_lin"), "out_lin",
    ),
    "gpt2": Version4(
        "AutoModelForCausalLM",
        {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50, "n_embd": WIDTH, "n_head": HEADS,
            "n_layer": LAYERS, "n_positions": 24, "bos_token_id": 0, "eos_token_id": 0,
        },
        "transformer.h.{}.attn", (), "c_proj", old_names=_old_gpt2_names,
    ),
    "albert": Version4(
        "AutoModelForMaskedLM",
        {
            "architectures": ["AlbertForMaskedLM"], "model_type": "albert", **BERT_SIZES, "embedding_size": 8,
            "num_hidden_groups": LAYERS,
        },
        "albert.encoder.albert_layer_groups.{}.albert_layers.0.attention", ("query", "key", "value"), "dense",
    ),
    "xlm": _xlm("XLMForSequenceClassification", "xlm", "SequenceClassification"),
    "flaubert": _xlm("FlaubertWithLMHeadModel", "flaubert", "MaskedLM"),
    "vit": _vit("ViT", "vit"),
    "deit": _vit("DeiT", "deit"),
    "ernie": _bert("Ernie", "ernie"),
    "layoutlm": _bert("LayoutLM", "layoutlm", "TokenClassification"),
    "markuplm": _bert(
        "MarkupLM", "markuplm", "TokenClassification", max_depth=5, xpath_unit_hidden_size=8, max_xpath_tag_unit_embeddings=20,
        max_xpath_subs_unit_embeddings=20, tag_pad_id=16, subs_pad_id=16,
    ),
    "megatron-bert": _bert("MegatronBert", "bert", model_type="megatron-bert"),
    "data2vec-text": _bert("Data2VecText", "data2vec_text", model_type="data2vec-text"),
    "rembert": _bert("RemBert", "rembert", input_embedding_size=8, output_embedding_size=8),
    "roformer": _bert("RoFormer", "roformer", embedding_size=WIDTH),
    "splinter": _bert("Splinter", "splinter", "QuestionAnswering", question_token_id=4),
}  # fmt: skip


def inputs(family: Version4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    if "image_size" in family.config:
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=draw)}
    return {"input_ids": torch.randint(5, 50, (2, 7), generator=draw)}


def build(family: Version4) -> t.PreTrainedModel:
    """Build the dense model that is pruned, with weights large enough that every head matters."""
    settings = {key: value for key, value in family.config.items() if key not in ("architectures", "model_type")}
    config = t.AutoConfig.for_model(family.config["model_type"], **settings)
    torch.manual_seed(0)
    model: t.PreTrainedModel = getattr(t, family.config["architectures"][0])(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def write(
    directory: Path, family: Version4, removed: Mapping[Place, list[int]], *, pickle: bool = False, old_names: bool = False
) -> Tensor:
    """Write the checkpoint without the heads ``removed``, by layer, and return the first output of the model it is."""
    model = build(family)
    own = {family.version4_key(key): tensor for key, tensor in model.state_dict().items()}
    weights = {key: tensor.clone() for key, tensor in own.items()}
    for place, heads in removed.items():
        key, axis = family.output_of(place)
        own[key].index_fill_(axis, torch.tensor(features(heads)), 0.0)
        family.cut(weights, place, heads)
    with torch.no_grad():
        expected = model(**inputs(family))[0]
    if old_names:
        family.old_names(weights)
    directory.mkdir(parents=True)
    pruned = {str(layer): heads for layer, heads in removed.items()}
    version = {"torch_dtype": "float32", "transformers_version": "4.46.3", "use_cache": True}
    (directory / "config.json").write_text(json.dumps({**family.config, "pruned_heads": pruned, **version}))
    if pickle:
        torch.save(weights, directory / "pytorch_model.bin")
    else:
        save_file({key: w.contiguous() for key, w in weights.items()}, directory / "model.safetensors", {"format": "pt"})
    return expected


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
