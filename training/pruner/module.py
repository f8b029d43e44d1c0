"""The Lightning module: one run from a dense Transformer to a pruned one, in three phases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from gates.attention.modes import attention_to_train
from gates.attention.sites import KINDS, find_attention
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.gating.schedule import NOT_CLOSED, update_closing_step
from gates.options import TOP_K_FAMILIES
from training.config import PrunerOptions
from training.config.model import FREEZING
from training.data.base import TaskData
from training.pruner.distillation import Teacher, distillation_terms, recorded_outputs
from training.pruner.schedule import Phase, Schedule
from training.pruner.steering import GateController, kinds_to_prune, new_gates
from training.runs.processes import share_of_batch
from training.scoring.passes import starting_scores
from training.scoring.subject import ScoringContext
from training.tasks import Task


def checkpoint_activations_(model: PreTrainedModel, *, is_frozen: bool = False) -> None:
    """Make a model keep only the inputs of each layer until the backward pass, by Transformers' own means.

    Draws of dropout are repeated, and gates are drawn before the model runs, so a layer computes the same the second time.

    Args:
        model: The model in training, or in evaluation mode while it is frozen.
        is_frozen: Whether to do so while it is frozen, where Transformers would not. Evaluation and scores do not change by it.

    Raises:
        GateError: If the model does not support it.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # the older name
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise GateError(
            f"{type(model).__name__} does not support activation checkpointing in Transformers; leave out "
            "--model.checkpoint_activations"
        ) from error
    for layer in model.modules():
        if is_frozen and isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # Transformers decides by it
            vars(layer)["_gradient_checkpointing_func"] = partial(_at_rest, layer)


def checkpoints_activations(model: nn.Module) -> bool:
    """Return whether any part of a model keeps only the inputs of its layers."""
    return any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def _at_rest(layer: GradientCheckpointingLayer, run: Callable[..., Any], *inputs: Any) -> Any:
    def resting(*inputs: Any) -> Any:
        layer.training = False
        try:
            return run(*inputs)
        finally:
            layer.training = True

    return checkpoint(resting, *inputs, use_reentrant=False)


def check_finite(loss: Tensor, trainer: pl.Trainer) -> None:
    """Raise :class:`GateError` in all processes if the loss, a scalar, is not finite in one of them."""
    finite = bool(torch.isfinite(loss))
    if trainer.world_size > 1:
        finite = trainer.strategy.reduce_boolean_decision(finite, all=True)
    if not finite:
        raise GateError(
            f"the loss is {float(loss.detach())} at step {trainer.global_step}; lower --model.learning_rate or set "
            "--trainer.gradient_clip_val and start in another --run_dir, with --ckpt_path from dense.ckpt if it is there"
        )


# The random numbers of a training step are a function of the seed and the batch. A resumed run draws the same numbers as an
# unbroken one.

BETWEEN_RESTARTS = 15_485_863
"""Distance of the seeds of their noise; larger than usual seeds, so that no restart has the noise of another run."""


def seed_step_(gates: HeadGates, *, seed: int, batch: int, rank: int, device: torch.device) -> None:
    """Set the seed of the noise of gates and dropout for one batch of a run.

    One draw of gates for the whole batch is the same in all processes; draws per example and dropout are each process's own.
    """
    shared = (seed * 1_000_003 + batch) * 4096
    own = shared + 1 + rank
    gates.generator = torch.Generator(device).manual_seed(shared if gates.draw_per == "batch" else own)
    torch.manual_seed(own)


@contextmanager
def noise_of(module: HeadPruner, restart: int) -> Iterator[None]:
    """Give each restart other noise in the ``with`` block; the first, 0, has that of the module's own seed."""
    own = module.seed
    module.seed = own + restart * BETWEEN_RESTARTS
    try:
        yield
    finally:
        module.seed = own


# The parameters that an optimiser moves: groups of the backbone and of the gates, and frozen ones.

NO_DECAY = re.compile(r"bias$|norm\d*\.weight$|layer_?norm", re.IGNORECASE)


