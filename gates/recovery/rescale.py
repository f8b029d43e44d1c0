"""Rescale the kept heads of a pruned model, site by site, to approximate each site's dense output.

This runs the mask tuning of Kwon et al. 2022; the mathematics is in :mod:`gates.scores.fisher`. Sites are fitted in the order
of the model with the gate values of earlier sites, so a later site also compensates for their losses. Two things differ from
the paper. The target is the output of the site's projection without the residual stream. A site with an unreliable fit keeps
its gates, while the paper then also skips all later sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from gates.attention.intercept import alone, observe_head_outputs, observing
from gates.attention.layouts import check_merged
from gates.attention.sites import weight_by_output
from gates.attention.valid import Valid, rows_by_site, valid_positions
from gates.gating.budget import check_mask
from gates.gating.head_gates import HeadGates
from gates.recovery.least_squares import ProjectionMoments
from gates.scores.fisher import gram_and_cross, rescale

Batch = TypeVar("Batch")


@torch.no_grad()
def rescaled_gates(
    gates: HeadGates,
    mask: Tensor,
    batches: Callable[[], Iterable[Batch]],
    forward: Callable[[Batch], object],
    valid: Callable[[Batch], Valid],
) -> Tensor:
    """Return real gate values ``[gates]`` for a mask by least squares on calibration data, float64 on the CPU.

    The model runs twice over the batches for every site that keeps heads. Use the values with :meth:`HeadGates.use`.

    Args:
        gates: The gates of the model, which is in evaluation mode meanwhile.
        mask: The mask of 0 and 1, ``[gates]``.
        batches: A function that returns the same calibration batches at every call.
        forward: A function that runs the model on a batch.
        valid: A function from a batch to its queries that are not padding, ``[batch, query]``, by kind or by the name of a
            module. None or a missing key where all count.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> batches, gates = [torch.randint(50, (3, 7))], HeadGates(model)
    >>> mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1])
    >>> values = rescaled_gates(gates, mask, lambda: batches, model, lambda batch: {})
    >>> torch.equal(values == 0, mask == 0)
    True
    """
    check_mask(mask, gates.size, gates.unit)
    check_merged(gates.model)
    values = mask.to(gates.mask, copy=True)
    dense = torch.ones_like(values)
    firsts = [sum(gates.sizes[:index]) for index in range(len(gates.sizes))]
    with alone(gates.model), gates.attached(), observing(gates.model, gates.sites):
        for index, (site, size, first) in enumerate(zip(gates.sites, gates.sizes, firsts, strict=True)):
            kept = mask[first : first + size]
            if not bool((kept > 0).any()):
                continue
            weight = weight_by_output(site.output)
            moments = ProjectionMoments(weight.shape[1], weight.shape[1]).to(values.device)
            for batch in batches():
                inputs: dict[bool, list[Tensor]] = {}
                for is_dense, in_force in ((True, dense), (False, values)):
                    found = inputs[is_dense] = []

                    def take(_: int, heads: Tensor, found: list[Tensor] = found) -> None:
                        found.append(heads)

                    with gates.use(in_force), observe_head_outputs(gates.model, [site], take):
                        forward(batch)
                queries = rows_by_site(valid(batch), gates.sites)[index]
                for of_pruned, of_dense in zip(inputs[False], inputs[True], strict=True):
                    moments.update(valid_positions(of_pruned, queries), valid_positions(of_dense, queries))
            gathered = moments.compute()
            gram, cross = gram_and_cross(gathered.xx, gathered.xy, weight, size)
            values[first : first + size] = rescale(kept, gram, cross).to(values)
    return values.double().cpu()
