"""Make random inputs that a model accepts, for checks and measurements that need some input but no particular one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from gates.attention.modes import evaluating, is_sharded, kept_generators
from gates.attention.own_method import calling_outputs
from gates.attention.sites import find_attention, weight_by_output
from gates.errors import GateError, first_line

Inputs = dict[str, Tensor]

TEXT, TARGET = ("text", "llm", "encoder"), ("decoder", "text")
VISION, SOUND = ("vision", "image", "video", "backbone", "encoder"), ("audio", "speech", "sound", "encoder")
"""Words in the names of nested configs. The config of the matching part is searched first."""
PLACEHOLDERS = {
    "pixel_values": (("image_token_id", "image_token_index"), "get_image_features"),
    "input_features": (("audio_token_id", "audio_token_index"), "get_audio_features"),
}
"""For each input, the placeholder token of one feature in the text, and the method that computes the features."""
FRAMES = 200
"""The number of frames of a spectrogram whose length the config does not state."""


@dataclass(frozen=True)
class Request:
    """Hold the model, the size of the inputs to make, and the generator to draw from."""

    model: PreTrainedModel
    batch: int
    length: int
    padded: bool
    generator: torch.Generator

    def takes(self, *names: str) -> bool:
        return all(name in inspect.signature(self.model.forward).parameters for name in names)

    def setting(self, *names: str, of: Sequence[str]) -> Any:
        """Return the first of these config entries that is set, searching the configs of the part ``of`` first; else None."""
        values = (getattr(config, name, None) for config in _configs(self.model.config, of) for name in names)
        return next((value for value in values if value is not None), None)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape, generator=self.generator)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(self.batch, *shape, dtype=torch.long)


def guesses(model: PreTrainedModel, *, batch: int, length: int, padded: bool, seed: int) -> Iterator[Inputs]:
    """Yield inputs that the model may accept, judged by its forward arguments and its config. Inputs that use more of the
    model come first; the model's own ``dummy_inputs`` come last."""
    request = Request(model, batch, length, padded, torch.Generator().manual_seed(seed))
    main = model.main_input_name
    main = main[0] if isinstance(main, (list, tuple)) else main  # OneFormer names two
    more_text = _more_text(request)
    pictures = [{**found, **more_text} for found in _pictures(request) if request.takes(*found)]
    sounds = [found for found in _sounds(request) if request.takes(*found)]
    media = [*({**picture, **sound} for picture in pictures[:1] for sound in sounds[:1]), *pictures, *sounds]
    if request.takes("input_ids"):
        yield from (found for part in media if (found := _with_text(request, part)) is not None)
        if main == "input_ids":
            text = _with_text(request, {}) or {}
            if queries := _queries(request):
                yield {**text, **queries}
            yield _with_choices(request, text)
    if not request.takes("input_ids") and (queries := _queries(request)):
        yield queries
    yield from (found for found in _series(request) if request.takes(*found))
    if main != "input_ids" or not request.takes("input_ids"):
        known = any(main in part for part in media)
        yield from (_with_target(request, part, request.length) for part in media if main in part or not known)
    with suppress(Exception):  # some need attributes that the model does not have
        dummy = {name: value for name, value in model.dummy_inputs.items() if isinstance(value, Tensor)}
        if main in dummy:
            yield dummy


def _configs(config: Any, words: Sequence[str]) -> list[Any]:
    """Return a config and all nested ones: first those whose names contain one of these words, then itself, then the rest."""
    inner = {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}
    matching = dict.fromkeys(name for word in words for name in inner if word in name)
    ordered = [found for name in matching for found in _configs(inner[name], words)]
    return [*ordered, config, *(found for name in inner if name not in matching for found in _configs(inner[name], words))]


