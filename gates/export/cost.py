"""What a model costs: parameters, floating-point operations, and latency by batch size, dense and pruned side by side."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from gates.attention.inputs import resized
from gates.attention.intercept import global_names
from gates.attention.layouts import LATENT
from gates.attention.modes import evaluating
from gates.attention.sites import AttentionSite, find_attention, is_attention, weight_by_output
from gates.errors import GateError
from gates.surgery.slices import Cut, cut_site, rows_of_parts

# What a decoder keeps of every token while it generates: keys and values, fewer where whole groups of heads are gone.


def cache_bytes(sites: Sequence[AttentionSite], mask: Tensor | None = None) -> int:
    """Bytes of keys and values that causal self-attention keeps for each token, in the precision of the weights.

    Attention to a window keeps them of its last tokens alone, and the keys of an encoder's output, which attention across
    keeps once, are not among them. Layers that take their keys from other layers, or compute attention as a recurrence, keep
    none. Multi-head latent attention keeps one compressed vector for all heads. In place of a layer without any head an
    export keeps one number as key and one as value, by which the length is known; they are not counted.

    Args:
        mask: 0/1 per head of all sites, ``[heads]``, as if the others were removed; None for the model as it is. A key/value
            head goes when all its query heads do, and under uneven groups some are kept twice; see
            :func:`gates.surgery.remove.remove_heads_`.
    """
    sizes = [site.heads for site in sites]
    parts = torch.ones(sum(sizes)).split(sizes) if mask is None else mask.cpu().split(sizes)
    return sum(_kept_bytes(cut_site(site, part)) for site, part in zip(sites, parts, strict=True) if _keeps(site))


def cache_bytes_of(model: nn.Module, mask: Tensor | None = None) -> int:
    """The same of a model that generates; 0 for one that does not, or that has no head left."""
    has_heads = any(is_attention(module) for module in model.modules())
    return cache_bytes(find_attention(model), mask) if generates(model) and has_heads else 0


def generates(model: nn.Module) -> bool:
    """Whether a model writes text token by token, and so keeps keys and values."""
    return isinstance(model, PreTrainedModel) and model.can_generate()


def _keeps(site: AttentionSite) -> bool:
    """Whether a site hands its keys to a cache, as causal self-attention does by the method ``update`` of the cache."""
    has_own_keys = site.kind == "decoder" and not getattr(site.core, "is_kv_shared_layer", False)
    return has_own_keys and "update" in global_names(site.core)


def _kept_bytes(cut: Cut) -> int:
    """Return the bytes of one token's keys and values at a site."""
    site, layout = cut.site, cut.site.layout
    if layout.packed:
        return 2 * len(cut.keys) * site.head_dim * next(site.core.parameters()).element_size()
    value = weight_by_output(site.projection(layout.value))
    if layout.gate_only == LATENT:  # the input of the projection to keys and values, and the one rotated key
        return (value.shape[1] + int(vars(site.core)["qk_rope_head_dim"])) * value.element_size()
    key_width = rows_of_parts(site)["key"][1].shape[1]  # keys may be wider than values
    # Falcon's new decoder repeats keys and values for every query head before it keeps them.
    heads = cut.queries if getattr(site.core, "new_decoder_architecture", False) else cut.keys
    return len(heads) * (key_width + site.head_dim) * value.element_size()


@dataclass(frozen=True)
class Latency:
    """Time of one forward pass at one batch size.

    Args:
        batch_size: examples.
        dense_ms, pruned_ms: medians, in milliseconds.
        ratio: how many times faster the pruned model is: the median over pairs of passes that followed each other, which
            other work on the machine changes less than it changes the two medians.
    """

    batch_size: int
    dense_ms: float
    pruned_ms: float
    ratio: float


@dataclass(frozen=True)
class Cost:
    """A dense model beside a pruned one.

    Args:
        dense_parameters, pruned_parameters: numbers of parameters, shared ones counted once.
        dense_flops, pruned_flops: operations of one forward pass of one example; a multiplication with its addition
            counts as two.
        shapes: shapes of the inputs of that example.
        latency: latency by batch size; empty if it was not measured.
        dense_cache, pruned_cache: bytes of keys and values that are kept for each token in generation; 0 for models that do not
            generate. See :func:`gates.export.cost.cache_bytes`.
        hardware: processor or accelerator that latency was measured on.
        versions: versions of the packages that it was measured with.
    """

    dense_parameters: int
    pruned_parameters: int
    dense_flops: int
    pruned_flops: int
    shapes: Mapping[str, tuple[int, ...]]
    latency: tuple[Latency, ...] = ()
    dense_cache: int = 0
    pruned_cache: int = 0
    hardware: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameter_ratio(self) -> float:
        """How many times more parameters the dense model has."""
        return self.dense_parameters / self.pruned_parameters

    @property
    def flop_ratio(self) -> float:
        """How many times more operations the dense model takes."""
        return self.dense_flops / self.pruned_flops


