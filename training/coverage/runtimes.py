"""What runs a pruned model: each way tried on a small Llama-shaped one, beside the dense model."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, pipeline

from gates.errors import first_line
from gates.export.checkpoint import save_pruned
from gates.export.onnx import export_onnx_files
from gates.surgery.remove import remove_heads_
from training.coverage import architectures as zoo
from training.coverage import gguf
from training.coverage.markdown import table
from training.runs import progress

Tried = Callable[[PreTrainedModel, Tensor], str]
"""Runs a model on tokens ``[batch, sequence]`` in some way; says how far from PyTorch's outputs it is, or raises."""


@dataclass(frozen=True)
class Runtime:
    """One way to run a model.

    Args:
        name: with the function that does it.
        run: tries it.
        packages: that it needs beside this project's.
    """

    name: str
    run: Tried
    packages: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        return [package for package in self.packages if importlib.util.find_spec(package) is None]


def subjects() -> dict[str, PreTrainedModel]:
    """The dense model and what it was pruned to: in the stock form, with equally many heads in every layer or padded to it;
    with different numbers; and with a layer that has none."""
    uneven = torch.tensor([0.0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 0])
    return {
        "dense": _llama(),
        "stock, equal layers": _stock(torch.tensor([0.0, 1, 1, 0] * 3)),
        "stock, padded": _stock(uneven),
        "uneven heads": remove_heads_(_llama(), uneven),
        "a layer without heads": remove_heads_(_llama(), torch.tensor([0.0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0])),
    }


def _stock(mask: Tensor) -> PreTrainedModel:
    """What Transformers alone loads from an export, padded where layers differ."""
    with tempfile.TemporaryDirectory() as made:
        folder = f"{made}/stock"
        save_pruned(_llama(), folder, mask, form="stock", pad_heads=True, tokenizer=None)
        return LlamaForCausalLM.from_pretrained(folder).eval()


def _llama() -> PreTrainedModel:
    return zoo.build(zoo.Architecture("Llama", "ForCausalLM", {**zoo.GROUPED_EXPLICIT, "num_hidden_layers": 3}))


@torch.no_grad()
def _differs(model: PreTrainedModel, ids: Tensor, found: Tensor) -> str:
    """The largest difference from the model's own logits, relative to the largest of these."""
    expected = model(ids).logits
    return f"differs by {float((found - expected).abs().max() / expected.abs().max()):.1g}"


def _torch_export(model: PreTrainedModel, ids: Tensor) -> str:
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    return _differs(model, ids, program.module()(input_ids=ids, use_cache=False).logits)


def _exporter(name: str, config: str) -> Tried:
    """One of Transformers' own exporters, run in its own runtime."""

    def run(model: PreTrainedModel, ids: Tensor) -> str:
        from transformers import exporters  # experimental, and loads what it finds installed
        from transformers.exporters import configs

        exported = getattr(exporters, name)().export(copy.deepcopy(model), {"input_ids": ids}, getattr(configs, config)())
        return _differs(model, ids, exported(input_ids=ids).logits)

    return run


def _onnx(model: PreTrainedModel, ids: Tensor) -> str:
    with tempfile.TemporaryDirectory() as folder:
        export_onnx_files(model, folder, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return "checked by the export"


@torch.no_grad()
def _compile(model: PreTrainedModel, ids: Tensor) -> str:
    torch.compiler.reset()
    return _differs(model, ids, torch.compile(copy.deepcopy(model))(ids).logits)


@torch.no_grad()
def _quantize_dynamic(model: PreTrainedModel, ids: Tensor) -> str:
    linear = {torch.nn.Linear}
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), linear, dtype=torch.qint8)
    return _differs(model, ids, quantised(ids).logits)


def _torchao(configured: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> Tried:
    """Weights quantised by torchao, but for layers without features, which it does not take (attention without heads).

    Args:
        configured: from the module :mod:`torchao.quantization` to one of its configurations.
        dtype: of the model before.
    """

    def has_features(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and module.weight.numel() > 0

    @torch.no_grad()
    def run(model: PreTrainedModel, ids: Tensor) -> str:
        from torchao import quantization

        quantised = torch.nn.Module.to(copy.deepcopy(model), dtype)
        quantization.quantize_(quantised, configured(quantization), filter_fn=has_features)
        return _differs(model, ids, quantised(ids).logits)

    return run


def _int4(packing: str, dtype: torch.dtype = torch.float32) -> Runtime:
    """One of the layouts in which torchao stores two weights in a byte; each has kernels of its own."""

    def configured(quantization: Any) -> Any:
        return quantization.Int4WeightOnlyConfig(group_size=32, int4_packing_format=packing)

    return Runtime(f"torchao int4, weights, `{packing}`", _torchao(configured, dtype), ("torchao",))


def _lora(model: PreTrainedModel, ids: Tensor) -> str:
    """A step of training on adapters, merged: what the adapters compute is kept."""
    import peft

    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules="all-linear"))
    optimizer = torch.optim.SGD([weight for weight in adapted.parameters() if weight.requires_grad], lr=0.1)
    adapted(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids).logits
        merged = adapted.merge_and_unload()(ids).logits
    return f"merged, differs by {float((merged - expected).abs().max() / expected.abs().max()):.1g}"


