"""Constants in place of closed heads, fitted on training data: :mod:`gates.scores.optimal_ablation` with a task's data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gates.hooks.replacement import mean_replacement
from gates.scores.ablation import leave_one_out_masks
from gates.scores.optimal_ablation import descend_each
from gates.scores.taylor import MeanGradients
from training.runs import progress
from training.scoring.outputs import mean_outputs
from training.scoring.subject import Batch, Subject


def constant_of_each(subject: Subject) -> list[Tensor]:
    """For every gate the constants that cost least where it alone is closed, put together: ``[heads * head_dim]`` of each
    site, for :func:`gates.hooks.replacement.mean_replacement`."""
    sizes = subject.gates.sizes
    fitted = optimal_constants(subject, leave_one_out_masks(subject.gates.size)[1:])
    constants, first = [], 0
    for part, size in zip(fitted, sizes, strict=True):
        by_gate = part[first : first + size].unflatten(1, (size, -1))  # [mask that closes gate g, gate, features]
        constants.append(by_gate.diagonal(dim1=0, dim2=1).T.flatten())
        first += size
    return constants


def optimal_constants(subject: Subject, masks: Tensor, *, steps: int = 8, rows: int = 256) -> list[Tensor]:
    """Constants in place of closed heads with which the mean loss is lowest (see :mod:`gates.scores.optimal_ablation`).

    Args:
        subject: with the weights that the masks are for.
        masks: 0/1 ``[masks, gates]``; the heads that a mask closes have constants of their own, found together.
        steps: of descent from the mean outputs; each is a forward and a backward pass for every mask.
        rows: scoring examples to fit on, at most, spread over all lengths; those of all processes together.

    Returns:
        For each site ``[masks, heads * head_dim]``; where a mask keeps a head, its mean output.
    """
    means = mean_outputs(subject)
    sizes = [len(mean) for mean in means]
    start = torch.cat(means).to(subject.device).repeat(len(masks), 1)
    with subject.at_rest(), progress.stage("fitting constants, steps", steps + 1) as shown:
        batches = list(subject.thinned(rows))

        def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
            found = MeanGradients([points[:, 0], points]).set_dtype(torch.float64).to(subject.device)
            for batch in batches:
                values, slopes = zip(
                    *(
                        _loss_and_slope(subject, batch, mask, point.split(sizes))
                        for mask, point in zip(masks, points, strict=True)
                    ),
                    strict=True,
                )
                found.update([torch.stack(values), torch.stack(slopes)], len(batch["labels"]))
            shown.advance()
            value, slope = found.compute()
            return value.reshape(len(points)), slope  # metrics squeeze what has one entry

        dense = torch.ones(subject.gates.size)
        losses = MeanGradients([dense[0]]).set_dtype(torch.float64).to(subject.device)
        for batch in batches:
            losses.update([_loss_and_slope(subject, batch, dense, start[0].split(sizes))[0]], len(batch["labels"]))
        best, _ = descend_each(start, evaluate, floor=losses.compute()[0], steps=steps)
    return [part.cpu() for part in best.split(sizes, dim=1)]


def _loss_and_slope(subject: Subject, batch: Batch, mask: Tensor, constants: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The mean loss of a batch with constants in place of closed heads, and its gradient with respect to all constants."""
    gates, parts = subject.gates, mask.split(subject.gates.sizes)
    leaves = [constant.clone().requires_grad_(not bool(part.all())) for constant, part in zip(constants, parts, strict=True)]
    free = [leaf for leaf in leaves if leaf.requires_grad]
    with gates.use(mask.to(subject.device)), mean_replacement(gates, leaves), torch.set_grad_enabled(bool(free)):
        loss = subject.losses(batch).mean()
    slopes = iter(torch.autograd.grad(loss, free, materialize_grads=True) if free else ())
    return loss.detach(), torch.cat([next(slopes) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves])
