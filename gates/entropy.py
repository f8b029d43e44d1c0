"""Attention entropy per head, without storing an attention matrix where the model allows it.

For one query i, ``H_i = -sum_j p_ij log p_ij = lse_i - q_i . (sum_j p_ij k_j) * scale``, where lse is the
log-sum-exp of its scaled scores. The sum in brackets is attention with the keys as values, so one fused attention
call that also returns its log-sum-exp gives exact entropies in memory linear in the sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gates.errors import GateError
from gates.sites import AttentionSite

OBSERVER = "head_gates_entropy"
BLOCK = 256
"""Queries per block where the fused operator is not to be had."""


@torch.no_grad()
def attention_entropy(query: Tensor, key: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Entropy in nats of each query's attention distribution, ``[batch, heads, query]``, float32.

    Args:
        query: ``[batch, heads, query, head_dim]``.
        key: ``[batch, heads, key, head_dim]`` (grouped keys already repeated).
        scale: factor of the scores.
        bias: what is added to the scores, broadcastable to ``[batch, heads, query, key]``: ``-inf`` or the
            dtype's lowest value at invisible keys, anything finite elsewhere.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _entropy(query.float(), key.float(), scale, bias)


def _entropy(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    fused = None if bias is not None and not _is_binary(bias) else _fused(query, key, scale, bias)
    if fused is None:
        blocks = range(0, query.shape[2], BLOCK)
        return torch.cat([_explicit(query[:, :, at : at + BLOCK], key, scale, _rows(bias, at)) for at in blocks], dim=2)
    mean_key, log_sum_exp = fused
    return (log_sum_exp - (query * mean_key).sum(-1) * scale).clamp(min=0)


def _rows(bias: Tensor | None, at: int) -> Tensor | None:
    return bias if bias is None or bias.shape[2] == 1 else bias[:, :, at : at + BLOCK]


def _is_binary(bias: Tensor) -> bool:
    """Whether a bias only hides keys; a finite bias (T5, ALiBi) changes the entropy identity."""
    hidden = bias <= torch.finfo(bias.dtype).min
    return bool((hidden | (bias == 0)).all())


def _explicit(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """The definition, for a block of queries: O(block * keys) memory."""
    scores = query @ key.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    log_p = scores.log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)


def _fused(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Attention with V = K and its log-sum-exp from PyTorch's fused kernels; None where they are not to be had.

    The operators are not public: any failure to call them falls back to the explicit blocks.
    """
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if bias is not None:
        bias = bias.float().clamp(min=torch.finfo(torch.float32).min / 2)
    try:
        if query.device.type == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, key, 0.0, False, attn_mask=None if bias is None else bias.expand(shape), scale=scale
            )
        if query.device.type == "cuda":
            if bias is not None:
                bias = _aligned(bias).expand(shape)  # aligned before it is expanded, which costs no memory
            output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, key, bias, True, 0.0, False, scale=scale
            )
            return output, log_sum_exp[:, :, : query.shape[2]]
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return None
    return None


def _aligned(bias: Tensor) -> Tensor:
    """The efficient kernel wants rows of the bias to start at multiples of 16 elements."""
    keys = bias.shape[-1]
    padded = bias.new_zeros(*bias.shape[:-1], math.ceil(keys / 16) * 16)
    padded[..., :keys] = bias
    return padded[..., :keys]


def normalised_entropy(entropy: Tensor, visible: Tensor) -> Tensor:
    """Entropy over its maximum, the log of the number of visible keys; in [0, 1].

    Args:
        entropy: ``[batch, heads, query]``.
        visible: keys each query may attend to, broadcastable to ``entropy``; where fewer than two, the result is 0
            and should not be counted.
    """
    return torch.where(visible > 1, entropy / visible.clamp(min=2).float().log(), torch.zeros_like(entropy))


