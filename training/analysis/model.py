"""The dense model of a finished run under any masks: what it predicts, and how its heads score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jsonargparse import ArgumentError, ArgumentParser
from matplotlib.figure import Figure
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor

from gates.errors import GateError, first_line
from gates.head_gates import HeadGates
from gates.latency.table import LatencyTable
from gates.scores.ablation import ablate
from gates.scores.importance import HeadImportance, head_gradients
from training.analysis.outcomes import LOSS, ClassOutcomes, LossOutcomes, Measure, Outcomes
from training.cli.line import one_sentence, shortened
from training.cli.run_parser import build_parser
from training.config.yaml_text import read_text
from training.data.base import TaskData
from training.data.classification import ClassificationData
from training.pruner.checkpoints import check_identity, read_checkpoint
from training.pruner.module import HeadPruner
from training.runs import progress
from training.runs.checksums import check_unchanged
from training.runs.resuming import check_same_data, noted_identity
from training.runs.run_directory import CONFIG, LATENCY, RunDirectory
from training.scoring.subject import Subject
from training.setup import Setup, make_pruner, make_trainer, open_data
from training.stats.bootstrap import METRICS

ONE_DEVICE: dict[str, Any] = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
OTHER_DATA = ("--data", "--config", "--seed", "--model.backbone")
"""Beginnings of options of fit by which other data can be read, or the same be encoded otherwise."""
SAME_DATA = ("--data.num_workers",)
Split = Literal["score", "select", "test"]


@dataclass(frozen=True)
class DenseModel:
    """A run's model at the end of its fine-tuning, with its data.

    Args:
        run: finished.
        setup: of the run.
        pruner: with the dense weights, in evaluation mode on ``device``.
        data: of the run.
        device: of the run's accelerator; one, whatever the run had.
    """

    run: RunDirectory
    setup: Setup
    pruner: HeadPruner
    data: TaskData
    device: torch.device

    @property
    def gates(self) -> HeadGates:
        return self.pruner.gates

    def subject(self) -> Subject:
        """The same to be scored or refitted, in one process."""
        return Subject(self.pruner, self.data, make_trainer(self.setup, **ONE_DEVICE))

    @property
    def is_classifier(self) -> bool:
        return isinstance(self.data, ClassificationData) and self.metric in METRICS

    @property
    def metric(self) -> str:
        """The main metric, by its name in :data:`training.stats.bootstrap.METRICS`."""
        return self.pruner.task.main_metric

    @property
    def measure(self) -> Measure:
        """What masks are judged by: the main metric of a classifier, the loss of every other task."""
        return Measure.of(self.metric if self.is_classifier else LOSS)


@dataclass(frozen=True)
class Finding:
    """What one experiment found.

    Args:
        tables: by file name without ending.
        figures: likewise.
        sentences: each a result.
        numbers: for ``metrics.json``.
        pages: texts of further files, by name.
    """

    tables: dict[str, pd.DataFrame]
    figures: dict[str, Figure]
    sentences: list[str]
    numbers: dict[str, Any] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)


def load_dense(path: str, overrides: Sequence[str] = ()) -> DenseModel:
    """The dense model and the data of a finished run, rebuilt from its configuration.

    Args:
        path: of the run.
        overrides: arguments of ``training.fit`` in place of the configuration's, such as where the data are now.

    Raises:
        GateError: if there is no such run, it has not ended, or its data cannot be read or have changed.
    """
    return _load(path, overrides, "dense")[0]


def load_pruned(path: str, overrides: Sequence[str] = ()) -> tuple[DenseModel, Tensor]:
    """The same with the weights of the end of the run, and the mask ``[gates]`` that it trained them with.

    Raises:
        GateError: as above, or if the run has no mask.
    """
    found, state = _load(path, overrides, "final")
    mask = state.get("gates.mask")
    if mask is None or mask.shape != (found.gates.size,) or not 0 < int((mask > 0).sum()) < found.gates.size:
        raise GateError(f"the run in {path!r} pruned no head, so that it has no pruned weights; use --weights dense")
    return found, (mask > 0).to(found.device, torch.float32)


def _load(path: str, overrides: Sequence[str], name: str) -> tuple[DenseModel, dict[str, Tensor]]:
    """A run's model with the weights of one of its checkpoints, and all that the checkpoint holds."""
    run = RunDirectory.finished(path)
    setup = setup_of(run, overrides)
    checkpoint = read_checkpoint(run.checkpoint(name))
    check_identity(checkpoint, run.checkpoint(name), noted_identity(run), f"the run in {path!r}")
    data = _open_data(run, setup, overrides, str(run.checkpoint(name)))
    pruner = make_pruner(setup, data)
    state = {name.removeprefix("backbone."): v for name, v in checkpoint["state_dict"].items() if name.startswith("backbone.")}
    try:
        pruner.backbone.load_state_dict(state)  # alone: all gates are open here
    except RuntimeError as error:
        raise GateError(
            f"{name}.ckpt in {path!r} is not of the model in its config.yaml; give the run that wrote both"
        ) from error
    device = make_trainer(setup, **ONE_DEVICE).strategy.root_device
    return DenseModel(run, setup, pruner.to(device).eval(), data, device), checkpoint["state_dict"]


