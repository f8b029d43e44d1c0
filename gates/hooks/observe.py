"""Watch a model's attention while it runs and feed its entropies and confidences to their Metrics.

Where a model hands queries and keys to Transformers' attention interface, they are taken there, and no attention matrix is
stored. Models that call PyTorch's attention themselves (Falcon) are watched there. Models that compute attention on their own
(DeBERTa-v2, BLOOM, GPT-J, XLM, ...) are run with ``output_attentions``, and the measures come from the explicit matrix.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from gates.errors import GateError
from gates.hooks.intercept import (
    DIRECT,
    INTERFACE,
    attention_function,
    attention_matrices,
    global_names,
    implementation,
    observing,
    sparse_site,
)
from gates.scores.attention_metric import AttentionMetric
from gates.scores.entropy import AttentionEntropy
from gates.sites import AttentionSite


def entropy_route(sites: tuple[AttentionSite, ...]) -> Literal["fast", "explicit"]:
    """How the entropy of these sites is found: ``fast`` in memory linear in the sequence, or from ``explicit`` scores.

    Explicit scores are needed where the model adds a bias to them (T5, ALiBi), caps them (Gemma 2), or computes attention on
    its own.
    """
    changed = ("has_relative_attention_bias", "attn_logit_softcapping")
    known = [{INTERFACE, DIRECT} & set(global_names(site.core)) for site in sites]
    slopes = any(getattr(getattr(site.core, "config", None), "alibi", False) for site in sites)
    plain = all(known) and not slopes and not any(getattr(site.core, name, None) for site in sites for name in changed)
    return "fast" if plain else "explicit"


@contextmanager
def observe_attention(
    model: PreTrainedModel,
    sites: tuple[AttentionSite, ...],
    metrics: Sequence[AttentionMetric],
    valid: Mapping[str, Tensor | None],
) -> Iterator[None]:
    """Feed ``metrics`` from every forward pass of ``model`` inside the block; outputs are those in evaluation mode.

    Model and gates are in evaluation mode inside the block, so without dropout and draws, and a compiled model runs uncompiled.

    Queries and keys are taken where the model hands them to its attention function: after rotary embedding and
    scaling, before dropout and before the gates.

    Args:
        model: any model whose attention :func:`gates.sites.find_attention` covers, but block-sparse attention.
        sites: attention modules of the model.
        metrics: Metrics, each of which receives its measure of every site.
        valid: queries that are not padding for each kind, ``[batch, query]``; None if all count.

    Raises:
        GateError: for block-sparse attention, or if the attention of some site was not seen.

    >>> from gates import AttentionConfidence, AttentionEntropy, find_attention
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> sites = find_attention(model)
    >>> entropy, confidence = AttentionEntropy(sites), AttentionConfidence(sites)
    >>> ids, valid = torch.randint(50, (3, 7)), {"encoder": torch.ones(3, 7, dtype=torch.bool)}
    >>> with torch.no_grad(), observe_attention(model, sites, [entropy, confidence], valid):
    ...     _ = model(ids)
    >>> entropy.compute().shape, confidence.compute().shape
    (torch.Size([8]), torch.Size([8]))
    """
    sparse = sparse_site(sites)
    if sparse is not None:
        raise GateError(
            f"the entropy of {type(sparse.core).__name__} is not defined over all keys; leave the entropy rankings out"
        )
    seen: set[int] = set()

    def update(position: int, measure: Measure, visible: Tensor) -> None:
        seen.add(position)
        for metric in metrics:
            metric.update(position, measure(metric), visible, valid.get(sites[position].kind))

    names = [global_names(site.core) for site in sites]
    if all(INTERFACE in of_site for of_site in names):
        watch = _from_interface
    elif all(DIRECT in of_site for of_site in names):
        watch = _from_direct_calls
    else:
        watch = _from_matrices
    with observing(model, sites), watch(model, sites, update):
        yield
    if len(seen) < len(sites):
        missing = next(site for position, site in enumerate(sites) if position not in seen)
        raise GateError(
            f"the attention at {missing.name!r} ({type(missing.core).__name__}) was not seen while its entropy was observed"
        )


@contextmanager
def observe_entropy(
    model: PreTrainedModel, sites: tuple[AttentionSite, ...], metric: AttentionEntropy, valid: Mapping[str, Tensor | None]
) -> Iterator[None]:
    """:func:`observe_attention` for the entropy alone.

    >>> from gates import AttentionEntropy, find_attention
    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4)).eval()
    >>> entropy = AttentionEntropy(sites := find_attention(model))
    >>> with torch.no_grad(), observe_entropy(model, sites, entropy, {"decoder": None}):
    ...     _ = model(torch.randint(50, (3, 7)))
    >>> entropy.compute().shape
    torch.Size([8])
    """
    with observe_attention(model, sites, [metric], valid):
        yield


Measure = Callable[[AttentionMetric], Tensor]
Update = Callable[[int, Measure, Tensor], None]


# -- from the attention interface ------------------------------------------------------------------------------


@contextmanager
def _from_interface(model: PreTrainedModel, sites: tuple[AttentionSite, ...], update: Update) -> Iterator[None]:
    index = {id(site.core): position for position, site in enumerate(sites)}

    def observed(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        position = index.get(id(module))
        bias, visible = _bias(module, query, key, attention_mask, kwargs.get("is_causal"))
        softcap, sink = kwargs.get("softcap"), kwargs.get("s_aux")
        if position is not None:
            scores_bias, position_bias = bias, kwargs.get("position_bias")
            if position_bias is not None and bool(position_bias.any()):
                scores_bias = position_bias.float() if bias is None else bias + position_bias.float()
            measure = _measure(query, key, kwargs.get("scaling"), scores_bias, softcap=softcap, sink=sink)
            update(position, measure, visible if sink is None else visible + 1)
        if softcap is not None or sink is not None:  # SDPA knows neither
            eager = inspect.getmodule(type(module)).eager_attention_forward  # type: ignore[union-attr]
            mask = None if bias is None else bias.to(query.dtype).clamp(min=torch.finfo(query.dtype).min)
            output: tuple[Tensor, Tensor | None] = eager(module, query, key, value, mask, **kwargs)
            return output
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    with attention_function(model, observed):
        yield


def _measure(query: Tensor, key: Tensor, scale: float | None, bias: Tensor | None, **more: Any) -> Measure:
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    repeated = repeat_kv(key, query.shape[1] // key.shape[1])
    return lambda metric: metric.from_scores(query, repeated, scale, bias, **more)


def _bias(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, is_causal: bool | None
) -> tuple[Tensor | None, Tensor]:
    """What is added to the scores, ``-inf`` at invisible keys, and the visible keys ``[batch or 1, 1, query]``."""
    queries, keys = query.shape[2], key.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and is_causal and queries > 1:
        attention_mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril()
    if attention_mask is None:
        return None, torch.full((1, 1, queries), keys, device=query.device)
    attention_mask = attention_mask[..., :keys]
    sees = attention_mask if attention_mask.dtype == torch.bool else attention_mask > torch.finfo(attention_mask.dtype).min
    visible = sees.sum(-1).expand(-1, -1, queries)[:, :1]
    bias = torch.zeros_like(sees, dtype=torch.float32).masked_fill(~sees, -torch.inf)
    if attention_mask.dtype != torch.bool:
        bias = torch.where(sees, attention_mask.float(), bias)
    return bias, visible


# -- from direct calls of scaled_dot_product_attention ------------------------------------------------------------


class _ScaledDotProducts(TorchFunctionMode):
    """Sees the calls of PyTorch's attention that are made while a site runs."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update = update
        self.running: tuple[int, nn.Module] | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention and self.running is not None:
            position, core = self.running
            with torch.no_grad():
                query, key, *_ = args
                mask = kwargs.get("attn_mask")
                bias, visible = _bias(core, query, key, mask, kwargs.get("is_causal", False) and mask is None)
                self.update(position, _measure(query, key, kwargs.get("scale"), bias), visible)
        return function(*args, **kwargs)


@contextmanager
def _from_direct_calls(model: PreTrainedModel, sites: tuple[AttentionSite, ...], update: Update) -> Iterator[None]:
    watcher = _ScaledDotProducts(update)

    def enter(running: tuple[int, nn.Module] | None, *_: Any) -> None:
        watcher.running = running

    with ExitStack() as stack:
        stack.enter_context(implementation(model, "sdpa"))
        for position, site in enumerate(sites):
            for handle in (
                site.core.register_forward_pre_hook(partial(enter, (position, site.core))),
                site.core.register_forward_hook(partial(enter, None)),
            ):
                stack.callback(handle.remove)
        stack.enter_context(watcher)
        yield


# -- from attention matrices -----------------------------------------------------------------------------------


@contextmanager
def _from_matrices(model: PreTrainedModel, sites: tuple[AttentionSite, ...], update: Update) -> Iterator[None]:
    def take(position: int, weights: Tensor) -> None:
        with torch.no_grad():
            p = weights.float()
            update(position, lambda metric: metric.from_matrix(p), (p > 0).sum(-1).amax(1, keepdim=True))

    with attention_matrices(model, sites, take):
        yield
