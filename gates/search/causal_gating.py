"""What each head does to a task, by two fits of all gates on frozen weights (Causal Head Gating; Nam et al. 2025).

One fit pays a price for every open head, the other receives it as a reward. A head that stays open although it costs is
*facilitating*: without it the task suffers. One that stays closed although open ones are rewarded is *interfering*: the task is
better off without it. One that goes wherever the price goes is *irrelevant*.

Gates here are Hard-Concrete and the price is on their expected number, as wherever this library learns gates. The paper's are
sigmoids with a price on their logits. As there, both fits go on from one without a price, from a random start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from gates.attention.examples import count_examples
from gates.attention.intercept import alone, observing
from gates.attention.modes import evaluating, frozen
from gates.errors import GateError
from gates.gating.hard_concrete import HardConcrete
from gates.gating.head_gates import HeadGates
from gates.gating.price import l0_penalty

ROLES = ("facilitating", "irrelevant", "interfering")
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class CausalRoles:
    """The gates that both fits ended with, for several seeds.

    Args:
        priced: gates of the fits with a price, ``[seeds, gates]``, from 0 to 1.
        rewarded: gates of those with a reward, ``[seeds, gates]``.
    """

    priced: Tensor
    rewarded: Tensor

    def scores(self) -> Tensor:
        """How far each gate has each of :data:`ROLES` by each seed, ``[seeds, gates, 3]``: open in spite of the price; open for
        the reward alone; closed in spite of the reward."""
        return torch.stack([self.priced, self.rewarded * (1 - self.priced), 1 - self.rewarded], dim=-1)

    def roles(self) -> Tensor:
        """Position in :data:`ROLES` of each gate's role, ``[gates]``: the one of the highest mean score over seeds."""
        return self.scores().mean(0).argmax(-1)

    def agreement(self) -> Tensor:
        """Share of the seeds whose own role of a gate is that of all, ``[gates]``."""
        return (self.scores().argmax(-1) == self.roles()).double().mean(0)

    def names(self) -> list[str]:
        """The role of each gate, by its name."""
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
    """Fit all gates with a price and with a reward, for each of several seeds. Weights and gates stay as they are.

    Args:
        gates: gates of a model.
        batches: the model's inputs; a fit goes over them again and again, in an order that its seed draws.
        losses: function that runs the model on a batch and returns per-example losses ``[examples]``.
        price: what an open gate costs, in units of the loss, and what it earns in the other fit. A head whose absence adds less
            than that to the loss is irrelevant.
        steps: optimiser steps of each of a seed's three fits: without a price, then with a price and with a reward from there.
        learning_rate: of Adam, for ``log_alpha``.
        seeds: of the start, the order of batches and the gates' draws.
        advance: called after every step, to show progress.

    Raises:
        GateError: without batches or seeds, or for a price, steps or a learning rate that are not above 0.

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
    priced, rewarded = [], []
    with alone(gates.model), gates.attached(), observing(gates.model, gates.sites), frozen(gates.model), torch.enable_grad():
        for seed in seeds:
            fit = _Fit(gates, batches, losses, steps, learning_rate, seed, advance)
            start = fit.log_alpha(0.0, fit.random_start())
            priced.append(fit.gates(price, start))
            rewarded.append(fit.gates(-price, start))
    return CausalRoles(torch.stack(priced), torch.stack(rewarded))


@dataclass(frozen=True)
class _Fit:
    """Fits of one seed; see :func:`causal_roles`."""

    of: HeadGates
    batches: Sequence[Batch]
    losses: Callable[[Batch], Tensor]
    steps: int
    learning_rate: float
    seed: int
    advance: Callable[[], None]

    def random_start(self) -> Tensor:
        """Where ``log_alpha`` begins, ``[gates]``: about as often above 0 as below."""
        return torch.randn(self.of.size, generator=torch.Generator().manual_seed(self.seed)).to(self.of.mask)

    def gates(self, price: float, start: Tensor) -> Tensor:
        """The evaluation gates ``[gates]`` that a fit ends with, on the CPU."""
        learned = self._learned(self.log_alpha(price, start))
        with evaluating(learned):
            return learned().detach().cpu()

    def log_alpha(self, price: float, start: Tensor) -> Tensor:
        """What ``log_alpha`` ``[gates]`` comes to from a start, at a price or, below 0, a reward of open gates."""
        learned = self._learned(start)
        optimizer = torch.optim.Adam([learned.log_alpha], lr=self.learning_rate)
        generator = torch.Generator(start.device).manual_seed(self.seed)
        for batch in islice(self._in_some_order(), self.steps):
            values = learned(generator, draws=count_examples(batch))
            with self.of.use(values):
                loss = self.losses(batch).mean()
            (loss + l0_penalty(learned.open_probability(), price)).backward()
            optimizer.step()
            optimizer.zero_grad()
            learned.clamp_()
            self.advance()
        return learned.log_alpha.detach().clone()

    def _learned(self, log_alpha: Tensor) -> HardConcrete:
        learned = HardConcrete(self.of.size).to(log_alpha.device)
        with torch.no_grad():
            learned.log_alpha.copy_(log_alpha)
        return learned.train()

    def _in_some_order(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(self.seed)).tolist()
        return cycle([self.batches[index] for index in order])
