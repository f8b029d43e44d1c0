"""Intercept the attention function, the attention matrices and the head outputs of a running model."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from gates.attention.layouts import DIFFERENCE, SPARSE
from gates.attention.modes import evaluating
from gates.attention.output_hooks import gates_on
from gates.attention.own_method import OwnMethod, calling_outputs, use_method
from gates.attention.sites import AttentionSite

INTERFACE, DIRECT = "ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"
ATTENTION_NAME = "_attn_implementation"


def global_names(core: nn.Module) -> tuple[str, ...]:
    """Return the global names that a module's forward refers to."""
    return inspect.unwrap(type(core).forward).__code__.co_names


def sparse_site(sites: tuple[AttentionSite, ...]) -> AttentionSite | None:
    """Return the first site whose attention matrix is not queries by keys, such as block-sparse attention; else None."""
    return next((site for site in sites if site.gate_only in (SPARSE, DIFFERENCE)), None)


def uses_interface(site: AttentionSite) -> bool:
    """Return whether a site's attention goes through Transformers' attention interface."""
    return INTERFACE in global_names(site.core)


@contextmanager
def observing(model: nn.Module, sites: Sequence[AttentionSite]) -> Iterator[None]:
    """Put a model and its gates into evaluation mode, not compiled. Other threads that observe the model wait."""
    with alone(model), evaluating(model, *gates_on(sites)), uncompiled():
        yield


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Prevent other threads from observing a model. Blocks of one thread may be nested."""
    with _LOCK:
        lock = _LOCKS.setdefault(model, threading.RLock())
    with lock:
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models eagerly.

    PyTorch has one compiler stance per process. The last block to end, in any thread, restores the stance from before the
    first block.
    """
    own = object()
    try:
        with _LOCK:
            if not _STANCES:
                _STANCES.append(torch.compiler.set_stance("force_eager"))
            _STANCES.append(own)
        yield
    finally:
        with _LOCK:
            _STANCES[1:] = [one for one in _STANCES[1:] if one is not own]
            if len(_STANCES) == 1:
                _STANCES[0].__exit__(None, None, None)
                _STANCES.clear()


