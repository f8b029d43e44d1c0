"""Run a model with many masks, one after the other, and see what each does to every example.

Michel et al. 2019, section 3: a head's worth is what its removal alone costs. The same loop serves any family of masks:
each head left out, one head kept in each layer, a ranking cut at several budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.attention.intercept import alone, attention_calls, observe_head_outputs, observing, uses_interface
from gates.attention.modes import evaluating
from gates.attention.sites import AttentionSite
from gates.attention.valid import valid_positions
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.metric import HeadMetric

Batch = TypeVar("Batch")


@torch.no_grad()
def ablate(gates: HeadGates, masks: Tensor, batches: Iterable[Batch], per_example: Callable[[Batch], Tensor]) -> Tensor:
    """What ``per_example`` finds of every example under every mask.

    Args:
        gates: gates of the model, attached for as long as this runs; the model is in evaluation mode meanwhile.
        masks: gate values ``[masks, gates]``, 0/1 or between.
        per_example: function that runs the model on a batch and returns a value per example ``[examples]``, such as its
            loss or whether its answer is right, or several ``[examples, values]``.

    Returns:
        ``[masks, examples]`` or ``[masks, examples, values]``, examples in the order of the batches.
    """
    if masks.dim() != 2 or masks.shape[1] != gates.size:
        raise GateError(f"the masks have shape {list(masks.shape)}; expected [masks, {gates.size}]")
    results = []
    with alone(gates.model), gates.attached(), observing(gates.model, gates.sites):
        for batch in batches:
            of_batch = []
            for mask in masks:
                with gates.use(mask.to(gates.mask)):
                    of_batch.append(per_example(batch))
            results.append(torch.stack(of_batch))
    if not results:
        raise GateError("there are no examples to ablate heads on; give at least one batch")
    return torch.cat(results, dim=1)


def leave_one_out_masks(gates: int) -> Tensor:
    """The dense mask, then each gate closed alone: ``[gates + 1, gates]``."""
    return torch.cat([torch.ones(1, gates), 1 - torch.eye(gates)])


# What takes the place of a closed head: its mean output, or what it would read with uniform attention, instead of zero.
#
# Zero is one choice of three. *Mean* ablation (Wang et al. 2023, arXiv 2211.00593) replaces a head by its average output over
# data, which keeps what it adds to every position alike. *Uniform* attention keeps the head's values but takes away its choice
# among them (Hassid et al. 2022, arXiv 2211.03495, do so with the average attention matrix).
#
# With gate z a head's output becomes ``z * head + (1 - z) * replacement``, in every mode of the gates and with gradients: one
# hook in front of the gates takes the replacement away, one behind them adds it again.


class MeanHeadOutput(HeadMetric):
    """The mean output of every head over all queries that are not padding; exact under DDP. It is fed by
    :func:`gates.attention.intercept.observe_head_outputs`."""

    count: Tensor

    def __init__(self, sites: Sequence[AttentionSite], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._names = [f"sum_{index}" for index in range(len(sites))]
        self._add_sums(self._names, sites)
        self.add_state("count", torch.zeros(len(sites), dtype=torch.long), dist_reduce_fx="sum")

    def _add_sums(self, names: Sequence[str], sites: Sequence[AttentionSite]) -> None:
        """A sum over queries for every feature of each site."""
        for name, site in zip(names, sites, strict=True):
            self.add_state(name, torch.zeros(site.heads * site.head_dim, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, site: int, heads: Tensor, valid: Tensor | None = None) -> None:
        """Add one forward pass of one site: concatenated heads ``[batch, query, heads * head_dim]``, of which the queries count
        that are valid, ``[batch, query]``; None if all do."""
        self._add(site, valid_positions(heads.detach(), valid).double())

    def _add(self, site: int, rows: Tensor) -> None:
        """Add valid queries of one site, ``[queries, heads * head_dim]``."""
        getattr(self, self._names[site]).add_(rows.sum(0).to(self.count.device))  # sites may be on several devices
        self.count[site] += len(rows)

    def compute(self) -> list[Tensor]:
        """For each site, the mean of its concatenated heads, ``[heads * head_dim]``, float64."""
        return [getattr(self, name) / count.clamp(min=1) for name, count in zip(self._names, self.count, strict=True)]


@contextmanager
def mean_replacement(gates: HeadGates, means: Sequence[Tensor]) -> Iterator[None]:
    """Replace closed heads by their mean output ``[heads * head_dim]`` of each site, from :class:`MeanHeadOutput`, for the
    length of a ``with`` block."""
    expected = [site.heads * site.head_dim for site in gates.sites]
    if [mean.numel() for mean in means] != expected:
        raise GateError(f"the means have sizes {[mean.numel() for mean in means]}; expected {expected}, one for each site")
    with _replaced(gates, lambda site, heads: means[site].to(heads)):
        yield


@contextmanager
def given_replacement(gates: HeadGates, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Replace closed heads by given outputs, such as those on other examples, for the length of a ``with`` block. They have the
    shape of the heads in the passes to come, ``[batch, query, heads * head_dim]``."""

    def of_call(site: int, heads: Tensor) -> Tensor:
        if outputs[site].shape != heads.shape:
            raise GateError(
                f"the heads of {gates.sites[site].name} have the shape {list(heads.shape)}, and what is to replace them "
                f"{list(outputs[site].shape)}; give outputs for this batch"
            )
        return outputs[site].to(heads)

    with _replaced(gates, of_call):
        yield


