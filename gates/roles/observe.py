"""The attention weights of a running model, site by site, whatever its attention implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.hooks.observe import observe_attention
from gates.scores.attention_blocks import score_blocks
from gates.scores.attention_metric import AttentionMetric
from gates.sites import AttentionSite

Take = Callable[[int, Tensor], None]
"""Called with the index of a site and its weights ``[batch, heads, query, key]``, whenever it runs."""


@contextmanager
def observe_weights(model: PreTrainedModel, sites: tuple[AttentionSite, ...], take: Take) -> Iterator[None]:
    """Hand out the attention weights of every forward pass inside the block, one site at a time; none is kept.

    They are what the model attends with, before dropout and gates. See :func:`gates.hooks.observe.observe_attention`.

    Args:
        model: any model whose attention is observed there.
        sites: attention modules of the model that run inside the block.
        take: receives the weights.

    >>> from gates import find_attention
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> seen = []
    >>> with torch.no_grad(), observe_weights(model, find_attention(model), lambda site, weights: seen.append(weights.shape)):
    ...     _ = model(torch.randint(50, (3, 7)))
    >>> seen
    [torch.Size([3, 4, 7, 7]), torch.Size([3, 4, 7, 7])]
    """
    with observe_attention(model, sites, [_Weights(sites, take)], {}):
        yield


class _Weights(AttentionMetric):
    """Hands on whole distributions instead of measuring them."""

    def __init__(self, sites: tuple[AttentionSite, ...], take: Take) -> None:
        super().__init__(sites)
        self._take = take

    def from_scores(
        self,
        query: Tensor,
        key: Tensor,
        scale: float,
        mask: Tensor | None,
        *,
        causal: bool = False,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Weights ``[batch, heads, query, key]``; a sink takes its part of them, and queries that see no key have zeros."""
        blocks = []
        with torch.autocast(query.device.type, enabled=False):
            for scores in score_blocks(query.float(), key.float(), scale, mask, softcap, causal):
                whole = scores.logsumexp(-1, keepdim=True)
                if sink is not None:
                    whole = torch.logaddexp(whole, sink.float().view(1, -1, 1, 1))
                blocks.append((scores - whole).exp().nan_to_num(0.0))
        return torch.cat(blocks, dim=2)

    def from_matrix(self, weights: Tensor) -> Tensor:
        return weights

    def update(self, site: int, values: Tensor, visible: Any, valid: Any = None) -> None:
        self._take(site, values)
