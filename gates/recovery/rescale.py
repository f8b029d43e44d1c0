"""Rescale the kept heads of a pruned model, site by site, so that each site's output comes near the dense model's.

The running side of the mask tuning of Kwon et al. 2022, whose mathematics is in :mod:`gates.scores.fisher`. Sites are fitted
in the order of the model, each with the gate values found for those before it, so that a later site also makes up for what
earlier ones lost. Two things differ from the paper: the target is the output of the site's projection alone (theirs adds the
residual stream), and a site whose fit is not to be trusted is left as it is (theirs then leaves all later ones too).
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
    """Real gate values for a mask, by least squares on calibration data.

    The model runs twice over the batches for every site that keeps heads.

    Args:
        gates: gates of a model, in evaluation mode meanwhile, with the weights that the mask is for.
        mask: 0/1 mask ``[gates]``.
        batches: the calibration batches, the same ones at every call.
        forward: function that runs the model on a batch.
        valid: function from a batch to its queries that are not padding, ``[batch, query]``, by kind or by the name of a
            module; None or nothing where all count.

    Returns:
        ``[gates]``, float64 on the CPU, 0 where the mask is; give it to :meth:`HeadGates.use`.

    Raises:
        GateError: for a mask of another size or other values, adapters on the projections, or a mask of valid queries for
            several stacks or of another shape.

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
