"""Importance of a head by its attention weights: ``I_h = E_x sum_ij |dL(x) / dA_h,ij|``.

A variant of HIS that lecture notes and interpretability work use: it differentiates the loss with respect to the attention
matrix A_h (after the softmax) instead of the head's output. The matrix is reduced by the sum of the absolute values over
queries and keys, then examples are averaged. A key without any weight (padding, or the future of a causal query) does not
count: it has a gradient too, but no path on which its weight could change. Unlike HIS it does not see how large a weight is,
and it needs the matrices: O(query * key) memory, and the model's explicit (eager) attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.hooks.examples import collect
from gates.hooks.intercept import attention_matrices, sparse_site
from gates.scores.gradients import examples_by_losses
from gates.scores.importance import requiring_gradients
from gates.sites import AttentionSite, join_sites


def reduce_matrix(weights: Tensor, gradient: Tensor) -> Tensor:
    """Sum of ``|gradient|`` over queries and keys where there is weight, ``[batch, heads]``.

    Args:
        weights: attention weights ``[batch, heads, query, key]``.
        gradient: gradient of each example's loss with respect to them, ``[batch, heads, query, key]``.
    """
    return torch.where(weights > 0, gradient.abs(), 0.0).sum((-2, -1))


def attention_gradients(model: PreTrainedModel, sites: tuple[AttentionSite, ...], losses: Callable[[], Tensor]) -> Tensor:
    """The score of every head for every example of a batch.

    Args:
        model: model, in evaluation mode meanwhile.
        sites: attention modules of the model.
        losses: function that runs the model once and returns the per-example losses ``[batch]``.

    Returns:
        ``[batch, heads]``, float32; a shared module has the sum over all its passes.

    Raises:
        GateError: for block-sparse attention, for modules with several streams of heads, and for a site whose attention matrix
            the model does not hand out or does not use.
    """
    sparse = sparse_site(sites)
    if sparse is not None:
        raise GateError(
            f"{type(sparse.core).__name__} has no attention matrix of queries by keys; leave attention-his out for this model"
        )
    streams = next((site for site in sites if site.layout.beside is not None), None)
    if streams is not None:
        raise GateError(
            f"{type(streams.core).__name__} hands out the attention matrix of one of its streams of heads only; "
            "leave attention-his out for this model"
        )
    taken: list[tuple[int, Tensor]] = []
    queries = [parameter for site in sites for parameter in site.projection(site.layout.query).parameters()]
    # With a frozen backbone no matrix would be in a graph; the queries' weights put them there.
    with requiring_gradients(queries), torch.enable_grad():
        with attention_matrices(model, sites, lambda site, weights: taken.append((site, weights))):
            per_example = losses()
        seen = {site for site, _ in taken}
        if any(not weights.requires_grad for _, weights in taken):
            raise GateError(
                f"the attention matrices of {type(model).__name__} are not in its graph; leave attention-his out for this model"
            )
        matrices = [weights for _, weights in taken]
        is_folded = any(len(weights) != len(per_example) for weights in matrices)
        gradients = torch.autograd.grad(per_example.sum(), matrices, retain_graph=is_folded, allow_unused=True)
    unused = {site for (site, _), gradient in zip(taken, gradients, strict=True) if gradient is None}
    for position, site in enumerate(sites):
        if position not in seen or position in unused:
            raise GateError(
                f"the loss does not depend on the attention matrix that {type(site.core).__name__} at {site.name!r} hands out; "
                "leave attention-his out for this model"
            )
    reduced = [reduce_matrix(weights.detach(), gradient).float() for weights, gradient in zip(matrices, gradients, strict=True)]
    if is_folded:
        located = examples_by_losses(per_example, matrices, [sites[position].name for position, _ in taken])
        numbers = [of_matrix.flatten(1).amax(1) for of_matrix in located]
        reduced = [collect(rows, numbers_of, len(per_example)) for rows, numbers_of in zip(reduced, numbers, strict=True)]
    scores: dict[int, Tensor] = {}
    for (position, _), rows in zip(taken, reduced, strict=True):
        scores[position] = scores.get(position, 0) + rows
    return join_sites([scores[position] for position in range(len(sites))])