def names_of_other_data(overrides: Sequence[str]) -> list[str]:
    """Which of some arguments of ``training.fit`` may name other data than a run's, without their values."""
    return [given.split("=")[0] for given in overrides if given.startswith(OTHER_DATA) and not given.startswith(SAME_DATA)]


def _open_data(run: RunDirectory, setup: Setup, overrides: Sequence[str], checkpoint: str) -> TaskData:
    """The data of a run with the vocabulary that it trained; they are those it was trained on, unless others are named."""
    reads_others = bool(names_of_other_data(overrides))
    try:
        data = open_data(setup, checkpoint)
    except GateError as error:
        if reads_others:
            raise
        raise GateError(
            f"{error}; config.yaml of the run in {str(run.path)!r} says so, and options of fit behind a lone -- take the place "
            "of its own"
        ) from error
    if not reads_others:
        check_same_data(run, data.fingerprint)
    return data


def setup_of(run: RunDirectory, overrides: Sequence[str] = (), given: str = "what follows --") -> Setup:
    """What a run was told, with arguments of ``training.fit`` in place of some of it.

    Args:
        run: finished.
        overrides: these arguments.
        given: what they are called in errors.

    Raises:
        GateError: for an argument that ``training.fit`` does not take, or a configuration that has changed.
    """
    setup = Setup.of(read_configuration(run.path / CONFIG, "run", overrides, given=given))
    return setup.within(LatencyTable.read(run.path / LATENCY)) if isinstance(setup.model.budget, str) else setup


def read_configuration(
    file: Path,
    whose: str,
    overrides: Sequence[str] = (),
    build: Callable[[], ArgumentParser] = build_parser,
    *,
    given: str = "what follows --",
) -> Any:
    """What a configuration file says, with arguments in place of some of it. Errors of the parser say which of the two it does
    not take."""
    check_unchanged(file, read_text(file, "the configuration"))
    config = ["--config", str(file)]
    told = read_arguments(config, f"the {whose}'s configuration cannot be used ({str(file)!r})", build)
    return read_arguments([*config, *overrides], f"{given} cannot be used", build) if overrides else told


def read_arguments(arguments: Sequence[str], wrong: str, build: Callable[[], ArgumentParser] = build_parser) -> Any:
    """What arguments of ``training.fit`` say, or those of another parser; raises :class:`GateError` that begins with what is
    wrong then."""
    parser = build()
    parser.exit_on_error = False
    try:
        return parser.parse_args(list(arguments))
    except (ArgumentError, UnicodeDecodeError, RecursionError) as error:
        reason = shortened(one_sentence(str(error), parser)) if isinstance(error, ArgumentError) else first_line(error)
        raise GateError(f"{wrong}: {reason}") from error


def outcomes(dense: DenseModel, masks: Tensor, split: Split, *, data: TaskData | None = None) -> Outcomes:
    """What the model does under every mask ``[masks, gates]`` on a split of the run's data, or of others: the losses of any
    task, and of a classifier predictions too."""
    source = data or dense.data
    loader = {"score": source.score_dataloader, "select": source.val_dataloader, "test": source.test_dataloader}[split]()
    task, backbone = dense.pruner.task, dense.pruner.backbone
    with_classes = dense.is_classifier

    def per_example(batch: dict[str, Tensor]) -> Tensor:
        losses, logits = task.losses(backbone, batch)
        if not with_classes:
            return losses.float().unsqueeze(-1)
        return torch.stack([losses.float(), logits.argmax(-1).float(), batch["labels"].float()], dim=-1)

    batches = (move_data_to_device(batch, dense.device) for batch in progress.track(loader, f"evaluating {len(masks)} masks"))
    found = ablate(dense.gates, masks, batches, per_example).cpu().numpy()
    losses = found[..., 0].astype(np.float64)
    if not with_classes:
        return LossOutcomes(losses)
    return ClassOutcomes(losses, found[..., 1].astype(np.int64), found[0, :, 2].astype(np.int64), dense.metric)


def head_importance(
    dense: DenseModel, mask: Tensor | None = None, split: Split = "score", *, data: TaskData | None = None
) -> Tensor:
    """HIS of every gate ``[gates]`` on the CPU, raw, with a mask ``[gates]`` in force (by default all heads open); closed gates
    have a score of 0 for the most part and no meaning."""
    source, gates = data or dense.data, dense.gates
    loader = {"score": source.score_dataloader, "select": source.val_dataloader, "test": source.test_dataloader}[split]()
    task, backbone = dense.pruner.task, dense.pruner.backbone
    importance = HeadImportance(gates.size).to(dense.device)
    values = torch.ones(gates.size) if mask is None else mask
    for batch in progress.track(loader, "scoring heads"):
        batch = move_data_to_device(batch, dense.device)
        with gates.use(values.to(dense.device)):
            importance.update(head_gradients(gates, lambda batch=batch: task.losses(backbone, batch)[0]))  # type: ignore[misc]
    return importance.compute().his.cpu()


def gate_columns(gates: HeadGates) -> pd.DataFrame:
    """Where each gate is: gate, site, kind, layer, and its number within the site."""
    rows = [
        {"site": site.label, "kind": site.kind, "layer": site.layer, "head": head}
        for site, size in zip(gates.sites, gates.sizes, strict=True)
        for head in range(size)
    ]
    table = pd.DataFrame(rows)
    table.insert(0, "gate", range(len(rows)))
    return table
