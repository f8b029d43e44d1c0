"""The cells of a comparison: single pieces of training and evaluation of one seed, each done once and kept on disk.

========== =====================================================================
dense      fine-tuning, from which everything else starts
learn      the prune phase of a learned method
draw       the best of masks drawn around a ranking
swap       refinement of a mask by swaps
post hoc   evaluation of the dense model with a mask
retrain     training on with a fixed mask, to the end of the schedule
scratch    training of a new model of the same shape, with the mask throughout
========== =====================================================================
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedModel

from gates.budget import Budget
from gates.hooks.replacement import mean_replacement, uniform_replacement
from training.comparison.cache import Cell, CellCache
from training.comparison.from_scratch import OTHER_SEED, new_weights_, scratch_options
from training.data.base import TaskData
from training.pruner.callbacks import CostInCheckpoints, EndOfPhase, GateLog, LastGoodCheckpoint, Predictions
from training.pruner.evaluation import SPLITS, TrainerFactory, evaluate
from training.pruner.module import HeadPruner
from training.runs.cost import NOTHING, measured
from training.runs.progress import CellProgress, TrainingSteps
from training.scoring.mask_search import DrawSearch, SwapSearch, draw, refine
from training.scoring.scorers import Scoring

FORMAT = 3
"""Of cells; a change in what they mean or how they are computed must raise it."""
WEIGHTS, PREDICTIONS = "weights.ckpt", "predictions.npz"
Replacement = Literal["zero", "mean", "uniform"]
ELSEWHERE = {"backbone", "from_scratch", "trust_remote_code", "allow_pickle", "seed", "swaps"}
"""Options of the module that act through the model or the seed, which are in every key, or that a comparison does not use:
swaps are a method's ``+swap`` there."""
FINETUNING = ("finetune", "learning_rate", "lr_warm_up", "lr_decay", "prune_learning_rate", "weight_decay", "freeze", "unit")
"""Options that the dense model depends on, beside the length of the whole run."""
AFTER_FINETUNING = ("freeze_while_pruning", "distil", "distil_temperature", "distil_hidden")
"""Options that training with a fixed mask depends on, beside where it starts."""
NUMERICS = (
    "accelerator", "precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "limit_train_batches", "limit_val_batches", "limit_test_batches", "overfit_batches", "average_last", "average_every",
)  # fmt: skip
"""Trainer settings that change results."""


@dataclass(frozen=True)
class Scratch:
    """How models are trained from scratch.

    Args:
        epochs: of training; None for as many as all phases of the comparison have.
        learning_rate: at its peak; None for the configuration's.
    """

    epochs: float | None = None
    learning_rate: float | None = None


