"""Where the time of a pruned model goes: matrix products, other operators, and what is around them. It says why a model without
half of its heads is not faster by as much as operations are fewer."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from training.benchmark.alternate import Spread, alternate_shown, as_cell
from training.benchmark.pruned import NEW_TOKENS, decoded_sizes, onnx_session, prepare, subject, written
from training.benchmark.setting import Setting
from training.benchmark.size import Size

SHARES = (1.0, 0.125)
"""Of the heads that stay: the dense model, and that with the fewest heads."""
REPEATED = 20
"""Times that a pass is looked into; the median of each operator counts, so that other work on the machine does not."""
PRODUCTS = {
    "aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "Gemm", "MatMul", "FusedMatMul", "FusedGemm", "Attention", "MultiHeadAttention",
}  # fmt: skip
"""Operators of PyTorch and of ONNX Runtime that multiply matrices."""


@dataclass(frozen=True)
class Operators:
    """What the operators of one pass take.

    Args:
        products: milliseconds of matrix products.
        others: milliseconds of all other operators.
        calls: of operators.
    """

    products: float
    others: float
    calls: float

    @classmethod
    def of(cls, durations: Mapping[tuple[str, ...], list[float]], passes: int) -> Operators:
        """From the milliseconds of each call, by the name of the operator and what tells its calls apart."""
        by_kind = {True: 0.0, False: 0.0}
        for (name, *_), taken in durations.items():
            by_kind[name in PRODUCTS] += statistics.median(taken) * len(taken) / passes
        return cls(by_kind[True], by_kind[False], sum(map(len, durations.values())) / passes)

    def less(self, other: Operators, steps: int) -> Operators:
        """What one of so many steps takes that this pass has more than another."""
        pairs = ((self.products, other.products), (self.others, other.others), (self.calls, other.calls))
        return Operators(*((own - others) / steps for own, others in pairs))


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each way to run models, size and share of heads; on a CPU alone."""
    if setting.device != "cpu":
        return []
    rows = []
    for size in first_and_last(setting.sizes):
        with tempfile.TemporaryDirectory() as folder:
            rows += [_in_onnx_runtime(setting, size, share, Path(folder)) for share in SHARES]
    if setting.generator() is not None:
        rows += [_of_a_token(setting, size, share) for size in first_and_last(decoded_sizes(setting)) for share in SHARES]
    return rows


def first_and_last(sizes: Sequence[Size]) -> list[Size]:
    """Each once."""
    return list(dict.fromkeys([*sizes[:1], *sizes[-1:]]))


def _row(how: str, size: Size, share: float, whole: Spread, own: Operators, weights: int) -> dict[str, Any]:
    return {
        "how": how,
        "size": str(size),
        "heads_kept": share,
        "whole_ms": as_cell(whole),
        "products_ms": own.products,
        "others_ms": own.others,
        "around_ms": max(0.0, whole.median - own.products - own.others),
        "calls": round(own.calls),
        "weights_mb": weights / 2**20,
        "gb_per_second": weights / 1e6 / own.products,
    }


def _in_onnx_runtime(setting: Setting, size: Size, share: float, folder: Path) -> dict[str, Any]:
    """One forward pass of the classifier."""
    what = f"ONNX Runtime, {size}, {share:g} of the heads"
    work = prepare(setting, "onnx", size, share, str(folder))
    whole = alternate_shown(what, {"whole": work}, setting.on, setting.effort).milliseconds("whole")
    model = subject(setting, "onnx", share)
    session, named = onnx_session(setting, size, model, folder / f"{share}.onnx", profiled=True)
    for _ in range(1 + REPEATED):
        session.run(None, named)
    durations = durations_of_nodes(json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")))
    return _row("onnx, a pass", size, share, whole, Operators.of(durations, REPEATED), bytes_read(model))


def durations_of_nodes(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, ...], list[float]]:
    """Milliseconds of each node of a graph in all passes but the first, from a profile that ONNX Runtime wrote."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            found[event["args"]["op_name"], event["name"]].append(event["dur"] / 1000)
    return {name: taken[1:] for name, taken in found.items()}


def _of_a_token(setting: Setting, size: Size, share: float) -> dict[str, Any]:
    """One token of each text that the model writes: what all of them take, without the first, for which the text is read."""
    what = f"decoding, {size}, {share:g} of the heads"
    model = subject(setting, "decode", share)
    work = {count: written(setting, size, model, count) for count in (NEW_TOKENS, 1)}
    named = {str(count): run for count, run in work.items()}
    times = alternate_shown(what, named, setting.on, setting.effort)
    steps = NEW_TOKENS - 1
    more = times.difference(str(NEW_TOKENS), "1")
    whole = Spread(*(value / steps for value in (more.median, more.low, more.high)))
    own = operators_of(work[NEW_TOKENS]).less(operators_of(work[1]), steps)
    return _row("decode, a token", size, share, whole, own, bytes_read(model))


def operators_of(work: Callable[[], object], passes: int = REPEATED // 4) -> Operators:
    """What PyTorch's operators take on a CPU, without those that they call."""
    work()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        for _ in range(passes):
            work()
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for event in seen.events() or ():
        found[event.name, str(event.input_shapes)].append(event.self_cpu_time_total / 1000)
    return Operators.of(found, passes)


def bytes_read(model: PreTrainedModel) -> int:
    """Of the weights in a pass: all but embeddings, of which some rows are read, unless they give the output too."""
    output = getattr(model.get_output_embeddings(), "weight", None)
    looked_up = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    apart = {id(weight) for weight in looked_up if weight is not output}
    weights: dict[int, Tensor] = {id(weight): weight for weight in model.parameters() if id(weight) not in apart}
    return sum(weight.numel() * weight.element_size() for weight in weights.values())
