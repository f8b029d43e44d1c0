"""Give a checkpoint that Transformers 4 pruned its dense shape back.

Version 4 wrote the removed heads into the config, ``{"layer": [heads]}`` under ``pruned_heads``, and weights without
the rows of query, key and value and without the columns of the output projection that belonged to them. Version 5
builds every layer dense and cannot load that. Scattered back among zeros, with a mask for the heads that are gone, the
weights are those of an ordinary model again, and head numbers are those of the original model.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from gates.errors import GateError
from gates.export.safe_load import read_json, read_weights
from gates.sites import AttentionSite, find_attention

PrunedHeads = Mapping[int, frozenset[int]]
"""Heads that were removed, by layer, numbered as in the dense model."""


@dataclass(frozen=True)
class LegacyLayout:
    """Key names of one family's self-attention, as Transformers 4 wrote them; it pruned no cross-attention.

    Args:
        attention: path of an attention module below the base model, with ``{}`` for each number in it: that of the layer, or
            those of the group and of the layer in the group.
        inputs: paths of query, key and value below it, or of the one projection they are fused in.
        output: path of the output projection.
        fused: how many of query, key and value lie one after another in each of ``inputs``.
        transposed: whether weights are stored ``[in, out]``.
    """

    attention: str
    inputs: tuple[str, ...]
    output: str
    fused: int = 1
    transposed: bool = False

    def parse(self, key: str) -> tuple[tuple[int, ...], str, str] | None:
        """Numbers in the attention's path, path below it and ``weight`` or ``bias`` of a key of the state dict; None for a
        key that pruning leaves alone."""
        attention = re.escape(self.attention).replace(r"\{\}", r"([0-9]{1,6})")
        paths = "|".join(map(re.escape, (*self.inputs, self.output)))
        found = re.fullmatch(rf"(?:.+\.)?{attention}\.({paths})\.(weight|bias)", key)
        if found is None:
            return None
        *numbers, path, kind = found.groups()
        return tuple(map(int, numbers)), path, kind


_BERT = LegacyLayout("encoder.layer.{}.attention", ("self.query", "self.key", "self.value"), "output.dense")
_VIT = LegacyLayout("encoder.layer.{}.attention", ("attention.query", "attention.key", "attention.value"), "output.dense")
_XLM = LegacyLayout("attentions.{}", ("q_lin", "k_lin", "v_lin"), "out_lin")
_LIKE_BERT = (
    "bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "layoutlm", "markuplm", "megatron-bert", "data2vec-text",
    "rembert", "roformer", "splinter",
)  # fmt: skip
LAYOUTS: Mapping[str, LegacyLayout] = {
    **dict.fromkeys(_LIKE_BERT, _BERT),
    **dict.fromkeys(("vit", "deit"), _VIT),
    **dict.fromkeys(("xlm", "flaubert"), _XLM),
    "albert": LegacyLayout("albert_layer_groups.{}.albert_layers.{}.attention", ("query", "key", "value"), "dense"),
    "distilbert": LegacyLayout("transformer.layer.{}.attention", ("q_lin", "k_lin", "v_lin"), "out_lin"),
    "gpt2": LegacyLayout("h.{}.attn", ("c_attn",), "c_proj", fused=3, transposed=True),
}
"""By ``model_type`` of the config."""
OBSOLETE = re.compile(r"(^|\.)(attn|crossattention)\.masked_bias$")
"""Constants that older releases saved among the weights, beside those that Transformers 5 itself knows to skip."""
NOT_KEPT = ("pruned_heads", "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset")
"""Entries of config.json that are done with here, or that could load code from elsewhere."""


def load_legacy(directory: str | os.PathLike[str], *, allow_pickle: bool = False) -> tuple[PreTrainedModel, Tensor]:
    """A checkpoint that Transformers 4 pruned, as the stock dense model and the mask ``[heads]`` of what it kept.

    Args:
        directory: directory with a config.json that holds ``pruned_heads``, and weights.
        allow_pickle: whether ``pytorch_model.bin`` may be read; see :func:`gates.export.safe_load.read_weights`.

    Raises:
        GateError: if there is nothing to convert, the family is unknown, or config and weights do not fit each other.
    """
    directory = Path(directory)
    content = read_json(directory / "config.json")
    if not isinstance(content, dict):
        raise GateError(f"{str(directory / 'config.json')!r} is not a model's config; expected a JSON object")
    removed = content.get("pruned_heads")
    if not removed or (isinstance(removed, dict) and not any(removed.values())):
        raise GateError(f"{str(directory)!r} has no pruned_heads in its config.json, so it loads as it is; nothing to convert")
    config = _dense_config(content)
    group = getattr(config, "inner_group_num", 1)
    layers = config.num_hidden_groups * group if hasattr(config, "num_hidden_groups") else config.num_hidden_layers
    heads, width = config.num_attention_heads, config.hidden_size
    if heads < 1 or width % heads:
        raise GateError(f"config.json of {str(directory)!r} has {heads} heads for a width of {width}, which they do not divide")
    pruned_heads = parse_pruned_heads(removed, layers=layers, heads=heads, group=group)
    stock = _stock_class(content, config)
    state_dict = expand_pruned_state_dict(
        read_weights(directory, allow_pickle=allow_pickle),
        pruned_heads,
        layout=LAYOUTS[config.model_type],
        heads=heads,
        head_dim=width // heads,
        group=group,
    )
    model = _load_strictly(stock, config, state_dict)
    return model, mask_of_pruned_heads(pruned_heads, find_attention(model), group=group)


def parse_pruned_heads(value: Any, *, layers: int, heads: int, group: int = 1) -> PrunedHeads:
    """``pruned_heads`` of a config.json, checked; layers that lost no head are left out.

    Version 4 took the number of a layer as an index of a list, pruned the last layer for -1, and wrote it down as -1.

    Args:
        value: value read from JSON: lists of head numbers by layer number, the latter strings.
        layers: number of layers of the dense model; layers that share their weights count as one.
        heads: heads per layer of the dense model.
        group: layers with weights of their own in each group of layers (ALBERT); 1 for models without groups.

    Raises:
        GateError: naming the layer or head that the dense model does not have.
    """
    if not isinstance(value, Mapping):
        raise GateError(f"pruned_heads in config.json is {value!r}; expected lists of head numbers by layer")
    pruned: dict[int, frozenset[int]] = {}
    for key, removed in value.items():
        if not re.fullmatch(r"-?[0-9]{1,6}", str(key)) or not -layers <= int(key) < layers:
            raise GateError(f"pruned_heads in config.json names layer {key!r}; the model has layers 0 to {layers - 1}")
        if not isinstance(removed, Sequence) or isinstance(removed, str):
            raise GateError(f"pruned_heads in config.json has {removed!r} for layer {key}; expected a list of head numbers")
        for head in removed:
            if type(head) is not int or not 0 <= head < heads:
                raise GateError(
                    f"pruned_heads in config.json names head {head!r} of layer {key}, which has heads 0 to {heads - 1}"
                )
        layer = _layer_of_index(int(key), layers=layers, group=group)
        pruned[layer] = pruned.get(layer, frozenset()) | frozenset(removed)
    return {layer: removed for layer, removed in sorted(pruned.items()) if removed}


def expand_pruned_state_dict(
    state_dict: Mapping[str, Tensor],
    pruned_heads: PrunedHeads,
    *,
    layout: LegacyLayout,
    heads: int,
    head_dim: int,
    group: int = 1,
) -> dict[str, Tensor]:
    """The state dict in the dense shape, with zeros where heads were removed; keys keep their names.

    With zeros in its columns of the output projection a head has no effect, so the dense model computes what the pruned
    one did.

    Args:
        state_dict: state dict that Transformers 4 wrote; it is not changed.
        pruned_heads: heads removed from each layer.
        layout: key names of the family.
        heads: heads per layer of the dense model.
        head_dim: width of one head.
        group: layers in each group of layers; see :func:`parse_pruned_heads`.

    Raises:
        GateError: if a weight has not the size that ``pruned_heads`` leaves.
    """
    dense: dict[str, Tensor] = {}
    for key, tensor in state_dict.items():
        place = layout.parse(key)
        if place is None or place[1:] == (layout.output, "bias"):
            dense[key] = tensor
            continue
        numbers, path, kind = place
        layer = _layer_of_numbers(numbers, group)
        blocks = 1 if path == layout.output else layout.fused
        axis = 0 if kind == "bias" else int((path == layout.output) != layout.transposed)
        kept = sorted(set(range(heads)) - pruned_heads.get(layer, frozenset()))
        index = _features(kept, heads=heads, head_dim=head_dim, blocks=blocks)
        if tensor.dim() <= axis or tensor.shape[axis] != len(index):
            raise GateError(
                f"{key!r} has shape {list(tensor.shape)}, but pruned_heads in config.json leaves {len(kept)} of {heads} heads "
                f"in layer {layer}, so dimension {axis} should be {len(index)}; config and weights are not of one checkpoint"
            )
        shape = list(tensor.shape)
        shape[axis] = blocks * heads * head_dim
        dense[key] = tensor.new_zeros(shape).index_copy_(axis, index, tensor)
    return dense


def mask_of_pruned_heads(pruned_heads: PrunedHeads, sites: tuple[AttentionSite, ...], *, group: int = 1) -> Tensor:
    """The mask ``[heads]`` of a dense model: 0 for the self-attention heads that were removed, 1 for all others.

    Args:
        pruned_heads: heads removed from each layer.
        sites: attention sites of the dense model.
        group: layers in each group of layers; see :func:`parse_pruned_heads`.
    """
    mask = [torch.ones(site.heads) for site in sites]
    for site, part in zip(sites, mask, strict=True):
        if site.kind != "cross":
            numbers = [int(step) for step in site.name.split(".") if step.isdecimal()]
            part[sorted(pruned_heads.get(_layer_of_numbers(numbers, group), ()))] = 0.0
    return torch.cat(mask)


def _layer_of_numbers(numbers: Sequence[int], group: int) -> int:
    """The layer whose attention has these numbers in its path: its own, or those of its group and of its place in it."""
    return functools.reduce(lambda layer, number: layer * group + number, numbers, 0)


def _layer_of_index(index: int, *, layers: int, group: int) -> int:
    """The layer that version 4 pruned for an index, which may count from the end; the division is its own."""
    number = int(index / group)
    return number % (layers // group) * group + (index - number * group) % group


def _features(kept: list[int], *, heads: int, head_dim: int, blocks: int) -> Tensor:
    """Positions of the kept heads' features along the dense axis, for ``blocks`` copies of all heads in a row."""
    features = torch.arange(blocks * heads * head_dim).reshape(blocks, heads, head_dim)
    return features[:, kept].flatten()