class Cells:
    """The cells of one seed.

    Args:
        make_pruner: builds the module, seeded, with options in place of the configuration's.
        data: built, with the seed's order.
        make_trainer: see :class:`TrainerFactory`.
        trainer_settings: of the configuration; those in :data:`NUMERICS` are part of every key.
        seed: of weights, data order, gates and dropout.
        cache: where cells are kept.
        progress: shows what is being done.
        save_every: optimiser steps between checkpoints within a cell.
        scratch: how models are trained from scratch.
    """

    def __init__(
        self,
        make_pruner: Callable[[Mapping[str, Any]], HeadPruner],
        data: TaskData,
        make_trainer: TrainerFactory,
        *,
        trainer_settings: Mapping[str, Any],
        seed: int,
        cache: CellCache,
        progress: CellProgress,
        save_every: int,
        scratch: Scratch = Scratch(),
    ) -> None:
        self.make_pruner, self.data, self.make_trainer = make_pruner, data, make_trainer
        self.cache, self.progress, self.seed, self.save_every, self.scratch = cache, progress, seed, save_every, scratch
        self.pruner = make_pruner({})
        self._built: tuple[dict[str, Any], HeadPruner] = ({}, self.pruner)
        self._means: list[Tensor] | None = None
        settings = self.pruner.hparams
        self.dense_is = {
            "format": FORMAT,
            "cell": "dense",
            "seed": seed,
            "weights": weights_fingerprint(self.pruner.backbone),
            "model": behaviour_of(self.pruner.backbone),
            "data": data.fingerprint(),
            "trainer": {name: trainer_settings[name] for name in NUMERICS},
            # Batches of evaluation change no result, but where they are limited they say which examples are evaluated.
            **({"eval_batch_size": data.eval_batch_size} if limits_evaluation(trainer_settings) else {}),
            "after_finetune": round(settings["prune"] + settings["retrain"], 6),
            **{name: settings[name] for name in FINETUNING},
        }

    # -- cells -------------------------------------------------------------------------------------------------

    def dense(self) -> Cell:
        """The dense model at the end of fine-tuning, in ``weights.ckpt``."""

        def make(folder: Path, shown: TrainingSteps) -> dict[str, Any]:
            return self._train(self.make_pruner({}), folder, shown, EndOfPhase(folder / WEIGHTS, "finetune"))

        return self._cell("finetune", self.dense_is, make)

    def learn(self, options: Mapping[str, Any]) -> Cell:
        """The prune phase of a learned method: ``weights.ckpt``, ``gates_over_time.csv`` and the final gates.

        Args:
            options: of the module, where they differ from the configuration's; its budget among them.
        """
        dense = self.dense()
        settings = self._pruner(options).hparams
        gated_by = {name: value for name, value in settings.items() if name not in ELSEWHERE}
        determined_by = {"cell": "learn", "dense": dense.key, "options": gated_by}

        def make(folder: Path, shown: TrainingSteps) -> dict[str, Any]:
            pruner, log = self._pruner(options), GateLog()
            end = EndOfPhase(folder / WEIGHTS, "prune")
            cost = self._train(pruner, folder, shown, end, log, start=dense.path / WEIGHTS)
            log.table(pruner).to_csv(folder / "gates_over_time.csv", index=False)
            checkpoint = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)["state_dict"]
            pruner.load_state_dict(checkpoint)
            found = {"log_alpha": pruner.gates.log_alpha.tolist(), "closing_step": pruner.closing_step.tolist()}
            return cost | found | {"mask": pruner.learned_mask().tolist()}

        return self._cell(f"learning, budget {settings['budget']}", determined_by, make)

    def draw(
        self, mask: Tensor, scores: Tensor, budget: Budget, search: DrawSearch, *, start: Cell, options: Mapping[str, Any]
    ) -> Cell:
        """The best of a mask and of masks drawn by scores ``[gates]`` within its budget, on the weights of the dense cell or of
        a learned one."""
        minimum = self.pruner.hparams["minimum_per_layer"]
        determined_by = {
            "cell": "draw", "start": start.key, "mask": mask.tolist(), "scores": scores.tolist(), "search": asdict(search),
            "seed": self.seed, "kinds": sorted(budget.per_kind), "minimum_per_layer": minimum,
        }  # fmt: skip

        def make(folder: Path, shown: TrainingSteps) -> dict[str, Any]:
            pruner = self.with_weights(start, options)
            trainer = self.make_trainer()
            with measured(trainer.strategy.root_device) as cost:
                found = draw(pruner, self.data, trainer, mask, scores, search, budget=budget, seed=self.seed)
            return {"mask": found.mask.tolist(), "losses": found.losses, "passes": found.passes} | cost.as_row()

        return self._cell(f"drawing {int(mask.sum())} heads", determined_by, make)

    def swap(self, mask: Tensor, budget: Budget, search: SwapSearch, *, start: Cell, options: Mapping[str, Any]) -> Cell:
        """A mask refined by swaps within a budget, on the weights of the dense cell or of a learned one."""
        minimum = self.pruner.hparams["minimum_per_layer"]
        determined_by = {
            "cell": "swap", "start": start.key, "mask": mask.tolist(), "search": asdict(search),
            "kinds": sorted(budget.per_kind), "minimum_per_layer": minimum,
        }  # fmt: skip

        def make(folder: Path, shown: TrainingSteps) -> dict[str, Any]:
            pruner = self.with_weights(start, options)
            trainer = self.make_trainer()
            with measured(trainer.strategy.root_device) as cost:
                found = refine(pruner, self.data, trainer, mask, search, budget=budget)
            search_result = {"mask": found.mask.tolist(), "losses": found.losses, "swaps": found.swaps, "passes": found.passes}
            return search_result | cost.as_row()

        return self._cell(f"swapping among {int(mask.sum())} heads", determined_by, make)

    def post_hoc(self, values: Tensor, splits: Sequence[str] = SPLITS, *, replacement: Replacement = "zero") -> Cell:
        """Metrics and predictions of the dense model with fixed gate values ``[gates]``, mostly a mask.

        Args:
            values: ``[gates]``.
            splits: to evaluate on.
            replacement: what takes the place of closed heads: nothing, their mean output on training data, or what they
                would read with uniform attention.
        """
        dense = self.dense()
        determined_by = {"cell": "post hoc", "dense": dense.key, "values": values.tolist(), "splits": list(splits)}
        if replacement != "zero":
            determined_by["replacement"] = replacement

        def make(folder: Path, shown: TrainingSteps) -> dict[str, Any]:
            pruner = self.with_weights(dense, {})
            with self._replaced(pruner, replacement):
                return self._evaluate(pruner, folder, values, splits)

        return self._cell(f"post hoc, {int((values > 0).sum())} heads", determined_by, make)

    def retrain(self, values: Tensor, *, start: Cell, options: Mapping[str, Any]) -> Cell:
        """Metrics and predictions after training on with fixed gate values to the end of the schedule.

        Args:
            values: ``[gates]``, mostly a mask.
            start: the dense cell, or a learned one.
            options: of the module, where they differ from the configuration's.
        """
        settings = self._pruner(options).hparams
        after = {name: settings[name] for name in AFTER_FINETUNING} | self._averaged_over()
        determined_by = {"cell": "retrain", "start": start.key, "values": values.tolist(), "options": after}

        def make(folder: Path, shown: TrainingSteps) -> dict[str, Any]:
            pruner = self._pruner(options)
            pruner.fixed_mask = values
            try:
                cost = self._train(pruner, folder, shown, start=start.path / WEIGHTS)
                return self._evaluate(pruner, folder, values, SPLITS) | cost
            finally:
                pruner.fixed_mask = None

        return self._cell(f"retraining, {int((values > 0).sum())} heads", determined_by, make)

    def from_scratch(self, values: Tensor) -> Cell:
        """Metrics and predictions of a new model of the same shape with the gate values from the first step, after as many
        steps as all phases together take (the control of Voita et al. 2019)."""
        new = {"backbone": None, "from_scratch": shape_of(self.pruner.backbone), "distil": 0.0, "distil_hidden": 0.0}
        free = {"freeze": None, "freeze_while_pruning": None}  # new weights have to learn
        seed = self.seed + OTHER_SEED
        determined_by = {
            "cell": "from scratch", "dense": self.dense_is, "values": values.tolist(), "weights": seed, **asdict(self.scratch),
            **({"averaged": "all in one"} if self._averages else {}),
        }  # fmt: skip

        def make(folder: Path, shown: TrainingSteps) -> dict[str, Any]:
            pruner = self.make_pruner(new | free)
            pruner.hparams.update(scratch_options(self.pruner.hparams, **asdict(self.scratch)))
            new_weights_(pruner, seed)
            pruner.fixed_mask = values
            cost = self._train(pruner, folder, shown)
            return self._evaluate(pruner, folder, values, SPLITS) | cost

        return self._cell(f"from scratch, {int((values > 0).sum())} heads", determined_by, make)

    def do(self, name: str, determined_by: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> Cell:
        """A cell of another kind, which does not train."""
        return self._cell(name, determined_by, lambda folder, shown: make(folder))

    @property
    def _averages(self) -> bool:
        """Whether weights are averaged over the last checkpoints of a phase."""
        return bool(self.dense_is["trainer"]["average_last"] > 1)

    def _averaged_over(self) -> dict[str, float]:
        """Where averaging of weights begins, if there is any: it is over the retrain phase alone."""
        return {name: round(self.pruner.hparams[name], 6) for name in ("prune", "retrain")} if self._averages else {}

    @contextmanager
    def _replaced(self, pruner: HeadPruner, replacement: Replacement) -> Iterator[None]:
        """What takes the place of closed heads for a while; the pruner comes with the dense weights."""
        if replacement == "zero":
            yield
        elif replacement == "uniform":
            with uniform_replacement(pruner.backbone, pruner.gates):
                yield
        else:
            if self._means is None:
                self._means = Scoring(pruner, self.data, self.make_trainer()).mean_outputs()
            with mean_replacement(pruner.gates, self._means):
                yield

    # -- how they are made -------------------------------------------------------------------------------------

    def _cell(self, name: str, determined_by: Mapping[str, Any], make: Callable[[Path, TrainingSteps], dict[str, Any]]) -> Cell:
        found = self.cache.get(determined_by)
        if found is not None:
            return found
        with self.progress.cell(f"seed {self.seed}, {name}") as shown:
            cell = self.cache.get_or_make(determined_by, lambda folder: make(folder, shown))
        gc.collect()  # trainers and modules refer to each other, and their optimisers hold much memory
        return cell

    def _pruner(self, options: Mapping[str, Any]) -> HeadPruner:
        """A module with these options and whatever weights; the last one built is kept."""
        if self._built[0] != dict(options):
            self._built = (dict(options), self.make_pruner(options))
        return self._built[1]

    def with_weights(self, start: Cell, options: Mapping[str, Any]) -> HeadPruner:
        pruner = self._pruner(options)
        pruner.load_state_dict(torch.load(start.path / WEIGHTS, map_location="cpu", weights_only=True)["state_dict"])
        return pruner

    def _train(self, pruner: HeadPruner, folder: Path, *callbacks: pl.Callback, start: Path | None = None) -> dict[str, Any]:
        """Train from a checkpoint, or from where an earlier process was stopped, and say what it cost in all; steps that are
        made twice, since they were after the last checkpoint, count once."""
        last = folder / "last.ckpt"
        pruner.train()  # Lightning keeps the mode it finds
        kept = (CostInCheckpoints(lambda: cost.cost), LastGoodCheckpoint(last, every=self.save_every))
        trainer = self.make_trainer(*callbacks, *kept, limit_val_batches=0)
        before = CostInCheckpoints.read(last) if last.is_file() else NOTHING
        with measured(trainer.strategy.root_device, before) as cost:
            trainer.fit(pruner, self.data, ckpt_path=last if last.is_file() else start, weights_only=True)
        last.unlink(missing_ok=True)
        first = 0 if start is None else torch.load(start, map_location="cpu", weights_only=True, mmap=True)["global_step"]
        return cost.as_row() | {"steps": trainer.global_step - first}

    def _evaluate(self, pruner: HeadPruner, folder: Path, values: Tensor, splits: Sequence[str]) -> dict[str, Any]:
        """Metrics on the splits; the predictions go into ``predictions.npz``."""
        kept = Predictions()
        trainer = self.make_trainer(kept)
        pruner.gates.set_mask_(values.to(pruner.device))
        with measured(trainer.strategy.root_device) as cost:
            metrics = evaluate(trainer, pruner, self.data, splits)
        np.savez_compressed(folder / PREDICTIONS, **kept.arrays())  # type: ignore[arg-type]
        return metrics | cost.as_row()


def limits_evaluation(trainer_settings: Mapping[str, Any]) -> bool:
    """Whether only some batches of the selection or test split are evaluated."""
    return any(trainer_settings[name] not in (None, 1.0) for name in ("limit_val_batches", "limit_test_batches"))


def shape_of(model: PreTrainedModel) -> dict[str, Any]:
    """Config fields of a new model like this one, ``model_type`` among them."""
    fields = model.config.to_diff_dict()
    left_out = ("architectures", "transformers_version", "_name_or_path", "dtype", "pruned_attention", "auto_map")
    return {"model_type": model.config.model_type} | {name: value for name, value in fields.items() if name not in left_out}


def behaviour_of(model: PreTrainedModel) -> dict[str, Any]:
    """A model's config without names: what it computes with its weights, such as dropout and how rows make heads; of a
    translator also how it generates."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    names = ("_name_or_path", "architectures", "transformers_version", "id2label", "label2id", "auto_map")
    behaviour = {name: value for name, value in fields.items() if name not in names}
    if model.config.is_encoder_decoder and model.generation_config is not None:
        generation = model.generation_config.to_diff_dict()
        behaviour["generation"] = {name: value for name, value in generation.items() if name not in names}
    return behaviour


def weights_fingerprint(model: torch.nn.Module) -> str:
    """A hash of all parameters and buffers, names and values."""
    digest = xxhash.xxh3_128()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
