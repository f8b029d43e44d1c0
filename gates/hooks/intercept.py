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
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gates.hooks.evaluating import evaluating
from gates.hooks.output_hooks import gates_on
from gates.sites import AttentionSite

OBSERVER = "head_gates_observer"
INTERFACE, DIRECT = "ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"


def global_names(core: nn.Module) -> tuple[str, ...]:
    """The global names that a module's forward refers to."""
    return inspect.unwrap(type(core).forward).__code__.co_names


def sparse_site(sites: tuple[AttentionSite, ...]) -> AttentionSite | None:
    """The first site with block-sparse attention, whose matrix is not one of queries by keys; None if there is none."""
    return next((site for site in sites if site.gate_only and INTERFACE not in global_names(site.core)), None)


def uses_interface(site: AttentionSite) -> bool:
    """Whether a site's attention goes through Transformers' attention interface."""
    return INTERFACE in global_names(site.core)


@contextmanager
def observing(model: nn.Module, sites: Sequence[AttentionSite]) -> Iterator[None]:
    """A model at rest for the length of a ``with`` block: in evaluation mode with the gates on it, and not compiled."""
    with evaluating(model, *gates_on(sites)), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def attention_function(model: PreTrainedModel, function: Callable[..., Any]) -> Iterator[None]:
    """Make ``function`` the model's attention function for a while, with masks as for PyTorch's attention.

    Args:
        model: model whose attention goes through Transformers' attention interface.
        function: function that takes ``(module, query, key, value, attention_mask, **kwargs)``, each ``[batch, heads, tokens,
            head_dim]``, and returns ``[batch, query, heads, head_dim]`` and attention weights or None.
    """
    ALL_ATTENTION_FUNCTIONS.register(OBSERVER, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(OBSERVER, sdpa_mask)
    try:
        with implementation(model, OBSERVER):
            yield
    finally:
        for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            type(interface)._global_mapping.pop(OBSERVER, None)


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
            for handle in (
                site.core.register_forward_pre_hook(_ask_for_matrix, with_kwargs=True),
                site.core.register_forward_hook(partial(_take_matrix, take, position, site.heads)),
            ):
                stack.callback(handle.remove)
        yield


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
    """Find the matrix of weights ``[batch, heads, query, key]`` among a module's outputs."""
    found = [part for part in output[1:] if isinstance(part, Tensor) and part.dim() == 4 and part.shape[1] == heads]
    if found:
        take(position, found[-1])  # a position bias (T5) comes before the weights


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
            stack.callback(site.output.register_forward_pre_hook(partial(seen, position), prepend=True).remove)
        yield
