"""Tiny random models of every model type of the installed Transformers, by rules on the names of configuration fields.

Sizes that have to agree get the same number throughout: every width is :data:`WIDTH`, every count of heads :data:`HEADS`, every
head size :data:`HEAD_SIZE`. Lists by layer keep one layer of each sort. A special token gets the same number within the small
vocabulary everywhere.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, ResNetConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from gates.errors import first_line
from tools.coverage.architectures import randomise_

HEADS, HEAD_SIZE = 4, 16
WIDTH = HEADS * HEAD_SIZE
VOCABULARY = 128
LAYERS = 2
IMAGE, PATCH = 64, 16

Rule = Callable[[int], int]


def at_most(limit: int) -> Rule:
    return lambda value: min(value, limit)


def above(least: int, size: int) -> Rule:
    """Return the rule that replaces values of at least ``least`` by ``size``."""
    return lambda value: size if value >= least else value


RULES: tuple[tuple[str, Rule], ...] = (
    (r".*(token_id|token_index|token_ids|_index|_idx)|(pad|bos|eos|unk|mask|sep|cls)_index", lambda value: value),
    (r".*xpath.*|num_labels|num_channels|audio_channels|output_stride|encoder_stride|.*kernel(_size)?", lambda value: value),
    # state-space and linear attention
    (r"(mamba|ssm)_(n|num)_heads", above(8, 2 * WIDTH // HEAD_SIZE)),
    (r"mamba_(d_head|head_dim)|(mamba_)?d_state|ssm_state_size|state_size|mamba_d_state|time_step_rank", at_most(HEAD_SIZE)),
    (r"(mamba_)?n_groups", at_most(2)),
    (r"(mamba_)?chunk_size|rnn_chunk_size", lambda value: min(value, 8) if value > 0 else value),
    (r"linear_num_key_heads", at_most(HEADS // 2)),
    (r"linear_num_value_heads", at_most(HEADS)),
    # heads
    (r"qk_head_dim", above(HEAD_SIZE, HEAD_SIZE + HEAD_SIZE // 2)),  # two parts, with and without rotation
    (r"qk_rope_head_dim|index_head_dim_rope", above(2, HEAD_SIZE // 2)),
    (r"rotary_dim", at_most(HEAD_SIZE // 2)),
    (r".*head_dim|.*head_size|d_kv|d_head|dim_head|.*dim_per_head|query_pre_attn_scalar|head_features", above(2, HEAD_SIZE)),
    (r".*(kv|key_value)_heads(_\w+)?|n_head_kv|num_kv", at_most(HEADS)),  # see _grouped
    (r"(\w+_)?(n_|num_)?(\w+_)?heads?|n_heads?", above(3, HEADS)),
    # experts
    (r".*experts_per_tok(en)?|num_selected_experts|moe_(top)?k|top_?k_experts|router_topk|num_experts_per_token", at_most(2)),
    (r"n_group|topk_group|n_expert_group", at_most(1)),
    (r"(num|n|moe_num)_shared_experts", at_most(1)),
    (r".*(num|n)_(\w+_)?experts|num_experts\w*", above(4, 4)),
    (r"expert_capacity", at_most(64)),
    # vocabulary and positions
    (r"type_vocab_size", lambda value: value),
    (r".*vocab_size\w*|\w*_vocab|n_words|.*codebook_size|num_embeddings|n_tokens|.*num_vocabs?", above(VOCABULARY, VOCABULARY)),
    (r"max_source_positions|max_target_positions", at_most(64)),
    (r"max_2d_position_embeddings|max_relative_positions?", lambda value: value),
    (r"(num_position_embeddings|num_patches|max_num_patches|num_image_patches)", at_most(16)),
    (r".*position_embeddings\w*|.*positions|n_ctx|max_seq_len|max_sequence_length|seq_length|max_seq_length", at_most(512)),
    (r"position_buckets", at_most(8)),
    # layers
    (r"(num_)?nextn_predict_layers|num_mtp_layers|num_kv_shared_layers", lambda value: 0),
    (r"first_k_dense_replace|moe_layer_start_index|num_dense_layers|insert_layer_id", at_most(1)),
    (r".*(interval|period|frequency|every_n\w*|_every|_step|sparse_step|layer_freq|window_pattern)", at_most(2)),
    (r".*(attn|expert|layer)_(layer_)?offset", at_most(1)),
    (r"max_window_layers", at_most(1)),
    (r"\w*num_(\w+_)?layers(_\w+)?|n_layers?|\w*_layers|num_\w*blocks|(\w+_)?depth|num_stages_per_\w+", at_most(LAYERS)),
    # pictures, films and sound
    (r"num_mel_bins|n_mels|mel_bins|input_feat_per_channel|num_mels", above(HEAD_SIZE, HEAD_SIZE)),
    (r"num_frames|frames_per_clip|num_hist_frames", at_most(2)),
    (r"(pretrain_)?image_size|.*_image_size|crop_size|img_size|resolution", above(IMAGE, IMAGE)),
    (r"patch_size|\w*spatial_patch_size", above(8, PATCH)),
    (r"num_windows", at_most(4)),
    (r"window_size", lambda value: IMAGE if value > IMAGE else min(value, 4)),  # in pixels, or in patches
    (r"window_size_per_stage|window_spec", at_most(2)),
    (r"mm_tokens_per_image", at_most(4)),
    (r"attention_window|local_attention|sliding_window(_size)?|block_size|attention_chunk_size", at_most(4)),
    (r"num_queries|num_query_tokens|num_denoising|\w*num_latents|n_latents|num_query_position_embeddings", at_most(8)),
    (r"upsample_initial_channel", above(WIDTH, WIDTH)),
    (r"\w*sampl\w+|\w*rate|max_length|hop_length|context_length|prediction_length|vision_feature_layer", lambda value: value),
    (r"num_conv_pos_embeddings", at_most(16)),
    (r"num_conv_pos_embedding_groups|\w*num_groups|codebook_groups", at_most(4)),
    (r"index_topk", at_most(4)),
    (r"dim_feedforward|n_window\w*", lambda value: min(value, WIDTH)),
    (r"index_kpool", at_most(2)),
    (r"num_pos_feats", above(WIDTH // 2, WIDTH // 2)),
    (r"upsample_groups", above(WIDTH, WIDTH)),
    (r"num_codebooks", at_most(2)),
    (r"coordinate_size", above(12, 12)),  # four of these and two of the next make one width
    (r"shape_size", above(8, 8)),
    (r"axial_pos_embds_dim", above(WIDTH // 2, WIDTH // 2)),
    (r"q_lora_rank|kv_lora_rank|\w*lora_rank|\w*_lora_dim|low_rank_dim", above(16, 16)),
    # whatever is left and is a width
    (
        r".*(hidden|embed|embd|emb_dim|inner|intermediate|ffn|mlp|projection|proj|width|dim|channels?|filters|features|units|"
        r"d_model|d_ff|latent|codevector)\w*|.*(hidden|intermediate|embedding|output|projector|feature|input)_size\w*|"
        r".*_dims?|.*_size_global|\w*hidden_dimension|n_inner|ffn_dim|dim",
        above(24, WIDTH),
    ),
)
"""Patterns of field names with the size in the tiny configuration. The first that matches the whole name counts."""
COMPILED = [(re.compile(pattern), rule) for pattern, rule in RULES]
BY_LAYER = re.compile(r"\w*num_(\w+_)?layers|n_layers?|\w*_layers|(\w+_)?depth|num_blocks")
INDICES = re.compile(r"\w*(indexes|indices|feature_layers?|layer_ids|_layers_list|select_layers?|mlp_only_layers)")
TOKEN = re.compile(r"\w*(token_id|token_index|token_ids|token_indices|_start_id|_end_id)|(pad|bos|eos|unk|mask|sep|cls)_index")
ROPE = ("rope_parameters", "rope_scaling")
UNSTATED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "head_dim": HEAD_SIZE, "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "top_k_experts": 2, "n_shared_experts": 1, "moe_intermediate_size": WIDTH, "dropout_rate": 0.0,
    "shared_expert_intermediate_size": WIDTH, "num_key_value_heads": HEADS, "n_group": 1, "topk_group": 1,
    "prediction_length": 4, "clip_qkv": 8.0, "pad_token_id": 0, "mask_token_id": 1, "image_token_index": 100,
    "image_token_id": 100, "video_token_index": 101, "audio_token_index": 102, "audio_token_id": 102,
    "vocabulary_map": {"<image>": VOCABULARY - 1}, "layer_types": ["full_attention"] * LAYERS,
    "mlp_layer_types": ["dense"] * LAYERS, "attention_types": [[["global", "local"], LAYERS // 2]],
    "image_grid_pinpoints": [[IMAGE, 2 * IMAGE], [2 * IMAGE, IMAGE], [2 * IMAGE, 2 * IMAGE]],
}  # fmt: skip
"""Values for fields that some classes leave empty and need, and for two whose values nest."""


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the same configuration with small layers, widths, vocabularies and pictures."""
    tokens = sorted({token for part in _configs(config) for token in _tokens(part) if token >= VOCABULARY})
    small = {token: VOCABULARY - 1 - position for position, token in enumerate(tokens)}
    return _tiny(config, small)


