"""Metrics of language models over a whole split."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from training.tasks.encoding import IGNORED


class Perplexity(Metric):
    """``exp(total negative log likelihood / units)``: per token, or per word or byte of the same text, whose numbers do not
    depend on the tokenizer.

    The likelihood is that of all tokens of a document, the end token among them, given those before them.

    >>> per_token = Perplexity()
    >>> per_token.update(torch.tensor([2.0, 4.0]), torch.tensor([1, 2]))
    >>> per_token.compute()
    tensor(7.3891, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    surprise: Tensor
    units: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("surprise", "units"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, surprise: Tensor, units: Tensor) -> None:
        """Add examples.

        Args:
            surprise: negative log likelihoods in nats ``[batch]``.
            units: tokens, words or bytes of each ``[batch]``.
        """
        self.surprise += surprise.double().sum()
        self.units += units.double().sum()

    def compute(self) -> Tensor:
        return (self.surprise / self.units).exp()


class TokenAccuracy(Metric):
    """The share of tokens that are the most likely one.

    >>> accuracy = TokenAccuracy()
    >>> accuracy.update(torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[1, 1, -100]]))
    >>> accuracy.compute()
    tensor(0.5000, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    correct: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("correct", "tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add examples.

        Args:
            logits: ``[batch, position, vocabulary]``.
            labels: tokens to predict ``[batch, position]``; -100 where nothing is.
        """
        self.correct += (logits.argmax(-1) == labels).sum()  # -100 is no token
        self.tokens += (labels != IGNORED).sum()

    def compute(self) -> Tensor:
        return self.correct / self.tokens
