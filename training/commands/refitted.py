"""The dense model of a finished run, refitted to a mask without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from gates.errors import GateError
from training.analysis.model import ONE_DEVICE, setup_of
from training.commands.trained import TrainedModel, load_trained, names_checkpoint
from training.config import RefitSearch
from training.runs import progress
from training.runs.run_directory import RunDirectory
from training.scoring.refits import Refit, best_refit_
from training.scoring.subject import Subject
from training.setup import make_pruner, make_trainer, open_data


def load_dense(path: str) -> TrainedModel:
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
def refitted_to(trained: TrainedModel, mask: Tensor) -> tuple[TrainedModel, Refit]:
    """The same model with the weights behind its heads refitted to a mask, on the run's training data; of several ridges
    the one that does best on its selection split is taken.

    Args:
        trained: with the dense weights; they stay as they are.
        mask: 0/1 per head, ``[heads]``.

    Raises:
        GateError: if the run's data cannot be read, or its configuration is of another model.
    """
    setup = setup_of(trained.run)
    data = open_data(setup, str(trained.run.checkpoint("dense")))
    pruner = make_pruner(setup, data)
    try:
        pruner.backbone.load_state_dict(trained.model.state_dict())
    except RuntimeError as error:
        raise GateError(
            f"dense.ckpt in {str(trained.run.path)!r} is not of the model in its config.yaml; give the run that wrote both"
        ) from error
    subject = Subject(pruner, data, make_trainer(setup, **ONE_DEVICE))
    dense = {name: parameter.detach() for name, parameter in trained.model.named_parameters()}
    found = best_refit_(subject, trained.gates.to_gates(mask), RefitSearch(), dense)
    pruner.gates.detach()
    changed = f"refitted to this mask by least squares (ridge {found.ridge:g}), without training"
    return replace(trained, model=pruner.backbone.cpu().eval(), changed=changed), found
