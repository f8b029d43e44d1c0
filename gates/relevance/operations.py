"""Which rule each operation of PyTorch follows, and the graph of a model that follows them.

Operations are told apart by name while the model runs, so that rotary positions, residual streams, masks and gated feed-forward
layers need no table of classes. Activation modules are taken as a whole, by the files that they are from. An operation without
a rule is an error when relevance reaches it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from gates.errors import GateError
from gates.hooks.frozen import frozen
from gates.hooks.intercept import implementation, observing
from gates.hooks.output_hooks import gates_on
from gates.relevance.rules import EPSILON, Rules
from gates.sites import AttentionSite

RESHAPED = {
    "__get__", "__getitem__", "broadcast_to", "chunk", "clone", "contiguous", "diagonal", "expand", "expand_as", "flatten",
    "flip", "gather", "index_select", "movedim", "narrow", "permute", "repeat", "repeat_interleave", "reshape", "roll",
    "select", "split", "squeeze", "swapaxes", "t", "take_along_dim", "tensor_split", "tile", "transpose", "unbind",
    "unflatten", "unfold", "unsqueeze", "view", "view_as",
}  # fmt: skip
"""Their inputs in another order or shape."""
CAST = {"double", "dropout", "float", "to", "type", "type_as"}
SUMMED = {"adaptive_avg_pool1d", "adaptive_avg_pool2d", "cumsum", "mean", "neg", "__neg__", "negative", "sum"}
GRADIENT = RESHAPED | CAST | SUMMED
"""Linear without a constant: the gradient is the rule."""
AFFINE = {
    "__add__", "__iadd__", "__isub__", "__radd__", "__rsub__", "__sub__", "add", "add_", "cat", "concat", "masked_fill", "pad",
    "rsub", "stack", "sub", "sub_", "subtract", "where",
}  # fmt: skip
JOINED = {"cat", "concat", "stack"}
MULTIPLIED = {"__imul__", "__mul__", "__rmul__", "mul", "mul_", "multiply"}
DIVIDED = {"__div__", "__itruediv__", "__truediv__", "div", "div_", "divide", "true_divide"}
MATRICES = {"__matmul__", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "einsum", "linear", "matmul", "mm"}
ACTIVATIONS = {
    "elu",
    "gelu",
    "hardswish",
    "leaky_relu",
    "mish",
    "relu",
    "relu_",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "tanh",
}
STATISTICS = {"rsqrt", "sqrt"}
"""Of norms that are written out: constants, as in the rule for norms."""
ELEMENTWISE_FILES = ("transformers.activations", "torch.nn.modules.activation")
NO_ELEMENTS = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU)
"""Modules in these files that are not elementwise functions."""


class RelevanceGraph(TorchFunctionMode):
    """While it is active, operations make a graph in which activation times gradient is relevance.

    Embeddings that are looked up are its inputs, but for tables with one number for each head: T5's position biases, which
    count as constants. Pixels and other numbers that the model is given are inputs where they require gradients.

    Args:
        heads: numbers of heads that the model's attention has.
        epsilon: of the epsilon rule.

    Attributes:
        rules: with what they absorbed.
        inputs: embeddings that were looked up.
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
        """Hook in front of an activation module: its own operations follow no rule."""
        self._elementwise.append(args[0])

    def after_activation(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Hook behind it: the module follows the identity rule as a whole."""
        inputs = self._elementwise.pop()
        return self.rules.activation(inputs, output) if inputs.requires_grad and torch.is_grad_enabled() else output

    def _looked_up(self, found: Tensor) -> Tensor:
        if found.shape[-1] in self._heads:
            return found
        leaf = found.detach().requires_grad_()
        self.inputs.append(leaf)
        return leaf.view_as(leaf)  # a model may write into what it looked up

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
            return rules.layer_norm(*_bound(_layer_norm, args, kwargs))
        if name == "rms_norm":
            return rules.rms_norm(*_bound(_rms_norm, args, kwargs))
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
    """Run a model with relevance for gradients inside the block: in evaluation mode, uncompiled, with eager attention and with
    parameters that require no gradients.

    Args:
        model: Transformers model.
        sites: attention modules of the model.
        epsilon: of the epsilon rule.

    Raises:
        GateError: in a backward pass, where relevance reaches an operation that has no rule.
    """
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
    """Tensors among arguments that depend on the inputs."""
    return [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, Tensor) and part.requires_grad]


def _at_zero(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
    """What an affine operation gives where all that depends on the inputs is 0; None if nothing else goes into it."""
    numbers = () if name in JOINED else (int, float)  # of those, numbers say along which axis

    def is_constant(part: Any) -> bool:
        return isinstance(part, numbers) or (isinstance(part, Tensor) and part.is_floating_point() and not part.requires_grad)

    if not any(is_constant(part) for part in tree_flatten((args, kwargs))[0]):
        return None
    with torch.no_grad():
        zeros = tree_map(lambda part: torch.zeros_like(part) if _variables(part, None) else part, (args, kwargs))
        found: Tensor = func(*zeros[0], **zeros[1])
    return found


def _without_rule(name: str, output: Any) -> Any:
    """An operation's output that is fine as long as no relevance reaches it."""

    def refuse(gradient: Tensor) -> None:
        if bool((gradient != 0).any()):
            raise GateError(
                f"relevance reaches the operation {name!r}, for which there is no rule; use a model of another family"
            )

    for part in tree_flatten(output)[0]:
        if isinstance(part, Tensor) and part.requires_grad:
            part.register_hook(refuse)
    return output


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Any, ...]:
    return input, len(normalized_shape), weight, bias, eps


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> tuple[Any, ...]:
    return input, len(normalized_shape), weight, torch.finfo(input.dtype).eps if eps is None else eps


def _bound(signature: Callable[..., tuple[Any, ...]], args: Any, kwargs: Any) -> tuple[Any, ...]:
    known = inspect.signature(signature).parameters
    return signature(*args, **{name: value for name, value in kwargs.items() if name in known})
