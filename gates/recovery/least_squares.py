"""Fit a projection by least squares from second moments: pure functions, and a Metric that accumulates the moments.

``sum |W x + b - y|^2 + ridge * mean(diag(X'X)) * |W - W0|^2``, with x and y centred where there is a bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gates.errors import GateError
from gates.scores.metric import HeadMetric


class Moments(NamedTuple):
    """Hold float64 sums over positions of inputs x ``[in]`` and targets y ``[out]``."""

    positions: Tensor  # The number of positions
    # The sums, ``[in]`` and ``[out]``.
    x: Tensor
    y: Tensor
    # ``sum x x^T`` ``[in, in]`` and ``sum x y^T`` ``[in, out]``.
    xx: Tensor
    xy: Tensor
    yy: Tensor  # ``sum |y|^2``

    def of(self, features: Tensor) -> Moments:
        """Return the moments of some inputs."""
        return Moments(self.positions, self.x[features], self.y, self.xx[features][:, features], self.xy[features], self.yy)

    def plus(self, other: Moments) -> Moments:
        """Return the moments of both sets of positions."""
        return Moments(*(one + more for one, more in zip(self, other, strict=True)))

    def centred(self) -> tuple[Tensor, Tensor]:
        """Return ``xx`` and ``xy`` about the means."""
        return self.xx - torch.outer(self.x, self.x) / self.positions, self.xy - torch.outer(self.x, self.y) / self.positions


BLOCK = 512
"""The inputs whose products are computed together."""


class ProjectionMoments(HeadMetric):
    """Accumulate :class:`Moments` over batches and processes."""

    positions: Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    def __init__(self, features: int, outputs: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums(positions=[], x=[features], y=[outputs], xx=[features, features], xy=[features, outputs], yy=[])

    def update(self, inputs: Tensor, targets: Tensor) -> None:
        """Add inputs ``[positions, in]`` and targets ``[positions, out]``.

        Products are computed at the speed of the higher of their precisions, at least float32.
        """
        if not len(inputs):
            return
        precision = reduce(torch.promote_types, (inputs.dtype, targets.dtype, torch.float32))
        x, y = about_mean(inputs.to(precision)), about_mean(targets.to(precision))
        self.positions += len(inputs)
        self.x += x.total
        self.y += y.total
        for start in range(0, inputs.shape[1], BLOCK):  # the upper half in blocks; the lower is equal to it
            end = start + BLOCK
            add_products_(self.xx[start:end, start:], x.of(slice(start, end)), x.of(slice(start, None)))
        add_products_(self.xy, x, y)
        self.yy += targets.double().square().sum()

    def compute(self) -> Moments:
        xx = self.xx.triu() + self.xx.triu(1).T
        return Moments(self.positions, self.x, self.y, xx, self.xy, self.yy)


class AboutMean(NamedTuple):
    """Hold numbers ``[positions, features]`` minus their means, the means, and the sums of the numbers, both in float64."""

    varying: Tensor
    mean: Tensor
    total: Tensor

    def of(self, features: slice) -> AboutMean:
        """Return some of the features."""
        return AboutMean(self.varying[:, features], self.mean[features], self.total[features])


def about_mean(numbers: Tensor) -> AboutMean:
    mean = numbers.mean(0)
    return AboutMean(numbers - mean, mean.double(), numbers.sum(0, dtype=torch.float64))


def add_products_(total: Tensor, x: AboutMean, y: AboutMean) -> None:
    """Add ``x.T @ y`` to a float64 total at the speed of the numbers' precision.

    With a, b near the means of x and y, ``sum x y = sum (x - a)(y - b) + a sum y + (sum x - n a) b``. The first part has no
    means, so nothing cancels, and is computed in the precision of the numbers. The rest has rank two and is computed in
    float64.

    Args:
        total: The total, ``[in, out]``, changed in place because a copy costs more than the product.
    """
    with torch.autocast(total.device.type, enabled=False):
        total += x.varying.T @ y.varying
        left = x.total - len(x.varying) * x.mean
        total.addmm_(torch.stack([x.mean, left], 1), torch.stack([y.total, y.mean]))


def fit(moments: Moments, weight: Tensor, *, ridge: float, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return the weight ``[out, in]`` and bias ``[out]`` or None of least squares in float64, regularised towards a weight.

    Args:
        weight: The weight before, ``[out, in]``.
        ridge: The strength of the regularisation, in units of the mean second moment of an input. Must be above 0.
        has_bias: Whether to fit a bias, which is not regularised.
    """
    if not ridge > 0:
        raise GateError(f"ridge is {ridge}; expected a number above 0, such as 0.1")
    if moments.positions == 0:
        raise GateError("there are no positions to fit to; expected batches with at least one that is not padding")
    if not all(bool(part.isfinite().all()) for part in (moments.xx, moments.xy, moments.x, moments.y)):
        raise GateError(
            "the inputs or targets of a projection are not finite, so it cannot be refitted; look for infinite weights or "
            "inputs, or use a higher precision"
        )
    before = weight.double()
    xx, xy = moments.centred() if has_bias else (moments.xx, moments.xy)
    scale = xx.diagonal().mean() if len(xx) else xx.new_zeros(())
    if scale > 0:
        damped = xx + ridge * scale * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if failed.any():  # sums in single precision are only exact to some 1e-7
            raise GateError(
                f"ridge is {ridge:g}, which is too small for the {moments.positions:g} positions of this projection; give a "
                "larger one, such as 0.01, or more examples"
            )
        before = before + torch.cholesky_solve(xy - xx @ before.T, factor).T
    bias = (moments.y - before @ moments.x) / moments.positions if has_bias else None
    return before, bias


def best_ridge(moments: Moments, held_out: Moments, weight: Tensor, ridges: Sequence[float], *, has_bias: bool) -> float:
    """Return the ridge whose fit has the smallest squared error on held-out positions, the largest if there are none.

    Only a choice depends on these fits, so they are computed in float32, and a ridge too small for that is left out. With a
    bias, the error is about the means of the held-out positions, so it judges the weights alone.

    Args:
        moments: The moments of the positions to fit to.
        held_out: The moments of other positions.
        weight: The weight before, ``[out, in]``.
        ridges: The ridges, above 0.
    """
    if not held_out.positions or not moments.positions or not weight.shape[1]:
        return max(ridges)
    (xx, xy), (other_xx, other_xy) = ((one.centred() if has_bias else (one.xx, one.xy)) for one in (moments, held_out))
    before, unit = weight.double().T, xx.diagonal().mean()
    missing = (xy - xx @ before).float()
    xx, other_xx, other_xy = xx.float(), other_xx.float(), other_xy.float()
    errors, one = dict[float, float](), torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
    with torch.autocast(xx.device.type, enabled=False):
        for ridge in ridges:
            factor, failed = torch.linalg.cholesky_ex(xx + float(ridge * unit) * one)
            new = before.float() + torch.cholesky_solve(missing, factor)
            error = float(((other_xx @ new - 2 * other_xy) * new).sum())
            errors[ridge] = error if not failed and math.isfinite(error) else math.inf
    return min(sorted(errors, reverse=True), key=errors.__getitem__)


def squared_error(moments: Moments, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``sum |W x + b - y|^2``, a scalar, for W ``[out, in]`` and b ``[out]`` or None."""
    w = weight.double()
    error = moments.yy - 2 * (w.T * moments.xy).sum() + (w @ moments.xx * w).sum()
    if bias is not None:
        b = bias.double()
        error = error + moments.positions * b.square().sum() + 2 * b @ (w @ moments.x - moments.y)
    return error.clamp(min=0.0)
