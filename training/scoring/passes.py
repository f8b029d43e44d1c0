"""Passes over the scoring data, each of which yields one or several raw scores of a dense model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gates.errors import GateError
from gates.hooks.observe import observe_attention, observe_entropy
from gates.hooks.replacement import mean_replacement
from gates.hooks.valid import rows_by_site
from gates.relevance.rules import EPSILON
from gates.scores.ablation import ablate, leave_one_out_masks
from gates.scores.attention_importance import attention_gradients
from gates.scores.brain_surgeon import SiteMoments, brain_surgeon_scores, output_gradients
from gates.scores.confidence import AttentionConfidence
from gates.scores.entropy import AttentionEntropy
from gates.scores.fisher import FisherInformation
from gates.scores.fluctuation import HeadOutputVariance, fluctuation
from gates.scores.gradient_norm import gradient_norms, input_weights
from gates.scores.importance import (
    Granularity,
    HeadImportance,
    Importance,
    gradient_rows,
    head_gradients,
    normalise_by_layer,
    removal_ranking,
    requiring_gradients,
)
from gates.scores.shapley import ShapleyValues, removal_orders, shapley_rows
from gates.scores.taylor import MeanGradients, output_weights, weight_taylor
from gates.sites import weight_by_output
from training.runs import progress
from training.scoring.constants import constant_of_each
from training.scoring.outputs import mean_outputs, observe_outputs
from training.scoring.relevance import relevance_shares
from training.scoring.subject import Batch, Subject

Raw = Callable[[str], Tensor]
"""A raw score by its name, computed if it is not known."""


@dataclass(frozen=True)
class Pass:
    """One way over the scoring data.

    Args:
        raws: names of the raw scores it yields.
        run: yields them, each ``[gates]`` but for the Fisher matrix, from a subject at rest and what is known of it.
    """

    raws: tuple[str, ...]
    run: Callable[[Subject, Raw], dict[str, Tensor]]


def _gradients(subject: Subject, raw: Raw) -> dict[str, Tensor]:
    """Everything that one backward pass per batch gives."""
    gates = subject.gates
    weights = output_weights(gates)
    example, token, batch_wise = (HeadImportance(gates.size).to(subject.device) for _ in range(3))
    fisher = FisherInformation(gates.size).to(subject.device)
    of_weights = MeanGradients(weights).to(subject.device)
    with requiring_gradients(weights):
        for batch in subject.batches("scoring heads"):
            rows = gradient_rows(gates, lambda batch=batch: subject.losses(batch), weights)  # type: ignore[misc]
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
def _attention(subject: Subject, raw: Raw) -> dict[str, Tensor]:
    """What attention distributions say, without gradients."""
    gates, backbone = subject.gates, subject.backbone
    entropy = AttentionEntropy(gates.sites).to(subject.device)
    confidence = AttentionConfidence(gates.sites).to(subject.device)
    for batch in subject.batches("observing attention"):
        with observe_attention(backbone, gates.sites, [entropy, confidence], subject.valid_queries(batch)):
            subject.losses(batch)
    return {name: gates.to_gates(metric.compute()) for name, metric in (("entropy", entropy), ("confidence", confidence))}


def _attention_gradients(subject: Subject, raw: Raw) -> dict[str, Tensor]:
    gates, backbone = subject.gates, subject.backbone
    importance = HeadImportance(gates.heads).to(subject.device)
    for batch in subject.batches("differentiating attention"):
        importance.update(attention_gradients(backbone, gates.sites, lambda batch=batch: subject.losses(batch)))  # type: ignore[misc]
    return {"attention-his": gates.to_gates(importance.compute().his)}


def _output_moments(subject: Subject, raw: Raw) -> dict[str, Tensor]:
    return {"obs": brain_surgeon_of(subject)}


def brain_surgeon_of(subject: Subject) -> Tensor:
    """What removal costs an optimal brain surgeon, ``[gates]`` float64, of a subject at rest: from moments of the output
    projections' inputs and of their outputs' gradients."""
    gates = subject.gates
    shapes = [weight_by_output(site.output).shape for site in gates.sites]
    moments = [SiteMoments(features, outputs).to(subject.device) for outputs, features in shapes]
    for batch in subject.batches("gathering moments of outputs"):
        valid = rows_by_site(subject.valid_queries(batch), gates.sites)
        for site, inputs, gradients in output_gradients(gates, lambda batch=batch: subject.losses(batch)):  # type: ignore[misc]
            examples = len(batch["labels"])
            moments[site].update(inputs, gradients, examples, valid[site])
    return brain_surgeon_scores(gates, [of_site.compute() for of_site in moments])


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

    def run(subject: Subject, raw: Raw) -> dict[str, Tensor]:
        gates = subject.gates
        layers = gates.layer_index().cpu()

        def his_at(mask: Tensor) -> Tensor:
            if bool((mask == 1).all()):
                return raw(variant.raw)
            importance = HeadImportance(gates.size).to(subject.device)
            with gates.use(mask.to(subject.device)):
                for batch in subject.batches("scoring heads in steps"):
                    rows = head_gradients(gates, lambda batch=batch: subject.losses(batch), variant.granularity)  # type: ignore[misc]
                    importance.update(rows)
            return importance.compute().his.cpu()

        def scores_at(mask: Tensor) -> Tensor:
            return normalise_by_layer(his_at(mask), layers) if variant.by_layer else his_at(mask)

        return {found: removal_ranking(scores_at, gates.size)}

    return Pass((found,), run)


def _left_out(subject: Subject, raw: Raw) -> dict[str, Tensor]:
    return {"leave-one-out": _ablated(subject, "leaving heads out")}


def _ablated(subject: Subject, description: str) -> Tensor:
    """The loss with each gate closed alone, above the dense model's: one pass per gate."""
    gates = subject.gates
    masks = leave_one_out_masks(gates.size).to(subject.device)
    effects = HeadImportance(gates.size).to(subject.device)
    for batch in subject.batches(description):
        losses = ablate(gates, masks, [batch], subject.losses)
        effects.update((losses[1:] - losses[:1]).T)
    return effects.compute().signed


