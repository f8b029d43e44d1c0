"""Michel, Levy and Neubig's (2019) experiments on a trained model: remove one head, all but one, or more and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import move_data_to_device
from scipy import stats
from torch import Tensor

from gates.attention.sites import KINDS
from gates.errors import GateError
from gates.scores.ablation import leave_one_out_masks
from gates.scores.importance import normalise_by_layer, removal_ranking
from gates.search.causal_gating import ROLES, CausalRoles, causal_roles
from training.analysis.model import (
    LOSS,
    ONE_DEVICE,
    AnalysisResult,
    LoadedRun,
    Measure,
    gate_columns,
    head_importance,
    outcomes,
)
from training.analysis.plots import causal_map, effect_map, quality_by_kind, quality_through_training, scatter
from training.comparison.estimate import Speed, score_seconds
from training.data.base import TaskData
from training.pruner.module import HeadPruner
from training.runs import progress
from training.scoring.passes import importance_and_entropy
from training.scoring.scorers import Scores
from training.scoring.subject import at_rest
from training.setup import make_pruner, make_trainer
from training.stats.significance import SIGNIFICANCE, holm

POINT = 0.01
"""Of the metric: a change for the worse that is called small; of the loss, 1 % of a language model's perplexity."""
STEPS = 10
"""In which heads are pruned: about 10 % each, as in the paper."""


def ablate_each(dense: LoadedRun) -> AnalysisResult:
    """Remove each head alone (section 3.2): the change on the test split, and whether it is more than chance.

    ``p`` is McNemar's exact test for accuracy, and the paired bootstrap over examples for other metrics of classifiers. Every
    other task has the paired t test of the loss. ``p_holm`` is corrected for the number of heads.
    """
    found = outcomes(dense, leave_one_out_masks(dense.gates.size), "test")
    table = gate_columns(dense.gates).assign(**_changes(found.values, found.losses))
    table = table.assign(**_tests(found.against_first()))
    significant, measure = table["p_holm"] < SIGNIFICANCE, found.measure
    gain = measure.sign * table["change"]
    harmful, helpful = significant & (gain < 0), significant & (gain > 0)
    unit, total = dense.gates.unit, len(table)
    base, worst = float(found.values[0]), table.iloc[int(gain.to_numpy().argmin())]
    sentences = [
        f"With all {unit}s of this one model test {measure.name} is {measure.text(base)}; removing one alone {measure.worsens} "
        f"it significantly for {int(harmful.sum())} of {total} {unit}s and {measure.improves} it for {int(helpful.sum())}.",
        f"Significant is p < {SIGNIFICANCE:g} over test examples, after Holm's correction for {total} {unit}s.",
        f"{_largest_loss(measure, worst['change'], _name(worst))} Without correction {int((table['p'] < SIGNIFICANCE).sum())} "
        f"{unit}s would have seemed significant.",
    ]
    numbers = {
        "dense": base,
        "gates": total,
        "significantly_worse": int(harmful.sum()),
        "significantly_better": int(helpful.sum()),
        "largest_loss": float(worst["change"]),
    }
    change, stars = (torch.tensor(column.tolist()) for column in (table["change"], significant))
    figure = effect_map(dense.gates.sites, dense.gates.to_heads(change), dense.gates.to_heads(stars), measure=measure)
    return AnalysisResult({"ablate": table}, {"ablate": figure}, sentences, numbers)