_LOCK = threading.Lock()
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""For each observed model, the lock that its observers hold."""
_STANCES: list[Any] = []
"""The compiler stance to leave at the end, followed by one object for each open block."""


@contextmanager
def attention_calls(sites: Sequence[AttentionSite], around: Callable[..., Any]) -> Iterator[None]:
    """Send every call of Transformers' attention interface by these sites through ``around``.

    Models choose masks and sparse patterns by the name of the implementation, so the name stays. The site's module gets its
    own forward pass: that of its class, with an interface that wraps the attention function. Other models are not affected.

    Args:
        around: A function of the implementation's name, the model's attention function and the arguments of its call:
            ``(module, query, key, value, attention_mask, **kwargs)``, each ``[batch, heads, tokens, head_dim]``. It returns
            the results of the attention function: ``[batch, query, heads, head_dim]`` and attention weights or None.
    """
    with ExitStack() as stack:
        for core in {id(site.core): site.core for site in sites}.values():
            # Accelerate wraps this forward pass in its own and keeps the wrapped one under another name.
            name = "_old_forward" if "_old_forward" in vars(core) else "forward"
            stack.callback(use_method(core, name, _with_interface, user=partial(around)).remove)
        yield


class _Interface:
    """Wrap the functions that one module looks up in Transformers' attention interface."""

    def __init__(self, interface: Any, arounds: Sequence[Callable[..., Any]]) -> None:
        self.interface = interface
        self.arounds = arounds

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return self._wrapped(name, self.interface.get_interface(name, default))

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._wrapped(name, self.interface[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.interface, name)

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        for around in self.arounds:
            function = partial(around, name, function)
        return function


def _with_interface(own: OwnMethod, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward pass with the functions of all users around its attention, the latest outermost."""
    return _wrap_interface(own.replaced(), tuple(own.users))(*args, **kwargs)


def _wrap_interface(function: Any, arounds: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Return a copy of a function with another attention interface among its global names."""
    if isinstance(function, partial):
        return partial(_wrap_interface(function.func, arounds), *function.args, **function.keywords)
    if isinstance(function, MethodType):
        return MethodType(_wrap_interface(function.__func__, arounds), function.__self__)
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType) or INTERFACE not in inner.__globals__:
        return function
    names = {**inner.__globals__, INTERFACE: _Interface(inner.__globals__[INTERFACE], arounds)}
    same = FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
    same.__kwdefaults__ = inner.__kwdefaults__
    return same


def implementation_of(model: PreTrainedModel, core: nn.Module) -> str:
    """Return the name of the attention implementation of a site's core."""
    return str(getattr(getattr(core, "config", model.config), "_attn_implementation", "eager"))


@contextmanager
def readable_implementation(model: PreTrainedModel) -> Iterator[None]:
    """Switch parts of the model with another implementation, such as flash attention, to PyTorch's or eager attention."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not any(map(_is_unreadable, parts)):
        yield
        return
    with _own_configs(model):
        for part in parts:
            if _is_unreadable(part):
                part.config._attn_implementation = "sdpa" if part._supports_sdpa else "eager"
        yield


def _is_unreadable(part: PreTrainedModel) -> bool:
    return part.config._attn_implementation not in ("eager", "sdpa", None)


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Set the attention implementation of all parts of one model."""
    with _own_configs(model) as configs:
        for config in configs:
            config._attn_implementation = name
        yield


@contextmanager
def _own_configs(model: nn.Module) -> Iterator[list[Any]]:
    """Give the modules of a model copies of their configs, since another model may share the originals."""
    before = [(part, vars(part)["config"]) for part in model.modules() if hasattr(vars(part).get("config"), ATTENTION_NAME)]
    known: dict[int, Any] = {}  # configs that are one object, or parts of each other, stay so
    copies = [copy.deepcopy(config, known) for _, config in before]
    try:
        for (part, _), own in zip(before, copies, strict=True):
            vars(part)["config"] = own
        yield list({id(own): own for own in copies}.values())
    finally:
        for part, config in before:
            vars(part)["config"] = config


@contextmanager
def attention_matrices(
    model: PreTrainedModel, sites: tuple[AttentionSite, ...], take: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Run ``model`` with explicit attention matrices and pass each one to ``take``.

    Args:
        model: The model. It and its gates are in evaluation mode meanwhile, since dropout would change the matrices.
        take: A function of the index of a site and its weights ``[batch, heads, query, key]``, in the graph of the forward
            pass. It is called each time the site runs.
    """
    with ExitStack() as stack:
        stack.enter_context(observing(model, sites))
        stack.enter_context(implementation(model, "eager"))
        for position, site in enumerate(sites):
            stack.callback(request_matrix(site.core).remove)
            handle = site.core.register_forward_hook(partial(_take_matrix, take, position, site.heads))
            stack.callback(handle.remove)
        yield


def request_matrix(core: nn.Module) -> RemovableHandle:
    """Pass ``output_attentions`` to the core of a site, if its forward has this argument, until the handle is removed."""
    return core.register_forward_pre_hook(_request_matrix, with_kwargs=True)


def _request_matrix(core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    names = list(inspect.signature(type(core).forward).parameters)[1:]
    if "output_attentions" not in names:
        return None
    at = names.index("output_attentions")
    if at < len(args):
        return (*args[:at], True, *args[at + 1 :]), kwargs
    return args, {**kwargs, "output_attentions": True}


def _take_matrix(
    take: Callable[[int, Tensor], None], position: int, heads: int, core: nn.Module, args: Any, output: Any
) -> None:
    matrix = matrix_among(output, heads)
    if matrix is not None:
        take(position, matrix)


def matrix_among(output: Any, heads: int) -> Tensor | None:
    """Return the attention weights ``[batch, heads, query, key]`` among a module's outputs; None if there are none."""
    parts = output[1:] if isinstance(output, tuple) else ()
    found = [part for part in parts if isinstance(part, Tensor) and part.dim() == 4 and part.shape[1] == heads]
    return found[-1] if found else None  # a position bias (T5) comes before the weights


@contextmanager
def observe_head_outputs(
    model: nn.Module, sites: Sequence[AttentionSite], take: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Call ``take`` with the index of a site and its heads before any gate, ``[..., heads * head_dim]``. The model and its
    gates are in evaluation mode meanwhile."""

    def take_input(position: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        take(position, args[0])

    with ExitStack() as stack:
        stack.enter_context(observing(model, sites))
        stack.enter_context(calling_outputs(model))
        for position, site in enumerate(sites):
            stack.callback(site.output.register_forward_pre_hook(partial(take_input, position), prepend=True).remove)
        yield
