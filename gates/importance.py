"""Head Importance Score (HIS; Michel, Levy and Neubig 2019): how much the loss feels each head.

``I_h = E_x |dL(x) / d xi_h|`` at ``xi = 1``: the expectation over *examples* of an absolute value. Every example
gets its own copy of the gates, so one backward pass over the summed per-example losses gives every per-example
gradient exactly, at any batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from gates.attach import Granularity, HeadGates
from gates.errors import GateError


def head_gradients(gates: HeadGates, losses: Callable[[], Tensor], granularity: Granularity = "example") -> Tensor:
    """Gradients of a batch's losses with respect to the gates, at the gates' present values.

    Args:
        gates: attached gates.
        losses: runs the model once and returns the per-example losses ``[batch]``.
        granularity: ``example`` (the definition), ``token`` (the absolute value is later taken per position, as
            in Michel et al.'s released code) or ``batch`` (per batch, as in DSP and TextPruner).

    Returns:
        ``[samples, heads]``: one row per example; per example with the absolute values of its positions summed;
        or a single row for the batch, divided by the number of examples.
    """
    with gates.attached(), gates.probe(granularity) as leaves, torch.enable_grad():
        per_example = losses()
        missing = [site.name for site, leaf in zip(gates.sites, leaves, strict=True) if leaf is None]
        if missing:
            raise GateError(f"the loss does not run through the attention at {missing[0]!r}, so its heads have no score")
        gradients = torch.autograd.grad(per_example.sum(), [leaf for leaf in leaves if leaf is not None])
    if granularity == "token":
        gradients = tuple(gradient.abs() for gradient in gradients)
    rows = torch.cat([gradient.sum(dim=1) for gradient in gradients], dim=-1).float()
    return rows / per_example.shape[0] if granularity == "batch" else rows


class Importance(NamedTuple):
    """Scores per head, each ``[heads]``, from ``samples`` rows of gradients.

    Args:
        his: E |g|, unnormalised.
        standard_error: of ``his``.
        signed: E g; positive where closing the head would lower the loss, to first order.
        fisher: E g^2, the diagonal Fisher information of the gates (Kwon et al. 2022).
    """

    his: Tensor
    standard_error: Tensor
    signed: Tensor
    fisher: Tensor


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
        scores: ``[heads]``.
        layer_index: layer of each head, ``[heads]``. A layer of zeros stays zero.
    """
    norms = torch.zeros(int(layer_index.max()) + 1, dtype=scores.dtype, device=scores.device)
    norms.index_add_(0, layer_index, scores.square())
    norms = norms.sqrt()[layer_index]
    return torch.where(norms > 0, scores / norms.clamp(min=torch.finfo(scores.dtype).tiny), scores)


class HeadImportance(Metric):
    """Streams rows of head gradients into :class:`Importance`; exact for any batching and under DDP.

    Args:
        heads: heads in the model.
        kwargs: passed to :class:`torchmetrics.Metric`.
    """

    full_state_update = False
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
        """Add rows ``[samples, heads]`` as :func:`head_gradients` returns them."""
        absolute, signed, square, samples = _importance_update(gradients)
        self.absolute += absolute
        self.signed += signed
        self.square += square
        self.samples += samples

    def compute(self) -> Importance:
        return _importance_compute(self.absolute, self.signed, self.square, self.samples)
