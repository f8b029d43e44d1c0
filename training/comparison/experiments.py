"""The experiments of a comparison: single pieces of training and evaluation of one seed, each done once and kept on disk."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor
from transformers import PreTrainedModel

from gates.attention.modes import kept_generators
from gates.errors import GateError
from gates.gating.budget import Budget
from training.comparison.cache import (
    Experiment,
    ExperimentCache,
    identity_of_dense,
    options_after_finetuning,
    options_of_gates,
    shape_of,
)
from training.config import DrawSearch, PrunerOptions, RefitOptions, RestartSearch, ScratchTraining, SwapSearch
from training.data.base import TaskData
from training.pruner.callbacks import CostInCheckpoints, EndOfPhase, LastGoodCheckpoint, Predictions, StopEarly
from training.pruner.checkpoints import check_whole, read_checkpoint, write_checkpoint
from training.pruner.logging import GateLog, PositionLog
from training.pruner.module import SPLITS, HeadPruner, evaluate, noise_of
from training.runs import processes, progress
from training.runs.cost import NO_COST, measured
from training.scoring.mask_search import draw, losses_of, refine
from training.scoring.passes import Replacement, Replacements
from training.scoring.refits import refit_if_better_
from training.scoring.subject import ScoringContext
from training.setup import Setup, make_pruner, make_trainer

# Voita's control: the structure that pruning found, trained from new weights with as many updates as the whole run.

OTHER_SEED = 104_729
"""The offset from the dense model's seed to that of new weights. With the same seed the control would be a rewound part of the
dense model (a lottery ticket, Frankle and Carbin 2019), and not new."""


def scratch_options(options: PrunerOptions, scratch: ScratchTraining, model: PreTrainedModel) -> PrunerOptions:
    """Return the options to train new weights: all of them, in one cycle of the learning rate, without distillation.

    Args:
        scratch: The length and learning rate of the training. By default it is as long as all phases of the run.
    """
    return replace(
        options,
        backbone=None,
        dtype="float32",
        from_scratch=shape_of(model),
        gate="hard-concrete",
        budget=None,
        finetune=scratch.from_scratch_epochs or options.epochs,
        prune=0.0,
        retrain=0.0,
        swaps=0.0,
        refit=False,
        learning_rate=scratch.from_scratch_learning_rate or options.learning_rate,
        prune_learning_rate=None,
        freeze=None,
        freeze_while_pruning=None,
        distil=0.0,
        distil_hidden=0.0,
    )


@torch.no_grad()
def new_weights_(pruner: HeadPruner, seed: int) -> None:
    """Give the backbone the weights of a new model of its class and config, drawn from a seed."""
    with kept_generators(pruner.backbone, seed):
        new = type(pruner.backbone)(copy.deepcopy(pruner.backbone.config))
    own = pruner.backbone.state_dict()
    for name, tensor in new.state_dict().items():
        own[name].copy_(tensor)


PREDICTIONS = "predictions.npz"
WEIGHTS = "weights.ckpt"
GATES_OVER_TIME = "gates_over_time.csv"


def read_weights(checkpoint: Path) -> dict[str, Any]:
    """Return the state dict of a checkpoint, on the CPU."""
    content: dict[str, Any] = read_checkpoint(checkpoint, mend=mend_of(checkpoint))["state_dict"]
    return content


def mend_of(checkpoint: Path) -> str:
    """Return the advice for a damaged checkpoint of an experiment, which can be made again."""
    return f"delete {str(checkpoint.parent)!r} and start again"


def backbone_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the backbone's part of a module's state dict, by the backbone's own names."""
    return {name.removeprefix("backbone."): tensor for name, tensor in state.items() if name.startswith("backbone.")}


def weights_of(experiment: Experiment) -> Path:
    """Return the checkpoint of an experiment."""
    if not (experiment.path / WEIGHTS).is_file():
        raise GateError(f"{str(experiment.path)!r} holds no weights; {mend_of(experiment.path / WEIGHTS)}")
    return experiment.path / WEIGHTS


