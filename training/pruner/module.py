"""The Lightning module: one run from a dense Transformer to a pruned one, in three phases."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import MeanMetric
from transformers import PreTrainedTokenizerBase

from gates.budget import Budget, budget_mask, parse_prices
from gates.errors import GateError
from gates.families.base import GateFamily
from gates.families.closing import NOT_CLOSED, update_closing_step
from gates.families.hard_concrete import HardConcrete, Stretch
from gates.families.relaxed_topk import TopKGates
from gates.head_gates import TOP_K_FAMILIES, DrawPer, HeadGates, Unit
from gates.objective import TargetBudget, l0_penalty, project_to_budget
from gates.scores.importance import normalise_by_layer
from gates.sites import KINDS, Kind, find_attention
from gates.surgery.remove import check_removable
from training.pruner.distillation import Teacher, distillation_terms, recorded_outputs
from training.pruner.options import check_options
from training.pruner.parameters import backbone_groups, gate_groups, matching_parameters
from training.pruner.schedule import Decay, Phase, Schedule
from training.scoring.mask_search import SwapSearch, refine
from training.scoring.subject import score_importance
from training.tasks import Task

PRUNED_BEFORE = "pruned_attention"
TEACHER = "teacher"
CLOSING_STEP = "closing_step"


class HeadPruner(pl.LightningModule):
    """Fine-tune a Transformer with a learned gate on every head, then keep exactly the budgeted heads.

    One ``trainer.fit`` has three phases. *Finetune*: all gates open, ordinary fine-tuning; give it length 0 for a
    model that is already fine-tuned. *Prune*: stochastic gates, with a penalty that ramps up. *Retrain*: the mask is
    fixed at the budget and the weights recover.

    Args:
        backbone: hub name or local folder of a pretrained model.
        from_scratch: instead of a backbone, config fields of a new model (``model_type`` and sizes).
        budget: heads to keep: a count (18), a fraction (0.25), or one of these per kind ({encoder: 10}).
        price: with ``budget: null``, lambda of Voita et al. 2019: the price of one expected open head, or one per
            kind. The number of heads that stay then follows from it. ``clamped-linear`` gates pay it with a budget too.
        gate: how gates are learned: ``hard-concrete`` (Louizos et al. 2018), ``relaxed-top-k`` (Differentiable Subset
            Pruning, Li et al. 2021), ``straight-through-top-k`` (the top K forward, a sigmoid's gradient backward; K comes
            down over the ramp) or ``clamped-linear`` (a number clamped to [0, 1] with an L1 price, as DuoAttention's, Xiao
            et al. 2024). Each starts anew at the prune phase, so that a finetune phase with one serves all.
        finetune: length of the finetune phase in epochs; fractions are allowed.
        prune: length of the prune phase in epochs; 0, together with ``retrain: 0`` and ``budget: null``, trains a dense model
            and nothing else.
        retrain: length of the retrain phase in epochs.
        ramp: share of the prune phase over which the target, the price or the relaxed top K's temperature goes to its final
            value.
        pipelined: whether the backbone rests in the prune phase, so that gates are learned first and weights after (as in
            the pipelined variant of Li et al. 2021).
        minimum_per_layer: heads that every layer keeps, whatever their gates say.
        swaps: passes over training data (1,024 examples) that a search by swaps may take to refine the learned mask before
            the weights are retrained (see :mod:`gates.search.swaps`); 0 for no search, 40 is a good deal.
        learning_rate: of the backbone, at its peak: it rises linearly over ``lr_warm_up`` and falls.
        lr_warm_up: share of all steps (or of each cycle's) over which the backbone's learning rate rises.
        lr_decay: how it falls: ``linear`` to 0, or ``noam``, with the inverse square root of the step (Vaswani et al. 2017).
        prune_learning_rate: the peak of a second cycle of the learning rate, which starts after fine-tuning, so that the
            dense model is trained to its end; null for one cycle over the whole run.
        weight_decay: of the backbone's matrices.
        gate_learning_rate: of log_alpha.
        steering: how training of ``hard-concrete`` gates is held to the budget. ``projection``: after every step all
            log_alpha are shifted by one number, so that the expected number of open heads is exactly on its way from all
            heads to the budget and only the task loss decides which; ``multipliers``: the augmented Lagrangian of Wang et
            al. 2020.
        multiplier_learning_rate: of the Lagrangian's multipliers, which ascend.
        unit: what a gate scales and a budget counts: a ``head``, or under grouped-query attention a ``group``: a key/value
            head with all its query heads, whose closing shrinks the cache.
        draw_per: ``example``: every example of a batch has gates of its own; ``batch``: one draw for the whole batch, as
            in the papers.
        temperature: of the Hard-Concrete distribution.
        anneal: the temperature of ``hard-concrete`` gates at the end of the prune phase, reached log-linearly, so that training
            gates become hard; null: it stays.
        initial_log_alpha: of ``hard-concrete`` gates; 2.5 is near-open: evaluation gates start at exactly 1.
        his_start: under projection and for the two top-k families the prune phase starts with gates that HIS on training
            data has set apart: by this many units of log_alpha for each standard deviation of the logarithm of a head's
            score; 0 starts them equal.
        straight_through: train with ``hard-concrete`` gates rounded to 0 and 1.
        straight_through_from: share of the prune phase after which they are rounded so; 1 is never.
        distil: weight of the dense model's predictions as a goal in the prune and retrain phases: their divergence counts so
            much and the task loss 1 minus that (Hinton et al. 2015). The dense model is the one at the end of fine-tuning.
        distil_temperature: that both models' logits are divided by.
        distil_hidden: weight of the squared distance between hidden states and the dense model's, layer by layer, in units
            of their variance (as in CoFi, Xia et al. 2022); in addition to the other losses.
        freeze: patterns (regular expressions) of backbone parameter names that stay fixed; ``[".*"]`` trains the gates
            alone.
        freeze_while_pruning: the same from the end of fine-tuning on: with ``["decoder"]`` and a budget of encoder heads the
            decoder cannot take over what these did (Voita et al. 2019).
        trust_remote_code: whether code that comes with the backbone may run.
        allow_pickle: whether the backbone may come as a ``pytorch_model.bin``; it is read without running code from it.
        seed: of the gates' noise and of dropout, which are functions of (seed, step).

    ``closing_step`` ``[gates]`` says after which optimiser step each gate closed for good, see :mod:`gates.families.closing`.
    """

    closing_step: Tensor

    def __init__(
        self,
        backbone: str | None = None,
        from_scratch: dict[str, Any] | None = None,
        budget: int | float | dict[str, int | float] | None = 0.25,
        price: float | dict[str, float] = 0.01,
        gate: GateFamily = "hard-concrete",
        finetune: float = 2.0,
        prune: float = 1.2,
        retrain: float = 0.8,
        ramp: float = 0.6,
        pipelined: bool = False,
        minimum_per_layer: int = 0,
        swaps: float = 0.0,
        learning_rate: float = 5e-5,
        lr_warm_up: float = 0.06,
        lr_decay: Decay = "linear",
        prune_learning_rate: float | None = None,
        weight_decay: float = 0.01,
        gate_learning_rate: float = 0.05,
        steering: Literal["projection", "multipliers"] = "projection",
        multiplier_learning_rate: float = 0.1,
        unit: Unit = "head",
        draw_per: DrawPer = "example",
        temperature: float = 0.33,
        anneal: float | None = None,
        initial_log_alpha: float = 2.5,
        his_start: float = 1.0,
        straight_through: bool = False,
        straight_through_from: float = 1.0,
        distil: float = 0.0,
        distil_temperature: float = 2.0,
        distil_hidden: float = 0.0,
        freeze: list[str] | None = None,
        freeze_while_pruning: list[str] | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        check_options(self.hparams)
        self.backbone_name = backbone
        self.fixed_mask: Tensor | None = None
        self.teacher: Teacher | None = None
        self.schedule = Schedule()
        self.outputs: dict[str, dict[str, list[str]]] = {}

    # -- building ----------------------------------------------------------------------------------------------

    def build(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the backbone, attach the gates and check the budget; does nothing the second time.

        Raises:
            GateError: for a backbone that cannot be loaded or gated, or a budget it cannot have.
        """
        if hasattr(self, "backbone"):
            return
        hparams = self.hparams
        self.task = task
        trust = {name: hparams[name] for name in ("trust_remote_code", "allow_pickle")}
        backbone = self.task.build(self.backbone_name, hparams["from_scratch"], tokenizer, **trust)
        sites = find_attention(backbone)
        check_removable(sites)
        self.kinds = self._kinds_to_prune([kind for kind in KINDS if kind in {site.kind for site in sites}])
        self.gates = HeadGates(
            backbone,
            hparams["unit"],
            stretch=Stretch(hparams["temperature"]),
            initial_log_alpha=hparams["initial_log_alpha"],
            straight_through=hparams["straight_through"],
            draw_per=hparams["draw_per"],
            anneal=hparams["anneal"],
            straight_through_from=hparams["straight_through_from"],
            family=hparams["gate"],
            budget=hparams["budget"] if hparams["gate"] in TOP_K_FAMILIES else None,
            kinds=self.kinds,
        )
        heads = self.gates.kind_sizes()
        self.budget = None if hparams["budget"] is None else Budget.parse(hparams["budget"], heads)
        self.prices = parse_prices(hparams["price"], heads)[self.gates.kind_index().cpu()]
        if self.gates.is_learned is not None:
            self.prices *= self.gates.is_learned.cpu()  # what is not learned costs nothing
        self.target: TargetBudget | None = None
        if self.budget is not None:
            # A projection cannot reach an expectation of all heads: the limits would level the gates there.
            start = 1.0
            if hparams["steering"] == "projection" and hparams["gate"] == "hard-concrete":
                start = float(self.gates.learned.open_probability().detach().mean())
            target = TargetBudget(self.budget, heads, Stretch(hparams["temperature"]), start=start)
            # Multipliers that do not steer are no part of the module: a finetune phase then serves every budget and steering by none.
            register = setattr if hparams["steering"] == "multipliers" else object.__setattr__
            register(self, "target", target)
            self.mask_within_budget(self.gates.log_alpha.detach(), self.budget)  # raises where the minimum does not fit
        self.backbone = backbone.train()
        self.frozen = [p for p in matching_parameters(backbone, hparams["freeze"] or []) if p.requires_grad]
        for parameter in self.frozen:
            parameter.requires_grad_(False)
        self.frozen_while_pruning = matching_parameters(backbone, hparams["freeze_while_pruning"] or [])
        self.gates.mode = "open"
        self.gates.attach()
        self.register_buffer(CLOSING_STEP, torch.full((self.gates.size,), NOT_CLOSED), persistent=False)
        self.metrics = torch.nn.ModuleDict({split: self.task.metrics(split) for split in ("select", "test")})
        # Lightning's own mean counts examples in whole numbers, which is wrong where processes have unequally many.
        self.mean_loss = torch.nn.ModuleDict({split: MeanMetric() for split in ("select", "test")})

    def _kinds_to_prune(self, known: Collection[Kind]) -> list[Kind] | None:
        """Those with a budget, or without one with a price; None for all. The others stay whole, and are not drawn, so that
        what pruning leaves alone is trained as it will be used."""
        budget, price = self.hparams["budget"], self.hparams["price"]
        if isinstance(budget, Mapping):
            return [kind for kind in known if kind in budget]
        if budget is None and isinstance(price, Mapping):
            return [kind for kind in known if price.get(kind)]
        return None

    @property
    def has_multipliers(self) -> bool:
        """Whether a Lagrangian steers to the budget."""
        return self.target is not None and self.hparams["steering"] == "multipliers"

    @property
    def projects(self) -> bool:
        """Whether gates are shifted to the budget after every step."""
        return self.budget is not None and self.hparams["gate"] == "hard-concrete" and not self.has_multipliers

    @property
    def distils(self) -> bool:
        """Whether the dense model teaches."""
        return bool(self.hparams["distil"] or self.hparams["distil_hidden"])

    @property
    def epochs(self) -> float:
        """Length of the whole run."""
        return float(self.hparams["finetune"] + self.hparams["prune"] + self.hparams["retrain"])

    def mask_within_budget(self, scores: Tensor, budget: Budget) -> Tensor:
        """The 0/1 mask ``[gates]`` of the highest scores: exactly the budget, with the minimum per layer."""
        return budget_mask(
            scores,
            budget,
            kind_index=self.gates.kind_index().to(scores.device),
            layer_index=self.gates.layer_index().to(scores.device),
            minimum_per_layer=self.hparams["minimum_per_layer"],
        )

    def budget_of(self, mask: Tensor) -> Budget:
        """The run's budget; with a price in its place the one that a mask ``[gates]`` fills, of each kind if prices are per
        kind: other kinds stay whole then."""
        if self.budget is not None:
            return self.budget
        if self.kinds is None:
            return Budget(int(mask.sum()), {})
        return Budget.parse({kind: self._open_of(kind, mask) for kind in self.kinds}, self.gates.kind_sizes())

    def _open_of(self, kind: Kind, mask: Tensor) -> int:
        """Gates of a kind that a mask ``[gates]`` keeps."""
        return int(mask[(self.gates.kind_index() == KINDS.index(kind)).to(mask.device)].sum())

    def learned_mask(self) -> Tensor:
        """What the gates say now: the top log_alpha within the budget, or without one every gate above 0."""
        if self.gates.mode == "masked":
            return self.gates.mask.clone()
        log_alpha = self.gates.log_alpha.detach()
        if self.budget is not None:
            return self.mask_within_budget(log_alpha, self.budget)
        self.gates.mode = "stochastic"
        minimum = self.hparams["minimum_per_layer"]
        is_open, least = self.gates.values() > 0, [min(minimum, size) for size in self.gates.sizes]
        if self.kinds is None:
            return self.mask_within_budget(log_alpha, Budget(max(int(is_open.sum()), sum(least)), {}))
        counts: dict[str, int | float] = {}
        for kind in self.kinds:
            minimum = sum(count for count, site in zip(least, self.gates.sites, strict=True) if site.kind == kind)
            counts[kind] = max(self._open_of(kind, is_open), minimum)
        return self.mask_within_budget(log_alpha, Budget.parse(counts, self.gates.kind_sizes()))

    # -- phases ------------------------------------------------------------------------------------------------

    def _set_schedule(self) -> None:
        # Not the trainer's estimated_stepping_batches: it makes the training loader before a checkpoint's progress is
        # restored, and a resumed run would start at the first batch again.
        batches = len(self.trainer.datamodule.run_batches())  # type: ignore[attr-defined]
        limit = self.trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * (1.0 if limit is None else limit))
        hparams = self.hparams
        second = hparams["prune_learning_rate"]
        self.schedule = Schedule.of_epochs(
            math.ceil(batches / self.trainer.accumulate_grad_batches),
            **{name: hparams[name] for name in ("finetune", "prune", "retrain")},
            ramp_share=hparams["ramp"],
            rise_share=hparams["lr_warm_up"],
            decay=hparams["lr_decay"],
            second_peak=second / hparams["learning_rate"] if second is not None and hparams["learning_rate"] else None,
        )

    @property
    def boundaries(self) -> tuple[int, int, int]:
        """Optimiser steps after which the phases finetune, prune and retrain end."""
        return self.schedule.finetune, self.schedule.prune, self.schedule.end

    def phase(self, step: int) -> Phase:
        return self.schedule.phase(step)

    def ramp(self, step: int) -> float:
        """How far the target or the price has gone, 0 to 1; 0 outside the prune phase and with a fixed mask."""
        return self.schedule.ramp(step) if self.fixed_mask is None else 0.0

    def goals(self, step: int) -> list[float]:
        """Open gates aimed at after a step, in all or of each budgeted kind; none without a budget."""
        if self.target is None or self.budget is None:
            return []
        budget, learned = self.budget, self.gates.learned
        if self.gates.mode != "masked":
            if self.projects or self.has_multipliers:
                return (self.target.target(self.ramp(step)) * self.target.heads).tolist()
            if self.gates.mode == "open":
                return self.target.heads.tolist()
            if isinstance(learned, TopKGates):
                budget = learned.current_budget()
        return list(budget.per_kind.values()) or [budget.total]

    def on_train_start(self) -> None:
        """A checkpoint brings the learning rates of the run it is from; this run's own settings count."""
        if self.distils and self.global_step > self.schedule.finetune and self.teacher is None:
            raise GateError(
                f"the checkpoint is past fine-tuning (step {self.global_step} of {self.schedule.finetune}) and was trained "
                "without distillation, so that the dense model to learn from is not in it; go on from dense.ckpt, or with "
                "--model.distil 0 and --model.distil_hidden 0"
            )
        if self.teacher is not None:
            self.teacher.model.to(self.device)
        own = {"gates": "gate_learning_rate", "multipliers": "multiplier_learning_rate"}
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        scheduler.base_lrs = [
            self.hparams[own.get(group["name"], "learning_rate")]
            for group in optimizer.param_groups  # type: ignore[union-attr]
        ]
        for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):  # type: ignore[union-attr]
            group["initial_lr"], group["lr"] = base, base * factor(self.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        phase = self.phase(self.global_step)
        if self.global_step == self.schedule.finetune and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._start_pruning()
        self._lead_gates(phase)
        if phase == "finetune":
            self.gates.mode = "open"
            self.teacher = None  # of an earlier fit that did not end
        elif self.fixed_mask is not None:
            self.gates.set_mask_(self.fixed_mask.to(self.device))
        elif phase == "prune":
            self.gates.mode = "stochastic"
        elif self.gates.mode != "masked":
            self.gates.set_mask_(self._refined(self.learned_mask()))

    def _refined(self, mask: Tensor) -> Tensor:
        """The mask after a search by swaps on training data, if one is asked for."""
        if self.hparams["swaps"] == 0:
            return mask
        search = SwapSearch(passes=self.hparams["swaps"])
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        return refine(self, data, self.trainer, mask, search, budget=self.budget_of(mask)).mask

    def _start_pruning(self) -> None:
        """At the end of fine-tuning: the dense model becomes the teacher, and the gates start as their family does."""
        if self.distils:
            self.teacher = Teacher(self.backbone, self.gates)
        if self.fixed_mask is None:
            self.closing_step.fill_(NOT_CLOSED)
            self.gates.learned.reset_()
            if self.projects or self.hparams["gate"] in TOP_K_FAMILIES:
                self._start_from_his()

    def _lead_gates(self, phase: Phase) -> None:
        """Tell the gates how far the pruning has come."""
        step, start, end = self.global_step, self.schedule.finetune, self.schedule.prune
        if phase != "prune":
            self.gates.learned.progress = float(phase == "retrain")
        elif self.hparams["gate"] in TOP_K_FAMILIES:
            self.gates.learned.progress = self.schedule.ramp(step)
        else:
            self.gates.learned.progress = (step - start) / max(1, end - start - 1)

    @torch.no_grad()
    def _start_from_his(self) -> None:
        """Set the gates apart by HIS at the end of fine-tuning; the first projection brings their sum to its course."""
        spread = self.hparams["his_start"]
        if spread == 0:
            return
        scores = score_importance(self, self.trainer.datamodule.score_dataloader(), self.trainer)  # type: ignore[attr-defined]
        logarithm = normalise_by_layer(scores.his, self.gates.layer_index().cpu()).clamp(min=1e-6).log()
        standard = (logarithm - logarithm.mean()) / logarithm.std().clamp(min=1e-6)
        self.gates.log_alpha.add_(spread * standard.to(self.gates.log_alpha))
        self.gates.learned.clamp_()

    def on_train_end(self) -> None:
        """Where no retrain phase has begun, the mask is made here."""
        if self.fixed_mask is None and self.global_step >= self.schedule.prune and self.gates.mode != "masked":
            self.gates.set_mask_(self._refined(self.learned_mask()))

    def on_fit_end(self) -> None:
        self.teacher = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What the backbone had lost before this run, without which its weights have no shape; when gates closed; and the
        teacher, where training can go on."""
        checkpoint[PRUNED_BEFORE] = getattr(self.backbone.config, "pruned_attention", {})
        checkpoint[CLOSING_STEP] = self.closing_step.cpu()
        if self.teacher is not None and "optimizer_states" in checkpoint:
            checkpoint[TEACHER] = self.teacher.model.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.fixed_mask is None and CLOSING_STEP in checkpoint:
            self.closing_step.copy_(checkpoint[CLOSING_STEP])
        self.teacher = None
        if self.distils and TEACHER in checkpoint:
            self.teacher = Teacher(self.backbone, self.gates)
            self.teacher.model.load_state_dict(checkpoint[TEACHER])

    # -- steps -------------------------------------------------------------------------------------------------

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        # Noise is a function of (seed, batch): a resumed run draws what an unbroken one would have drawn. One draw for
        # the whole batch is the same in all processes; draws per example and dropout are each process's own.
        noise = (int(self.hparams["seed"]) * 1_000_003 + batch_idx) * 4096
        own = noise + 1 + self.global_rank
        self.gates.generator = torch.Generator(self.device).manual_seed(noise if self.gates.draw_per == "batch" else own)
        torch.manual_seed(own)
        if self.teacher is None:
            losses, _ = self.task.losses(self.backbone, batch)
            task_loss = objective = self.task.batch_loss(losses, batch)
        else:
            task_loss, objective = self._taught(self.teacher, batch)
        penalty = self._penalty()
        loss = self._share(batch) * objective + penalty
        if not self._finite_everywhere(loss):
            raise GateError(
                f"the loss is {float(loss.detach())} at step {self.global_step}; lower --model.learning_rate or set "
                "--trainer.gradient_clip_val and start again, or go on from the last good checkpoint with --existing resume"
            )
        self.log_dict({"train/task_loss": task_loss, "train/penalty": penalty, "train/loss": loss})
        return loss

    def _taught(self, teacher: Teacher, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The mean loss of the task, and what is minimised in its place."""
        weight, hidden_weight = self.hparams["distil"], self.hparams["distil_hidden"]
        with recorded_outputs(self.backbone, hidden_states=hidden_weight > 0) as outputs:
            losses, logits = self.task.losses(self.backbone, batch)
        task_loss = self.task.batch_loss(losses, batch)
        kl, distance = distillation_terms(
            teacher,
            self.task,
            batch,
            logits,
            outputs[-1],
            temperature=self.hparams["distil_temperature"],
            hidden_states=hidden_weight > 0,
        )
        self.log_dict({"train/logit_kl": kl, "train/hidden_mse": distance})
        return task_loss, (1 - weight) * task_loss + weight * kl + hidden_weight * distance

    def _share(self, batch: dict[str, Tensor]) -> float:
        """How much this process's batch counts: the mean of the gradients over processes is then that of one process with all
        their batches."""
        if self.trainer.world_size == 1:
            return 1.0
        own = torch.tensor(self.task.batch_weight(batch), device=self.device)
        return float(own / self.all_gather(own).mean())  # type: ignore[union-attr]

    def _finite_everywhere(self, loss: Tensor) -> bool:
        """Whether the loss is finite in all processes, so that all of them stop together."""
        finite = bool(torch.isfinite(loss))
        return finite if self.trainer.world_size == 1 else self.trainer.strategy.reduce_boolean_decision(finite, all=True)

    def _penalty(self) -> Tensor:
        """The price on open gates, or the pull to the target; times 0 outside the prune phase, so that every
        parameter has a gradient in every process."""
        ramp = self.ramp(self.global_step)
        if self.budget is None or self.hparams["gate"] == "clamped-linear":
            probability = self.gates.open_probability()
            return ramp * l0_penalty(probability, self.prices.to(probability))
        if not self.has_multipliers:
            return 0.0 * self.gates.log_alpha.sum()
        active = 1.0 if ramp > 0 else 0.0
        assert self.target is not None
        return active * self.target(self.gates.open_probability(), self.gates.kind_index(), ramp)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Outside the prune phase gates and multipliers rest: a step with zero gradients would still count in Adam's
        bias correction and make their first real steps several times too long. In it the backbone rests, if pipelined; in it
        and after it, weights that are frozen while pruning do."""
        if self.phase(self.global_step) != "finetune":
            for parameter in self.frozen_while_pruning:
                parameter.grad = None
        resting: Iterable[torch.nn.Parameter] = ()
        if self.ramp(self.global_step) == 0:
            resting = self._gate_parameters()
        elif self.hparams["pipelined"]:
            resting = self.backbone.parameters()
        for parameter in resting:
            parameter.grad = None

    def _gate_parameters(self) -> list[torch.nn.Parameter]:
        return [self.gates.log_alpha, *(self.target.parameters() if self.target is not None else ())]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        is_pruning = self.ramp(self.global_step) > 0
        super().optimizer_step(*args, **kwargs)
        self.gates.learned.clamp_()
        self._project()
        if is_pruning:
            done = self.global_step + 1  # Lightning counts the step when this hook returns
            self.closing_step.copy_(update_closing_step(self.closing_step, self.gates.values(), done))

    @torch.no_grad()
    def _project(self) -> None:
        """Hold the expected number of open heads to the target, in the whole model or in each budgeted kind."""
        ramp = self.ramp(self.global_step)
        if not self.projects or ramp == 0:
            return
        assert self.target is not None
        assert isinstance(self.gates.learned, HardConcrete)
        expected = (self.target.target(ramp) * self.target.heads).tolist()
        log_alpha, kinds = self.gates.log_alpha, self.gates.kind_index()
        quotas: list[str | None] = [*self.target.kinds] or [None]
        for kind, count in zip(quotas, expected, strict=True):
            among = torch.ones_like(kinds, dtype=torch.bool) if kind is None else kinds == KINDS.index(kind)
            log_alpha[among] = project_to_budget(log_alpha[among], count, self.gates.learned.stretch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and (unreached := self.gates.unreached()):
            raise GateError(
                f"the attention at {unreached[0]!r} did not run, so its gates have no effect; use a model class without it"
            )

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("select", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("test", batch)

    def _evaluate(self, split: str, batch: dict[str, Tensor]) -> Tensor:
        """Log a batch's metrics; returns the logits for callbacks that keep predictions."""
        losses, logits = self.task.losses(self.backbone, batch)
        metrics = self.metrics[split]
        self.task.update(metrics, self.backbone, batch, logits)  # type: ignore[arg-type]
        size = losses.shape[0]
        self.mean_loss[split].update(losses)  # type: ignore[operator]
        self.log(f"{split}/loss", self.mean_loss[split], batch_size=size, on_epoch=True)  # type: ignore[arg-type]
        named = {f"{split}/{name}": metric for name, metric in metrics.items()}  # type: ignore[operator]
        self.log_dict(named, batch_size=size, on_epoch=True, on_step=False, prog_bar=False)
        return logits

    def on_validation_epoch_end(self) -> None:
        self.outputs["select"] = self.task.outputs(self.metrics["select"])  # type: ignore[arg-type]

    def on_test_epoch_end(self) -> None:
        self.outputs["test"] = self.task.outputs(self.metrics["test"])  # type: ignore[arg-type]

    # -- optimisation ------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        self._set_schedule()
        hparams = self.hparams
        groups = backbone_groups(self.backbone, hparams["learning_rate"], hparams["weight_decay"])
        groups += gate_groups(
            self.gates,
            self.target if self.has_multipliers else None,
            learning_rate=hparams["gate_learning_rate"],
            multiplier_learning_rate=hparams["multiplier_learning_rate"],
        )
        # One kernel for all parameters, several times faster. It would unscale float16 gradients after clipping, not before.
        scales = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        optimizer = torch.optim.AdamW(groups, fused=self.device.type in ("cpu", "cuda") and not scales)
        schedules: list[Callable[[int], float]] = [
            self.schedule.gate_rate if group["name"] in ("gates", "multipliers") else self.schedule.backbone_rate
            for group in groups
        ]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedules)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the backbone's gradients only: the gates' have another scale and must not shrink with them."""
        if not gradient_clip_val:
            return
        parameters = [p for p in self.backbone.parameters() if p.grad is not None]
        if gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
