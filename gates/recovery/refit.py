"""Refit what follows the kept heads of a pruned model in closed form, without training.

Projection by projection in the order of the model: the inputs are those of the *pruned* model with all earlier projections
refitted, the target is the *dense* model's residual stream after this place minus the pruned one before it. So each
projection also makes up for what was lost before it. Relatives are the updates of optimal brain surgeons of structures (ZipLM,
Kurtic et al. 2023), CORP (2026), and the mask tuning of Kwon et al. 2022, which fits one number per head and not all weights;
it is in :mod:`gates.recovery.rescale`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gates.budget import check_mask
from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.evaluating import evaluating
from gates.hooks.valid import Valid, rows_by_site, valid_positions
from gates.recovery.least_squares import Moments, ProjectionMoments, fit, squared_error
from gates.recovery.residual import Written
from gates.recovery.writers import Passes, Writer, find_writers, in_force
from gates.sites import weight_by_output
from gates.surgery.adapters import check_merged

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Refitted:
    """One projection that was refitted.

    Args:
        name: of the projection in the model.
        before, after: mean squared error of the residual stream behind it, against the dense model's, with its old and with
            its new weights. The projections before it are refitted in both.
    """

    name: str
    before: float
    after: float


class Aim(NamedTuple):
    """One call of a projection in the dense model: its output, and what that is added to; see :class:`Written`."""

    name: str
    output: Tensor
    stream: Tensor | None

    @classmethod
    def of(cls, call: Written) -> Aim:
        """Without the inputs, which are wide."""
        return cls(call.name, call.output, call.stream)


def refit_(
    gates: HeadGates,
    mask: Tensor,
    batches: Callable[[], Iterable[Batch]],
    forward: Callable[[Batch], object],
    valid: Callable[[Batch], Valid],
    *,
    ridge: float = 0.1,
    feed_forward: bool = True,
    dense: Mapping[str, Tensor] | None = None,
    keep_states: bool = True,
    held_out_loss: Callable[[], float] | None = None,
) -> list[Refitted]:
    """Change the weights and biases of a model's output projections so that it does without the closed heads.

    The batches are gone through once for each projection. Where the layers of a model work on each other's output, which is
    tried on the first batch, each batch enters the model again behind the last finished layer, so that all projections together
    cost a few passes. In other models, and without ``keep_states``, every projection costs a pass of the dense and one of the
    pruned model up to it. Where there are several processes, each gives its own batches and all end with the same weights.
    Projections before the first closed head stay as they are.

    Where the output of an attention is not added to the residual stream as it is, but behind a norm or a factor, the target is
    the dense model's output of the projection. Feed-forward layers of that kind, and experts, stay as they are.

    Args:
        gates: gates of a model with the weights that the mask is for; they may be attached. The model is in evaluation mode
            meanwhile.
        mask: 0/1 mask ``[gates]``.
        batches: the calibration batches, the same ones at every call.
        forward: function that runs the model on a batch.
        valid: function from a batch to its queries that are not padding, ``[batch, query]``, by kind or by the name of a
            module; None or nothing where all count. It is called once for each batch.
        ridge: see :func:`gates.recovery.least_squares.fit`.
        feed_forward: whether the second projections of feed-forward layers are refitted too.
        dense: parameters of the dense model by their names in this one, where it has others: the weights before they were
            trained with gates, for example.
        keep_states: whether states of all calibration batches may be kept: on the model's device, in its precision, two hidden
            states for each position and stack of layers, and two for each projection of the layer in work. The result is the
            same without, and the memory needed then does not depend on the number of batches.
        held_out_loss: A function that runs the model on data that are not refitted to and returns the loss, the same in all
            processes. A refit that raises it is an error. None to apply the refit in any case.

    Returns:
        What was refitted, in order.

    Raises:
        GateError: for a mask of another size or other values, a model with adapters, weights that are no floating-point numbers
            or that several modules share, a mask of valid queries for several stacks or of another shape, no batches, or a
            refit that raises the loss on held-out data; nothing is changed then.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> batches, gates = [torch.randint(50, (3, 7))], HeadGates(model)
    >>> done = refit_(gates, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]), lambda: batches, model, lambda batch: {})
    >>> len(done), all(one.after <= one.before for one in done)
    (4, True)
    """
    check_mask(mask, gates.size, gates.unit)
    values, done = mask.to(gates.mask), []
    refitted: dict[str, Tensor] = {}
    masks: dict[int, list[Tensor | None]] = {}  # of each site, by the number of the batch
    check_merged(gates.model)
    with torch.no_grad(), evaluating(gates.model), gates.attached():
        writers, reenters = find_writers(gates, next(iter(batches()), None), forward)
        wanted = list(_to_refit(writers, values.split(gates.sizes), feed_forward=feed_forward))
        reenters = reenters and keep_states
        of_dense = Passes(gates, torch.ones_like(values), dense or {}, forward, writers, reenters=reenters)
        of_pruned = Passes(gates, values, refitted, forward, writers, reenters=reenters)
        for _, members in groupby(wanted, key=lambda one: one[0].block or one[0] if reenters else one[0]):
            group = dict(members)
            aims: dict[int, list[Aim]] = {}  # of the whole group, by the number of the batch
            for writer, kept in group.items():
                moments = ProjectionMoments(*reversed(weight_by_output(writer.module).shape)).to(values.device)
                for number, batch in enumerate(batches()):
                    if number not in aims:
                        aims[number] = [Aim.of(call) for call in of_dense.run(number, batch, list(group))]
                    if number not in masks:
                        masks[number] = rows_by_site(valid(batch), gates.sites)
                    goals = [aim for aim in aims[number] if aim.name == writer.name]
                    if writer == list(group)[-1]:
                        del aims[number]
                    for goal, call in zip(goals, of_pruned.run(number, batch, [writer]), strict=True):
                        _gather(moments, goal, call, masks[number][writer.attention])
                weights, result = _fitted(writer, kept, moments.compute(), ridge)
                refitted.update(weights)
                done.append(result)
        if held_out_loss is not None and refitted:
            with gates.use(values):
                _check_held_out(gates.model, refitted, held_out_loss, ridge)
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
            f"weights stay as they were; refit to more batches, or with a larger ridge than {ridge:g}"
        )


def _to_refit(writers: Sequence[Writer], values: tuple[Tensor, ...], *, feed_forward: bool) -> Iterator[tuple[Writer, Tensor]]:
    """Writers at or after the first site with a closed head, since before it there is nothing to make up for; and of each the
    indices of its inputs that are not always 0."""
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


def _gather(moments: ProjectionMoments, aim: Aim, pruned: Written, valid: Tensor | None) -> None:
    """Add one call: the inputs of the pruned model, and what its projection should give."""
    target = aim.output.double()
    if aim.stream is not None and pruned.stream is not None:
        target = target + aim.stream.double() - pruned.stream.double()
    moments.update(valid_positions(pruned.inputs, valid), valid_positions(target, valid))


def _fitted(writer: Writer, kept: Tensor, moments: Moments, ridge: float) -> tuple[dict[str, Tensor], Refitted]:
    """New parameters of a projection by name, as the model has them."""
    weight, bias, among = weight_by_output(writer.module), writer.module.bias, moments.of(kept)
    new, new_bias = fit(among, weight[:, kept], ridge=ridge, has_bias=bias is not None)
    whole = weight.clone()
    whole[:, kept] = new.to(weight)
    parameters = {f"{writer.name}.weight": whole.T.contiguous() if isinstance(writer.module, Conv1D) else whole}
    if new_bias is not None:
        parameters[f"{writer.name}.bias"] = new_bias.to(weight)
    numbers = float(moments.positions) * len(whole)
    errors = (squared_error(among, weight[:, kept], bias), squared_error(among, new, new_bias))
    return parameters, Refitted(writer.name, *(float(error) / numbers for error in errors))