@contextmanager
def uniform_replacement(model: PreTrainedModel, gates: HeadGates) -> Iterator[None]:
    """Replace closed heads by uniform attention over the keys each query sees, for the length of a ``with`` block.

    The model's own attention function runs a second time with queries of zero, whose scores are all equal.

    Args:
        model: model whose attention goes through Transformers' attention interface.
        gates: gates attached to the model.

    Raises:
        GateError: for gates that are not attached, and where queries of zero do not give uniform attention that can be taken
            over: models that compute attention on their own, add a position bias to the scores or have an attention sink, or
            change the heads between attention and output projection.
    """
    own = next((site for site in gates.sites if not uses_interface(site)), None)
    if own is not None:
        raise _refusal(own.core, "computes attention on its own")
    index = {id(site.core): position for position, site in enumerate(gates.sites)}
    waiting: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        name: str,
        function: Callable[..., tuple[Tensor, Tensor | None]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        output, weights = function(module, query, key, value, attention_mask, **kwargs)
        position = index.get(id(module))
        if position is not None:
            bias, sink = kwargs.get("position_bias"), kwargs.get("s_aux")
            if bias is not None and bool(bias.any()):
                raise _refusal(module, "adds a position bias to the scores")
            if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point() and not _only_hides(attention_mask):
                raise _refusal(module, "adds a bias to the scores")
            if sink is not None or kwargs.get("softcap") is not None:
                raise _refusal(module, "has an attention sink or caps its scores")
            no_dropout = {**kwargs, "dropout": 0.0}
            uniform, _ = function(module, torch.zeros_like(query), key, value, attention_mask, **no_dropout)
            waiting[position] = (output, uniform)
        return output, weights

    def of_call(site: int, heads: Tensor) -> Tensor:
        output, uniform = waiting.pop(site)
        if output.numel() != heads.numel() or not torch.equal(output.detach().reshape(heads.shape), heads.detach()):
            raise _refusal(gates.sites[site].core, "changes the heads between attention and output projection")
        return uniform.reshape(heads.shape)

    with attention_calls(gates.sites, attend), _replaced(gates, of_call):
        yield


def _only_hides(mask: Tensor) -> bool:
    """Whether an additive mask is 0 at visible keys and the lowest value elsewhere."""
    return bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all())


def _refusal(core: nn.Module, reason: str) -> GateError:
    return GateError(f"{type(core).__name__} {reason}, so its heads have no uniform replacement; use zero or the mean")