def _entropy_update(entropy: Tensor, visible: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum of normalised entropies ``[heads]`` and the number of queries counted.

    Padded queries (``valid`` False, ``[batch, query]``) and queries that see one key do not count.
    """
    counted = visible.expand(entropy.shape[0], 1, entropy.shape[2]) > 1
    if valid is not None:
        counted = counted & valid.bool().unsqueeze(1)
    total = torch.where(counted, normalised_entropy(entropy, visible), 0.0).double().sum((0, 2))
    return total, counted.sum()


def _entropy_compute(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1)


class AttentionEntropy(Metric):
    """Mean normalised attention entropy of every head, over all queries that count; exact under DDP.

    Args:
        sites: of the model that is observed.
        kwargs: passed to :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, sites: tuple[AttentionSite, ...], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._slices = _slices(sites)
        self.add_state("total", torch.zeros(sum(site.heads for site in sites), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(len(sites), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, site: int, entropy: Tensor, visible: Tensor, valid: Tensor | None = None) -> None:
        """Add one forward pass of one site.

        Args:
            site: index of the site.
            entropy: ``[batch, heads, query]``.
            visible: keys each query sees, broadcastable to ``[batch, 1, query]``.
            valid: queries that are not padding, ``[batch, query]``.
        """
        total, count = _entropy_update(entropy, visible, valid)
        self.total[self._slices[site]] += total
        self.count[site] += count

    def compute(self) -> Tensor:
        """Mean normalised entropy, ``[heads]``."""
        sizes = [piece.stop - piece.start for piece in self._slices]
        return _entropy_compute(self.total, self.count.repeat_interleave(torch.tensor(sizes, device=self.count.device)))


def _slices(sites: tuple[AttentionSite, ...]) -> list[slice]:
    ends = torch.tensor([site.heads for site in sites]).cumsum(0).tolist()
    return [slice(end - site.heads, end) for site, end in zip(sites, ends, strict=True)]


@contextmanager
def observe_entropy(
    model: PreTrainedModel, sites: tuple[AttentionSite, ...], metric: AttentionEntropy, valid: Mapping[str, Tensor | None]
) -> Iterator[None]:
    """Feed ``metric`` from every forward pass of ``model`` inside the block; outputs are unchanged.

    Queries and keys are taken where the model hands them to its attention function: after rotary embedding and
    scaling, before dropout and before the gates.

    Args:
        model: a model whose attention goes through Transformers' attention interface.
        sites: its sites.
        metric: receives every site's entropies.
        valid: for each kind, the queries that are not padding ``[batch, query]``, or None if all count.

    Raises:
        GateError: if the model does not use the attention interface, so that nothing could be observed.
    """
    index = {id(site.core): position for position, site in enumerate(sites)}
    seen: set[int] = set()

    def observed(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        unlike = [name for name in ("s_aux", "softcap") if kwargs.get(name) is not None]
        if unlike:
            raise GateError(
                f"{type(module).__name__} changes its attention by {' and '.join(unlike)}, not covered by this entropy; "
                "leave the entropy rankings out for this model"
            )
        position = index.get(id(module))
        if position is not None:
            seen.add(position)
            entropy, visible = _observe(module, query, key, attention_mask, kwargs)
            metric.update(position, entropy, visible, valid.get(sites[position].kind))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    with _attention_function(model, observed):
        yield
    if len(seen) < len(sites):
        missing = next(site for position, site in enumerate(sites) if position not in seen)
        raise GateError(
            f"the attention at {missing.name!r} ({type(missing.core).__name__}) does not go through Transformers' attention "
            "interface, so its entropy cannot be observed"
        )


def _observe(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Entropies ``[batch, heads, query]`` and visible keys ``[batch or 1, 1, query]``."""
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    key = repeat_kv(key, query.shape[1] // key.shape[1])
    queries, keys = query.shape[2], key.shape[2]
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and is_causal and queries > 1:
        attention_mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril()
    bias = None
    visible = torch.full((1, 1, queries), keys, device=query.device)
    if attention_mask is not None:
        attention_mask = attention_mask[..., :keys]
        sees = attention_mask if attention_mask.dtype == torch.bool else attention_mask > torch.finfo(attention_mask.dtype).min
        visible = sees.sum(-1).expand(-1, -1, queries)[:, :1]
        bias = torch.zeros_like(sees, dtype=torch.float32).masked_fill(~sees, -torch.inf)
        if attention_mask.dtype != torch.bool:
            bias = torch.where(sees, attention_mask.float(), bias)
    position_bias = kwargs.get("position_bias")
    if position_bias is not None:
        bias = position_bias.float() if bias is None else bias + position_bias.float()
    return attention_entropy(query, key, scale, bias), visible


@contextmanager
def _attention_function(model: PreTrainedModel, function: Callable[..., Any]) -> Iterator[None]:
    """Make ``function`` the model's attention function for a while."""
    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(OBSERVER, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(OBSERVER, sdpa_mask)
    try:
        model.set_attn_implementation(OBSERVER)
        yield
    finally:
        model.set_attn_implementation(before)
        for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            type(interface)._global_mapping.pop(OBSERVER, None)
