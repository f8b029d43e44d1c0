"""Where the examples are in the heads of each site of a model, found out once by running it with other inputs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from gates.errors import GateError
from gates.hooks.evaluating import evaluation_copy, running_copy
from gates.hooks.examples import ExampleAxis, axes_of, locate, only_axis, replaced
from gates.hooks.functional import calling_outputs
from gates.hooks.generators import kept_generators
from gates.hooks.sharded import is_sharded
from gates.sites import AttentionSite

Reached = dict[tuple[int, torch.Size], Tensor]
"""Tensors by the site that they belong to and the shape of its heads, ``[..., heads * head_dim]``."""


class ExampleAxes:
    """What is known of the examples' place in each site's heads.

    Args:
        model: The model.
        sites: Its attention modules.
    """

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self._model = model
        self._sites = sites
        self._axes: list[list[ExampleAxis]] = [[] for _ in sites]
        self._of_losses: dict[Hashable, ExampleAxes] = {}

    def of_losses(self, code: Hashable) -> ExampleAxes:
        """What is known of the rows that the losses of some code depend on, see :mod:`gates.scores.gradients`."""
        return self._of_losses.setdefault(code, ExampleAxes(self._model, self._sites))

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

    def of(
        self,
        site: int,
        shape: Sequence[int],
        examples: int,
        inputs: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None,
    ) -> ExampleAxis:
        """Return the axis in heads of this shape ``[..., heads * head_dim]``, found out if nothing else tells.

        Args:
            site: The index of the site.
            shape: The shape of its heads.
            examples: The number of examples.
            inputs: The running module with the arguments of its call; None if it may not run again.

        Raises:
            GateError: if the axis is not certain.
        """
        axis = self.known(site, shape, examples) or only_axis(shape, examples)
        if axis is None and inputs is not None:
            self._ask(*inputs, examples)
            axis = self.known(site, shape, examples)
        if axis is None:
            raise GateError(
                f"the heads at {self._sites[site].name!r} have shape {list(shape)}, and it is not certain which rows belong to "
                f"which of {examples} examples; call the whole model, without a cache and not sharded, on examples that "
                "differ, or use gates that are the same for the batch (draw_per='batch')"
            )
        return axis

    @torch.compiler.disable  # without a reason, which PyTorch 2.7 does not take
    @torch.no_grad()
    def _ask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], examples: int) -> None:
        """Put some examples into the place of others in a copy of a module without gates, and see which rows change."""
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            return  # the model fills it, and has begun to
        if is_sharded(self._model):
            return  # a sharded layer that has run lets go of its weights, and this one has not run yet
        alone, inside = evaluation_copy(module)
        seen: Reached = {}

        def see(site: int, _: nn.Module, given: tuple[Any, ...]) -> None:
            seen.setdefault((site, given[0].shape), given[0])

        def heads_with(group: Tensor | None) -> Reached:
            own, named = (args, kwargs) if group is None else replaced((args, kwargs), group)
            seen.clear()
            alone.forward(*own, **named)
            return dict(seen)

        with running_copy(), calling_outputs(alone), kept_generators(self._model):
            for index, site in enumerate(self._sites):
                if site.output in inside:
                    inside[site.output].register_forward_pre_hook(partial(see, index))
            try:
                before = heads_with(None)

                def touched(group: Tensor) -> list[Tensor]:
                    after = heads_with(group)
                    return [(after[place] != heads).any(-1) for place, heads in before.items()]

                found = locate(touched, examples)
            except Exception:  # models refuse inputs in many ways, such as texts whose pictures are those of others
                return
            for (site_index, _), numbers in zip(before, found, strict=True):
                self.learn(site_index, numbers, examples)
