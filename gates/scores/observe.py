"""Observe a model's attention while it runs, and update Metrics such as entropy and confidence.

The model's own attention functions run with their masks. Queries and keys are taken from calls of Transformers' attention
interface, so no attention matrix is stored; eager attention provides its matrix. Calls of PyTorch's attention (Falcon) are
observed too. Models with their own code for attention (DeBERTa-v2, BLOOM, GPT-J, XLM, ...) return their matrix by
``output_attentions``.

Implementations other than eager and PyTorch's (flash, flex) read masks in other formats. Such a model runs on PyTorch's
attention meanwhile, so its outputs are equal up to rounding. Outputs of all other models are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from gates.attention.intercept import (
    DIRECT,
    INTERFACE,
    attention_calls,
    global_names,
    implementation_of,
    matrix_among,
    observing,
    readable_implementation,
    request_matrix,
    sparse_site,
)
from gates.attention.sites import AttentionSite
from gates.attention.valid import Valid, valid_by_site
from gates.errors import GateError
from gates.scores.attention import AttentionMetric, bias_of, visible_keys


@contextmanager
def observe_attention(
    model: PreTrainedModel,
    sites: tuple[AttentionSite, ...],
    metrics: Sequence[AttentionMetric],
    valid: Valid,
) -> Iterator[None]:
    """Update ``metrics`` with every forward pass of ``model`` inside the block.

    Model and gates are in evaluation mode, and a compiled model runs uncompiled. Queries and keys are taken after rotary
    embedding and scaling, before dropout and the gates.

    Args:
        model: A model whose attention :func:`gates.attention.sites.find_attention` covers, except block-sparse attention.
        valid: The queries that are not padding, ``[batch, query]``, by kind or by the name of a module; None if all count.

    Raises:
        GateError: For block-sparse attention or a mask that does not fit. Also if the attention of some site was not observed,
            or its weights do not sum to one.

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
    masks = valid_by_site(valid, sites)

    def update(position: int, measure: Measure, visible: Tensor) -> None:
        seen.add(position)
        for metric in metrics:
            metric.update(position, measure(metric), visible, masks[position])

    with observing(model, sites), readable_implementation(model), watched_attention(model, sites, update):
        yield
    if len(seen) < len(sites):
        missing = next(site for position, site in enumerate(sites) if position not in seen)
        raise GateError(
            f"the attention at {missing.name!r} ({type(missing.core).__name__}) was not seen while its entropy was observed"
        )


Measure = Callable[[AttentionMetric], Tensor]
Update = Callable[[int, Measure, Tensor], None]


@contextmanager
def watched_attention(model: PreTrainedModel, sites: tuple[AttentionSite, ...], update: Update) -> Iterator[None]:
    """Observe the attention of every site in a function call or among its outputs. ``update`` gets the index of a site, a
    function that measures its attention, and the number of keys that each query sees."""
    calls = _Calls(sites, update)
    own = [site for site in sites if _computes_on_its_own(model, site)]
    with ExitStack() as stack:
        for site in own:
            stack.callback(request_matrix(site.core).remove)
        for position, site in enumerate(sites):
            for handle in (
                site.core.register_forward_pre_hook(partial(calls.enter, position)),
                site.core.register_forward_hook(partial(calls.leave, position), always_call=True),
            ):
                stack.callback(handle.remove)
        stack.enter_context(attention_calls(sites, calls.of_interface))
        if any(DIRECT in global_names(site.core) for site in sites):
            stack.enter_context(_ScaledDotProducts(calls))
        yield


def _computes_on_its_own(model: PreTrainedModel, site: AttentionSite) -> bool:
    """Return whether a site calls no attention function that can be observed."""
    names = global_names(site.core)
    return INTERFACE not in names and (DIRECT not in names or implementation_of(model, site.core) == "eager")


