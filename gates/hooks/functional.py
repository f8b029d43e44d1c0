"""Attention that hands its output projection's weight to a function of PyTorch, and does not call the projection itself.

``nn.MultiheadAttention`` and WavLM's attention do all their work in ``torch.nn.functional.multi_head_attention_forward``. A
hook on their output projection would never be called. So for the length of their forward pass that function is given the
identity in the place of this weight, which changes no bit of the heads, and the projection is called on what comes out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FUNCTIONAL_CLASSES = ("MultiheadAttention", "WavLMAttention")
"""Classes whose forward pass is that function, with an output projection ``out_proj``."""
_RUNNING: list[tuple[nn.Module, bool]] = []
"""Modules whose forward pass is under way, and whether PyTorch's fast path, which has no heads to show, was allowed before."""


def is_functional(module: nn.Module) -> bool:
    """Whether an attention module leaves its output projection to a function, and has not been given a forward of its own."""
    return type(module).__name__ in FUNCTIONAL_CLASSES and "forward" not in vars(module)


def call_output(module: nn.Module) -> list[Any]:
    """Have an attention module call its output projection as a module; does nothing for modules that do so anyway.

    Returns:
        Handles whose ``remove`` ends it.
    """
    if not is_functional(module):
        return []
    before = module.register_forward_pre_hook(lambda own, _: _enter(own), prepend=True)
    after = module.register_forward_hook(lambda own, *_: _leave(own), always_call=True)
    return [before, after]


@contextmanager
def calling_outputs(module: nn.Module) -> Iterator[None]:
    """The same for the attention modules in a module, and for itself when its ``forward`` is called without its hooks."""
    with ExitStack() as stack:
        for part in module.modules():
            if part is not module:
                for handle in call_output(part):
                    stack.callback(handle.remove)
        if is_functional(module):
            _enter(module)
            stack.callback(_leave, module)
        yield


def _enter(module: nn.Module) -> None:
    _RUNNING.append((module, torch.backends.mha.get_fastpath_enabled()))
    torch.backends.mha.set_fastpath_enabled(False)
    if functional.multi_head_attention_forward is not _through_projection:
        functional.multi_head_attention_forward = _through_projection


def _leave(module: nn.Module) -> None:
    if _RUNNING and _RUNNING[-1][0] is module:
        torch.backends.mha.set_fastpath_enabled(_RUNNING.pop()[1])
    if not _RUNNING:
        functional.multi_head_attention_forward = _ORIGINAL


_ORIGINAL: Callable[..., tuple[Tensor, Tensor | None]] = functional.multi_head_attention_forward
_SIGNATURE = inspect.signature(_ORIGINAL)


def _through_projection(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``multi_head_attention_forward`` with the running module's output projection called as a module."""
    given = _SIGNATURE.bind(*args, **kwargs)
    weight = given.arguments["out_proj_weight"]
    width = weight.shape[1]
    given.arguments["out_proj_weight"] = torch.eye(width, dtype=weight.dtype, device=weight.device)
    given.arguments["out_proj_bias"] = None
    heads, weights = _ORIGINAL(*given.args, **given.kwargs)
    return _RUNNING[-1][0].out_proj(heads), weights  # type: ignore[operator]