def _mean_ablated(subject: Subject, raw: Raw) -> dict[str, Tensor]:
    """The same with its mean output in the place of the closed head."""
    with mean_replacement(subject.gates, mean_outputs(subject)):
        return {"mean-ablation": _ablated(subject, "mean ablation")}


def _optimally_ablated(subject: Subject, raw: Raw) -> dict[str, Tensor]:
    """The same with the constant in the place of the closed head that costs least."""
    with mean_replacement(subject.gates, constant_of_each(subject)):
        return {"optimal-ablation": _ablated(subject, "optimal ablation")}


def _relevance(name: str, epsilon: float | None) -> Pass:
    """Shares of heads in the relevance of their layers, by absolute values and with the sign."""

    def run(subject: Subject, raw: Raw) -> dict[str, Tensor]:
        shares = relevance_shares(subject, epsilon=epsilon, description=f"propagating {name}")
        return {name: subject.gates.to_gates(shares.absolute), f"{name}-signed": subject.gates.to_gates(shares.signed)}

    return Pass((name, f"{name}-signed"), run)


def _outputs(subject: Subject, raw: Raw) -> dict[str, Tensor]:
    """What follows from the head outputs alone."""
    variance = HeadOutputVariance(subject.gates.sites).to(subject.device)
    observe_outputs(subject, variance, "observing head outputs")
    return {"flap": fluctuation(subject.gates, variance.compute())}


def _shapley(subject: Subject, raw: Raw) -> dict[str, Tensor]:
    """Shapley values from one walk of every example: one pass for each gate, less where walks are truncated."""
    size, device = subject.gates.size, subject.device
    batches = list(subject.batches("walking from all heads to none", bar=False))
    lengths = [len(batch["labels"]) for batch in batches]

    def mean(values: Tensor) -> float:
        of_all = ShapleyValues(1).to(device)
        of_all.update(values.unsqueeze(1).to(device))
        return float(of_all.compute().values)

    with torch.no_grad(), progress.stage("walking from all heads to none, passes", size + 1) as shown:

        def losses_of(masks: Tensor) -> Tensor:
            losses = []
            for batch, own in zip(batches, masks.split(lengths), strict=True):
                with subject.gates.use(own.to(device)):
                    losses.append(subject.losses(batch).cpu())
            shown.advance()
            return torch.cat(losses)

        rows = shapley_rows(removal_orders(subject.data.score_places(), size), losses_of, mean=mean)
    values = ShapleyValues(size).to(device)
    values.update(rows.to(device))
    found = values.compute()
    return {"shapley": found.values, "shapley_standard_error": found.standard_error}


