"""Relevance of heads over the scoring data: to the class of a sentence, or to each token of its translation."""

from __future__ import annotations

from torch import Tensor

from gates.relevance.propagation import head_steps
from gates.relevance.shares import RelevanceShares, Shares, head_layers
from gates.relevance.targets import with_text
from training.scoring.subject import Batch, Subject
from training.tasks.decoding import generate
from training.tasks.translation import Translation


def relevance_shares(subject: Subject, *, epsilon: float | None, description: str) -> Shares:
    """Mean shares of heads in the relevance of their layers, each ``[heads]``.

    Args:
        subject: at rest.
        epsilon: of the epsilon rule; None for activation times gradient.
        description: of the pass, for its bar.
    """
    sites, backbone = subject.gates.sites, subject.backbone
    shares = RelevanceShares(head_layers(sites)).to(subject.device)
    for batch in subject.batches(description):
        for step in head_steps(backbone, sites, _predicted(subject, batch), epsilon=epsilon):
            shares.update(step.rows)
    return shares.compute()


def _predicted(subject: Subject, batch: Batch) -> dict[str, Tensor]:
    """The model's inputs; for a translator with its own greedy translation."""
    task, backbone = subject.task, subject.backbone
    if not isinstance(task, Translation):
        return task.model_inputs(backbone, batch)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    written = generate(backbone, ids, mask, task.decoding, beams=1)
    return with_text(backbone, {"input_ids": ids, "attention_mask": mask}, written)
