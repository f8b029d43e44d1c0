"""Refit the projections of a pruned model in closed form, without training.

Projections are refitted in the order of the model. The inputs are those of the *pruned* model with all earlier projections
refitted. The target is the *dense* model's residual stream after the projection minus the pruned one before it, so each
projection also compensates for earlier losses. Related methods are the optimal brain surgeon for structures (ZipLM, Kurtic et
al. 2023), CORP (2026), and the mask tuning of Kwon et al. 2022, which fits one number per head
(:mod:`gates.recovery.rescale`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gates.attention.intercept import observe_head_outputs, readable_implementation
from gates.attention.layouts import check_merged
from gates.attention.modes import evaluating
from gates.attention.sites import weight_by_output
from gates.attention.valid import Valid, key_of, rows_by_site, stack_of, valid_positions
from gates.errors import GateError
from gates.gating.budget import check_mask
from gates.gating.head_gates import HeadGates
from gates.recovery.least_squares import Moments, ProjectionMoments, best_ridge, fit, squared_error
from gates.recovery.residual import Passes, Writer, Written, find_writers, in_force
from gates.scores.attention import bias_blocks
from gates.scores.observe import Measure, watched_attention
from gates.surgery.remove import transformers_part

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Refitted:
    """Report one refitted projection."""

    name: str  # The name of the projection in the model
    ridge: float  # Its ridge
    # The mean squared error of the residual stream after it, against the dense model's, with its old and its new weights.
    # Earlier projections are refitted in both.
    before: float
    after: float


class Target(NamedTuple):
    """Hold the output and the stream of one call in the dense model; see :class:`Written`, which also has the wide inputs."""

    name: str
    output: Tensor
    stream: Tensor | None


def refit_(
    gates: HeadGates,
    mask: Tensor,
    batches: Callable[[], Iterable[Batch]],
    forward: Callable[[Batch], object],
    valid: Callable[[Batch], Valid],
    *,
    ridge: float | Sequence[float] = 0.1,
    feed_forward: bool = True,
    dense: Mapping[str, Tensor] | None = None,
    keep_states: bool = True,
    held_out_loss: Callable[[], float] | None = None,
) -> list[Refitted]:
    """Refit the weights and biases of a model's output projections to compensate for the closed heads.

    Every projection needs one run over the batches. A trial on the first batch shows whether each layer only uses the output of
    the layer before. Then batches enter the model after the last finished layer, and all projections cost a few passes.
    Otherwise, and without ``keep_states``, every projection costs a pass of the dense and of the pruned model up to it. With
    several processes, each has its own batches and all end with the same weights. Projections before the first closed head do
    not change.

    Where a norm or a factor comes between an attention's output and the residual stream, the target is the dense model's
    output of the projection. Such feed-forward layers, and experts, do not change.

    Args:
        gates: The gates of the model, attached or not. The model is in evaluation mode meanwhile.
        mask: The mask of 0 and 1, ``[gates]``.
        batches: A function that returns the same calibration batches at every call.
        forward: A function that runs the model on a batch.
        valid: A function from a batch to its queries that are not padding, ``[batch, query]``, by kind or by the name of a
            module. None or a missing key where all count. It is called once per batch.
        ridge: The strength of the regularisation; see :func:`gates.recovery.least_squares.fit`. Of several, each projection
            takes the one with the smallest error on every fourth batch, from a fit to the other batches. The final fit is to
            all of them.
        feed_forward: Whether to refit the second projections of feed-forward layers too.
        dense: The parameters of the dense model by name, where they differ from the model's, such as weights before training.
        keep_states: Whether to keep states of all calibration batches on the model's device. These are two hidden states for
            each position and stack of layers, and two for each projection of the current layer. Without them the result is the
            same, and memory does not grow with the number of batches.
        held_out_loss: A function that returns the loss on other data, the same in all processes. A refit that raises it is an
            error. None to apply the refit in any case.

    Returns:
        The refitted projections, in order.

    Raises:
        GateError: If the mask, the weights or the batches do not fit, or the refit raises the loss on held-out data. Nothing
            changes then.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> batches, gates = [torch.randint(50, (3, 7))], HeadGates(model)
    >>> done = refit_(gates, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]), lambda: batches, model, lambda batch: {})
    >>> len(done), all(one.after <= one.before for one in done)
    (4, True)
    """
    check_mask(mask, gates.size, gates.unit)
    values, done, ridges = mask.to(gates.mask), [], [ridge] if isinstance(ridge, int | float) else list(ridge)
    if not ridges:
        raise GateError("ridge is an empty list; expected numbers above 0, such as 0.1")
    refitted: dict[str, Tensor] = {}
    masks: dict[int, list[Tensor | None]] = {}  # one mask per site, by the number of the batch
    check_merged(gates.model)
    with torch.no_grad(), evaluating(gates.model), gates.attached():
        writers, reenters = find_writers(gates, next(iter(batches()), None), forward)
        selected = list(_to_refit(writers, values.split(gates.sizes), feed_forward=feed_forward))
        reenters = reenters and keep_states
        dense_passes = Passes(gates, torch.ones_like(values), dense or {}, forward, writers, reenters=reenters, fixed=True)
        pruned_passes = Passes(gates, values, refitted, forward, writers, reenters=reenters, fixed=False)
        for _, members in groupby(selected, key=lambda one: one[0].block or one[0] if reenters else one[0]):
            group = dict(members)
            targets: dict[int, list[Target]] = {}  # targets of the whole group, by the number of the batch
            for writer, kept in group.items():
                shape = weight_by_output(writer.module).shape[::-1]
                # To fit to and, if there is a ridge to choose, held out.
                parts = [ProjectionMoments(*shape).to(values.device) for _ in range(2 if len(ridges) > 1 else 1)]
                for number, batch in enumerate(batches()):
                    if number not in targets:
                        calls = dense_passes.run(number, batch, list(group))
                        targets[number] = [Target(call.name, call.output, call.stream) for call in calls]
                    if number not in masks:
                        masks[number] = rows_by_site(valid(batch), gates.sites)
                    own = [target for target in targets[number] if target.name == writer.name]
                    if writer == list(group)[-1]:
                        del targets[number]
                    for target, call in zip(own, pruned_passes.run(number, batch, [writer]), strict=True):
                        _add_call(parts, number, target, call, masks[number][writer.attention])
                weights, result = _fitted(writer, kept, [part.compute().of(kept) for part in parts], ridges)
                refitted.update(weights)
                done.append(result)
        if held_out_loss is not None and refitted:
            with gates.use(values):
                _check_held_out(gates.model, refitted, held_out_loss, max(ridges))
    for name, tensor in refitted.items():
        gates.model.get_parameter(name).data.copy_(tensor)
    return done


def _check_held_out(model: nn.Module, refitted: Mapping[str, Tensor], loss: Callable[[], float], ridge: float) -> None:
    masked = loss()
    with in_force(model, refitted):
        after = loss()
    if not math.isfinite(after) or after > masked:
        raise GateError(
            f"the loss on the held-out batches is {masked:.6g} with the mask alone and {after:.6g} after the refit, so the "
            f"weights did not change; use more batches, or a larger ridge than {ridge:g}"
        )


def _to_refit(writers: Sequence[Writer], values: tuple[Tensor, ...], *, feed_forward: bool) -> Iterator[tuple[Writer, Tensor]]:
    """Yield the writers from the first site with a closed head on, each with the indices of its nonzero inputs."""
    lost = False
    for writer in writers:
        features = weight_by_output(writer.module).shape[1]
        kept = torch.arange(features, device=writer.module.weight.device)
        if writer.site is not None:
            own = values[writer.site]
            lost = lost or bool((own == 0).any())
            kept = own.repeat_interleave(features // len(own)).nonzero().squeeze(1)
        can_change = len(kept) > 0 or writer.module.bias is not None
        if lost and can_change and (writer.site is not None or feed_forward):
            yield writer, kept


def _add_call(parts: Sequence[ProjectionMoments], number: int, dense: Target, pruned: Written, valid: Tensor | None) -> None:
    """Add the inputs of one call in the pruned model and the targets of its projection to the part of their batch."""
    target = dense.output.double()
    if dense.stream is not None and pruned.stream is not None:
        target = target + dense.stream.double() - pruned.stream.double()
    single = torch.promote_types(dense.output.dtype, torch.float32)  # after the difference, whose terms are larger
    inputs, target = valid_positions(pruned.inputs, valid), valid_positions(target, valid).to(single)
    own = int(number % 4 == 1 and len(parts) > 1)
    for index, part in enumerate(parts):
        count = len(inputs) if index == own else 0
        part.update(inputs[:count], target[:count])


def _fitted(
    writer: Writer, kept: Tensor, parts: Sequence[Moments], ridges: Sequence[float]
) -> tuple[dict[str, Tensor], Refitted]:
    """Return the new parameters of a projection by name, and the report."""
    weight, bias = weight_by_output(writer.module), writer.module.bias
    before = weight[:, kept]
    ridge = ridges[0] if len(parts) == 1 else best_ridge(parts[0], parts[1], before, ridges, has_bias=bias is not None)
    among = reduce(Moments.plus, parts)
    new, new_bias = fit(among, before, ridge=ridge, has_bias=bias is not None)
    whole = weight.clone()
    whole[:, kept] = new.to(weight)
    parameters = {f"{writer.name}.weight": whole.T.contiguous() if isinstance(writer.module, Conv1D) else whole}
    if new_bias is not None:
        parameters[f"{writer.name}.bias"] = new_bias.to(weight)
    numbers = float(among.positions) * len(whole)
    errors = (squared_error(among, before, bias), squared_error(among, new, new_bias))
    return parameters, Refitted(writer.name, ridge, *(float(error) / numbers for error in errors))


# A padding mask belongs to the tokens that it was made for. A batch of only text has one mask for all sites. With pictures or
# sound, the mask is taken from the model's attention: a key that no query sees is padding. This is the patches' mask for
# pictures, the subsampled mask for sound, and the longer mask of a sequence of pictures and text.

GivenQueries = Callable[[Mapping[str, Tensor]], Valid] | None
TEXT = {
    "input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids", "labels", "decoder_input_ids",
    "decoder_inputs_embeds", "decoder_attention_mask",
}  # fmt: skip
"""The inputs of a batch with one text per example and nothing else."""


def valid_queries(batch: Mapping[str, Tensor], *, is_encoder_decoder: bool) -> dict[str, Tensor | None]:
    """Return for each kind of attention the queries that are not padding, ``[batch, query]``; None where it is unknown.

    Args:
        batch: The inputs of a Transformers model that only reads text. The decoder's queries come from
            ``decoder_attention_mask``, else from labels ``[batch, tokens]``, else from the inputs.

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
            target = labels != -100
        elif given is not None:
            target = None
    return {"encoder": source, "decoder": target, "cross": target}


