"""Search for a better mask on training data: :mod:`gates.search` with a task's data and the present weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor

from gates.attention.modes import frozen
from gates.gating.budget import Budget
from gates.search.sampled_masks import BestDraw, best_draw, draw_masks
from gates.search.successive_halving import Loss, passes_of
from gates.search.swaps import Limits, Refinement, refine_by_swaps
from training.config import DrawSearch, SwapSearch
from training.runs import progress
from training.scoring.subject import Batch, ScoringContext, at_rest


def refine(
    subject: ScoringContext, mask: Tensor, search: SwapSearch, *, budget: Budget, minimum_per_layer: int = 0
) -> Refinement:
    """Refine a mask ``[gates]`` by swaps. Under a budget per kind, gates are swapped within their kind.

    Dropout is off. The subject's gates are restored.
    """
    gates = subject.gates
    with calibration(subject, search.rows) as found, progress.stage("searching by swaps, passes", search.passes) as shown:

        def loss(values: Tensor, share: float) -> float:
            return found.loss(values, share, found.proposing)

        def losses(values: Tensor) -> Tensor:
            decided = found.losses(values)
            shown.advance(1.0, lambda: f"loss {float(decided.mean()):.3g}")
            return decided

        return refine_by_swaps(
            mask.to(subject.device),
            gradient=found.gradient,
            loss=_shown(loss, shown),
            losses=losses,
            limits=Limits(
                within=gates.kind_index() if budget.per_kind else None,
                layer_index=gates.layer_index(),
                minimum_per_layer=minimum_per_layer,
                time=budget.time,
            ),
            passes=search.passes,
            significance=search.significance,
        )


def draw(
    subject: ScoringContext,
    mask: Tensor,
    scores: Tensor,
    search: DrawSearch,
    *,
    budget: Budget,
    minimum_per_layer: int = 0,
    seed: int = 0,
) -> BestDraw:
    """Return the best of a mask ``[gates]`` and of masks that scores ``[gates]`` draw within its budget.

    Dropout is off. The subject's gates are restored.
    """
    draws = draw_masks(
        scores,
        budget,
        kind_index=subject.gates.kind_index(),
        layer_index=subject.gates.layer_index(),
        minimum_per_layer=minimum_per_layer,
        count=search.count,
        temperature=search.temperature,
        seed=seed,
    )
    passes = 1 + passes_of(sum(not torch.equal(one.cpu(), mask.cpu()) for one in draws))
    with calibration(subject, search.rows) as found, progress.stage("comparing draws, passes", passes) as shown:

        def loss(values: Tensor, share: float) -> float:
            return found.loss(values, share, found.deciding)

        return best_draw(mask.to(subject.device), [one.to(subject.device) for one in draws], loss=_shown(loss, shown))


def losses_of(subject: ScoringContext, masks: Sequence[Tensor], rows: int) -> list[float]:
    """Return the mean loss with each mask on training data that neither scored the heads nor trains anything.

    Args:
        masks: 0/1 ``[gates]``.
        rows: The number of training examples; the deciding half of them is used.
    """
    different = {tuple(mask.tolist()): mask for mask in masks}  # several searches may find the same mask
    losses = dict[tuple[float, ...], float]()
    with calibration(subject, rows) as found, progress.stage("judging masks", len(different)) as shown:
        for values, mask in different.items():
            losses[values] = found.loss(mask.to(subject.device), 1.0, found.deciding)
            shown.advance()
    return [losses[tuple(mask.tolist())] for mask in masks]


def _shown(loss: Loss, stage: progress.Stage) -> Loss:
    """Return the loss with progress: each pass over the data advances a stage."""

    def counted(values: Tensor, share: float) -> float:
        found = loss(values, share)
        stage.advance(share, lambda: f"loss {found:.3g}")
        return found

    return counted


class Calibration:
    """Losses and gradients of gate values on training data that neither scored the heads nor trains anything.

    Each process has a share of the examples, and all get the same numbers, so that they come to the same decisions.

    Args:
        subject: The model at rest. Its trainer's precision is used.
        rows: The number of training examples in two halves.

    Attributes:
        proposing, deciding: The batches of each half.
    """

    def __init__(self, subject: ScoringContext, rows: int) -> None:
        self.subject, self.device = subject, subject.device
        self.proposing, self.deciding = [
            [move_data_to_device(batch, self.device) for batch in loader]
            for loader in subject.data.calibration_dataloaders(rows)
        ]

    @torch.no_grad()
    def loss(self, values: Tensor, share: float, half: Sequence[Batch]) -> float:
        """Return the mean loss with gate values ``[gates]`` over a share of one half."""
        found = self._losses(values, half[:: max(1, round(1 / share))])
        examples = torch.tensor(float(len(found)), dtype=torch.float64, device=self.device)
        return float(self.subject.summed(found.sum()) / self.subject.summed(examples))

    @torch.no_grad()
    def losses(self, values: Tensor) -> Tensor:
        """Return the losses ``[examples]``, float64, of the deciding half of all processes with gate values ``[gates]``."""
        found, trainer = self._losses(values, self.deciding), self.subject.trainer
        counts = torch.zeros(trainer.world_size, dtype=torch.float64, device=self.device)
        counts[trainer.global_rank] = len(found)
        counts = self.subject.summed(counts).long()
        first = int(counts[: trainer.global_rank].sum())
        everyone = torch.zeros(int(counts.sum()), dtype=torch.float64, device=self.device)
        everyone[first : first + len(found)] = found
        return self.subject.summed(everyone)

    def gradient(self, values: Tensor) -> Tensor:
        """Return the gradient of the loss on the proposing half with respect to gate values ``[gates]``, up to a factor."""
        leaf = values.clone().requires_grad_()
        for batch in self.proposing:
            self._losses_of(leaf, batch).sum().backward()
        assert leaf.grad is not None
        return self.subject.summed(leaf.grad)

    def _losses(self, values: Tensor, batches: Sequence[Batch]) -> Tensor:
        return torch.cat([self._losses_of(values, batch) for batch in batches]).double()

    def _losses_of(self, values: Tensor, batch: Batch) -> Tensor:
        subject = self.subject
        with subject.trainer.strategy.precision_plugin.forward_context(), subject.gates.use(values):
            return subject.task.losses(subject.backbone, batch)[0]


@contextmanager
def calibration(subject: ScoringContext, rows: int) -> Iterator[Calibration]:
    """Yield a :class:`Calibration` with dropout off and frozen weights."""
    with at_rest(subject.module, subject.device), frozen(subject.backbone):
        yield Calibration(subject, rows)
