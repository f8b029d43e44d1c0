"""Gates in Hugging Face's Trainer: a budget or a price, a learning rate of their own, checkpoints that keep them.

Trainer needs the package ``accelerate``.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gates.errors import GateError
from gates.gating.distributed import ReplicatedGates, SeededNoise, base_weights, leave_gates_whole_
from gates.model import GatedModel


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
        if model.steering is not None and not model.steering.is_enforced:
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
    alone. ``max_grad_norm`` clips the gradients of the weights and leaves out those of the gates. Checkpoints hold the base
    model, as its own class would save it, and the gates beside it; training resumes from them. The log has ``open_heads`` and
    ``gate_price``, the price that is given or that holds the gates to the budget.

    For another trainer: ``class GatedSeq2SeqTrainer(GatedTrainer, Seq2SeqTrainer): pass``.

    Args:
        model: gated model; None with ``model_init``.
        model_init: function that returns a new gated model for each training, in place of ``model``.
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
        model: GatedModel | None = None,
        *args: Any,
        model_init: Callable[..., GatedModel] | None = None,
        budget: int | float | dict[str, int | float] | None = None,
        retrain: float = 0.4,
        price: float | None = None,
        price_ramp: float = 0.3,
        gate_learning_rate: float = 0.05,
        **kwargs: Any,
    ) -> None:
        for name, value, limit in (
            ("retrain", retrain, 1.0),
            ("price", 0.0 if price is None else price, math.inf),
            ("price_ramp", price_ramp, 1.0),
            ("gate_learning_rate", gate_learning_rate, math.inf),
        ):
            if not 0 <= value <= limit or value == math.inf:
                raise GateError(f"{name} is {value}; expected a number from 0" + (" to 1" if limit == 1 else ""))
        self._budget, self._given_price = budget, price
        self.price_ramp = price_ramp
        self.gate_learning_rate = gate_learning_rate
        if model is not None:
            self._check(model)
        self._built: GatedModel | None = model
        # Trainer looks at the class it is given for labels, columns and the kind of loss: show it the base model's.
        kwargs["model_init"] = model_init
        super().__init__(None if model is None else model.base_model, *args, **kwargs)
        assert self._built is not None
        model, self._built = self._built, None
        self._set_signature_columns_if_needed()
        if self.args.n_gpu > 1 or self.is_deepspeed_enabled:
            raise GateError(
                "gates do not follow a model into DataParallel or DeepSpeed; use one device, or one process for each (torchrun "
                "or accelerate launch), with FSDP2 where the model is to be sharded"
            )
        if self.label_smoother is not None and type(model.base_model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            self.label_smoother = partial(self.label_smoother, shift_labels=True)  # type: ignore[assignment]
        self._place_(model)
        self._scaling_is_known = self._scaling_is_stated = getattr(self, "loss_is_scaled_for_ga", None) is not None
        self.model = self.model_wrapped = self.callback_handler.model = model
        self.add_callback(GateCallback(retrain))
        if self.is_fsdp_enabled:
            self.add_callback(ReplicatedGates())
        elif self.args.world_size > 1:  # Trainer seeds all processes alike
            self.add_callback(SeededNoise())

    def _check(self, model: object) -> None:
        """Give a model the budget, and set the price; raise :class:`GateError` where they do not fit."""
        if not isinstance(model, GatedModel):
            raise GateError(
                f"the model is a {type(model).__name__}; expected a GatedModel, as get_gated_model(model) returns it"
            )
        if self._budget is not None:
            model.set_budget_(self._budget)
        held = model.steering is not None and model.steering.is_enforced
        if held and self._given_price is not None:
            raise GateError(
                f"a price of {self._given_price} and a budget of {model.gate_config.budget} are given, and each would decide "
                "how many heads stay; leave out one"
            )
        self.price = self._given_price if self._given_price is not None else 0.0 if held else 0.01

    def _place_(self, model: GatedModel) -> None:
        """Bring gates to the device. FSDP brings the model there when training begins, and leaves out the gates."""
        if self.is_fsdp_enabled:
            leave_gates_whole_(self.accelerator.state.fsdp_plugin, model.gates)
        model.gates.to(self.args.device if self.is_fsdp_enabled else next(model.base_model.parameters()).device)

    def call_model_init(self, trial: Any = None) -> Any:
        """The gated model that ``model_init`` returns, with the budget; its base model while this trainer is built."""
        model: Any = super().call_model_init(trial)
        self._check(model)
        if hasattr(self, "_built") and not hasattr(self, "callback_handler"):
            self._built = model
            return model.base_model
        self._place_(model)
        self._scaling_is_known = self._scaling_is_stated
        return model

    def hyperparameter_search(self, hp_space: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's search. ``hp_space`` names arguments of training; ``model_init(trial)`` chooses those of the gates.

        Raises:
            GateError: for a space that names an argument of this class, which the search would not set.
        """

        def checked(trial: Any) -> Any:
            space = hp_space(trial)
            if own := sorted({"budget", "retrain", "price", "price_ramp", "gate_learning_rate"}.intersection(space)):
                raise GateError(
                    f"the search space names {own[0]!r}, which is no field of TrainingArguments; choose a budget in "
                    "model_init(trial) by GateConfig(budget=...), and make one trainer for each value of the others"
                )
            return space

        return super().hyperparameter_search(None if hp_space is None else checked, *args, **kwargs)

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

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Trainer's step for one micro-batch, and the gradient of the price of the open gates.

        The price has a backward pass of its own, so that it weighs the same whatever computes and scales the task's loss.
        """
        if num_items_in_batch is not None and not self._scaling_is_known:
            self._find_scaling(model, inputs, num_items_in_batch)
        items = None if getattr(self, "loss_is_scaled_for_ga", None) is False else num_items_in_batch
        loss = super().training_step(model, inputs, items)
        if self.price and self.model.gates.mode == "stochastic":
            penalty = self.model.penalty(self.gate_price) / self.current_gradient_accumulation_steps
            if penalty.requires_grad:  # a constant in the top-k families
                self.accelerator.backward(penalty)
            loss = loss + penalty.detach()
        return loss

    def _find_scaling(self, model: torch.nn.Module, inputs: dict[str, Any], items: Tensor | int) -> None:
        """Find out by two evaluations whether the loss is divided by the number of items, as Trainer takes for granted.

        Many models take ``num_items_in_batch`` and ignore it (Transformers issue 47688): classifiers, T5, BART. Trainer would
        then add up the means of accumulated batches and of processes, and the price would weigh less than it says.
        """
        if self.args.gradient_accumulation_steps == 1 and self.args.world_size == 1:
            return
        model.eval()
        device, losses = self.args.device, []
        for count in (items, 16 * items):
            noise = torch.random.fork_rng([device] if device.type == "cuda" else [])
            with torch.no_grad(), noise, self.compute_loss_context_manager():
                prepared = self._prepare_inputs(dict(inputs))
                loss: Any = self.compute_loss(model, prepared, num_items_in_batch=count)
                losses.append(float(loss))
        if not (math.isfinite(losses[0]) and losses[0]):  # a batch without labels says nothing
            return
        self._scaling_is_known = True
        is_scaled = not math.isclose(*losses, rel_tol=1e-4)
        if not hasattr(Trainer, "loss_is_scaled_for_ga") and self.compute_loss_func is not None and not is_scaled:
            raise GateError(
                "compute_loss_func ignores num_items_in_batch, so accumulated batches would count several times; divide by "
                "it, or use a newer version of Transformers"
            )
        if not is_scaled:
            self.model_accepts_loss_kwargs = False
        self.loss_is_scaled_for_ga = is_scaled

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's accelerator, which leaves the gradients of the gates out when it clips: they have another scale."""
        super().create_accelerator_and_postprocess()
        clip = self.accelerator.clip_grad_norm_

        def clip_weights(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            log_alpha = getattr(getattr(self.model, "gates", None), "log_alpha", None)
            return clip([parameter for parameter in parameters if parameter is not log_alpha], *args, **kwargs)

        self.accelerator.clip_grad_norm_ = clip_weights

    def _mixed_mesh_grad_norm(self, model: torch.nn.Module, max_norm: float) -> Any:
        return super()._mixed_mesh_grad_norm(self.model.base_model, max_norm)

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
        if steering is None or not steering.is_enforced:
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
