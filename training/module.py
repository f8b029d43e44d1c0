"""The Lightning module: one run from a dense Transformer to a pruned one, in three phases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gates.attach import DrawPer, HeadGates, Unit
from gates.errors import GateError
from gates.hard_concrete import Stretch
from gates.importance import normalise_by_layer
from gates.objective import Budget, TargetBudget, l0_penalty, project_to_budget
from gates.ranking import budget_mask
from gates.sites import KINDS, find_attention
from gates.surgery import check_removable
from training.schedule import Decay, Phase, Schedule
from training.scoring import score_importance
from training.tasks import Task

PRUNED_BEFORE = "pruned_attention"
NO_DECAY = re.compile(r"bias$|norm\d*\.weight$|layer_?norm", re.IGNORECASE)


class HeadPruner(pl.LightningModule):
    """Fine-tune a Transformer with a Hard-Concrete gate on every head, then keep exactly the budgeted heads.

    One ``trainer.fit`` has three phases. *Warm-up*: all gates open, ordinary fine-tuning; give it length 0 for a
    model that is already fine-tuned. *Prune*: stochastic gates, with a penalty that ramps up. *Settle*: the mask is
    fixed at the budget and the weights recover.

    Args:
        backbone: hub name or local folder of a pretrained model.
        from_scratch: instead of a backbone, config fields of a new model (``model_type`` and sizes).
        budget: heads to keep: a count (18), a fraction (0.25), or one of these per kind ({encoder: 10}).
        price: with ``budget: null``, lambda of Voita et al. 2019: the price of one expected open head, or one per
            kind. The number of heads that stay then follows from it.
        warm_up: length of the warm-up phase in epochs; fractions are allowed.
        prune: length of the prune phase in epochs; 0, together with ``settle: 0`` and ``budget: null``, trains a dense model
            and nothing else.
        settle: length of the settle phase in epochs.
        ramp: share of the prune phase over which the target or the price goes to its final value.
        minimum_per_layer: heads that every layer keeps, whatever their gates say.
        learning_rate: of the backbone, at its peak: it rises linearly over ``lr_warm_up`` and falls.
        lr_warm_up: share of all steps (or of each cycle's) over which the backbone's learning rate rises.
        lr_decay: how it falls: ``linear`` to 0, or ``noam``, with the inverse square root of the step (Vaswani et al. 2017).
        prune_learning_rate: the peak of a second cycle of the learning rate, which starts after the warm-up, so that the
            dense model is trained to its end; null for one cycle over the whole run.
        weight_decay: of the backbone's matrices.
        gate_learning_rate: of log_alpha.
        steering: how training is held to the budget. ``projection``: after every step all log_alpha are shifted by one
            number, so that the expected number of open heads is exactly on its way from all heads to the budget and
            only the task loss decides which; ``multipliers``: the augmented Lagrangian of Wang et al. 2020.
        multiplier_learning_rate: of the Lagrangian's multipliers, which ascend.
        unit: what a gate scales and a budget counts: a ``head``, or under grouped-query attention a ``group``: a key/value
            head with all its query heads, whose closing shrinks the cache.
        draw_per: ``example``: every example of a batch has gates of its own; ``batch``: one draw for the whole batch, as
            in the papers.
        temperature: of the Hard-Concrete distribution.
        initial_log_alpha: 2.5 is near-open: evaluation gates start at exactly 1.
        his_start: under projection the prune phase starts with gates that HIS on training data has set apart: by this
            many units of log_alpha for each standard deviation of the logarithm of a head's score; 0 starts them equal.
        straight_through: train with gates rounded to 0 and 1.
        freeze: patterns (regular expressions) of backbone parameter names that stay fixed; ``[".*"]`` trains the gates
            alone.
        freeze_while_pruning: the same from the end of the warm-up on: with ``["decoder"]`` and a budget of encoder heads the
            decoder cannot take over what these did (Voita et al. 2019).
        trust_remote_code: whether code that comes with the backbone may run.
        allow_pickle: whether the backbone may come as a ``pytorch_model.bin``; it is read without running code from it.
        seed: of the gates' noise and of dropout, which are functions of (seed, step).
    """

    def __init__(
        self,
        backbone: str | None = None,
        from_scratch: dict[str, Any] | None = None,
        budget: int | float | dict[str, int | float] | None = 0.25,
        price: float | dict[str, float] = 0.01,
        warm_up: float = 2.0,
        prune: float = 1.2,
        settle: float = 0.8,
        ramp: float = 0.6,
        minimum_per_layer: int = 0,
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
        initial_log_alpha: float = 2.5,
        his_start: float = 1.0,
        straight_through: bool = False,
        freeze: list[str] | None = None,
        freeze_while_pruning: list[str] | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if backbone is None and from_scratch is None:
            raise GateError(
                "there is no model: give a pretrained one (--model.backbone) or config fields (--model.from_scratch)"
            )
        if backbone is not None and from_scratch is not None:
            raise GateError(
                f"both a pretrained model ({backbone!r}) and config fields of a new one are given; add "
                "--model.from_scratch null, or start from a --config without it, such as configs/sst2_minilm_local.yaml"
            )
        for name, value in {
            "warm_up": warm_up, "prune": prune, "settle": settle, "minimum_per_layer": minimum_per_layer,
            "learning_rate": learning_rate, "lr_warm_up": lr_warm_up, "weight_decay": weight_decay,
            "gate_learning_rate": gate_learning_rate, "multiplier_learning_rate": multiplier_learning_rate,
            "his_start": his_start, "prune_learning_rate": prune_learning_rate or 0.0,
        }.items():  # fmt: skip
            if not 0 <= value < math.inf:
                raise GateError(f"{name} is {value}; expected 0 or more")
        if prune == 0 and (settle > 0 or budget is not None or warm_up == 0):
            raise GateError(
                "prune is 0 epochs, but the gates need some training, for example 1; to train a dense model alone, set "
                "settle to 0 and budget to null too"
            )
        if not 0 < ramp <= 1:
            raise GateError(f"ramp is {ramp}; expected a share of the prune phase above 0 and at most 1")
        self.save_hyperparameters()
        self.backbone_name = backbone
        self.fixed_mask: Tensor | None = None
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
        check_removable(find_attention(backbone))
        self.gates = HeadGates(
            backbone,
            hparams["unit"],
            stretch=Stretch(hparams["temperature"]),
            initial_log_alpha=hparams["initial_log_alpha"],
            straight_through=hparams["straight_through"],
            draw_per=hparams["draw_per"],
        )
        heads = self.gates.kind_sizes()
        self.budget = None if hparams["budget"] is None else Budget.parse(hparams["budget"], heads)
        self.prices = self._parse_prices(hparams["price"], heads)
        self.target: TargetBudget | None = None
        if self.budget is not None:
            # A projection cannot reach an expectation of all heads: the limits would level the gates there.
            projects = hparams["steering"] == "projection"
            start = float(self.gates.hard_concrete.open_probability().detach().mean()) if projects else 1.0
            self.target = TargetBudget(self.budget, heads, self.gates.hard_concrete.stretch, start=start)
            self.target.requires_grad_(self.has_multipliers)
            self.mask_within_budget(self.gates.log_alpha.detach(), self.budget)  # raises where the minimum does not fit
        self.backbone = backbone.train()
        self.frozen = [p for p in self._matching(hparams["freeze"] or []) if p.requires_grad]
        for parameter in self.frozen:
            parameter.requires_grad_(False)
        self.frozen_while_pruning = self._matching(hparams["freeze_while_pruning"] or [])
        self.gates.mode = "open"
        self.gates.attach()
        self.metrics = torch.nn.ModuleDict({split: self.task.metrics(split) for split in ("select", "test")})

    def _parse_prices(self, price: float | Mapping[str, float], heads: Mapping[str, int]) -> Tensor:
        """The price of each gate, ``[gates]``."""
        prices = dict.fromkeys(heads, price) if not isinstance(price, Mapping) else dict(price)
        for kind, value in prices.items():
            if kind not in heads:
                raise GateError(
                    f"the price names kind {kind!r}, but this model has heads of kind {', '.join(map(repr, heads))} only"
                )
            if not value >= 0:
                raise GateError(f"the price of {kind} heads is {value!r}; expected a number of at least 0")
        table = torch.tensor([float(prices.get(kind, 0.0)) for kind in KINDS])
        return table[self.gates.kind_index().cpu()]

    def _matching(self, patterns: list[str]) -> list[torch.nn.Parameter]:
        """The backbone's parameters whose name a pattern matches; every pattern must match some."""
        found: list[torch.nn.Parameter] = []
        for pattern in patterns:
            try:
                matches = [p for name, p in self.backbone.named_parameters() if re.search(pattern, name)]
            except re.error as error:
                raise GateError(f"the freeze pattern {pattern!r} is not a regular expression: {error}") from error
            if not matches:
                raise GateError(f"the freeze pattern {pattern!r} matches no parameter of {type(self.backbone).__name__}")
            found += matches
        return found

    @property
    def has_multipliers(self) -> bool:
        """Whether a Lagrangian steers to the budget."""
        return self.target is not None and self.hparams["steering"] == "multipliers"

    @property
    def epochs(self) -> float:
        """Length of the whole run."""
        return float(self.hparams["warm_up"] + self.hparams["prune"] + self.hparams["settle"])

    def mask_within_budget(self, scores: Tensor, budget: Budget) -> Tensor:
        """The 0/1 mask ``[gates]`` of the highest scores: exactly the budget, with the minimum per layer."""
        return budget_mask(
            scores,
            budget,
            kind_index=self.gates.kind_index().to(scores.device),
            layer_index=self.gates.layer_index().to(scores.device),
            minimum_per_layer=self.hparams["minimum_per_layer"],
        )

    def learned_mask(self) -> Tensor:
        """What the gates say now: the top log_alpha within the budget, or without one every gate above 0."""
        if self.gates.mode == "masked":
            return self.gates.mask.clone()
        log_alpha = self.gates.log_alpha.detach()
        if self.budget is not None:
            return self.mask_within_budget(log_alpha, self.budget)
        self.gates.mode = "stochastic"
        minimum = self.hparams["minimum_per_layer"]
        count = max(int((self.gates.values() > 0).sum()), sum(min(minimum, size) for size in self.gates.sizes))
        return self.mask_within_budget(log_alpha, Budget(count, {}))

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
            **{name: hparams[name] for name in ("warm_up", "prune", "settle")},
            ramp_share=hparams["ramp"],
            rise_share=hparams["lr_warm_up"],
            decay=hparams["lr_decay"],
            second_peak=second / hparams["learning_rate"] if second is not None and hparams["learning_rate"] else None,
        )

    @property
    def boundaries(self) -> tuple[int, int, int]:
        """Optimiser steps after which warm-up, prune and settle end."""
        return self.schedule.warm_up, self.schedule.prune, self.schedule.end

    def phase(self, step: int) -> Phase:
        return self.schedule.phase(step)

    def ramp(self, step: int) -> float:
        """How far the target or the price has gone, 0 to 1; 0 outside the prune phase and with a fixed mask."""
        return self.schedule.ramp(step) if self.fixed_mask is None else 0.0

    def on_train_start(self) -> None:
        """A checkpoint brings the learning rates of the run it is from; this run's own settings count."""
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
        if self.global_step == self.schedule.warm_up and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._start_from_his()
        if phase == "warm-up":
            self.gates.mode = "open"
        elif self.fixed_mask is not None:
            self.gates.set_mask_(self.fixed_mask.to(self.device))
        elif phase == "prune":
            self.gates.mode = "stochastic"
        elif self.gates.mode != "masked":
            self.gates.set_mask_(self.learned_mask())

    @torch.no_grad()
    def _start_from_his(self) -> None:
        """Set the gates apart by HIS at the end of the warm-up; the first projection brings their sum to its course."""
        spread = self.hparams["his_start"]
        if spread == 0 or self.fixed_mask is not None or self.target is None or self.has_multipliers:
            return
        scores = score_importance(self, self.trainer.datamodule.score_dataloader(), self.trainer)  # type: ignore[attr-defined]
        logarithm = normalise_by_layer(scores.his, self.gates.layer_index().cpu()).clamp(min=1e-6).log()
        standard = (logarithm - logarithm.mean()) / logarithm.std().clamp(min=1e-6)
        self.gates.log_alpha.add_(spread * standard.to(self.gates.log_alpha))
        self.gates.hard_concrete.clamp_()

    def on_train_end(self) -> None:
        if self.fixed_mask is None and self.global_step >= self.schedule.prune:
            self.gates.set_mask_(self.learned_mask())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What the backbone had lost before this run, without which its weights have no shape."""
        checkpoint[PRUNED_BEFORE] = getattr(self.backbone.config, "pruned_attention", {})

    # -- steps -------------------------------------------------------------------------------------------------

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        # Noise is a function of (seed, batch): a resumed run draws what an unbroken one would have drawn. One draw for
        # the whole batch is the same in all processes; draws per example and dropout are each process's own.
        noise = (int(self.hparams["seed"]) * 1_000_003 + batch_idx) * 4096
        own = noise + 1 + self.global_rank
        self.gates.generator = torch.Generator(self.device).manual_seed(noise if self.gates.draw_per == "batch" else own)
        torch.manual_seed(own)
        losses, _ = self.task.losses(self.backbone, batch)
        task_loss = self.task.batch_loss(losses, batch)
        penalty = self._penalty()
        loss = task_loss + penalty
        if not self._finite_everywhere(loss):
            raise GateError(
                f"the loss is {float(loss.detach())} at step {self.global_step}; lower --model.learning_rate or set "
                "--trainer.gradient_clip_val and start again, or go on from the last good checkpoint with --existing resume"
            )
        self.log_dict({"train/task_loss": task_loss, "train/penalty": penalty, "train/loss": loss})
        return loss

    def _finite_everywhere(self, loss: Tensor) -> bool:
        """Whether the loss is finite in all processes, so that all of them stop together."""
        finite = bool(torch.isfinite(loss))
        return finite if self.trainer.world_size == 1 else self.trainer.strategy.reduce_boolean_decision(finite, all=True)

    def _penalty(self) -> Tensor:
        """The price on open gates, or the pull to the target; times 0 outside the prune phase, so that every
        parameter has a gradient in every process."""
        ramp = self.ramp(self.global_step)
        probability = self.gates.hard_concrete.open_probability()
        if self.budget is None:
            return ramp * l0_penalty(probability, self.prices.to(probability))
        if not self.has_multipliers:
            return 0.0 * probability.sum()
        active = 1.0 if ramp > 0 else 0.0
        assert self.target is not None
        return active * self.target(probability, self.gates.kind_index(), ramp)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Outside the prune phase gates and multipliers rest: a step with zero gradients would still count in Adam's
        bias correction and make their first real steps several times too long. In it and after it some weights do."""
        if self.phase(self.global_step) != "warm-up":
            for parameter in self.frozen_while_pruning:
                parameter.grad = None
        if self.ramp(self.global_step) == 0:
            for parameter in self._gate_parameters():
                parameter.grad = None

    def _gate_parameters(self) -> list[torch.nn.Parameter]:
        return [self.gates.log_alpha, *(self.target.parameters() if self.target is not None else ())]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.gates.hard_concrete.clamp_()
        self._project()

    @torch.no_grad()
    def _project(self) -> None:
        """Hold the expected number of open heads to the target, in the whole model or in each budgeted kind."""
        ramp = self.ramp(self.global_step)
        if self.target is None or self.has_multipliers or ramp == 0:
            return
        expected = (self.target.target(ramp) * self.target.heads).tolist()
        log_alpha, kinds = self.gates.log_alpha, self.gates.kind_index()
        quotas: list[str | None] = [*self.target.kinds] or [None]
        for kind, count in zip(quotas, expected, strict=True):
            among = torch.ones_like(kinds, dtype=torch.bool) if kind is None else kinds == KINDS.index(kind)
            log_alpha[among] = project_to_budget(log_alpha[among], count, self.gates.hard_concrete.stretch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and (unreached := self.gates.unreached()):
            raise GateError(
                f"the attention at {unreached[0]!r} did not run, so its gates have no effect; use a model class without it"
            )

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("select", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, split: str, batch: dict[str, Tensor]) -> None:
        losses, logits = self.task.losses(self.backbone, batch)
        metrics = self.metrics[split]
        self.task.update(metrics, self.backbone, batch, logits)  # type: ignore[arg-type]
        size = losses.shape[0]
        self.log(f"{split}/loss", losses.mean(), batch_size=size, on_epoch=True, sync_dist=True)
        named = {f"{split}/{name}": metric for name, metric in metrics.items()}  # type: ignore[operator]
        self.log_dict(named, batch_size=size, on_epoch=True, on_step=False, prog_bar=False)

    def on_validation_epoch_end(self) -> None:
        self.outputs["select"] = self.task.outputs(self.metrics["select"])  # type: ignore[arg-type]

    def on_test_epoch_end(self) -> None:
        self.outputs["test"] = self.task.outputs(self.metrics["test"])  # type: ignore[arg-type]

    # -- optimisation ------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        self._set_schedule()
        hparams = self.hparams
        decayed: list[torch.nn.Parameter] = []
        plain: list[torch.nn.Parameter] = []
        for name, parameter in self.backbone.named_parameters():
            if parameter.requires_grad:
                (plain if parameter.dim() < 2 or NO_DECAY.search(name) else decayed).append(parameter)
        backbone_groups = [
            {"name": "backbone", "params": decayed, "lr": hparams["learning_rate"], "weight_decay": hparams["weight_decay"]},
            {"name": "backbone-no-decay", "params": plain, "lr": hparams["learning_rate"], "weight_decay": 0.0},
        ]
        gate_groups: list[dict[str, Any]] = [
            {"name": "gates", "params": [self.gates.log_alpha], "lr": hparams["gate_learning_rate"], "weight_decay": 0.0}
        ]
        if self.has_multipliers:
            assert self.target is not None
            gate_groups.append(
                {
                    "name": "multipliers",
                    "params": list(self.target.parameters()),
                    "lr": hparams["multiplier_learning_rate"],
                    "weight_decay": 0.0,
                    "maximize": True,
                }
            )
        groups = [group for group in backbone_groups if group["params"]] + gate_groups
        optimizer = torch.optim.AdamW(groups)
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