def _pipeline(model: PreTrainedModel, ids: Tensor) -> str:
    known = {"padding": 0, "unknown": 1, **{f"w{number}": number for number in range(2, zoo.VOCABULARY)}}
    words = Tokenizer(models.WordLevel(known, unk_token="unknown"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="padding", unk_token="unknown")
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    text = " ".join(f"w{token}" for token in ids[0].tolist())
    (written,) = pipeline("text-generation", model=model, tokenizer=tokenizer)(text, return_tensors=True, **options)
    if written["generated_token_ids"] != model.generate(ids[:1], **options)[0].tolist():  # type: ignore[operator]
        raise AssertionError("another text than of generate()")
    return "same text"


def _generate(cache: str) -> Tried:
    def run(model: PreTrainedModel, ids: Tensor) -> str:
        options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
        expected = model.generate(ids, use_cache=False, **options)  # type: ignore[operator]
        if not torch.equal(model.generate(ids, cache_implementation=cache, **options), expected):  # type: ignore[operator]
            raise AssertionError("another text than without a cache")
        return "same text"

    return run


def _continuous(model: PreTrainedModel, ids: Tensor) -> str:
    from transformers import ContinuousBatchingConfig  # of later versions

    options = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = {
        "generation_config": options,
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
    }
    found = model.generate_batch([row.tolist() for row in ids], **small)  # type: ignore[operator]
    expected = model.generate(ids, generation_config=options)[:, ids.shape[1] :].tolist()  # type: ignore[operator]
    if sorted(one.generated_tokens for one in found.values()) != sorted(expected):
        raise AssertionError("another text than of generate()")
    return "same text"


RUNTIMES = (
    Runtime("`generate`, dynamic cache", _generate("dynamic")),
    Runtime("`generate`, static cache", _generate("static")),
    Runtime("continuous batching (`generate_batch`)", _continuous),
    Runtime("`pipeline`", _pipeline),
    Runtime("LoRA on all linear layers, merged", _lora, ("peft",)),
    Runtime("`torch.export`", _torch_export),
    Runtime("`torch.compile`", _compile),
    Runtime("`torch.ao` `quantize_dynamic`, int8", _quantize_dynamic),
    Runtime("torchao int8, weights", _torchao(lambda quantization: quantization.Int8WeightOnlyConfig()), ("torchao",)),
    Runtime(
        "torchao int4, weights, each in a byte",
        _torchao(lambda quantization: quantization.IntxWeightOnlyConfig(torch.int4)),  # type: ignore[attr-defined]
        ("torchao",),
    ),
    _int4("plain"),
    _int4("plain_int32"),
    _int4("tile_packed_to_4d", torch.bfloat16),
    _int4("opaque"),
    Runtime("ONNX Runtime, `--format onnx`", _onnx, ("onnx", "onnxscript", "onnxruntime")),
    Runtime("ONNX Runtime, Transformers' exporter", _exporter("OnnxExporter", "OnnxConfig"), ("onnxscript", "onnxruntime")),
    Runtime("OpenVINO, Transformers' exporter", _exporter("OpenVINOExporter", "OpenVINOConfig"), ("openvino",)),
    Runtime("ExecuTorch, Transformers' exporter", _exporter("ExecutorchExporter", "ExecutorchConfig"), ("executorch",)),
)


def try_runtime(runtime: Runtime, model: PreTrainedModel) -> str:
    """``yes`` with what was seen, ``no`` with the message, or which package is missing."""
    if runtime.missing:
        return f"not tried: {', '.join(runtime.missing)} is not installed"
    ids = torch.randint(3, zoo.VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    try:
        return f"yes, {runtime.run(copy.deepcopy(model), ids)}"
    except Exception as error:  # of any library; the message is what the table is for
        return f"no: {type(error).__name__}: {first_line(error)}"


def runtime_table(runtimes: Sequence[Runtime] = RUNTIMES, models: Mapping[str, PreTrainedModel] | None = None) -> list[str]:
    """Lines of Markdown: a row for each way to run a model."""
    models = subjects() if models is None else models
    rows: list[list[Any]] = []
    for runtime in progress.track(runtimes, "runtimes", name_of=lambda one: one.name):
        rows.append([runtime.name, *(try_runtime(runtime, model) for model in models.values())])
    return table(["", *models], rows)


def packages() -> dict[str, str]:
    """Versions of the packages of :data:`RUNTIMES` and of llama.cpp's that are installed."""
    names = dict.fromkeys([*(package for runtime in RUNTIMES for package in runtime.packages), *gguf.PACKAGES])
    return {name: metadata.version(name) for name in names if importlib.util.find_spec(name) is not None}
