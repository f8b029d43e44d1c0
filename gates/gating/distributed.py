"""Keep gates equal in all processes that train one model, replicated or sharded (FSDP2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainerCallback

from gates.errors import GateError
from gates.gating.head_gates import HeadGates


def replicate_(gates: HeadGates, *, seed: int, group: ProcessGroup | None = None) -> None:
    """Keep the gates equal in all processes. Each has all gates, even if the model is sharded.

    Afterwards, every backward pass averages the gradients of ``log_alpha`` over processes. Training equals that of one process
    with all examples if each process has equally many and the loss is a mean. The noise is set too: draws per batch are equal
    in all processes, and draws per example differ. Every process must call this function and take the same steps.

    Args:
        gates: The gates of a model to which ``torch.distributed.fsdp.fully_shard`` was applied, or whose gradients are averaged
            in another way. ``DistributedDataParallel`` must not wrap the gates.
        seed: The seed of the noise.
        group: The processes; all by default.

    Raises:
        GateError: If there is one process, the gates are sharded, or they differ between processes.

    A job with one process:

    >>> from torch.distributed.fsdp import fully_shard
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from gates.model import get_gated_model
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> mesh = distributed.init_device_mesh("cpu", (1,))
    >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    >>> model = BertForSequenceClassification(BertConfig(vocab_size=50, **size))
    >>> for part in (*model.bert.encoder.layer, model):
    ...     _ = fully_shard(part, mesh=mesh)
    >>> gated = get_gated_model(model).train()
    >>> replicate_(gated.gates, seed=0)
    >>> gated(input_ids=torch.randint(50, (3, 7)), labels=torch.tensor([0, 1, 0])).loss.backward()
    >>> gated.gates.log_alpha.grad.shape
    torch.Size([8])
    >>> distributed.destroy_process_group()
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise GateError("there is one process, so there is nothing to replicate; call init_process_group() first")
    log_alpha = gates.log_alpha
    if type(log_alpha.data) is not Tensor:
        raise GateError(
            f"log_alpha of these gates is a {type(log_alpha.data).__name__}, so the gates are sharded too; apply fully_shard "
            "to the model and its layers, not to the gated model"
        )
    world, rank = distributed.get_world_size(group), distributed.get_rank(group)
    own, starts = (seed, log_alpha.tolist(), gates.mask.tolist()), [None] * world
    distributed.all_gather_object(starts, own, group=group)
    if any(start != starts[0] for start in starts):
        raise GateError("gates, masks or seeds of the processes differ; make the same ones in each, then call replicate_")

    def average_(parameter: Tensor) -> None:
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad.div_(world), group=group)

    log_alpha.register_post_accumulate_grad_hook(average_)
    seed_noise_(gates, seed=seed, rank=rank)


def seed_noise_(gates: HeadGates, *, seed: int, rank: int) -> None:
    """Set the noise of gates: draws per batch are equal in all processes, and draws per example differ."""
    noise = seed if gates.draw_per == "batch" else seed * 4096 + 1 + rank
    gates.generator = torch.Generator(gates.log_alpha.device).manual_seed(noise)


# Gates in Hugging Face's Trainer with several processes, mainly with FSDP2: accelerate shards the model but not the gates.


class SeededNoise(TrainerCallback):
    """Seed the noise of each step from the seed, the step and, for draws per example, the process.

    So examples of two processes have different noise, and a resumed run draws the same noise as an uninterrupted one.
    """

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        seed_noise_(model.gates, seed=args.seed * 1_000_003 + state.global_step, rank=args.process_index)


class ReplicatedGates(SeededNoise):
    """Keep the gates of a sharded model equal in all processes by averaging their gradients."""

    def __init__(self) -> None:
        self.begun: HeadGates | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.begun is not model.gates:
            replicate_(model.gates, seed=args.seed)
        self.begun = model.gates


def leave_gates_whole_(plugin: Any, gates: HeadGates) -> None:
    """Configure accelerate's ``FullyShardedDataParallelPlugin`` to shard a gated model without its gates."""
    if gates.draw_per != "batch":
        raise GateError(
            f"the gates are drawn per {gates.draw_per}, but a sharded model cannot run again to find its examples; use "
            "GateConfig(draw_per='batch')"
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
                f"FSDP's {name} is {found!r}, but gates need {expected!r}; set it in fsdp_config, or in the file that "
                "accelerate launch reads"
            )
    plugin.ignored_modules = [gates]


def base_weights(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the base model's weights among those of a gated model, by their names in the base model."""
    prefix = "base_model."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
