"""Passes over the scoring data, each of which yields one or several raw scores of a dense model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gates.errors import GateError
from gates.head_gates import Granularity
from gates.hooks.observe import observe_attention
from gates.scores.ablation import ablate, leave_one_out_masks
from gates.scores.attention_importance import attention_gradients
from gates.scores.confidence import AttentionConfidence
from gates.scores.entropy import AttentionEntropy
from gates.scores.fisher import FisherInformation
from gates.scores.importance import (
    HeadImportance,
    gradient_rows,
    head_gradients,
    normalise_by_layer,
    removal_ranking,
    requiring_gradients,
)
from gates.scores.taylor import MeanGradients, output_weights, weight_taylor

if TYPE_CHECKING:
    from training.scoring.scorers import Scoring


@dataclass(frozen=True)
class Pass:
    """One way over the scoring data.

    Args:
        raws: names of the raw scores it yields.
        run: yields them, each ``[gates]`` but for the Fisher matrix.
    """

    raws: tuple[str, ...]
    run: Callable[[Scoring], dict[str, Tensor]]


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


@dataclass(frozen=True)
class Variant:
    """A variant of HIS: where absolute values are taken, and whether it is normalised.

    Args:
        raw: the raw score with all gates open.
        granularity: of its gradients.
        by_layer: whether it is divided by its norm over each layer.
    """

    raw: str
    granularity: Granularity
    by_layer: bool


GRANULARITIES: dict[str, Granularity] = {"his": "example", "his-token": "token", "his-batch": "batch"}
VARIANTS = {
    raw if by_layer else f"{raw}-raw": Variant(raw, granularity, by_layer)
    for raw, granularity in GRANULARITIES.items()
    for by_layer in (True, False)
}
"""Of HIS, by the name of the method that ranks by it."""


def _steps(name: str) -> Pass:
    """A variant of HIS again after every tenth of the gates; one pass per step, the first of which is that of the variant."""
    variant, found = VARIANTS[name], f"{name}-steps"

    def run(scoring: Scoring) -> dict[str, Tensor]:
        gates = scoring.pruner.gates
        layers = gates.layer_index().cpu()

        def his_at(mask: Tensor) -> Tensor:
            if bool((mask == 1).all()):
                return scoring.raw(variant.raw)
            importance = HeadImportance(gates.size).to(scoring.device)
            with gates.use(mask.to(scoring.device)):
                for batch in scoring.batches("scoring heads in steps"):
                    rows = head_gradients(gates, lambda batch=batch: scoring.losses(batch), variant.granularity)  # type: ignore[misc]
                    importance.update(rows)
            return importance.compute().his.cpu()

        def scores_at(mask: Tensor) -> Tensor:
            return normalise_by_layer(his_at(mask), layers) if variant.by_layer else his_at(mask)

        return {found: removal_ranking(scores_at, gates.size)}

    return Pass((found,), run)


def _left_out(scoring: Scoring) -> dict[str, Tensor]:
    """The loss with each gate closed alone, above the dense model's: one pass per gate."""
    gates = scoring.pruner.gates
    masks = leave_one_out_masks(gates.size).to(scoring.device)
    effects = HeadImportance(gates.size).to(scoring.device)
    for batch in scoring.batches("leaving heads out"):
        losses = ablate(gates, masks, [batch], scoring.losses)
        effects.update((losses[1:] - losses[:1]).T)
    return {"leave-one-out": effects.compute().signed}


PASSES: dict[str, Pass] = {
    "gradients": Pass(
        ("his", "his_standard_error", "signed", "fisher", "fisher-matrix", "his-token", "his-batch", "taylor-weights"),
        _gradients,
    ),
    "attention": Pass(("entropy", "confidence"), _attention),
    "attention-gradients": Pass(("attention-his",), _attention_gradients),
    **{f"{name}-steps".removeprefix("his-"): _steps(name) for name in VARIANTS},
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
