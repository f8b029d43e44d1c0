"""What each head does to the task of a run: two fits of its gates, with a price and with a reward (Nam et al. 2025)."""

from __future__ import annotations

from itertools import islice

import pandas as pd
import torch
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor

from gates.search.causal_gating import ROLES, CausalRoles, causal_roles
from training.analysis.model import DenseModel, Finding, gate_columns, outcomes
from training.analysis.outcomes import LOSS, paired_change
from training.analysis.plots import causal_map
from training.runs import progress
from training.stats.bootstrap import Array
from training.stats.significance import SIGNIFICANCE, holm

PRICE = 0.01
"""Of an open head, in units of the loss."""
STEPS, SEEDS = 100, (0, 1, 2)
"""Optimiser steps of each fit, of which there are three for each seed."""


def causal_classes(dense: DenseModel) -> Finding:
    """Facilitating, irrelevant and interfering heads, from training data, with the agreement of seeds; then all heads of each
    role closed at once, on the test split."""
    roles = _roles(dense)
    found, agreement, gates = roles.roles(), roles.agreement(), dense.gates
    scores = roles.scores().mean(0)
    columns = {name: scores[:, index].numpy() for index, name in enumerate(ROLES)}
    fits = {"priced": roles.priced.mean(0).numpy(), "rewarded": roles.rewarded.mean(0).numpy()}
    table = gate_columns(gates).assign(role=roles.names(), agreement=agreement.numpy(), **columns, **fits)
    closed = _closed(dense, found)
    unanimous = agreement == 1
    counts = [f"{int((found == index).sum())} {name}" for index, name in enumerate(ROLES)]
    sentences = [
        f"Of {gates.size} {gates.unit}s, {', '.join(counts[:-1])} and {counts[-1]}, at a price and a reward of {PRICE:g} in "
        f"units of the loss; {len(SEEDS)} seeds agree on the role of {int(unanimous.sum())}.",
        *(_told(row, dense.metric, gates.unit) for _, row in closed.iterrows() if row["gates"]),
    ]
    numbers = {
        "roles": {name: int((found == index).sum()) for index, name in enumerate(ROLES)},
        "unanimous": int(unanimous.sum()),
        "agreement": float(agreement.mean()),
        "price": PRICE,
    }
    heads, agreed = gates.to_heads(found), gates.to_heads(agreement)
    figure = causal_map(gates.sites, heads, agreed, names=ROLES)
    return Finding({"causal": table, "causal_closed": closed}, {"causal": figure}, sentences, numbers)


def _roles(dense: DenseModel) -> CausalRoles:
    task, backbone = dense.pruner.task, dense.pruner.backbone
    batches = [move_data_to_device(batch, dense.device) for batch in islice(dense.data.score_dataloader(), STEPS)]
    with progress.stage("fitting gates", 3 * STEPS * len(SEEDS)) as shown:
        return causal_roles(
            dense.gates,
            batches,
            lambda batch: task.losses(backbone, batch)[0],
            price=PRICE,
            steps=STEPS,
            seeds=SEEDS,
            advance=shown.advance,
        )


def _closed(dense: DenseModel, roles: Tensor) -> pd.DataFrame:
    """What it changes on the test split to close all gates of a role; roles without gates have no change."""
    masks = torch.stack([torch.ones(len(roles)), *((roles != index).float() for index in range(len(ROLES)))])
    found = outcomes(dense, masks, "test")
    if found.measure.name == LOSS:
        return _closed_by_loss(found.losses, roles)
    tests = found.against_first()
    losses = found.losses.mean(axis=1)
    return pd.DataFrame(
        {
            "role": ROLES,
            "gates": [int((roles == index).sum()) for index in range(len(ROLES))],
            "metric": found.values[1:],
            "change": found.values[1:] - found.values[0],
            "low": [test.low for test in tests],
            "high": [test.high for test in tests],
            "p_holm": holm([test.p for test in tests]),
            "loss_change": losses[1:] - losses[0],
        }
    )


def _closed_by_loss(losses: Array, roles: Tensor) -> pd.DataFrame:
    """The same for tasks without classes: the mean change of the loss over examples, with Student's interval and paired test.

    Args:
        losses: with all gates open, then with those of each role closed, ``[1 + roles, examples]``.
        roles: of the gates, ``[gates]``.
    """
    rows = []
    for index, change in enumerate(losses[1:] - losses[0]):
        rows.append((ROLES[index], int((roles == index).sum()), *paired_change(change)))
    table = pd.DataFrame(rows, columns=["role", "gates", "loss_change", "low", "high", "p_holm"])
    return table.assign(p_holm=holm(table["p_holm"]))


def _told(row: pd.Series, metric: str, unit: str) -> str:
    """A sentence on a role's gates closed at once."""
    sure = "significantly" if row["p_holm"] < SIGNIFICANCE else "not significantly"
    if "change" not in row:
        return (
            f"With all {row['role']} {unit}s closed ({row['gates']}), the test loss changes by {row['loss_change']:+.3f} "
            f"(95 % interval {row['low']:+.3f} to {row['high']:+.3f}; {sure} after Holm's correction)."
        )
    return (
        f"With all {row['role']} {unit}s closed ({row['gates']}), test {metric} changes by {100 * row['change']:+.1f} points "
        f"(95 % interval {100 * row['low']:+.1f} to {100 * row['high']:+.1f}; {sure} after Holm's correction)."
    )
