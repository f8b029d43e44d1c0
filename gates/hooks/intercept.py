"""Reach into a running model: its attention function, its attention matrices, what its heads give to the output projection."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from gates.hooks.evaluating import evaluating
from gates.hooks.functional import call_output
from gates.hooks.output_hooks import gates_on
from gates.sites import AttentionSite
from gates.surgery.known_classes import DIFFERENCE
from gates.surgery.layouts import SPARSE

INTERFACE, DIRECT = "ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"


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
    """A model at rest for the length of a ``with`` block: in evaluation mode with the gates on it, and not compiled."""
    with evaluating(model, *gates_on(sites)), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def attention_calls(around: Callable[..., Any]) -> Iterator[None]:
    """Send every call of Transformers' attention interface through ``around``; the attention implementation stays.

    Models choose masks, and some of them sparse patterns, by the name of their implementation. So the name is left as it is,
    and the function that a model looks up by it is wrapped.

    Args:
        around: function called with the implementation's name, the model's attention function and the arguments of its call:
            ``(module, query, key, value, attention_mask, **kwargs)``, each ``[batch, heads, tokens, head_dim]``. It returns
            what the attention function returns: ``[batch, query, heads, head_dim]`` and attention weights or None.
    """
    look_up = AttentionInterface.get_interface

    def wrapped(interface: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(around, name, look_up(interface, name, default))

    AttentionInterface.get_interface = wrapped  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        AttentionInterface.get_interface = look_up  # type: ignore[method-assign]


def implementation_of(model: PreTrainedModel, core: nn.Module) -> str:
    """The name of the attention implementation that a site's core goes by."""
    return str(getattr(getattr(core, "config", model.config), "_attn_implementation", "eager"))


@contextmanager
def readable_implementation(model: PreTrainedModel) -> Iterator[None]:
    """Eager attention or PyTorch's for a while, in those parts of the model that run on any other, such as flash attention."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    before = [
        (part.config, name) for part in parts if (name := part.config._attn_implementation) not in ("eager", "sdpa", None)
    ]
    try:
        for part in parts:
            if part.config._attn_implementation not in ("eager", "sdpa", None):
                part.config._attn_implementation = "sdpa" if part._supports_sdpa else "eager"
        yield
    finally:
        for config, name in reversed(before):
            config._attn_implementation = name


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Another attention implementation by its name for a while, in the whole model."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


@contextmanager
def attention_matrices(
    model: PreTrainedModel, sites: tuple[AttentionSite, ...], take: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Run ``model`` with explicit attention matrices inside the block and hand out each one.

    Args:
        model: model, in evaluation mode meanwhile, since dropout would change the matrices, and so are gates on it.
        sites: attention modules of the model.
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
    """Hand out what the heads of each site give to its output projection, before any gate.

    Args:
        model: model, in evaluation mode meanwhile, and so are gates on it.
        sites: attention modules of the model.
        take: function called with the index of a site and its concatenated heads ``[..., heads * head_dim]``.
    """

    def seen(position: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        take(position, args[0])

    with ExitStack() as stack:
        stack.enter_context(observing(model, sites))
        for position, site in enumerate(sites):
            for handle in call_output(site.module):
                stack.callback(handle.remove)
            stack.callback(site.output.register_forward_pre_hook(partial(seen, position), prepend=True).remove)
        yield