def _with_text(request: Request, media: Inputs) -> Inputs | None:
    """Add text with the placeholder tokens of pictures or sound; return None if the model rejects the media."""
    ids = _ids(request, TEXT, _length(request))
    if getattr(request.model.config, "is_encoder_decoder", False) and (end := _end_token(request)) is not None:
        ids[:, -1] = end  # where classifiers look for it (BART)
    mask = torch.ones_like(ids)
    if request.padded:
        pad = request.setting("pad_token_id", of=TEXT)
        short = ids.shape[1] - ids.shape[1] // 4
        mask[1::2, short:] = 0
        ids[1::2, short - 1] = ids[1::2, -1]  # the end token
        ids[1::2, short:] = pad if isinstance(pad, int) else 0
    for name, (tokens, method) in PLACEHOLDERS.items():
        token = request.setting(*tokens, of=TEXT) if name in media else None
        if not isinstance(token, int):
            continue
        try:
            count = _features(request, method, media)
        except Exception:  # models refuse in many ways
            return None
        ids = torch.cat([torch.full((request.batch, count), token), ids], dim=1)
        mask = torch.cat([request.ones(count), mask], dim=1)
    queries = _number(request.setting("latent_query_num", of=VISION))
    visible = {}
    if queries and "pixel_values" in media and request.takes("image_embeds_position_mask"):  # Kosmos-2
        ids = torch.cat([_ids(request, TEXT, queries), ids], dim=1)
        mask = torch.cat([request.ones(queries), mask], dim=1)
        visible["image_embeds_position_mask"] = (torch.arange(ids.shape[1]) < queries).expand(request.batch, -1)
    if "pixel_values" in media and media["pixel_values"].dim() == 5 and request.takes("image_attention_mask"):  # IDEFICS
        visible["image_attention_mask"] = request.ones(ids.shape[1], media["pixel_values"].shape[1])
    inputs = {"input_ids": ids, **visible}
    if request.takes("attention_mask"):
        inputs["attention_mask"] = mask
    if request.takes("bbox"):
        inputs["bbox"] = _boxes(request, ids.shape[1])
    if request.takes("lang_ids"):
        inputs["lang_ids"] = 0 * request.ones()
    if request.takes("mm_token_type_ids") and media:
        token = request.setting(*PLACEHOLDERS["pixel_values"][0], of=TEXT)
        inputs["mm_token_type_ids"] = (ids == token).long()
    return _with_target(request, {**inputs, **media}, ids.shape[1])


def _more_text(request: Request) -> Inputs:
    """Return further texts that some models read with a picture: a question for a Q-Former, the name of a task."""
    found: Inputs = {}
    if request.takes("qformer_input_ids"):
        found["qformer_input_ids"] = _ids(request, ("qformer",), request.length)
    if request.takes("task_inputs"):
        found["task_inputs"] = _ids(request, TEXT, request.setting("task_seq_len", of=TEXT) or request.length)
    return found


def _queries(request: Request) -> Inputs:
    """Return the queries of a Q-Former and the states that they attend to; nothing for other models."""
    if not request.takes("query_embeds", "encoder_hidden_states"):
        return {}
    with suppress(GateError):
        for site in find_attention(request.model):
            if site.kind == "cross":
                width = weight_by_output(site.projection(site.layout.key)).shape[1]
                queries = request.noise(request.length, request.setting("hidden_size", of=()))
                return {"query_embeds": queries, "encoder_hidden_states": request.noise(request.length, width)}
    return {}


def _series(request: Request) -> Iterator[Inputs]:
    """Yield a time series ``[batch, steps]`` with the features of each step, and one ``[batch, steps, channels]``."""
    if not request.takes("past_values"):
        return
    future = _number(request.setting("prediction_length", of=TEXT)) or 1
    context = _number(request.setting("context_length", of=TEXT)) or future
    past = context + max(request.setting("lags_sequence", of=TEXT) or [0])
    features = request.setting("num_time_features", of=TEXT) or 0
    yield {
        "past_values": request.noise(past),
        "past_time_features": request.noise(past, features),
        "past_observed_mask": request.ones(past),
        "future_values": request.noise(future),
        "future_time_features": request.noise(future, features),
    }
    yield {"past_values": request.noise(context, _number(request.setting("num_input_channels", of=TEXT)) or 1)}


