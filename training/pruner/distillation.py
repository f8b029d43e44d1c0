"""Distillation: the pruned model learns from the dense one as well as from labels.

There are two terms, pure functions of the outputs of both models. One is the divergence of predictions (Hinton, Vinyals and
Dean 2015). The other is the distance of hidden states, layer by layer (Xia, Zhong and Chen 2022). The teacher is the model
itself before pruning.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from gates.errors import GateError
from gates.gating.head_gates import HeadGates


def logit_kl(student: Tensor, teacher: Tensor, *, valid: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """Return ``T^2 * KL(softmax(teacher / T) || softmax(student / T))``, the mean over examples or valid positions.

    The factor T^2 keeps the gradient's size independent of the temperature (Hinton et al. 2015, section 2.1).

    Args:
        student, teacher: The logits ``[..., classes]``; gradients reach the student alone.
        valid: Which of ``[...]`` count, the others being padding; None for all.
        temperature: The temperature T, above 0.

    Returns:
        A scalar, float32; 0 where nothing is valid.
    """
    target = log_softmax(teacher.detach().float() / temperature, dim=-1)
    divergence = (target.exp() * (target - log_softmax(student.float() / temperature, dim=-1))).sum(-1)
    return temperature**2 * _mean(divergence, valid)


def number_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared distance of predicted numbers ``[batch, 1]``; a scalar, float32."""
    return (student.float() - teacher.detach().float()).square().mean()


def hidden_mse(student: Sequence[Tensor], teacher: Sequence[Tensor], *, valid: Tensor | None = None) -> Tensor:
    """Return the squared distance of hidden states over the teacher's variance, the mean over valid positions and layers.

    Dividing by the variance gives every layer the same weight; 1 is what predicting each layer's mean state would give.

    Args:
        student, teacher: One ``[batch, position, hidden]`` per layer; gradients reach the student alone.
        valid: Which positions count, ``[batch, position]``; None for all.

    Returns:
        A scalar, float32.
    """
    layers = []
    for own, goal in zip(student, teacher, strict=True):
        goal = goal.detach().float()
        centre = _mean(goal.mean(-1), valid)
        variance = _mean((goal - centre).square().mean(-1), valid)
        layers.append(_mean((own.float() - goal).square().mean(-1), valid) / variance.clamp_min(1e-12))
    return torch.stack(layers).mean()


def _mean(values: Tensor, valid: Tensor | None) -> Tensor:
    if valid is None:
        return values.mean()
    weights = valid.to(values.dtype)
    return (values * weights).sum() / weights.sum().clamp_min(1.0)


@contextmanager
def recorded_outputs(model: nn.Module, *, hidden_states: bool) -> Iterator[list[Any]]:
    """Collect the outputs of a model's calls inside the block in a list.

    Args:
        hidden_states: Whether the outputs have the states of all its layers too.
    """
    outputs: list[Any] = []

    def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"output_hidden_states": True}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)

    handles = [model.register_forward_hook(keep)]
    if hidden_states:
        handles.append(model.register_forward_pre_hook(ask, with_kwargs=True))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def layer_states(output: Any, only_stack: str) -> dict[str, Sequence[Tensor]]:
    """Return the states after every layer in a model's output, by stack: ``encoder``, ``decoder`` or both.

    The states before the first layer, which depend on no head, are left out.

    Args:
        only_stack: The name of a stack that is the model's only one.

    Raises:
        GateError: If there are none.
    """
    names = {"encoder_hidden_states": "encoder", "decoder_hidden_states": "decoder", "hidden_states": only_stack}
    found = {stack: layers for name, stack in names.items() if (layers := getattr(output, name, None))}
    if not found:
        raise GateError(
            f"{type(output).__name__} has no hidden states to learn from; leave out --model.distil_hidden for this model"
        )
    return {stack: tuple(layers)[1:] for stack, layers in found.items()}


class Teacher:
    """A frozen copy of the model as it is now, without gates, in evaluation mode.

    It is no :class:`torch.nn.Module`, so that it is not among the parameters and the state of the module that holds it.

    Args:
        gates: The gates on the backbone; they are detached while it is copied, since copies of modules keep their hooks.
    """

    def __init__(self, backbone: nn.Module, gates: HeadGates) -> None:
        self.only_stack = gates.sites[0].kind  # without effect on models with two stacks
        was_attached = gates.is_attached
        gates.detach()
        try:
            self.model = copy.deepcopy(backbone).requires_grad_(False).eval()
        finally:
            if was_attached:
                gates.attach()
        for parameter in self.model.parameters():
            parameter.grad = None

    @torch.no_grad()
    def __call__(self, task: Any, batch: Mapping[str, Tensor], *, hidden_states: bool) -> tuple[Tensor, Any]:
        """Return the logits of a batch and the model's whole output, with hidden states if they are wanted."""
        with recorded_outputs(self.model, hidden_states=hidden_states) as outputs:
            logits = task.losses(self.model, batch)[1]
        return logits, outputs[-1]


def distillation_terms(
    teacher: Teacher,
    task: Any,
    batch: Mapping[str, Tensor],
    logits: Tensor,
    output: Any,
    *,
    temperature: float,
    hidden_states: bool,
) -> tuple[Tensor, Tensor]:
    """Return the divergence of logits, or the distance of predicted numbers, and the distance of hidden states for one batch,
    two scalars.

    Args:
        task: A task with ``losses`` and ``valid_queries``, like :class:`training.tasks.Classification`.
        batch: The batch, with ``labels``; those of -100 are no prediction.
        logits, output: The output of the student for it.
        hidden_states: Whether to compare hidden states; otherwise their distance is 0.
    """
    taught, shown = teacher(task, batch, hidden_states=hidden_states)
    labels = batch["labels"]
    valid = labels != -100 if labels.shape == logits.shape[:-1] else None
    if labels.is_floating_point():
        kl = number_mse(logits, taught)
    else:
        kl = logit_kl(logits, taught, valid=valid, temperature=temperature)
    if not hidden_states:
        return kl, torch.zeros_like(kl)
    queries = task.valid_queries(batch)
    own, goals = (layer_states(states, teacher.only_stack) for states in (output, shown))
    distances = [hidden_mse(own[stack], goals[stack], valid=queries[stack]) for stack in own]
    return kl, torch.stack(distances).mean()
