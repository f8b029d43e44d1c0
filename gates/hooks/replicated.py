"""Gates beside a model that several processes train together, replicated or sharded (FSDP2): the same in all of them."""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from gates.errors import GateError
from gates.head_gates import HeadGates


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
    """Set the noise of gates: one draw per batch is the same in all processes, draws per example are each process's own.

    Args:
        gates: whose noise it is.
        seed: of the noise.
        rank: number of this process.
    """
    noise = seed if gates.draw_per == "batch" else seed * 4096 + 1 + rank
    gates.generator = torch.Generator(gates.log_alpha.device).manual_seed(noise)
