"""Compare pruned models with the dense one: the speed-up, the ideal speed-up, stock models, CUDA graphs and the roofline."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import GenerationConfig, PreTrainedModel

from gates import HeadGates, remove_heads_
from gates.export.cost import count_parameters
from gates.export.onnx import export_onnx
from tools.benchmark.setting import (
    SHAPES,
    Row,
    Setting,
    Size,
    cell,
    columns,
    random_classifier,
    random_decoder,
    random_generator,
)
from training.latency import Work

SHARES = (1.0, 0.5, 0.25, 0.125)
"""The shares of heads that stay, first those of the dense model."""
NEW_TOKENS = 32


def measure_pruned(setting: Setting) -> list[Row]:
    """Return a row for each way to run the models, size and share of heads."""
    rows = []
    for how, size in _ways(setting):
        with tempfile.TemporaryDirectory() as folder:
            rows += _pruned_rows(setting, how, size, folder)
    return rows


def _ways(setting: Setting) -> Iterator[tuple[str, Size]]:
    yield from (("eager", size) for size in setting.sizes)
    if setting.device == "cpu":
        yield "compiled", setting.compiled_size
        yield from (("onnx", size) for size in setting.sizes)
    yield from (("decode", size) for size in dict.fromkeys(Size(one.batch, min(one.length, 128)) for one in setting.sizes))


def _pruned_rows(setting: Setting, how: str, size: Size, folder: str) -> list[Row]:
    work = {str(share): prepare_pruned(setting, how, size, share, folder) for share in SHARES}
    times = setting.times(f"dense and pruned, {how}, {size}", work)
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
    modes = {"compiled": "default", "graphs": "reduce-overhead"}
    run: Any = torch.compile(model, mode=modes[how]) if how in modes else model
    return setting.rounded(setting.dtypes[-1], torch.inference_mode()(lambda: run(**inputs)))


def measure_graphs(setting: Setting) -> list[Row]:
    """Return a row for the smallest batch, dense and with a quarter of the heads: PyTorch as it is, and with CUDA graphs."""
    size = min(setting.sizes, key=lambda size: size.batch * size.length)
    rows = []
    for share in (1.0, 0.25):
        work = {how: prepare_pruned(setting, how, size, share, "") for how in ("eager", "graphs")}
        times = setting.times(f"CUDA graphs, {size}, {share:g} of the heads", work)
        rows.append({"size": str(size), "heads_kept": share} | columns(times, *work, speedup=("eager", "graphs")))
    return rows


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
    dtype = setting.dtypes[-1]
    work = {name: setting.rounded(dtype, torch.inference_mode()(partial(model, **inputs))) for name, model in models.items()}
    times = setting.times(f"pruned and stock models, {size}, {share:g} of the heads", work)
    ratios = {"speedup": ("dense", "evenly"), "of_stock": ("stock", "evenly"), "of_stock_at_random": ("stock", "at_random")}
    return {"size": str(size), "heads_kept": share} | columns(times, *models, **ratios)


def stock_models(setting: Setting, share: float) -> dict[str, PreTrainedModel]:
    """Return the dense decoder, two with heads removed, and a stock one that was built with this share of the heads."""
    shape = SHAPES[setting.shape]
    build = partial(random_decoder, heads_per_key=1)
    dense, evenly, at_random = (setting.build(build).eval() for _ in range(3))
    even = spread_mask(HeadGates(dense).heads, share)
    order = torch.randperm(len(even), generator=torch.Generator().manual_seed(1))
    return {
        "dense": dense,
        "evenly": remove_heads_(evenly, even),
        "at_random": remove_heads_(at_random, even[order]),
        "stock": setting.build(partial(build, kept=int(share * shape.heads))).eval(),
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


def measure_roofline(setting: Setting) -> list[Row]:
    """Return a row for each size and share of heads: the least time by operations and bytes, and the time that a pass takes."""
    peaks, rows = peak_rates(setting), []
    for size in setting.sizes:
        for share in (SHARES[0], SHARES[-1]):
            model = pruned_model(setting, "eager", share)
            run = setting.rounded(setting.dtypes[-1], torch.no_grad()(partial(model, **inputs_of(setting, size, model))))
            times = setting.times(f"roofline, {size}, {share:g} of the heads", {"measured": run})
            with Roofline(*peaks) as least:
                run()
            row = {"size": str(size), "heads_kept": share, "products_ms": least.ms[True], "others_ms": least.ms[False]}
            row |= columns(times, "measured")
            rows.append(row | {"of_roofline": sum(least.ms.values()) / times.milliseconds("measured").median})
    return rows


class Roofline(TorchDispatchMode):
    """Sum the least time of matrix products, and of all other operations: that of their operations or of their bytes.

    ``flops`` and ``moved`` are the operations and the bytes that the device manages in a millisecond.
    """

    def __init__(self, flops: float, moved: float) -> None:
        super().__init__()
        self.flops, self.moved = flops, moved
        self.ms = {True: 0.0, False: 0.0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=output) if count else 0
            tensors = [one for one in tree_leaves((args, kwargs, output)) if isinstance(one, Tensor)]
            self.ms[flops > 0] += max(flops / self.flops, sum(one.nbytes for one in tensors) / self.moved)
        return output


def peak_rates(setting: Setting) -> tuple[float, float]:
    """Return the operations of a large matrix product, and the bytes of a copy, in a millisecond."""
    width = 512 if setting.device == "cpu" else 8192
    one, other = torch.ones(2, width, width, device=setting.on, dtype=getattr(torch, setting.dtypes[-1]))
    copied = torch.ones(2**24 if setting.device == "cpu" else 2**28, device=setting.on)
    times = setting.times("peak rates", {"product": lambda: one @ other, "copy": copied.clone})
    return 2 * width**3 / times.milliseconds("product").low, 2 * copied.nbytes / times.milliseconds("copy").low
