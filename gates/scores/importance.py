"""Head Importance Score (HIS; Michel, Levy and Neubig 2019): how much the loss feels each head.

``I_h = E_x |dL(x) / d xi_h|`` at ``xi = 1``: the expectation over *examples* of an absolute value. Every example
gets its own copy of the gates, so one backward pass over the summed per-example losses gives every per-example
gradient exactly, at any batch size (:mod:`gates.scores.gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.metric import HeadMetric
from gates.scores.gradients import gate_gradients

Granularity = Literal["example", "token", "batch"]


def head_gradients(gates: HeadGates, losses: Callable[[], Tensor], granularity: Granularity = "example") -> Tensor:
    """Gradients of a batch's losses with respect to the gates, at the gates' present values.

    Model and gates are in evaluation mode meanwhile, so without dropout and draws, and a compiled model runs uncompiled.
    A head whose output does not reach the loss, as in a last layer that is computed and not used, has gradients of exactly 0.

    Which rows of a site are an example's is found out by further backward passes over the first batch (and over every batch
    of models that take images or sounds beside text, where it can change): see :mod:`gates.hooks.examples`.

    Args:
        gates: attached gates, or gates that are to be attached meanwhile.
        losses: function that runs the model and returns the per-example losses ``[batch]``.
        granularity: ``example`` (the definition), ``token`` (the absolute value is later taken per position, as
            in Michel et al.'s released code) or ``batch`` (per batch, as in DSP and TextPruner).

    Returns:
        ``[samples, heads]``: one row per example; per example with the absolute values of its positions summed;
        or a single row for the batch, divided by the number of examples.

    Raises:
        GateError: if the losses are not one for each example or have no gradient, if some site did not run, or if the loss of
            one example depends on the heads of another, so that only the granularity ``batch`` is defined.

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
    """The gradients of one batch in every granularity, as :func:`head_gradients` returns them, from one backward pass.

    Args:
        example: ``[examples, gates]``.
        token: ``[examples, gates]``.
        batch: ``[1, gates]``.
        weights: gradients of the mean loss with respect to the further tensors that were asked for.
    """

    example: Tensor
    token: Tensor
    batch: Tensor
    weights: tuple[Tensor, ...]


def gradient_rows(gates: HeadGates, losses: Callable[[], Tensor], weights: Sequence[Tensor] = ()) -> GradientRows:
    """:func:`head_gradients` in all granularities at once: the gradient of an example is the sum of its positions'.

    Args:
        gates, losses: see :func:`head_gradients`.
        weights: further tensors to differentiate with respect to, each requiring gradients.
    """
    gradients = gate_gradients(gates, losses, weights)
    example, token = gradients.of_examples(), gradients.of_examples(absolute=True)
    of_weights = tuple(part / gradients.examples for part in gradients.weights)
    return GradientRows(example, token, example.mean(0, keepdim=True), of_weights)


@contextmanager
def requiring_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Parameters that can be differentiated for the length of a ``with`` block, frozen ones too."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class Importance(NamedTuple):
    """Scores per head, each ``[heads]``, from ``samples`` rows of gradients.

    Args:
        his: E |g|, unnormalised.
        standard_error: standard error of ``his``.
        signed: E g; positive where closing the head would lower the loss, to first order.
        fisher: E g^2, the diagonal Fisher information of the gates (Kwon et al. 2022).
    """

    his: Tensor
    standard_error: Tensor
    signed: Tensor
    fisher: Tensor


def check_rows(gradients: Tensor, heads: int) -> None:
    """Raises :class:`GateError` for gradients that are not ``[samples, heads]``."""
    if gradients.dim() != 2 or gradients.shape[1] != heads:
        raise GateError(f"the gradients have shape {list(gradients.shape)}; expected [samples, {heads}], one row per example")


def _importance_update(gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Sums over the rows of ``[samples, heads]``: of |g|, of g, of g^2, and their number."""
    gradients = gradients.double()
    return gradients.abs().sum(0), gradients.sum(0), gradients.square().sum(0), gradients.shape[0]


def _importance_compute(absolute: Tensor, signed: Tensor, square: Tensor, samples: Tensor) -> Importance:
    """From sums to means; the variance of |g| needs no further sum because |g|^2 = g^2."""
    mean = absolute / samples
    variance = (square / samples - mean.square()).clamp(min=0) * samples / (samples - 1).clamp(min=1)
    return Importance(mean, (variance / samples).sqrt(), signed / samples, square / samples)


def normalise_by_layer(scores: Tensor, layer_index: Tensor) -> Tensor:
    """Divide each head's score by the l2 norm over its layer, as Michel et al. do (after Molchanov et al. 2017).

    Args:
        scores: scores of the heads, ``[heads]``.
        layer_index: layer of each head, ``[heads]``. A layer of zeros stays zero.
    """
    norms = torch.zeros(int(layer_index.max()) + 1, dtype=scores.dtype, device=scores.device)
    norms.index_add_(0, layer_index, scores.square())
    norms = norms.sqrt()[layer_index]
    return torch.where(norms > 0, scores / norms.clamp(min=torch.finfo(scores.dtype).tiny), scores)


def removal_ranking(scores_at: Callable[[Tensor], Tensor], gates: int, *, share: float = 0.1) -> Tensor:
    """Remove gates in steps and score those that are left again before every step (Michel et al. 2019, section 4.2).

    Args:
        scores_at: function from a 0/1 mask ``[gates]`` to the scores ``[gates]`` of the model with it in force; those of closed
            gates do not count.
        gates: gates in the model.
        share: share of all gates that is removed in each step; about 10 % in the paper, and at least one gate.

    Returns:
        ``[gates]``, float64: the position of each gate in the order of removal, 0 for the first to go. So higher is kept first,
        and the mask of any budget follows. Within one step the lower score goes first.

    Raises:
        GateError: for a share that is not above 0 and at most 1.
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
    """Streams rows of head gradients into :class:`Importance`; exact for any batching and under DDP.

    Args:
        heads: heads in the model.
        kwargs: arguments of :class:`torchmetrics.Metric`.

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
        for name in ("absolute", "signed", "square"):
            self.add_state(name, torch.zeros(heads, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, gradients: Tensor) -> None:
        """Add rows ``[samples, heads]`` as :func:`head_gradients` returns them.

        Raises:
            GateError: for rows of another shape.
        """
        check_rows(gradients, len(self.absolute))
        absolute, signed, square, samples = _importance_update(gradients)
        self.absolute += absolute
        self.signed += signed
        self.square += square
        self.samples += samples

    def compute(self) -> Importance:
        return _importance_compute(self.absolute, self.signed, self.square, self.samples)
