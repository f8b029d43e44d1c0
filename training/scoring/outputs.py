"""What heads put out on training data: their mean, and the gate values that make up for closed ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from gates.hooks.intercept import observe_head_outputs
from gates.hooks.replacement import MeanHeadOutput
from gates.recovery.rescale import rescaled_gates
from training.scoring.subject import Batch, Subject


def rescale(subject: Subject, mask: Tensor, *, batches: int = 16) -> Tensor:
    """Real gate values for any mask by least squares (see :func:`gates.recovery.rescale.rescaled_gates`).

    Args:
        subject: with the weights that the mask is for.
        mask: 0/1 ``[gates]``.
        batches: of the scoring data to fit on in each process, at least, spread over all lengths; they have far more positions
            than there are unknowns.

    Returns:
        ``[gates]``, float64 on the CPU; 0 where the mask is.
    """

    def calibration() -> Iterator[Batch]:
        loader = subject.data.score_dataloader()
        every = max(1, len(loader) // batches)
        return islice(subject.on_device(loader, "rescaling", bar=False), 0, None, every)  # a bar per site would be many

    def run(batch: Batch) -> object:
        return subject.task.losses(subject.backbone, batch)

    with subject.at_rest():
        return rescaled_gates(subject.gates, mask, calibration, run, subject.task.valid_queries)


def mean_outputs(subject: Subject) -> list[Tensor]:
    """The mean head output of each site, ``[heads * head_dim]``, for :func:`gates.hooks.replacement.mean_replacement`."""
    sites = subject.gates.sites
    means = MeanHeadOutput(sites).to(subject.device)
    with subject.at_rest(), torch.no_grad():
        for batch in subject.batches("mean outputs"):
            valid = subject.task.valid_queries(batch)

            def take(site: int, heads: Tensor, valid: dict[str, Tensor | None] = valid) -> None:
                means.update(site, heads, valid.get(sites[site].kind))

            with observe_head_outputs(subject.backbone, sites, take):
                subject.task.losses(subject.backbone, batch)
    return [mean.cpu() for mean in means.compute()]
