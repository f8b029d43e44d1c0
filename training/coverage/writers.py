"""Ways to write tokens after texts with an exported model, each by what runs it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from gates.errors import first_line
from gates.export.checkpoint import load_pruned
from gates.export.onnx_step import export_onnx_step
from training.coverage import gguf
from training.coverage.vllm_process import Vllm

Write = Callable[[Tensor, int], Tensor]
"""From texts ``[batch, sequence]`` and a number to so many tokens after each, ``[batch, number]``, the likeliest ones."""
Step = Callable[[Mapping[str, NDArray[Any]]], Sequence[NDArray[Any]]]
"""From the inputs of :func:`gates.export.onnx_step.export_onnx_step`'s graph to its outputs."""


@dataclass(frozen=True)
class Way:
    """One way to run an export.

    Args:
        name: for the table.
        prepare: loads the export in a folder.
        packages: that it needs beside this project's.
        lacks: why it cannot be tried otherwise; empty where it can.
    """

    name: str
    prepare: Callable[[Path], Write]
    packages: tuple[str, ...] = ()
    lacks: str = ""

    @property
    def missing(self) -> str:
        absent = [package for package in self.packages if importlib.util.find_spec(package) is None]
        return self.lacks or (f"{', '.join(absent)} not installed" if absent else "")


def ways(vllm: Vllm) -> tuple[Way, ...]:
    """All of them."""
    onnx = ("onnx", "onnxscript", "onnxruntime")
    return (
        Way("PyTorch", lambda export: partial(_generate, load_pruned(export))),
        Way("PyTorch, compiled", _compiled),
        Way("PyTorch, torchao int8", _int8, ("torchao",)),
        Way("ONNX Runtime", _in_onnx_runtime, onnx),
        Way("OpenVINO", _in_openvino, (*onnx, "openvino")),
        Way("llama.cpp", _in_llama_cpp, gguf.PACKAGES),
        Way("vLLM", partial(_in_vllm, vllm), lacks=vllm.missing),
    )


def prepared(way: Way, export: Path) -> Write | str:
    """What writes, or in words why nothing does."""
    if way.missing:
        return f"not tried: {way.missing}"
    try:
        return way.prepare(export)
    except Exception as error:  # of any library; the message is what the table is for
        return f"no: {type(error).__name__}: {first_line(error)}"


def _generate(model: PreTrainedModel, ids: Tensor, new: int, cache: str = "dynamic") -> Tensor:
    options = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, cache_implementation=cache)
    written: Tensor = model.generate(ids, generation_config=options)  # type: ignore[operator]
    return written[:, ids.shape[1] :]


def _compiled(export: Path) -> Write:
    """With a cache of a fixed size, so that one graph serves all steps."""
    model = load_pruned(export)
    model.forward = torch.compile(model.forward, dynamic=False)
    return partial(_generate, model, cache="static")


def _int8(export: Path) -> Write:
    from torchao import quantization

    model = load_pruned(export)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return partial(_generate, model)


def _step_file(export: Path) -> Path:
    """A step of the decoder as an ONNX file beside the export."""
    path = export.with_name(f"{export.name}.onnx")
    if not path.exists():
        ids = torch.arange(3, 11)[None]
        export_onnx_step(load_pruned(export), path, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return path


def _in_onnx_runtime(export: Path) -> Write:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(_step_file(export), options, providers=["CPUExecutionProvider"])
    shapes = {given.name: given.shape for given in session.get_inputs()}
    return partial(_stepwise, lambda inputs: session.run(None, dict(inputs)), shapes)


def _in_openvino(export: Path) -> Write:
    import openvino

    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(str(_step_file(export)), "CPU", threads)
    shapes = {given.any_name: [one.to_string() for one in given.partial_shape] for given in compiled.inputs}
    return partial(_stepwise, lambda inputs: list(compiled(dict(inputs)).values()), shapes)


def _stepwise(step: Step, shapes: Mapping[str, Sequence[Any]], ids: Tensor, new: int) -> Tensor:
    """Write with a graph of one step, whose outputs are the next step's inputs.

    Args:
        step: runs the graph.
        shapes: of its inputs by name, in its order; those of the cache are ``[batch, kv_heads, past, head_dim]``.
        ids: texts ``[batch, sequence]``.
        new: tokens to write.
    """
    batch, length = ids.shape
    names = [name for name in shapes if name.startswith("past_key_values.")]
    kept = [np.zeros((batch, int(shapes[name][1]), 0, int(shapes[name][3])), np.float32) for name in names]
    tokens, written = ids.numpy(), []
    for stop in range(length, length + new):
        start = stop - tokens.shape[1]
        positions = np.broadcast_to(np.arange(start, stop), tokens.shape)
        given = {"input_ids": tokens, "attention_mask": np.ones((batch, stop), np.int64), "position_ids": positions.copy()}
        inputs = {name: array for name, array in given.items() if name in shapes}
        logits, *kept = step({**inputs, **dict(zip(names, kept, strict=True))})
        tokens = logits[:, -1].argmax(-1, keepdims=True)
        written.append(tokens)
    return torch.from_numpy(np.concatenate(written, axis=1))


def _in_llama_cpp(export: Path) -> Write:
    folder, file = export.with_name(f"{export.name}-for-gguf"), export.with_name(f"{export.name}.gguf")
    shutil.copytree(export, folder)
    gguf.write_vocabulary(folder, load_pruned(export).config.get_text_config().vocab_size)
    gguf.convert(folder, file)
    return partial(_complete, gguf.server(file, texts=SLOTS))


SLOTS = 8
"""Texts that llama.cpp works on at a time."""


def _complete(server: Any, ids: Tensor, new: int) -> Tensor:
    asked = {
        "prompt": ids.tolist(),
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "logprobs": 1,
    }
    choices = sorted(server.handle_completions(asked)["choices"], key=lambda choice: choice["index"])
    return torch.tensor([[token["id"] for token in choice["logprobs"]["content"]] for choice in choices])


def _in_vllm(vllm: Vllm, export: Path) -> Write:
    pruned = getattr(load_pruned(export).config, "pruned_attention", None)
    name = str(export)
    vllm.ask(load=name, folder=name, backend="auto" if pruned is None else "transformers")

    def write(ids: Tensor, new: int) -> Tensor:
        return torch.tensor(vllm.ask(ask=name, texts=ids.tolist(), new=new, vocabulary=0)["tokens"])

    return write
