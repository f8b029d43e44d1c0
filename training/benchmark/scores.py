"""Scores against plain passes over the same batch: exact HIS, all that one backward pass gives, and what attention says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from gates import AttentionConfidence, AttentionEntropy, HeadGates, head_gradients, observe_attention
from gates.scores.importance import gradient_rows, requiring_gradients
from gates.scores.taylor import output_weights
from training.benchmark.alternate import Work, alternate_shown
from training.benchmark.setting import Setting
from training.benchmark.size import Size


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each model and size."""
    return [_row(setting, kind, size) for kind in setting.kinds for size in setting.sizes]


def _row(setting: Setting, kind: str, size: Size) -> dict[str, Any]:
    times = alternate_shown(f"scores of the {kind}, {size}", passes(setting, kind, size), setting.on, setting.effort)
    return {
        "model": kind,
        "size": str(size),
        "backward_ms": asdict(times.milliseconds("backward")),
        "his_ms": asdict(times.milliseconds("his")),
        "his_ratio": asdict(times.ratio("his", "backward")),
        "least_ratio": asdict(times.ratio("least", "backward")),
        "his_over_least": asdict(times.ratio("his", "least")),
        "all_ratio": asdict(times.ratio("all", "backward")),
        "one_by_one_speedup": asdict(times.ratio("one by one", "his")) if size.batch > 1 else None,
        "attention_ratio": asdict(times.ratio("attention", "forward")),
    }


def passes(setting: Setting, kind: str, size: Size) -> dict[str, Work]:
    """Ways over one batch, all in evaluation mode:

    ``forward`` alone; ``backward``, the gradients of all weights; ``least``, without gates, back to the heads of the first
    layer and no further, which every gradient of heads has to go; ``his``, exactly for each example; ``one by one``, the same
    from a backward pass for each example; ``all``, every score that gradients give (HIS by example, token and batch, the Fisher
    information, Taylor scores of weights); ``attention``, entropy and confidence of every head in a forward pass.
    """
    model = setting.trained(kind).eval()
    batch = setting.batch_for(model, size, kind)
    gates = HeadGates(model)
    weights = output_weights(gates)

    def forward() -> Tensor:
        with torch.no_grad():
            return losses_of(model, batch)

    def backward() -> None:
        losses_of(model, batch).mean().backward()
        model.zero_grad()

    def least() -> None:
        with beginning_at(gates.sites[0].output) as leaves:
            torch.autograd.grad(losses_of(model, batch).sum(), leaves)

    def one_by_one() -> None:
        for index in range(size.batch):
            one = {name: tensor[index : index + 1] for name, tensor in batch.items()}
            head_gradients(gates, lambda one=one: losses_of(model, one), "batch")  # type: ignore[misc]

    def all_at_once() -> None:
        with requiring_gradients(weights):
            gradient_rows(gates, lambda: losses_of(model, batch), weights)

    work: dict[str, Work] = {
        "forward": forward,
        "backward": backward,
        "least": least,
        "his": lambda: head_scores(gates, batch),
        "all": all_at_once,
        "attention": lambda: attend(model, gates, batch),
    }
    return work | ({"one by one": one_by_one} if size.batch > 1 else {})


@contextmanager
def beginning_at(module: nn.Module) -> Iterator[list[Tensor]]:
    """Let the graph of a model begin at the inputs of one of its modules, which are handed out as they come."""
    leaves: list[Tensor] = []

    def begin(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves.append(args[0].detach().requires_grad_())
        return (leaves[-1], *args[1:])

    handle = module.register_forward_pre_hook(begin)
    try:
        yield leaves
    finally:
        handle.remove()


def head_scores(gates: HeadGates, batch: dict[str, Tensor]) -> Tensor:
    """What HIS is made of: gradients of each example, ``[batch, heads]``."""
    return head_gradients(gates, lambda: losses_of(gates.model, batch))


def attend(model: PreTrainedModel, gates: HeadGates, batch: dict[str, Tensor]) -> None:
    """A forward pass with entropy and confidence of every head."""
    metrics = [metric(gates.sites).to(batch["input_ids"].device) for metric in (AttentionEntropy, AttentionConfidence)]
    valid: dict[str, Tensor | None] = {site.kind: batch["attention_mask"].bool() for site in gates.sites}
    with torch.no_grad(), observe_attention(model, gates.sites, metrics, valid):
        losses_of(model, batch)


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of each example, ``[batch]``; of a text the mean over its tokens but the first."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"]
    if labels.dim() == 1:
        return cross_entropy(logits, labels, reduction="none")
    return cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").mean(1)
