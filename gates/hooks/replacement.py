"""What takes the place of a closed head: its mean output, or what it would read with uniform attention, instead of zero.

Zero is one choice of three. *Mean* ablation (Wang et al. 2023, arXiv 2211.00593) replaces a head by its average output over
data, which keeps what it adds to every position alike. *Uniform* attention keeps the head's values but takes away its choice
among them (Hassid et al. 2022, arXiv 2211.03495, do so with the average attention matrix).

With gate z a head's output becomes ``z * head + (1 - z) * replacement``, in every mode of the gates and with gradients: one
hook in front of the gates takes the replacement away, one behind them adds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.intercept import attention_calls, uses_interface
from gates.hooks.metric import HeadMetric
from gates.hooks.valid import valid_positions
from gates.sites import AttentionSite


class MeanHeadOutput(HeadMetric):
    """The mean output of every head over all queries that are not padding; exact under DDP.

    Fed by :func:`gates.hooks.intercept.observe_head_outputs`.

    Args:
        sites: attention modules of the model that is observed.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

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
        """Add one forward pass of one site.

        Args:
            site: index of the site.
            heads: concatenated heads, ``[batch, query, heads * head_dim]``.
            valid: queries that are not padding, ``[batch, query]``; None if all count.

        Raises:
            GateError: for a mask of another shape.
        """
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
    """Replace closed heads by their mean output for the length of a ``with`` block.

    Args:
        gates: attached gates.
        means: mean output of the heads of each site, ``[heads * head_dim]``, from :class:`MeanHeadOutput`.

    Raises:
        GateError: for gates that are not attached, or means of other sizes.
    """
    expected = [site.heads * site.head_dim for site in gates.sites]
    if [mean.numel() for mean in means] != expected:
        raise GateError(f"the means have sizes {[mean.numel() for mean in means]}; expected {expected}, one for each site")
    with _replaced(gates, lambda site, heads: means[site].to(heads)):
        yield


@contextmanager
def given_replacement(gates: HeadGates, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Replace closed heads by given outputs, such as those on other examples, for the length of a ``with`` block.

    Args:
        gates: attached gates.
        outputs: of the heads of each site, of the shape that they have in the passes to come,
            ``[batch, query, heads * head_dim]``.

    Raises:
        GateError: for gates that are not attached; in a pass, where the heads have another shape.
    """

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
    """Hooks around the gates' own, so that a head's output is ``z * head + (1 - z) * replacement``.

    Args:
        gates: attached gates.
        replacement: of a site's heads ``[batch, query, heads * head_dim]``, broadcastable to them.
    """
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
