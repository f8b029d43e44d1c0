"""Which positions of a model's inputs count."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

IGNORED = -100
"""The label of padding in Transformers."""


def valid_queries(batch: Mapping[str, Tensor], *, is_encoder_decoder: bool) -> dict[str, Tensor | None]:
    """For each kind of attention the queries that are not padding, ``[batch, query]``; None where nothing says it.

    Args:
        batch: inputs of a model of Transformers. Targets of a model with two stacks are read from ``decoder_attention_mask``,
            or from labels with a row of tokens for each example; a model that is given neither makes them from its inputs.
        is_encoder_decoder: whether the model has two stacks.

    >>> import torch
    >>> batch = {"attention_mask": torch.tensor([[1, 1, 0]]), "labels": torch.tensor([[5, 7, 9, -100]])}
    >>> valid_queries(batch, is_encoder_decoder=True)["decoder"].tolist()
    [[True, True, True, False]]
    >>> valid_queries(batch, is_encoder_decoder=False)["decoder"].tolist()
    [[1, 1, 0]]
    """
    source = batch.get("attention_mask")
    source = source if source is not None and source.dim() == 2 else None
    target = source
    if is_encoder_decoder:
        labels, given = batch.get("labels"), batch.get("decoder_input_ids")
        if "decoder_attention_mask" in batch:
            target = batch["decoder_attention_mask"]
        elif labels is not None and labels.dim() == 2:
            target = labels != IGNORED
        elif given is not None:
            target = None
    return {"encoder": source, "decoder": target, "cross": target}