def _with_choices(request: Request, inputs: Inputs) -> Inputs:
    """Repeat the inputs as ``[batch, choices, length]`` for models that choose among several texts."""
    if not type(request.model).__name__.endswith("MultipleChoice"):
        return inputs
    return {name: tensor.unsqueeze(1).repeat(1, 3, *[1] * (tensor.dim() - 1)) for name, tensor in inputs.items()}


def _with_target(request: Request, inputs: Inputs, length: int) -> Inputs:
    """Add the text of a decoder, unless the model makes it from the encoder's text, which must then have the same length."""
    shifting = ("ForSequenceClassification", "ForQuestionAnswering")
    if not request.takes("decoder_input_ids") or type(request.model).__name__.endswith(shifting):
        return inputs
    return {**inputs, "decoder_input_ids": _ids(request, TARGET, length)}


def _length(request: Request) -> int:
    positions = request.setting("max_position_embeddings", of=TEXT)
    if isinstance(positions, int) and positions > 2:
        return min(request.length, positions - 2)  # RoBERTa's first position is 2
    return request.length


def _ids(request: Request, of: Sequence[str], length: int) -> Tensor:
    """Draw random tokens that are not special, ``[batch, length]``."""
    size = request.setting("vocab_size", of=of) or _embeddings(request.model) or 256  # CANINE reads characters
    special: set[Any] = set()
    for config in _configs(request.model.config, of):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")):
                special |= set(value) if isinstance(value, (list, tuple)) else {value}
    usual = torch.tensor([token for token in range(size) if token not in special])
    return usual[torch.randint(len(usual), (request.batch, length), generator=request.generator)]


def _embeddings(model: PreTrainedModel) -> int | None:
    with suppress(Exception):  # not every model has token embeddings
        return int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    return None


def _end_token(request: Request) -> int | None:
    end = request.setting("eos_token_id", of=TEXT)
    end = end[0] if isinstance(end, (list, tuple)) and end else end  # Llama 3 and GLM have several
    return end if isinstance(end, int) else None


def _boxes(request: Request, length: int) -> Tensor:
    """Draw a box on the page for each token: left, top, right and bottom, ``[batch, length, 4]``."""
    size = min(request.setting("max_2d_position_embeddings", of=TEXT) or 1000, 1000)
    corners = torch.randint(size, (request.batch, length, 2, 2), generator=request.generator)
    return corners.sort(dim=2).values.flatten(2)


def _features(request: Request, method: str, media: Inputs) -> int:
    """Count the features per example that the language model reads in place of tokens."""
    function = getattr(request.model if hasattr(request.model, method) else request.model.base_model, method)
    names = inspect.signature(function).parameters
    found = function(**{name: tensor.to(request.model.device) for name, tensor in media.items() if name in names})
    if not isinstance(found, (Tensor, list, tuple)):
        found = found.last_hidden_state if getattr(found, "pooler_output", None) is None else found.pooler_output
    parts = [found] if isinstance(found, Tensor) else list(found)
    count, odd = divmod(sum(part.numel() // part.shape[-1] for part in parts), request.batch)
    if odd or not count:
        raise ValueError("examples have different numbers of features")
    return count


def _pictures(request: Request) -> Iterator[Inputs]:
    """Yield pictures and films: one or several for each example, whole or as a row of patches."""
    channels = _number(request.setting("num_channels", "in_channels", "in_chans", of=VISION)) or 3
    patch = _number(request.setting("patch_size", of=VISION))
    merge = _number(request.setting("spatial_merge_size", of=VISION)) or 1
    side = request.setting("image_size", of=VISION)
    if isinstance(side, Mapping):
        side = list(side.values())
    plain = isinstance(side, (list, tuple)) and len(side) == 2 and all(isinstance(pixels, int) for pixels in side)
    height, width = side if plain else 2 * ((_number(side) or (4 * patch * merge if patch else 224)),)
    frames = _number(request.setting("num_frames", "frames_per_clip", of=VISION))
    if frames:
        yield {"pixel_values": request.noise(frames, channels, height, width)}
    several: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (5,))
    for count in several:
        found = {"pixel_values": request.noise(*count, channels, height, width)}
        yield found
        yield {**found, "image_sizes": torch.tensor([[height, width]] * request.batch)}
    mask = request.ones(1, height, width)
    yield {"pixel_values": request.noise(1, channels, height, width), "pixel_attention_mask": mask}
    if patch:
        yield from _patches(request, channels, patch, merge)
    if width := _number(request.setting("patch_embed_hidden_size", of=VISION)):  # each with its row and column (Pix2Struct)
        places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).expand(request.batch, -1, -1)
        yield {"flattened_patches": torch.cat([places, request.noise(16, width)], dim=2)}
    if width := _number(request.setting("visual_feat_dim", of=VISION)):  # regions that a detector has found
        boxes = torch.rand(request.batch, 4, 4, generator=request.generator)  # 4 regions with 4 coordinates each
        yield {"visual_feats": request.noise(4, width), "visual_pos": boxes}
    if tiles := _number(request.setting("max_num_tiles", of=VISION)):
        whole = {"aspect_ratio_ids": request.ones(1), "aspect_ratio_mask": request.ones(1, tiles)}
        yield {"pixel_values": request.noise(1, tiles, channels, height, height), **whole}


