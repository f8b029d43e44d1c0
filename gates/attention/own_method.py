"""Replace a method of a single module until the last user of the replacement is removed.

Replacing a function of a library would affect every thread and every model, and an interrupt could leave it in place. An
attribute of one module affects only the calls of that module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_LOCK = threading.Lock()


class OwnMethod:
    """Replace a method of one module for several users. ``function`` gets this object and the arguments of the method."""

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self.module = module
        self.name = name
        self.function = function
        self.before = vars(module).get(name)  # an earlier replacement, such as Accelerate's
        self.users: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)

    def replaced(self) -> Callable[..., Any]:
        """Return the method that this one replaces."""
        return getattr(type(self.module), self.name).__get__(self.module) if self.before is None else self.before


class Use:
    """Register one user of a replaced method."""

    def __init__(self, own: OwnMethod, user: Any) -> None:
        self.own = own
        self.user = user

    def remove(self) -> None:
        """End this use. After the last one, the module calls the method of its class again."""
        own, states = self.own, vars(self.own.module)
        with _LOCK:
            own.users[:] = [user for user in own.users if user is not self.user]
            while isinstance(own, OwnMethod) and not own.users and states.get(own.name) is own:
                if own.before is None:
                    del states[own.name]
                    return
                own = states[own.name] = own.before  # an earlier replacement, which may have no users left


def use_method(module: nn.Module, name: str, function: Callable[..., Any], user: Any) -> Use:
    """Make a module call a function instead of a method until :meth:`Use.remove`. The first argument of the function is the
    :class:`OwnMethod`, whose ``users`` contain ``user``."""
    with _LOCK:
        own = vars(module).get(name)
        if not isinstance(own, OwnMethod) or own.function is not function:
            vars(module)[name] = own = OwnMethod(module, name, function)
        own.users.append(user)
    return Use(own, user)


# ``nn.MultiheadAttention`` and WavLM's attention do all their work in ``torch.nn.functional.multi_head_attention_forward``, and
# pass it the weight of the output projection. A hook on the projection would never be called. The methods below pass the
# identity instead, which changes no bit of the heads, and call the projection on the result.


def call_output(module: nn.Module) -> list[Use]:
    """Make an attention module call its output projection as a module until the handles are removed. Modules that do so
    anyway get no handle."""
    name, function = METHODS.get(type(module).__name__, ("", _multihead_attention))
    own = vars(module).get(name)
    if not name or not (own is None or isinstance(own, OwnMethod)):
        return []
    return [use_method(module, name, function, user=object())]


@contextmanager
def calling_outputs(module: nn.Module) -> Iterator[None]:
    """Make all attention in a module call its output projections as modules."""
    with ExitStack() as stack:
        for part in module.modules():
            for handle in call_output(part):
                stack.callback(handle.remove)
        yield


def _multihead_attention(
    own: OwnMethod,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run the forward pass of ``nn.MultiheadAttention`` without its fast path, which does not compute separate heads."""
    module: Any = own.module
    turned = module.batch_first and query.dim() == 3
    if turned:  # one tensor for several inputs stays one, so that the same kernels run
        first, second, third = query, key, value
        query = first.transpose(0, 1)
        key = query if second is first else second.transpose(0, 1)
        value = key if third is second else third.transpose(0, 1)
    separate: dict[str, Any] = {}
    if not module._qkv_same_embed_dim:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        separate = {"use_separate_proj_weight": True, **{name: getattr(module, name) for name in names}}
    output, weights = _projected(
        module,
        (query, key, value),
        (module.in_proj_weight, module.in_proj_bias, module.bias_k, module.bias_v, module.add_zero_attn),
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
        **separate,
    )
    return output.transpose(0, 1) if turned else output, weights


def _wavlm_attention(
    own: OwnMethod,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    gated_position_bias: Tensor,
    output_attentions: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Run the forward pass of ``WavLMAttention``, which has a projection each for queries, keys and values."""
    module: Any = own.module
    states = hidden_states.transpose(0, 1)
    output, weights = _projected(
        module,
        (states, states, states),
        (states.new_empty(0), torch.cat([getattr(module, f"{name}_proj").bias for name in "qkv"]), None, None, False),
        key_padding_mask=None if attention_mask is None else attention_mask.ne(1),
        need_weights=output_attentions,
        attn_mask=gated_position_bias,
        use_separate_proj_weight=True,
        **{f"{name}_proj_weight": getattr(module, f"{name}_proj").weight for name in "qkv"},
    )
    if weights is not None:  # the mean over heads, repeated for each head
        weights = weights[:, None].expand(-1, module.num_heads, -1, -1)
    return output.transpose(0, 1), weights


def _projected(module: Any, inputs: tuple[Tensor, ...], weights: tuple[Any, ...], **more: Any) -> tuple[Tensor, Tensor | None]:
    """Call PyTorch's function with the identity as the output projection, then the projection itself."""
    identity = torch.eye(module.embed_dim, dtype=inputs[0].dtype, device=inputs[0].device)
    sizes = (module.embed_dim, module.num_heads)
    attention: Callable[..., tuple[Tensor, Tensor | None]] = functional.multi_head_attention_forward
    heads, matrix = attention(*inputs, *sizes, *weights, module.dropout, identity, None, training=module.training, **more)
    return module.out_proj(heads), matrix


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "MultiheadAttention": ("forward", _multihead_attention),
    "WavLMAttention": ("torch_multi_head_self_attention", _wavlm_attention),
}
"""For each class of such attention, the method that calls the function of PyTorch, and its replacement."""