def _dense_config(content: Mapping[str, Any]) -> PreTrainedConfig:
    family = content.get("model_type")
    if not isinstance(family, str) or family not in LAYOUTS:
        raise GateError(f"checkpoints of model_type {family!r} cannot be converted; expected one of {', '.join(LAYOUTS)}")
    kept = {key: value for key, value in content.items() if key not in NOT_KEPT}
    try:
        return CONFIG_MAPPING[family].from_dict(kept)
    except Exception as error:  # config classes raise many kinds
        raise GateError(f"config.json is not a config of {family!r} in Transformers 5: {_one_line(error)}") from error


def _stock_class(content: Mapping[str, Any], config: PreTrainedConfig) -> type[PreTrainedModel]:
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    stock = getattr(transformers, name, None) if name else None
    if not (inspect.isclass(stock) and issubclass(stock, PreTrainedModel) and stock.config_class is type(config)):
        raise GateError(
            f"config.json names {names!r} as architectures; expected a list with one model class of Transformers "
            f"for {config.model_type!r}"
        )
    return stock


def _load_strictly(stock: type[PreTrainedModel], config: PreTrainedConfig, state_dict: Mapping[str, Tensor]) -> PreTrainedModel:
    """A model with exactly these weights; Transformers itself renames keys of older releases."""
    weights = {key: tensor for key, tensor in state_dict.items() if not OBSOLETE.search(key)}
    try:
        loaded: Any = stock.from_pretrained(None, config=config, state_dict=weights, output_loading_info=True)
    except Exception as error:  # Transformers raises many kinds for weights of other shapes
        raise GateError(f"the weights do not load as {stock.__name__}: {_one_line(error)}") from error
    model: PreTrainedModel
    model, report = loaded
    wrong = [
        f"{len(keys)} {what} (the first is {min(keys)!r})"
        for what, keys in (("missing", report["missing_keys"]), ("unexpected", report["unexpected_keys"]))
        if keys
    ]
    if wrong:
        raise GateError(
            f"the weights are not those of {stock.__name__}, which config.json names: {' and '.join(wrong)}; "
            "correct 'architectures' or get the weights again"
        )
    return model


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