def _patches(request: Request, channels: int, patch: int, merge: int) -> Iterator[Inputs]:
    """Yield pictures as patches: the patches of all pictures in one row with a grid for each, or padded with a mask."""
    rows = 2 * merge
    depth = channels * (_number(request.setting("temporal_patch_size", of=VISION)) or 1) * patch * patch
    grid, merges = torch.tensor([[1, rows, rows]] * request.batch), torch.tensor([merge] * request.batch)
    flat = request.noise(rows * rows, depth).flatten(0, 1)
    whole = request.noise(rows * rows, channels, patch, patch).flatten(0, 1)
    for patches in (flat, whole):
        for name, grids in (("pixel_values", "image_grid_thw"), ("pixel_values", "grid_thw"), ("hidden_states", "grid_thw")):
            sizes = {"image_grid_thw": "image_merge_sizes", "grid_thw": "merge_sizes"}[grids]
            found = {name: patches, grids: grid}
            yield {**found, sizes: merges} if request.takes(sizes) else found
    shapes = {"pixel_attention_mask": request.ones(rows * rows), "spatial_shapes": grid[:, 1:]}
    yield {"pixel_values": request.noise(rows * rows, channels * patch * patch), **shapes}


def _sounds(request: Request) -> Iterator[Inputs]:
    """Yield spectrograms ``[batch, bins, frames]`` or ``[batch, frames, bins]``, and half a second of a 16 kHz wave."""
    names = ("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "feature_projection_input_dim", "input_dim")
    bins = _number(request.setting(*names, of=SOUND))
    positions = _number(request.setting("max_source_positions", of=SOUND))
    masks = ["input_features_mask"] if request.takes("input_features_mask") else []
    for frames in dict.fromkeys((2 * positions, FRAMES)) if bins and positions else [FRAMES]:
        for shape in ((bins, frames), (frames, bins)) if bins else ():
            yield {"input_features": request.noise(*shape), **{name: request.ones(frames) for name in masks}}
    if bins:
        longer = torch.zeros(request.batch, 1, dtype=torch.bool)
        yield {"input_features": request.noise(1, FRAMES, bins), "is_longer": longer}
        yield {"input_values": request.noise(_number(request.setting("max_length", of=SOUND)) or FRAMES, bins)}
    yield {"input_values": request.noise(8000)}
    yield {"input_values": request.noise(1, 8000)}


def _number(value: Any) -> int | None:
    """Return a positive number of a config, which may have one for each axis; None if there is none."""
    value = value[-1] if isinstance(value, (list, tuple)) and value else value
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def example_inputs(
    model: PreTrainedModel, *, batch: int = 2, length: int = 16, padded: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """Return inputs for one forward pass: text, pictures, sound, or the combination that the model reads.

    Sizes and token numbers come from the model's config and its nested configs. Values that no config states are guessed and
    tried, richest first. On the returned inputs the model ran and every self-attention module took part, so a comparison
    covers the whole model. Cross-attention may be missing, as in a decoder without its encoder.

    Args:
        model: A Transformers model. An encoder-decoder also gets ``decoder_input_ids`` unless it makes them itself.
        length: The number of text tokens per example, without placeholders of pictures or sound. It is smaller if the model
            has fewer positions.
        padded: Whether every second example is a quarter shorter, padded on the right.

    Raises:
        GateError: If no guess runs, or the model is sharded, because it then runs in all processes or in none.

    >>> from transformers import ViTConfig, ViTModel
    >>> model = ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4))
    >>> {name: list(tensor.shape) for name, tensor in example_inputs(model).items()}
    {'pixel_values': [2, 3, 8, 8]}
    """
    if is_sharded(model):
        raise GateError(
            f"{type(model).__name__} is sharded, so one process cannot try inputs on it; gather its weights first, or "
            "give inputs as check_batch"
        )
    reasons: list[str] = []
    with at_rest(model):
        for found in guesses(model, batch=batch, length=length, padded=padded, seed=seed):
            inputs = of_dtype({name: tensor.to(model.device) for name, tensor in found.items()}, model.dtype)
            try:
                left_out = _left_out(model, inputs)
            except Exception as error:  # models refuse in many ways
                reasons.append(first_line(error).rstrip("."))
                continue
            if not left_out:
                return inputs
            reasons.append(f"attention at {left_out[0]!r} took no part")
    reason = reasons[0] if reasons else f"{model.main_input_name!r} is of no known kind"
    raise GateError(
        f"no example inputs were found on which all of {type(model).__name__} runs ({reason}); "
        "give inputs as check_batch, such as a processor's output"
    )


def resized(inputs: Mapping[str, Tensor], batch: int, length: int | None = None) -> dict[str, Tensor]:
    """Return inputs with another number of examples and, for tensors ``[batch, length]``, another length.

    Rows and columns are repeated in turn or dropped. Every row of an attention mask keeps at least one visible token.
    """
    rows = {name: len(tensor) for name, tensor in inputs.items()}
    if len(set(rows.values())) > 1:
        raise GateError(f"inputs with first axes of different lengths ({rows}) cannot be resized; measure them unchanged")
    found: dict[str, Tensor] = {}
    for name, tensor in inputs.items():
        tensor = tensor[torch.arange(batch, device=tensor.device) % len(tensor)]
        if length is not None and tensor.dim() == 2:
            tensor = tensor[:, torch.arange(length, device=tensor.device) % tensor.shape[1]]
            if name.endswith("attention_mask"):
                tensor = tensor.where(tensor.any(dim=1, keepdim=True), torch.ones_like(tensor))
        found[name] = tensor
    return found


def _left_out(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the self-attention modules that a forward pass on these inputs does not reach."""
    try:
        sites = [site for site in find_attention(model) if site.kind != "cross"]
    except GateError:  # no heads are left, or none is known
        sites = []
    missing = {site.name for site in sites}
    with calling_outputs(model), ExitStack() as stack:
        for site in sites:
            reached = site.output.register_forward_pre_hook(lambda _module, _inputs, name=site.name: missing.discard(name))
            stack.callback(reached.remove)
        output = model(**inputs)[0]
        while isinstance(output, (tuple, list)) and output:  # feature maps
            output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(f"its first output is a {type(output).__name__}, no tensor")
    return sorted(missing)


@contextmanager
def at_rest(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode without gradients; restore its modes and the random generators afterwards."""
    with torch.no_grad(), kept_generators(model), evaluating(model):
        yield


def of_dtype(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the inputs with floating-point tensors, such as pictures and sound, cast to a dtype."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
