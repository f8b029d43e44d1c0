"""The constants that take the place of closed heads at the least loss (Li and Janson 2024, arXiv 2409.09951).

A head that is closed takes away more than its information: zero, or even its mean, can be an input that the layers behind it
never saw. *Optimal ablation* puts the constant there, the same at every position, with which the loss is lowest. What the
loss still rises by is then due to the head's information alone.

Here constants go down the gradient of the mean loss over all examples, from the mean output on, each with a step size of its
own (Barzilai and Borwein 1988). A step that does not lower the loss is taken back and tried again shorter. So the loss on these
examples is never above that of mean ablation, and neither batches nor processes matter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHORTER, LONGER = 0.25, 2.0
"""What a step size is multiplied by after a step in vain, and where the curvature is not positive."""


def descend_each(
    start: Tensor, evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], *, floor: float | Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Minimise several functions, each of its own row, by steps that only ever go down.

    Args:
        start: ``[problems, features]``.
        evaluate: function from points ``[problems, features]`` to their values ``[problems]`` and gradients.
        floor: values to be hoped for, which the first step aims at; it does not bound what is found.
        steps: evaluations after the first.

    Returns:
        The best points ``[problems, features]`` and their values ``[problems]``, which are at most those at the start.
    """
    best = start
    value, gradient = evaluate(best)
    rate = (value - floor).abs() / gradient.square().sum(1).clamp(min=torch.finfo(gradient.dtype).tiny)
    for _ in range(steps):
        trial = best - rate.unsqueeze(1) * gradient
        tried, slope = evaluate(trial)
        lower = tried < value
        moved, turned = trial - best, slope - gradient
        curvature = (moved * turned).sum(1)
        fitting = torch.where(curvature > 0, moved.square().sum(1) / curvature.clamp(min=1e-300), LONGER * rate)
        rate = torch.where(lower, fitting, SHORTER * rate)
        best = torch.where(lower.unsqueeze(1), trial, best)
        gradient = torch.where(lower.unsqueeze(1), slope, gradient)
        value = torch.where(lower, tried, value)
    return best, value
