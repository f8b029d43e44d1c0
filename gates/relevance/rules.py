"""Implement the rules of AttnLRP (Achtibat et al. 2024) as changes of gradients.

Layer-wise relevance propagation distributes the relevance of an output to the inputs of its operation. With the relevance R of
every activation a written as ``R = a * g``, a rule is a rule for g. For most operations g is the gradient. For the others, a
hook on the operation's output changes the gradient. So after one backward pass, activation times gradient is relevance
everywhere in the graph.

Relevance that a rule does not propagate is added to a ledger, each part by its own formula. So the relevance at the inputs plus
the ledger equals the logit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from gates.attention.intercept import implementation, observing
from gates.attention.modes import frozen
from gates.attention.output_hooks import gates_on
from gates.attention.sites import AttentionSite
from gates.errors import GateError

EPSILON = 1e-6
"""The default of the epsilon rule, which keeps relevance finite where an output is near 0."""
BIAS, SOFTMAX, SMALL = "bias", "softmax", "epsilon"
"""The parts that absorb relevance: added constants, the constant term of the softmax's expansion, and epsilon."""


class Rules:
    """Apply one rule for each kind of operation. Every method returns the operation's output for the model.

    Args:
        epsilon: The epsilon of the epsilon rule. Must be above 0.

    Attributes:
        absorbed: The relevance absorbed in backward passes since the last ``clear``, a float64 scalar for each part:
            ``bias``, ``softmax`` and ``epsilon``.
    """

    def __init__(self, epsilon: float = EPSILON) -> None:
        if not epsilon > 0:
            raise GateError(f"epsilon is {epsilon}; expected a small number above 0, such as {EPSILON:g}")
        self.epsilon = epsilon
        self.absorbed: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Reset the absorbed relevance."""
        self.absorbed.clear()

    def linear(self, output: Tensor, constant: Tensor | None = None, *, factors: int = 1) -> Tensor:
        """Apply the epsilon rule for ``y = x W + b``: x gets ``x * W (R / (y + epsilon sign y))``, and b absorbs its part.

        Args:
            constant: The constant b, broadcastable to y; None for none.
            factors: The number of matrices in the product that depend on the input. Each of two gets half (the uniform rule).
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
        """Apply the rule for linear operations without epsilon: sums, concatenations, and sums with constants.

        The constant, which absorbs its part, is the operation's result for inputs of 0; None for 0.
        """
        if constant is not None:
            kept = constant.detach() if isinstance(constant, Tensor) else torch.tensor(constant, device=output.device)
            output.register_hook(lambda gradient: self._absorb(BIAS, product(kept, gradient)))
        return output

    def product(self, output: Tensor) -> Tensor:
        """Apply the uniform rule for an elementwise product of two activations: each factor gets half."""
        output.register_hook(lambda gradient: gradient / 2)
        return output

    def softmax(self, inputs: Tensor, output: Tensor, dim: int) -> Tensor:
        """Apply the Taylor expansion of a softmax s at its inputs x: ``R_i = x_i (R'_i - s_i sum_j R'_j)``.

        This is activation times gradient. The expansion's constant term absorbs the rest.
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
        """Apply the identity rule for an elementwise function: the input gets the output's relevance, by ``y / x``."""
        result: Tensor = _Identity.apply(inputs, output.detach(), self)
        return result

    def layer_norm(
        self, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> Tensor:
        """Apply the identity rule for a layer norm, with PyTorch's arguments: its standard deviation is a constant."""
        axes = list(range(-len(normalized_shape), 0))
        centred = input - input.mean(axes, keepdim=True)
        output = centred / (centred.detach().square().mean(axes, keepdim=True) + eps).sqrt()
        return self._scaled(output, weight, bias)

    def rms_norm(self, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
        """Apply the identity rule for a norm by the root mean square, with PyTorch's arguments."""
        square = input.detach().square().mean(list(range(-len(normalized_shape), 0)), keepdim=True)
        eps = torch.finfo(input.dtype).eps if eps is None else eps
        return self._scaled(input * (square + eps).rsqrt(), weight, None)

    def _scaled(self, normed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        output = normed if weight is None else normed * weight
        return output if bias is None else self.affine(output + bias, bias)

    def _absorb(self, name: str, parts: Tensor) -> None:
        total = parts.detach().sum(dtype=torch.float64)
        self.absorbed[name] = self.absorbed[name] + total if name in self.absorbed else total


class _Identity(torch.autograd.Function):
    """Return an elementwise function's value, with the gradient ``y / (x + epsilon sign x)``."""

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
    """Move values away from 0 by epsilon; 0 counts as positive."""
    return values + torch.where(values < 0, -epsilon, epsilon)


def product(values: Tensor, gradients: Tensor) -> Tensor:
    """Return ``values * gradients``, and 0 where a gradient is 0, such as at masked scores of minus infinity."""
    return torch.where(gradients == 0, 0.0, values * gradients)


def unchanged(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns a tensor's detached values, and raises an error if they were overwritten."""
    values, version = tensor.detach(), tensor._version

    def read() -> Tensor:
        if values._version != version:
            raise GateError("an activation was overwritten after its use, so relevance is unknown; use another model")
        return values

    return read


# Operations get their rules by name while the model runs, so rotary positions, residual streams, masks and gated feed-forward
# layers need no table of classes. Activation modules follow one rule as a whole, by the files of their classes. An operation
# without a rule is an error if relevance reaches it.

RESHAPED = {
    "__get__", "__getitem__", "broadcast_to", "chunk", "clone", "contiguous", "diagonal", "expand", "expand_as", "flatten",
    "flip", "gather", "index_select", "movedim", "narrow", "permute", "repeat", "repeat_interleave", "reshape", "roll",
    "select", "split", "squeeze", "swapaxes", "t", "take_along_dim", "tensor_split", "tile", "transpose", "unbind",
    "unflatten", "unfold", "unsqueeze", "view", "view_as",
}  # fmt: skip
"""Operations that change the order or the shape of their inputs."""
CAST = {"double", "dropout", "float", "to", "type", "type_as"}
SUMMED = {"adaptive_avg_pool1d", "adaptive_avg_pool2d", "cumsum", "mean", "neg", "__neg__", "negative", "sum"}
GRADIENT = RESHAPED | CAST | SUMMED
"""Linear operations without a constant, whose rule is the gradient."""
AFFINE = {
    "__add__", "__iadd__", "__isub__", "__radd__", "__rsub__", "__sub__", "add", "add_", "cat", "concat", "masked_fill", "pad",
    "rsub", "stack", "sub", "sub_", "subtract", "where",
}  # fmt: skip
JOINED = {"cat", "concat", "stack"}
MULTIPLIED = {"__imul__", "__mul__", "__rmul__", "mul", "mul_", "multiply"}
DIVIDED = {"__div__", "__itruediv__", "__truediv__", "div", "div_", "divide", "true_divide"}
MATRICES = {"__matmul__", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "einsum", "linear", "matmul", "mm"}
ACTIVATIONS = {
    "elu", "gelu", "hardswish", "leaky_relu", "mish", "relu", "relu_", "relu6", "selu", "sigmoid", "silu", "softplus", "tanh",
}  # fmt: skip
STATISTICS = {"rsqrt", "sqrt"}
"""Parts of norms in plain code. They are constants, as in the rule for norms."""
ELEMENTWISE_FILES = ("transformers.activations", "torch.nn.modules.activation")
NO_ELEMENTS = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU)
"""Modules in these files that are not elementwise."""


class RelevanceGraph(TorchFunctionMode):
    """Build a graph in which activation times gradient is relevance.

    Its inputs are embeddings and floating-point inputs that require gradients, such as pixels. Tables with one number per
    head, such as T5's position biases, count as constants.

    Attributes:
        rules: The rules, with the absorbed relevance.
        inputs: The embeddings.
    """

    def __init__(self, heads: Collection[int] = (), epsilon: float = EPSILON) -> None:
        super().__init__()
        self.rules = Rules(epsilon)
        self.inputs: list[Tensor] = []
        self._heads = heads
        self._elementwise: list[Tensor] = []  # inputs of the activation modules that are running

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self._elementwise or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if name == "embedding":
            return self._looked_up(func(*args, **kwargs))
        if not _variables(args, kwargs):
            return func(*args, **kwargs)
        return self._by_rule(name, func, args, kwargs)

    def before_activation(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Start an activation module, whose inner operations follow no rule."""
        self._elementwise.append(args[0])

    def after_activation(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Apply the identity rule to an activation module as a whole."""
        inputs = self._elementwise.pop()
        return self.rules.activation(inputs, output) if inputs.requires_grad and torch.is_grad_enabled() else output

    def _looked_up(self, found: Tensor) -> Tensor:
        if found.shape[-1] in self._heads:
            return found
        leaf = found.detach().requires_grad_()
        self.inputs.append(leaf)
        return leaf.view_as(leaf)  # a model may write into its embeddings

    def _by_rule(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rules, variables = self.rules, _variables(args, kwargs)
        if name in AFFINE:
            constant = _at_zero(name, func, args, kwargs)
            return rules.affine(func(*args, **kwargs), constant)
        if name in MATRICES:
            constant = _at_zero(name, func, args, kwargs) if name in ("addmm", "baddbmm", "conv1d", "conv2d") else None
            if name == "linear":
                constant = kwargs.get("bias", args[2] if len(args) > 2 else None)
            return rules.linear(func(*args, **kwargs), constant, factors=len(variables))
        if name in MULTIPLIED and len(variables) == 2:
            return rules.product(func(*args, **kwargs))
        if name == "softmax":
            return self._softmax(func, args, kwargs)
        if name == "layer_norm":
            return rules.layer_norm(*args, **kwargs)
        if name == "rms_norm":
            return rules.rms_norm(*args, **kwargs)
        if name in ACTIVATIONS:
            with torch.no_grad():
                output = func(args[0].clone(), *args[1:], **{**kwargs, "inplace": False} if "inplace" in kwargs else kwargs)
            return rules.activation(args[0], output)
        output = func(*args, **kwargs)
        if name in STATISTICS:
            return output.detach()
        by_constant = len(variables) == 1 and (name in MULTIPLIED or (name in DIVIDED and variables[0] is args[0]))
        return output if name in GRADIENT or by_constant else _without_rule(name, output)

    def _softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        inputs, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(dim, int):
            raise GateError("a softmax without a dimension has no relevance rule; use another model")
        return self.rules.softmax(inputs, func(*args, **kwargs), dim)


@contextmanager
def following_rules(model: nn.Module, sites: Sequence[AttentionSite], *, epsilon: float = EPSILON) -> Iterator[RelevanceGraph]:
    """Run a model with relevance as gradients: in evaluation mode, uncompiled, with eager attention and frozen parameters. A
    backward pass raises an error where relevance reaches an operation without a rule."""
    graph = RelevanceGraph({site.heads for site in sites}, epsilon)
    with ExitStack() as stack:
        stack.enter_context(observing(model, sites))
        stack.enter_context(implementation(model, "eager"))  # type: ignore[arg-type]
        stack.enter_context(frozen(model, *gates_on(sites)))
        for module in model.modules():
            if type(module).__module__ in ELEMENTWISE_FILES and not isinstance(module, NO_ELEMENTS):
                stack.callback(module.register_forward_pre_hook(graph.before_activation).remove)
                stack.callback(module.register_forward_hook(graph.after_activation, prepend=True).remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(graph)
        yield graph


def _variables(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among arguments that depend on the inputs."""
    return [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, Tensor) and part.requires_grad]


def _at_zero(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
    """Return an affine operation's result for inputs of 0; None if it has no constants."""
    numbers = () if name in JOINED else (int, float)  # a number in these is an axis

    def is_constant(part: Any) -> bool:
        return isinstance(part, numbers) or (isinstance(part, Tensor) and part.is_floating_point() and not part.requires_grad)

    if not any(is_constant(part) for part in tree_flatten((args, kwargs))[0]):
        return None
    with torch.no_grad():
        zeros = tree_map(lambda part: torch.zeros_like(part) if _variables(part, None) else part, (args, kwargs))
        found: Tensor = func(*zeros[0], **zeros[1])
    return found


def _without_rule(name: str, output: Any) -> Any:
    """Make an operation's output raise an error if relevance reaches it."""

    def refuse(gradient: Tensor) -> None:
        if bool((gradient != 0).any()):
            raise GateError(f"relevance reaches the operation {name!r}, which has no rule; use a model of another family")

    for part in tree_flatten(output)[0]:
        if isinstance(part, Tensor) and part.requires_grad:
            part.register_hook(refuse)
    return output
