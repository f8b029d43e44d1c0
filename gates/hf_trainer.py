"""Gates in Hugging Face's Trainer: a budget or a price, a learning rate of their own, checkpoints that keep them.

Trainer needs the package ``accelerate``.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gates.errors import GateError
from gates.hooks.sharded_trainer import ReplicatedGates, SeededNoise, base_weights, leave_gates_whole_
from gates.model import GatedModel

CLASSIFIER = re.compile("Classification|MultipleChoice|QuestionAnswering")
"""Classes that take ``num_items_in_batch`` and mostly ignore it, so that Trainer would not average their loss over
accumulated batches and processes (Transformers issue 47688); the price would then weigh less than it says."""


class GateCallback(TrainerCallback):
    """After every optimiser step: hold the gates to their budget and fix their mask where pruning ends, or, without a budget,
    bring them back into their limits.

    Args:
        retrain: share of all steps, the last ones, in which the mask is fixed.
    """

    def __init__(self, retrain: float = 0.0) -> None:
        self.retrain = retrain

    def _pruning_steps(self, state: Any) -> int:
        return max(1, round((1 - self.retrain) * state.max_steps))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: GatedModel | None = None, **kwargs: Any) -> None:
        assert model is not None
        if model.steering is not None and not model.steering.holds:
            model.step_(min(1.0, state.global_step / self._pruning_steps(state)))

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: GatedModel | None = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        assert model is not None
        if model.steering is None:
            model.clamp_()
            return
        done, steps = state.global_step + 1, self._pruning_steps(state)
        model.step_(min(1.0, done / steps), optimizer)
        if done >= steps and model.gates.mode == "stochastic":
            model.fix_mask_()


class GatedTrainer(Trainer):
    """Trainer for a :class:`gates.model.GatedModel` that ends with exactly the budgeted heads; also a mixin for other trainers.

    With a budget, the gates come down to it and are fixed at it, and the weights go on training with the heads that are left.
    With a price, training adds the price of the expected number of open gates to the loss; evaluation reports the task's loss
    alone. Checkpoints hold the base model, as its own class would save it, and the gates beside it; training resumes from
    them. The log has ``open_heads`` and ``gate_price``, the price that is given or that holds the gates to the budget.

    For another trainer: ``class GatedSeq2SeqTrainer(GatedTrainer, Seq2SeqTrainer): pass``.

    Args:
        model: gated model.
        args: everything else, by position or name, is :class:`transformers.Trainer`'s.
        budget: heads to keep: a count, a fraction or one of these per kind; by default that of the model's ``GateConfig``.
        retrain: with a budget, the share of all steps, the last ones, in which the mask is fixed.
        price: without a budget, the price of one open gate in expectation (default: 0.01); see
            :meth:`gates.model.GatedModel.penalty`.
        price_ramp: share of all steps over which the price rises linearly from 0.
        gate_learning_rate: learning rate of ``log_alpha``; it follows the schedule of the model's own. Without effect where an
            optimiser is given (``optimizers``): then use :meth:`gates.model.GatedModel.parameter_groups`.

    Raises:
        GateError: if the model is not gated, a number is out of range, a budget and a price are given, or the model would go
            into ``DataParallel``, DeepSpeed or FSDP1 (distributed data parallel training and FSDP2 work).

    >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
    >>> from gates.model import get_gated_model
    >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    >>> gated = get_gated_model(BertForSequenceClassification(BertConfig(vocab_size=50, **size)))
    >>> examples = [{"input_ids": torch.randint(50, (7,)), "labels": label % 2} for label in range(16)]
    >>> more = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    >>> arguments = TrainingArguments("unused", max_steps=3, save_strategy="no", **more)
    >>> trainer = GatedTrainer(gated, arguments, train_dataset=examples, budget=3)
    >>> trainer.train().global_step  # doctest: +ELLIPSIS
    {'train_runtime': ...
    3
    >>> sum(gated.open_heads()["encoder"])
    3
    """

    model: Any  # the GatedModel; its base model while a checkpoint is written or read

    def __init__(
        self,
        model: GatedModel,
        *args: Any,
        budget: int | float | dict[str, int | float] | None = None,
        retrain: float = 0.4,
        price: float | None = None,
        price_ramp: float = 0.3,
        gate_learning_rate: float = 0.05,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, GatedModel):
            raise GateError(
                f"the model is a {type(model).__name__}; expected a GatedModel, as get_gated_model(model) returns it"
            )
        if budget is not None:
            model.set_budget_(budget)
        held = model.steering is not None and model.steering.holds
        if held and price is not None:
            raise GateError(
                f"a price of {price} and a budget of {model.gate_config.budget} are given, and each would decide how many "
                "heads stay; leave out one"
            )
        price = price if price is not None else 0.0 if held else 0.01
        for name, value, limit in (
            ("retrain", retrain, 1.0),
            ("price", price, math.inf),
            ("price_ramp", price_ramp, 1.0),
            ("gate_learning_rate", gate_learning_rate, math.inf),
        ):
            if not 0 <= value <= limit or value == math.inf:
                raise GateError(f"{name} is {value}; expected a number from 0" + (" to 1" if limit == 1 else ""))
        # Trainer looks at the class it is given for labels, columns and the kind of loss: show it the base model's.
        super().__init__(model.base_model, *args, **kwargs)
        self._set_signature_columns_if_needed()
        if self.args.n_gpu > 1 or self.is_deepspeed_enabled:
            raise GateError(
                "gates do not follow a model into DataParallel or DeepSpeed; use one device, or one process for each (torchrun "
                "or accelerate launch), with FSDP2 where the model is to be sharded"
            )
        if self.is_fsdp_enabled:
            leave_gates_whole_(self.accelerator.state.fsdp_plugin, model.gates)
        if not hasattr(model.base_model, "accepts_loss_kwargs") and CLASSIFIER.search(type(model.base_model).__name__):
            self.model_accepts_loss_kwargs = False
        if self.label_smoother is not None and type(model.base_model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            self.label_smoother = partial(self.label_smoother, shift_labels=True)  # type: ignore[assignment]
        self.price = price
        self.price_ramp = price_ramp
        self.gate_learning_rate = gate_learning_rate
        # FSDP brings the model to its device when training begins, and leaves out the gates.
        model.gates.to(self.args.device if self.is_fsdp_enabled else model.base_model.device)
        self.model = self.model_wrapped = self.callback_handler.model = model
        self.add_callback(GateCallback(retrain))
        if self.is_fsdp_enabled:
            self.add_callback(ReplicatedGates())
        elif self.args.world_size > 1:  # Trainer seeds all processes alike
            self.add_callback(SeededNoise())

    @property
    def gate_price(self) -> float:
        """The price at this step of its ramp."""
        steps = self.price_ramp * self.state.max_steps
        return self.price * min(1.0, (self.state.global_step + 1) / max(1.0, steps))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Trainer's optimiser, with a group for the gates."""
        if self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        optimizer = super().create_optimizer(*args, **kwargs)
        log_alpha = self.model.gates.log_alpha
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter is not log_alpha]
        optimizer.add_param_group({"params": [log_alpha], "lr": self.gate_learning_rate, "weight_decay": 0.0})
        return optimizer

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The task's loss, and in training the price of the open gates."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training and self.price and self.model.gates.mode == "stochastic":
            loss = loss + self.model.penalty(self.gate_price) / self._shares(num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _shares(self, num_items_in_batch: Tensor | int | None) -> int:
        """Over how many micro-batches the penalty is spread here: over none, where Trainer will divide the whole loss."""
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:  # as in Trainer.training_step
            is_scaled = self.compute_loss_func is not None or (
                self.model_accepts_loss_kwargs and num_items_in_batch is not None
            )
        return self.current_gradient_accumulation_steps if is_scaled else 1

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's evaluation, which under FSDP needs the model that training has sharded."""
        if self.is_fsdp_enabled and self.optimizer is None:
            raise GateError(
                "FSDP shards a model together with its optimiser, and there is none before training; call train() first (with "
                "eval_on_start=True for values of the untrained model), or evaluate without FSDP"
            )
        return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's log; beside a training loss also the open heads and, while gates are learned, the present price."""
        if "loss" in logs:
            logs["open_heads"] = sum(map(sum, self.model.open_heads().values()))
            logs |= self._prices() if self.model.gates.mode == "stochastic" else {}
        super().log(logs, *args, **kwargs)

    def _prices(self) -> dict[str, float]:
        """What an expected open gate costs now: the price that is given, or solved for at the last step, of each kind if the
        budget is one of kinds."""
        if self.price:
            return {"gate_price": self.gate_price}
        steering = self.model.steering
        if steering is None or not steering.holds:
            return {}
        kinds = steering.schedule.kinds
        names = [f"gate_price/{kind}" for kind in kinds] or ["gate_price"]
        return dict(zip(names, steering.price, strict=True))

    # -- checkpoints -------------------------------------------------------------------------------------------

    @contextmanager
    def _with_base_model(self) -> Iterator[None]:
        """Show Trainer the base model for a while, which it knows how to save and load."""
        gated, self.model = self.model, self.model.base_model
        try:
            yield
        finally:
            self.model = gated

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the base model, as its own class would save it, and the gates beside it."""
        if self.args.should_save:
            self.model.save_pretrained(output_dir or self.args.output_dir)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with self._with_base_model():
            super()._save(output_dir, None if state_dict is None else base_weights(state_dict))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        self.model.load_gates_(resume_from_checkpoint)
        with self._with_base_model():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """The best checkpoint, unless it is from before the budget was reached: then the last weights stay."""
        best, last = self.state.best_model_checkpoint, copy.deepcopy(self.model.gates.state_dict())
        self.model.load_gates_(best)
        if self.model.steering is not None and self.model.gates.mode != "masked":
            self.model.gates.load_state_dict(last)
            warnings.warn(
                f"the best checkpoint, {best!r}, is from before the budget of {self.model.gate_config.budget} was reached, so "
                "the last weights are kept; evaluate and save within the last steps (retrain=...)",
                stacklevel=2,
            )
            return
        # FSDP's own file, which is read here, holds the gated model.
        with nullcontext() if self.is_fsdp_enabled else self._with_base_model():
            super()._load_best_model()
