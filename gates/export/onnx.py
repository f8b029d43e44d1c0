"""Export to ONNX, and keep a file only if ONNX Runtime computes the same outputs as the model.

:func:`export_onnx` writes a forward pass without a cache (classifiers, bare models, the encoder of an encoder-decoder).
:func:`export_onnx_step` writes one step of a decoder with its key/value cache. :func:`export_onnx_files` writes all graphs to
serve a model. Batch and sequence axes are dynamic.

Three architectures of ``tools.coverage.architectures`` fail with torch 2.13, Transformers 5.23 and ONNX Runtime 1.31. Falcon
with ALiBi multiplies in bfloat16, which ONNX Runtime does not support on a CPU. The chunks of Longformer and of LED's encoder
depend on the values in the mask, which the exporter cannot guard.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from gates.attention.inputs import resized
from gates.errors import GateError
from gates.files import bring_all_to_disk, partial_of, remove, remove_left_behind

LARGEST_FILE = 2**31 - 2**24
"""Weights of more bytes go to a separate file ``NAME.onnx.data``, because a protobuf message ends at 2 GiB."""

Axes = dict[int, str]
Run = Callable[[Mapping[str, Tensor]], list[Tensor]]
"""A function from the inputs of a graph by name to all its outputs."""


@contextmanager
def exported(
    model: PreTrainedModel,
    wrapped: nn.Module,
    example: tuple[Tensor, ...],
    axes: tuple[Axes, ...],
    names: Sequence[str],
    outputs: Sequence[str],
    path: Path,
) -> Iterator[Run]:
    """Export to a temporary folder, yield a function that runs the file, and rename the file if the block succeeds.

    Args:
        model: The model, for its weights and its name.
        wrapped: The module to export. Its forward has only a ``*`` argument.
        path: The name of the ``.onnx`` file, which must not exist.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise GateError(
                f"ONNX export needs the package {package!r}; run pip install onnx onnxscript onnxruntime"
            ) from error
    if path.suffix != ".onnx":
        raise GateError(f"{str(path)!r} does not end in .onnx; give the file's name")
    if path.exists():
        raise GateError(f"{str(path)!r} exists already; give another name or remove it first")
    remove_left_behind(path)
    folder = partial_of(path)
    remove(folder)
    folder.mkdir(parents=True)
    try:
        try:
            with _quiet():
                torch.onnx.export(
                    wrapped.eval(),
                    example,
                    folder / path.name,
                    input_names=list(names),
                    output_names=list(outputs),
                    dynamic_shapes=(axes,),
                    external_data=sum(tensor.nbytes for tensor in model.state_dict().values()) > LARGEST_FILE,
                    dynamo=True,
                    verbose=False,
                )
        except Exception as error:  # every layer of the exporter raises its own kinds
            raise GateError(f"torch.onnx.export fails on {type(model).__name__}: {_reason(error)}") from error
        yield _runner(model, folder / path.name)
        bring_all_to_disk(folder)
        for file in sorted(folder.iterdir(), reverse=True):  # the graph last, because it needs its weights
            file.rename(path.with_name(file.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _runner(model: PreTrainedModel, path: Path) -> Run:
    """Return a function that runs the graph in ONNX Runtime."""
    import onnxruntime  # an optional package

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own kinds
        raise GateError(f"ONNX Runtime does not load the export of {type(model).__name__}: {_reason(error)}") from error
    known = {value.name for value in session.get_inputs()}  # the graph lacks inputs that the model does not use

    def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
        arrays = {name: tensor.contiguous().numpy() for name, tensor in inputs.items() if name in known}
        try:
            return [torch.from_numpy(array) for array in session.run(None, arrays)]
        except Exception as error:
            raise GateError(
                f"ONNX Runtime cannot run the export of {type(model).__name__} at {_shapes(inputs)}: {_reason(error)}; "
                "nothing was kept"
            ) from error

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings about optional packages and about names of equal axes."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.onnx._internal.exporter._registration", "onnxscript")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _portable(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model to the CPU in float32 and evaluation mode, with explicit matrix products for attention and experts.

    The exporter supports these for every family. They also define the output of a token that sees no other token.
    """
    if any(getattr(module, "_head_gates", False) for module in model.modules()):
        raise GateError(f"gates are attached to this {type(model).__name__}; prune it, or detach() them, before the export")
    copied = nn.Module.to(copy.deepcopy(model).eval(), "cpu", torch.float32)
    copied.set_attn_implementation("eager")
    copied.set_experts_implementation("batched_mm")
    return copied


def _at_least_two(inputs: Mapping[str, Tensor], length: int | None = None) -> dict[str, Tensor]:
    """Return inputs on the CPU with at least two examples, because the exporter makes an axis of length 1 constant. ``length``
    is the new length of the second axis of matrices; None to keep it."""
    on_cpu = {name: tensor.cpu() for name, tensor in inputs.items()}
    return resized(on_cpu, max(2, len(next(iter(on_cpu.values())))), length)


def _compare(model: PreTrainedModel, found: Tensor, expected: Tensor, inputs: Mapping[str, Tensor]) -> None:
    """Raise :class:`GateError` unless the outputs of graph and model are equal up to rounding: 1e-4 of the largest output."""
    shapes = _shapes(inputs)
    if found.shape != expected.shape:
        raise GateError(
            f"the export of {type(model).__name__} gives shape {list(found.shape)} for {shapes}, torch {list(expected.shape)}; "
            "nothing was kept"
        )
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    if not difference <= 1e-4:
        raise GateError(
            f"the export of {type(model).__name__} differs from torch by {difference:.2g} (relative) for {shapes}; "
            "nothing was kept"
        )


def _shapes(inputs: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())


def _reason(error: BaseException) -> str:
    """Return the kind and the first line of the error that caused all others."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def export_onnx_step(model: PreTrainedModel, path: str | os.PathLike[str], example_inputs: Mapping[str, Tensor]) -> Path:
    """Write one step of a decoder: from new tokens and a key/value cache to ``logits`` and the extended cache.

    Inputs of a decoder: ``input_ids`` ``[batch, sequence]``, ``attention_mask`` ``[batch, past + sequence]``, and
    ``position_ids`` ``[batch, sequence]`` where the model has them. Inputs of an encoder-decoder: ``input_ids`` of the
    decoder, ``encoder_hidden_states`` ``[batch, source, hidden]`` and, for text, ``encoder_attention_mask``
    ``[batch, source]``. Every step computes the keys of cross-attention again. Both have for every layer
    ``past_key_values.N.key`` and ``past_key_values.N.value`` ``[batch, kv_heads, past, head_dim]``, with ``past`` = 0 at the
    first step. Outputs: ``logits``, ``present.N.key`` and ``present.N.value``. A layer without heads keeps one number per
    token, a pruned group nothing.

    ONNX Runtime decodes from an empty cache in several steps, and torch runs a forward pass without a cache for comparison.

    Args:
        model: The model, on any device and in any dtype; the file is float32.
        path: The name of the ``.onnx`` file, which must not exist.
        example_inputs: The inputs of a forward pass, with ``decoder_input_ids`` for an encoder-decoder.
    """
    if not model.can_generate():
        raise GateError(f"{type(model).__name__} does not generate text, so it has no decoding step; use export_onnx")
    model = _portable(model)
    inputs = _at_least_two(example_inputs, max(6, *(tensor.shape[1] for tensor in example_inputs.values())))
    step = _CrossStep(model, inputs) if model.config.is_encoder_decoder else _Step(model)
    past = _example_cache(step, inputs)
    names = (*step.names, *(f"past_key_values.{i}.{part}" for i in range(len(past)) for part in ("key", "value")))
    outputs = ("logits", *(f"present.{i}.{part}" for i in range(len(past)) for part in ("key", "value")))
    flat = tuple(tensor[:, :, :3] for layer in past for tensor in layer)
    example = (*step.inputs(inputs, start=3, stop=6), *flat)
    axes = (*step.axes, *({0: "batch", 2: "past"} for _ in flat))
    with exported(model, step, example, axes, names, outputs, Path(path)) as run:
        for batch in (1, 3):
            other = resized(inputs, batch)
            with torch.no_grad():
                expected = step.whole(other)
            cache, found = [tensor[:1, :, :0].expand(batch, -1, -1, -1) for tensor in flat], []
            length = expected.shape[1]
            for start, stop in ((0, length - 3), (length - 3, length - 2), (length - 2, length)):
                new = step.inputs(other, start=start, stop=stop)
                logits, *cache = run(dict(zip(names, (*new, *cache), strict=True)))
                found.append(logits)
            _compare(model, torch.cat(found, dim=1), expected, other)
    return Path(path)


class _Step(nn.Module):
    """Compute logits and the extended cache from the inputs ``names`` of new tokens and a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        has_positions = "position_ids" in inspect.signature(model.forward).parameters
        axes: tuple[Axes, ...] = ({0: "batch", 1: "sequence"}, {0: "batch", 1: "total"}, {0: "batch", 1: "sequence"})
        self.names = ("input_ids", "attention_mask", "position_ids")[: 2 + has_positions]
        self.axes = axes[: 2 + has_positions]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        new, past = tensors[: len(self.names)], tensors[len(self.names) :]
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        return (self.logits(new, cache), *_tensors(cache))

    def logits(self, new: Sequence[Tensor], cache: DynamicCache) -> Tensor:
        """Return the logits of new tokens, and add the keys and values of their self-attention to the cache."""
        return self.model(**dict(zip(self.names, new, strict=True)), past_key_values=cache, use_cache=True).logits

    def inputs(self, inputs: Mapping[str, Tensor], *, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the inputs other than the cache for tokens ``start`` to ``stop`` of the decoder."""
        ids = inputs["input_ids"][:, start:stop]
        positions = torch.arange(start, stop).expand(len(ids), -1)
        return (ids, torch.ones(len(ids), stop, dtype=torch.long), positions)[: len(self.names)]

    def whole(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of all tokens from one pass without a cache."""
        return self.model(input_ids=inputs["input_ids"], use_cache=False).logits


class _CrossStep(_Step):
    """Step through the decoder of an encoder-decoder."""

    def __init__(self, model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
        super().__init__(model)
        has_mask = "attention_mask" in inputs
        axes: tuple[Axes, ...] = ({0: "batch", 1: "sequence"}, {0: "batch", 1: "source"}, {0: "batch", 1: "source"})
        self.names = ("input_ids", "encoder_hidden_states", "encoder_attention_mask")[: 2 + has_mask]
        self.axes = axes[: 2 + has_mask]

    def logits(self, new: Sequence[Tensor], cache: DynamicCache) -> Tensor:
        ids, hidden, *mask = new
        return self.model(
            decoder_input_ids=ids,
            encoder_outputs=(hidden,),
            **({"attention_mask": mask[0]} if mask else {}),
            past_key_values=EncoderDecoderCache(cache, DynamicCache()),
            use_cache=True,
        ).logits

    @torch.no_grad()
    def inputs(self, inputs: Mapping[str, Tensor], *, start: int, stop: int) -> tuple[Tensor, ...]:
        encoder_inputs = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder_")}
        hidden = self.model.get_encoder()(**encoder_inputs)[0]
        tokens = inputs["decoder_input_ids"][:, start:stop]
        return (tokens, hidden, *([inputs["attention_mask"]] if len(self.names) == 3 else []))

    def whole(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.model(**inputs, use_cache=False).logits


def _tensors(cache: DynamicCache) -> list[Tensor]:
    layers: list[Any] = cache.layers
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


@torch.no_grad()
def _example_cache(step: _Step, inputs: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values ``[batch, kv_heads, 6, head_dim]`` of every self-attention after a step over six tokens."""
    cache = DynamicCache()
    reason = "it stays empty"
    try:
        step.logits(step.inputs(inputs, start=0, stop=6), cache)
    except Exception as error:  # models refuse caches in many ways
        reason = _reason(error)
    tensors = _tensors(cache)
    if not tensors or any(not isinstance(one, Tensor) or one.dim() != 4 or one.shape[2] != 6 for one in tensors):
        raise GateError(
            f"{type(step.model).__name__} does not fill an ordinary key/value cache ({reason}), so no decoding step can be "
            "exported; use export_onnx for its forward pass"
        )
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def export_onnx_files(
    model: PreTrainedModel, directory: str | os.PathLike[str], example_inputs: Mapping[str, Tensor]
) -> tuple[Path, ...]:
    """Write all graphs that serve a model.

    A model that generates text gets a decoding step as ``model.onnx``; other models get a forward pass. An encoder-decoder
    that generates gets ``encoder_model.onnx`` and ``decoder_model.onnx``.

    Args:
        model, example_inputs: The model and its inputs; see :func:`export_onnx`.
        directory: The directory of the files, which must exist.
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

    ONNX Runtime runs the file at other batch sizes and lengths, and all positions that are not padding are compared with
    torch.

    Args:
        model: A pruned or dense model, on any device and in any dtype; the file is float32.
        path: The name of the ``.onnx`` file, which must not exist.
        example_inputs: The inputs of a forward pass. The first axis, the batch, and the second axis of matrices (tokens, masks,
            waves of sound) are dynamic.

    Raises:
        GateError: If packages are missing (``pip install onnx onnxscript onnxruntime``), the path exists, the exporter or
            ONNX Runtime fails, or the outputs differ.
    """
    model = _portable(model)
    inputs = _at_least_two(example_inputs)
    settings = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    outputs = {name: value for name, value in _run(model, inputs, settings).items() if isinstance(value, Tensor)}
    wrapped = _Pass(model, tuple(inputs), tuple(outputs), settings)
    axes = tuple(_axes(name, tensor) for name, tensor in inputs.items())
    with exported(model, wrapped, tuple(inputs.values()), axes, tuple(inputs), tuple(outputs), Path(path)) as run:
        for other in _other_sizes(model, inputs):
            expected = _run(model, other, settings)
            for name, found in zip(outputs, run(other), strict=True):
                _compare(model, _visible(found, other), _visible(expected[name], other), other)
    return Path(path)


class _Pass(nn.Module):
    """Run a forward pass with tensors in a fixed order."""

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
    """Yield the inputs at other batch sizes and lengths, with different lengths for encoder and decoder."""
    lengths = [tensor.shape[1] for tensor in inputs.values() if tensor.dim() == 2]
    if not lengths:
        yield from (resized(dict(inputs), batch) for batch in (1, 3))
        return
    limits = [getattr(model.config, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    limit = min((limit - 2 for limit in limits if isinstance(limit, int) and limit > 2), default=lengths[0] + 3)
    other = lengths[0] + 3 if lengths[0] + 3 <= limit else max(2, lengths[0] - 3)
    for batch, length in ((1, lengths[0]), (3, other)):
        sized = resized(dict(inputs), batch, length)
        yield {name: tensor[:, :-1] if name.startswith("decoder_") else tensor for name, tensor in sized.items()}


@torch.no_grad()
def _run(model: PreTrainedModel, inputs: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Any:
    try:
        return model(**inputs, **settings)
    except Exception as error:
        raise GateError(f"{type(model).__name__} itself cannot run at {_shapes(inputs)}: {_reason(error)}") from error


def _visible(output: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the output without padding tokens, where it depends on the attention kernel."""
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    return output if mask is None or output.shape[:2] != mask.shape else output[mask.bool()]
