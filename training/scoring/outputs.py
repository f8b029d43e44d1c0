"""What heads put out on training data: its mean, and the gate values or weights that make up for closed ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from gates.hooks.intercept import observe_head_outputs
from gates.hooks.replacement import MeanHeadOutput
from gates.hooks.valid import rows_by_site
from gates.recovery.refit import Refitted, refit_
from gates.recovery.rescale import rescaled_gates
from training.scoring.subject import Batch, Subject


def rescale(subject: Subject, mask: Tensor, *, rows: int = 512) -> Tensor:
    """Real gate values for any mask by least squares (see :func:`gates.recovery.rescale.rescaled_gates`).

    Args:
        subject: with the weights that the mask is for.
        mask: 0/1 ``[gates]``.
        rows: of the scoring data to fit on, at most, spread over all lengths; they have far more positions than there are
            unknowns.

    Returns:
        ``[gates]``, float64 on the CPU; 0 where the mask is.
    """

    with subject.at_rest():
        return rescaled_gates(
            subject.gates, mask, partial(subject.thinned, rows), partial(_run, subject), subject.valid_queries
        )


def refit(
    subject: Subject, mask: Tensor, dense: Mapping[str, Tensor], *, ridge: float, rows: int, feed_forward: bool
) -> list[Refitted]:
    """Change the weights behind the heads so that the model does without the closed ones (see
    :func:`gates.recovery.refit.refit_`).

    Args:
        subject: with the weights that the mask is for; they are changed.
        mask: 0/1 ``[gates]``.
        dense: parameters of the dense model by name.
        ridge, rows, feed_forward: see :class:`training.config.search.RefitSearch`.
    """
    aim = {name: dense[name].to(subject.device) for name, _ in subject.backbone.named_parameters()}
    with subject.at_rest():
        return refit_(
            subject.gates,
            mask,
            partial(subject.thinned, rows),
            partial(_run, subject),
            subject.valid_queries,
            ridge=ridge,
            feed_forward=feed_forward,
            dense=aim,
        )


def _run(subject: Subject, batch: Batch) -> object:
    return subject.task.losses(subject.backbone, batch)


def mean_outputs(subject: Subject) -> list[Tensor]:
    """The mean head output of each site, ``[heads * head_dim]``, for :func:`gates.hooks.replacement.mean_replacement`."""
    means = MeanHeadOutput(subject.gates.sites).to(subject.device)
    with subject.at_rest():
        observe_outputs(subject, means, "mean outputs")
    return [mean.cpu() for mean in means.compute()]


@torch.no_grad()
def observe_outputs(subject: Subject, metric: MeanHeadOutput, description: str) -> None:
    """Feed a metric with what all heads put out on the scoring data.

    Args:
        subject: at rest.
        metric: of the subject's sites, on its device.
        description: of the pass, for its bar.
    """
    sites = subject.gates.sites
    for batch in subject.batches(description):
        valid = rows_by_site(subject.valid_queries(batch), sites)

        def take(site: int, heads: Tensor, valid: list[Tensor | None] = valid) -> None:
            metric.update(site, heads, valid[site])

        with observe_head_outputs(subject.backbone, sites, take):
            subject.task.losses(subject.backbone, batch)
