"""Interchange interventions: what a model's answer owes to what a head read in this example and not in another.

A head's output on an example is exchanged for its output on a counterpart, which differs in the one fact that the answer hangs
on. As far as the answer goes over to the counterpart's, the head carries the fact (the indirect effect of Vig et al. 2020,
*Causal Mediation Analysis for Interpreting Neural NLP*; Geiger et al. 2021, *Causal Abstractions of Neural Networks*).
Nothing is removed, so the model sees what it was trained on everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.evaluating import evaluating
from gates.hooks.intercept import observe_head_outputs
from gates.hooks.replacement import given_replacement
from gates.scores.ablation import Batch


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
        original: a batch.
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
    """The share of the way from an example's answer to its counterpart's that each gate alone goes, ``[gates]``: the ratio of
    sums, so that pairs which hardly differ for the model count for little.

    Args:
        moved, apart: sums of :class:`Interchange` over pairs, ``[gates]`` and a scalar.

    Raises:
        GateError: if the model does not tell the examples from their counterparts.
    """
    if float(apart) <= 0:
        raise GateError(
            f"the answers on the examples and on their counterparts lie {float(apart):.3g} apart; expected more than 0: the "
            "model has not learned the fact that they differ in, so no head can be told to carry it"
        )
    return moved / apart
