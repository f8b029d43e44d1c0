"""Relevance of attention heads: how much of what a model predicts comes through each of them.

A head's relevance for a prediction is the sum of its output's relevances over tokens and features, taken where its gate sits,
in front of the output projection. It is divided by the sum over its layer of the heads' absolute values, and averaged over
predictions. Voita et al. 2019 divide by the plain sum over the layer. The rules of their code rescale relevances, so that this
sum does not vanish; those of AttnLRP do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.attention.intercept import observe_head_outputs
from gates.attention.modes import evaluating, frozen
from gates.attention.output_hooks import gates_on
from gates.attention.sites import AttentionSite, check_width, find_attention
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.relevance.rules import EPSILON, RelevanceGraph, following_rules
from gates.scores.metric import HeadMetric

# For which families relevance is claimed: those on which its conservation is tested.

FAMILIES = (
    "albert", "bart", "bert", "camembert", "deberta-v2", "deit", "distilbert", "electra", "gemma", "gemma2", "gpt2", "gpt_neox",
    "llama", "marian", "mbart", "mistral", "modernbert", "mpnet", "mt5", "opt", "phi3", "qwen2", "qwen3", "roberta", "t5",
    "vit", "xlm-roberta",
)  # fmt: skip
"""By ``model_type`` of the config."""


def check_family(model: nn.Module) -> None:
    """Whether relevance is claimed for a model."""
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in FAMILIES:
        raise GateError(
            f"no relevance is claimed for models of type {family!r}: its conservation is tested on {', '.join(FAMILIES)} only; "
            "rank heads by another score, such as his"
        )
    half = {parameter.dtype for parameter in model.parameters()} & {torch.float16, torch.bfloat16}
    if half:
        raise GateError(
            f"the model has weights in {half.pop()}, in which relevance is lost to rounding; use model.float(), or rank heads "
            "by another score, such as his"
        )


# Shares of heads in the relevance of their layers, streamed over predictions.


class Shares(NamedTuple):
    """Mean shares of heads in the relevance of their layers.

    Args:
        absolute: of absolute values, ``[heads]``; those of a layer sum to one.
        signed: the same with the sign of each prediction's relevance, ``[heads]``.
    """

    absolute: Tensor
    signed: Tensor


class RelevanceShares(HeadMetric):
    """Streams rows of relevance into :class:`Shares`; exact for any batching and under DDP.

    Args:
        layer_index: index of the site of every head, ``[heads]``.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> shares = RelevanceShares(torch.tensor([0, 0]))
    >>> shares.update(torch.tensor([[1.0, -3.0], [2.0, 0.0]]))  # two predictions
    >>> shares.compute().absolute.tolist(), shares.compute().signed.tolist()
    ([0.625, 0.375], [0.625, -0.375])
    """

    absolute: Tensor
    signed: Tensor
    predictions: Tensor
    layer_index: Tensor

    def __init__(self, layer_index: Tensor, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("layer_index", layer_index, persistent=False)
        for name in ("absolute", "signed"):
            self.add_state(name, torch.zeros(len(layer_index), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("predictions", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, rows: Tensor) -> None:
        """Add relevances ``[predictions, heads]`` as :func:`head_steps` gives them."""
        shares = layer_shares(rows.double(), self.layer_index)
        self.absolute += shares.abs().sum(0)
        self.signed += shares.sum(0)
        self.predictions += len(rows)

    def compute(self) -> Shares:
        return Shares(self.absolute / self.predictions, self.signed / self.predictions)


def layer_shares(rows: Tensor, layer_index: Tensor) -> Tensor:
    """Relevances ``[predictions, heads]`` divided by their layer's sum of absolute values; a layer of zeros stays zero."""
    sums = rows.new_zeros(len(rows), int(layer_index.max()) + 1).index_add(1, layer_index, rows.abs())[:, layer_index]
    return torch.where(sums > 0, rows / sums.clamp(min=torch.finfo(rows.dtype).tiny), 0.0)


def head_layers(sites: tuple[AttentionSite, ...]) -> Tensor:
    """The index of each head's site, ``[heads]``."""
    return torch.arange(len(sites)).repeat_interleave(torch.tensor([site.heads for site in sites]))


# What relevance is propagated from: the logit of what a model predicts.


@dataclass(frozen=True)
class Predictions:
    """Logits that a model's predictions rest on.

    Args:
        logits: ``[batch, steps]``, in the graph of the forward pass.
        counted: whether each is a prediction, bool ``[batch, steps]``; steps behind the end of a text are none.
    """

    logits: Tensor
    counted: Tensor


Target = Callable[[nn.Module, Mapping[str, Tensor], Any], Predictions]
"""From a model, its inputs and its output to predictions."""


def top_logits(model: nn.Module, inputs: Mapping[str, Tensor], output: Any) -> Predictions:
    """The largest logit of every prediction: a classifier's class, a causal decoder's next token behind the last one, and every
    token of an encoder-decoder's text.

    Args:
        inputs: that it was called with; ``attention_mask`` says where texts end, and ``decoder_attention_mask`` which steps of
            a decoder count (all by default).
    """
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
        raise GateError(
            f"{type(model).__name__} gives no logits of classes or tokens; use a model with a head, or give a target function"
        )
    if logits.dim() == 2:
        return Predictions(logits.amax(-1, keepdim=True), torch.ones_like(logits[:, :1], dtype=torch.bool))
    config: Any = model.config
    if config.is_encoder_decoder:
        counted = inputs.get("decoder_attention_mask", torch.ones(logits.shape[:2], device=logits.device))
        return Predictions(logits.amax(-1), counted.bool())
    if not (isinstance(model, PreTrainedModel) and model.can_generate()):
        raise GateError(
            f"{type(model).__name__} predicts tokens in the middle of texts, so that it has no one prediction; give a target "
            "function"
        )
    mask = inputs.get("attention_mask", torch.ones(logits.shape[:2], device=logits.device))
    last = (mask * torch.arange(1, 1 + mask.shape[1], device=mask.device)).argmax(-1)
    found = logits[torch.arange(len(last), device=last.device), last].amax(-1, keepdim=True)
    return Predictions(found, torch.ones_like(found, dtype=torch.bool))


