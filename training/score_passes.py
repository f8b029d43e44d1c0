"""Passes over the scoring data, each of which yields one or several raw scores of a dense model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gates.ablation import ablate, leave_one_out_masks
from gates.attention_importance import attention_gradients
from gates.confidence import AttentionConfidence
from gates.entropy import AttentionEntropy
from gates.errors import GateError
from gates.fisher import FisherInformation
from gates.importance import (
    HeadImportance,
    gradient_rows,
    head_gradients,
    normalise_by_layer,
    removal_ranking,
    requiring_gradients,
)
from gates.observe import observe_attention
from gates.taylor import MeanGradients, output_weights, weight_taylor

if TYPE_CHECKING:
    from training.scorers import Scoring


def _gradients(scoring: Scoring) -> dict[str, Tensor]:
    """Everything that one backward pass per batch gives."""
    gates = scoring.pruner.gates
    weights = output_weights(gates)
    example, token, batch_wise = (HeadImportance(gates.size).to(scoring.device) for _ in range(3))
    fisher = FisherInformation(gates.size).to(scoring.device)
    of_weights = MeanGradients(weights).to(scoring.device)
    with requiring_gradients(weights):
        for batch in scoring.batches("scoring heads"):
            rows = gradient_rows(gates, lambda batch=batch: scoring.losses(batch), weights)  # type: ignore[misc]
            example.update(rows.example)
            fisher.update(rows.example)
            token.update(rows.token)
            batch_wise.update(rows.batch)
            of_weights.update(rows.weights, len(rows.example))
    importance = example.compute()
    return {
        "his": importance.his,
        "his_standard_error": importance.standard_error,
        "signed": importance.signed,
        "fisher": importance.fisher,
        "fisher-matrix": fisher.compute(),
        "his-token": token.compute().his,
        "his-batch": batch_wise.compute().his,
        "taylor-weights": weight_taylor(gates, of_weights.compute()),
    }


@torch.no_grad()
def _attention(scoring: Scoring) -> dict[str, Tensor]:
    """What attention distributions say, without gradients."""
    gates, task, backbone = scoring.pruner.gates, scoring.pruner.task, scoring.pruner.backbone
    entropy = AttentionEntropy(gates.sites).to(scoring.device)
    confidence = AttentionConfidence(gates.sites).to(scoring.device)
    for batch in scoring.batches("observing attention"):
        with observe_attention(backbone, gates.sites, [entropy, confidence], task.valid_queries(batch)):
            scoring.losses(batch)
    return {name: gates.to_gates(metric.compute()) for name, metric in (("entropy", entropy), ("confidence", confidence))}


def _attention_gradients(scoring: Scoring) -> dict[str, Tensor]:
    gates, backbone = scoring.pruner.gates, scoring.pruner.backbone
    importance = HeadImportance(gates.heads).to(scoring.device)
    for batch in scoring.batches("differentiating attention"):
        importance.update(attention_gradients(backbone, gates.sites, lambda batch=batch: scoring.losses(batch)))  # type: ignore[misc]
    return {"attention-his": gates.to_gates(importance.compute().his)}


def _steps(scoring: Scoring) -> dict[str, Tensor]:
    """HIS again after every tenth of the gates; one pass per step, the first of which is that of HIS."""
    gates = scoring.pruner.gates

    def scores_at(mask: Tensor) -> Tensor:
        if bool((mask == 1).all()):
            return scoring.by_layer("his")
        importance = HeadImportance(gates.size).to(scoring.device)
        with gates.use(mask.to(scoring.device)):
            for batch in scoring.batches("scoring heads in steps"):
                importance.update(head_gradients(gates, lambda batch=batch: scoring.losses(batch)))  # type: ignore[misc]
        return normalise_by_layer(importance.compute().his, gates.layer_index())

    return {"his-steps": removal_ranking(scores_at, gates.size)}


def _left_out(scoring: Scoring) -> dict[str, Tensor]:
    """The loss with each gate closed alone, above the dense model's: one pass per gate."""
    gates = scoring.pruner.gates
    masks = leave_one_out_masks(gates.size).to(scoring.device)
    effects = HeadImportance(gates.size).to(scoring.device)
    for batch in scoring.batches("leaving heads out"):
        losses = ablate(gates, masks, [batch], scoring.losses)
        effects.update((losses[1:] - losses[:1]).T)
    return {"leave-one-out": effects.compute().signed}


@dataclass(frozen=True)
class Pass:
    """One way over the scoring data.

    Args:
        raws: names of the raw scores it yields.
        run: yields them, each ``[gates]`` but for the Fisher matrix.
    """

    raws: tuple[str, ...]
    run: Callable[[Scoring], dict[str, Tensor]]


PASSES: dict[str, Pass] = {
    "gradients": Pass(
        ("his", "his_standard_error", "signed", "fisher", "fisher-matrix", "his-token", "his-batch", "taylor-weights"),
        _gradients,
    ),
    "attention": Pass(("entropy", "confidence"), _attention),
    "attention-gradients": Pass(("attention-his",), _attention_gradients),
    "steps": Pass(("his-steps",), _steps),
    "left-out": Pass(("leave-one-out",), _left_out),
}


def pass_of(raw: str) -> str:
    """The pass that yields a raw score.

    Raises:
        GateError: for a name that is none.
    """
    found = next((name for name, one in PASSES.items() if raw in one.raws), None)
    if found is None:
        names = [name for one in PASSES.values() for name in one.raws]
        raise GateError(f"unknown raw score {raw!r}; expected one of {', '.join(names)}")
    return found
