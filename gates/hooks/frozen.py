"""Parameters that require no gradients for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Parameters that require no gradients, for the length of a ``with`` block.

    Args:
        modules: modules with all their parameters. Those that required gradients do so again afterwards.

    >>> linear = nn.Linear(2, 2)
    >>> linear.bias.requires_grad = False
    >>> with frozen(linear):
    ...     [parameter.requires_grad for parameter in linear.parameters()]
    [False, False]
    >>> [parameter.requires_grad for parameter in linear.parameters()]
    [True, False]
    """
    trainable = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