def _tiny(config: PreTrainedConfig, tokens: Mapping[int, int]) -> PreTrainedConfig:
    stated = dict(_stated(config))
    layers = _layers_that_stay(stated, len(getattr(config, "out_indices", None) or ()))
    usual = dict(_stated(type(config)()))
    new = {name: _new(name, old, stated, layers, tokens) for name, old in stated.items()}
    # The class may compute unchanged fields from the rest, unless they differ from its defaults.
    changed = {name: value for name, value in new.items() if value is not stated[name] or stated[name] != usual.get(name)}
    if not isinstance(config, ResNetConfig) and stated.get("use_timm_backbone"):
        changed |= {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    if indices := getattr(config, "out_indices", None):  # stages that other parts of a model read
        last = None if "depths" in stated or layers is None else len(layers)
        changed["out_indices"] = list(indices if last is None else range(last - len(indices) + 1, last + 1))
    if "depths" in stated and isinstance(stated.get("window_size"), int):
        changed["window_size"] = 2  # the last stage has no more
    if "channel_shrink_ratio" in stated:  # the model takes a fourth and a sixth of the width
        changed["hidden_size"] = 3 * WIDTH // 2
    if "pixel_shuffle_ratio" in stated and "intermediate_size" in stated:
        changed["intermediate_size"] = 4 * WIDTH
    if "clip_qkv" in stated:  # of DBRX, which reads this from a place where no default puts it
        changed["rope_theta"] = 10000.0
    return type(config)(**changed)


def _new(name: str, old: Any, stated: Mapping[str, Any], layers: Sequence[int] | None, tokens: Mapping[int, int]) -> Any:
    """Return the value of one field in the tiny configuration; the same object if it stays."""
    if old is None or name in ("attention_types", "image_grid_pinpoints"):
        return UNSTATED.get(name, old)
    if isinstance(old, PreTrainedConfig):
        return _backbone() if old.model_type == "timm_backbone" else _tiny(old, tokens)
    if name in ROPE and isinstance(old, Mapping):
        return _rope(old)
    if TOKEN.fullmatch(name):
        if isinstance(old, int) and not isinstance(old, bool):
            return tokens.get(old, old)
        return type(old)(tokens.get(one, one) for one in old) if isinstance(old, (list, tuple)) else old
    if isinstance(old, (list, tuple)):
        return _new_list(name, old, layers, stated)
    if not isinstance(old, int) or isinstance(old, bool):
        return old
    if layers is not None and BY_LAYER.fullmatch(name) and old == _per_layer(stated):
        return len(layers)
    if "key_value_heads" in name or "kv_heads" in name:
        return _grouped(name, old, stated)
    return sized(name, old)


def _new_list(name: str, old: Sequence[Any], layers: Sequence[int] | None, stated: Mapping[str, Any]) -> Any:
    kind: Callable[[Iterable[Any]], Any] = type(old)
    if INDICES.fullmatch(name) and all(isinstance(one, int) and one >= 0 for one in old):
        return kind(range(min(len(old), LAYERS if layers is None else len(layers))))
    if INDICES.fullmatch(name) and all(isinstance(one, int) for one in old):
        return kind(min(max(one, -LAYERS), LAYERS) for one in old)  # some counted from the last layer
    if layers is not None and len(old) == _per_layer(stated):
        return kind(old[layer] for layer in layers)
    if name == "layer_types" or "id2label" in name:
        return old
    if old and all(isinstance(one, int) and not isinstance(one, bool) for one in old):
        if name in ("depths", "num_layers", "num_hidden_layers", "layers", "encoder_depths", "stage_num_blocks"):
            return kind(min(one, 1) for one in old)
        if name == "depth":
            return kind(min(one, 3) for one in old)
        new = kind(sized(name.removesuffix("s") if name in ("hidden_sizes", "embed_dims") else name, one) for one in old)
        return old if new == old else new
    return old


def sized(name: str, value: int) -> int:
    """Return the tiny size for a field of this name."""
    return next((rule(value) for pattern, rule in COMPILED if pattern.fullmatch(name)), value)


def _grouped(name: str, keys: int, stated: Mapping[str, Any]) -> int:
    """Return half as many key/value heads as query heads if there are fewer of them."""
    queries = stated.get(re.sub(r"(key_value|kv)_heads", "attention_heads", name)) or stated.get("num_attention_heads")
    if keys in (0, 1):
        return keys
    return HEADS if not isinstance(queries, int) or keys >= queries else HEADS // 2


def _per_layer(stated: Mapping[str, Any]) -> int | None:
    """Return the number of layers that a configuration states."""
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "decoder_layers", "encoder_layers"):
        if isinstance(found := stated.get(name), int):
            return found
    return None


