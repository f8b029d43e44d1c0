"""Compare pruned models with the dense one: the speed-up, the ideal speed-up, and a profile."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import GenerationConfig, PreTrainedModel

from gates import HeadGates, remove_heads_
from gates.export.cost import count_parameters
from gates.export.onnx import export_onnx
from tools.benchmark.memory import peak_megabytes, ratio
from tools.benchmark.setting import (
    SHAPES,
    Row,
    Setting,
    Size,
    cell,
    columns,
    random_classifier,
    random_generator,
    stock_decoder,
)
from training.latency import Spread, Work

SHARES = (1.0, 0.5, 0.25, 0.125)
"""The shares of heads that stay, first those of the dense model."""
NEW_TOKENS = 32
PRODUCTS = {
    "aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_flash_attention_for_cpu",
}  # fmt: skip
"""PyTorch's operators that multiply matrices."""


def measure_pruned(setting: Setting) -> list[Row]:
    """Return a row for each way to run the models, size and share of heads."""
    rows = []
    for how, size in _ways(setting):
        with tempfile.TemporaryDirectory() as folder:
            rows += _pruned_rows(setting, how, size, folder)
    return rows


def _ways(setting: Setting) -> Iterator[tuple[str, Size]]:
    yield from (("eager", size) for size in setting.sizes)
    yield "compiled", setting.compiled_size
    if setting.device == "cpu":
        yield from (("onnx", size) for size in setting.sizes)
    yield from (("decode", size) for size in decoded_sizes(setting))


def decoded_sizes(setting: Setting) -> tuple[Size, ...]:
    """Return the batches of texts to continue, which are not longer than 128 tokens."""
    return tuple(dict.fromkeys(Size(size.batch, min(size.length, 128)) for size in setting.sizes))


def _pruned_rows(setting: Setting, how: str, size: Size, folder: str) -> list[Row]:
    what = f"{how}, {size}"
    work = {str(share): prepare_pruned(setting, how, size, share, folder) for share in SHARES}
    times = setting.times(f"dense and pruned, {what}", work)
    del work  # before the peaks of memory
    # On a CPU a process keeps the memory of removed heads, which would hide what the pruned model takes.
    heaviest = setting.device == "cuda" and how == "eager" and size == setting.sizes[-1]
    peaks = {
        share: peak_megabytes(what, setting, prepare_pruned, setting, how, size, share, "") if heaviest else None
        for share in SHARES
    }
    costs = {share: cost_of(setting, how, size, share) for share in SHARES}
    dense_parameters, dense_flops = costs[1.0]
    tokens = size.batch * (NEW_TOKENS if how == "decode" else size.length)

    def row(share: float) -> Row:
        parameters, flops = costs[share]
        speedup, own = times.ratio("1.0", str(share)), times.milliseconds(str(share))
        return {
            "how": how,
            "size": str(size),
            "heads_kept": share,
            "dense_ms": cell(times.milliseconds("1.0")),
            "pruned_ms": cell(own),
            "tokens_per_second": 1000 * tokens / own.median,
            "speedup": cell(speedup),
            "ideal": dense_flops / flops,
            "of_ideal": speedup.median * flops / dense_flops,
            "parameters_left": parameters / dense_parameters,
            "memory_left": cell(ratio([peaks[share]], [peaks[1.0]])),
        }

    return [row(share) for share in SHARES[1:]]


def spread_mask(heads: int, share: float) -> Tensor:
    """Return a mask ``[heads]`` that keeps a share of the heads, spread evenly.

    >>> spread_mask(8, 0.25)
    tensor([0., 0., 0., 1., 0., 0., 0., 1.])
    """
    return (torch.arange(heads + 1, dtype=torch.float64) * share).floor().diff().float()


def pruned_model(setting: Setting, how: str, share: float) -> PreTrainedModel:
    model = setting.build(random_generator if how == "decode" else random_classifier).eval()
    return model if share == 1 else remove_heads_(model, spread_mask(HeadGates(model).heads, share))


def prepare_pruned(setting: Setting, how: str, size: Size, share: float, folder: str) -> Work:
    """Return a forward pass, or the generation of :data:`NEW_TOKENS`, of the model with this share of its heads."""
    model = pruned_model(setting, how, share)
    inputs = inputs_of(setting, size, model)
    if how == "onnx":
        return prepare_onnx(setting, model, inputs, Path(folder) / f"{share}.onnx")
    if how == "decode":
        return lambda: generate(model, inputs, NEW_TOKENS)
    run: Any = torch.compile(model) if how == "compiled" else model
    return torch.inference_mode()(lambda: run(**inputs))


def measure_stock(setting: Setting) -> list[Row]:
    """Return a row for each size and share of heads: pruned models, and a stock model with the same number of heads.

    The stock model is built with as many heads in every layer. The pruned model ``evenly`` has that many in every layer too.
    The heads of ``at_random`` are chosen at random, so that its layers differ. On a GPU the passes are in bfloat16.
    """
    heads = SHAPES[setting.shape].heads
    shares = [share for share in SHARES[1:] if (heads * share).is_integer()]
    return [_stock_row(setting, size, share) for size in setting.sizes for share in shares]


