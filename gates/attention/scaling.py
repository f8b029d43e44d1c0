"""Multiply the heads of a site by their gates, without storing more activations than the plain model.

The output projection stores its input for the gradient of its weight. With the product of heads and gates as input, it would
store the product in addition to the heads, which attention stores anyway. So a plain linear layer in training gets
:class:`GatedHeads`, and its call becomes one function that stores the heads only. With one draw for the batch, that function
scales the columns of the weight, which is small compared with the activations. Elsewhere heads are multiplied directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function
from torch.nn.functional import linear
from torch.nn.modules import module as hooks_of_all_modules


def spread_to_columns(
    values: Tensor,
    sizes: Sequence[int],
    columns: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return values per gate ``[..., gates]`` as values of the columns of all sites' heads, ``[..., columns of all sites]``.

    Args:
        sizes: The number of gates of each site.
        columns: The number of columns of the heads of each site.
        rows: The sizes of the axes before the last in the result; None for those of the values.
        dtype: The dtype of the result; None for that of the values.
    """
    rows = values.shape[:-1] if rows is None else rows

    def repeated(part: Tensor, width: int) -> Tensor:
        return part.reshape(*rows, -1, 1).expand(*rows, -1, width).to(dtype or values.dtype).flatten(-2)

    widths = [count // size for count, size in zip(columns, sizes, strict=True)]
    if len(set(widths)) == 1:  # one operation for all sites
        return repeated(values, widths[0])
    return torch.cat([repeated(*one) for one in zip(values.split(list(sizes), dim=-1), widths, strict=True)], dim=-1)


def scale_heads(heads: Tensor, values: Tensor) -> Tensor:
    """Multiply heads ``[..., heads * head_dim]`` by values of columns, heads or groups of adjacent heads, ``[..., gates]``."""
    if values.shape[-1] == heads.shape[-1]:
        return heads * values.to(heads)
    per_head = heads.unflatten(-1, (values.shape[-1], -1))
    return (per_head * values.to(heads).unsqueeze(-1)).flatten(-2)


def multiplies_in_projection(projection: nn.Module, heads: Tensor) -> bool:
    """Return whether the gates of heads may be multiplied within their output projection.

    It must be a plain linear layer in training whose input goes from the gates' own hook to the layer's own ``forward``.
    """
    return (
        type(projection) is nn.Linear
        and type(projection.weight) is nn.Parameter
        and type(heads) is Tensor
        and projection.weight.requires_grad
        and projection.weight.device == heads.device
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and "forward" not in vars(projection)
        and len(projection._forward_pre_hooks) == 1
        and not (projection._backward_hooks or projection._backward_pre_hooks)
        and not (hooks_of_all_modules._global_backward_hooks or hooks_of_all_modules._global_backward_pre_hooks)
    )


class GatedHeads(Tensor):
    """Heads ``[..., heads * head_dim]`` that are yet to be multiplied by gates.

    ``torch.nn.functional.linear`` multiplies them as it projects them. Any other operation gets the product. The tensor has no
    memory of its own, so code that goes round PyTorch's functions fails and cannot compute with heads without gates.

    Args:
        heads: The heads.
        columns: The gate of each column, ``[heads * head_dim]``, or broadcastable to the heads.
    """

    heads: Tensor
    columns: Tensor

    @staticmethod
    def __new__(cls, heads: Tensor, columns: Tensor) -> GatedHeads:
        gated: GatedHeads = Tensor._make_wrapper_subclass(cls, heads.shape, dtype=heads.dtype, device=heads.device)
        vars(gated).update(heads=heads, columns=columns)
        return gated

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is linear and type(args[0]) is cls and len(args) == 3 and not named:
            return gated_linear(vars(args[0])["heads"], vars(args[0])["columns"], args[1], args[2])
        args, named = torch.utils._pytree.tree_map_only(cls, _multiplied, (tuple(args), dict(named)))
        return func(*args, **named)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} reads heads that are not multiplied by their gates yet; add 0 to the tensor first")


