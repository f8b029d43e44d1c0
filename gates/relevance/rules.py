"""The rules of AttnLRP (Achtibat et al. 2024), as changes of gradients.

Layer-wise relevance propagation hands the relevance of an output to what it was computed from. With the relevance R of every
activation a written as ``R = a * g``, a rule is a rule for g. For most operations it is the gradient itself; where it is not, a
hook on the operation's output changes the gradient on its way back. So after one backward pass, activation times gradient is
relevance, everywhere in the graph.

What a rule does not hand on stays in a ledger, each part computed by a formula of its own. So nothing is lost: what arrives of
a logit's relevance at the inputs, plus the ledger, is the logit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gates.errors import GateError

EPSILON = 1e-6
"""Of the epsilon rule: what keeps a relevance finite where an output is near 0."""
BIAS, SOFTMAX, SMALL = "bias", "softmax", "epsilon"
ABSORBERS = (BIAS, SOFTMAX, SMALL)
"""What keeps relevance: constants that are added, the constant term of the softmax's expansion, and epsilon."""


class Rules:
    """One rule for each kind of operation; every method takes an operation's output and returns it for the model to go on with.

    Args:
        epsilon: of the epsilon rule, above 0.

    Attributes:
        absorbed: what was not handed on in backward passes since it was last cleared, a scalar for each of :data:`ABSORBERS`,
            float64.
    """

    def __init__(self, epsilon: float = EPSILON) -> None:
        if not epsilon > 0:
            raise GateError(f"epsilon is {epsilon}; expected a small number above 0, such as {EPSILON:g}")
        self.epsilon = epsilon
        self.absorbed: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Forget what earlier backward passes left."""
        self.absorbed.clear()

    def linear(self, output: Tensor, constant: Tensor | None = None, *, factors: int = 1) -> Tensor:
        """The epsilon rule for ``y = x W + b``: x gets ``x * W (R / (y + epsilon sign y))``, and b keeps its part.

        Args:
            output: y.
            constant: b, broadcastable to y; None where there is none.
            factors: 2 for a product of two matrices that both depend on the input, each of which gets half (the uniform rule).
        """
        value = unchanged(output)

        def divide(gradient: Tensor) -> Tensor:
            y = value()
            handed = gradient * y / stabilised(factors * y, self.epsilon)
            self._absorb(SMALL, y * (gradient - factors * handed))
            return handed

        output.register_hook(divide)
        return self.affine(output, constant)

    def affine(self, output: Tensor, constant: Tensor | float | None) -> Tensor:
        """The rule for what is linear and needs no epsilon: sums, concatenations, sums with constants, which keep their part.

        Args:
            output: of the operation.
            constant: what it is where all that depends on the input is 0, broadcastable to the output; None for 0.
        """
        if constant is not None:
            kept = constant.detach() if isinstance(constant, Tensor) else torch.tensor(constant, device=output.device)
            output.register_hook(lambda gradient: self._absorb(BIAS, product(kept, gradient)))
        return output

    def product(self, output: Tensor) -> Tensor:
        """The uniform rule for an elementwise product of two activations: each factor gets half."""
        output.register_hook(lambda gradient: gradient / 2)
        return output

    def softmax(self, inputs: Tensor, output: Tensor, dim: int) -> Tensor:
        """The Taylor expansion of a softmax s at its inputs x: ``R_i = x_i (R'_i - s_i sum_j R'_j)``, which is activation times
        gradient; the expansion's constant term keeps the rest.
        """
        given, value = unchanged(inputs), unchanged(output)

        def keep(gradient: Tensor) -> None:
            x, s = given(), value()
            weighted = s * gradient
            handed = product(x, weighted - s * weighted.sum(dim, keepdim=True))
            self._absorb(SOFTMAX, weighted - handed)

        output.register_hook(keep)
        return output

    def activation(self, inputs: Tensor, output: Tensor) -> Tensor:
        """The identity rule for an elementwise function: the input gets all of the output's relevance, by ``y / x``."""
        result: Tensor = _Identity.apply(inputs, output.detach(), self)
        return result

    def layer_norm(self, inputs: Tensor, size: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """The identity rule for a layer norm over the last ``size`` axes: its standard deviation is a constant."""
        axes = list(range(-size, 0))
        centred = inputs - inputs.mean(axes, keepdim=True)
        output = centred / (centred.detach().square().mean(axes, keepdim=True) + eps).sqrt()
        return self._scaled(output, weight, bias)

    def rms_norm(self, inputs: Tensor, size: int, weight: Tensor | None, eps: float) -> Tensor:
        """The same for a norm by the root mean square."""
        square = inputs.detach().square().mean(list(range(-size, 0)), keepdim=True)
        return self._scaled(inputs * (square + eps).rsqrt(), weight, None)

    def _scaled(self, normed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        output = normed if weight is None else normed * weight
        return output if bias is None else self.affine(output + bias, bias)

    def _absorb(self, name: str, parts: Tensor) -> None:
        total = parts.detach().sum(dtype=torch.float64)
        self.absorbed[name] = self.absorbed[name] + total if name in self.absorbed else total


class _Identity(torch.autograd.Function):
    """An elementwise function's value, with the gradient ``y / (x + epsilon sign x)``."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, output: Tensor, rules: Rules) -> Tensor:
        ctx.save_for_backward(inputs, output)
        ctx.rules = rules
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inputs, output), (gradient,) = ctx.saved_tensors, gradients
        handed = gradient * output / stabilised(inputs, ctx.rules.epsilon)
        ctx.rules._absorb(SMALL, gradient * output - inputs * handed)
        return handed, None, None


def stabilised(values: Tensor, epsilon: float) -> Tensor:
    """Values pushed away from 0 by epsilon; 0 counts as positive."""
    return values + torch.where(values < 0, -epsilon, epsilon)


def product(values: Tensor, gradients: Tensor) -> Tensor:
    """``values * gradients``, and 0 where a gradient is 0, such as at masked scores of minus infinity."""
    return torch.where(gradients == 0, 0.0, values * gradients)


def unchanged(tensor: Tensor) -> Callable[[], Tensor]:
    """A function that returns a tensor's values, outside of any graph.

    Raises:
        GateError: when called, if they were overwritten in the meantime.
    """
    values, version = tensor.detach(), tensor._version

    def read() -> Tensor:
        if values._version != version:
            raise GateError("an activation was overwritten after its use, so its relevance is lost; use another model")
        return values

    return read
