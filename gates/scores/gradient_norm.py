"""Greedy-Gnorm (Guo and Sheridan 2026, arXiv 2602.04491): heads by the gradients of their query, key and value weights.

A head scores ``|dL/dW_Q| * |dL/dW_K| * |dL/dW_V|``, the product of the l2 norms of the gradients of its own blocks of the three
projections. The head of the lowest score is removed, all that are left are scored again, and so on
(:func:`gates.scores.importance.removal_ranking`, one head in each step).

The product and the loop are the abstract's. The objective L is that of the released code (Sheridan-Stable/greedy-gnorm): the
norm of the logits, which needs no labels. There it is the norm of all logits of a batch, with dropout on, and the norms of
gradients are averaged over batches. Here L is the mean over examples of the norm of an example's logits, without dropout, and
the norms are of its whole gradient, so that the score depends neither on the batches nor on the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.sites import AttentionSite
from gates.surgery.adapters import check_merged
from gates.surgery.slices import rows_of_parts


def input_weights(gates: HeadGates) -> list[Tensor]:
    """The weights of every site's query, key and value projections, as their classes store them; each once.

    Raises:
        GateError: where an adapter adds to one, or heads have no rows of their own in them.
    """
    check_merged(gates.model)
    without = next((site for site in gates.sites if site.gate_only), None)
    if without is not None:
        raise GateError(
            f"{type(without.core).__name__} has no query, key and value weights of each head that could be told apart "
            f"({without.gate_only}); rank its heads by another score, such as his"
        )
    return [site.projection(path).weight for site in gates.sites for path in _paths(site)]


def _paths(site: AttentionSite) -> list[str]:
    """The paths of the projections, each once: one that is fused holds several parts."""
    return list(dict.fromkeys(path for path, _ in rows_of_parts(site).values()))


def gradient_norms(gates: HeadGates, gradients: Sequence[Tensor]) -> Tensor:
    """The score of every gate, ``[gates]``, float64. Heads that share a key/value head share the norms of its blocks.

    Args:
        gates: gates of the model.
        gradients: of the objective with respect to :func:`input_weights`, in their order and shapes.
    """
    waiting, scores = iter(gradients), []
    for site, size in zip(gates.sites, gates.sizes, strict=True):
        squares: dict[str, Tensor] = {}
        for path in _paths(site):
            gradient = next(waiting).double()
            squares[path] = gradient.square().sum(0 if isinstance(site.projection(path), Conv1D) else 1)
        product = torch.ones(size, dtype=torch.float64)
        for path, rows in rows_of_parts(site).values():
            by_head = squares[path].cpu()[rows].sum(-1)
            sharing = max(1, size // len(by_head))  # gates that have one key/value head
            product *= by_head.repeat_interleave(sharing).unflatten(0, (size, -1)).sum(-1).sqrt()
        scores.append(product)
    return torch.cat(scores)
