"""Score heads by an optimal brain surgeon: the error of a site's output after the kept heads compensate for a removed head.

This is ZipLM (Kurtic, Frantar and Alistarh 2023) for heads. For ``y = W x + b`` with dense weights, ``H`` is the second moment
of x about its mean, plus a ridge. Remove the columns S of a head, and give all others their best values. Then ``W`` changes by
``-W_S (H^-1_SS)^-1 H^-1_S:``, and the error of the output has the second moment ``W_S (H^-1_SS)^-1 W_S^T``, ``[out, out]``.
Heads of a layer are removed one at a time, the one with the least error first. Block elimination updates ``H^-1`` and ``W``,
so each score takes the earlier removals into account.

Layers are compared by the effect of an error e on the loss, ``1/2 E (g . e)^2``. Here g is the gradient of an example's loss
with respect to the output at a position. If g, e and positions are independent, this is ``1/2 tr(G E e e^T)``. ``G = E g g^T``
is the output's factor of the Fisher information in K-FAC (Martens and Grosse 2015; for structures, Wang et al. 2019). It
changes the cost of an error, not the best update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gates.attention.intercept import alone, observing
from gates.attention.sites import AttentionSite, join_sites, weight_by_output
from gates.attention.valid import Valid, rows_by_site, valid_positions
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.metric import HeadMetric
from gates.scores.weights import output_weights

Batch = TypeVar("Batch")

RIDGE = 0.01
"""The strength of the ridge, in units of the mean second moment of an input. It separates linearly dependent heads."""


class OutputMoments(NamedTuple):
    """Hold sums over positions of the inputs x ``[in]`` of an output projection, of ``x x^T``, and of ``g g^T``.

    g are the gradients at its output, ``[out]``.
    """

    examples: Tensor
    positions: Tensor
    x: Tensor
    xx: Tensor
    gg: Tensor


class SiteMoments(HeadMetric):
    """Accumulate :class:`OutputMoments` of one site over batches and processes."""

    examples: Tensor
    positions: Tensor
    x: Tensor
    xx: Tensor
    gg: Tensor

    def __init__(self, features: int, outputs: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums(examples=[], positions=[], x=[features], xx=[features, features], gg=[outputs, outputs])

    def update(self, inputs: Tensor, gradients: Tensor, examples: int, valid: Tensor | None = None) -> None:
        """Add the concatenated heads of a batch ``[..., in]``, and the gradients of its summed losses ``[..., out]``.

        ``valid`` are the queries that are not padding, ``[batch, query]``; None if all count.
        """
        x, g = valid_positions(inputs, valid).double(), valid_positions(gradients, valid).double()
        self.examples += examples
        self.positions += len(x)
        self.x += x.sum(0)
        self.xx += x.T @ x
        self.gg += g.T @ g

    def compute(self) -> OutputMoments:
        return OutputMoments(self.examples, self.positions, self.x, self.xx, self.gg)


def output_gradients(gates: HeadGates, losses: Callable[[], Tensor]) -> tuple[int, list[tuple[int, Tensor, Tensor]]]:
    """Return the inputs of the output projections in one forward pass, and the gradients of the loss at their outputs.

    Args:
        losses: A function that runs the model and returns the per-example losses ``[batch]``.

    Returns:
        The number of examples, and for each call of a site its index, the inputs ``[..., in]`` and the gradients
        ``[..., out]`` of the summed losses; zeros where the loss does not depend on the output.
    """
    calls: list[tuple[int, Tensor, Tensor]] = []

    def take(site: int, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        leaf = torch.zeros_like(output, requires_grad=True)
        calls.append((site, args[0].detach(), leaf))
        return output + leaf

    with ExitStack() as stack:
        stack.enter_context(alone(gates.model))
        stack.enter_context(gates.attached())
        stack.enter_context(observing(gates.model, gates.sites))
        stack.enter_context(torch.enable_grad())
        for index, site in enumerate(gates.sites):
            stack.callback(site.output.register_forward_hook(partial(take, index)).remove)
        each = losses()
        found = torch.autograd.grad(each.sum(), [leaf for _, _, leaf in calls], materialize_grads=True)
    return len(each), [(site, inputs, gradient) for (site, inputs, _), gradient in zip(calls, found, strict=True)]


def removal_errors(weight: Tensor, second: Tensor, cost: Tensor, heads: int, *, ridge: float = RIDGE) -> Tensor:
    """Return the error of a site's output that each head's removal adds, ``[heads]``, float64.

    Heads are removed one at a time, the one with the least error first. The value of each is at least slightly above that of
    all heads before it, so a higher value is kept first. It is 0 for inputs of 0.

    Args:
        weight: The weight of the output projection, ``[out, in]``.
        second: The second moment of its inputs, ``[in, in]``, about the mean if there is a bias.
        cost: The metric of the error e, ``[out, out]``, whose cost is ``tr(cost e e^T)``.
        heads: The number of heads, with the same number of inputs each, side by side.
        ridge: The strength of the ridge; see :data:`RIDGE`. Must be above 0.
    """
    if not ridge > 0:
        raise GateError(f"ridge is {ridge}; expected a number above 0, such as {RIDGE}")
    w, g = weight.double(), cost.double()
    if not all(bool(part.isfinite().all()) for part in (w, g, second)):
        raise GateError(
            "the inputs of a projection, or the gradients of its output, are not finite; look for infinite weights or inputs, "
            "or a learning rate that was too high"
        )
    scale = second.diagonal().mean().double()
    errors = torch.zeros(heads, dtype=torch.float64, device=w.device)
    if not scale > 0:
        return errors
    width = w.shape[1] // heads
    damped = second.double() + ridge * scale * torch.eye(len(second), dtype=torch.float64, device=w.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    left, least = list(range(heads)), errors.new_zeros(())
    while left:
        own = inverse.unflatten(0, (-1, width)).unflatten(2, (-1, width)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        columns = w.unflatten(1, (-1, width)).movedim(1, 0)
        added = torch.linalg.solve(own, columns.mT @ g @ columns).diagonal(dim1=1, dim2=2).sum(-1)
        position = int(added.argmin())
        least = torch.maximum(added[position], least.nextafter(least.new_tensor(torch.inf)))
        errors[left.pop(position)] = least
        goes = torch.zeros(w.shape[1], dtype=torch.bool, device=w.device)
        goes[position * width : (position + 1) * width] = True
        made_up = torch.linalg.solve(own[position], inverse[goes])
        w = (w - w[:, goes] @ made_up)[:, ~goes]
        inverse = (inverse - inverse[:, goes] @ made_up)[~goes][:, ~goes]
        inverse = (inverse + inverse.T) / 2
    return errors


def brain_surgeon(
    gates: HeadGates, batches: Iterable[Batch], losses: Callable[[Batch], Tensor], valid: Callable[[Batch], Valid]
) -> Tensor:
    """Return the score of every gate, ``[gates]``, float64, from one forward and one backward pass over batches.

    Scores are in units of the loss per example; higher is kept first.

    Args:
        gates: The gates, with the values that they have in evaluation mode, in which the model runs.
        losses: A function that runs the model on a batch and returns the per-example losses ``[batch]``.
        valid: A function from a batch to its queries that are not padding, ``[batch, query]``, by kind or by the name of a
            module. None or a missing key where all count.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> batches, gates = [torch.randint(50, (3, 7))], HeadGates(model)
    >>> brain_surgeon(gates, batches, lambda batch: model(batch).pooler_output.square().sum(-1), lambda batch: {}).shape
    torch.Size([8])
    """
    output_weights(gates)  # raises
    shapes = [weight_by_output(site.output).shape for site in gates.sites]
    moments = [SiteMoments(features, outputs).to(gates.mask.device) for outputs, features in shapes]
    for batch in batches:
        rows = rows_by_site(valid(batch), gates.sites)
        examples, calls = output_gradients(gates, partial(losses, batch))
        for site, inputs, gradients in calls:
            moments[site].update(inputs, gradients, examples, rows[site])
    parts = zip(gates.sites, gates.sizes, moments, strict=True)
    return join_sites([_scores_of_site(site, size, one.compute()) for site, size, one in parts])


def _scores_of_site(site: AttentionSite, heads: int, moments: OutputMoments) -> Tensor:
    """Return the score of each head of a site, ``[heads]``, from the moments for its present weights."""
    if moments.positions == 0:
        raise GateError("there are no positions to score heads on; expected batches with at least one that is not padding")
    second = moments.xx
    if site.output.bias is not None:
        second = second - torch.outer(moments.x, moments.x) / moments.positions
    cost = moments.gg / moments.positions
    return removal_errors(weight_by_output(site.output).detach(), second / moments.examples, cost / 2, heads)
