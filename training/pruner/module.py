"""The Lightning module: one run from a dense Transformer to a pruned one, in three phases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from gates.attention.sites import KINDS, find_attention
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.gating.schedule import NOT_CLOSED, update_closing_step
from gates.options import TOP_K_FAMILIES
from training.config import PrunerOptions
from training.config.model import FREEZING
from training.data.base import TaskData
from training.pruner.distillation import Teacher, taught_losses, without_teacher
from training.pruner.schedule import Phase, Schedule
from training.pruner.steering import GateController, kinds_to_prune, new_gates
from training.runs.processes import share_of_batch
from training.scoring.passes import starting_scores
from training.scoring.subject import ScoringContext
from training.tasks import Task

# Memory for time: activations of a layer that are computed anew in the backward pass.


def checkpoint_activations_(model: PreTrainedModel, *, rests: bool = False) -> None:
    """Have a model keep only what goes into each layer until the backward pass, by Transformers' own means.

    Draws of dropout are repeated, and gates are drawn before the model runs, so that a layer computes the second time what it
    did the first.

    Args:
        model: in training, or in evaluation mode while it rests.
        rests: whether it is to do so at rest, where Transformers would not. Evaluation and scores afterwards are as without.

    Raises:
        GateError: if the model does not support it.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # of earlier ones
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise GateError(
            f"{type(model).__name__} does not support activation checkpointing in Transformers; leave out "
            "--model.checkpoint_activations"
        ) from error
    for layer in model.modules():
        if rests and isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # by which Transformers goes
            vars(layer)["_gradient_checkpointing_func"] = partial(_at_rest, layer)


def checkpoints_activations(model: nn.Module) -> bool:
    """Whether any part of a model does."""
    return any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def _at_rest(layer: GradientCheckpointingLayer, run: Callable[..., Any], *inputs: Any) -> Any:
    """A layer in evaluation mode, both times."""

    def resting(*inputs: Any) -> Any:
        layer.training = False
        try:
            return run(*inputs)
        finally:
            layer.training = True

    return checkpoint(resting, *inputs, use_reentrant=False)


# Training that has gone wrong ends, in all processes together.


def check_finite(loss: Tensor, trainer: pl.Trainer) -> None:
    """Whether a loss is a number in every process.

    Args:
        loss: of this process, a scalar.
        trainer: of the step.

    Raises:
        GateError: in all of them, if it is none in one.
    """
    finite = bool(torch.isfinite(loss))
    if trainer.world_size > 1:
        finite = trainer.strategy.reduce_boolean_decision(finite, all=True)
    if not finite:
        raise GateError(
            f"the loss is {float(loss.detach())} at step {trainer.global_step}; lower --model.learning_rate or set "
            "--trainer.gradient_clip_val and start in another --run_dir, with --ckpt_path from dense.ckpt if it is there"
        )


# The random numbers of a training step: a function of the seed and the batch, so that a resumed run draws what an unbroken one
# would have drawn.

BETWEEN_RESTARTS = 15_485_863
"""Between the seeds of their noise; larger than seeds that people give, so that no restart has the noise of another run."""


def seed_step_(gates: HeadGates, *, seed: int, batch: int, rank: int, device: torch.device) -> None:
    """Seed the noise of gates and dropout for one batch.

    One draw of gates for the whole batch is the same in all processes; draws per example and dropout are each process's own.

    Args:
        gates: whose noise it is.
        seed: of the run.
        batch: number of the batch in the run.
        rank: number of this process.
        device: of the gates.
    """
    shared = (seed * 1_000_003 + batch) * 4096
    own = shared + 1 + rank
    gates.generator = torch.Generator(device).manual_seed(shared if gates.draw_per == "batch" else own)
    torch.manual_seed(own)


class Seeded(Protocol):
    """What has a seed of its noise."""

    seed: int


