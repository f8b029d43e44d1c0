"""What runs a pruned model: each way tried on a small Llama."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, pipeline

from gates.export.checkpoint import save_pruned
from gates.export.onnx import export_onnx_files
from gates.surgery.remove import remove_heads_
from tools.coverage import architectures as zoo
from tools.deployment.cells import TINY, Row, cell, differs, tokens, written

Tried = Callable[[PreTrainedModel, Tensor], str]
"""Runs a copy of a model on tokens ``[rows, length]``; returns how far it is from PyTorch's outputs, or raises."""


def subjects() -> dict[str, PreTrainedModel]:
    """Return the dense model and the pruned ones."""
    uneven = torch.tensor([0.0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 0])
    return {
        "dense": _llama(),
        "stock, equal layers": _stock(torch.tensor([0.0, 1, 1, 0] * 3)),
        "stock, padded": _stock(uneven),
        "uneven heads": remove_heads_(_llama(), uneven),
        "a layer without heads": remove_heads_(_llama(), torch.tensor([0.0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0])),
    }


def _llama() -> PreTrainedModel:
    return zoo.build(zoo.Architecture("Llama", "ForCausalLM", TINY))


def _stock(mask: Tensor) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as made:
        save_pruned(_llama(), f"{made}/stock", mask, form="stock", pad_heads=True, tokenizer=None)
        return LlamaForCausalLM.from_pretrained(f"{made}/stock").eval()


def rows() -> Iterator[Row]:
    """Iterate over the table."""
    pruned = subjects()
    for name, (run, *packages) in RUNTIMES.items():
        for subject, model in pruned.items():
            yield "runtimes", name, subject, try_runtime(run, model, *packages)


def try_runtime(run: Tried, model: PreTrainedModel, *packages: str) -> str:
    """Return ``yes`` with the result, ``no`` with the message, or the packages that are missing."""
    return cell(lambda: f"yes, {run(copy.deepcopy(model), tokens(2))}", *packages)


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids).logits
    return logits


def _torch_export(model: PreTrainedModel, ids: Tensor) -> str:
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    return differs(program.module()(input_ids=ids, use_cache=False).logits, _logits(model, ids))


def _exporter(name: str, config: str) -> Tried:
    """Return one of Transformers' own exporters, run in its own runtime."""

    def run(model: PreTrainedModel, ids: Tensor) -> str:
        from transformers import exporters  # experimental; loads the installed runtimes
        from transformers.exporters import configs

        expected = _logits(model, ids)
        exported = getattr(exporters, name)().export(model, {"input_ids": ids}, getattr(configs, config)())
        return differs(exported(input_ids=ids).logits, expected)

    return run


def _onnx(model: PreTrainedModel, ids: Tensor) -> str:
    with tempfile.TemporaryDirectory() as folder:
        export_onnx_files(model, folder, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return "checked by the export"


def _compile(model: PreTrainedModel, ids: Tensor) -> str:
    torch.compiler.reset()
    expected = _logits(model, ids)
    return differs(_logits(torch.compile(model), ids), expected)  # type: ignore[arg-type]


def _quantize_dynamic(model: PreTrainedModel, ids: Tensor) -> str:
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear}, dtype=torch.qint8)
    return differs(_logits(quantised, ids), _logits(model, ids))