class Experiments:
    """Do the experiments of one seed.

    Args:
        setup: The setup of the comparison, with the seed.
        data: The data, built, in the order of the seed.
        pruner: The module of the setup, built, with its first weights. Made by default.

    Attributes:
        options: The options of the module, without swaps and refits, which belong to methods.
        dense_key: The identity of the dense model, which is part of every other identity.
    """

    def __init__(
        self,
        setup: Setup,
        data: TaskData,
        *,
        cache: ExperimentCache,
        pruner: HeadPruner | None = None,
    ) -> None:
        self.setup, self.data, self.cache, self.seed = setup, data, cache, setup.run.seed
        self.options = replace(setup.model, swaps=0.0, refit=False)
        self.pruner = pruner or make_pruner(setup, data, self.options)
        self._built: tuple[PrunerOptions, HeadPruner] = (self.options, self.pruner)
        self.replacements = Replacements()
        self._loggers: list[Logger] = []
        self._logged_after = 0
        self.dense_key = identity_of_dense(setup, self.pruner, data, processes=self.trainer().world_size)

    def trainer(self, *callbacks: pl.Callback, **overrides: Any) -> pl.Trainer:
        """Return a trainer with the run's settings, without loggers, checkpoints and bars."""
        return make_trainer(self.setup, *callbacks, **overrides)

    @contextmanager
    def logged_to(self, loggers: Sequence[Logger], *, after: int = 0) -> Iterator[None]:
        """Log all training of a ``with`` block, and validate as often as the setup says.

        Args:
            after: The number of steps that the loggers have from another training, after the start of this one.
        """
        self._loggers, self._logged_after = list(loggers), after
        try:
            yield
        finally:
            self._loggers, self._logged_after = [], 0

    def dense(self) -> Experiment:
        """Return the dense model at the end of fine-tuning, in ``weights.ckpt``."""

        def make(folder: Path) -> dict[str, Any]:
            # The module has its first weights: every other experiment starts from this one.
            pl.seed_everything(self.seed, workers=True, verbose=False)
            start, patience = self.setup.run.ckpt_path, self.setup.weights.patience
            early = [] if patience is None else [StopEarly(self.pruner.task, patience)]
            end = EndOfPhase(folder / WEIGHTS, "finetune")
            return self._train(self.pruner, folder, *early, end, start=None if start is None else Path(start))

        work = "training" if self.options.finetune else "evaluating"
        return self.do(f"{work} the dense model", self.dense_key, make)

    def learn(self, changes: Mapping[str, Any], restart: int = 0) -> Experiment:
        """Do the prune phase of a learned method: ``weights.ckpt``, ``gates_over_time.csv`` and the final gates."""
        dense, options = self.dense(), replace(self.options, **changes)

        def make(folder: Path) -> dict[str, Any]:
            pruner, log = self._pruner(options), GateLog()
            end = EndOfPhase(folder / WEIGHTS, "prune")
            with noise_of(pruner, restart):
                cost = self._train(pruner, folder, end, log, start=dense.path / WEIGHTS)
            if processes.is_first():
                log.of_pruning(pruner).to_csv(folder / GATES_OVER_TIME, index=False)
            pruner.load_state_dict(read_weights(folder / WEIGHTS))
            return cost | pruner.steering.learned() | {"closing_step": pruner.closing_step.tolist()}

        determined_by = {
            "experiment": "learn", "dense": dense.key, "options": options_of_gates(options) | {"seed": self.seed},
            **({"restart": restart} if restart else {}),
        }  # fmt: skip
        return self.do(f"learning, budget {options.budget}", determined_by, make)

    def draw(
        self, mask: Tensor, scores: Tensor, budget: Budget, search: DrawSearch, *, start: Experiment, changes: Mapping[str, Any]
    ) -> Experiment:
        """Find the best of a mask and of masks drawn by scores ``[gates]`` within its budget, on the weights of ``start``."""
        minimum = self.options.minimum_per_layer
        determined_by = {
            "experiment": "draw", "start": start.key, "mask": mask.tolist(), "scores": scores.tolist(),
            "search": asdict(search), "seed": self.seed, "kinds": budget.terms, "minimum_per_layer": minimum,
        }  # fmt: skip

        def work(subject: ScoringContext) -> dict[str, Any]:
            found = draw(subject, mask, scores, search, budget=budget, minimum_per_layer=minimum, seed=self.seed)
            return {"mask": found.mask.tolist(), "losses": found.losses, "passes": found.passes}

        return self.measure(f"drawing {int(mask.sum())} heads", determined_by, work, start=start, changes=changes)

    def judge(self, masks: Sequence[Tensor], search: RestartSearch) -> Experiment:
        """Compute the losses of masks ``[gates]`` of one budget on the dense weights."""

        determined_by = {
            "experiment": "judge", "dense": self.dense().key, "masks": [mask.tolist() for mask in masks],
            "search": asdict(search),
        }  # fmt: skip
        judging = f"judging {len(masks)} masks"
        return self.measure(judging, determined_by, lambda subject: {"losses": losses_of(subject, masks, search.rows)})

    def freezes_weights(self, changes: Mapping[str, Any]) -> bool:
        """Return whether weights are frozen while gates are trained with these changes of the options."""
        return bool(replace(self.options, **changes).pipelined)

    def swap(
        self, mask: Tensor, budget: Budget, search: SwapSearch, *, start: Experiment, changes: Mapping[str, Any]
    ) -> Experiment:
        """Refine a mask by swaps within a budget, on the weights of ``start``."""

        minimum = self.options.minimum_per_layer
        determined_by = {
            "experiment": "swap", "start": start.key, "mask": mask.tolist(), "search": asdict(search),
            "kinds": budget.terms, "minimum_per_layer": minimum,
        }  # fmt: skip

        def work(subject: ScoringContext) -> dict[str, Any]:
            found = refine(subject, mask, search, budget=budget, minimum_per_layer=minimum)
            return vars(found) | {"mask": found.mask.tolist(), "gains": [gain._asdict() for gain in found.gains]}

        return self.measure(f"swapping among {int(mask.sum())} heads", determined_by, work, start=start, changes=changes)

    def refit(self, mask: Tensor, search: RefitOptions, *, start: Experiment, changes: Mapping[str, Any]) -> Experiment:
        """Refit the weights of ``start`` to a mask ``[gates]``: ``weights.ckpt``. The target is the dense model.

        Where the mask alone does clearly better on the selection split, the weights stay. Weights that were frozen are the
        dense ones, so both share a refit.
        """
        dense = self.dense()

        def make(folder: Path) -> dict[str, Any]:
            if start.key != dense.key and self.freezes_weights(changes):
                of_dense = self.refit(mask, search, start=dense, changes={})
                backbone = backbone_of(read_weights(weights_of(of_dense)))
                state, result = {f"backbone.{name}": tensor for name, tensor in backbone.items()}, dict(of_dense.result)
            else:
                subject = self.subject(start, changes)
                done = refit_if_better_(subject, mask, search, backbone_of(read_weights(weights_of(dense))))
                state = {name: tensor.cpu() for name, tensor in subject.backbone.state_dict(prefix="backbone.").items()}
                result = done.as_result()
            if processes.is_first():
                content = read_checkpoint(weights_of(start))
                write_checkpoint(content | {"state_dict": content["state_dict"] | state}, folder / WEIGHTS)
            return result

        determined_by = {
            "experiment": "refit", "dense": dense.key, "start": start.key, "mask": mask.tolist(), "search": asdict(search),
            "ridge": "of each projection",
        }  # fmt: skip
        return self.do(f"refitting {int(mask.sum())} heads", determined_by, make)

    def post_hoc(
        self,
        values: Tensor,
        splits: Sequence[str] = SPLITS,
        *,
        replacement: Replacement = "zero",
        start: Experiment | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Experiment:
        """Compute metrics and predictions of the dense model with fixed gate values ``[gates]``, mostly a mask.

        Args:
            replacement: The replacement of closed heads, see :data:`training.scoring.passes.Replacement`.
            start: The experiment with the weights. Default: the dense one.
        """
        determined_by = {
            "experiment": "post hoc", "dense": (start or self.dense()).key, "values": values.tolist(), "splits": list(splits),
            **({} if replacement == "zero" else {"replacement": replacement}),
        }  # fmt: skip

        def make(folder: Path) -> dict[str, Any]:
            pruner = self.with_weights(start or self.dense(), changes or {})
            with self.replacements.use(ScoringContext(pruner, self.data, self.trainer()), replacement, (values > 0).float()):
                return self._evaluate(pruner, folder, values, splits)

        return self.do(f"post hoc, {int((values > 0).sum())} heads", determined_by, make)

    def retrain(
        self,
        values: Tensor,
        *,
        start: Experiment,
        changes: Mapping[str, Any],
        steps: int | None = None,
        keeps_weights: bool = False,
    ) -> Experiment:
        """Retrain with fixed gate values to the end of the schedule, and return metrics and predictions.

        Args:
            steps: The number of steps, if fewer than in the schedule. Learning rates fall over them.
            keeps_weights: Whether to keep ``weights.ckpt`` too, with the mask and without the optimiser.
        """

        def make(folder: Path) -> dict[str, Any]:
            pruner = self._pruner(replace(self.options, **changes))
            ends = None if steps is None else (read_checkpoint(weights_of(start))["global_step"], steps)
            limit = {} if ends is None else {"max_steps": sum(ends)}
            with pruner.fixed_to(values, ends):
                cost = self._train(pruner, folder, start=weights_of(start), keeps=values if keeps_weights else None, **limit)
                return self._evaluate(pruner, folder, values, SPLITS) | cost

        options = replace(self.options, **changes)
        after = options_after_finetuning(options, averages=self.setup.weights.average_last > 1)
        determined_by = {
            "experiment": "retrain", "start": start.key, "values": values.tolist(), "options": after,
            **({} if steps is None else {"steps": steps}),
        }  # fmt: skip
        work = "retraining" if steps != 0 and options.trains_with_mask else "evaluating"
        return self.do(f"{work}, {int((values > 0).sum())} heads", determined_by, make)

    def from_scratch(self, values: Tensor) -> Experiment:
        """Train a new model of the same shape with the gate values from the first step, and return metrics and predictions.

        It has as many steps as all phases together (the control of Voita et al. 2019).
        """
        seed, scratch = self.seed + OTHER_SEED, self.setup.scratch
        determined_by = {
            "experiment": "from scratch", "dense": self.dense_key, "values": values.tolist(), "weights": seed,
            **asdict(scratch), "epochs": round(scratch.from_scratch_epochs or self.options.epochs, 6),
        }  # fmt: skip

        def make(folder: Path) -> dict[str, Any]:
            pruner = make_pruner(self.setup, self.data, scratch_options(self.options, scratch, self.pruner.backbone))
            new_weights_(pruner, seed)
            with pruner.fixed_to(values):
                cost = self._train(pruner, folder)
                return self._evaluate(pruner, folder, values, SPLITS) | cost

        return self.do(f"from scratch, {int((values > 0).sum())} heads", determined_by, make)

    def do(self, name: str, determined_by: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> Experiment:
        """Return an experiment, and do it in a stage of its name if it is not finished."""
        found = self.cache.get(determined_by)
        if found is not None:
            return found
        with progress.stage(name):
            return self.cache.get_or_make(determined_by, make)

    def measure(
        self,
        name: str,
        determined_by: Mapping[str, Any],
        work: Callable[[ScoringContext], dict[str, Any]],
        *,
        start: Experiment | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Experiment:
        """Return an experiment that does not train. Its result has the cost of the work.

        Args:
            start, changes: The experiment with the weights, the dense one by default, and its changes of the options.
        """

        def make(folder: Path) -> dict[str, Any]:
            subject = self.subject(start or self.dense(), changes or {})
            with measured(subject.device, subject.gates) as cost:
                found = work(subject)
            return found | cost.as_row()

        return self.do(name, determined_by, make)

    def _pruner(self, options: PrunerOptions) -> HeadPruner:
        """Return a module with these options and any weights. The last module is kept."""
        if self._built[0] != options:
            self._built = (options, make_pruner(self.setup, self.data, options))
        return self._built[1]

    def with_weights(self, start: Experiment, changes: Mapping[str, Any]) -> HeadPruner:
        """Return a module with changed options and the weights of a dense or learned experiment."""
        pruner = self._pruner(replace(self.options, **changes))
        pruner.load_state_dict(read_weights(weights_of(start)))
        return pruner

    def subject(self, start: Experiment, changes: Mapping[str, Any]) -> ScoringContext:
        """Return the same module with the data to score and search on."""
        return ScoringContext(self.with_weights(start, changes), self.data, self.trainer())

    def _train(
        self,
        pruner: HeadPruner,
        folder: Path,
        *callbacks: pl.Callback,
        start: Path | None = None,
        keeps: Tensor | None = None,
        **limit: int,
    ) -> dict[str, Any]:
        """Train from a checkpoint, or from where an earlier process was stopped, and return the whole cost.

        Steps after the last checkpoint are made twice and count once.

        Args:
            keeps: Gate values ``[gates]`` to leave with the final weights in ``weights.ckpt``.
        """
        gc.collect()  # earlier trainers and modules refer to each other, and their optimisers hold much memory
        last, key = folder / "last.ckpt", folder.name.removeprefix(".")
        goes_on = processes.in_first(last.is_file)
        pruner.train()  # Lightning keeps the mode it finds
        kept = (CostInCheckpoints(lambda: cost), LastGoodCheckpoint(last, every=self.setup.run.save_every))
        watch: dict[str, Any] = {"limit_val_batches": 0, "val_check_interval": None}
        logs: list[pl.Callback] = []
        if self._loggers:
            interval = self.setup.trainer.val_check_interval or self.data.validation_interval(pruner.epochs)
            watch = {"logger": self._loggers, "val_check_interval": interval}
            after = self._logged_after
            logs = [] if any(isinstance(one, GateLog) for one in callbacks) else [GateLog(after=after)]
            logs.append(PositionLog(after=after))
        trainer = self.trainer(*callbacks, *logs, *kept, identity=key, **watch, **limit)
        before = CostInCheckpoints.read(last, key) if goes_on else NO_COST
        if start is not None and not goes_on:
            check_whole(start, mend_of(start))
        with measured(trainer.strategy.root_device, pruner.gates, before) as cost:
            trainer.fit(pruner, self.data, ckpt_path=last if goes_on else start, weights_only=True)
        if keeps is not None:
            pruner.gates.set_mask_(keeps.to(pruner.device))  # no step may have been left to do so
            trainer.save_checkpoint(folder / WEIGHTS, weights_only=True)
        if processes.is_first():
            last.unlink(missing_ok=True)
        first = 0 if start is None else read_checkpoint(start)["global_step"]
        taught = pruner.options.distils and start is not None
        return (cost.cost.with_teacher() if taught else cost.cost).as_row() | {"steps": trainer.global_step - first}

    def _evaluate(self, pruner: HeadPruner, folder: Path, values: Tensor, splits: Sequence[str]) -> dict[str, Any]:
        """Return the metrics on the splits, and write ``predictions.npz``."""
        predictions = Predictions()
        trainer = self.trainer(predictions)
        device = trainer.strategy.root_device
        with measured(device, pruner.gates) as cost, pruner.gates.use(values.to(device)):
            metrics = evaluate(trainer, pruner, self.data, splits)
        arrays = predictions.arrays()  # in every process
        if processes.is_first():
            np.savez_compressed(folder / PREDICTIONS, **arrays)  # type: ignore[arg-type]
        return metrics | cost.as_row()
