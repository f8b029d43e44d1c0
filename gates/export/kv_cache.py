"""What a decoder keeps of every token while it generates: keys and values, fewer where whole groups of heads are gone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.hooks.intercept import global_names
from gates.sites import AttentionSite, find_attention, is_attention, weight_by_output
from gates.surgery.layouts import LATENT
from gates.surgery.slices import Cut, cut_site, rows_of_parts


def cache_bytes(sites: Sequence[AttentionSite], mask: Tensor | None = None) -> int:
    """Bytes of keys and values that causal self-attention keeps for each token, in the precision of the weights.

    Attention to a window keeps them of its last tokens alone, and the keys of an encoder's output, which attention across
    keeps once, are not among them. Layers that take their keys from other layers, or compute attention as a recurrence, keep
    none. Multi-head latent attention keeps one compressed vector for all heads. In place of a layer without any head an
    export keeps one number as key and one as value, by which the length is known; they are not counted.

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
    return sum(_kept_bytes(cut_site(site, part)) for site, part in zip(sites, parts, strict=True) if _keeps(site))


def cache_bytes_of(model: nn.Module, mask: Tensor | None = None) -> int:
    """The same of a model that generates; 0 for one that does not, or that has no head left."""
    has_heads = any(is_attention(module) for module in model.modules())
    return cache_bytes(find_attention(model), mask) if generates(model) and has_heads else 0


def generates(model: nn.Module) -> bool:
    """Whether a model writes text token by token, and so keeps keys and values."""
    return isinstance(model, PreTrainedModel) and model.can_generate()


def _keeps(site: AttentionSite) -> bool:
    """Whether a site hands its keys to a cache, as causal self-attention does by the method ``update`` of the cache."""
    has_own_keys = site.kind == "decoder" and not getattr(site.core, "is_kv_shared_layer", False)
    return has_own_keys and "update" in global_names(site.core)


def _kept_bytes(cut: Cut) -> int:
    """Return the bytes of one token's keys and values at a site."""
    site, layout = cut.site, cut.site.layout
    if layout.packed:
        return 2 * len(cut.keys) * site.head_dim * next(site.core.parameters()).element_size()
    value = weight_by_output(site.projection(layout.value))
    if layout.gate_only == LATENT:  # the input of the projection to keys and values, and the one rotated key
        return (value.shape[1] + int(vars(site.core)["qk_rope_head_dim"])) * value.element_size()
    key_width = rows_of_parts(site)["key"][1].shape[1]  # keys may be wider than values
    # Falcon's new decoder repeats keys and values for every query head before it keeps them.
    heads = cut.queries if getattr(site.core, "new_decoder_architecture", False) else cut.keys
    return len(heads) * (key_width + site.head_dim) * value.element_size()