class _Calls:
    """Take attention from function calls while its site runs, or from the site's outputs if there was no call."""

    def __init__(self, sites: tuple[AttentionSite, ...], update: Update) -> None:
        self.sites = sites
        self.update = update
        self.running: list[int] = []  # running sites whose attention was not observed yet

    def enter(self, position: int, *_: Any) -> None:
        self.running.append(position)

    def leave(self, position: int, core: nn.Module, args: Any, output: Any) -> None:
        """Take the matrix among a module's outputs, unless its attention was observed in a call."""
        if position not in self.running:
            return
        self.running.remove(position)
        matrix = matrix_among(output, self.sites[position].heads)
        if matrix is not None:
            with torch.no_grad():
                p = matrix.float()
                self.update(position, lambda metric: metric.from_matrix(p), (p > 0).sum(-1).amax(1, keepdim=True))

    def of_interface(
        self,
        name: str,
        attend: Callable[..., tuple[Tensor, Tensor | None]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Observe a call of the model's attention function and return its result."""
        output, weights = attend(module, query, key, value, attention_mask, **kwargs)
        for position in self._taken(module):
            with torch.no_grad():
                eager = name == "eager"
                causal = not eager and attention_mask is None and _says_causal(module, query, kwargs.get("is_causal"))
                visible = visible_keys(query, key, attention_mask, causal)
                sink = kwargs.get("s_aux")
                if eager and sink is None:  # the matrix includes all changes of the scores
                    if kwargs.get("dropout"):
                        weights = attend(module, query, key, value, attention_mask, **{**kwargs, "dropout": 0.0})[1]
                    self.update(position, _of_matrix(module, weights, visible), visible)
                    continue
                mask = _with_position_bias(attention_mask, kwargs.get("position_bias"), key.shape[2])
                changed = {"causal": causal, "softcap": kwargs.get("softcap"), "sink": sink}
                measure = _measure(query, key, kwargs.get("scaling"), mask, **changed)
                self.update(position, measure, visible if sink is None else visible + 1)
        return output, weights

    def of_pytorch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Observe a call of PyTorch's attention with these arguments."""
        mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]  # it may be one for all texts or heads
        for position in self._taken(None):
            with torch.no_grad():
                visible = visible_keys(query, key, mask, is_causal)
                self.update(position, _measure(query, key, scale, mask, causal=is_causal), visible)

    def _taken(self, module: nn.Module | None) -> list[int]:
        """Return the running sites of this module, or of the innermost running site, and mark them as observed."""
        innermost = self.sites[self.running[-1]].core if self.running else None
        core = innermost if module is None else module
        taken = [position for position in self.running if self.sites[position].core is core]
        self.running = [position for position in self.running if position not in taken]
        return taken


class _ScaledDotProducts(TorchFunctionMode):
    """Observe the calls of PyTorch's attention."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.calls.of_pytorch(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _says_causal(module: nn.Module, query: Tensor, is_causal: bool | None) -> bool:
    """Return whether Transformers treats a missing mask as causal, with PyTorch's attention. A single query sees all keys."""
    return query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _with_position_bias(mask: Tensor | None, position_bias: Tensor | None, keys: int) -> Tensor | None:
    """Add a position bias, which has the size of the attention matrix, to a mask."""
    if position_bias is None or not bool(position_bias.any()):
        return mask
    added = position_bias.float()
    if mask is None:
        return added
    bias = bias_of(mask, False, slice(0, mask.shape[2]), keys, added.device)
    return added if bias is None else added + bias


def _measure(query: Tensor, key: Tensor, scale: float | None, mask: Tensor | None, **more: Any) -> Measure:
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return lambda metric: metric.from_scores(query, key, scale, mask, **more)


def _of_matrix(module: nn.Module, weights: Tensor | None, visible: Tensor) -> Measure:
    """Return a measure of weights ``[batch, heads, query, key]``, which must sum to 1 for each query that sees keys."""
    if weights is None or weights.dim() != 4:
        raise GateError(
            f"{type(module).__name__} does not hand out its attention weights, so its entropy is not known; "
            "leave the entropy rankings out"
        )
    p = weights.float()
    rest = (1 - p.sum(-1)).abs().masked_fill(visible == 0, 0.0)
    if bool((rest > 0.02).any()):  # tolerates half precision
        raise GateError(
            f"the attention weights of {type(module).__name__} do not sum to 1 (off by {float(rest.max()):.2g}), so their "
            "entropy is not defined; leave the entropy rankings out"
        )
    return lambda metric: metric.from_matrix(p)