def one_per_layer(dense: LoadedRun) -> AnalysisResult:
    """Reduce one layer at a time to its single best head (section 3.3), with all others whole.

    The best head is the one that, left alone in its layer, gives the best metric on the *selection* split (of equals the lowest
    loss). Its cost is then measured on the test split.
    """
    gates, columns = dense.gates, gate_columns(dense.gates)
    layers = gates.layer_index().cpu()
    alone = torch.where(layers.unsqueeze(0) == layers.unsqueeze(1), torch.eye(gates.size), torch.ones(gates.size, gates.size))
    selected = outcomes(dense, alone, "select")
    measure = selected.measure
    columns = columns.assign(index=layers.numpy(), select=selected.values, select_loss=selected.losses.mean(axis=1))
    ordered = columns.sort_values(["select", "select_loss"], ascending=[measure.sign < 0, True], kind="stable")
    best = ordered.groupby("index").head(1).sort_values("gate").drop(columns="index").reset_index(drop=True)
    found = outcomes(dense, torch.cat([torch.ones(1, gates.size), alone[best["gate"].tolist()]]), "test")
    best = best.rename(columns={"head": "best_head", "select": f"select_{measure.name}"})
    best = best.loc[:, ~best.columns.duplicated()]  # where the metric is the loss
    table = best.assign(gates=gates.sizes, **_changes(found.values, found.losses)).assign(**_tests(found.against_first()))
    gain = measure.sign * table["change"]
    worse = (table["p_holm"] < SIGNIFICANCE) & (gain < 0)
    base, worst = float(found.values[0]), table.iloc[int(gain.to_numpy().argmin())]
    sentences = [
        f"In this one model, reduced to its single best {gates.unit} (chosen on the selection split), "
        f"{len(table) - int(worse.sum())} of {len(table)} layers lose nothing significant in test {measure.name}; the others "
        f"are {', '.join(table.loc[worse, 'site']) if worse.any() else 'none'}.",
        _largest_loss(measure, worst["change"], worst["site"]),
    ]
    numbers = {
        "dense": base,
        "layers": len(table),
        "significantly_worse": int(worse.sum()),
        "largest_loss": float(worst["change"]),
    }
    return AnalysisResult({"one_per_layer": table}, {}, sentences, numbers)


def by_kind(dense: LoadedRun) -> AnalysisResult:
    """Measure quality against budget when heads of one kind alone are pruned (section 5), or of all kinds together.

    ``one-shot``: in the order of HIS, normalised by layer, of the dense model; ``iterative``: about 10 % at a time, with HIS
    estimated again before each step (section 4). Scores are from training data, quality from the test split.
    """
    gates = dense.gates
    present, kinds, everything = list(gates.kind_sizes()), gates.kind_index().cpu(), torch.ones(gates.size, dtype=torch.bool)
    parts = {present[0]: everything}
    if len(present) > 1:
        parts = {"all": everything, **{kind: kinds == KINDS.index(kind) for kind in present}}
    layers = gates.layer_index().cpu()
    one_shot = normalise_by_layer(head_importance(dense), layers)
    rows: list[dict[str, Any]] = []
    masks = [torch.ones(1, gates.size)]
    for part, among in parts.items():
        members = among.nonzero().flatten()

        def scores_at(mask: Tensor, members: Tensor = members) -> Tensor:
            whole = torch.ones(gates.size)
            whole[members] = mask
            return normalise_by_layer(head_importance(dense, whole) * whole, layers)[members]

        rankings = {"one-shot": one_shot[members], "iterative": removal_ranking(scores_at, len(members), share=1 / STEPS)}
        for schedule, ranking in rankings.items():
            masks.append(pruned_in_order(members[ranking.argsort(stable=True)], gates.size))
            for pruned in prune_counts(len(members)):
                rows.append({"kind": part, "schedule": schedule, "pruned": pruned, "left": len(members) - pruned})
    found = outcomes(dense, torch.cat(masks), "test")
    tests = pd.DataFrame(found.against_first())[["low", "high", "p"]]
    table = pd.DataFrame(rows).assign(**_changes(found.values, found.losses), **tests)
    measure = found.measure
    limit = f"above -{100 * POINT:g} point" if measure.sign > 0 else f"below +{POINT:g}"
    sentences, numbers = [], {}
    for keys, line in table.groupby(["kind", "schedule"], sort=False):
        end = line["low"] if measure.sign > 0 else -line["high"]
        small = end.ge(-POINT).cummin()  # up to the first step that costs more
        free = int(line.loc[small, "pruned"].max())
        total, how = int(line["left"].max()), ", ".join(map(str, keys))
        numbers[how] = {"gates": total, "pruned_within_a_point": free}
        sentences.append(
            f"{how}: {free} of {total} {gates.unit}s ({free / total:.0%}) can go while the 95 % interval of the change in test "
            f"{measure.name} stays {limit}."
        )
    return AnalysisResult({"by_kind": table}, {"by_kind": quality_by_kind(table, measure=measure)}, sentences, numbers)


