"""Restore the dense shape of a checkpoint that Transformers 4 pruned.

Version 4 wrote the removed heads into the config, ``{"layer": [heads]}`` under ``pruned_heads``. The weights lack the rows of
query, key and value and the columns of the output projection of these heads. Version 5 builds every layer dense and cannot
load them. So the weights are filled up with zeros, and a mask marks the removed heads.

``group`` is the number of layers with separate weights in each layer group of ALBERT, and 1 for all other families.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from gates.attention.sites import AttentionSite, find_attention
from gates.errors import GateError, first_line
from gates.export.safe_load import read_json, read_weights

PrunedHeads = Mapping[int, frozenset[int]]
"""Removed heads by layer, numbered as in the dense model."""
FAMILIES = (
    "bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "layoutlm", "markuplm", "megatron-bert", "data2vec-text",
    "rembert", "roformer", "splinter", "vit", "deit", "xlm", "flaubert", "albert", "distilbert", "gpt2",
)  # fmt: skip
"""Values of ``model_type``."""
KEY = re.compile(
    r"(?:.+\.)?(?:(?:encoder|transformer)\.layer\.N\.attention|attentions\.N|h\.N\.attn"
    r"|albert_layer_groups\.N\.albert_layers\.N\.attention)\."
    r"(?:(?P<input>(?:self\.|attention\.)?(?:query|key|value)|[qkv]_lin|c_attn)|output\.dense|dense|out_lin|c_proj)"
    r"\.(?P<kind>weight|bias)".replace("N", "([0-9]{1,6})")
)
"""The keys of attention in a state dict of version 4, with the number of the layer, or of the group and its layer."""


def load_legacy(directory: str | os.PathLike[str], *, allow_pickle: bool = False) -> tuple[PreTrainedModel, Tensor]:
    """Load a checkpoint that Transformers 4 pruned as the stock dense model and the mask ``[heads]`` of the kept heads.

    Args:
        directory: A directory with weights and a config.json with ``pruned_heads``.
        allow_pickle: Whether ``pytorch_model.bin`` may be read; see :func:`gates.export.safe_load.read_weights`.
    """
    directory = Path(directory)
    content = read_json(directory / "config.json")
    if not isinstance(content, dict):
        raise GateError(f"{str(directory / 'config.json')!r} is not a model's config; expected a JSON object")
    removed = content.get("pruned_heads")
    if not removed or (isinstance(removed, dict) and not any(removed.values())):
        raise GateError(f"{str(directory)!r} has no pruned_heads in its config.json; load it without a conversion")
    config = _dense_config(content)
    group = getattr(config, "inner_group_num", 1)
    layers = config.num_hidden_groups * group if hasattr(config, "num_hidden_groups") else config.num_hidden_layers
    heads, width = config.num_attention_heads, config.hidden_size
    if heads < 1 or width % heads:
        raise GateError(
            f"config.json of {str(directory)!r} has {heads} heads for a width of {width}; expected a number that divides it"
        )
    pruned = parse_pruned_heads(removed, layers=layers, heads=heads, group=group)
    weights = read_weights(directory, allow_pickle=allow_pickle)
    expanded = expand_pruned_state_dict(weights, pruned, heads=heads, head_dim=width // heads, group=group)
    model = _load_strictly(content.get("architectures"), config, expanded)
    return model, mask_of_pruned_heads(pruned, find_attention(model), group=group)


def parse_pruned_heads(value: Any, *, layers: int, heads: int, group: int = 1) -> PrunedHeads:
    """Check ``pruned_heads`` of a config.json, and drop layers that lost no head.

    Version 4 used the number of a layer as a list index. So -1 is the last layer.
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
        number = int(int(key) / group)  # version 4's own division, which rounds towards zero
        layer = number % (layers // group) * group + (int(key) - number * group) % group
        pruned[layer] = pruned.get(layer, frozenset()) | frozenset(removed)
    return {layer: removed for layer, removed in sorted(pruned.items()) if removed}


def expand_pruned_state_dict(
    state_dict: Mapping[str, Tensor], pruned_heads: PrunedHeads, *, heads: int, head_dim: int, group: int = 1
) -> dict[str, Tensor]:
    """Return the state dict in the dense shape, with zeros for removed heads. Zeros in the columns of the output projection
    disable a head, so the outputs are those of the pruned model."""
    dense: dict[str, Tensor] = {}
    for key, tensor in state_dict.items():
        place = KEY.fullmatch(key)
        if place is None or (place["input"] is None and place["kind"] == "bias"):
            dense[key] = tensor
            continue
        layer = _layer_of([int(number) for number in place.groups()[:-2] if number], group)
        blocks = 3 if place["input"] == "c_attn" else 1  # query, key and value one after another
        transposed = ".c_attn." in key or ".c_proj." in key  # GPT-2 stores [in, out]
        axis = 0 if place["kind"] == "bias" else int((place["input"] is None) != transposed)
        kept = sorted(set(range(heads)) - pruned_heads.get(layer, frozenset()))
        index = torch.arange(blocks * heads * head_dim).reshape(blocks, heads, head_dim)[:, kept].flatten()
        if tensor.dim() <= axis or tensor.shape[axis] != len(index):
            raise GateError(
                f"{key!r} has shape {list(tensor.shape)}, but expected {len(index)} in dimension {axis} for the {len(kept)} of "
                f"{heads} heads that pruned_heads leaves in layer {layer}; use the config.json of these weights"
            )
        shape = [*tensor.shape[:axis], blocks * heads * head_dim, *tensor.shape[axis + 1 :]]
        dense[key] = tensor.new_zeros(shape).index_copy_(axis, index, tensor)
    return dense


def mask_of_pruned_heads(pruned_heads: PrunedHeads, sites: Sequence[AttentionSite], *, group: int = 1) -> Tensor:
    """Return the mask ``[heads]`` of a dense model: 0 for removed heads of self-attention, 1 for all others. Version 4 never
    pruned cross-attention."""
    mask = [torch.ones(site.heads) for site in sites]
    for site, part in zip(sites, mask, strict=True):
        if site.kind != "cross":
            numbers = [int(step) for step in site.name.split(".") if step.isdecimal()]
            part[sorted(pruned_heads.get(_layer_of(numbers, group), ()))] = 0.0
    return torch.cat(mask)


def _layer_of(numbers: Sequence[int], group: int) -> int:
    """Return the layer from the numbers in a path: its own number, or those of its group and its place in the group."""
    return functools.reduce(lambda layer, number: layer * group + number, numbers, 0)


def _dense_config(content: Mapping[str, Any]) -> PreTrainedConfig:
    family = content.get("model_type")
    if family not in FAMILIES:
        raise GateError(f"checkpoints of model_type {family!r} cannot be converted; expected one of {', '.join(FAMILIES)}")
    # entries that are handled here, or that could load code
    without = ("pruned_heads", "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset")
    try:
        return CONFIG_MAPPING[family].from_dict({key: value for key, value in content.items() if key not in without})
    except Exception as error:  # config classes raise many kinds
        raise GateError(f"config.json is not a config of {family!r} in Transformers 5: {first_line(error)}") from error


def _load_strictly(names: Any, config: PreTrainedConfig, state_dict: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return the model of the class that the config names with exactly these weights, after Transformers' renaming of keys."""
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    stock: Any = getattr(transformers, name, None)
    if not (inspect.isclass(stock) and issubclass(stock, PreTrainedModel) and stock.config_class is type(config)):
        raise GateError(
            f"config.json has {names!r} as architectures; expected a list with one Transformers class for {config.model_type!r}"
        )
    constants = re.compile(r"(^|\.)(attn|crossattention)\.masked_bias$")  # older releases saved these
    weights = {key: tensor for key, tensor in state_dict.items() if not constants.search(key)}
    try:
        loaded: Any = stock.from_pretrained(None, config=config, state_dict=weights, output_loading_info=True)
    except Exception as error:  # Transformers raises many kinds for weights of other shapes
        raise GateError(f"the weights do not load as {name}: {first_line(error)}") from error
    model: PreTrainedModel
    model, report = loaded
    found = {what: report[f"{what}_keys"] for what in ("missing", "unexpected")}
    if wrong := [f"{len(keys)} {what} (the first is {min(keys)!r})" for what, keys in found.items() if keys]:
        raise GateError(
            f"the weights are not those of {name}, which config.json names: {' and '.join(wrong)}; "
            "correct 'architectures' or get the weights again"
        )
    return model
