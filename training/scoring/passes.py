"""Passes over the scoring data. Each pass returns one or several raw scores of a dense model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gates.attention.intercept import observe_head_outputs
from gates.attention.valid import rows_by_site
from gates.errors import GateError
from gates.recovery.refit import Refitted, refit_
from gates.recovery.rescale import rescaled_gates
from gates.relevance.heads import RelevanceShares, Shares, head_layers, head_steps, with_text
from gates.relevance.rules import EPSILON
from gates.scores.ablation import (
    MeanHeadOutput,
    ablate,
    descend_each,
    leave_one_out_masks,
    mean_replacement,
    uniform_replacement,
)
from gates.scores.attention import AttentionConfidence, AttentionEntropy
from gates.scores.brain_surgeon import brain_surgeon
from gates.scores.fisher import FisherInformation
from gates.scores.importance import (
    Granularity,
    HeadImportance,
    Importance,
    attention_gradients,
    gradient_rows,
    head_gradients,
    normalise_by_layer,
    removal_ranking,
    requiring_gradients,
)
from gates.scores.observe import observe_attention
from gates.scores.shapley import ShapleyValues, removal_orders, shapley_rows
from gates.scores.weights import (
    HeadOutputVariance,
    MeanGradients,
    fluctuation,
    gradient_norms,
    input_weights,
    output_weights,
    weight_taylor,
)
from training.config import RefitOptions
from training.runs import progress
from training.scoring.subject import Batch, ScoringContext
from training.tasks.translation import Translation, generate

# Mean head outputs on training data, and gate values or weights that make up for closed heads.


def rescale(subject: ScoringContext, mask: Tensor, *, rows: int = 512) -> Tensor:
    """Fit real gate values for a mask by least squares (see :func:`gates.recovery.rescale.rescaled_gates`).

    Args:
        mask: 0/1 ``[gates]``.
        rows: The largest number of rows of the scoring data to fit on, spread over all lengths.

    Returns:
        ``[gates]``, float64 on the CPU; 0 where the mask is.
    """
    with subject.at_rest():
        return rescaled_gates(subject.gates, mask, partial(subject.thinned, rows), subject.outputs, subject.valid_queries)


def refit(subject: ScoringContext, mask: Tensor, dense: Mapping[str, Tensor], search: RefitOptions) -> list[Refitted]:
    """Change the weights behind the heads to make up for closed heads (see :func:`gates.recovery.refit.refit_`).

    Args:
        subject: The model with the weights that the mask is for. They are changed.
        mask: 0/1 ``[gates]``.
    """
    with subject.at_rest():
        own = subject.backbone.named_parameters()
        aim = {name: other for name, one in own if not torch.equal(one, other := dense[name].to(subject.device))}
        batches = list(subject.thinned(search.rows))  # padded once for all projections
        return refit_(
            subject.gates,
            mask,
            lambda: batches,
            subject.outputs,  # sums over many positions average the rounding of half precision out
            subject.valid_queries,
            ridge=search.ridges,
            feed_forward=search.feed_forward,
            dense=aim,
        )


def mean_outputs(subject: ScoringContext) -> list[Tensor]:
    """Return the mean head output of each site, ``[heads * head_dim]``."""
    means = MeanHeadOutput(subject.gates.sites).to(subject.device)
    with subject.at_rest():
        observe_outputs(subject, means, "mean outputs")
    return [mean.cpu() for mean in means.compute()]


@torch.no_grad()
def observe_outputs(subject: ScoringContext, metric: MeanHeadOutput, description: str) -> None:
    """Update a metric with the outputs of all heads on the scoring data."""
    sites = subject.gates.sites
    for batch in subject.batches(description):
        valid = rows_by_site(subject.valid_queries(batch), sites)

        def take(site: int, heads: Tensor, valid: list[Tensor | None] = valid) -> None:
            metric.update(site, heads, valid[site])

        with observe_head_outputs(subject.backbone, sites, take):
            subject.task.losses(subject.backbone, batch)


def relevance_shares(subject: ScoringContext, *, epsilon: float | None, description: str) -> Shares:
    """Return the mean shares of heads in the relevance of their layers, each ``[heads]``.

    Relevance is that to the predicted class of an example, or to each token of its own translation.

    Args:
        epsilon: The epsilon of the epsilon rule. None for activation times gradient.
    """
    sites, backbone = subject.gates.sites, subject.backbone
    shares = RelevanceShares(head_layers(sites)).to(subject.device)
    for batch in subject.batches(description):
        for step in head_steps(backbone, sites, _predicted(subject, batch), epsilon=epsilon):
            shares.update(step.rows)
    return shares.compute()


def _predicted(subject: ScoringContext, batch: Batch) -> dict[str, Tensor]:
    """Return the inputs of the model; for a translator with its own greedy translation."""
    task, backbone = subject.task, subject.backbone
    if not isinstance(task, Translation):
        return task.model_inputs(backbone, batch)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    written = generate(backbone, ids, mask, task.decoding, beams=1)
    return with_text(backbone, {"input_ids": ids, "attention_mask": mask}, written)


# Constants in place of closed heads, fitted on training data (see :mod:`gates.scores.ablation`).


def constant_of_each(subject: ScoringContext) -> list[Tensor]:
    """Return for each site, ``[heads * head_dim]``, the constants that cost least where one gate alone is closed."""
    sizes = subject.gates.sizes
    fitted = optimal_constants(subject, leave_one_out_masks(subject.gates.size)[1:])
    constants, first = [], 0
    for part, size in zip(fitted, sizes, strict=True):
        by_gate = part[first : first + size].unflatten(1, (size, -1))  # [mask that closes gate g, gate, features]
        constants.append(by_gate.diagonal(dim1=0, dim2=1).T.flatten())
        first += size
    return constants


def optimal_constants(subject: ScoringContext, masks: Tensor, *, steps: int = 8, rows: int = 256) -> list[Tensor]:
    """Fit constants in place of closed heads that make the mean loss lowest.

    Args:
        masks: 0/1 ``[masks, gates]``. The heads that a mask closes have constants of their own, fitted together.
        steps: The number of descent steps from the mean outputs. A step is a forward and a backward pass for every mask.
        rows: The largest number of scoring examples to fit on, spread over all lengths and processes.

    Returns:
        For each site ``[masks, heads * head_dim]``; where a mask keeps a head, its mean output.
    """
    means = mean_outputs(subject)
    sizes = [len(mean) for mean in means]
    start = torch.cat(means).to(subject.device).repeat(len(masks), 1)
    with subject.at_rest(), progress.stage("fitting constants, steps", steps + 1) as shown:
        batches = list(subject.thinned(rows))

        def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
            found = MeanGradients([points[:, 0], points]).set_dtype(torch.float64).to(subject.device)
            for batch in batches:
                each = [
                    _loss_and_slope(subject, batch, mask, point.split(sizes)) for mask, point in zip(masks, points, strict=True)
                ]
                values, slopes = (torch.stack(parts) for parts in zip(*each, strict=True))
                found.update([values, slopes], len(batch["labels"]))
            shown.advance()
            value, slope = found.compute()
            return value.reshape(len(points)), slope  # metrics squeeze a single entry

        dense = torch.ones(subject.gates.size)
        losses = MeanGradients([dense[0]]).set_dtype(torch.float64).to(subject.device)
        for batch in batches:
            losses.update([_loss_and_slope(subject, batch, dense, start[0].split(sizes))[0]], len(batch["labels"]))
        best, _ = descend_each(start, evaluate, floor=losses.compute()[0], steps=steps)
    return [part.cpu() for part in best.split(sizes, dim=1)]


def _loss_and_slope(subject: ScoringContext, batch: Batch, mask: Tensor, constants: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean loss of a batch with constants in place of closed heads, and its gradient."""
    gates, parts = subject.gates, mask.split(subject.gates.sizes)
    leaves = [constant.clone().requires_grad_(not bool(part.all())) for constant, part in zip(constants, parts, strict=True)]
    free = [leaf for leaf in leaves if leaf.requires_grad]
    with gates.use(mask.to(subject.device)), mean_replacement(gates, leaves), torch.set_grad_enabled(bool(free)):
        loss = subject.losses(batch).mean()
    slopes = iter(torch.autograd.grad(loss, free, materialize_grads=True) if free else ())
    return loss.detach(), torch.cat([next(slopes) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves])