def seconds_of(name: str, dense: LoadedRun, speed: Speed) -> float:
    """Return the expected seconds of one of the three experiments above. A mask costs half a pass (see :func:`outcomes`)."""
    data, size, kinds = dense.data, dense.gates.size, len(dense.gates.kind_sizes())
    select, test = (speed.single * len(loader) for loader in (data.val_dataloader(), data.test_dataloader()))
    parts = kinds + (kinds > 1)
    return {
        "ablate": size / 2 * test,
        "one-per-layer": size / 2 * select + len(dense.gates.sizes) / 2 * test,
        "by-kind": (1 + parts * STEPS) * score_seconds(speed, data) + 2 * parts * STEPS * test,
    }[name]


def prune_counts(heads: int) -> list[int]:
    """Return how many heads are pruned at each of ten equal steps, from none to all."""
    return sorted({round(step * heads / STEPS) for step in range(STEPS + 1)})


def pruned_in_order(order: Tensor, size: int) -> Tensor:
    """Return a mask ``[steps, size]`` for each of :func:`prune_counts`, which closes the first gates of an order."""
    return torch.stack([torch.ones(size).index_fill(0, order[:pruned], 0.0) for pruned in prune_counts(len(order))])


def across_domains(dense: LoadedRun, other: TaskData) -> AnalysisResult:
    """Compare which heads matter on the run's data and on other data of the same task (section 3.4).

    Both HIS and the effect on the loss of removing each head alone are of the test splits, where nothing is chosen by them.
    """
    _check_same_task(dense.data, other)
    layers, masks = dense.gates.layer_index().cpu(), leave_one_out_masks(dense.gates.size)
    columns: dict[str, Any] = {}
    values = []
    for prefix, data in (("", dense.data), ("other_", other)):
        found = outcomes(dense, masks, "test", data=data)
        changes = _changes(found.values, found.losses)
        values.append(float(found.values[0]))
        columns[f"{prefix}his"] = normalise_by_layer(head_importance(dense, split="test", data=data), layers).numpy()
        columns[f"{prefix}loss_change"], columns[f"{prefix}change"] = changes["loss_change"], changes["change"]
    table = gate_columns(dense.gates).assign(**columns)
    measure = dense.measure
    here, there = (measure.text(value) for value in values)
    sentences = [f"Test {measure.name} is {here} on the run's data and {there} on the other data."]
    numbers: dict[str, Any] = {"dense": values[0], "dense_other": values[1]}
    panels = []
    for name, title, short in (
        ("his", "HIS", "HIS, normalised by layer"),
        ("loss_change", f"the effect on the loss of removing each {dense.gates.unit}", "change of the loss without the head"),
    ):
        numbers[name] = correlation = _correlations(table[name].to_numpy(), table[f"other_{name}"].to_numpy())
        sentences.append(f"Between the two, {title} correlates {_described(correlation)}.")
        r = "" if correlation["pearson"] is None else f" (r = {correlation['pearson']:.2f})"
        panels.append((name, f"other_{name}", {"title": short + r, "xlabel": "run's data", "ylabel": "other data"}))
    return AnalysisResult({"domains": table}, {"domains": scatter(table, panels)}, sentences, numbers)


def _check_same_task(own: TaskData, other: TaskData) -> None:
    """Raise :class:`GateError` for data on which the model of a run means nothing."""
    if type(other.task) is not type(own.task):
        raise GateError(
            f"the other data are of the task {type(other.task).__name__} and the run's of {type(own.task).__name__}; give data "
            "of the same task"
        )
    classes, theirs = (getattr(data, "labels", None) for data in (own, other))
    if theirs != classes:
        raise GateError(f"the other data have the classes {theirs} and the run has {classes}; give data of the same task")
    vocabulary, read = (data.tokenizer and data.tokenizer.get_vocab() for data in (own, other))
    if read != vocabulary:
        raise GateError("the other data are read with another tokenizer than the run's; give data for the same model")


