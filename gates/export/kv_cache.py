"""What a decoder keeps of every token while it generates: keys and values, fewer where whole groups of heads are gone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.sites import AttentionSite, find_attention, is_attention, weight_by_output
from gates.surgery.slices import cut_site


def cache_bytes(sites: Sequence[AttentionSite], mask: Tensor | None = None) -> int:
    """Bytes of keys and values that causal self-attention keeps for each token, in the precision of the weights.

    Attention to a window keeps them of its last tokens alone, and the keys of an encoder's output, which attention across
    keeps once, are not among them. Layers that take their keys from other layers keep none. In place of a layer without any
    head an export keeps one number as key and one as value, by which the length is known; they are not counted.

    Args:
        sites: of a model, dense or pruned.
        mask: 0/1 per head of all sites, ``[heads]``, as if the others were removed; None for the model as it is. A key/value
            head goes when all its query heads do, and under uneven groups some are kept twice; see
            :func:`gates.surgery.remove.remove_heads_`.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    >>> sites = find_attention(LlamaModel(LlamaConfig(num_key_value_heads=2, vocab_size=50, **size)))
    >>> cache_bytes(sites), cache_bytes(sites, torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1]))
    (256, 192)
    """
    sizes = [site.heads for site in sites]
    parts = torch.ones(sum(sizes)).split(sizes) if mask is None else mask.cpu().split(sizes)
    return sum(
        len(cut_site(site, part).keys) * _bytes_of_key_head(site)
        for site, part in zip(sites, parts, strict=True)
        if _keeps(site)
    )


def cache_bytes_of(model: nn.Module, mask: Tensor | None = None) -> int:
    """The same of a model that generates; 0 for one that does not, or that has no head left."""
    has_heads = any(is_attention(module) for module in model.modules())
    return cache_bytes(find_attention(model), mask) if generates(model) and has_heads else 0


def generates(model: nn.Module) -> bool:
    """Whether a model writes text token by token, and so keeps keys and values."""
    return isinstance(model, PreTrainedModel) and model.can_generate()


def _keeps(site: AttentionSite) -> bool:
    return site.kind == "decoder" and not getattr(site.core, "is_kv_shared_layer", False)


def _bytes_of_key_head(site: AttentionSite) -> int:
    """One key with its value. Keys may be wider than values where they have a projection of their own."""
    layout, width = site.layout, site.head_dim
    if layout.packed:
        return 2 * width * next(site.core.parameters()).element_size()
    value = weight_by_output(site.projection(layout.value))
    if layout.key not in (layout.query, layout.value):
        width = weight_by_output(site.projection(layout.key)).shape[0] // site.kv_heads
    return (width + site.head_dim) * value.element_size()
