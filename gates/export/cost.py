"""Measure the cost of a dense and a pruned model: parameters, floating-point operations, latency and key/value cache."""

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


def cache_bytes(sites: Sequence[AttentionSite], mask: Tensor | None = None) -> int:
    """Return the bytes of keys and values that causal self-attention keeps per token, in the precision of the weights.

    Windowed attention keeps only its last tokens. Cross-attention does not count, because it keeps the encoder's keys once.
    Layers with the keys of other layers and recurrent layers keep none. Multi-head latent attention keeps one compressed
    vector for all heads. An exported layer without heads keeps one number as key and as value, which does not count.

    Args:
        mask: The mask of the heads that would stay, ``[heads]``; None for all. Key/value heads are removed and repeated as by
            :func:`gates.surgery.remove.remove_heads_`.
    """
    sizes = [site.heads for site in sites]
    parts = torch.ones(sum(sizes)).split(sizes) if mask is None else mask.cpu().split(sizes)
    return sum(_kept_bytes(cut_site(site, part)) for site, part in zip(sites, parts, strict=True) if _keeps(site))


def cache_bytes_of(model: nn.Module, mask: Tensor | None = None) -> int:
    """Return :func:`cache_bytes` of a model; 0 if it does not generate or has no heads."""
    has_heads = any(is_attention(module) for module in model.modules())
    return cache_bytes(find_attention(model), mask) if generates(model) and has_heads else 0


def generates(model: nn.Module) -> bool:
    """Return whether a model generates text token by token, and so keeps keys and values."""
    return isinstance(model, PreTrainedModel) and model.can_generate()


def _keeps(site: AttentionSite) -> bool:
    """Return whether a site puts keys into a cache by its method ``update``, as causal self-attention does."""
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
    # Falcon's new decoder repeats keys and values for every query head before it stores them.
    heads = cut.queries if getattr(site.core, "new_decoder_architecture", False) else cut.keys
    return len(heads) * (key_width + site.head_dim) * value.element_size()


@dataclass(frozen=True)
class Latency:
    """Hold the time of one forward pass at one batch size."""

    batch_size: int  # The number of examples
    # The median times in milliseconds.
    dense_ms: float
    pruned_ms: float
    # The speed-up of the pruned model: the median over pairs of consecutive passes. Other work on the machine changes it less
    # than the ratio of the two medians.
    ratio: float


@dataclass(frozen=True)
class Cost:
    """Hold the cost of a dense and a pruned model."""

    # The numbers of parameters; shared ones count once.
    dense_parameters: int
    pruned_parameters: int
    # The operations of one forward pass of one example; a multiply-add counts as two.
    dense_flops: int
    pruned_flops: int
    shapes: Mapping[str, tuple[int, ...]]  # The shapes of the inputs of this example
    latency: tuple[Latency, ...] = ()  # The latency by batch size. Empty if it was not measured.
    # The bytes of keys and values per token in generation; 0 for models that do not generate. See :func:`cache_bytes`.
    dense_cache: int = 0
    pruned_cache: int = 0
    hardware: str = ""  # The processor or accelerator of the latency measurement
    versions: Mapping[str, str] = field(default_factory=dict)  # The package versions of the latency measurement

    @property
    def example(self) -> str:
        """Return the shapes of the inputs of this example as text."""
        return ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in self.shapes.items())

    @property
    def parameter_ratio(self) -> float:
        return self.dense_parameters / self.pruned_parameters

    @property
    def flop_ratio(self) -> float:
        return self.dense_flops / self.pruned_flops


def milliseconds(time: float) -> str:
    """Return a time of :class:`Latency` as text.

    >>> milliseconds(1.2345), milliseconds(1083.2)
    ('1.23', '1,083')
    """
    return f"{time:,.0f}" if time >= 100 else f"{time:.3g}"


def measure_cost(
    dense: nn.Module, pruned: nn.Module, inputs: Mapping[str, Tensor], *, batch_sizes: Sequence[int] = (1, 8, 32)
) -> Cost:
    """Measure parameters, FLOPs and latency of two models.

    Args:
        dense, pruned: The models, on the same device.
        inputs: The inputs of a forward pass, whose rows are repeated to fill a batch.
        batch_sizes: The batch sizes of the latency measurement. Empty for none.

    Raises:
        GateError: For a batch size below 1, or models on different devices.

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
    """Count the numbers in a model's parameters; shared parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Count the floating-point operations of the matrix products and convolutions of one forward pass.

    Attention runs as two explicit products, because fused kernels are not counted on every device.
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
    seconds: float = 3.0,
) -> tuple[Latency, ...]:
    """Measure the median time of a forward pass of each model by batch size, on an otherwise idle machine.

    The models take turns in changing order, so other work on the machine affects both.

    Args:
        dense, pruned: The models, on the same device.
        inputs: The inputs, whose rows are repeated to fill a batch.
        repeats: The number of timed passes of each model.
        warm_up: The number of passes of each model before these.
        seconds: The time limit per batch size. At least 4 passes are timed.
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
    """Wait until a device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _on(device: torch.device, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}
