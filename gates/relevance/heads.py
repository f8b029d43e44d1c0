"""Compute the relevance of attention heads for a model's predictions.

A head's relevance for a prediction is the sum of its output's relevances over tokens and features. The output is that of the
gate, before the output projection. The sum is divided by the sum of the absolute values of its layer, and averaged over
predictions. Voita et al. 2019 divide by the plain sum over the layer. Their rules rescale relevances, so this sum does not
vanish; AttnLRP does not rescale.
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

FAMILIES = (
    "albert", "bart", "bert", "camembert", "deberta-v2", "deit", "distilbert", "electra", "gemma", "gemma2", "gpt2", "gpt_neox",
    "llama", "marian", "mbart", "mistral", "modernbert", "mpnet", "mt5", "opt", "phi3", "qwen2", "qwen3", "roberta", "t5",
    "vit", "xlm-roberta",
)  # fmt: skip
"""The values of ``model_type`` for which the conservation of relevance is tested."""


def check_family(model: nn.Module) -> None:
    """Raise an error for a model of another family or in half precision."""
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in FAMILIES:
        raise GateError(
            f"relevance does not support models of type {family!r}, but only {', '.join(FAMILIES)}; rank heads by another "
            "score, such as his"
        )
    half = {parameter.dtype for parameter in model.parameters()} & {torch.float16, torch.bfloat16}
    if half:
        raise GateError(
            f"the model has weights in {half.pop()}, which is too imprecise for relevance; use model.float(), or rank heads "
            "by another score, such as his"
        )


class Shares(NamedTuple):
    """Hold mean shares of heads in the relevance of their layers."""

    absolute: Tensor  # The shares of absolute values, ``[heads]``, which sum to one in each layer
    signed: Tensor  # The shares with the sign of each prediction's relevance, ``[heads]``


class RelevanceShares(HeadMetric):
    """Stream rows of relevance into :class:`Shares`, exactly for any batching and under DDP.

    Args:
        layer_index: The index of the site of every head, ``[heads]``.

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
        self.add_sums(absolute=[len(layer_index)], signed=[len(layer_index)])
        self.add_state("predictions", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, rows: Tensor) -> None:
        """Add relevances ``[predictions, heads]`` from :func:`head_steps`."""
        shares = layer_shares(rows.double(), self.layer_index)
        self.absolute += shares.abs().sum(0)
        self.signed += shares.sum(0)
        self.predictions += len(rows)

    def compute(self) -> Shares:
        return Shares(self.absolute / self.predictions, self.signed / self.predictions)


def layer_shares(rows: Tensor, layer_index: Tensor) -> Tensor:
    """Divide relevances ``[predictions, heads]`` by their layer's sum of absolute values; a layer of zeros stays zero."""
    sums = rows.new_zeros(len(rows), int(layer_index.max()) + 1).index_add(1, layer_index, rows.abs())[:, layer_index]
    return torch.where(sums > 0, rows / sums.clamp(min=torch.finfo(rows.dtype).tiny), 0.0)


def head_layers(sites: tuple[AttentionSite, ...]) -> Tensor:
    """Return the index of each head's site, ``[heads]``."""
    return torch.arange(len(sites)).repeat_interleave(torch.tensor([site.heads for site in sites]))


@dataclass(frozen=True)
class Predictions:
    """Hold the logits of a model's predictions."""

    logits: Tensor  # The logits, ``[batch, steps]``, in the graph of the forward pass
    counted: Tensor  # Whether each step is a prediction, bool ``[batch, steps]``. Steps after the end of a text are not.


Target = Callable[[nn.Module, Mapping[str, Tensor], Any], Predictions]
"""A function from a model, its inputs and its output to predictions."""


