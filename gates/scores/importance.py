"""Compute the Head Importance Score (HIS; Michel, Levy and Neubig 2019): the sensitivity of the loss to each head.

``I_h = E_x |dL(x) / d xi_h|`` at ``xi = 1``: the expectation over *examples* of an absolute value. Every example has its own
copy of the gates. So one backward pass over the summed losses gives all per-example gradients exactly, at any batch size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.attention.examples import MIXED, ExampleAxes, ExampleAxis, axes_of, collect, locate
from gates.attention.intercept import alone, attention_matrices, observing, sparse_site
from gates.attention.sites import AttentionSite, join_sites
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.metric import HeadMetric

# Every row and position of a site has its own gate, so the gradient of an example is the sum over its rows. These rows are
# found by the gradients of some examples' losses: see :mod:`gates.attention.examples`. One more backward pass checks the rows
# found for an earlier batch, since the same function may pair other rows later. It ends at the last site of each stack, because
# a whole pass would take half as long again as the scores. A check at the logits would miss a model that sorts its examples.

Place = tuple[int, torch.Size, torch.dtype]
"""A site, and the shape ``[..., heads * head_dim]`` and dtype of its heads."""

RTOL = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""The rounding tolerance of a weighted gradient by the dtype of heads, relative to the largest gradient of its example.
Neighbouring weights differ by more in batches of up to 360 examples in half precision, and of 5,000 in single precision."""


@dataclass(frozen=True)
class GateGradients:
    """Hold gradients of a batch's summed losses.

    Args:
        sites: The index of the site of each tensor of rows.
        rows: The gradients of the gates for every row and position, ``[..., gates of the site]``.
        to_examples: The functions that sum rows to examples, ``[examples, gates of the site]``.
        weights: The gradients of the further weights.
        examples: The number of examples.
    """

    sites: list[int]
    rows: list[Tensor]
    to_examples: list[Callable[[Tensor], Tensor]]
    weights: list[Tensor]
    examples: int

    def of_examples(self, *, absolute: bool = False) -> Tensor:
        """Return gradients ``[examples, gates]``, float32, in site order; ``absolute`` sums absolute values of the rows."""
        rows = [part.abs() for part in self.rows] if absolute else self.rows
        return self._joined([to_examples(part) for to_examples, part in zip(self.to_examples, rows, strict=True)])

    def of_batch(self) -> Tensor:
        """Return the sum over the batch, ``[gates]``, float32, in site order."""
        return self._joined([part.flatten(0, -2).sum(0) for part in self.rows])

    def _joined(self, parts: list[Tensor]) -> Tensor:
        by_site: dict[int, Tensor] = {}
        for site, part in zip(self.sites, parts, strict=True):  # a module that runs on several shapes has several parts
            by_site[site] = by_site[site] + part.float() if site in by_site else part.float()
        return join_sites([by_site[site] for site in sorted(by_site)])


def gate_gradients(
    gates: HeadGates, losses: Callable[[], Tensor], weights: Sequence[Tensor] = (), *, per_example: bool = True
) -> GateGradients:
    """Run a model and differentiate its losses.

    Args:
        losses: A function that runs the model and returns the per-example losses ``[batch]``.
        weights: Further tensors to differentiate with respect to, which require gradients.
        per_example: Whether gradients per example are needed.
    """
    with (
        alone(gates.model),
        gates.attached(),
        observing(gates.model, gates.sites),
        gates.probe() as reached,
        torch.enable_grad(),
    ):
        each = losses()
        _check(gates, each, {site for site, *_ in reached})
        places = sorted(reached, key=lambda place: place[0])
        leaves = [reached[place] for place in places]
        examples = len(each) if per_example else 1
        known = gates.example_axes.of_losses(_code(losses))
        axes = [known.known(site, shape, examples) for site, shape, _ in places]
        if examples > 1 and _mixes_modalities(gates.model):
            axes = [None] * len(axes)
        gradients = torch.autograd.grad(each.sum(), [*leaves, *weights], retain_graph=examples > 1, materialize_grads=True)
        rows = gradients[: len(leaves)]
        known_rows = [
            (place, axis, leaf, part)
            for place, axis, leaf, part in zip(places, axes, leaves, rows, strict=True)
            if axis is not None
        ]
        if examples > 1 and known_rows and not _still_hold(_last_of_stacks(gates, known_rows), each):
            axes = [None] * len(axes)
        to_examples = [_nothing(examples) if axis is None else partial(axis.collect, examples=examples) for axis in axes]
        if any(axis is None and bool((part != 0).any()) for axis, part in zip(axes, rows, strict=True)):
            to_examples = _located(gates, known, places, leaves, each)
    return GateGradients([site for site, *_ in places], list(rows), to_examples, list(gradients[len(leaves) :]), len(each))


