"""Michel, Levy and Neubig's (2019) experiments on a trained model: remove one head, all but one, or more and more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from gates.errors import GateError
from gates.scores.ablation import leave_one_out_masks
from gates.scores.importance import normalise_by_layer, removal_ranking
from gates.sites import KINDS
from training.analysis.model import DenseModel, Finding, gate_columns, head_importance, outcomes
from training.analysis.outcomes import Measure
from training.analysis.plots import domain_scatter, effect_map, quality_by_kind
from training.data.base import TaskData
from training.stats.significance import SIGNIFICANCE, holm

POINT = 0.01
"""Of the metric: a change for the worse that is called small; of the loss, 1 % of a language model's perplexity."""
STEPS = 10
"""In which heads are pruned: about 10 % each, as in the paper."""


def ablate_each(dense: DenseModel) -> Finding:
    """Each head removed alone (section 3.2): the change on the test split, and whether it is more than chance.

    ``p`` is McNemar's exact test for accuracy, the paired bootstrap over examples for other metrics of classifiers, and the
    paired t test for the loss, which is the metric of every other task; ``p_holm`` is corrected for the number of heads.
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
        f"In this one model, removing one {unit} alone {measure.worsens} test {measure.name} significantly (p < "
        f"{SIGNIFICANCE:g} over test examples, after Holm's correction for {total}) for {int(harmful.sum())} of {total} "
        f"{unit}s and {measure.improves} it for {int(helpful.sum())}; with all {unit}s it is {measure.told(base)}.",
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
    return Finding({"ablate": table}, {"ablate": figure}, sentences, numbers)


def one_per_layer(dense: DenseModel) -> Finding:
    """One layer at a time reduced to its single best head (section 3.3), all others whole.

    The best head is the one that, left alone in its layer, gives the best metric on the *selection* split (of equals the lowest
    loss); what it costs is then measured on the test split.
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
    return Finding({"one_per_layer": table}, {}, sentences, numbers)


def by_kind(dense: DenseModel) -> Finding:
    """Quality against budget when heads of one kind alone are pruned (section 5), or of all kinds together.

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
    masks = [torch.ones(gates.size)]
    for part, among in parts.items():
        members = among.nonzero().flatten()

        def scores_at(mask: Tensor, members: Tensor = members) -> Tensor:
            whole = torch.ones(gates.size)
            whole[members] = mask
            return normalise_by_layer(head_importance(dense, whole) * whole, layers)[members]

        rankings = {"one-shot": one_shot[members], "iterative": removal_ranking(scores_at, len(members), share=1 / STEPS)}
        for schedule, ranking in rankings.items():
            order = torch.sort(ranking, stable=True).indices
            for pruned in prune_counts(len(members)):
                mask = torch.ones(gates.size)
                mask[members[order[:pruned]]] = 0.0
                masks.append(mask)
                rows.append({"kind": part, "schedule": schedule, "pruned": pruned, "left": len(members) - pruned})
    found = outcomes(dense, torch.stack(masks), "test")
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
    return Finding({"by_kind": table}, {"by_kind": quality_by_kind(table, measure=measure)}, sentences, numbers)


def prune_counts(heads: int) -> list[int]:
    """How many of so many heads are pruned at each of ten equal steps, from none to all."""
    return sorted({round(step * heads / STEPS) for step in range(STEPS + 1)})


def across_domains(dense: DenseModel, other: TaskData) -> Finding:
    """Whether the same heads matter on other data of the same task (section 3.4): HIS and the effect on the loss of removing
    each head alone, both on the test splits, where nothing is chosen by them.

    Raises:
        GateError: if the other data are of another task, or have other classes or another vocabulary.
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
    here, there = (measure.told(value) for value in values)
    sentences = [f"Test {measure.name} is {here} on the run's data and {there} on the other data."]
    numbers: dict[str, Any] = {"dense": values[0], "dense_other": values[1]}
    for name, title in (("his", "HIS"), ("loss_change", f"the effect on the loss of removing each {dense.gates.unit}")):
        numbers[name] = _correlations(table[name].to_numpy(), table[f"other_{name}"].to_numpy())
        sentences.append(f"Between the two, {title} correlates {_described(numbers[name])}.")
    return Finding({"domains": table}, {"domains": domain_scatter(table, numbers)}, sentences, numbers)


def _check_same_task(own: TaskData, other: TaskData) -> None:
    """Raises :class:`GateError` for data on which the model of a run means nothing."""
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
    """Metric, loss and their changes against the first mask, for the further masks; the loss with a paired standard error."""
    change = losses[1:] - losses[0]
    return {
        "metric": values[1:],
        "change": values[1:] - values[0],
        "loss": losses[1:].mean(axis=1),
        "loss_change": change.mean(axis=1),
        "loss_change_se": change.std(axis=1, ddof=1) / change.shape[1] ** 0.5,
    }


def _tests(differences: Sequence[Any]) -> dict[str, Any]:
    """Intervals and p values, also corrected for their number."""
    p = [difference.p for difference in differences]
    return {"low": [d.low for d in differences], "high": [d.high for d in differences], "p": p, "p_holm": holm(p)}


def _correlations(values: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Pearson with its 95 % interval (Fisher's z) and Spearman; None where one side is constant or there are too few."""
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