Raw = Callable[[str], Tensor]
"""A function that returns a raw score by its name. It computes the score if it is unknown."""


@dataclass(frozen=True)
class Pass:
    """One pass over the scoring data.

    Args:
        raws: The names of the raw scores that it returns.
        run: A function that computes them for a subject at rest, each ``[gates]`` but for the Fisher matrix.
    """

    raws: tuple[str, ...]
    run: Callable[[ScoringContext, Raw], dict[str, Tensor]]


def _gradients(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
    """Return everything that one backward pass per batch gives."""
    gates = subject.gates
    weights = output_weights(gates)
    example, token, batch_wise = (HeadImportance(gates.size).to(subject.device) for _ in range(3))
    fisher = FisherInformation(gates.size).to(subject.device)
    of_weights = MeanGradients(weights).to(subject.device)
    with requiring_gradients(weights):
        for batch in subject.batches("scoring heads"):
            rows = gradient_rows(gates, partial(subject.losses, batch), weights)
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
def _attention(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
    gates, backbone = subject.gates, subject.backbone
    entropy = AttentionEntropy(gates.sites).to(subject.device)
    confidence = AttentionConfidence(gates.sites).to(subject.device)
    for batch in subject.batches("observing attention"):
        with observe_attention(backbone, gates.sites, [entropy, confidence], subject.valid_queries(batch)):
            subject.losses(batch)
    return {name: gates.to_gates(metric.compute()) for name, metric in (("entropy", entropy), ("confidence", confidence))}


def _attention_gradients(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
    gates, backbone = subject.gates, subject.backbone
    importance = HeadImportance(gates.heads).to(subject.device)
    for batch in subject.batches("differentiating attention"):
        importance.update(attention_gradients(backbone, gates.sites, partial(subject.losses, batch)))
    return {"attention-his": gates.to_gates(importance.compute().his)}


def _output_moments(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
    return {"obs": _brain_surgeon(subject)}


def _brain_surgeon(subject: ScoringContext) -> Tensor:
    batches = subject.batches("gathering moments of outputs")
    return brain_surgeon(subject.gates, batches, subject.losses, subject.valid_queries)


class Variant(NamedTuple):
    """A variant of HIS."""

    raw: str  # the raw score with all gates open
    granularity: Granularity  # where absolute values are taken
    by_layer: bool  # whether the score is divided by its norm over each layer


GRANULARITIES: dict[str, Granularity] = {"his": "example", "his-token": "token", "his-batch": "batch"}
VARIANTS = {
    raw if by_layer else f"{raw}-raw": Variant(raw, granularity, by_layer)
    for raw, granularity in GRANULARITIES.items()
    for by_layer in (True, False)
}


def _steps(name: str) -> Pass:
    """Score by a variant of HIS again after every tenth of the gates. The first step is the pass of the variant itself."""
    variant, found = VARIANTS[name], f"{name}-steps"

    def run(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
        gates = subject.gates
        layers = gates.layer_index().cpu()

        def his_at(mask: Tensor) -> Tensor:
            if bool((mask == 1).all()):
                return raw(variant.raw)
            importance = HeadImportance(gates.size).to(subject.device)
            with gates.use(mask.to(subject.device)):
                for batch in subject.batches("scoring heads in steps"):
                    rows = head_gradients(gates, partial(subject.losses, batch), variant.granularity)
                    importance.update(rows)
            return importance.compute().his.cpu()

        def scores_at(mask: Tensor) -> Tensor:
            return normalise_by_layer(his_at(mask), layers) if variant.by_layer else his_at(mask)

        return {found: removal_ranking(scores_at, gates.size)}

    return Pass((found,), run)


def _ablated(subject: ScoringContext, description: str) -> Tensor:
    """Return the loss with each gate closed alone, minus the dense model's: one pass per gate."""
    gates = subject.gates
    masks = leave_one_out_masks(gates.size).to(subject.device)
    effects = HeadImportance(gates.size).to(subject.device)
    for batch in subject.batches(description):
        losses = ablate(gates, masks, [batch], subject.losses)
        effects.update((losses[1:] - losses[:1]).T)
    return effects.compute().signed


def _left_out(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
    return {"leave-one-out": _ablated(subject, "leaving heads out")}


def _mean_ablated(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
    with mean_replacement(subject.gates, mean_outputs(subject)):
        return {"mean-ablation": _ablated(subject, "mean ablation")}


def _optimally_ablated(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
    with mean_replacement(subject.gates, constant_of_each(subject)):
        return {"optimal-ablation": _ablated(subject, "optimal ablation")}


def _relevance(name: str, epsilon: float | None) -> Pass:
    def run(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
        shares = relevance_shares(subject, epsilon=epsilon, description=f"propagating {name}")
        return {name: subject.gates.to_gates(shares.absolute), f"{name}-signed": subject.gates.to_gates(shares.signed)}

    return Pass((name, f"{name}-signed"), run)


def _outputs(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
    variance = HeadOutputVariance(subject.gates.sites).to(subject.device)
    observe_outputs(subject, variance, "observing head outputs")
    return {"flap": fluctuation(subject.gates, variance.compute())}


def _shapley(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
    """Estimate Shapley values by one walk per example: at most one pass for each gate."""
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


def _greedy_gnorm(subject: ScoringContext, raw: Raw) -> dict[str, Tensor]:
    """Rank by Greedy-Gnorm: a forward and a backward pass for every gate."""
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


def _logit_norms(subject: ScoringContext, batch: Batch) -> Tensor:
    """Return the l2 norm of each example's logits ``[batch]``, without padding."""
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


def starting_scores(subject: ScoringContext, name: Literal["his", "obs"]) -> Tensor:
    """Return scores ``[gates]`` that gates start from. They can be compared across layers: HIS normalised by layer, or the
    cost of removal by an optimal brain surgeon."""
    if name == "his":
        return normalise_by_layer(importance_of(subject).his, subject.gates.layer_index().cpu())
    with subject.at_rest():
        return _brain_surgeon(subject).cpu()


def importance_of(subject: ScoringContext, *, also: Callable[[Batch], None] | None = None) -> Importance:
    """Return HIS with its standard error, signed score and Fisher information, each ``[gates]`` on the CPU.

    Args:
        also: A function that is called with every batch, at rest.
    """
    gates = subject.gates
    importance = HeadImportance(gates.size).to(subject.device)
    with subject.at_rest():
        for batch in subject.batches():
            importance.update(head_gradients(gates, partial(subject.losses, batch)))
            if also is not None:
                also(batch)
    return Importance(*(score.cpu() for score in importance.compute()))


def importance_and_entropy(subject: ScoringContext) -> tuple[Importance, Tensor]:
    """Return the same and the mean normalised attention entropy ``[gates]`` on the CPU, in one pass."""
    gates, backbone = subject.gates, subject.backbone
    entropy = AttentionEntropy(gates.sites).to(subject.device)

    def observe(batch: Batch) -> None:
        with torch.no_grad(), observe_attention(backbone, gates.sites, [entropy], subject.valid_queries(batch)):
            subject.losses(batch)

    importance = importance_of(subject, also=observe)
    return importance, gates.to_gates(entropy.compute()).cpu()


def pass_of(raw: str) -> str:
    """Return the name of the pass of a raw score."""
    found = next((name for name, one in PASSES.items() if raw in one.raws), None)
    if found is None:
        names = [name for one in PASSES.values() for name in one.raws]
        raise GateError(f"unknown raw score {raw!r}; expected one of {', '.join(names)}")
    return found


Replacement = Literal["zero", "mean", "constants", "uniform"]
"""The output of a closed head: nothing, its mean, the constants of the lowest loss, or its output under uniform attention.

Means and constants are those of training data."""


class Replacements:
    """Replacements of closed heads of one dense model. Mean outputs are gathered once."""

    def __init__(self) -> None:
        self._means: list[Tensor] | None = None

    def use(self, subject: ScoringContext, replacement: Replacement, mask: Tensor) -> AbstractContextManager[None]:
        """Replace closed heads during a ``with`` block."""
        if replacement == "zero":
            return nullcontext()
        if replacement == "uniform":
            return uniform_replacement(subject.backbone, subject.gates)
        if replacement == "constants":
            constants = optimal_constants(subject, mask.unsqueeze(0), steps=32)
            return mean_replacement(subject.gates, [of_site[0] for of_site in constants])
        if self._means is None:
            self._means = mean_outputs(subject)
        return mean_replacement(subject.gates, self._means)