def _check(gates: HeadGates, losses: Tensor, ran: set[int]) -> None:
    missing = [site.name for index, site in enumerate(gates.sites) if index not in ran]
    if missing:
        raise GateError(f"the loss does not use the attention at {missing[0]!r}, so its heads have no score; use another loss")
    if losses.dim() != 1 or not losses.requires_grad:
        raise GateError(
            f"the losses have shape {list(losses.shape)}{'' if losses.requires_grad else ' and no gradient'}; expected one for "
            "each example, [batch], with a gradient: reduction='none', and no torch.no_grad() around the model"
        )
    if not bool(losses.isfinite().all()):
        example = int((~losses.isfinite()).nonzero()[0])
        raise GateError(
            f"the loss of example {example} is {float(losses[example].detach())}, so no head has a score; look for infinite "
            "weights or inputs, or a learning rate that was too high"
        )


KnownRows = tuple[Place, ExampleAxis, Tensor, Tensor]
"""A place with the axis of its examples, its leaf and the gradient of the leaf."""


def _last_of_stacks(gates: HeadGates, known: Sequence[KnownRows]) -> list[KnownRows]:
    """Return the last place of each stack: of one shape, at sites whose names differ in numbers only."""
    return list({(re.sub(r"\d+", "", gates.sites[one[0][0]].name), one[0][1]): one for one in known}.values())


def _still_hold(known: Sequence[KnownRows], losses: Tensor) -> bool:
    """Return whether axes assign every row to the example whose loss depends on it.

    With a weight for each loss, the gradient of a row is that of the plain sum times the weight of its example. The graph of
    the losses is kept.
    """
    examples = len(losses)
    factors = torch.logspace(-8, 8, examples, base=2, device=losses.device, dtype=torch.float32)
    places, axes, leaves, parts = zip(*known, strict=True)
    weighted = torch.autograd.grad((losses * factors).sum(), leaves, retain_graph=True, materialize_grads=True)
    for (*_, dtype), axis, part, other in zip(places, axes, parts, weighted, strict=True):
        expected = axis.collect(part.abs().float(), examples) * factors.to(part.device)[:, None]
        found = axis.collect(other.abs().float(), examples)
        if bool(((found - expected).abs() > RTOL[dtype] * expected.amax(-1, keepdim=True)).any()):
            return False
    return True


def _nothing(examples: int) -> Callable[[Tensor], Tensor]:
    """Return a function that sums rows to zeros, because the loss does not depend on them."""
    return lambda rows: rows.new_zeros(examples, rows.shape[-1])


