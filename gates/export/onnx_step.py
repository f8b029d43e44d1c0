"""One step of a decoder with its key/value cache, exported to ONNX."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from gates.errors import GateError
from gates.export.example_inputs import resized
from gates.export.onnx_file import Axes, at_least_two, compare, exported, portable, reason_of


def export_onnx_step(model: PreTrainedModel, path: str | os.PathLike[str], example_inputs: Mapping[str, Tensor]) -> Path:
    """Write one step of a decoder with its cache: from new tokens and what was kept of earlier ones to ``logits`` and what
    to keep for the next step.

    Inputs of a decoder: ``input_ids`` ``[batch, sequence]``, ``attention_mask`` ``[batch, past + sequence]``,
    ``position_ids`` ``[batch, sequence]`` where the model takes them. Inputs of an encoder-decoder: ``input_ids`` of the
    decoder, ``encoder_hidden_states`` ``[batch, source, hidden]`` and, for text, ``encoder_attention_mask``
    ``[batch, source]``; the keys of cross-attention are computed anew at every step. Both: for every layer
    ``past_key_values.N.key`` and ``past_key_values.N.value`` ``[batch, kv_heads, past, head_dim]``, with ``past`` = 0 at the
    first step. Outputs: ``logits``, ``present.N.key`` and ``present.N.value``. A layer without heads keeps one number per
    token, a pruned group nothing.

    ONNX Runtime then decodes from an empty cache in several steps and is compared with torch's forward pass without a cache.

    Args:
        model: a causal or sequence-to-sequence language model.
        path: name of the ``.onnx`` file; must not exist.
        example_inputs: inputs of a forward pass; for an encoder-decoder with ``decoder_input_ids``.

    Raises:
        GateError: see :func:`gates.export.onnx.export_onnx`; also for a model without an ordinary key/value cache.
    """
    if not model.can_generate():
        raise GateError(f"{type(model).__name__} does not generate text, so it has no decoding step; use export_onnx")
    model = portable(model)
    inputs = at_least_two(example_inputs, max(6, *(tensor.shape[1] for tensor in example_inputs.values())))
    step = _CrossStep(model, inputs) if model.config.is_encoder_decoder else _Step(model)
    past = _layers(step, inputs)
    names = (*step.names, *(f"past_key_values.{i}.{part}" for i in range(len(past)) for part in ("key", "value")))
    outputs = ("logits", *(f"present.{i}.{part}" for i in range(len(past)) for part in ("key", "value")))
    flat = tuple(tensor[:, :, :3] for layer in past for tensor in layer)
    example = (*step.given(inputs, start=3, stop=6), *flat)
    axes = (*step.axes, *({0: "batch", 2: "past"} for _ in flat))
    with exported(model, step, example, axes, names, outputs, Path(path)) as run:
        for batch in (1, 3):
            other = resized(inputs, batch)
            with torch.no_grad():
                expected = step.whole(other)
            kept, found = [tensor[:1, :, :0].expand(batch, -1, -1, -1) for tensor in flat], []
            length = expected.shape[1]
            for start, stop in ((0, length - 3), (length - 3, length - 2), (length - 2, length)):
                given = step.given(other, start=start, stop=stop)
                logits, *kept = run(dict(zip(names, (*given, *kept), strict=True)))
                found.append(logits)
            compare(model, torch.cat(found, dim=1), expected, other)
    return Path(path)


class _Step(nn.Module):
    """One step of a decoder."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        has_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.names: tuple[str, ...] = ("input_ids", "attention_mask", *(("position_ids",) if has_positions else ()))
        axes: tuple[Axes, ...] = ({0: "batch", 1: "sequence"}, {0: "batch", 1: "total"}, {0: "batch", 1: "sequence"})
        self.axes: tuple[Axes, ...] = axes[: len(self.names)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given, past = tensors[: len(self.names)], tensors[len(self.names) :]
        cache = _cache(past)
        return (self.logits(given, cache), *_kept(cache))

    def logits(self, given: Sequence[Tensor], cache: DynamicCache) -> Tensor:
        """Logits of the new tokens; their keys and values are added to the cache."""
        return self.model(**dict(zip(self.names, given, strict=True)), past_key_values=cache, use_cache=True).logits

    def given(self, inputs: Mapping[str, Tensor], *, start: int, stop: int) -> tuple[Tensor, ...]:
        """The inputs beside the cache, for tokens ``start`` to ``stop``."""
        ids = inputs["input_ids"][:, start:stop]
        positions = torch.arange(start, stop).expand(len(ids), -1)
        return (ids, torch.ones(len(ids), stop, dtype=torch.long), positions)[: len(self.names)]

    def whole(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of all tokens in one pass without a cache."""
        return self.model(input_ids=inputs["input_ids"], use_cache=False).logits


class _CrossStep(nn.Module):
    """One step of the decoder of an encoder-decoder."""

    def __init__(self, model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        has_mask = "attention_mask" in inputs
        names: tuple[str, ...] = ("input_ids", "encoder_hidden_states", "encoder_attention_mask")
        axes: tuple[Axes, ...] = ({0: "batch", 1: "sequence"}, {0: "batch", 1: "source"}, {0: "batch", 1: "source"})
        self.names, self.axes = names[: 2 + has_mask], axes[: 2 + has_mask]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given, past = tensors[: len(self.names)], tensors[len(self.names) :]
        cache = _cache(past)
        return (self.logits(given, cache), *_kept(cache))

    def logits(self, given: Sequence[Tensor], cache: DynamicCache) -> Tensor:
        """Logits of the new tokens; the keys and values of their self-attention are added to the cache."""
        ids, hidden, *mask = given
        return self.model(
            decoder_input_ids=ids,
            encoder_outputs=(hidden,),
            **({"attention_mask": mask[0]} if mask else {}),
            past_key_values=EncoderDecoderCache(cache, DynamicCache()),
            use_cache=True,
        ).logits

    @torch.no_grad()
    def given(self, inputs: Mapping[str, Tensor], *, start: int, stop: int) -> tuple[Tensor, ...]:
        """The inputs beside the cache, for the decoder's tokens ``start`` to ``stop``."""
        of_encoder = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder_")}
        hidden = self.model.get_encoder()(**of_encoder)[0]
        tokens = inputs["decoder_input_ids"][:, start:stop]
        return (tokens, hidden, *([inputs["attention_mask"]] if len(self.names) == 3 else []))

    def whole(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of all tokens in one pass without a cache."""
        return self.model(**inputs, use_cache=False).logits


# -- caches ----------------------------------------------------------------------------------------------------


def _cache(past: Sequence[Tensor]) -> DynamicCache:
    return DynamicCache(list(zip(past[::2], past[1::2], strict=True)))


def _kept(cache: DynamicCache) -> list[Tensor]:
    layers: list[Any] = cache.layers
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


@torch.no_grad()
def _layers(step: _Step | _CrossStep, inputs: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``[batch, kv_heads, 6, head_dim]`` of every self-attention after a step over six tokens."""
    cache = DynamicCache()
    reason = "it is left empty"
    try:
        step.logits(step.given(inputs, start=0, stop=6), cache)
    except Exception as error:  # models refuse caches in many ways
        reason = reason_of(error)
    kept = _kept(cache)
    if not kept or any(not isinstance(tensor, Tensor) or tensor.dim() != 4 or tensor.shape[2] != 6 for tensor in kept):
        raise GateError(
            f"{type(step.model).__name__} does not fill an ordinary key/value cache ({reason}), so no decoding step can be "
            "exported; use export_onnx for its forward pass"
        )
    return list(zip(kept[::2], kept[1::2], strict=True))