def milliseconds(time: float) -> str:
    """A time of :class:`Latency` as it is shown.

    >>> milliseconds(1.2345), milliseconds(1083.2)
    ('1.23', '1,083')
    """
    return f"{time:,.0f}" if time >= 100 else f"{time:.3g}"


def measure_cost(
    dense: nn.Module, pruned: nn.Module, inputs: Mapping[str, Tensor], *, batch_sizes: Sequence[int] = (1, 8, 32)
) -> Cost:
    """Parameters, FLOPs and latency of both models on one device.

    Args:
        dense, pruned: on the same device.
        inputs: inputs of a forward pass; their rows are repeated to make up a batch.
        batch_sizes: to measure latency at; empty for none.

    Raises:
        GateError: for a batch size below 1, or models on different devices.

    >>> from gates import remove_heads_
    >>> from transformers import BertConfig, BertModel
    >>> dense, pruned = (BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)) for _ in range(2))
    >>> _ = remove_heads_(pruned, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]))
    >>> cost = measure_cost(dense, pruned, {"input_ids": torch.randint(50, (1, 7))}, batch_sizes=[])
    >>> cost.dense_parameters - cost.pruned_parameters
    4192
    """
    inputs = dict(inputs)
    one = resized(inputs, 1)
    return Cost(
        dense_parameters=count_parameters(dense),
        pruned_parameters=count_parameters(pruned),
        dense_flops=count_flops(dense, one),
        pruned_flops=count_flops(pruned, one),
        shapes={name: tuple(tensor.shape) for name, tensor in one.items()},
        latency=measure_latency(dense, pruned, inputs, batch_sizes=batch_sizes),
        dense_cache=cache_bytes_of(dense),
        pruned_cache=cache_bytes_of(pruned),
        hardware=hardware(_device(dense)),
        versions={name: metadata.version(name) for name in ("torch", "transformers")},
    )


def count_parameters(model: nn.Module) -> int:
    """Numbers in a model's parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Floating-point operations of the matrix products and convolutions of one forward pass.

    Attention is counted through its two explicit products, since fused kernels are not counted on every device.
    """
    with evaluating(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**_on(_device(model), inputs))
    return int(counter.get_total_flops())


def measure_latency(
    dense: nn.Module,
    pruned: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    batch_sizes: Sequence[int],
    repeats: int = 50,
    warm_up: int = 3,
    seconds: float = 20.0,
) -> tuple[Latency, ...]:
    """Median time of a forward pass of each model by batch size; measure on an otherwise idle machine.

    The models take turns, in changing order, so that whatever else the machine does falls on both.

    Args:
        dense, pruned: on the same device.
        inputs: their rows are repeated to make up a batch.
        batch_sizes: at least 1 each.
        repeats: passes of each model that are timed.
        warm_up: passes of each model before these.
        seconds: stop earlier than after ``repeats`` when a batch size has taken this long (but not before 4).

    Raises:
        GateError: for a batch size below 1, or models on different devices.
    """
    device = _device(dense)
    if _device(pruned) != device:
        raise GateError(f"the dense model is on {device} and the pruned one on {_device(pruned)}; move them to one device")
    found: list[Latency] = []
    with evaluating(dense, pruned), torch.inference_mode():
        for size in batch_sizes:
            if size < 1:
                raise GateError(f"cannot measure latency at batch size {size}; expected at least 1")
            batch = _on(device, resized(dict(inputs), size))
            for model in (dense, pruned) * warm_up:
                model(**batch)
            pairs: list[tuple[float, float]] = []
            start = time.perf_counter()
            while len(pairs) < repeats and (len(pairs) < 4 or time.perf_counter() - start < seconds):
                if len(pairs) % 2 == 0:
                    slow, fast = _timed(dense, batch, device), _timed(pruned, batch, device)
                else:
                    fast, slow = _timed(pruned, batch, device), _timed(dense, batch, device)
                pairs.append((slow, fast))
            slow, fast = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
            found.append(Latency(size, slow, fast, statistics.median(slow / fast for slow, fast in pairs)))
    return tuple(found)


def hardware(device: torch.device) -> str:
    """Return the processor's name with the number of threads, or the accelerator's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        lines = (line.partition(":") for line in cpu_info.read_text(encoding="utf-8").splitlines())
        name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), name)
    if device.type == "mps":
        return f"{name}, its GPU (MPS)"
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def _timed(model: nn.Module, batch: Mapping[str, Tensor], device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    model(**batch)
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all its work. A CPU has done it when the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _on(device: torch.device, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}
