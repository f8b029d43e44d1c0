"""Export to ONNX, proved in ONNX Runtime: the file computes what the model computes, or it is not kept.

:func:`export_onnx` writes a forward pass without a cache (classifiers, bare models, the encoder of an encoder-decoder);
:func:`gates.export.onnx_step.export_onnx_step` writes one step of a decoder with its key/value cache;
:func:`export_onnx_files` writes what a model needs to be served. Batch and sequence axes are dynamic.

Of the architectures in ``tools.coverage.architectures`` these fail with torch 2.13, Transformers 5.23 and ONNX Runtime
1.31: Falcon with ALiBi (multiplies in bfloat16, which ONNX Runtime has not on a CPU); Longformer and the encoder of LED (whose
chunks depend on the values in the mask, so that the exporter cannot guard them).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.export.example_inputs import resized
from gates.export.onnx_file import Axes, at_least_two, compare, exported, portable, reason_of, shapes_of
from gates.export.onnx_step import export_onnx_step

POSITION_LIMITS = ("max_position_embeddings", "max_target_positions")


def export_onnx_files(
    model: PreTrainedModel, directory: str | os.PathLike[str], example_inputs: Mapping[str, Tensor]
) -> tuple[Path, ...]:
    """Write the graphs that serve a model: ``model.onnx``, a decoding step if it generates text and a forward pass otherwise;
    for an encoder-decoder that generates, ``encoder_model.onnx`` and ``decoder_model.onnx``.

    Args:
        model, example_inputs: see :func:`export_onnx`.
        directory: directory of the files; must exist.

    Raises:
        GateError: see :func:`export_onnx`.
    """
    directory = Path(directory)
    if not model.can_generate():
        return (export_onnx(model, directory / "model.onnx", example_inputs),)
    if not model.config.is_encoder_decoder:
        return (export_onnx_step(model, directory / "model.onnx", example_inputs),)
    encoder_inputs = {name: tensor for name, tensor in example_inputs.items() if not name.startswith("decoder_")}
    return (
        export_onnx(model.get_encoder(), directory / "encoder_model.onnx", encoder_inputs),
        export_onnx_step(model, directory / "decoder_model.onnx", example_inputs),
    )


def export_onnx(model: PreTrainedModel, path: str | os.PathLike[str], example_inputs: Mapping[str, Tensor]) -> Path:
    """Write a model's forward pass, from its inputs by name to its outputs by name (``logits``, ``last_hidden_state``, ...).

    Works for pruned models and dense ones. ONNX Runtime then runs the file at batch sizes and lengths other than the
    example's and is compared with torch at all positions that are not padding.

    Args:
        model: model on any device and in any dtype; the file is float32.
        path: name of the ``.onnx`` file; must not exist.
        example_inputs: inputs of a forward pass. The first axis is the batch and may change, as may the second axis of matrices
            (tokens, masks, waves of sound).

    Raises:
        GateError: if the packages are missing (``pip install onnx onnxscript onnxruntime``), the path is taken, the exporter or
            ONNX Runtime does not take the model, or the outputs differ.
    """
    model = portable(model)
    inputs = at_least_two(example_inputs)
    settings = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    outputs = {name: value for name, value in _run(model, inputs, settings).items() if isinstance(value, Tensor)}
    wrapped = _Pass(model, tuple(inputs), tuple(outputs), settings)
    axes = tuple(_axes(name, tensor) for name, tensor in inputs.items())
    with exported(model, wrapped, tuple(inputs.values()), axes, tuple(inputs), tuple(outputs), Path(path)) as run:
        for other in _other_sizes(model, inputs):
            expected = _run(model, other, settings)
            for name, found in zip(outputs, run(other), strict=True):
                compare(model, _visible(found, other), _visible(expected[name], other), other)
    return Path(path)


class _Pass(nn.Module):
    """A forward pass with tensors in a fixed order."""

    def __init__(
        self, model: PreTrainedModel, names: Sequence[str], outputs: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.model, self.names, self.outputs, self.settings = model, names, outputs, settings

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**dict(zip(self.names, tensors, strict=True)), **self.settings)
        return tuple(found[name] for name in self.outputs)


def _axes(name: str, tensor: Tensor) -> Axes:
    if tensor.dim() != 2:
        return {0: "batch"}
    return {0: "batch", 1: "decoder_sequence" if name.startswith("decoder_") else "sequence"}


def _other_sizes(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The inputs at other batch sizes and lengths, different ones for encoder and decoder."""
    lengths = [tensor.shape[1] for tensor in inputs.values() if tensor.dim() == 2]
    if not lengths:
        yield from (resized(dict(inputs), batch) for batch in (1, 3))
        return
    limits = [getattr(model.config, name, None) for name in POSITION_LIMITS]
    limit = min((limit - 2 for limit in limits if isinstance(limit, int) and limit > 2), default=lengths[0] + 3)
    other = lengths[0] + 3 if lengths[0] + 3 <= limit else max(2, lengths[0] - 3)
    for batch, length in ((1, lengths[0]), (3, other)):
        sized = resized(dict(inputs), batch, length)
        yield {name: tensor[:, :-1] if name.startswith("decoder_") else tensor for name, tensor in sized.items()}


@torch.no_grad()
def _run(model: PreTrainedModel, inputs: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Any:
    """The model's outputs by name."""
    try:
        return model(**inputs, **settings)
    except Exception as error:
        raise GateError(f"{type(model).__name__} itself cannot run at {shapes_of(inputs)}: {reason_of(error)}") from error


def _visible(output: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The output at tokens that are not padding: what it is at others depends on the attention kernel."""
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    return output if mask is None or output.shape[:2] != mask.shape else output[mask.bool()]