@contextmanager
def _replaced(gates: HeadGates, replacement: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Put hooks around the gates' own, so that a head's output is ``z * head + (1 - z) * replacement``."""
    if not gates.is_attached:
        raise GateError("the gates are not attached, so no head can be replaced; attach() them first")
    calls: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def before(site: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        heads = args[0]
        instead = replacement(site, heads)
        calls[site] = (heads, instead, heads - instead)
        return (calls[site][2], *args[1:])

    def behind(site: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        heads, instead, difference = calls.pop(site)
        gated = args[0]  # z * (head - replacement)
        # Two ways to write the same: exact to the last bit at z = 1 and at z = 0, and both have its gradients.
        return (torch.where(gated == difference, heads + (gated - difference), gated + instead), *args[1:])

    with ExitStack() as stack:
        for position, site in enumerate(gates.sites):
            stack.callback(site.output.register_forward_pre_hook(partial(before, position), prepend=True).remove)
            stack.callback(site.output.register_forward_pre_hook(partial(behind, position)).remove)
        yield


# Interchange interventions: what a model's answer owes to what a head read in this example and not in another.
#
# A head's output on an example is exchanged for its output on a counterpart, which differs in the one fact that the answer
# hangs on. As far as the answer goes over to the counterpart's, the head carries the fact (the indirect effect of Vig et al.
# 2020, *Causal Mediation Analysis for Interpreting Neural NLP*; Geiger et al. 2021, *Causal Abstractions of Neural Networks*).
# Nothing is removed, so the model sees what it was trained on everywhere else.


class Interchange(NamedTuple):
    """What interchanges do in a batch of pairs.

    Args:
        moved: how much the margin of an example's own answer falls when one gate's heads read the counterpart,
            ``[batch, gates]``.
        apart: how much it falls when everything does, ``[batch]``: the margin on the example minus that on the counterpart.
        own: the margin on the example, ``[batch]``.
    """

    moved: Tensor
    apart: Tensor
    own: Tensor


@torch.no_grad()
def interchange(gates: HeadGates, original: Batch, counterpart: Batch, margin: Callable[[Batch], Tensor]) -> Interchange:
    """Exchange the output of one gate's heads after the other.

    Args:
        gates: of the model; they may be attached. The model is in evaluation mode meanwhile.
        counterpart: the batch of the same shape whose outputs take the place.
        margin: function that runs the model on a batch and says how much each example speaks for the *original's* answer,
            ``[batch]``, such as a difference of logits. It is asked of both batches.

    Raises:
        GateError: if the heads of the two batches put out different shapes.
    """
    outputs: dict[int, Tensor] = {}
    open_gates = torch.ones_like(gates.mask)
    with evaluating(gates.model), gates.attached():
        with gates.use(open_gates), observe_head_outputs(gates.model, gates.sites, outputs.__setitem__):
            of_counterpart = margin(counterpart)
        with gates.use(open_gates):
            own = margin(original)
        moved = torch.empty(len(own), gates.size, device=own.device, dtype=torch.float64)
        with given_replacement(gates, [outputs[site] for site in range(len(gates.sites))]):
            for gate in range(gates.size):
                with gates.use(open_gates.clone().index_fill_(0, torch.tensor([gate], device=open_gates.device), 0.0)):
                    moved[:, gate] = (own - margin(original)).double()
    return Interchange(moved, (own - of_counterpart).double(), own.double())


def effects(moved: Tensor, apart: Tensor) -> Tensor:
    """Return the share of the way from an example's answer to its counterpart's that each gate alone goes, ``[gates]``: the
    ratio of sums of :class:`Interchange` over pairs, so that pairs which hardly differ for the model count for little."""
    if float(apart) <= 0:
        raise GateError(
            f"the answers on the examples and on their counterparts lie {float(apart):.3g} apart; expected more than 0: the "
            "model has not learned the fact that they differ in, so no head can be told to carry it"
        )
    return moved / apart


# The constants that take the place of closed heads at the least loss (Li and Janson 2024, arXiv 2409.09951).
#
# A head that is closed takes away more than its information: zero, or even its mean, can be an input that the layers behind it
# never saw. *Optimal ablation* puts the constant there, the same at every position, with which the loss is lowest. What the
# loss still rises by is then due to the head's information alone.
#
# Here constants go down the gradient of the mean loss over all examples, from the mean output on, each with a step size of its
# own (Barzilai and Borwein 1988). A step that does not lower the loss is taken back and tried again shorter. So the loss on
# these examples is never above that of mean ablation, and neither batches nor processes matter.

SHORTER, LONGER = 0.25, 2.0
"""What a step size is multiplied by after a step in vain, and where the curvature is not positive."""


def descend_each(
    start: Tensor, evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], *, floor: float | Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Minimise several functions, each of its own row, by steps that only ever go down.

    Args:
        start: ``[problems, features]``.
        evaluate: function from points ``[problems, features]`` to their values ``[problems]`` and gradients.
        floor: values to be hoped for, which the first step aims at; it does not bound what is found.

    Returns:
        The best points ``[problems, features]`` and their values ``[problems]``, which are at most those at the start.
    """
    best = start
    value, gradient = evaluate(best)
    rate = (value - floor).abs() / gradient.square().sum(1).clamp(min=torch.finfo(gradient.dtype).tiny)
    for _ in range(steps):
        trial = best - rate.unsqueeze(1) * gradient
        tried, slope = evaluate(trial)
        lower = tried < value
        moved, turned = trial - best, slope - gradient
        curvature = (moved * turned).sum(1)
        fitting = torch.where(curvature > 0, moved.square().sum(1) / curvature.clamp(min=1e-300), LONGER * rate)
        rate = torch.where(lower, fitting, SHORTER * rate)
        best = torch.where(lower.unsqueeze(1), trial, best)
        gradient = torch.where(lower.unsqueeze(1), slope, gradient)
        value = torch.where(lower, tried, value)
    return best, value
