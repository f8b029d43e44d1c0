"""Whether PyTorch has spread a model's weights over processes."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor


def is_sharded(model: nn.Module) -> bool:
    """Whether a process holds a part alone of some weight (FSDP2, ``fully_shard``), so that the model runs in all or in none.

    >>> is_sharded(nn.Linear(2, 2))
    False
    """
    return any(isinstance(weight, DTensor) for weight in model.parameters())