def top_logits(model: nn.Module, inputs: Mapping[str, Tensor], output: Any) -> Predictions:
    """Return the largest logit of every prediction.

    Predictions are a classifier's class, a causal decoder's next token, and every token of an encoder-decoder's text.

    Args:
        inputs: The inputs of its call. ``attention_mask`` marks the end of texts, and ``decoder_attention_mask`` the counted
            steps of a decoder (default: all).
    """
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
        raise GateError(
            f"{type(model).__name__} returns no logits of classes or tokens; use a model with a head, or a target function"
        )
    if logits.dim() == 2:
        return Predictions(logits.amax(-1, keepdim=True), torch.ones_like(logits[:, :1], dtype=torch.bool))
    config: Any = model.config
    if config.is_encoder_decoder:
        counted = inputs.get("decoder_attention_mask", torch.ones(logits.shape[:2], device=logits.device))
        return Predictions(logits.amax(-1), counted.bool())
    if not (isinstance(model, PreTrainedModel) and model.can_generate()):
        raise GateError(
            f"{type(model).__name__} predicts tokens in the middle of texts, so it has no single prediction; give a target "
            "function"
        )
    mask = inputs.get("attention_mask", torch.ones(logits.shape[:2], device=logits.device))
    last = (mask * torch.arange(1, 1 + mask.shape[1], device=mask.device)).argmax(-1)
    found = logits[torch.arange(len(last), device=last.device), last].amax(-1, keepdim=True)
    return Predictions(found, torch.ones_like(found, dtype=torch.bool))


def writes(model: PreTrainedModel) -> bool:
    """Return whether a model is an encoder-decoder that writes a text, and so predicts every token."""
    return bool(model.config.is_encoder_decoder) and model.can_generate()


@torch.no_grad()
def with_written_text(model: PreTrainedModel, inputs: Mapping[str, Tensor], *, max_new_tokens: int) -> dict[str, Tensor]:
    """Return an encoder-decoder's inputs with the text that it generates for them by greedy search."""
    ids = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens)  # type: ignore[operator]
    return with_text(model, inputs, ids)


