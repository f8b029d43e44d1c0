"""The dense model of a finished run, refitted to a mask without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gates.errors import GateError
from training.analysis.model import DenseModel
from training.commands.trained import TrainedModel, load_trained, names_checkpoint
from training.config import RefitSearch
from training.runs import progress
from training.runs.run_directory import RunDirectory
from training.scoring.refits import Refit, best_refit_, quality


def load_with_dense_weights(path: str) -> TrainedModel:
    """What a finished run left, with the weights at the end of fine-tuning.

    Raises:
        GateError: for a checkpoint with other weights, or no finished run.
    """
    if names_checkpoint(path):
        if Path(path).stem != "dense":
            raise GateError(f"--refit starts from the dense weights of a run, not from those of {path!r}; give its directory")
        return load_trained(path)
    return load_trained(str(RunDirectory.finished(path).checkpoint("dense")))


@progress.stage("refitting the dense weights")
def refitted_to(trained: TrainedModel, mask: Tensor, dense: DenseModel) -> tuple[TrainedModel, Refit, str]:
    """The same run with the weights behind its heads refitted to a mask, on the run's training data; of several ridges the
    one that does best on its selection split is taken. Also how it went, and how good the model is on that split, in words.

    Args:
        trained: with the dense weights; they stay as they are.
        mask: 0/1 per head, ``[heads]``.
        dense: the same model with the run's data, whose weights are changed and whose gates are detached.
    """
    aim = {name: parameter.detach() for name, parameter in trained.model.named_parameters()}
    subject, metric = dense.subject(), dense.pruner.task.main_metric
    before = quality(subject, torch.ones(subject.gates.size))
    found = best_refit_(subject, trained.gates.to_gates(mask), RefitSearch(), aim)
    dense.gates.detach()
    reached = f"{metric} on the selection split {found.reached:.4f} (dense {before:.4f})"
    changed = (
        f"not refitted, because every ridge does worse than the mask alone; {reached}"
        if found.ridge is None
        else f"refitted to this mask by least squares (ridge {found.ridge:g}), without training; {reached}"
    )
    return replace(trained, model=dense.pruner.backbone.cpu().eval(), changed=changed), found, reached
