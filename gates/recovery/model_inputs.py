"""Which positions of a model's inputs count, and with them which queries of each attention site.

A padding mask belongs to the tokens that it was made for. A batch of text alone has one mask for all its sites. Where a batch
holds pictures or sound, the queries that count are those of the mask that the model itself hands to its attention: a key that
no query sees is padding. It is the patches' own mask for pictures, the subsampled one for sound, and the longer one where a
model puts pictures and text into one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.intercept import observe_head_outputs, readable_implementation
from gates.hooks.observe import Measure, watched_attention
from gates.hooks.valid import Valid, key_of, stack_of
from gates.scores.attention_blocks import bias_blocks
from gates.surgery.remove import transformers_part

GivenQueries = Callable[[Mapping[str, Tensor]], Valid] | None
IGNORED = -100
"""The label of padding in Transformers."""
TEXT = {
    "input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids", "labels", "decoder_input_ids",
    "decoder_inputs_embeds", "decoder_attention_mask",
}  # fmt: skip
"""Inputs that hold one text for each example and nothing else."""


def valid_queries(batch: Mapping[str, Tensor], *, is_encoder_decoder: bool) -> dict[str, Tensor | None]:
    """For each kind of attention the queries that are not padding, ``[batch, query]``; None where nothing says it.

    Args:
        batch: inputs of a model of Transformers that reads text alone. Targets of a model with two stacks are read from
            ``decoder_attention_mask``, or from labels with a row of tokens for each example; a model that is given neither
            makes them from its inputs.
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


def found_queries(
    gates: HeadGates, forward: Callable[[Any], object], given: GivenQueries, batch: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """Return the queries that count at each site, by its name, ``[batch, query]``; None where all count.

    Args:
        gates: The gates, attached. The model runs once unless the batch is text alone or all masks are given.
        forward: A function that runs the model on a batch.
        given: A function from a batch to masks that the caller knows, ``[batch, query]``, by kind or by the name of a module;
            None where all queries count. They are taken as they are, and the masks of other sites are found.
        batch: The inputs of a model of Transformers.

    Raises:
        GateError: If a site's mask is not certain and not given.
    """
    known = {} if given is None else dict(given(batch))
    left = [site for site in gates.sites if key_of(known, site) is None]
    if not left:
        return known
    has_two = bool(getattr(transformers_part(gates.model, gates.sites).config, "is_encoder_decoder", False))
    by_kind = valid_queries(batch, is_encoder_decoder=has_two)
    if _is_text(batch) and len({(site.kind, stack_of(site)) for site in left}) == len({site.kind for site in left}):
        return {**known, **{site.name: by_kind[site.kind] for site in left}}
    watched = _watch(gates, batch, forward)
    found: dict[str, Tensor | None] = {}
    for site in left:
        one = watched[site.name]
        if not one.shapes:
            continue  # it does not run on this batch
        target = by_kind[site.kind] if has_two and site.kind != "encoder" else None
        near = [other for other in watched.values() if (other.stack, other.shapes) == (one.stack, one.shapes)]
        masks = [mask for other in near for mask in other.masks]
        if target is not None and one.shapes == {tuple(target.shape)}:
            found[site.name] = target
        elif all(bool(mask.all()) for mask in masks) and (masks or near[0].is_learned):
            found[site.name] = None
        elif masks and one.shapes == {tuple(masks[0].shape)} and all(torch.equal(mask, masks[0]) for mask in masks):
            found[site.name] = masks[0]
        else:
            raise GateError(
                f"it is not certain which rows of {site.name!r} are padding in this batch; give them to refit_ with "
                f"valid=lambda batch: {{{stack_of(site)!r}: None}} if all of them count, or with a mask [batch, row] for None"
            )
    return {**known, **found}


def _is_text(batch: Mapping[str, Any]) -> bool:
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    mask = tensors.get("attention_mask")
    return (
        tensors.keys() <= TEXT
        and (mask is None or mask.dim() == 2)
        and not tensors.keys().isdisjoint(("input_ids", "inputs_embeds"))
    )


@dataclass
class _Watched:
    """What a pass showed of one site.

    Args:
        stack: The list of layers that it lies in.
        shapes: The shapes of its rows, ``[batch, query]``, without repetition.
        masks: The keys that some query sees ``[batch, query]``, for each call of self-attention.
        is_learned: Whether the queries of all examples are the same, as learned ones are.
    """

    stack: str
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    masks: list[Tensor] = field(default_factory=list)
    is_learned: bool = False


@torch.no_grad()
def _watch(gates: HeadGates, batch: Any, forward: Callable[[Any], object]) -> dict[str, _Watched]:
    """Run the model once and return what it showed of each site, by the site's name."""
    sites, watched = gates.sites, [_Watched(stack_of(site)) for site in gates.sites]

    def update(position: int, measure: Measure, visible: Tensor) -> None:
        seen = measure(_SeenKeys())  # type: ignore[arg-type]
        if sites[position].kind != "cross" and seen.numel() > 0:
            watched[position].masks.append(seen)

    def take(position: int, heads: Tensor) -> None:
        rows = heads.transpose(0, 1) if sites[position].is_time_first and heads.dim() == 3 else heads
        watched[position].shapes.add(tuple(rows.shape[:-1]))

    def enter(one: _Watched, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        one.is_learned = states is not None and len(states) > 1 and bool((states == states[:1]).all())

    with ExitStack() as stack:
        for site, one in zip(sites, watched, strict=True):
            stack.callback(site.module.register_forward_pre_hook(partial(enter, one), with_kwargs=True).remove)
        stack.enter_context(gates.use(torch.ones_like(gates.mask)))
        stack.enter_context(observe_head_outputs(gates.model, sites, take))
        stack.enter_context(readable_implementation(gates.model))  # type: ignore[arg-type]
        stack.enter_context(watched_attention(gates.model, sites, update))  # type: ignore[arg-type]
        forward(batch)
    return {site.name: one for site, one in zip(sites, watched, strict=True)}


class _SeenKeys:
    """In the place of an attention metric: the keys that some query of the same sequence sees, ``[batch, key]``.

    Attention with another number of keys than queries is no self-attention, and has none.
    """

    def from_scores(self, query: Tensor, key: Tensor, scale: float, mask: Tensor | None, **more: Any) -> Tensor:
        seen = torch.zeros(len(query), key.shape[2], dtype=torch.bool, device=query.device)
        if query.shape[2] != key.shape[2]:
            return seen[:, :0]
        for _, bias in bias_blocks(query, key, mask, more.get("causal", False)):
            seen |= torch.ones_like(seen) if bias is None else (bias > -torch.inf).any(1).any(1)
        return seen

    def from_matrix(self, weights: Tensor) -> Tensor:
        """Of weights alone. A query that sees nothing has equal weights, or a single one; it says nothing where others do."""
        if weights.shape[-2] != weights.shape[-1]:
            return weights.new_zeros(len(weights), 0, dtype=torch.bool)
        visible = weights > 0
        least, most = weights.where(visible, torch.inf).amin(-1), weights.amax(-1)
        telling = ((most - least) > 1e-6 * most).any(1)  # [batch, query]
        telling = telling | ~telling.any(1, keepdim=True)
        return (visible.any(1) & telling.unsqueeze(-1)).any(1)