def with_text(model: PreTrainedModel, inputs: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Return an encoder-decoder's inputs with a text, whose tokens the decoder predicts all at once.

    Args:
        model: The model. Its generation config has the end tokens.
        ids: The text, ``[batch, 1 + tokens]``, from the decoder's start token on. Tokens after the first end are padding.
    """
    config = model.generation_config
    ends = torch.tensor([] if config is None or config.eos_token_id is None else config.eos_token_id, device=ids.device)
    ended = torch.isin(ids[:, 1:-1], ends.flatten()).cumsum(-1) > 0
    counted = torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ~ended], dim=-1)
    return {**inputs, "decoder_input_ids": ids[:, :-1], "decoder_attention_mask": counted.long()}


@dataclass(frozen=True)
class Step:
    """Hold the result of one backward pass from one prediction of each example that has one."""

    rows: Tensor  # The relevance of every head, ``[predictions, heads]``, float64, in site order
    logit: float  # The sum of the predictions' logits
    inputs: float  # The relevance that arrived at the embeddings, or at an image's pixels; 0 without rules
    # The relevance that the rules absorbed, by ``bias``, ``softmax`` and ``epsilon``. Empty without rules.
    absorbed: dict[str, float]

    @property
    def error(self) -> float:
        """Return the difference between the logit and all propagated or absorbed relevance."""
        return abs(self.inputs + sum(self.absorbed.values()) - self.logit)


def head_steps(
    model: nn.Module,
    sites: tuple[AttentionSite, ...],
    inputs: Mapping[str, Tensor],
    *,
    target: Target = top_logits,
    epsilon: float | None = EPSILON,
) -> Iterator[Step]:
    """Run one forward pass, and yield the result of one backward pass for every step of its predictions.

    Args:
        inputs: The inputs by name, with the text for an encoder-decoder that writes.
        epsilon: The epsilon of the rules; None for plain gradients without rules.
    """
    if epsilon is not None:
        check_family(model)
    inputs = {name: _leaf(name, tensor) for name, tensor in inputs.items()}
    settings = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
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
        output = model(**inputs, **settings)
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
        if not result.error <= 1e-3 * size:
            raise GateError(
                f"relevance is not conserved in {type(model).__name__}: the logits are {result.logit:.4g}, but relevance sums "
                f"to {result.inputs + sum(kept.values()):.4g}; rank heads by another score, such as his"
            )
    return result


def _leaf(name: str, tensor: Tensor) -> Tensor:
    """Return floating-point inputs, such as pixels, as leaves that require gradients; masks and tokens are unchanged."""
    is_input = tensor.is_floating_point() and not name.endswith("mask")
    return tensor.detach().clone().requires_grad_() if is_input else tensor


def _check(model: nn.Module, sites: tuple[AttentionSite, ...], outputs: list[tuple[int, Tensor]], found: Predictions) -> None:
    ran = {site for site, _ in outputs}
    missing = next((site.name for index, site in enumerate(sites) if index not in ran), None)
    if missing is not None:
        raise GateError(
            f"the prediction does not use the attention at {missing!r}, so its heads have no relevance; use another model"
        )
    if found.logits.shape != found.counted.shape or found.logits.dim() != 2 or not found.logits.requires_grad:
        raise GateError(
            f"the target returns logits {list(found.logits.shape)} and counts {list(found.counted.shape)}; expected both as "
            "[batch, steps], and logits that require gradients"
        )
    if not bool(found.logits[found.counted].isfinite().all()):
        raise GateError("a predicted logit is not finite; look for infinite weights or inputs")
    examples = len(found.logits)
    for site, tensor in outputs:
        if len(tensor) != examples:
            raise GateError(
                f"the attention at {sites[site].name!r} of {type(model).__name__} does not keep examples on the first axis; "
                "rank heads by another score, such as his"
            )


class Gated(Protocol):
    """Describe a model with gates, such as :class:`gates.model.GatedModel`."""

    gates: HeadGates


def head_relevance(
    model: PreTrainedModel | HeadGates | Gated,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    target: Target = top_logits,
    signed: bool = False,
    epsilon: float | None = EPSILON,
    max_new_tokens: int = 64,
) -> Tensor:
    """Return the relevance of every head for a model's predictions, by layer-wise relevance propagation.

    Args:
        model: A Transformers model of one of :data:`gates.relevance.heads.FAMILIES`, or a model with gates in evaluation mode.
        batches: The model's inputs by name; labels are ignored. An encoder-decoder generates its own text, unless
            ``decoder_input_ids`` are given.
        target: The function that selects the predictions. Default: the largest logit of each prediction.
        signed: Whether a head that lowers the logit has a negative share.
        epsilon: The epsilon of the rules; None for plain gradients without rules.
        max_new_tokens: The length limit of the text that an encoder-decoder generates.

    Returns:
        The mean share of each head in its layer, ``[heads]``, float64, in site order.

    Raises:
        GateError: For another family, half precision, a model without predictions, or relevance that is not conserved.

    >>> import torch
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> model = BertForSequenceClassification(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> shares = head_relevance(model, [{"input_ids": torch.randint(50, (3, 7))}])
    >>> [round(float(layer.sum()), 6) for layer in shares.split(4)]
    [1.0, 1.0]
    """
    network, sites = _network(model)
    shares = RelevanceShares(head_layers(sites)).to(network.device)
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        if writes(network) and "decoder_input_ids" not in inputs:
            with evaluating(network, *gates_on(sites)):
                inputs = with_written_text(network, inputs, max_new_tokens=max_new_tokens)
        for step in head_steps(network, sites, inputs, target=target, epsilon=epsilon):
            shares.update(step.rows)
    if shares.predictions == 0:
        raise GateError("there are no predictions; give at least one batch with an example")
    found = shares.compute()
    return found.signed if signed else found.absolute


def gradient_times_input(
    model: PreTrainedModel | HeadGates | Gated,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    target: Target = top_logits,
    signed: bool = False,
    max_new_tokens: int = 64,
) -> Tensor:
    """Return shares from plain gradients, for models of any family: each head's output times the gradient of the logit.

    Args:
        model, batches, target, signed, max_new_tokens: The arguments of :func:`head_relevance`.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4))
    >>> gradient_times_input(model, [{"input_ids": torch.randint(50, (3, 7))}]).shape
    torch.Size([8])
    """
    return head_relevance(model, batches, target=target, signed=signed, epsilon=None, max_new_tokens=max_new_tokens)


def _network(model: PreTrainedModel | HeadGates | Gated) -> tuple[PreTrainedModel, tuple[AttentionSite, ...]]:
    """Return the Transformers model and its attention sites."""
    gates = model if isinstance(model, HeadGates) else getattr(model, "gates", None)
    if isinstance(gates, HeadGates):
        return gates.model, gates.sites  # type: ignore[return-value]
    assert isinstance(model, PreTrainedModel)
    return model, find_attention(model)
