"""Relevance, or activation times gradient, of the heads' outputs for each prediction of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gates.errors import GateError
from gates.hooks.frozen import frozen
from gates.hooks.intercept import observe_head_outputs
from gates.hooks.output_hooks import gates_on
from gates.relevance.families import check_family
from gates.relevance.operations import RelevanceGraph, following_rules
from gates.relevance.rules import EPSILON
from gates.relevance.targets import Predictions, Target, top_logits
from gates.sites import AttentionSite, check_width

CONSERVED = 1e-3
"""How far, relative to all relevances together, their sum may be from the logit before the result is refused."""


@dataclass(frozen=True)
class Step:
    """One backward pass from one prediction of each example that has one.

    Args:
        rows: relevance of every head, ``[predictions, heads]``, float64, in site order.
        logit: sum of the predictions' logits.
        inputs: relevance that arrived at the embeddings, or at an image's pixels; 0 without rules.
        absorbed: what the rules kept, by :data:`gates.relevance.rules.ABSORBERS`; empty without rules.
    """

    rows: Tensor
    logit: float
    inputs: float
    absorbed: dict[str, float]

    @property
    def error(self) -> float:
        """What is missing between the logit and all that was handed on or kept."""
        return abs(self.inputs + sum(self.absorbed.values()) - self.logit)


def head_steps(
    model: nn.Module,
    sites: tuple[AttentionSite, ...],
    inputs: Mapping[str, Tensor],
    *,
    target: Target = top_logits,
    epsilon: float | None = EPSILON,
) -> Iterator[Step]:
    """One forward pass, and one backward pass for every step of its predictions.

    Args:
        model: Transformers model.
        sites: attention modules of the model.
        inputs: of the model by name, with the text where it is an encoder-decoder that writes.
        target: what is predicted.
        epsilon: of the epsilon rule; None for plain gradients, without rules.

    Raises:
        GateError: see :func:`head_relevance`.
    """
    if epsilon is not None:
        check_family(model)
    inputs = {name: _leaf(name, tensor) for name, tensor in inputs.items()}
    outputs: list[tuple[int, Tensor]] = []

    def take(site: int, heads: Tensor) -> None:
        check_width(sites[site], heads)
        outputs.append((site, heads if heads.requires_grad else heads.requires_grad_()))

    rules: AbstractContextManager[RelevanceGraph | None] = nullcontext()
    if epsilon is not None:
        rules = following_rules(model, sites, epsilon=epsilon)
    with (
        frozen(model, *gates_on(sites)),
        torch.enable_grad(),
        observe_head_outputs(model, sites, take),
        rules as graph,
    ):
        output = model(**inputs, **_without_cache(model))
    found = target(model, inputs, output)
    _check(model, sites, outputs, found)
    steps = [step for step in range(found.logits.shape[1]) if bool(found.counted[:, step].any())]
    for step in steps:
        yield _back(model, sites, outputs, found, step, graph, inputs, keep=step != steps[-1])


def _back(
    model: nn.Module,
    sites: tuple[AttentionSite, ...],
    outputs: list[tuple[int, Tensor]],
    found: Predictions,
    step: int,
    graph: RelevanceGraph | None,
    inputs: Mapping[str, Tensor],
    *,
    keep: bool,
) -> Step:
    """The backward pass of one step."""
    counted = found.counted[:, step]
    logit = found.logits[counted, step].sum()
    heads = [tensor for _, tensor in outputs]
    leaves = [] if graph is None else [*graph.inputs, *(tensor for tensor in inputs.values() if tensor.requires_grad)]
    if graph is not None:
        graph.rules.clear()
    gradients = torch.autograd.grad(logit, [*heads, *leaves], retain_graph=keep, materialize_grads=True)
    by_site = [torch.zeros(len(counted), site.heads, dtype=torch.float64, device=logit.device) for site in sites]
    for (site, tensor), gradient in zip(outputs, gradients, strict=False):
        products = (tensor.detach() * gradient).double().unflatten(-1, (sites[site].heads, -1)).sum(-1)
        by_site[site] += products.flatten(1, -2).sum(1)
    arrived = [leaf.detach() * gradient for leaf, gradient in zip(leaves, gradients[len(heads) :], strict=True)]
    kept = {} if graph is None else {name: float(value) for name, value in graph.rules.absorbed.items()}
    result = Step(
        torch.cat(by_site, dim=1)[counted],
        float(logit.detach()),
        sum(float(part.sum(dtype=torch.float64)) for part in arrived),
        kept,
    )
    if graph is not None:
        size = abs(result.logit) + sum(float(part.abs().sum()) for part in arrived) + sum(map(abs, kept.values()))
        if not result.error <= CONSERVED * size:
            raise GateError(
                f"relevance is not conserved in {type(model).__name__}: the logits are {result.logit:.4g}, and "
                f"{result.inputs + sum(kept.values()):.4g} of them was found again; rank heads by another score, such as his"
            )
    return result


def _leaf(name: str, tensor: Tensor) -> Tensor:
    """Pixels and other numbers that relevance is to arrive at; masks and tokens stay as they are."""
    is_input = tensor.is_floating_point() and not name.endswith("mask")
    return tensor.detach().clone().requires_grad_() if is_input else tensor


def _without_cache(model: nn.Module) -> dict[str, bool]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _check(model: nn.Module, sites: tuple[AttentionSite, ...], outputs: list[tuple[int, Tensor]], found: Predictions) -> None:
    ran = {site for site, _ in outputs}
    missing = next((site.name for index, site in enumerate(sites) if index not in ran), None)
    if missing is not None:
        raise GateError(f"the prediction does not run through the attention at {missing!r}, so its heads have no relevance")
    if found.logits.shape != found.counted.shape or found.logits.dim() != 2 or not found.logits.requires_grad:
        raise GateError(
            f"the target gives logits {list(found.logits.shape)} and counts {list(found.counted.shape)}; expected both as "
            "[batch, steps], the logits with a gradient"
        )
    if not bool(found.logits[found.counted].isfinite().all()):
        raise GateError("a predicted logit is not finite, so no head has a relevance; look for infinite weights or inputs")
    examples = len(found.logits)
    for site, tensor in outputs:
        if len(tensor) != examples:
            raise GateError(
                f"the attention at {sites[site].name!r} of {type(model).__name__} does not keep examples on the first axis, so "
                "no head has a relevance for each prediction; rank heads by another score, such as his"
            )
