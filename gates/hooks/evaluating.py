"""Evaluation mode for a while, and afterwards every module's own mode again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn


class HasModules(Protocol):
    """A module, with all its submodules."""

    def modules(self) -> Iterator[nn.Module]: ...


@contextmanager
def evaluating(*models: HasModules) -> Iterator[None]:
    """Evaluation mode, so without dropout, for the length of a ``with`` block.

    Args:
        models: modules with all their submodules. Each gets back the mode it had, also where they differ.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with evaluating(model):
    ...     [module.training for module in model.modules()]
    [False, False, False]
    >>> [module.training for module in model.modules()]
    [True, True, False]
    """
    training = [module for model in models for module in model.modules() if module.training]
    try:
        for module in training:  # not by eval(), which a module may have made to do more than that
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
