"""Run a model with many masks and measure every example under each mask.

Michel et al. 2019, section 3: a head's importance is the cost of removing only this head. The same loop serves masks such
as one head kept in each layer, or a ranking cut at several budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
def ablate(
    gates: HeadGates,
    masks: Tensor,
    batches: Iterable[Batch],
    per_example: Callable[[Batch], Tensor],
    entered: Callable[[int, Tensor], AbstractContextManager[None]] = lambda number, mask: nullcontext(),
) -> Tensor:
    """Return the values of ``per_example`` for every example under every mask.

    Args:
        gates: The gates of the model, attached meanwhile. The model is in evaluation mode.
        masks: The gate values, ``[masks, gates]``, from 0 to 1.
        per_example: A function that runs the model on a batch and returns values ``[examples]`` or ``[examples, values]``,
            such as the loss.
        entered: A context for each pass by the number of its batch and its mask, such as one that skips finished layers.

    Returns:
        ``[masks, examples]`` or ``[masks, examples, values]``, examples in the order of the batches.
    """
    if masks.dim() != 2 or masks.shape[1] != gates.size:
        raise GateError(f"the masks have shape {list(masks.shape)}; expected [masks, {gates.size}]")
    results = []
    with alone(gates.model), gates.attached(), observing(gates.model, gates.sites):
        for number, batch in enumerate(batches):
            of_batch = []
            for mask in masks:
                with gates.use(mask.to(gates.mask)), entered(number, mask):
                    of_batch.append(per_example(batch))
            results.append(torch.stack(of_batch))
    if not results:
        raise GateError("there are no examples to ablate heads on; give at least one batch")
    return torch.cat(results, dim=1)


def leave_one_out_masks(gates: int) -> Tensor:
    """Return the dense mask and one mask with each gate closed, ``[gates + 1, gates]``."""
    return torch.cat([torch.ones(1, gates), 1 - torch.eye(gates)])


# The replacement of a closed head is zero, its mean output, or its output with uniform attention. *Mean* ablation (Wang et al.
# 2023, arXiv 2211.00593) uses the average output over data. *Uniform* attention keeps the head's values but not its choice
# among them (Hassid et al. 2022, arXiv 2211.03495, use the average attention matrix).
#
# With gate z a head's output becomes ``z * head + (1 - z) * replacement``, in every mode of the gates and with gradients. One
# hook before the gates subtracts the replacement, and one after them adds it.


class MeanHeadOutput(HeadMetric):
    """Average the output of every head over all queries that are not padding, exactly under DDP. Its input comes from
    :func:`gates.attention.intercept.observe_head_outputs`."""

    count: Tensor

    def __init__(self, sites: Sequence[AttentionSite], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._names = self._add_sites("sum", sites)
        self.add_state("count", torch.zeros(len(sites), dtype=torch.long), dist_reduce_fx="sum")

    def _add_sites(self, name: str, sites: Sequence[AttentionSite]) -> list[str]:
        shapes = {f"{name}_{index}": [site.heads * site.head_dim] for index, site in enumerate(sites)}
        self.add_sums(**shapes)
        return list(shapes)

    def update(self, site: int, heads: Tensor, valid: Tensor | None = None) -> None:
        """Add the heads ``[batch, query, heads * head_dim]`` of one site. Only valid queries ``[batch, query]`` count; None for
        all."""
        self._add(site, valid_positions(heads.detach(), valid).double())

    def _add(self, site: int, rows: Tensor) -> None:
        """Add valid queries of one site, ``[queries, heads * head_dim]``."""
        getattr(self, self._names[site]).add_(rows.sum(0).to(self.count.device))  # sites may be on several devices
        self.count[site] += len(rows)

    def compute(self) -> list[Tensor]:
        """Return for each site the mean of its concatenated heads, ``[heads * head_dim]``, float64."""
        return [getattr(self, name) / count.clamp(min=1) for name, count in zip(self._names, self.count, strict=True)]


@contextmanager
def mean_replacement(gates: HeadGates, means: Sequence[Tensor]) -> Iterator[None]:
    """Replace closed heads by their mean output ``[heads * head_dim]`` of each site, from :class:`MeanHeadOutput`."""
    expected = [site.heads * site.head_dim for site in gates.sites]
    if [mean.numel() for mean in means] != expected:
        raise GateError(f"the means have sizes {[mean.numel() for mean in means]}; expected {expected}, one for each site")
    with _replaced(gates, lambda site, heads: means[site].to(heads)):
        yield


@contextmanager
def given_replacement(gates: HeadGates, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Replace closed heads by given outputs, such as those on other examples, with the shape of the heads in later passes,
    ``[batch, query, heads * head_dim]``."""

    def of_call(site: int, heads: Tensor) -> Tensor:
        if outputs[site].shape != heads.shape:
            raise GateError(
                f"the heads of {gates.sites[site].name} have the shape {list(heads.shape)}, but their replacement has "
                f"{list(outputs[site].shape)}; give outputs for this batch"
            )
        return outputs[site].to(heads)

    with _replaced(gates, of_call):
        yield