def examples_by_losses(losses: Tensor, rows: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """Return for each row of each tensor ``[..., features]`` the number of the example whose loss depends on it, or UNKNOWN.

    The losses are ``[batch]``, and their graph is kept.
    """

    def touched(group: Tensor) -> list[Tensor]:
        of_group = losses[group.to(losses.device)].sum()
        gradients = torch.autograd.grad(of_group, rows, retain_graph=True, materialize_grads=True)
        return [(gradient != 0).any(-1) for gradient in gradients]

    located = locate(touched, len(losses))
    for name, numbers in zip(names, located, strict=True):
        if bool((numbers == MIXED).any()):
            raise GateError(
                f"the loss of one example depends on the heads of another at {name!r}, so there is no score for each example; "
                "give losses of one example each, or use granularity='batch'"
            )
    return located


def _code(losses: Any) -> Hashable:
    """Return the key of a loss function, because the loss decides which rows belong to an example. It is only a hint: a
    function can use other rows at every call."""
    own: Any = losses.func if isinstance(losses, partial) else losses
    return own.__code__ if hasattr(own, "__code__") else str(type(own))


def _located(
    gates: HeadGates, known: ExampleAxes, places: list[Place], leaves: list[Tensor], losses: Tensor
) -> list[Callable[[Tensor], Tensor]]:
    """Return for every leaf the function that sums its rows to examples."""
    examples = len(losses)
    names = [gates.sites[site].name for site, *_ in places]
    to_examples: list[Callable[[Tensor], Tensor]] = []
    for (site, *_), numbers in zip(places, examples_by_losses(losses, leaves, names), strict=True):
        known.learn(site, numbers, examples)
        regular = axes_of(numbers, examples)  # several only where they differ in rows that no loss depends on
        to_examples.append(partial(regular[0].collect if regular else partial(collect, numbers=numbers), examples=examples))
    return to_examples


def _mixes_modalities(model: nn.Module) -> bool:
    """Return whether a model reads images or sounds with text, whose assignment to examples can change with the batch."""
    modalities = [getattr(module, "input_modalities", "text") for module in model.modules()]
    return any(not isinstance(own, str) and len(own) > 1 for own in modalities)


Granularity = Literal["example", "token", "batch"]


def head_gradients(gates: HeadGates, losses: Callable[[], Tensor], granularity: Granularity = "example") -> Tensor:
    """Return gradients of a batch's losses with respect to the gates, at the gates' current values.

    Model and gates are in evaluation mode meanwhile, and a compiled model runs uncompiled. A head whose output does not reach
    the loss has gradients of exactly 0. Further backward passes over the first batch find the rows of each example, and over
    every batch of models with images or sounds: see :mod:`gates.attention.examples`.

    Args:
        gates: The gates, attached or not.
        losses: A function that runs the model and returns the per-example losses ``[batch]``.
        granularity: ``example`` (the definition), ``token`` (absolute values per position, as in Michel et al.'s released
            code) or ``batch`` (per batch, as in DSP and TextPruner).

    Returns:
        Rows ``[samples, heads]``: one per example; one per example with the absolute values of its positions summed; or a
        single row for the batch, divided by the number of examples.

    Raises:
        GateError: If the losses are not one per example or have no gradient, or some site did not run. Also if the loss of one
            example depends on the heads of another, where only the granularity ``batch`` is defined.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> model = BertForSequenceClassification(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> ids, labels = torch.randint(50, (3, 7)), torch.tensor([0, 1, 0])
    >>> with HeadGates(model).attached() as gates:
    ...     rows = head_gradients(gates, lambda: torch.nn.functional.cross_entropy(model(ids).logits, labels, reduction="none"))
    >>> rows.shape
    torch.Size([3, 8])
    """
    gradients = gate_gradients(gates, losses, per_example=granularity != "batch")
    if granularity == "batch":
        return gradients.of_batch().unsqueeze(0) / gradients.examples
    return gradients.of_examples(absolute=granularity == "token")


class GradientRows(NamedTuple):
    """Hold the gradients of one batch in every granularity; see :func:`head_gradients`."""

    example: Tensor
    token: Tensor
    batch: Tensor
    weights: tuple[Tensor, ...]  # The gradients of the mean loss with respect to the further tensors


def gradient_rows(gates: HeadGates, losses: Callable[[], Tensor], weights: Sequence[Tensor] = ()) -> GradientRows:
    """Return :func:`head_gradients` in all granularities from one backward pass. ``weights`` are further tensors that require
    gradients."""
    gradients = gate_gradients(gates, losses, weights)
    example, token = gradients.of_examples(), gradients.of_examples(absolute=True)
    of_weights = tuple(part / gradients.examples for part in gradients.weights)
    return GradientRows(example, token, example.mean(0, keepdim=True), of_weights)


@contextmanager
def requiring_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Make parameters require gradients temporarily, including frozen ones."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class Importance(NamedTuple):
    """Hold scores per head, each ``[heads]``."""

    his: Tensor  # E |g|, not normalised
    standard_error: Tensor  # The standard error of ``his``
    signed: Tensor  # E g, positive where closing the head would lower the loss, to first order
    fisher: Tensor  # E g^2, the diagonal Fisher information of the gates (Kwon et al. 2022)


def check_rows(gradients: Tensor, heads: int) -> None:
    """Raise :class:`GateError` for gradients that are not ``[samples, heads]``."""
    if gradients.dim() != 2 or gradients.shape[1] != heads:
        raise GateError(f"the gradients have shape {list(gradients.shape)}; expected [samples, {heads}], one row per example")


def normalise_by_layer(scores: Tensor, layer_index: Tensor) -> Tensor:
    """Divide scores ``[heads]`` by the l2 norm over their layer, as Michel et al. do (after Molchanov et al. 2017).

    A layer of zeros stays zero.
    """
    norms = torch.zeros(int(layer_index.max()) + 1, dtype=scores.dtype, device=scores.device)
    norms.index_add_(0, layer_index, scores.square())
    norms = norms.sqrt()[layer_index]
    return torch.where(norms > 0, scores / norms.clamp(min=torch.finfo(scores.dtype).tiny), scores)


def removal_ranking(scores_at: Callable[[Tensor], Tensor], gates: int, *, share: float = 0.1) -> Tensor:
    """Remove gates in steps and score the remaining ones before every step (Michel et al. 2019, section 4.2).

    Args:
        scores_at: A function from a mask ``[gates]`` to the scores ``[gates]`` of the model under it. Scores of closed gates do
            not count.
        share: The share of all gates to remove in each step, about 10 % in the paper, and at least one gate.

    Returns:
        The position of each gate in the order of removal, ``[gates]``, float64, 0 for the first. So higher is kept first.
        Within one step the lower score is removed first.
    """
    if not 0 < share <= 1:
        raise GateError(f"the share of gates removed in one step is {share}; expected a number above 0 and at most 1")
    step, removed = max(1, math.floor(share * gates + 1e-9)), 0
    mask, ranking = torch.ones(gates), torch.zeros(gates, dtype=torch.float64)
    while removed < gates:
        scores = scores_at(mask).double().cpu().masked_fill(mask == 0, torch.inf)
        going = torch.sort(scores, stable=True).indices[: min(step, gates - removed)]
        ranking[going] = torch.arange(removed, removed + len(going), dtype=torch.float64)
        mask[going] = 0.0
        removed += len(going)
    return ranking


class HeadImportance(HeadMetric):
    """Stream rows of head gradients into :class:`Importance`, exactly for any batching and under DDP.

    ``kwargs`` are the arguments of :class:`torchmetrics.Metric`.

    >>> importance = HeadImportance(2)
    >>> importance.update(torch.tensor([[1.0, -2.0], [-3.0, 0.0]]))  # gradients of two examples
    >>> importance.compute().his.tolist()
    [2.0, 1.0]
    """

    absolute: Tensor
    signed: Tensor
    square: Tensor
    samples: Tensor

    def __init__(self, heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums(absolute=[heads], signed=[heads], square=[heads])
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, gradients: Tensor) -> None:
        """Add rows ``[samples, heads]`` from :func:`head_gradients`."""
        check_rows(gradients, len(self.absolute))
        gradients = gradients.double()
        self.absolute += gradients.abs().sum(0)
        self.signed += gradients.sum(0)
        self.square += gradients.square().sum(0)
        self.samples += len(gradients)

    def compute(self) -> Importance:
        samples, mean = self.samples, self.absolute / self.samples
        # The variance of |g| needs no further sum, because |g|^2 = g^2.
        variance = (self.square / samples - mean.square()).clamp(min=0) * samples / (samples - 1).clamp(min=1)
        return Importance(mean, (variance / samples).sqrt(), self.signed / samples, self.square / samples)


# Importance of a head by its attention weights: ``I_h = E_x sum_ij |dL(x) / dA_h,ij|``.
#
# This variant of HIS is from lecture notes and interpretability work. It differentiates the loss with respect to the attention
# matrix A_h (after the softmax) instead of the head's output. The absolute values are summed over queries and keys, then
# averaged over examples. A key without weight (padding, or the future of a causal query) does not count, because its weight
# cannot change. Unlike HIS it ignores the size of a weight, and it needs O(query * key) memory and eager attention.


def reduce_matrix(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the sum of ``|gradient|`` over queries and keys where there is weight, both ``[batch, heads, query, key]``, as
    ``[batch, heads]``."""
    return torch.where(weights > 0, gradient.abs(), 0.0).sum((-2, -1))


def attention_gradients(model: PreTrainedModel, sites: tuple[AttentionSite, ...], losses: Callable[[], Tensor]) -> Tensor:
    """Return the score of every head for every example of a batch, ``[batch, heads]``, float32.

    A shared module has the sum over all its passes. ``losses`` runs the model once and returns the losses ``[batch]``.
    """
    sparse = sparse_site(sites)
    if sparse is not None:
        raise GateError(
            f"{type(sparse.core).__name__} has no attention matrix of queries by keys; leave attention-his out for this model"
        )
    streams = next((site for site in sites if site.layout.second is not None), None)
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