def _greedy_gnorm(subject: Subject, raw: Raw) -> dict[str, Tensor]:
    """Greedy-Gnorm: a forward and a backward pass for every gate."""
    gates = subject.gates
    weights = input_weights(gates)

    def scores_at(mask: Tensor) -> Tensor:
        of_weights = MeanGradients(weights).to(subject.device)
        with gates.use(mask.to(subject.device)):
            for batch in subject.batches("gradient norms", bar=False):
                norms = _logit_norms(subject, batch)
                gradients = torch.autograd.grad(norms.mean(), weights, materialize_grads=True)
                of_weights.update(gradients, len(norms))
        shown.advance()
        return gradient_norms(gates, of_weights.compute())

    with requiring_gradients(weights), progress.stage("removing heads by gradient norms", gates.size) as shown:
        return {"greedy-gnorm": removal_ranking(scores_at, gates.size, share=1 / gates.size)}


def _logit_norms(subject: Subject, batch: Batch) -> Tensor:
    """The l2 norm of each example's logits ``[batch]``, over the positions that are not padding."""
    logits = subject.task.losses(subject.backbone, batch)[1]
    valid = subject.task.valid_queries(batch)["decoder"] if logits.dim() == 3 else None
    if valid is not None:
        logits = logits * valid.unsqueeze(-1)
    return logits.flatten(1).norm(dim=1)


PASSES: dict[str, Pass] = {
    "gradients": Pass(
        ("his", "his_standard_error", "signed", "fisher", "fisher-matrix", "his-token", "his-batch", "taylor-weights"),
        _gradients,
    ),
    "attention": Pass(("entropy", "confidence"), _attention),
    "attention-gradients": Pass(("attention-his",), _attention_gradients),
    "output-moments": Pass(("obs",), _output_moments),
    **{f"{name}-steps".removeprefix("his-"): _steps(name) for name in VARIANTS},
    "left-out": Pass(("leave-one-out",), _left_out),
    "mean-ablated": Pass(("mean-ablation",), _mean_ablated),
    "optimally-ablated": Pass(("optimal-ablation",), _optimally_ablated),
    "walks": Pass(("shapley", "shapley_standard_error"), _shapley),
    "outputs": Pass(("flap",), _outputs),
    "relevance": _relevance("relevance", EPSILON),
    "gradient-x-input": _relevance("gradient-x-input", None),
    "gradient-norms": Pass(("greedy-gnorm",), _greedy_gnorm),
}


def starting_scores(subject: Subject, name: Literal["his", "obs"]) -> Tensor:
    """Scores ``[gates]`` that can be compared across layers, from which gates start: HIS normalised by layer, or what removal
    costs an optimal brain surgeon."""
    if name == "his":
        return normalise_by_layer(importance_of(subject).his, subject.gates.layer_index().cpu())
    with subject.at_rest():
        return brain_surgeon_of(subject).cpu()


def importance_of(subject: Subject, *, also: Callable[[Batch], None] | None = None) -> Importance:
    """HIS with its standard error, signed score and Fisher information, each ``[gates]`` on the CPU.

    Args:
        subject: in whatever state.
        also: called with every batch, at rest.
    """
    gates = subject.gates
    importance = HeadImportance(gates.size).to(subject.device)
    with subject.at_rest():
        for batch in subject.batches():
            importance.update(head_gradients(gates, lambda batch=batch: subject.losses(batch)))  # type: ignore[misc]
            if also is not None:
                also(batch)
    return Importance(*(score.cpu() for score in importance.compute()))


def importance_and_entropy(subject: Subject) -> tuple[Importance, Tensor]:
    """The same, and the mean normalised attention entropy ``[gates]`` on the CPU, in one way over the data."""
    gates, backbone = subject.gates, subject.backbone
    entropy = AttentionEntropy(gates.sites).to(subject.device)

    def observe(batch: Batch) -> None:
        with torch.no_grad(), observe_entropy(backbone, gates.sites, entropy, subject.valid_queries(batch)):
            subject.losses(batch)

    importance = importance_of(subject, also=observe)
    return importance, gates.to_gates(entropy.compute()).cpu()


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