def _torchao(configured: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> Tried:
    """Return a quantisation of weights by torchao, except for layers without features, which it does not take.

    ``configured`` chooses a configuration of the module :mod:`torchao.quantization`.
    """

    def has_features(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and module.weight.numel() > 0

    def run(model: PreTrainedModel, ids: Tensor) -> str:
        from torchao import quantization

        expected = _logits(model, ids)
        quantised = torch.nn.Module.to(model, dtype)
        quantization.quantize_(quantised, configured(quantization), filter_fn=has_features)
        return differs(_logits(quantised, ids), expected)

    return run


def _int4(packing: str, dtype: torch.dtype = torch.float32) -> tuple[Tried, str]:
    """Return one of the layouts in which torchao stores two weights in a byte; each has its own kernels."""
    return _torchao(lambda ao: ao.Int4WeightOnlyConfig(group_size=32, int4_packing_format=packing), dtype), "torchao"


def _lora(model: PreTrainedModel, ids: Tensor) -> str:
    """Train adapters for a step, merge them, and compare with the outputs before."""
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    optimizer = torch.optim.SGD([weight for weight in adapted.parameters() if weight.requires_grad], lr=0.1)
    adapted(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids).logits
        return f"merged, {differs(adapted.merge_and_unload()(ids).logits, expected)}"


def _pipeline(model: PreTrainedModel, ids: Tensor) -> str:
    known = {"padding": 0, "unknown": 1, **{f"w{number}": number for number in range(2, zoo.VOCABULARY)}}
    words = Tokenizer(models.WordLevel(known, unk_token="unknown"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="padding", unk_token="unknown")
    text, options = " ".join(f"w{token}" for token in ids[0].tolist()), {"max_new_tokens": 4, "min_new_tokens": 4}
    run = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (found,) = run(text, return_tensors=True, do_sample=False, **options)
    assert found["generated_token_ids"] == written(model, ids[:1], 4)[0].tolist(), "another text than of generate()"
    return "same text"


def _generate(cache: str) -> Tried:
    def run(model: PreTrainedModel, ids: Tensor) -> str:
        found, expected = written(model, ids, 5, cache_implementation=cache), written(model, ids, 5, use_cache=False)
        assert torch.equal(found, expected), "another text than without a cache"
        return "same text"

    return run


def _continuous(model: PreTrainedModel, ids: Tensor) -> str:
    from transformers import ContinuousBatchingConfig  # of later versions

    options = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = model.generate_batch(ids.tolist(), generation_config=options, continuous_batching_config=batching)  # type: ignore[operator]
    expected = model.generate(ids, generation_config=options)[:, ids.shape[1] :].tolist()  # type: ignore[operator]
    assert sorted(one.generated_tokens for one in found.values()) == sorted(expected), "another text than of generate()"
    return "same text"


RUNTIMES: dict[str, tuple[Any, ...]] = {
    "`generate`, dynamic cache": (_generate("dynamic"),),
    "`generate`, static cache": (_generate("static"),),
    "continuous batching (`generate_batch`)": (_continuous,),
    "`pipeline`": (_pipeline,),
    "LoRA on all linear layers, merged": (_lora, "peft"),
    "`torch.export`": (_torch_export,),
    "`torch.compile`": (_compile,),
    "`torch.ao` `quantize_dynamic`, int8": (_quantize_dynamic,),
    "torchao int8, weights": (_torchao(lambda ao: ao.Int8WeightOnlyConfig()), "torchao"),
    "torchao int4, weights, each in a byte": (
        _torchao(lambda ao: ao.IntxWeightOnlyConfig(torch.int4)),  # type: ignore[attr-defined]
        "torchao",
    ),
    "torchao int4, weights, `plain`": _int4("plain"),
    "torchao int4, weights, `plain_int32`": _int4("plain_int32"),
    "torchao int4, weights, `tile_packed_to_4d`": _int4("tile_packed_to_4d", torch.bfloat16),
    "torchao int4, weights, `opaque`": _int4("opaque"),
    "ONNX Runtime, `--format onnx`": (_onnx, "onnx", "onnxscript", "onnxruntime"),
    "ONNX Runtime, Transformers' exporter": (_exporter("OnnxExporter", "OnnxConfig"), "onnxscript", "onnxruntime"),
    "OpenVINO, Transformers' exporter": (_exporter("OpenVINOExporter", "OpenVINOConfig"), "openvino"),
    "ExecuTorch, Transformers' exporter": (_exporter("ExecutorchExporter", "ExecutorchConfig"), "executorch"),
}
"""Each way to run a model, with the packages that it needs."""
