"""Give one module a function in place of a method of its class, until its last user leaves.

A library can be changed by replacing one of its functions, but then every thread and every other model calls the replacement,
and an interrupt can leave it in place. An attribute of one module concerns the calls of that module alone.
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
    """A module's own method, which several users share.

    Args:
        function: The function that is called with this object and the arguments of the method.
    """

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self.module = module
        self.name = name
        self.function = function
        self.before = vars(module).get(name)  # another method of the module's own, as Accelerate gives it
        self.users: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)

    def replaced(self) -> Callable[..., Any]:
        """Return the method that the module would call otherwise."""
        return getattr(type(self.module), self.name).__get__(self.module) if self.before is None else self.before


class Use:
    """One use of a module's own method."""

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
                own = states[own.name] = own.before  # one below, whose users may have left before


def use_method(module: nn.Module, name: str, function: Callable[..., Any], user: Any) -> Use:
    """Have a module call a function in place of a method, until :meth:`Use.remove`. The function finds each user, an object of
    its own, among the ``users`` of its first argument."""
    with _LOCK:
        own = vars(module).get(name)
        if not isinstance(own, OwnMethod) or own.function is not function:
            vars(module)[name] = own = OwnMethod(module, name, function)
        own.users.append(user)
    return Use(own, user)


# Attention that hands its output projection's weight to a function of PyTorch, and does not call the projection itself.
#
# ``nn.MultiheadAttention`` and WavLM's attention do all their work in ``torch.nn.functional.multi_head_attention_forward``. A
# hook on their output projection would never be called. So such a module gets a method of its own: it gives that function the
# identity in the place of this weight, which changes no bit of the heads, and calls the projection on what comes out.


def call_output(module: nn.Module) -> list[Use]:
    """Have an attention module call its output projection as a module, until the handles are removed; do nothing for modules
    that do so anyway."""
    name, function = METHODS.get(type(module).__name__, ("", _multihead_attention))
    own = vars(module).get(name)
    if not name or not (own is None or isinstance(own, OwnMethod)):
        return []
    return [use_method(module, name, function, user=object())]


@contextmanager
def calling_outputs(module: nn.Module) -> Iterator[None]:
    """Do the same for a module and all attention in it, for the length of a ``with`` block."""
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
    """The forward pass of ``nn.MultiheadAttention``, without its fast path, which has no heads to show."""
    module: Any = own.module
    turned = module.batch_first and query.dim() == 3
    if turned:  # what is one tensor stays one, so that the same kernels run
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
    """The same of ``WavLMAttention``, which has a projection each for queries, keys and values."""
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
    if weights is not None:  # the mean over heads, once for each of them
        weights = weights[:, None].expand(-1, module.num_heads, -1, -1)
    return output.transpose(0, 1), weights


def _projected(module: Any, inputs: tuple[Tensor, ...], weights: tuple[Any, ...], **more: Any) -> tuple[Tensor, Tensor | None]:
    """Call PyTorch's function with the identity for the output projection, and the projection on what it returns."""
    identity = torch.eye(module.embed_dim, dtype=inputs[0].dtype, device=inputs[0].device)
    sizes = (module.embed_dim, module.num_heads)
    attention: Callable[..., tuple[Tensor, Tensor | None]] = functional.multi_head_attention_forward
    heads, matrix = attention(*inputs, *sizes, *weights, module.dropout, identity, None, training=module.training, **more)
    return module.out_proj(heads), matrix


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "MultiheadAttention": ("forward", _multihead_attention),
    "WavLMAttention": ("torch_multi_head_self_attention", _wavlm_attention),
}
"""For each class of such attention, the method that calls the function of PyTorch, and what takes its place."""
