"""Tokens per second and bytes of cache of a random Llama: dense, pruned, and padded to a stock class."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gates.errors import first_line
from gates.export.checkpoint import load_pruned, save_pruned
from gates.export.cost import cache_bytes_of, count_parameters
from gates.export.onnx import export_onnx_step
from tools.deployment import gguf, vllm
from tools.deployment.cells import Row, cell, tokens

LAYERS, HEADS = 8, 16
KEPT = (8, 6, 4, 2, 4, 2, 6, 4)
"""Heads that stay in each layer, in whole groups of two."""
READ, WRITTEN, REPEATS, BATCH_SIZES, VOCABULARY = 128, 64, 5, (1, 8), 1000
Write = Callable[[Tensor, int], Tensor]
"""Writes the likeliest ``new`` tokens after texts ``[batch, length]``: returns ``[batch, new]``."""


def rows(python: str | None) -> Iterator[Row]:
    """Iterate over the table. ``python`` is that of an environment with vLLM; None if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        models = exports(Path(folder))
        for name, export in models.items():
            model = load_pruned(export)
            yield "speed", "parameters", name, str(count_parameters(model))
            yield "speed", "bytes of KV cache per token", name, str(cache_bytes_of(model))
        for way, (prepare, *packages) in WAYS.items():
            writers = {name: prepared(prepare, export, *packages) for name, export in models.items()}
            for size in BATCH_SIZES:
                yield from (("speed", way, f"{name}, batch {size}", found) for name, found in measure(writers, size).items())
        jobs = [(name, size) for size in BATCH_SIZES for name in models]
        answers = vllm.ask(python, [_vllm_job(models[name], size) for name, size in jobs])
    for (name, size), answer in zip(jobs, answers, strict=True):
        yield "speed", "vLLM", f"{name}, batch {size}", answer.get("error") or _speed(size, answer["seconds"])


def exports(folder: Path) -> dict[str, Path]:
    """Write the three models."""
    mask = torch.cat([(torch.arange(HEADS) < count).float() for count in KEPT])
    save_pruned(llama(), folder / "dense", torch.ones(LAYERS * HEADS), form="stock", tokenizer=None)
    save_pruned(llama(), folder / "pruned", mask, form="pruned", tokenizer=None)
    save_pruned(llama(), folder / "padded", mask, form="stock", pad_heads=True, tokenizer=None)
    return {name: folder / name for name in ("dense", "pruned", "padded")}


