"""Models without some of their heads against the dense one, beside what the operations that are gone would allow."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GenerationConfig, PreTrainedModel

from gates import HeadGates, remove_heads_
from gates.export.cost import count_parameters
from gates.export.onnx import export_onnx
from training.benchmark.alternate import Work, alternate_shown
from training.benchmark.memory import peak_megabytes, ratio
from training.benchmark.setting import Setting
from training.benchmark.size import Size

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Of the heads that stay. The first is the dense model."""
NEW_TOKENS = 32
"""That are written by the decoder, after a text as long as the size says."""
LONGEST_READ = 128
"""Tokens of such a text at most."""


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each way to run the models, size and share of heads."""
    rows = []
    for how, sizes in routes(setting):
        with tempfile.TemporaryDirectory() as folder:
            for size in sizes:
                rows += _rows(setting, how, size, folder)
    return rows


def routes(setting: Setting) -> Iterator[tuple[str, tuple[Size, ...]]]:
    """How models are run, and with which batches."""
    yield "eager", setting.sizes
    yield "compiled", (setting.compiled_size,)
    if setting.device == "cpu":
        yield "onnx", setting.sizes
    if setting.generator() is not None:
        yield "decode", decoded_sizes(setting)


def decoded_sizes(setting: Setting) -> tuple[Size, ...]:
    """Batches of texts that are written on: not longer than :data:`LONGEST_READ`, and so that the model has positions for what
    is written; none where it has not."""
    longest = min(LONGEST_READ, setting.positions - NEW_TOKENS)
    return tuple(dict.fromkeys(Size(size.batch, min(size.length, longest)) for size in setting.sizes)) if longest > 0 else ()


def _rows(setting: Setting, how: str, size: Size, folder: str) -> list[dict[str, Any]]:
    what = f"{how}, {size}"
    work = {str(share): prepare(setting, how, size, share, folder) for share in SHARES}
    times = alternate_shown(f"dense and pruned, {what}", work, setting.on, setting.effort)
    del work
    # On a CPU a process keeps what the removal of heads has freed, so that nothing would be told of the model that is left.
    heaviest = setting.device == "cuda" and how == "eager" and size == setting.sizes[-1]
    peaks = {
        share: peak_megabytes(what, setting.on, setting.threads, prepare, setting, how, size, share, "") if heaviest else None
        for share in SHARES
    }
    costs = {share: _cost(setting, how, size, share) for share in SHARES}
    dense_parameters, dense_flops = costs[1.0]
    tokens = size.batch * (NEW_TOKENS if how == "decode" else size.length)
    rows = []
    for share in SHARES[1:]:
        parameters, flops = costs[share]
        speedup, own = times.ratio("1.0", str(share)), times.milliseconds(str(share))
        rows.append(
            {
                "how": how,
                "size": str(size),
                "heads_kept": share,
                "dense_ms": asdict(times.milliseconds("1.0")),
                "pruned_ms": asdict(own),
                "tokens_per_second": 1000 * tokens / own.median,
                "speedup": asdict(speedup),
                "ideal": dense_flops / flops,
                "of_ideal": speedup.median * flops / dense_flops,
                "parameters_left": parameters / dense_parameters,
                "memory_left": None if (left := ratio([peaks[share]], [peaks[1.0]])) is None else left.median,
            }
        )
    return rows


def spread_mask(heads: int, share: float) -> Tensor:
    """A mask that keeps a share of the heads, spread evenly over all of them, ``[heads]``.

    >>> spread_mask(8, 0.25)
    tensor([0., 0., 0., 1., 0., 0., 0., 1.])
    """
    reached = (torch.arange(heads + 1, dtype=torch.float64) * share).floor()
    return reached.diff().float()


def prepare(setting: Setting, how: str, size: Size, share: float, folder: str) -> Work:
    """A forward pass, or the writing of :data:`NEW_TOKENS`, of the model with this share of its heads.

    Args:
        setting: of the benchmark.
        how: ``eager``, ``compiled``, ``onnx`` or ``decode``.
        size: of the batch.
        share: of heads that stay.
        folder: of the files of ONNX, which are made where they are missing.
    """
    model = subject(setting, how, share)
    if how == "onnx":
        session, named = onnx_session(setting, size, model, Path(folder) / f"{share}.onnx")
        return lambda: session.run(None, named)
    if how == "decode":
        return written(setting, size, model, NEW_TOKENS)
    run: Any = torch.compile(model) if how == "compiled" else model
    inputs = _inputs(setting, size, model)
    return lambda: _forward(run, inputs)


def subject(setting: Setting, how: str, share: float) -> PreTrainedModel:
    """The model with this share of its heads."""
    model = setting.generator() if how == "decode" else setting.classifier()
    assert model is not None, "decoding is measured of models that write text alone"
    model = model.eval()
    return model if share == 1 else remove_heads_(model, spread_mask(HeadGates(model).heads, share))


def written(setting: Setting, size: Size, model: PreTrainedModel, tokens: int) -> Work:
    """So many tokens that a model writes after each text of a batch."""
    inputs = _inputs(setting, size, model)
    return lambda: _write(model, inputs, tokens)


def onnx_session(
    setting: Setting, size: Size, model: PreTrainedModel, path: Path, *, profiled: bool = False
) -> tuple[Any, dict[str, Any]]:
    """A session of ONNX Runtime, and the inputs of a pass; the file is made where it is missing. A profile is written beside
    it."""
    import onnxruntime  # an extra of the package, wanted by this alone

    inputs = _inputs(setting, size, model)
    if not path.exists():  # batch and length of a file may change
        export_onnx(model, path, inputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = setting.threads
    options.enable_profiling = profiled
    options.profile_file_prefix = str(path.with_suffix(""))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session, {name: tensor.numpy() for name, tensor in inputs.items()}


def _inputs(setting: Setting, size: Size, model: PreTrainedModel) -> dict[str, Tensor]:
    batch = setting.batch(size, model.config.get_text_config().vocab_size - 1)  # the last one ends a text
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _forward(model: Callable[..., Any], inputs: Mapping[str, Tensor]) -> Any:
    with torch.inference_mode():
        return model(**inputs)


def _write(model: PreTrainedModel, inputs: Mapping[str, Tensor], tokens: int = NEW_TOKENS) -> Any:
    with torch.inference_mode():
        return model.generate(**inputs, generation_config=_exactly(tokens, model))  # type: ignore[operator]


def _exactly(tokens: int, model: PreTrainedModel) -> GenerationConfig:
    pad = model.config.get_text_config().pad_token_id
    return GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=pad)


def _cost(setting: Setting, how: str, size: Size, share: float) -> tuple[int, int]:
    """Parameters, and operations of the matrix products of the same work on one example."""
    model = subject(setting, how, share)
    inputs = _inputs(setting, Size(1, size.length), model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        (_write if how == "decode" else _forward)(model, inputs)
    return count_parameters(model), int(counter.get_total_flops())