def backbone_groups(backbone: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimiser groups of the backbone's trainable parameters: matrices decay, biases and norms do not."""
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
    """Return all groups of a run's optimiser: those of the backbone, and the gates, which do not decay."""
    of_gates = {"name": "gates", "params": [gates.log_alpha], "lr": options.gate_learning_rate, "weight_decay": 0.0}
    return [*backbone_groups(backbone, options.learning_rate, options.weight_decay), of_gates]


def is_of_gates(group: Mapping[str, Any]) -> bool:
    """Return whether a group is of the gates, which are frozen outside the prune phase."""
    return bool(group["name"] == "gates")


def learning_rate_of(group: Mapping[str, Any], options: PrunerOptions) -> float:
    """Return the learning rate that the options give a group."""
    return options.gate_learning_rate if is_of_gates(group) else options.learning_rate


def restore_learning_rates_(
    groups: Sequence[dict[str, Any]], scheduler: LambdaLR, rates: Sequence[float], *, step: int
) -> None:
    """Set the learning rate of each group of an optimiser that was loaded from a checkpoint, from a step on."""
    scheduler.base_lrs = list(rates)
    for group, rate, factor in zip(groups, rates, scheduler.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = rate, rate * factor(step)


def matching_parameters(model: nn.Module, patterns: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters whose name one of the regular expressions matches.

    Raises:
        GateError: For a pattern that is no regular expression or matches nothing.
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
    """Freeze the parameters that the options freeze from the beginning.

    Returns:
        The frozen parameters, those that the model itself freezes among them, such as sinusoids; and the parameters to freeze
        from the end of fine-tuning on.

    Raises:
        GateError: For a pattern that matches nothing, and for patterns that leave no parameter to train without being ``.*``.
    """
    for parameter in matching_parameters(backbone, options.freeze or []):
        parameter.requires_grad_(False)
    later = matching_parameters(backbone, options.freeze_while_pruning or [])
    resting = {id(parameter) for parameter in later}
    given = [name for name in FREEZING if getattr(options, name)]
    some_train = any(p.requires_grad and id(p) not in resting for p in backbone.parameters())
    if given and not options.nothing_trains and not some_train:
        patterns = " and ".join(f"{name} {getattr(options, name)}" for name in given)
        raise GateError(
            f"every parameter of {type(backbone).__name__} is fixed by {patterns}; give --model.{given[-1]} "
            "'[\".*\"]' where gates alone are to be learned from then on, or leave some parameters out"
        )
    return [p for p in backbone.parameters() if not p.requires_grad], later


def set_backbone_frozen_(backbone: PreTrainedModel, is_frozen: bool, frozen: Iterable[nn.Parameter], *, alone: bool) -> None:
    """Freeze or unfreeze the backbone while gates are trained.

    Frozen means evaluation mode, because dropout would add noise to the gradients of the gates. In a single process it also
    means ``requires_grad=False``, which saves a third of the step. DDP needs a gradient for every registered parameter.

    Args:
        frozen: The parameters that never have gradients.
        alone: Whether this is the only process.
    """
    if backbone.training != is_frozen:
        return
    backbone.train(not is_frozen)
    if checkpoints_activations(backbone):
        checkpoint_activations_(backbone, is_frozen=is_frozen)
    if alone:
        for parameter in backbone.parameters():
            parameter.requires_grad_(not is_frozen)
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
        seed: The seed of the gates' noise and of dropout, which are functions of (seed, step).

    Attributes:
        closing_step: The optimiser step after which each gate closed for good ``[gates]``, see :mod:`gates.gating.schedule`.
        outputs: The texts that the model generated on each split when it was last evaluated.
        tested: The split that tests are on, ``test`` or a further one.
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
        """Load the backbone, attach the gates and check the budget; do nothing the second time.

        Raises:
            GateError: For a backbone that cannot be loaded or gated, or a budget that it cannot have.
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
        """Fix the gate values in all training of a ``with`` block, so that no gate is learned.

        Args:
            values: The values ``[gates]``, usually a mask.
            ends: A step, and the most steps that follow it; by default as many as the options say.
        """
        self._fixed, self._ends = values, ends
        try:
            yield
        finally:
            self._fixed = self._ends = None

    @property
    def is_fixed(self) -> bool:
        """Whether the gates are fixed now."""
        return self._fixed is not None

    @property
    def epochs(self) -> float:
        """The length of the whole run in epochs."""
        return self.options.epochs

    @property
    def _is_pipelined(self) -> bool:
        """Whether weights are frozen while gates are learned."""
        return bool(self.options.pipelined) and self._fixed is None

    def _set_schedule(self) -> None:
        # Not the trainer's estimated_stepping_batches: it makes the training loader before a checkpoint's progress is
        # restored. A resumed run would start at the first batch again.
        batches = len(self.trainer.datamodule.run_batches())  # type: ignore[attr-defined]
        limit = self.trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * (1.0 if limit is None else limit))
        steps = math.ceil(batches / self.trainer.accumulate_grad_batches)
        self.schedule = Schedule.of_options(steps, self.options, pipelined=bool(self.options.pipelined))
        if self._ends is not None:
            self.schedule = self.schedule.shortened(*self._ends)

    @property
    def boundaries(self) -> tuple[int, int, int]:
        """The optimiser steps after which the phases finetune, prune and retrain end."""
        return self.schedule.finetune, self.schedule.prune, self.schedule.end

    def phase(self, step: int) -> Phase:
        return self.schedule.phase(step)

    def ramp(self, step: int) -> float:
        """Return the progress of the target or the price, 0 to 1; 0 outside the prune phase and with fixed gates."""
        return self.schedule.ramp(step) if self._fixed is None else 0.0

    def goals(self, step: int) -> list[float]:
        """Return the target number of open gates of a step, in all or of each budgeted kind; none without a budget."""
        return self.steering.goals(self.ramp(step))

    def on_train_start(self) -> None:
        """Restore this run's own learning rates: a checkpoint brings those of the run it is from."""
        if self.options.distils and self.global_step > self.schedule.finetune and self.teacher is None:
            raise GateError(
                f"the checkpoint is past fine-tuning (step {self.global_step} of {self.schedule.finetune}) and was trained "
                "without distillation, so the dense model to learn from is not in it; start from dense.ckpt, or with "
                "--model.distil 0 and --model.distil_hidden 0"
            )
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
        """Make the dense model the teacher, and start the gates as their family does."""
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
        """Fix the mask where no retrain phase has begun."""
        set_backbone_frozen_(self.backbone, False, self.frozen, alone=self.trainer.world_size == 1)
        if self._fixed is None and self.global_step >= self.schedule.prune and self.gates.mode != "masked":
            self._fix_learned_mask()

    def on_fit_end(self) -> None:
        self.teacher = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the heads lost before this run, which give the weights their shape, the closing steps, and the teacher.

        The teacher is needed only if training continues.
        """
        checkpoint[PRUNED_BEFORE] = getattr(self.backbone.config, "pruned_attention", {})
        checkpoint[CLOSING_STEP] = self.closing_step.cpu()
        checkpoint[PAID] = self.steering.prices_paid()
        if self.teacher is not None and "optimizer_states" in checkpoint:
            checkpoint[TEACHER] = self.teacher.model.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steering.restore_prices_(checkpoint[PAID])
        if self._fixed is None:
            self.closing_step.copy_(checkpoint[CLOSING_STEP])
        self.teacher = None
        if self.options.distils and TEACHER in checkpoint:
            self.teacher = Teacher(self.backbone, self.gates)
            self.teacher.model.load_state_dict(checkpoint[TEACHER])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        seed_step_(self.gates, seed=self.seed, batch=batch_idx, rank=self.global_rank, device=self.device)
        with attention_to_train(self.device):
            if self.teacher is None:
                losses, _ = self.task.losses(self.backbone, batch)
                task_loss = objective = self.task.batch_loss(losses, batch)
            else:
                task_loss, objective = self._taught(self.teacher, batch)
        penalty = self.steering.penalty(self.ramp(self.global_step))
        loss = share_of_batch(self.task.batch_weight(batch), self.device) * objective + penalty
        check_finite(loss, self.trainer)
        if (self.global_step + 1) % self.trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return loss
        felt = penalty.detach() + self.steering.solved_penalty(self.ramp(self.global_step))
        self.log_dict({"train/task_loss": task_loss, "train/penalty": felt, "train/loss": (loss - penalty).detach() + felt})
        return loss

    def _taught(self, teacher: Teacher, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the task, and the objective with distillation in its place."""
        options, hidden_states = self.options, self.options.distil_hidden > 0
        with recorded_outputs(self.backbone, hidden_states=hidden_states) as outputs:
            losses, logits = self.task.losses(self.backbone, batch)
        temperature = options.distil_temperature
        kl, distance = distillation_terms(
            teacher, self.task, batch, logits, outputs[-1], temperature=temperature, hidden_states=hidden_states
        )
        task_loss = self.task.batch_loss(losses, batch)
        self.log_dict({"train/logit_kl": kl, "train/hidden_mse": distance})
        return task_loss, (1 - options.distil) * task_loss + options.distil * kl + options.distil_hidden * distance

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients of frozen parameters.

        Gates are frozen outside the prune phase. A step with zero gradients would still count in Adam's bias correction, and
        make their first real steps several times too long. The backbone is frozen in it, if pipelined, and weights that are
        frozen while pruning in it and after it.
        """
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
        self.steering.enforce_(ramp, self.trainer.optimizers[0])
        if ramp > 0:
            done = self.global_step + 1  # Lightning counts the step when this hook returns
            self.closing_step = update_closing_step(self.closing_step, self.gates.values(), done)

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
        """Log a batch's metrics under a name; return the logits for callbacks that keep predictions."""
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


SPLITS = ("select", "test")


def evaluate(trainer: pl.Trainer, pruner: HeadPruner, data: TaskData, splits: Sequence[str] = SPLITS) -> dict[str, float]:
    """Return metrics on the named splits with the gates as they are, as ``select_accuracy`` and so on; with the test split also
    those on further test splits, as ``test_mismatched_accuracy``."""
    found: dict[str, float] = {}
    if "select" in splits:
        found |= trainer.validate(pruner, datamodule=data, verbose=False)[0]
    if "test" in splits:
        found |= trainer.test(pruner, datamodule=data, verbose=False)[0]
        for name in data.more_tests:
            pruner.tested = name
            try:
                found |= trainer.test(pruner, dataloaders=data.more_test_dataloader(name), verbose=False)[0]
            finally:
                pruner.tested = "test"
    return {name.replace("/", "_"): float(value) for name, value in found.items()}
