"""Notice reentrant activation checkpointing, under which draws that all layers share cannot be differentiated.

It runs a layer without a graph, and again in the backward pass, which differentiates each layer by itself: after the first the
graph of the draws is gone.
"""

from __future__ import annotations

import torch

from gates.errors import GateError


class ReentrantCheck:
    """Watches when each site runs on the draws of a call."""

    def __init__(self) -> None:
        self._is_running = False
        self._without_graph: set[int] = set()

    def begin(self) -> None:
        """A call of the model begins."""
        self._is_running = True
        self._without_graph.clear()

    def end(self) -> None:
        """It has come to its end; what runs after it is a backward pass."""
        self._is_running = False

    def check(self, site: int) -> None:
        """A site runs.

        Raises:
            GateError: if it did so without a graph during the call, and now again with one.
        """
        if not torch.is_grad_enabled():
            self._without_graph.add(site)
        elif site in self._without_graph and not self._is_running:
            raise GateError(
                "gates cannot be trained under reentrant activation checkpointing; give it use_reentrant=False, as in "
                "model.gradient_checkpointing_enable({'use_reentrant': False})"
            )
