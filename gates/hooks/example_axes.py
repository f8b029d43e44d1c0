"""Where the examples are in the heads of each site of a model, found out once by running it with other inputs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from gates.errors import GateError
from gates.hooks.evaluating import evaluating
from gates.hooks.examples import ExampleAxis, axes_of, locate, only_axis, replaced
from gates.hooks.generators import kept_generators
from gates.hooks.sharded import is_sharded

Reached = dict[tuple[int, torch.Size], Tensor]
"""Tensors by the site that they belong to and the shape of its heads, ``[..., heads * head_dim]``."""


class ExampleAxes:
    """What is known of the examples' place in each site's heads.

    Args:
        model: the model; while :attr:`is_asking`, its hooks have to hand :meth:`see` what its heads are.
        names: names of the sites.

    ``call`` has the inputs of the model's present call, where they may be asked with; None otherwise.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model = model
        self._names = names
        self._axes: list[list[ExampleAxis]] = [[] for _ in names]
        self._of_losses: dict[Hashable, ExampleAxes] = {}
        self._seen: Reached | None = None
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def of_losses(self, code: Hashable) -> ExampleAxes:
        """What is known of the rows that the losses of some code depend on, see :mod:`gates.scores.gradients`."""
        return self._of_losses.setdefault(code, ExampleAxes(self._model, self._names))

    @property
    def is_asking(self) -> bool:
        return self._seen is not None

    def see(self, site: int, heads: Tensor) -> Tensor:
        """Take down a site's heads of a run with other inputs, the first of each shape, and hand them back."""
        assert self._seen is not None
        self._seen.setdefault((site, heads.shape), heads)
        return heads

    def known(self, site: int, shape: Sequence[int], examples: int) -> ExampleAxis | None:
        """The axis in heads of this shape ``[..., heads * head_dim]``; None if it has not been found out."""
        if examples == 1:
            return ExampleAxis(axis=0, fold=shape[0], interleaved=False)
        for axis in self._axes[site]:
            if axis.fits(shape, examples):
                return axis
        return None

    def learn(self, site: int, numbers: Tensor, examples: int) -> None:
        """Keep where the examples are, if the numbers of the rows ``[...]``, from :func:`gates.hooks.examples.locate`, leave no
        choice."""
        if not bool((numbers >= 0).any()):
            return  # nothing was touched, so nothing is known
        candidates = axes_of(numbers, examples)
        if len(candidates) == 1 and candidates[0] not in self._axes[site]:
            self._axes[site].append(candidates[0])

    def of(self, site: int, shape: Sequence[int], examples: int) -> ExampleAxis:
        """The axis in heads of this shape ``[..., heads * head_dim]``, found out if nothing else tells.

        Raises:
            GateError: if it is not certain.
        """
        axis = self.known(site, shape, examples) or only_axis(shape, examples)
        if axis is None and self.call is not None:
            self._ask(*self.call, examples)
            axis = self.known(site, shape, examples)
        if axis is None:
            raise GateError(
                f"the heads at {self._names[site]!r} have shape {list(shape)}, and it is not certain which rows belong to "
                f"which of {examples} examples; call the whole model, without a cache and not sharded, on examples that "
                "differ, or use gates that are the same for the batch (draw_per='batch')"
            )
        return axis

    @torch.compiler.disable  # without a reason, which PyTorch 2.7 does not take
    @torch.no_grad()
    def _ask(self, args: tuple[Any, ...], kwargs: dict[str, Any], examples: int) -> None:
        """Put some examples into the place of others, and see which rows change."""
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            return  # the model fills it, and has begun to
        if is_sharded(self._model):
            return  # a sharded layer that has run lets go of its weights, and this one has not run yet

        def heads_with(group: Tensor | None) -> Reached:
            own, named = (args, kwargs) if group is None else replaced((args, kwargs), group)
            self._seen = {}
            try:
                self._model(*own, **named)
                return self._seen
            finally:
                self._seen = None  # also where a model does not take the others' inputs

        with evaluating(self._model), kept_generators(self._model):
            try:
                before = heads_with(None)

                def touched(group: Tensor) -> list[Tensor]:
                    after = heads_with(group)
                    return [(after[place] != heads).any(-1) for place, heads in before.items()]

                found = locate(touched, examples)
            except Exception:  # models refuse inputs in many ways, such as texts whose pictures are those of others
                return
            for (site, _), numbers in zip(before, found, strict=True):
                self.learn(site, numbers, examples)