def _multiplied(gated: GatedHeads) -> Tensor:
    known = vars(gated)
    if "product" not in known:
        known["product"] = scale_heads(known["heads"], known["columns"])
    product: Tensor = known["product"]
    return product


def gated_linear(heads: Tensor, columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``linear(heads * columns, weight, bias)``, under autocast in its dtype.

    >>> heads, columns, weight = torch.ones(2, 3, 4), torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.ones(5, 4)
    >>> gated_linear(heads, columns, weight, None).shape
    torch.Size([2, 3, 5])
    """
    device = heads.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and heads.dtype != torch.float64:
        heads = heads.to(torch.get_autocast_dtype(device))
    if columns.dim() == 1:
        rows, _ = _ByWeight.apply(heads.flatten(0, -2), columns.to(weight), weight, bias)
        projected: Tensor = rows.view(*heads.shape[:-1], -1)
        return projected
    bias = None if bias is None else bias.to(heads.dtype)
    return _ByProduct.apply(heads, columns.to(heads), weight.to(heads.dtype), bias)


class _Positional(Function):
    """Apply a function whose arguments are all given in their order: PyTorch binds them by name, which takes as long as four
    small operations."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(Function, cls).apply(*args)  # type: ignore[misc]


class _ByWeight(_Positional):
    """Scale the columns of the weight by gates that all rows share.

    The scaled weight is also returned, so that its copy in a lower precision can be kept: the plain layer keeps one too. In the
    same precision it is computed a second time in the backward pass.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, columns: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        scaled = (weight * columns).to(rows.dtype)
        return linear(rows, scaled, None if bias is None else bias.to(rows.dtype)), scaled

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        rows, columns, weight, bias = inputs
        scaled = output[1]
        ctx.mark_non_differentiable(scaled)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, columns, weight, None if scaled.dtype == weight.dtype else scaled)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        rows, columns, weight, scaled = ctx.saved_tensors
        needs_rows, needs_columns, needs_weight, needs_bias = ctx.needs_input_grad
        of_scaled = grad.t() @ rows if needs_columns or needs_weight else None
        recomputes = needs_rows and (scaled is None or torch.is_grad_enabled())  # a second derivative needs its graph
        again, of_weight, of_product = _products(
            (weight, columns) if recomputes else None,
            (of_scaled, columns) if needs_weight else None,
            (of_scaled, weight) if needs_columns else None,
        )
        of_rows = grad @ (scaled if again is None else again.to(rows.dtype)) if needs_rows else None
        of_columns = None if of_product is None else of_product.sum(0)
        of_bias = grad.sum(0, dtype=ctx.bias_dtype) if needs_bias else None
        return of_rows, of_columns, of_weight, of_bias


class _ByProduct(_Positional):
    """Multiply heads by gates that differ between rows. The product is computed a second time in the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(heads: Tensor, columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(heads * columns, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        heads, columns, weight = ctx.saved_tensors
        needs_heads, needs_columns, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        of_product = (rows @ weight).reshape(heads.shape) if needs_heads or needs_columns else None
        of_heads, of_columns, product = _products(
            (of_product, columns) if needs_heads else None,
            (of_product, heads) if needs_columns else None,
            (heads, columns) if needs_weight else None,
        )
        if of_columns is not None:
            of_columns = of_columns.sum_to_size(columns.shape)
        of_weight = None if product is None else rows.t() @ product.flatten(0, -2)
        return of_heads, of_columns, of_weight, rows.sum(0) if needs_bias else None


def _products(*pairs: tuple[Any, Tensor] | None) -> list[Tensor | None]:
    """Multiply pairs of tensors, in one operation where ``torch.func`` does not transform them; None stays None."""
    given = [pair for pair in pairs if pair is not None]
    if not given or any(is_functorch_wrapped_tensor(tensor) for pair in given for tensor in pair):
        return [None if pair is None else pair[0] * pair[1] for pair in pairs]
    found = iter(torch._foreach_mul([one for one, _ in given], [other for _, other in given]))
    return [None if pair is None else next(found) for pair in pairs]
