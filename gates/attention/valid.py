"""Find which queries of an attention site count because they are not padding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Size, Tensor

from gates.attention.sites import KINDS, AttentionSite
from gates.errors import GateError

Valid = Mapping[str, Tensor | None]
"""Masks ``[batch, query]`` of the queries that count, by kind or by the name of a module; None where all count."""


def stack_of(site: AttentionSite) -> str:
    """Return the name of the list of layers that a site lies in; its own name if it lies in none."""
    return re.split(r"\.\d+(?:\.|$)", site.name, maxsplit=1)[0]


def key_of(valid: Valid, site: AttentionSite) -> str | None:
    """Return the key of a site's mask: the innermost module around the site, else its kind; None if neither has a mask."""
    parts = site.name.split(".")
    around = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    found = next((name for name in around if name in valid and name not in KINDS), None)
    return site.kind if found is None and site.kind in valid else found


def valid_by_site(valid: Valid, sites: Sequence[AttentionSite]) -> list[Tensor | None]:
    """Return the mask of each site, ``[batch, query]``; None where all queries count.

    Raises:
        GateError: If a mask with padding is given for a kind whose sites are in several stacks of layers. The mask of a text
            does not apply to a picture of the same length.
    """
    keys = [key_of(valid, site) for site in sites]
    for kind in KINDS:
        mask = valid.get(kind)
        stacks = list(dict.fromkeys(stack_of(site) for site, key in zip(sites, keys, strict=True) if key == kind))
        if mask is not None and len(stacks) > 1 and not bool(mask.all()):
            raise GateError(
                f"the mask for {kind!r} would apply to {' and '.join(map(repr, stacks))}, which may read different inputs; "
                f"give a mask for each of these names, such as {{{stacks[0]!r}: None}}"
            )
    return [None if key is None else valid[key] for key in keys]


def rows_by_site(valid: Valid, sites: Sequence[AttentionSite]) -> list[Tensor | None]:
    """Return the mask of each site in the layout of its head outputs; None where all rows count. See :func:`valid_by_site`."""
    masks = valid_by_site(valid, sites)
    return [mask.T if mask is not None and site.is_time_first else mask for mask, site in zip(masks, sites, strict=True)]


def check_valid(valid: Tensor, shape: Size) -> None:
    """Raise :class:`GateError` unless a mask has this shape, ``[batch, query]``."""
    if valid.shape != shape:
        raise GateError(
            f"the mask of valid queries has shape {list(valid.shape)}, but the head outputs have {list(shape)}; give a mask "
            "for each part, such as {'vision_tower': None}"
        )


def valid_positions(states: Tensor, valid: Tensor | None) -> Tensor:
    """Return the positions of states ``[..., features]`` that count, ``[positions, features]``.

    ``valid`` is the mask in the layout of the states (see :func:`rows_by_site`); None if all positions count.
    """
    if valid is None:
        return states.flatten(0, -2)
    check_valid(valid, states.shape[:-1])
    return states[valid.bool().to(states.device)]
