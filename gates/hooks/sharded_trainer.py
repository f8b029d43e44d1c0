"""Gates in Hugging Face's Trainer in several processes, above all with FSDP2: accelerate shards the model, and every process
has the gates whole."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainerCallback

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.replicated import replicate_, seed_noise_

BASE = "base_model."
"""What the names of a gated model's own weights begin with."""


class SeededNoise(TrainerCallback):
    """Gives a step's noise by seed, step and, for draws per example, process: examples of two processes have noise of their
    own, and a resumed run draws what an unbroken one would have drawn."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        seed_noise_(model.gates, seed=args.seed * 1_000_003 + state.global_step, rank=args.process_index)


class ReplicatedGates(SeededNoise):
    """Keeps the gates of a sharded model the same in all processes: averages their gradients too."""

    def __init__(self) -> None:
        self.begun: HeadGates | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.begun is not model.gates:
            replicate_(model.gates, seed=args.seed)
        self.begun = model.gates


def leave_gates_whole_(plugin: Any, gates: HeadGates) -> None:
    """Tell accelerate to shard all of a gated model but its gates.

    Args:
        plugin: accelerate's ``FullyShardedDataParallelPlugin``.
        gates: of a model that is not sharded yet.

    Raises:
        GateError: for FSDP1, for settings that accelerate cannot combine with parameters that are left whole, and for draws per
            example.
    """
    if gates.draw_per != "batch":
        raise GateError(
            f"the gates are drawn per {gates.draw_per}, for which a model may have to run again in the midst of a run, "
            "and a sharded one cannot; use GateConfig(draw_per='batch')"
        )
    offloads, ignored = isinstance(plugin.cpu_offload, CPUOffloadPolicy), plugin.ignored_modules
    if isinstance(ignored, list) and all(isinstance(module, HeadGates) for module in ignored):
        ignored = None  # gates of an earlier trainer
    for name, found, expected in (
        ("version", plugin.fsdp_version, 2),
        ("cpu_ram_efficient_loading", bool(plugin.cpu_ram_efficient_loading), False),
        ("cpu_offload", offloads, False),
        ("ignored_modules", ignored, None),
    ):
        if found != expected:
            raise GateError(
                f"FSDP's {name} is {found!r}, and gates go with {expected!r} alone; set it so in fsdp_config, or in the file "
                "that accelerate launch reads"
            )
    plugin.ignored_modules = [gates]


def base_weights(weights: dict[str, Any]) -> dict[str, Any]:
    """The base model's part of a gated model's weights, by the names that it has there."""
    return {name.removeprefix(BASE): weight for name, weight in weights.items() if name.startswith(BASE)}
