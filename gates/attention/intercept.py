"""Reach into a running model: its attention function, its attention matrices, what its heads give to the output projection."""

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
from transformers import PreTrainedModel

from gates.attention.layouts import DIFFERENCE, SPARSE
from gates.attention.modes import evaluating
from gates.attention.output_hooks import gates_on
from gates.attention.own_method import OwnMethod, call_output, use_method
from gates.attention.sites import AttentionSite

INTERFACE, DIRECT = "ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"
ATTENTION_NAME = "_attn_implementation"


def global_names(core: nn.Module) -> tuple[str, ...]:
    """The global names that a module's forward refers to."""
    return inspect.unwrap(type(core).forward).__code__.co_names


def sparse_site(sites: tuple[AttentionSite, ...]) -> AttentionSite | None:
    """The first site whose matrix is not one of queries by keys, such as block-sparse attention; None if there is none."""
    return next((site for site in sites if site.gate_only in (SPARSE, DIFFERENCE)), None)


def uses_interface(site: AttentionSite) -> bool:
    """Whether a site's attention goes through Transformers' attention interface."""
    return INTERFACE in global_names(site.core)


@contextmanager
def observing(model: nn.Module, sites: Sequence[AttentionSite]) -> Iterator[None]:
    """A model at rest for the length of a ``with`` block: in evaluation mode with the gates on it, and not compiled.

    Only one thread at a time can have a model in such a block; others wait.
    """
    with alone(model), evaluating(model, *gates_on(sites)), uncompiled():
        yield


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Keep other threads from observing a model, for the length of a ``with`` block, which may contain further ones."""
    with _LOCK:
        lock = _LOCKS.setdefault(model, threading.RLock())
    with lock:
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models as they are written, for the length of a ``with`` block.

    PyTorch has one stance for the whole process. So the last block to end restores the stance that the first one found,
    whichever threads they are in.
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
"""For each model that was observed, the lock that its observers hold."""
_STANCES: list[Any] = []
"""The stance of the compiler while models are observed, which knows the one before, and each block that wants it."""


@contextmanager
def attention_calls(sites: Sequence[AttentionSite], around: Callable[..., Any]) -> Iterator[None]:
    """Send every call of Transformers' attention interface by these sites through ``around``.

    Models choose masks, and some of them sparse patterns, by the name of their implementation. So the name is left as it is,
    and the function that a site looks up by it is wrapped: the site's module gets a forward pass of its own, which is that
    of its class with another interface. Other models, and other threads that run them, keep theirs.

    Args:
        around: The function called with the implementation's name, the model's attention function and the arguments of its
            call: ``(module, query, key, value, attention_mask, **kwargs)``, each ``[batch, heads, tokens, head_dim]``. It
            returns what the attention function returns: ``[batch, query, heads, head_dim]`` and attention weights or None.
    """
    with ExitStack() as stack:
        for core in {id(site.core): site.core for site in sites}.values():
            # Accelerate puts a forward pass around this one, which keeps its place.
            name = "_old_forward" if "_old_forward" in vars(core) else "forward"
            stack.callback(use_method(core, name, _with_interface, user=partial(around)).remove)
        yield


class _Interface:
    """Transformers' attention interface for one module, with further functions around what it looks up."""

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
    """A module's forward pass with the functions of all users around its attention, the latest outermost."""
    return _reading(own.replaced(), tuple(own.users))(*args, **kwargs)


def _reading(function: Any, arounds: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """The same function with another attention interface among its global names."""
    if isinstance(function, partial):
        return partial(_reading(function.func, arounds), *function.args, **function.keywords)
    if isinstance(function, MethodType):
        return MethodType(_reading(function.__func__, arounds), function.__self__)
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType) or INTERFACE not in inner.__globals__:
        return function
    names = {**inner.__globals__, INTERFACE: _Interface(inner.__globals__[INTERFACE], arounds)}
    same = FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
    same.__kwdefaults__ = inner.__kwdefaults__
    return same


def implementation_of(model: PreTrainedModel, core: nn.Module) -> str:
    """The name of the attention implementation that a site's core goes by."""
    return str(getattr(getattr(core, "config", model.config), "_attn_implementation", "eager"))


@contextmanager
def readable_implementation(model: PreTrainedModel) -> Iterator[None]:
    """Eager attention or PyTorch's for a while, in those parts of the model that run on any other, such as flash attention."""
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
    """Another attention implementation by its name for a while, in the whole model and in no other."""
    with _own_configs(model) as configs:
        for config in configs:
            config._attn_implementation = name
        yield


@contextmanager
def _own_configs(model: nn.Module) -> Iterator[list[Any]]:
    """Give the modules of a model copies of their configs for a while: another model may have been built from the same ones."""
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
    """Run ``model`` with explicit attention matrices inside the block and hand out each one.

    Args:
        model: model, in evaluation mode meanwhile, since dropout would change the matrices, and so are gates on it.
        take: function called with the index of a site and its weights ``[batch, heads, query, key]``, in the graph of the
            forward pass, whenever it runs.
    """
    with ExitStack() as stack:
        stack.enter_context(observing(model, sites))
        stack.enter_context(implementation(model, "eager"))
        for position, site in enumerate(sites):
            stack.enter_context(asking_for_matrix(site.core))
            handle = site.core.register_forward_hook(partial(_take_matrix, take, position, site.heads))
            stack.callback(handle.remove)
        yield


@contextmanager
def asking_for_matrix(core: nn.Module) -> Iterator[None]:
    """Ask the core of a site for its attention matrix, where its forward has an argument for that."""
    handle = core.register_forward_pre_hook(_ask_for_matrix, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _ask_for_matrix(core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
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
    """The matrix of weights ``[batch, heads, query, key]`` among a module's outputs; None if there is none."""
    parts = output[1:] if isinstance(output, tuple) else ()
    found = [part for part in parts if isinstance(part, Tensor) and part.dim() == 4 and part.shape[1] == heads]
    return found[-1] if found else None  # a position bias (T5) comes before the weights


@contextmanager
def observe_head_outputs(
    model: nn.Module, sites: Sequence[AttentionSite], take: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Call ``take`` with the index of a site and its heads ``[..., heads * head_dim]``, as they are before any gate. The model
    and the gates on it are in evaluation mode meanwhile."""

    def seen(position: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        take(position, args[0])

    with ExitStack() as stack:
        stack.enter_context(observing(model, sites))
        for position, site in enumerate(sites):
            for handle in call_output(site.module):
                stack.callback(handle.remove)
            stack.callback(site.output.register_forward_pre_hook(partial(seen, position), prepend=True).remove)
        yield
