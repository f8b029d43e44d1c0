"""Refit what follows the kept heads of a pruned model in closed form, without training.

Projection by projection in the order of the model: the inputs are those of the *pruned* model with all earlier projections
refitted, the target is the *dense* model's residual stream after this place minus the pruned one before it. So each
projection also makes up for what was lost before it. Relatives are the updates of optimal brain surgeons of structures (ZipLM,
Kurtic et al. 2023), CORP (2026), and the mask tuning of Kwon et al. 2022, which fits one number per head and not all weights;
it is in :mod:`gates.recovery.rescale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.evaluating import evaluating
from gates.recovery.least_squares import Moments, ProjectionMoments, fit, squared_error
from gates.recovery.residual import Written, watch_writers
from gates.sites import Kind, Projection, weight_by_output
from gates.surgery.adapters import check_merged

Batch = TypeVar("Batch")
Valid = Mapping[str, Tensor | None]


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


@dataclass(frozen=True)
class Writer:
    """A projection to refit.

    Args:
        name: of the projection in the model.
        module: the projection.
        kind: of the attention that it belongs to, or that comes before it.
        site: index of its attention site; None for one of a feed-forward layer.
        calls: how often it runs in one pass.
    """

    name: str
    module: Projection
    kind: Kind
    site: int | None
    calls: int


def refit_(
    gates: HeadGates,
    mask: Tensor,
    batches: Callable[[], Iterable[Batch]],
    forward: Callable[[Batch], object],
    valid: Callable[[Batch], Valid],
    *,
    ridge: float = 0.01,
    feed_forward: bool = True,
    dense: Mapping[str, Tensor] | None = None,
) -> list[Refitted]:
    """Change the weights and biases of a model's output projections so that it does without the closed heads.

    For each projection the model runs over the batches twice, dense and pruned, up to that projection; the memory needed
    does not depend on the number of batches. Where there are several processes, each gives its own batches and all end with
    the same weights. Projections before the first closed head stay as they are.

    Where the output of an attention is not added to the residual stream as it is, but behind a norm or a factor, the target is
    the dense model's output of the projection. Feed-forward layers of that kind, and experts, stay as they are.

    Args:
        gates: gates of a model with the weights that the mask is for; they may be attached. The model is in evaluation mode
            meanwhile.
        mask: 0/1 mask ``[gates]``.
        batches: the calibration batches, the same ones at every call.
        forward: function that runs the model on a batch.
        valid: function from a batch to its queries that are not padding, ``[batch, query]`` for each kind; none if all count.
        ridge: see :func:`gates.recovery.least_squares.fit`.
        feed_forward: whether the second projections of feed-forward layers are refitted too.
        dense: parameters of the dense model by their names in this one, where it has others: the weights before they were
            trained with gates, for example.

    Returns:
        What was refitted, in order.

    Raises:
        GateError: for a mask of another size, a model with adapters, weights that are no floating-point numbers or that several
            modules share, or no batches; nothing is changed then.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> batches, gates = [torch.randint(50, (3, 7))], HeadGates(model)
    >>> done = refit_(gates, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]), lambda: batches, model, lambda batch: {})
    >>> len(done), all(one.after <= one.before for one in done)
    (4, True)
    """
    if mask.shape != gates.mask.shape:
        raise GateError(f"the mask has shape {list(mask.shape)}; this model has {gates.size} {gates.unit}s to gate")
    values, done = mask.to(gates.mask), []
    refitted: dict[str, Tensor] = {}
    check_merged(gates.model)
    with torch.no_grad(), evaluating(gates.model), gates.attached():
        writers = _writers(gates, next(iter(batches()), None), forward)
        for writer in _behind_the_first_loss(writers, values.split(gates.sizes)):
            if writer.site is None and not feed_forward:
                continue
            kept = _kept_features(writer, values.split(gates.sizes))
            weight, bias = weight_by_output(writer.module), writer.module.bias
            if len(kept) == 0 and bias is None:
                continue
            gathered = ProjectionMoments(weight.shape[1], weight.shape[0]).to(values.device)
            for batch in batches():
                with gates.use(torch.ones_like(values)), _in_force(gates.model, dense or {}):
                    aims = _calls(writer, batch, forward)
                with gates.use(values), _in_force(gates.model, refitted):
                    calls = _calls(writer, batch, forward)
                for of_dense, of_pruned in zip(aims, calls, strict=True):
                    _gather(gathered, of_dense, of_pruned, valid(batch).get(writer.kind))
            moments: Moments = gathered.compute()
            among = moments.of(kept)
            new, new_bias = fit(among, weight[:, kept], ridge=ridge, has_bias=bias is not None)
            whole = weight.clone()
            whole[:, kept] = new.to(weight)
            refitted[f"{writer.name}.weight"] = whole.T.contiguous() if isinstance(writer.module, Conv1D) else whole
            if new_bias is not None:
                refitted[f"{writer.name}.bias"] = new_bias.to(weight)
            numbers = float(moments.positions) * len(whole)
            errors = (squared_error(among, weight[:, kept], bias), squared_error(among, new, new_bias))
            done.append(Refitted(writer.name, *(float(error) / numbers for error in errors)))
    for name, tensor in refitted.items():
        gates.model.get_parameter(name).data.copy_(tensor)
    return done


def _writers(gates: HeadGates, batch: Any, forward: Callable[[Any], object]) -> list[Writer]:
    """The projections that write to the residual stream, in the order of the model: those of all attention, and others whose
    output is as wide and is added to the stream."""
    if batch is None:
        raise GateError("there is nothing to fit to; expected at least one batch")
    names = {id(module): name for name, module in gates.model.named_modules()}
    inside = {id(part) for site in gates.sites for part in site.module.modules()}
    sites = {names[id(site.output)]: index for index, site in enumerate(gates.sites)}
    projections = {name: gates.sites[index].output for name, index in sites.items()}
    others = {
        name: module
        for name, module in gates.model.named_modules()
        if isinstance(module, Projection) and id(module) not in inside
    }
    with watch_writers(projections | others) as calls:
        forward(batch)
    writers: dict[str, Writer] = {}
    kind: Kind | None = None
    for call in calls:
        site = sites.get(call.name)
        if site is not None:
            kind = gates.sites[site].kind
        elif kind is None or call.stream is None:
            continue
        module = (projections | others)[call.name]
        _check(call.name, module, gates.model)
        times = sum(other.name == call.name for other in calls)
        writers.setdefault(call.name, Writer(call.name, module, kind, site, times))
    return list(writers.values())


def _check(name: str, module: Projection, model: nn.Module) -> None:
    if not module.weight.is_floating_point() or module.weight.is_meta:
        raise GateError(
            f"the weights of {name!r} are {str(module.weight.dtype).removeprefix('torch.')} "
            f"{'on no device' if module.weight.is_meta else 'numbers'}; expected floating-point weights that are loaded"
        )
    owners = [other for other, part in model.named_modules() if getattr(part, "weight", None) is module.weight]
    if len(owners) > 1:
        raise GateError(f"{owners[0]!r} and {owners[1]!r} share one weight, so neither can be refitted alone; untie them first")


def _behind_the_first_loss(writers: list[Writer], values: tuple[Tensor, ...]) -> Iterator[Writer]:
    """Those at or after the first site with a closed head: before it there is nothing to make up for."""
    lost = False
    for writer in writers:
        lost = lost or (writer.site is not None and bool((values[writer.site] == 0).any()))
        if lost:
            yield writer


def _kept_features(writer: Writer, values: tuple[Tensor, ...]) -> Tensor:
    """Indices of the inputs that are not always 0."""
    features = weight_by_output(writer.module).shape[1]
    if writer.site is None:
        return torch.arange(features, device=writer.module.weight.device)
    own = values[writer.site]
    return own.repeat_interleave(features // len(own)).nonzero().squeeze(1)


def _calls(writer: Writer, batch: Any, forward: Callable[[Any], object]) -> list[Written]:
    with watch_writers({writer.name: writer.module}, enough=writer.calls) as calls:
        forward(batch)
    return calls


def _gather(moments: ProjectionMoments, dense: Written, pruned: Written, valid: Tensor | None) -> None:
    """Add one call: the inputs of the pruned model, and what its projection should give."""
    target = dense.output.double()
    if dense.stream is not None and pruned.stream is not None:
        target = target + dense.stream.double() - pruned.stream.double()
    inputs = pruned.inputs
    if valid is None:
        moments.update(inputs.flatten(0, -2), target.flatten(0, -2))
        return
    if valid.shape != inputs.shape[:2]:
        raise GateError(
            f"the mask of valid queries has shape {list(valid.shape)}, but the heads' outputs have {list(inputs.shape[:2])}; "
            "expected the same batch and queries"
        )
    moments.update(inputs[valid.bool()], target[valid.bool()])


@contextmanager
def _in_force(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values of some parameters for the length of a ``with`` block, without copying them."""
    before = {name: model.get_parameter(name).data for name in values}
    try:
        for name, value in values.items():
            model.get_parameter(name).data = value
        yield
    finally:
        for name, value in before.items():
            model.get_parameter(name).data = value
