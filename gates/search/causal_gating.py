"""Find the effect of each head on a task by two fits of all gates on frozen weights (Causal Head Gating; Nam et al. 2025).

One fit pays a price for every open head, the other receives a reward. A head that stays open at a price is *facilitating*: the
task needs it. A head that stays closed despite the reward is *interfering*: it harms the task. A head that follows the price
is *irrelevant*.

The gates are Hard-Concrete with a price on their expected number. The paper uses sigmoids with a price on their logits. As in
the paper, both fits continue a fit without a price from a random start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from gates.attention.examples import count_examples
from gates.attention.intercept import alone, observing
from gates.attention.modes import frozen
from gates.errors import GateError
from gates.gating.hard_concrete import HardConcrete
from gates.gating.head_gates import HeadGates
from gates.gating.price import l0_penalty

ROLES = ("facilitating", "irrelevant", "interfering")
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class CausalRoles:
    """Hold the final gates of both fits for several seeds."""

    with_price: Tensor  # The gates of the fits with a price, ``[seeds, gates]``, from 0 to 1
    with_reward: Tensor  # The gates of the fits with a reward, ``[seeds, gates]``

    def scores(self) -> Tensor:
        """Return the score of each of :data:`ROLES` for each gate and seed, ``[seeds, gates, 3]``: open despite the price;
        open only for the reward; closed despite the reward."""
        return torch.stack([self.with_price, self.with_reward * (1 - self.with_price), 1 - self.with_reward], dim=-1)

    def roles(self) -> Tensor:
        """Return the index in :data:`ROLES` of each gate's role, ``[gates]``, which has the highest mean score over seeds."""
        return self.scores().mean(0).argmax(-1)

    def agreement(self) -> Tensor:
        """Return the share of seeds that agree with the role of all seeds, ``[gates]``."""
        return (self.scores().argmax(-1) == self.roles()).double().mean(0)

    def names(self) -> list[str]:
        """Return the name of each gate's role."""
        return [ROLES[role] for role in self.roles().tolist()]


def causal_roles(
    gates: HeadGates,
    batches: Sequence[Batch],
    losses: Callable[[Batch], Tensor],
    *,
    price: float = 0.01,
    steps: int = 100,
    learning_rate: float = 0.2,
    seeds: Sequence[int] = (0, 1, 2),
    advance: Callable[[], None] = lambda: None,
) -> CausalRoles:
    """Fit all gates with a price and with a reward for each seed, without changing weights or gates.

    Args:
        gates: The gates of a model.
        batches: The model's inputs, which each fit repeats in an order drawn from its seed.
        losses: A function that runs the model on a batch and returns per-example losses ``[examples]``.
        price: The price of an open gate in units of the loss, and its reward in the other fit. A head that changes the loss by
            less is irrelevant.
        steps: The optimiser steps of each of a seed's three fits: without a price, with a price, and with a reward.
        learning_rate: The learning rate of Adam for ``log_alpha``.
        seeds: The seeds of the start, the order of batches and the gates' draws.
        advance: A function called after every step to show progress.

    Raises:
        GateError: Without batches or seeds, or if price, steps or learning rate are not above 0.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> model = BertForSequenceClassification(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> batch = {"input_ids": torch.randint(50, (3, 7))}
    >>> def losses(batch):
    ...     return torch.nn.functional.cross_entropy(model(**batch).logits, torch.tensor([0, 1, 0]), reduction="none")
    >>> len(causal_roles(HeadGates(model), [batch], losses, steps=2).names())
    8
    """
    for name, value in (("price", price), ("steps", steps), ("learning_rate", learning_rate)):
        if not value > 0:
            raise GateError(f"{name} is {value}; expected a number above 0")
    if not batches or not seeds:
        raise GateError("causal roles need at least one batch and one seed; none is given")

    def fit(price: float, start: Tensor, seed: int) -> HardConcrete:
        """Return gates after a fit from a ``log_alpha`` with a price, or with a reward if it is below 0."""
        learned = HardConcrete(gates.size).to(start.device)
        learned.log_alpha.data.copy_(start)
        optimizer = torch.optim.Adam([learned.log_alpha], lr=learning_rate)
        generator = torch.Generator(start.device).manual_seed(seed)
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed)).tolist()
        for index in islice(cycle(order), steps):
            values = learned(generator, draws=count_examples(batches[index]))
            with gates.use(values):
                loss = losses(batches[index]).mean()
            (loss + l0_penalty(learned.open_probability(), price)).backward()
            optimizer.step()
            optimizer.zero_grad()
            learned.clamp_()
            advance()
        return learned.eval()

    with_price, with_reward = [], []
    with alone(gates.model), gates.attached(), observing(gates.model, gates.sites), frozen(gates.model), torch.enable_grad():
        for seed in seeds:
            drawn = torch.randn(gates.size, generator=torch.Generator().manual_seed(seed)).to(gates.mask)
            start = fit(0.0, drawn, seed).log_alpha.detach()
            with_price.append(fit(price, start, seed)().detach().cpu())
            with_reward.append(fit(-price, start, seed)().detach().cpu())
    return CausalRoles(torch.stack(with_price), torch.stack(with_reward))
