"""An ONNX file that takes its name once ONNX Runtime has computed from it what the model computes."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.export.example_inputs import resized
from gates.files import bring_all_to_disk, partial_of, remove, remove_left_behind

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4
"""Largest difference between ONNX Runtime and torch, relative to the largest output; float rounding only."""
LARGEST_FILE = 2**31 - 2**24
"""Weights of more bytes go to a file ``NAME.onnx.data`` beside the graph: a protobuf message ends at 2 GiB."""

Axes = dict[int, str]
Run = Callable[[Mapping[str, Tensor]], list[Tensor]]
"""From the inputs of a graph by name to all its outputs."""


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
    """Export to a temporary place and yield a function that runs the file; it takes its name if the block succeeds.

    Args:
        model: the model, for messages and for the size of its weights.
        wrapped: module that is exported; its forward ends in a ``*`` argument.
        example: inputs of ``wrapped``.
        axes: names of the dynamic axes of each input.
        names, outputs: names that the graph gives to its inputs and outputs.
        path: name of the ``.onnx`` file; must not exist.

    Raises:
        GateError: for a package that is missing, a path of another kind or taken, and a model that the exporter or ONNX Runtime
            does not take.
    """
    for package in PACKAGES:
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
    variadic = _leading(wrapped)
    shapes = (*axes[:variadic], tuple(axes[variadic:]))
    try:
        try:
            with _quiet():
                torch.onnx.export(
                    wrapped.eval(),
                    example,
                    folder / path.name,
                    input_names=list(names),
                    output_names=list(outputs),
                    dynamic_shapes=shapes,
                    external_data=sum(tensor.nbytes for tensor in model.state_dict().values()) > LARGEST_FILE,
                    dynamo=True,
                    verbose=False,
                )
        except Exception as error:  # every layer of the exporter raises its own kinds
            raise GateError(f"torch.onnx.export does not take {type(model).__name__}: {reason_of(error)}") from error
        yield _runner(model, folder / path.name)
        bring_all_to_disk(folder)
        for file in sorted(folder.iterdir(), reverse=True):  # the graph last, so that it is never there without its weights
            file.rename(path.with_name(file.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _runner(model: PreTrainedModel, path: Path) -> Run:
    """A function from inputs by name to all outputs, by ONNX Runtime."""
    import onnxruntime  # an optional package

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own kinds
        raise GateError(f"ONNX Runtime does not load the export of {type(model).__name__}: {reason_of(error)}") from error
    known = {value.name for value in session.get_inputs()}  # inputs that the model does not use are not in the graph

    def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
        given = {name: tensor.contiguous().numpy() for name, tensor in inputs.items() if name in known}
        try:
            return [torch.from_numpy(array) for array in session.run(None, given)]
        except Exception as error:
            raise GateError(
                f"ONNX Runtime cannot run the export of {type(model).__name__} at {shapes_of(inputs)}: {reason_of(error)}; "
                "nothing was kept"
            ) from error

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on packages that are not needed and names of axes that are equal anyway."""
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


def _leading(wrapped: nn.Module) -> int:
    """How many named arguments a forward has before its ``*`` argument."""
    kinds = [parameter.kind for parameter in inspect.signature(wrapped.forward).parameters.values()]
    return kinds.index(inspect.Parameter.VAR_POSITIONAL)


def portable(model: PreTrainedModel) -> PreTrainedModel:
    """A copy for the CPU in float32, in evaluation mode, with attention and experts in explicit matrix products: the exporter
    takes these from every family, and they define what a token without any visible token attends to.

    Raises:
        GateError: if gates are attached.
    """
    if any(getattr(module, "_head_gates", False) for module in model.modules()):
        raise GateError(f"gates are attached to this {type(model).__name__}; prune it, or detach() them, before it is exported")
    copied = nn.Module.to(copy.deepcopy(model).eval(), "cpu", torch.float32)
    copied.set_attn_implementation("eager")
    copied.set_experts_implementation("batched_mm")
    return copied


def at_least_two(inputs: Mapping[str, Tensor], length: int | None = None) -> dict[str, Tensor]:
    """Inputs on the CPU with two examples or more, since the exporter takes an axis of length 1 for a constant.

    Args:
        inputs: inputs of a model by name.
        length: length of the second axis of matrices; their own for None.
    """
    on_cpu = {name: tensor.cpu() for name, tensor in inputs.items()}
    return resized(on_cpu, max(2, len(next(iter(on_cpu.values())))), length)


def compare(model: PreTrainedModel, found: Tensor, expected: Tensor, inputs: Mapping[str, Tensor]) -> None:
    """Whether the graph's output is the model's.

    Args:
        model: the model, for messages.
        found, expected: output of ONNX Runtime and of torch.
        inputs: inputs of both, for messages.

    Raises:
        GateError: for another shape, or a difference above :data:`TOLERANCE`.
    """
    shapes = shapes_of(inputs)
    if found.shape != expected.shape:
        raise GateError(
            f"the export of {type(model).__name__} gives shape {list(found.shape)} for {shapes}, torch {list(expected.shape)}; "
            "nothing was kept"
        )
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    if not difference <= TOLERANCE:
        raise GateError(
            f"the export of {type(model).__name__} differs from torch by {difference:.2g} (relative) for {shapes}; "
            "nothing was kept"
        )


def shapes_of(inputs: Mapping[str, Tensor]) -> str:
    """Names and shapes of inputs, in words."""
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())


def reason_of(error: BaseException) -> str:
    """The first line of what went wrong first."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