@contextmanager
def noise_of(module: Seeded, restart: int) -> Iterator[None]:
    """Other noise for each restart for the length of a ``with`` block; the first, 0, has that of the module's own seed."""
    own = module.seed
    module.seed = own + restart * BETWEEN_RESTARTS
    try:
        yield
    finally:
        module.seed = own


# Which parameters an optimiser moves, and how: groups of the backbone and of the gates, and those that rest.

NO_DECAY = re.compile(r"bias$|norm\d*\.weight$|layer_?norm", re.IGNORECASE)


def backbone_groups(backbone: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups of the backbone's trainable parameters: matrices decay, biases and norms do not."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in backbone.named_parameters():
        if parameter.requires_grad:
            (plain if parameter.dim() < 2 or NO_DECAY.search(name) else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"name": "backbone", "params": decayed, "lr": learning_rate, "weight_decay": weight_decay},
        {"name": "backbone-no-decay", "params": plain, "lr": learning_rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def parameter_groups(backbone: nn.Module, gates: HeadGates, options: PrunerOptions) -> list[dict[str, Any]]:
    """All groups of a run's optimiser: those of the backbone, and the gates, which do not decay.

    Args:
        backbone: with its frozen parameters not requiring gradients.
        gates: on the backbone.
        options: of the run, for the learning rates.
    """
    of_gates = {"name": "gates", "params": [gates.log_alpha], "lr": options.gate_learning_rate, "weight_decay": 0.0}
    return [*backbone_groups(backbone, options.learning_rate, options.weight_decay), of_gates]


def is_of_gates(group: Mapping[str, Any]) -> bool:
    """Whether a group is of the gates, which rest outside the prune phase."""
    return bool(group["name"] == "gates")


def learning_rate_of(group: Mapping[str, Any], options: PrunerOptions) -> float:
    """The learning rate that the options give a group."""
    return options.gate_learning_rate if is_of_gates(group) else options.learning_rate


def restore_learning_rates_(
    groups: Sequence[dict[str, Any]], scheduler: LambdaLR, rates: Sequence[float], *, step: int
) -> None:
    """Give an optimiser's groups other learning rates than the checkpoint that they come from, one for each, from a step on."""
    scheduler.base_lrs = list(rates)
    for group, rate, factor in zip(groups, rates, scheduler.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = rate, rate * factor(step)


def matching_parameters(model: nn.Module, patterns: Iterable[str]) -> list[nn.Parameter]:
    """The parameters whose name one of the regular expressions matches.

    Raises:
        GateError: for a pattern that is no regular expression or matches nothing.
    """
    found: list[nn.Parameter] = []
    for pattern in patterns:
        try:
            matches = [p for name, p in model.named_parameters() if re.search(pattern, name)]
        except re.error as error:
            raise GateError(f"the freeze pattern {pattern!r} is not a regular expression: {error}") from error
        if not matches:
            example = next(name for name, _ in model.named_parameters())
            raise GateError(
                f"the freeze pattern {pattern!r} matches no parameter of {type(model).__name__}; one is {example!r}"
            )
        found += matches
    return found


def freeze_parameters_(backbone: nn.Module, options: PrunerOptions) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Fix what the options fix of a backbone from the beginning.

    Returns:
        What is fixed, by the model itself too, as sinusoids are; and what is to be from the end of fine-tuning on.

    Raises:
        GateError: as :func:`matching_parameters` and :func:`check_some_train` do.
    """
    for parameter in matching_parameters(backbone, options.freeze or []):
        parameter.requires_grad_(False)
    fixed_later = matching_parameters(backbone, options.freeze_while_pruning or [])
    check_some_train(backbone, fixed_later, options)
    return [p for p in backbone.parameters() if not p.requires_grad], fixed_later


def check_some_train(backbone: nn.Module, fixed_later: Iterable[nn.Parameter], options: PrunerOptions) -> None:
    """Raises :class:`GateError` where patterns leave no parameter to train and do not say so as ``.*``, by which everything
    else knows that nothing trains.

    Args:
        backbone: with what is fixed from the beginning.
        fixed_later: what is fixed from the end of fine-tuning on.
        options: with the patterns.
    """
    resting = {id(parameter) for parameter in fixed_later}
    given = [name for name in FREEZING if getattr(options, name)]
    if not given or options.nothing_trains or any(p.requires_grad and id(p) not in resting for p in backbone.parameters()):
        return
    patterns = " and ".join(f"{name} {getattr(options, name)}" for name in given)
    raise GateError(
        f"every parameter of {type(backbone).__name__} is fixed by {patterns}; give --model.{given[-1]} '[\".*\"]' where gates "
        "alone are to be learned from then on, or leave some parameters out"
    )


def set_backbone_frozen_(backbone: PreTrainedModel, rests: bool, frozen: Iterable[nn.Parameter], *, alone: bool) -> None:
    """Freeze or unfreeze the backbone while gates are trained.

    Frozen means evaluation mode, because dropout would add noise to the gradients of the gates. In a single process it also
    means ``requires_grad=False``, which saves a third of the step. DDP needs a gradient for every registered parameter.

    Args:
        backbone: The model.
        rests: Whether it is frozen from now on.
        frozen: The parameters that never have gradients.
        alone: Whether this is the only process.
    """
    if backbone.training != rests:
        return
    backbone.train(not rests)
    if checkpoints_activations(backbone):
        checkpoint_activations_(backbone, rests=rests)
    if alone:
        for parameter in backbone.parameters():
            parameter.requires_grad_(not rests)
        for parameter in frozen:
            parameter.requires_grad_(False)


PRUNED_BEFORE = "pruned_attention"
TEACHER = "teacher"
CLOSING_STEP = "closing_step"
PAID = "paid"


class HeadPruner(pl.LightningModule):
    """Fine-tune a Transformer with a learned gate on every head, then keep exactly the budgeted heads.

    One ``trainer.fit`` has three phases. *Finetune*: all gates open, ordinary fine-tuning; give it length 0 for a
    model that is already fine-tuned. *Prune*: stochastic gates, with a penalty that ramps up. *Retrain*: the mask is
    fixed at the budget and the weights recover.

    Args:
        options: what the run is told.
        seed: of the gates' noise and of dropout, which are functions of (seed, step).

    Attributes:
        closing_step: ``[gates]``; after which optimiser step each gate closed for good, see :mod:`gates.gating.schedule`.
        outputs: what the model said of each split when it was last evaluated.
        tested: the split that tests are on, ``test`` or a further one.
    """

    closing_step: Tensor

    def __init__(self, options: PrunerOptions, seed: int = 0) -> None:
        super().__init__()
        self.options, self.seed = options, seed
        self.save_hyperparameters({**asdict(options), "seed": seed})
        self.teacher: Teacher | None = None
        self.schedule = Schedule()
        self.outputs: dict[str, dict[str, list[str]]] = {}
        self.tested = "test"
        self._fixed: Tensor | None = None
        self._ends: tuple[int, int] | None = None

    def build(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the backbone, attach the gates and check the budget; does nothing the second time.

        Raises:
            GateError: for a backbone that cannot be loaded or gated, or a budget it cannot have.
        """
        if hasattr(self, "backbone"):
            return
        options, self.task = self.options, task
        backbone = task.build(options, tokenizer)
        if options.checkpoint_activations:
            checkpoint_activations_(backbone)
        sites = find_attention(backbone)
        kinds = kinds_to_prune(options, [kind for kind in KINDS if kind in {site.kind for site in sites}])
        self.gates = new_gates(options, backbone, kinds)
        self.steering = GateController(options, self.gates, kinds)
        self.backbone = backbone.train()
        self.frozen, self.frozen_while_pruning = freeze_parameters_(backbone, options)
        self.gates.mode = "open"
        self.gates.attach()
        self.register_buffer(CLOSING_STEP, torch.full((self.gates.size,), NOT_CLOSED), persistent=False)
        self.metrics = torch.nn.ModuleDict({split: self.task.metrics(split) for split in ("select", "test")})
        # Lightning's own mean counts examples in whole numbers, which is wrong where processes have unequally many.
        self.mean_loss = torch.nn.ModuleDict({split: MeanMetric() for split in ("select", "test")})

    @contextmanager
    def fixed_to(self, values: Tensor, ends: tuple[int, int] | None = None) -> Iterator[None]:
        """Fixed gate values ``[gates]``, mostly a mask, in all training of a ``with`` block: nothing is learned about heads.

        Args:
            values: of the gates.
            ends: a step, and how many steps follow it at most; by default as many as the options say.
        """
        self._fixed, self._ends = values, ends
        try:
            yield
        finally:
            self._fixed = self._ends = None

    @property
    def is_fixed(self) -> bool:
        """Whether nothing is learned about heads now."""
        return self._fixed is not None

    @property
    def epochs(self) -> float:
        """Length of the whole run."""
        return self.options.epochs

    @property
    def _is_pipelined(self) -> bool:
        """Whether weights rest while gates are learned."""
        return bool(self.options.pipelined) and self._fixed is None

    def _set_schedule(self) -> None:
        # Not the trainer's estimated_stepping_batches: it makes the training loader before a checkpoint's progress is
        # restored, and a resumed run would start at the first batch again.
        batches = len(self.trainer.datamodule.run_batches())  # type: ignore[attr-defined]
        limit = self.trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * (1.0 if limit is None else limit))
        steps = math.ceil(batches / self.trainer.accumulate_grad_batches)
        self.schedule = Schedule.of_options(steps, self.options, rests=bool(self.options.pipelined))
        if self._ends is not None:
            self.schedule = self.schedule.shortened(*self._ends)

    @property
    def boundaries(self) -> tuple[int, int, int]:
        """Optimiser steps after which the phases finetune, prune and retrain end."""
        return self.schedule.finetune, self.schedule.prune, self.schedule.end

    def phase(self, step: int) -> Phase:
        return self.schedule.phase(step)

    def ramp(self, step: int) -> float:
        """How far the target or the price has gone, 0 to 1; 0 outside the prune phase and with fixed gates."""
        return self.schedule.ramp(step) if self._fixed is None else 0.0

    def goals(self, step: int) -> list[float]:
        """Open gates that the step after so many aims at, in all or of each budgeted kind; none without a budget."""
        return self.steering.goals(self.ramp(step))

    def on_train_start(self) -> None:
        """A checkpoint brings the learning rates of the run it is from; this run's own settings count."""
        if self.options.distils and self.global_step > self.schedule.finetune and self.teacher is None:
            raise without_teacher(self.global_step, self.schedule.finetune)
        if self.teacher is not None:
            self.teacher.model.to(self.device)
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        rates = [learning_rate_of(group, self.options) for group in optimizer.param_groups]  # type: ignore[union-attr]
        restore_learning_rates_(optimizer.param_groups, scheduler, rates, step=self.global_step)  # type: ignore[union-attr]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        phase = self.phase(self.global_step)
        if self.global_step == self.schedule.finetune and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._start_pruning()
        set_backbone_frozen_(
            self.backbone, phase == "prune" and self._is_pipelined, self.frozen, alone=self.trainer.world_size == 1
        )
        self.gates.learned.progress = self.schedule.progress(self.global_step, on_ramp=self.options.gate in TOP_K_FAMILIES)
        if phase == "finetune":
            self.teacher = None  # of an earlier fit that did not end
        if self._fixed is not None:
            self.gates.set_mask_(self._fixed.to(self.device))
        elif phase == "finetune":
            self.gates.mode = "open"
        elif phase == "prune":
            self.gates.mode = "stochastic"
        elif self.gates.mode != "masked":
            self._fix_learned_mask()

    def _fix_learned_mask(self) -> None:
        """Fix the gates to the mask that they learned."""
        self.gates.set_mask_(self.steering.learned_mask())

    def _start_pruning(self) -> None:
        """At the end of fine-tuning: the dense model becomes the teacher, and the gates start as their family does."""
        if self.options.distils:
            self.teacher = Teacher(self.backbone, self.gates)
        if self._fixed is None:
            self.closing_step.fill_(NOT_CLOSED)
            self.steering.restore_prices_({})
            self.gates.learned.reset_()
            if self.steering.starts_apart:
                subject = ScoringContext(self, self.trainer.datamodule, self.trainer)  # type: ignore[attr-defined]
                self.steering.set_apart_(starting_scores(subject, self.options.init_score))

    def on_train_end(self) -> None:
        """Where no retrain phase has begun, the mask is made here."""
        set_backbone_frozen_(self.backbone, False, self.frozen, alone=self.trainer.world_size == 1)
        if self._fixed is None and self.global_step >= self.schedule.prune and self.gates.mode != "masked":
            self._fix_learned_mask()

    def on_fit_end(self) -> None:
        self.teacher = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the heads that the backbone had lost before, which its shapes depend on, and what training continues with."""
        checkpoint[PRUNED_BEFORE] = getattr(self.backbone.config, "pruned_attention", {})
        checkpoint[CLOSING_STEP] = self.closing_step.cpu()
        checkpoint[PAID] = self.steering.prices_paid()
        if self.teacher is not None and "optimizer_states" in checkpoint:
            checkpoint[TEACHER] = self.teacher.model.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steering.restore_prices_(checkpoint.get(PAID, {}))
        if self._fixed is None and CLOSING_STEP in checkpoint:
            self.closing_step.copy_(checkpoint[CLOSING_STEP])
        self.teacher = None
        if self.options.distils and TEACHER in checkpoint:
            self.teacher = Teacher(self.backbone, self.gates)
            self.teacher.model.load_state_dict(checkpoint[TEACHER])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        seed_step_(self.gates, seed=self.seed, batch=batch_idx, rank=self.global_rank, device=self.device)
        if self.teacher is None:
            losses, _ = self.task.losses(self.backbone, batch)
            task_loss = objective = self.task.batch_loss(losses, batch)
        else:
            task_loss, objective = self._taught(self.teacher, batch)
        penalty = self.steering.penalty(self.ramp(self.global_step))
        loss = share_of_batch(self.task.batch_weight(batch), self.device) * objective + penalty
        check_finite(loss, self.trainer)
        felt = penalty.detach() + self.steering.solved_penalty(self.ramp(self.global_step))
        self.log_dict({"train/task_loss": task_loss, "train/penalty": felt, "train/loss": (loss - penalty).detach() + felt})
        return loss

    def _taught(self, teacher: Teacher, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The mean loss of the task, and what is minimised in its place."""
        task_loss, kl, distance = taught_losses(teacher, self.task, self.backbone, batch, self.options)
        self.log_dict({"train/logit_kl": kl, "train/hidden_mse": distance})
        weight, hidden_weight = self.options.distil, self.options.distil_hidden
        return task_loss, (1 - weight) * task_loss + weight * kl + hidden_weight * distance

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Outside the prune phase gates rest: a step with zero gradients would still count in Adam's bias correction and make
        their first real steps several times too long. In it the backbone rests, if pipelined; in it
        and after it, weights that are frozen while pruning do."""
        if self.phase(self.global_step) != "finetune":
            for parameter in self.frozen_while_pruning:
                parameter.grad = None
        resting: Iterable[torch.nn.Parameter] = ()
        if self.ramp(self.global_step) == 0:
            resting = [self.gates.log_alpha]
        elif self._is_pipelined:
            resting = self.backbone.parameters()
        for parameter in resting:
            parameter.grad = None

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        ramp = self.ramp(self.global_step)
        super().optimizer_step(*args, **kwargs)
        self.gates.learned.clamp_()
        self.steering.enforce_(ramp, self.trainer.optimizers[0])
        if ramp > 0:
            done = self.global_step + 1  # Lightning counts the step when this hook returns
            self.closing_step.copy_(update_closing_step(self.closing_step, self.gates.values(), done))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and (unreached := self.gates.unreached()):
            raise GateError(
                f"the attention at {unreached[0]!r} did not run, so its gates have no effect; use a model class without it"
            )

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("select", batch, named="select")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("test", batch, named=self.tested)

    def _evaluate(self, split: str, batch: dict[str, Tensor], *, named: str) -> Tensor:
        """Log a batch's metrics under a name; returns the logits for callbacks that keep predictions."""
        losses, logits = self.task.losses(self.backbone, batch)
        metrics = self.metrics[split]
        self.task.update(metrics, self.backbone, batch, logits)  # type: ignore[arg-type]
        size = losses.shape[0]
        self.mean_loss[split].update(losses, self.task.example_weights(batch))  # type: ignore[operator]
        self.log(f"{named}/loss", self.mean_loss[split], batch_size=size, on_epoch=True)  # type: ignore[arg-type]
        by_name = {f"{named}/{name}": metric for name, metric in metrics.items()}  # type: ignore[operator]
        self.log_dict(by_name, batch_size=size, on_epoch=True, on_step=False, prog_bar=False)
        return logits

    def on_validation_epoch_end(self) -> None:
        self.outputs["select"] = self.task.outputs(self.metrics["select"])  # type: ignore[arg-type]

    def on_test_epoch_end(self) -> None:
        self.outputs[self.tested] = self.task.outputs(self.metrics["test"])  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        self._set_schedule()
        groups = parameter_groups(self.backbone, self.gates, self.options)
        # One kernel for all parameters, several times faster. It would unscale float16 gradients after clipping, not before.
        scales = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        optimizer = torch.optim.AdamW(groups, fused=self.device.type in ("cpu", "cuda") and not scales)
        schedules: list[Any] = [
            self.schedule.gate_rate if is_of_gates(group) else self.schedule.backbone_rate for group in groups
        ]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedules)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the backbone's gradients only: the gates' have another scale and must not shrink with them."""
        if gradient_clip_val:
            parameters = [p for p in self.backbone.parameters() if p.grad is not None]
            by_value = gradient_clip_algorithm == "value"
            (clip_grad_value_ if by_value else clip_grad_norm_)(parameters, gradient_clip_val)


# Evaluate a module on the selection and the test split.

SPLITS = ("select", "test")


def evaluate(trainer: pl.Trainer, pruner: HeadPruner, data: TaskData, splits: Sequence[str] = SPLITS) -> dict[str, float]:
    """Metrics on the named splits with the gates as they are, as ``select_accuracy`` and so on; with the test split also those
    on further test splits, as ``test_mismatched_accuracy``."""
    found: dict[str, float] = {}
    if "select" in splits:
        found |= trainer.validate(pruner, datamodule=data, verbose=False)[0]
    if "test" in splits:
        found |= trainer.test(pruner, datamodule=data, verbose=False)[0]
        for name in data.more_tests:
            with _tested_on(pruner, name):
                found |= trainer.test(pruner, dataloaders=data.more_test_dataloader(name), verbose=False)[0]
    return {name.replace("/", "_"): float(value) for name, value in found.items()}


@contextmanager
def _tested_on(pruner: HeadPruner, split: str) -> Iterator[None]:
    """Tests are on a further test split in a ``with`` block, and metrics are named for it."""
    pruner.tested = split
    try:
        yield
    finally:
        pruner.tested = "test"
