"""Gates beside a model that several processes train together, replicated or sharded (FSDP2): the same in all of them."""

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
    """Keep the gates the same in all processes: each has them whole, however the model is sharded.

    From now on every backward pass leaves the mean of all processes' gradients on
    ``log_alpha``, so that with a loss that is a mean over equally many examples in each, training is that of one process with
    all of them. The noise of the gates is set: one draw per batch is the same in all processes, draws per example are each
    process's own. Every process must call it, and take the same steps.

    Args:
        gates: of a model that ``torch.distributed.fsdp.fully_shard`` has been applied to, or whose gradients are averaged in
            another way; not of one that ``DistributedDataParallel`` wraps together with its gates.
        seed: of the noise.
        group: the processes; all by default.

    Raises:
        GateError: if there are no processes to share with, the gates are sharded, or they differ between processes.

    One process of a job, which mostly has more, with a model that they share:

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
        raise GateError("there is one process, so gates have nobody to be the same with; init_process_group() comes first")
    log_alpha = gates.log_alpha
    if type(log_alpha.data) is not Tensor:
        raise GateError(
            f"log_alpha of these gates is a {type(log_alpha.data).__name__}, so the gates are sharded too; apply fully_shard "
            "to the model and its layers, not to what holds model and gates"
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
    """Set the noise of gates: one draw per batch is the same in all processes, draws per example are each process's own."""
    noise = seed if gates.draw_per == "batch" else seed * 4096 + 1 + rank
    gates.generator = torch.Generator(gates.log_alpha.device).manual_seed(noise)


# Gates in Hugging Face's Trainer in several processes, above all with FSDP2: accelerate shards the model, and every process
# has the gates whole.

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
    """Tell accelerate's ``FullyShardedDataParallelPlugin`` to shard all of a gated model but its gates."""
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