def found_queries(
    gates: HeadGates, forward: Callable[[Any], object], given: GivenQueries, batch: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """Return the queries that count at each site, by its name, ``[batch, query]``; None where all count.

    Args:
        gates: The attached gates. The model runs once unless the batch is only text or all masks are given.
        given: A function from a batch to known masks, ``[batch, query]``, by kind or by the name of a module; None where all
            queries count. The masks of other sites are found.
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
                f"the padding rows of {site.name!r} in this batch are unknown; call refit_ with valid=lambda batch: "
                f"{{{stack_of(site)!r}: None}} if all rows count, or with a mask [batch, row] for None"
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
    """Hold the observations of one site in a pass."""

    stack: str  # The name of its list of layers
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # The shapes of its rows, ``[batch, query]``
    # The keys that some query sees, ``[batch, query]``, for each call of self-attention.
    masks: list[Tensor] = field(default_factory=list)
    is_learned: bool = False  # Whether the queries of all examples are equal, as learned queries are


@torch.no_grad()
def _watch(gates: HeadGates, batch: Any, forward: Callable[[Any], object]) -> dict[str, _Watched]:
    """Run the model once and return the observations of each site by name."""
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
    """Replace an attention metric, and return the keys that some query of the same sequence sees, ``[batch, key]``.

    The result is empty for different numbers of keys and queries, which is not self-attention.
    """

    def from_scores(self, query: Tensor, key: Tensor, scale: float, mask: Tensor | None, **more: Any) -> Tensor:
        seen = torch.zeros(len(query), key.shape[2], dtype=torch.bool, device=query.device)
        if query.shape[2] != key.shape[2]:
            return seen[:, :0]
        for _, bias in bias_blocks(query, key, mask, more.get("causal", False)):
            seen |= torch.ones_like(seen) if bias is None else (bias > -torch.inf).any(1).any(1)
        return seen

    def from_matrix(self, weights: Tensor) -> Tensor:
        """Find the keys from weights. Queries with equal weights, or a single one, only count if all queries have them."""
        if weights.shape[-2] != weights.shape[-1]:
            return weights.new_zeros(len(weights), 0, dtype=torch.bool)
        visible = weights > 0
        least, most = weights.where(visible, torch.inf).amin(-1), weights.amax(-1)
        telling = ((most - least) > 1e-6 * most).any(1)  # [batch, query]
        telling = telling | ~telling.any(1, keepdim=True)
        return (visible.any(1) & telling.unsqueeze(-1)).any(1)