def writes(model: PreTrainedModel) -> bool:
    """Whether a model is an encoder-decoder that writes a text, so that there is a prediction for every token."""
    return bool(model.config.is_encoder_decoder) and model.can_generate()


@torch.no_grad()
def with_written_text(model: PreTrainedModel, inputs: Mapping[str, Tensor], *, max_new_tokens: int) -> dict[str, Tensor]:
    """An encoder-decoder's inputs with the text that it writes for them by greedy search."""
    ids = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens)  # type: ignore[operator]
    return with_text(model, inputs, ids)


def with_text(model: PreTrainedModel, inputs: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """An encoder-decoder's inputs with a text, so that the decoder predicts all its tokens at once, each from those before it.

    Args:
        model: whose generation config says which token ends a text.
        ids: of the text, ``[batch, 1 + tokens]``, beginning with the decoder's start token. What comes behind the first end is
            padding.
    """
    config = model.generation_config
    ends = torch.tensor([] if config is None or config.eos_token_id is None else config.eos_token_id, device=ids.device)
    ended = torch.isin(ids[:, 1:-1], ends.flatten()).cumsum(-1) > 0
    counted = torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ~ended], dim=-1)
    return {**inputs, "decoder_input_ids": ids[:, :-1], "decoder_attention_mask": counted.long()}


# Relevance, or activation times gradient, of the heads' outputs for each prediction of a batch.

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
        inputs: of the model by name, with the text where it is an encoder-decoder that writes.
        epsilon: of the epsilon rule; None for plain gradients, without rules.
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


class Gated(Protocol):
    """A model with its gates, such as :class:`gates.model.GatedModel`."""

    gates: HeadGates


def head_relevance(
    model: PreTrainedModel | HeadGates | Gated,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    target: Target = top_logits,
    signed: bool = False,
    epsilon: float = EPSILON,
    max_new_tokens: int = 64,
) -> Tensor:
    """Relevance of every head for what a model predicts, by layer-wise relevance propagation.

    Args:
        model: Transformers model of one of :data:`gates.relevance.heads.FAMILIES`, or one with gates, which have the values
            of their evaluation mode.
        batches: the model's inputs by name; labels are left out. An encoder-decoder writes its own text, unless
            ``decoder_input_ids`` are given.
        target: what is predicted; by default the largest logit of each prediction.
        signed: whether a head that speaks against the prediction has a negative share.
        epsilon: of the epsilon rule.
        max_new_tokens: longest text that an encoder-decoder writes.

    Returns:
        Mean share of each head in its layer, ``[heads]``, float64, in site order.

    Raises:
        GateError: for another family, half precision, a model without predictions, or relevance that is not conserved.

    >>> import torch
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> model = BertForSequenceClassification(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> shares = head_relevance(model, [{"input_ids": torch.randint(50, (3, 7))}])
    >>> [round(float(layer.sum()), 6) for layer in shares.split(4)]
    [1.0, 1.0]
    """
    return _shares(model, batches, target, signed, epsilon, max_new_tokens)


def gradient_times_input(
    model: PreTrainedModel | HeadGates | Gated,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    target: Target = top_logits,
    signed: bool = False,
    max_new_tokens: int = 64,
) -> Tensor:
    """The same from plain gradients: each head's output times the gradient of the logit by it, for models of any family.

    Args:
        model, batches, target, signed, max_new_tokens: see :func:`head_relevance`.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4))
    >>> gradient_times_input(model, [{"input_ids": torch.randint(50, (3, 7))}]).shape
    torch.Size([8])
    """
    return _shares(model, batches, target, signed, None, max_new_tokens)


def _shares(
    model: PreTrainedModel | HeadGates | Gated,
    batches: Iterable[Mapping[str, Tensor]],
    target: Target,
    signed: bool,
    epsilon: float | None,
    longest: int,
) -> Tensor:
    network, sites = _network(model)
    shares = RelevanceShares(head_layers(sites)).to(network.device)
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        if writes(network) and "decoder_input_ids" not in inputs:
            with evaluating(network, *gates_on(sites)):
                inputs = with_written_text(network, inputs, max_new_tokens=longest)
        for step in head_steps(network, sites, inputs, target=target, epsilon=epsilon):
            shares.update(step.rows)
    if shares.predictions == 0:
        raise GateError("there are no predictions to propagate relevance from; give at least one batch with an example")
    found = shares.compute()
    return found.signed if signed else found.absolute


def _network(model: PreTrainedModel | HeadGates | Gated) -> tuple[PreTrainedModel, tuple[AttentionSite, ...]]:
    """A model without what is around it, and its attention sites."""
    gates = model if isinstance(model, HeadGates) else getattr(model, "gates", None)
    if isinstance(gates, HeadGates):
        return gates.model, gates.sites  # type: ignore[return-value]
    assert isinstance(model, PreTrainedModel)
    return model, find_attention(model)
