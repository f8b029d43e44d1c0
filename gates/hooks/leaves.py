"""Gates of one that a loss can be differentiated with respect to: one for every row and position of a site."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gates.errors import GateError


class Leaves(dict[tuple[int, torch.Size], Tensor]):
    """Leaf tensors of ones ``[..., gates]``, by the site and the shape of its heads ``[..., heads * head_dim]``.

    A module that runs several times on one shape has one leaf for all its passes.

    Args:
        names: names of the sites.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names

    def ones(self, site: int, heads: Tensor, gates: int) -> Tensor:
        """The leaf for a site's heads, made when it is first asked for.

        Args:
            site: index of the site.
            heads: its heads, ``[..., heads * head_dim]``.
            gates: number of its gates.

        Raises:
            GateError: where no graph is made, so that its gradients would be missing.
        """
        if not torch.is_grad_enabled():
            raise GateError(
                f"the attention at {self._names[site]!r} runs without a graph, under torch.no_grad or reentrant activation "
                "checkpointing, so its heads have no gradients; turn that off while heads are scored"
            )
        place = (site, heads.shape)
        if place not in self:
            self[place] = torch.ones(*heads.shape[:-1], gates, device=heads.device, requires_grad=True)
        return self[place]
