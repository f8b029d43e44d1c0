"""Train gates with Hugging Face's Trainer, which needs the package ``accelerate``."""

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
    """Hold the gates to their budget after every optimiser step, and fix the mask at the end of pruning.

    Args:
        retrain: The share of all steps, at the end, with a fixed mask.
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
    """Train a :class:`gates.model.GatedModel` to exactly the budgeted heads; also a mixin for other trainers.

    With a budget, the number of open gates falls to it, the mask is fixed, and the remaining steps train the weights. With a
    price, the training loss includes the price of the expected open gates, and the evaluation loss does not. ``max_grad_norm``
    does not apply to gates. A checkpoint has the base model and the gates, and training can resume from it. The log has
    ``open_heads`` and ``gate_price``.

    For another trainer: ``class GatedSeq2SeqTrainer(GatedTrainer, Seq2SeqTrainer): pass``.

    Args:
        model: The gated model; None with ``model_init``.
        args: The other arguments of :class:`transformers.Trainer`, by position or name.
        model_init: A function that returns a new gated model for each training.
        budget: The number of heads to keep: a count, a fraction or one of these per kind. Default: that of the model's
            ``GateConfig``.
        retrain: The share of all steps, at the end, with a fixed mask. It applies with a budget.
        price: The price of one expected open gate without a budget (default: 0.01); see
            :meth:`gates.model.GatedModel.penalty`.
        price_ramp: The share of all steps in which the price rises linearly from 0.
        gate_learning_rate: The learning rate of ``log_alpha``, which follows the schedule of the model's learning rate. Given
            ``optimizers`` ignore it; make them of :meth:`gates.model.GatedModel.parameter_groups`.

    Raises:
        GateError: If the model is not gated, a number is out of range, or a budget and a price are given. Also for
            ``DataParallel``, DeepSpeed and FSDP1. Distributed data parallel training and FSDP2 work.

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
        # Trainer derives labels, columns and the kind of loss from the class of its model, so it gets the base model here.
        kwargs["model_init"] = model_init
        super().__init__(None if model is None else model.base_model, *args, **kwargs)
        assert self._built is not None
        model, self._built = self._built, None
        self._set_signature_columns_if_needed()
        if self.args.n_gpu > 1 or self.is_deepspeed_enabled:
            raise GateError(
                "gates do not work with DataParallel or DeepSpeed; use one device, or one process per device (torchrun or "
                "accelerate launch), with FSDP2 to shard the model"
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
        """Give a model the budget, and set the price; raise :class:`GateError` if they do not fit."""
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
                "the number of heads; remove one"
            )
        self.price = self._given_price if self._given_price is not None else 0.0 if held else 0.01

    def _place_(self, model: GatedModel) -> None:
        """Move gates to the device, because FSDP moves the model when training begins, but not the gates."""
        if self.is_fsdp_enabled:
            leave_gates_whole_(self.accelerator.state.fsdp_plugin, model.gates)
        model.gates.to(self.args.device if self.is_fsdp_enabled else next(model.base_model.parameters()).device)

    def call_model_init(self, trial: Any = None) -> Any:
        """Return the gated model of ``model_init`` with the budget; its base model while this trainer is built."""
        model: Any = super().call_model_init(trial)
        self._check(model)
        if hasattr(self, "_built") and not hasattr(self, "callback_handler"):
            self._built = model
            return model.base_model
        self._place_(model)
        self._scaling_is_known = self._scaling_is_stated
        return model

    def hyperparameter_search(self, hp_space: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's search with ``TrainingArguments`` in ``hp_space`` and gates that ``model_init(trial)`` configures.

        Raises:
            GateError: For a space with an argument of this class, which the search would not set.
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
        """Return the price at this step of its ramp."""
        steps = self.price_ramp * self.state.max_steps
        return self.price * min(1.0, (self.state.global_step + 1) / max(1.0, steps))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create Trainer's optimiser with a group for the gates."""
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
        """Run Trainer's step for one micro-batch, and add the gradient of the price of the open gates.

        The price has a separate backward pass, so its weight does not depend on the scale of the task's loss.
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
        """Check by two evaluations that the loss is divided by the number of items, as Trainer assumes.

        Many models accept ``num_items_in_batch`` and ignore it (Transformers issue 47688): classifiers, T5, BART. Trainer would
        then sum the means of accumulated batches and of processes, and the price would have too little weight.
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
        if not (math.isfinite(losses[0]) and losses[0]):  # a batch without labels shows nothing
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
        """Create Trainer's accelerator, and exclude the gradients of the gates from clipping, because their scale differs."""
        super().create_accelerator_and_postprocess()
        clip = self.accelerator.clip_grad_norm_

        def clip_weights(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            log_alpha = getattr(getattr(self.model, "gates", None), "log_alpha", None)
            return clip([parameter for parameter in parameters if parameter is not log_alpha], *args, **kwargs)

        self.accelerator.clip_grad_norm_ = clip_weights

    def _mixed_mesh_grad_norm(self, model: torch.nn.Module, max_norm: float) -> Any:
        return super()._mixed_mesh_grad_norm(self.model.base_model, max_norm)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's evaluation, which under FSDP needs the model that training has sharded."""
        if self.is_fsdp_enabled and self.optimizer is None:
            raise GateError(
                "FSDP shards a model together with its optimiser, and there is none before training; call train() first (with "
                "eval_on_start=True for values of the untrained model), or evaluate without FSDP"
            )
        return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the open heads and, while gates are learned, the price to Trainer's log of a training loss."""
        if "loss" in logs:
            logs["open_heads"] = sum(map(sum, self.model.open_heads().values()))
            logs |= self._prices() if self.model.gates.mode == "stochastic" else {}
        super().log(logs, *args, **kwargs)

    def _prices(self) -> dict[str, float]:
        """Return the present price of an open gate, given or solved for at the last step; for a budget per kind, each price."""
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
        """Show Trainer the base model, which it can save and load."""
        gated, self.model = self.model, self.model.base_model
        try:
            yield
        finally:
            self.model = gated

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the base model as its own class does, and the gates."""
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
        """Load the best checkpoint, or keep the last weights if it is from before the budget was reached."""
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
        # The file that FSDP reads here has the weights of the gated model.
        with nullcontext() if self.is_fsdp_enabled else self._with_base_model():
            super()._load_best_model()