def _layers_that_stay(stated: Mapping[str, Any], outputs: int) -> list[int] | None:
    """Return the first layer of each sort: at least :data:`LAYERS`, and as many as an index needs."""
    count = _per_layer(stated)
    if count is None:
        return None
    lists = [value for value in stated.values() if isinstance(value, (list, tuple)) and len(value) == count > LAYERS]
    indices = [len(value) for name, value in stated.items() if INDICES.fullmatch(name) and isinstance(value, (list, tuple))]
    first: dict[Any, int] = {}
    for layer in range(count if lists else 0):
        first.setdefault(repr([one[layer] for one in lists]), layer)
    wanted = min(count, max([LAYERS, outputs, *(size for size in indices if size <= 6)]))
    kept = sorted(first.values())[:6]
    others = (layer for layer in range(count) if layer not in kept)
    return sorted([*kept, *(layer for _, layer in zip(range(wanted - len(kept)), others, strict=False))])


def _rope(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters for heads of :data:`HEAD_SIZE` features, one set or one for each sort of layer."""
    new: dict[str, Any] = {name: _rope(value) if isinstance(value, Mapping) else value for name, value in old.items()}
    share = new.get("partial_rotary_factor")
    if isinstance(share, float):
        share = new["partial_rotary_factor"] = max(share, 0.5)
    half = int(HEAD_SIZE * (share or 1.0)) // 2
    if sections := new.get("mrope_section", [2, 3, 3] if "rope_theta" in new else None):
        part = [max(1, size * half // sum(sections)) for size in sections]
        alone = [position for position, size in enumerate(sections) if sections.count(size) == 1]
        part[alone[0] if alone else 0] += half - sum(part)  # sections of one size stay so
        new["mrope_section"] = part
    for name in ("short_factor", "long_factor"):
        if isinstance(new.get(name), (list, tuple)):
            new[name] = list(new[name][:half])
    return new


def _backbone() -> ResNetConfig:
    """Return convolutions in the place of a network that another package provides."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1]}
    return ResNetConfig(**sizes, out_features=["stage2", "stage3", "stage4"])  # type: ignore[arg-type, call-arg]


def _stated(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Iterate over the fields that the constructor takes, with their values."""
    for name in dict.fromkeys([*(field.name for field in fields(config)), *config.sub_configs]):
        if name.startswith("_") or name in ("id2label", "label2id", "transformers_version", "architectures"):
            continue
        try:
            yield name, getattr(config, name)
        except Exception:  # some differ by layer, and have no value of their own
            continue


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for _, value in _stated(config):
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value)


def _tokens(config: PreTrainedConfig) -> Iterator[int]:
    for name, value in _stated(config):
        if TOKEN.fullmatch(name):
            yield from (one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, int))


class NotBuiltError(Exception):
    """No tiny model of a type can be made here; the message says why."""


def model_types() -> list[str]:
    """Return the sorted names of all model types."""
    return sorted({*CONFIG_MAPPING_NAMES, *(name for mapping in _mappings().values() for name in mapping)})


def tiny_models(model_type: str) -> Iterator[PreTrainedModel]:
    """Iterate over tiny random models of a type in evaluation mode, one for each class, the plain one first.

    Raises:
        NotBuiltError: If no class can be built.
    """
    try:
        config_class = CONFIG_MAPPING[model_type]
        config = config_class()
    except Exception as error:  # configurations refuse in many ways
        raise NotBuiltError(f"its configuration has no defaults: {first_line(error)}") from error
    classes = list(classes_of(model_type, config_class))
    if not classes:
        raise NotBuiltError("no class of models is made from its configuration")
    reasons: list[str] = []
    for model_class in classes:
        torch.manual_seed(0)
        try:
            small = tiny_config(config)
            _check_size(model_class, small)
            model = model_class(small)
        except Exception as error:  # so do models
            reasons.append(f"{model_class.__name__}: {first_line(error)}")
            continue
        yield randomise_(model).eval()
    if len(reasons) == len(classes):
        raise NotBuiltError(reasons[0])


def classes_of(model_type: str, config_class: type[PreTrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    """Iterate over the classes of a type: that of AutoModel, those of other Auto classes, else those of a part."""
    seen: set[str] = set()
    for _, mapping in sorted(_mappings().items(), key=lambda item: item[0] != "MODEL_MAPPING_NAMES"):
        entry = mapping.get(model_type, ())
        for name in (entry,) if isinstance(entry, str) else entry:
            try:
                found = getattr(transformers, name)
            except (ImportError, AttributeError, RuntimeError):  # of packages that are not installed
                continue
            if inspect.isclass(found) and issubclass(found, PreTrainedModel) and name not in seen:
                seen.add(name)
                yield found
    if not seen:
        yield from _parts(config_class)


def _mappings() -> dict[str, Any]:
    """Return Transformers' mappings from model types to names of classes, one for each Auto class."""
    return {name: value for name, value in vars(modeling_auto).items() if name.endswith("_NAMES") and name.startswith("MODEL")}


def _parts(config_class: type[PreTrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    """Iterate over models that are part of another and that no Auto class loads, the shortest name first."""
    package, _, file = config_class.__module__.rpartition(".")
    try:
        module = importlib.import_module(f"{package}.{file.replace('configuration', 'modeling')}")
    except ImportError:
        return
    found = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, PreTrainedModel)
        and member.__module__ == module.__name__
        and getattr(member, "config_class", None) is config_class
        and not member.__name__.endswith("PreTrainedModel")
    ]
    yield from sorted(found, key=lambda member: len(member.__name__))


def _check_size(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        try:
            model: nn.Module = model_class(config)
        except Exception:  # building it will show the error
            return
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > 60_000_000:  # some size was not made small
        raise NotBuiltError(f"its tiny model would have {count:,} parameters")