def _stock_row(setting: Setting, size: Size, share: float) -> Row:
    models = stock_models(setting, share)
    inputs = inputs_of(setting, size, models["dense"])
    bfloat16 = torch.autocast(setting.device, torch.bfloat16, enabled=setting.device == "cuda")
    work = {name: torch.inference_mode()(bfloat16(lambda model=model: model(**inputs))) for name, model in models.items()}
    times = setting.times(f"pruned and stock models, {size}, {share:g} of the heads", work)
    ratios = {"speedup": ("dense", "evenly"), "of_stock": ("stock", "evenly"), "of_stock_at_random": ("stock", "at_random")}
    return {"size": str(size), "heads_kept": share} | columns(times, *models, **ratios)


def stock_models(setting: Setting, share: float) -> dict[str, PreTrainedModel]:
    """Return the dense decoder, two with heads removed, and a stock one that was built with this share of the heads."""
    shape = SHAPES[setting.shape]
    dense, evenly, at_random = (setting.build(stock_decoder).eval() for _ in range(3))
    even = spread_mask(HeadGates(dense).heads, share)
    order = torch.randperm(len(even), generator=torch.Generator().manual_seed(1))
    return {
        "dense": dense,
        "evenly": remove_heads_(evenly, even),
        "at_random": remove_heads_(at_random, even[order]),
        "stock": setting.build(partial(stock_decoder, kept=int(share * shape.heads))).eval(),
    }


def prepare_onnx(setting: Setting, model: PreTrainedModel, inputs: Mapping[str, Tensor], path: Path) -> Work:
    """Return a pass in ONNX Runtime. The file is written if it is missing."""
    import onnxruntime  # an extra of the package

    if not path.exists():
        export_onnx(model, path, inputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = setting.threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    named = {name: tensor.numpy() for name, tensor in inputs.items()}
    return lambda: session.run(None, named)


def inputs_of(setting: Setting, size: Size, model: PreTrainedModel) -> dict[str, Tensor]:
    batch = setting.batch(size, model.config.vocab_size - 1)  # the last token ends a text
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@torch.inference_mode()
def generate(model: PreTrainedModel, inputs: Mapping[str, Tensor], tokens: int) -> Any:
    """Generate exactly this number of tokens for each text, greedily and with the cache."""
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    config = GenerationConfig(**lengths, do_sample=False, use_cache=True, pad_token_id=model.config.pad_token_id)
    return model.generate(**inputs, generation_config=config)  # type: ignore[operator]


def cost_of(setting: Setting, how: str, size: Size, share: float) -> tuple[int, int]:
    """Return the parameters, and the operations of the matrix products of the same work on one example."""
    model = pruned_model(setting, how, share)
    inputs = inputs_of(setting, Size(1, size.length), model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.inference_mode():
        _ = generate(model, inputs, NEW_TOKENS) if how == "decode" else model(**inputs)
    return count_parameters(model), int(counter.get_total_flops())


def measure_profile(setting: Setting) -> list[Row]:
    """Return a row for the smallest and the largest batch, with all heads and with the fewest; none on a GPU."""
    sizes = decoded_sizes(setting) if setting.device == "cpu" else ()
    return [profile_token(setting, size, share) for size in dict.fromkeys([*sizes[:1], *sizes[-1:]]) for share in (1.0, 0.125)]


def profile_token(setting: Setting, size: Size, share: float, tokens: int = NEW_TOKENS) -> Row:
    """Profile one token of each text that the model generates: the time of all tokens but the first, which reads the text."""
    model = pruned_model(setting, "decode", share)
    inputs = inputs_of(setting, size, model)
    many, one = (lambda: generate(model, inputs, tokens)), (lambda: generate(model, inputs, 1))
    times = setting.times(f"decoding, {size}, {share:g} of the heads", {"many": many, "one": one})
    more, weights = times.difference("many", "one"), bytes_read(model)
    whole = Spread(*(value / (tokens - 1) for value in (more.median, more.low, more.high)))
    pairs = zip(profiled(many), profiled(one), strict=True)
    products, others, calls = ((long - short) / (tokens - 1) for long, short in pairs)
    return {
        "how": "decode, a token",
        "size": str(size),
        "heads_kept": share,
        "whole_ms": cell(whole),
        "products_ms": products,
        "others_ms": others,
        "around_ms": max(0.0, whole.median - products - others),
        "calls": round(calls),
        "weights_mb": weights / 2**20,
        "gb_per_second": weights / 1e6 / products,
    }


def profiled(work: Callable[[], object], passes: int = 5) -> tuple[float, float, float]:
    """Return the milliseconds of matrix products and of PyTorch's other operators in one pass on a CPU, and their number.
    Operators count without those that they call, and equal calls by their median."""
    work()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        for _ in range(passes):
            work()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in seen.events() or ():
        found[event.name, str(event.input_shapes)].append(event.self_cpu_time_total / 1000)
    by_kind = {True: 0.0, False: 0.0}
    for (name, _), taken in found.items():
        by_kind[name in PRODUCTS] += statistics.median(taken) * len(taken) / passes
    return by_kind[True], by_kind[False], sum(map(len, found.values())) / passes


def bytes_read(model: PreTrainedModel) -> int:
    """Return the bytes of all weights but those of embeddings, of which few rows are read, unless they give the output too."""
    output = getattr(model.get_output_embeddings(), "weight", None)
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - {id(output)}
    return sum(weight.numel() * weight.element_size() for weight in model.parameters() if id(weight) not in looked_up)