@contextmanager
def uniform_replacement(model: PreTrainedModel, gates: HeadGates) -> Iterator[None]:
    """Replace closed heads by uniform attention over the keys that each query sees.

    The model's attention function runs a second time with queries of zero, whose scores are all equal.

    Args:
        model: A model whose attention goes through Transformers' attention interface.

    Raises:
        GateError: If the gates are not attached, or queries of zero do not give uniform attention. Reasons are a position
            bias, an attention sink, or heads that change before the output projection.
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
    """Return whether an additive mask is 0 at visible keys and the lowest value elsewhere."""
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


# Interchange interventions replace a head's output on an example by its output on a counterpart, which differs in one fact. If
# the answer changes to the counterpart's, the head carries the fact (the indirect effect of Vig et al. 2020, *Causal Mediation
# Analysis for Interpreting Neural NLP*; Geiger et al. 2021, *Causal Abstractions of Neural Networks*). Nothing is removed, so
# all other activations stay in distribution.


class Interchange(NamedTuple):
    """Hold the effects of interchanges in a batch of pairs."""

    # The drop in the margin of an example's answer when one gate's heads read the counterpart, ``[batch, gates]``.
    moved: Tensor
    apart: Tensor  # The margin on the example minus the margin on the counterpart, ``[batch]``
    own: Tensor  # The margin on the example, ``[batch]``


@torch.no_grad()
def interchange(gates: HeadGates, original: Batch, counterpart: Batch, margin: Callable[[Batch], Tensor]) -> Interchange:
    """Replace the outputs of each gate's heads by those on the counterparts, one gate at a time.

    Args:
        gates: The gates of the model, attached or not. The model is in evaluation mode meanwhile.
        counterpart: The batch of counterparts, with the same shape.
        margin: A function that runs the model on either batch and returns the margin of the *original's* answer, ``[batch]``,
            such as a difference of logits.
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
    """Return the share of the difference between an example's and its counterpart's answer that each gate causes, ``[gates]``.

    It is the ratio of sums of :class:`Interchange` over pairs, so pairs with a small difference have little weight.
    """
    if float(apart) <= 0:
        raise GateError(
            f"the answers on the examples and on their counterparts lie {float(apart):.3g} apart; expected more than 0, from a "
            "model that has learned the fact in which they differ"
        )
    return moved / apart


# *Optimal ablation* replaces a closed head by the constant of the lowest loss, the same at every position (Li and Janson 2024,
# arXiv 2409.09951). Zero, or even the head's mean, can be an input that later layers never saw. The remaining increase of the
# loss is only due to the head's information.
#
# Constants start from the mean output and descend the gradient of the mean loss over all examples. Each has its own step size
# (Barzilai and Borwein 1988). A step that does not lower the loss is undone and repeated with a shorter one. So the loss on
# these examples is never above that of mean ablation, and does not depend on batches or processes.


def descend_each(
    start: Tensor, evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], *, floor: float | Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Search the minima of several functions, one per row, by steps that never increase them.

    Args:
        start: The first points, ``[problems, features]``.
        evaluate: A function from points ``[problems, features]`` to their values ``[problems]`` and gradients.
        floor: The values that set the size of the first step. They are not a bound.

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
        fitting = torch.where(curvature > 0, moved.square().sum(1) / curvature.clamp(min=1e-300), 2.0 * rate)
        rate = torch.where(lower, fitting, 0.25 * rate)  # a step without progress is repeated with a shorter one
        best = torch.where(lower.unsqueeze(1), trial, best)
        gradient = torch.where(lower.unsqueeze(1), slope, gradient)
        value = torch.where(lower, tried, value)
    return best, value
