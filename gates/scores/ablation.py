"""Run a model with many masks, one after the other, and see what each does to every example.

Michel et al. 2019, section 3: a head's worth is what its removal alone costs. The same loop serves any family of masks:
each head left out, one head kept in each layer, a ranking cut at several budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.intercept import alone, observing

Batch = TypeVar("Batch")


@torch.no_grad()
def ablate(gates: HeadGates, masks: Tensor, batches: Iterable[Batch], per_example: Callable[[Batch], Tensor]) -> Tensor:
    """What ``per_example`` finds of every example under every mask.

    Args:
        gates: gates of the model, attached for as long as this runs; the model is in evaluation mode meanwhile.
        masks: gate values ``[masks, gates]``, 0/1 or between.
        batches: batches, each run once with every mask.
        per_example: function that runs the model on a batch and returns a value per example ``[examples]``, such as its
            loss or whether its answer is right, or several ``[examples, values]``.

    Returns:
        ``[masks, examples]`` or ``[masks, examples, values]``, examples in the order of the batches.

    Raises:
        GateError: for masks of another size, or if there are no batches.
    """
    if masks.dim() != 2 or masks.shape[1] != gates.size:
        raise GateError(f"the masks have shape {list(masks.shape)}; expected [masks, {gates.size}]")
    results = []
    with alone(gates.model), gates.attached(), observing(gates.model, gates.sites):
        for batch in batches:
            of_batch = []
            for mask in masks:
                with gates.use(mask.to(gates.mask)):
                    of_batch.append(per_example(batch))
            results.append(torch.stack(of_batch))
    if not results:
        raise GateError("there are no examples to ablate heads on; give at least one batch")
    return torch.cat(results, dim=1)


def leave_one_out_masks(gates: int) -> Tensor:
    """The dense mask, then each gate closed alone: ``[gates + 1, gates]``."""
    return torch.cat([torch.ones(1, gates), 1 - torch.eye(gates)])
