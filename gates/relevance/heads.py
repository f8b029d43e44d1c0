"""Relevance of attention heads: how much of what a model predicts comes through each of them.

A head's relevance for a prediction is the sum of its output's relevances over tokens and features, taken where its gate sits,
in front of the output projection. It is divided by the sum over its layer of the heads' absolute values, and averaged over
predictions. Voita et al. 2019 divide by the plain sum over the layer. The rules of their code rescale relevances, so that this
sum does not vanish; those of AttnLRP do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.evaluating import evaluating
from gates.hooks.output_hooks import gates_on
from gates.relevance.propagation import head_steps
from gates.relevance.rules import EPSILON
from gates.relevance.shares import RelevanceShares, head_layers
from gates.relevance.targets import Target, top_logits, with_written_text, writes
from gates.sites import AttentionSite, find_attention


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
        model: Transformers model of one of :data:`gates.relevance.families.FAMILIES`, or one with gates, which have the values
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