def llama() -> LlamaForCausalLM:
    """Build a random model with 8 layers of 16 heads with 32 features, in groups of two."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 32, "max_position_embeddings": 256}
    heads: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    special: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **special)).eval()


def prepared(prepare: Callable[[Path], Write], export: Path, *packages: str) -> Write | str:
    """Load an export; return what writes, or why nothing does."""
    writers: list[Write] = []
    return cell(lambda: writers.append(prepare(export)) or "", *packages) or writers[0]  # type: ignore[func-returns-value]


def measure(writers: Mapping[str, Write | str], size: int) -> dict[str, str]:
    """Return tokens written per second: medians of calls in turn, after one call that is not timed."""
    ids, found, seconds = tokens(size, VOCABULARY, READ), dict(writers), {name: list[float]() for name in writers}
    for turn in range(REPEATS + 1):
        for name in list(found)[:: 1 if turn % 2 else -1]:
            write = found[name]
            if isinstance(write, str):
                continue
            start = time.perf_counter()
            try:
                write(ids, WRITTEN)
            except Exception as error:  # of any library; the table shows the message
                found[name] = f"no: {type(error).__name__}: {first_line(error)}"
            seconds[name].append(time.perf_counter() - start)
    return {name: write if isinstance(write, str) else _speed(size, seconds[name][1:]) for name, write in found.items()}


def _speed(size: int, seconds: Sequence[float]) -> str:
    return f"{size * WRITTEN / statistics.median(seconds):.0f}"


def _generate(model: PreTrainedModel, ids: Tensor, new: int, cache: str = "dynamic") -> Tensor:
    options = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, cache_implementation=cache)
    text: Tensor = model.generate(ids, generation_config=options)  # type: ignore[operator]
    return text[:, ids.shape[1] :]


def _compiled(export: Path) -> Write:
    model = load_pruned(export)
    model.forward = torch.compile(model.forward, dynamic=False)
    return partial(_generate, model, cache="static")  # a cache of a fixed size, so that one graph serves all steps


def _int8(export: Path) -> Write:
    from torchao import quantization

    model = load_pruned(export)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return partial(_generate, model)


def _step_file(export: Path) -> Path:
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
    return partial(_stepwise, lambda inputs: session.run(None, inputs), shapes)


def _in_openvino(export: Path) -> Write:
    import openvino

    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(str(_step_file(export)), "CPU", threads)
    shapes = {given.any_name: [one.to_string() for one in given.partial_shape] for given in compiled.inputs}
    return partial(_stepwise, lambda inputs: list(compiled(inputs).values()), shapes)


def _stepwise(step: Callable[[Any], Sequence[Any]], shapes: Mapping[str, Sequence[Any]], ids: Tensor, new: int) -> Tensor:
    """Write with the graph of one step, whose outputs are inputs of the next step.

    Args:
        step: A function from the graph's inputs by name to its outputs.
        shapes: The shapes of the inputs, in order; those of the cache are ``[batch, kv_heads, past, head_dim]``.
        ids: The texts ``[batch, length]``.
        new: The number of tokens to write.
    """
    batch, length = ids.shape
    names = [name for name in shapes if name.startswith("past_key_values.")]
    kept = [np.zeros((batch, int(shapes[name][1]), 0, int(shapes[name][3])), np.float32) for name in names]
    last, text = ids.numpy(), []
    for stop in range(length, length + new):
        positions = np.broadcast_to(np.arange(stop - last.shape[1], stop), last.shape).copy()
        given = {"input_ids": last, "attention_mask": np.ones((batch, stop), np.int64), "position_ids": positions}
        inputs = {name: array for name, array in given.items() if name in shapes}
        logits, *kept = step({**inputs, **dict(zip(names, kept, strict=True))})
        last = logits[:, -1].argmax(-1, keepdims=True)
        text.append(last)
    return torch.from_numpy(np.concatenate(text, axis=1))


def _in_llama_cpp(export: Path) -> Write:
    folder, file = export.with_name(f"{export.name}-for-gguf"), export.with_name(f"{export.name}.gguf")
    shutil.copytree(export, folder)
    gguf.convert(folder, file, load_pruned(export).config.get_text_config().vocab_size)
    return partial(_complete, gguf.server(file, texts=max(BATCH_SIZES)))


def _complete(server: Any, ids: Tensor, new: int) -> Tensor:
    request = {"prompt": ids.tolist(), "max_tokens": new, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    request["cache_prompt"] = False
    choices = sorted(server.handle_completions(request)["choices"], key=lambda choice: choice["index"])
    return torch.tensor([[token["id"] for token in choice["logprobs"]["content"]] for choice in choices])


def _vllm_job(export: Path, size: int) -> dict[str, Any]:
    pruned = getattr(load_pruned(export).config, "pruned_attention", None)
    texts = tokens(size, VOCABULARY, READ).tolist()
    backend = "auto" if pruned is None else "transformers"
    return {"folder": str(export), "backend": backend, "texts": texts, "new": WRITTEN, "vocabulary": 0, "repeats": REPEATS}


WAYS: dict[str, tuple[Any, ...]] = {
    "PyTorch": (lambda export: partial(_generate, load_pruned(export)),),
    "PyTorch, compiled": (_compiled,),
    "PyTorch, torchao int8": (_int8, "torchao"),
    "ONNX Runtime": (_in_onnx_runtime, "onnx", "onnxscript", "onnxruntime"),
    "OpenVINO": (_in_openvino, "onnx", "onnxscript", "openvino"),
    "llama.cpp": (_in_llama_cpp, *gguf.PACKAGES),
}
"""Each way to write tokens in this process, with the packages that it needs."""
