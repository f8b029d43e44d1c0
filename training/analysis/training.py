"""When heads become unequal: scores and pruning curves after every epoch of fine-tuning (Michel et al. 2019, section 6)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytorch_lightning as pl
import torch
from scipy import stats

from gates.errors import GateError
from gates.scores.importance import normalise_by_layer
from training.analysis.heads import prune_counts
from training.analysis.model import ONE_DEVICE, DenseModel, Finding, gate_columns, outcomes
from training.analysis.plots import quality_through_training
from training.pruner.module import HeadPruner
from training.scoring.passes import importance_and_entropy
from training.scoring.subject import Subject, at_rest
from training.setup import make_pruner, make_trainer


class EveryEpoch(pl.Callback):
    """After every epoch of fine-tuning, and where it ends: HIS and entropy of all heads on training data, and the metric of
    a classifier or else the loss on the test split with more and more heads pruned in the order of HIS. Training stops where
    fine-tuning ends, and goes on between as if nobody had looked.

    Args:
        dense: the run; its pruner is the one in training.
    """

    def __init__(self, dense: DenseModel) -> None:
        self.dense = dense
        self.per_epoch = len(dense.data.batches_of_run(epochs=1, first=0, rank=0, world=1))
        self.curves: list[pd.DataFrame] = []
        self.scores: list[pd.DataFrame] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, HeadPruner)
        trainer.fit_loop.epoch_loop.max_steps = max(1, pl_module.boundaries[0])  # Lightning has no limit of no steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, HeadPruner)
        batches = args[2] + 1
        ends = trainer.global_step == pl_module.boundaries[0] and batches % trainer.accumulate_grad_batches == 0
        if batches % self.per_epoch == 0 or ends:
            with at_rest(pl_module):
                self._record(trainer, batches / self.per_epoch)

    def _record(self, trainer: pl.Trainer, epoch: float) -> None:
        dense = self.dense
        gates, step = dense.gates, trainer.global_step
        importance, entropy = importance_and_entropy(Subject(dense.pruner, dense.data, trainer))
        ranking = normalise_by_layer(importance.his, gates.layer_index().cpu())
        named = {"his": importance.his.numpy(), "his_by_layer": ranking.numpy(), "entropy": entropy.numpy()}
        self.scores.append(pd.DataFrame({"epoch": epoch, "step": step, **gate_columns(gates), **named}))
        order, counts = torch.sort(ranking, stable=True).indices, prune_counts(gates.size)
        masks = torch.ones(len(counts), gates.size)
        for mask, pruned in zip(masks, counts, strict=True):
            mask[order[:pruned]] = 0.0
        found = outcomes(dense, masks, "test")
        columns = {"pruned": counts, "left": [gates.size - pruned for pruned in counts], "metric": found.values}
        losses = found.losses.mean(axis=1)
        relative = found.values / found.values[0] if found.values[0] > 0 else float("nan")
        self.curves.append(pd.DataFrame({"epoch": epoch, "step": step, **columns, "loss": losses, "relative": relative}))


def through_training(dense: DenseModel) -> Finding:
    """Fine-tuning once more, from the run's configuration and seed, looked at after every epoch.

    Raises:
        GateError: if the run has no finetune phase.
    """
    if dense.setup.model.finetune == 0:
        raise GateError(
            "the run has no finetune phase to look at (--model.finetune is 0); give a run that fine-tunes its model"
        )
    again = replace(dense, pruner=make_pruner(dense.setup, dense.data))
    recorder = EveryEpoch(again)
    trainer = make_trainer(dense.setup, recorder, limit_val_batches=0, **ONE_DEVICE)
    again.pruner.train()
    trainer.fit(again.pruner, dense.data)
    dense.data.trainer = None
    if not recorder.curves:
        raise GateError("the run's fine-tuning is shorter than one step; give a run that fine-tunes its model")
    table, scores = pd.concat(recorder.curves, ignore_index=True), pd.concat(recorder.scores, ignore_index=True)
    trained, kept = again.pruner.backbone.state_dict(), dense.pruner.backbone.state_dict()
    same = all(torch.equal(kept[name].cpu(), tensor.cpu()) for name, tensor in trained.items())
    epochs = _by_epoch(table, scores)
    first, last, measure = epochs[0], epochs[-1], dense.measure
    sentences = [
        f"With half of the {dense.gates.unit}s pruned in the order of HIS, test {measure.name} is "
        + " and ".join(
            f"{measure.told(row['half_pruned'])} (with all {measure.told(row['dense'])}) after epoch {row['epoch']:g}"
            for row in ([first] if first is last else [first, last])
        )
        + ".",
        "The retrained model is the run's to the last bit."
        if same
        else "The retrained model is not the run's to the last bit, as happens on another machine or number of devices.",
    ]
    if first is not last and first["his_spearman_with_last"] is not None:
        correlation = first["his_spearman_with_last"]
        sentences.insert(
            1, f"HIS after epoch {first['epoch']:g} has a rank correlation of {correlation:.2f} with the last one."
        )
    tables = {"through_training": table, "through_training_scores": scores}
    figures = {"through_training": quality_through_training(table, measure=measure)}
    return Finding(tables, figures, sentences, {"epochs": epochs, "same_weights": same})


def _by_epoch(table: pd.DataFrame, scores: pd.DataFrame) -> list[dict[str, Any]]:
    """For each epoch the metric with all heads and with half of them, and Spearman's correlation of its HIS (normalised by
    layer) with the last one's; None if one is constant."""
    ranking = {epoch: rows["his_by_layer"].to_numpy() for epoch, rows in scores.groupby("epoch", sort=False)}
    last = list(ranking.values())[-1]
    found: list[dict[str, Any]] = []
    for epoch, curve in table.groupby("epoch", sort=False):
        heads = int(curve["left"].max())
        at_half = curve.iloc[int((curve["pruned"] - heads / 2).abs().to_numpy().argmin())]
        constant = len(set(ranking[epoch])) < 2 or len(set(last)) < 2
        found.append(
            {
                "epoch": epoch,
                "dense": float(curve["metric"].iloc[0]),
                "half_pruned": float(at_half["metric"]),
                "his_spearman_with_last": None if constant else float(stats.spearmanr(ranking[epoch], last).statistic),
            }
        )
    return found
