"""What an experiment's result depends on: its identity, by which it is found again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from training.config import PrunerOptions, Setup
from training.config.trainer import TrainerOptions
from training.data.base import TaskData
from training.pruner.module import HeadPruner
from training.runs.fingerprint import file_fingerprint, weights_fingerprint
from training.runs.own_code import code_fingerprint
from training.runs.resuming import FORMAT, OPTIONS

ELSEWHERE = {
    "backbone", "from_scratch", "trust_remote_code", "allow_pickle", "dtype", "latency_table", "swaps", "refit",
    "checkpoint_activations",
}  # fmt: skip
"""Options of the module that act through the model, which is in every identity, or through the budget, which has the table of
times itself, or that a comparison does not use: swaps and refits are a method's ``+swap`` and ``+refit`` there; or that change
no result."""
OF_DENSE = ("finetune", "learning_rate", "lr_warm_up", "lr_decay", "weight_decay", "freeze", "unit")
"""Options that the dense model depends on; what comes after fine-tuning is nothing to it."""
AFTER_FINETUNING = ("prune_learning_rate", "freeze_while_pruning", "distil", "distil_temperature", "distil_hidden")
"""Options that training with a fixed mask depends on, beside where it starts and its length."""
NUMERICS = (
    "accelerator", "precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "limit_train_batches", "limit_val_batches", "limit_test_batches",
)  # fmt: skip
"""Trainer settings that change results."""


def identity_of_dense(setup: Setup, pruner: HeadPruner, data: TaskData, *, processes: int) -> dict[str, Any]:
    """Of the dense model at the end of fine-tuning, as JSON.

    Args:
        setup: of the run.
        pruner: built, with its first weights.
        data: built.
        processes: that train together; each has batches of its own.
    """
    options, weights = setup.model, setup.weights
    trainer: dict[str, Any] = {name: getattr(setup.trainer, name) for name in NUMERICS}
    trainer |= {"average_last": weights.average_last, "average_every": weights.average_every}
    return {
        "format": FORMAT,
        "experiment": "dense",
        "seed": setup.run.seed,
        "weights": weights_fingerprint(pruner.backbone),
        "model": behaviour_of(pruner.backbone),
        "data": data.fingerprint(),
        "trainer": trainer,
        # Batches of evaluation change no result, but where they are limited they say which examples are evaluated.
        **({"eval_batch_size": data.options.eval_batch_size} if limits_evaluation(setup.trainer) else {}),
        **({"processes": processes} if processes > 1 else {}),
        **({"patience": weights.patience} if weights.patience is not None else {}),
        # A run that goes on from another one's checkpoint has its history, which nothing else here tells.
        **({"continues": file_fingerprint(Path(setup.run.ckpt_path))} if setup.run.ckpt_path is not None else {}),
        **own_code_of(data),
        **{name: getattr(options, name) for name in OF_DENSE},
    }


def began_with(setup: Setup, dense: Mapping[str, Any]) -> dict[str, Any]:
    """All that a run's training depends on, as JSON: what its dense model does, and the options of the module."""
    elsewhere = ELSEWHERE - {"swaps", "refit"}  # which a run does itself
    return {**dense, OPTIONS: {name: value for name, value in asdict(setup.model).items() if name not in elsewhere}}


def own_code_of(data: TaskData) -> dict[str, str]:
    """The code of data and task where it is a user's own; what comes with this project is told apart by :data:`FORMAT`."""
    modules = [type(part).__module__ for part in (data, data.task)]
    own = [name for name in modules if name.split(".")[0] != "training"]
    return {"code": code_fingerprint(own)} if own else {}


def options_of_gates(options: PrunerOptions) -> dict[str, Any]:
    """The options that learned gates depend on, beside the dense model."""
    return {name: value for name, value in asdict(options).items() if name not in ELSEWHERE}


def options_after_finetuning(options: PrunerOptions, *, averages: bool) -> dict[str, Any]:
    """The options that training with a fixed mask depends on, beside where it starts: its length among them, of which the dense
    model knows nothing, whether the learning rate waits for gates, and where weights are averaged, which is over the retrain
    phase alone, how it is divided."""
    after = {name: getattr(options, name) for name in AFTER_FINETUNING} | {"epochs": round(options.prune + options.retrain, 6)}
    after["pipelined"] = bool(options.pipelined)
    return after | ({"prune": round(options.prune, 6), "retrain": round(options.retrain, 6)} if averages else {})


def limits_evaluation(trainer: TrainerOptions) -> bool:
    """Whether only some batches of the selection or test split are evaluated."""
    return any(getattr(trainer, name) not in (None, 1.0) for name in ("limit_val_batches", "limit_test_batches"))


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
    generates = getattr(model, "generation_config", None)  # a classifier has none
    if model.config.is_encoder_decoder and generates is not None:
        generation = generates.to_diff_dict()
        behaviour["generation"] = {name: value for name, value in generation.items() if name not in names}
    return behaviour