def _changes(values: np.ndarray[Any, Any], losses: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return metric, loss and their changes against the first mask, for the other masks; the loss with a standard error."""
    change = losses[1:] - losses[0]
    return {
        "metric": values[1:],
        "change": values[1:] - values[0],
        "loss": losses[1:].mean(axis=1),
        "loss_change": change.mean(axis=1),
        "loss_change_se": change.std(axis=1, ddof=1) / change.shape[1] ** 0.5,
    }


def _tests(differences: Sequence[Any]) -> dict[str, Any]:
    """Return intervals and p values, also corrected for their number."""
    p = [difference.p for difference in differences]
    return {"low": [d.low for d in differences], "high": [d.high for d in differences], "p": p, "p_holm": holm(p)}


def _correlations(values: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return Pearson with its 95 % interval (Fisher's z) and Spearman; None where a side is constant or there are too few."""
    names = ("pearson", "pearson_low", "pearson_high", "spearman")
    if len(values) < 4 or np.ptp(values) == 0 or np.ptp(other) == 0:
        return dict.fromkeys(names)
    pearson: Any = stats.pearsonr(values, other)
    low, high = pearson.confidence_interval()
    found = (pearson.statistic, low, high, stats.spearmanr(values, other).statistic)
    return dict(zip(names, map(float, found), strict=True))


def _described(found: dict[str, Any]) -> str:
    if found["pearson"] is None:
        return "not at all measurably: there are too few values, or one side is constant"
    return "at Pearson {pearson:.2f} (95 % interval {pearson_low:.2f} to {pearson_high:.2f}), Spearman {spearman:.2f}".format(
        **found
    )


def _largest_loss(measure: Measure, change: float, where: str) -> str:
    if measure.sign * change >= 0:
        return "None of them costs anything."
    if measure.sign > 0:
        return f"The largest loss is {-measure.scale * change:.1f} points, at {where}."
    return f"The loss rises most at {where}, by {change:.3f}."


def _name(row: pd.Series) -> str:
    return f"{row['site']}.{row['head']}"


# What each head does to the task of a run: two fits of its gates, with a price and with a reward (Nam et al. 2025).

PRICE = 0.01
"""The price of an open head, in units of the loss."""
GATING_STEPS, SEEDS = 100, (0, 1, 2)
"""The number of optimiser steps of each fit (three for each seed), and the seeds."""


def causal_classes(dense: LoadedRun) -> AnalysisResult:
    """Find facilitating, irrelevant and interfering heads on training data, then close all of each role on the test split."""
    roles = _roles(dense)
    found, agreement, gates = roles.roles(), roles.agreement(), dense.gates
    scores = roles.scores().mean(0)
    columns = {name: scores[:, index].numpy() for index, name in enumerate(ROLES)}
    fits = {"priced": roles.with_price.mean(0).numpy(), "rewarded": roles.with_reward.mean(0).numpy()}
    table = gate_columns(gates).assign(role=roles.names(), agreement=agreement.numpy(), **columns, **fits)
    closed = _closed(dense, found)
    unanimous = agreement == 1
    counts = [f"{int((found == index).sum())} {name}" for index, name in enumerate(ROLES)]
    sentences = [
        f"Of {gates.size} {gates.unit}s, {', '.join(counts[:-1])} and {counts[-1]}, at a price and a reward of {PRICE:g} in "
        f"units of the loss; {len(SEEDS)} seeds agree on the role of {int(unanimous.sum())}.",
        *(_causal_sentence(row, dense.measure, gates.unit) for _, row in closed.iterrows() if row["gates"]),
    ]
    numbers = {
        "roles": {name: int((found == index).sum()) for index, name in enumerate(ROLES)},
        "unanimous": int(unanimous.sum()),
        "agreement": float(agreement.mean()),
        "price": PRICE,
    }
    heads, agreed = gates.to_heads(found), gates.to_heads(agreement)
    figure = causal_map(gates.sites, heads, agreed, names=ROLES)
    return AnalysisResult({"causal": table, "causal_closed": closed}, {"causal": figure}, sentences, numbers)


def _roles(dense: LoadedRun) -> CausalRoles:
    task, backbone = dense.task, dense.backbone
    batches = [move_data_to_device(batch, dense.device) for batch in islice(dense.data.score_dataloader(), GATING_STEPS)]
    with progress.stage("fitting gates", 3 * GATING_STEPS * len(SEEDS)) as shown:
        return causal_roles(
            dense.gates,
            batches,
            lambda batch: task.losses(backbone, batch)[0],
            price=PRICE,
            steps=GATING_STEPS,
            seeds=SEEDS,
            advance=shown.advance,
        )


def _closed(dense: LoadedRun, roles: Tensor) -> pd.DataFrame:
    """Return what changes on the test split when all gates of a role are closed. Tasks without classes have only the loss."""
    masks = torch.stack([torch.ones(len(roles)), *((roles != index).float() for index in range(len(ROLES)))])
    found = outcomes(dense, masks, "test")
    differences = found.against_first()
    tests = {name: values for name, values in _tests(differences).items() if name != "p"}
    table = pd.DataFrame({"role": ROLES, "gates": [int((roles == index).sum()) for index in range(len(ROLES))]})
    if found.measure.name == LOSS:
        return table.assign(loss_change=[one.difference for one in differences], **tests)
    losses = found.losses.mean(axis=1)
    changes = {"metric": found.values[1:], "change": found.values[1:] - found.values[0]}
    return table.assign(**changes, **tests, loss_change=losses[1:] - losses[0])


def _causal_sentence(row: pd.Series, measure: Measure, unit: str) -> str:
    sure = "significantly" if row["p_holm"] < SIGNIFICANCE else "not significantly"
    change = measure.text(row["loss_change" if measure.name == LOSS else "change"], change=True)
    low, high = (measure.text(row[end], change=True).removesuffix(measure.unit) for end in ("low", "high"))
    return (
        f"With all {row['role']} {unit}s closed ({row['gates']}), test {measure.name} changes by {change} "
        f"(95 % interval {low} to {high}; {sure} after Holm's correction)."
    )


# The share of a prediction that comes through each head, with simpler scores and the agreement of their rankings.

RANKINGS = {"relevance": "relevance", "gradient_x_input": "gradient x input", "his": "HIS"}
"""Scores whose rankings are compared, by their columns."""


def relevance_of_heads(dense: LoadedRun) -> AnalysisResult:
    """Return relevance by AttnLRP's rules, gradient times input and HIS of every gate, on training data."""
    scores = Scores(dense)
    raws = ("relevance", "relevance-signed", "gradient-x-input", "gradient-x-input-signed")
    found = {raw.replace("-", "_"): scores.raw(raw).numpy() for raw in raws}
    table = gate_columns(dense.gates).assign(**found, his=scores.by_layer("his").numpy())
    pairs = list(combinations(RANKINGS, 2))
    correlations = {f"{one} and {other}": _spearman(table[one], table[other]) for one, other in pairs}
    named = [
        f"{RANKINGS[one]} and {RANKINGS[other]} " + ("not measurably" if rho is None else f"{rho:.2f}")
        for (one, other), rho in zip(pairs, correlations.values(), strict=True)
    ]
    best = table.iloc[int(table["relevance"].to_numpy().argmax())]
    unit = dense.gates.unit
    sentences = [
        f"The {unit} with the largest share of its layer's relevance to the prediction is {best['site']}.{best['head']} "
        f"({100 * best['relevance']:.0f} %); equal shares in its layer would be "
        f"{100 / len(table[table['site'] == best['site']]):.0f} %.",
        f"Rank correlations (Spearman) over all {unit}s: {', '.join(named)}.",
    ]
    others = [name for name in RANKINGS if name != "relevance"]
    words = {name: {"xlabel": RANKINGS[name], "ylabel": "relevance, share of the layer"} for name in others}
    figure = scatter(table, [(name, "relevance", words[name]) for name in others])
    return AnalysisResult({"relevance": table}, {"relevance": figure}, sentences, {"spearman": correlations})


def _spearman(one: pd.Series, other: pd.Series) -> float | None:
    """Return Spearman's correlation, None where one side is constant."""
    return None if np.ptp(one) == 0 or np.ptp(other) == 0 else float(stats.spearmanr(one, other).statistic)


# When heads become unequal: scores and pruning curves after every epoch of fine-tuning (Michel et al. 2019, section 6).


class EveryEpoch(pl.Callback):
    """Score and prune heads after every epoch of fine-tuning and at its end, without a trace in the training.

    It records HIS and entropy of all heads on training data. It also records the quality on the test split while heads are
    pruned in the order of HIS. Training stops where fine-tuning ends.
    """

    def __init__(self, dense: LoadedRun) -> None:
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
        importance, entropy = importance_and_entropy(replace(dense, trainer=trainer))
        ranking = normalise_by_layer(importance.his, gates.layer_index().cpu())
        named = {"his": importance.his.numpy(), "his_by_layer": ranking.numpy(), "entropy": entropy.numpy()}
        self.scores.append(pd.DataFrame({"epoch": epoch, "step": step, **gate_columns(gates), **named}))
        found = outcomes(dense, pruned_in_order(ranking.argsort(stable=True), gates.size), "test")
        counts, losses = np.array(prune_counts(gates.size)), found.losses.mean(axis=1)
        columns = {"pruned": counts, "left": gates.size - counts, "metric": found.values}
        relative = found.values / found.values[0] if found.values[0] > 0 else float("nan")
        self.curves.append(pd.DataFrame({"epoch": epoch, "step": step, **columns, "loss": losses, "relative": relative}))


def through_training(dense: LoadedRun) -> AnalysisResult:
    """Fine-tune once more from the run's configuration and seed, and measure after every epoch."""
    if dense.setup.model.finetune == 0:
        raise GateError(
            "the run has no finetune phase to look at (--model.finetune is 0); give a run that fine-tunes its model"
        )
    pruner = make_pruner(dense.setup, dense.data)
    recorder = EveryEpoch(replace(dense, module=pruner))
    trainer = make_trainer(dense.setup, recorder, limit_val_batches=0, **ONE_DEVICE)
    pruner.train()
    trainer.fit(pruner, dense.data)
    dense.data.trainer = None
    if not recorder.curves:
        raise GateError("the run's fine-tuning is shorter than one step; give a run that fine-tunes its model")
    table, scores = pd.concat(recorder.curves, ignore_index=True), pd.concat(recorder.scores, ignore_index=True)
    trained, kept = pruner.backbone.state_dict(), dense.backbone.state_dict()
    same = all(torch.equal(kept[name].cpu(), tensor.cpu()) for name, tensor in trained.items())
    epochs = _by_epoch(table, scores)
    first, last, measure = epochs[0], epochs[-1], dense.measure
    sentences = [
        f"With half of the {dense.gates.unit}s pruned in the order of HIS, test {measure.name} is "
        + " and ".join(
            f"{measure.text(row['half_pruned'])} (with all {measure.text(row['dense'])}) after epoch {row['epoch']:g}"
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
    return AnalysisResult(tables, figures, sentences, {"epochs": epochs, "same_weights": same})


def _by_epoch(table: pd.DataFrame, scores: pd.DataFrame) -> list[dict[str, Any]]:
    """Return for each epoch the metric with all heads and with half of them, and how its HIS correlates with the last one's."""
    ranking = {epoch: rows["his_by_layer"].reset_index(drop=True) for epoch, rows in scores.groupby("epoch", sort=False)}
    last = list(ranking.values())[-1]
    found: list[dict[str, Any]] = []
    for epoch, curve in table.groupby("epoch", sort=False):
        at_half = curve.iloc[int((curve["pruned"] - curve["left"].max() / 2).abs().to_numpy().argmin())]
        numbers = {"dense": float(curve["metric"].iloc[0]), "half_pruned": float(at_half["metric"])}
        found.append({"epoch": epoch, **numbers, "his_spearman_with_last": _spearman(ranking[epoch], last)})
    return found
