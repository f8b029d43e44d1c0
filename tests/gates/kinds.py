"""The kind of every attention site by what it does, to check the kinds that are found without running the model."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gates.attention.output_hooks import Arguments, call_again
from gates.attention.sites import AttentionSite, Kind

VISIBLE = 1e-6
"""The relative change of an output that is more than rounding."""
TRIED = 8
"""The number of tokens from either end that are changed. The outermost may be padding, which no other token sees."""


def seen_kinds(sites: tuple[AttentionSite, ...], run: Callable[[], Any]) -> list[Kind | None]:
    """Return the observed kind of every site; None for a site that was not called.

    If a token changes earlier ones, the kind is ``encoder``. If it only changes later ones, the kind is ``decoder``. If its
    tokens do not change each other, the keys come from elsewhere, and the kind is ``cross``.

    Args:
        run: A function that runs the model, in evaluation mode, on one example of several tokens without padding.
    """
    found: list[Kind | None] = [None] * len(sites)

    def see(position: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found[position] = _kind_of_call(module, (args, kwargs))

    with torch.no_grad(), ExitStack() as stack:
        for position, site in enumerate(sites):
            stack.callback(site.module.register_forward_hook(partial(see, position), with_kwargs=True).remove)
        run()
    return found


def _kind_of_call(module: nn.Module, arguments: Arguments) -> Kind:
    before = call_again(module, arguments, lambda stream: stream)[0]
    tokens = _tokens(before)
    count = before.shape[tokens]

    def changes(token: int, others: slice) -> bool:
        after = call_again(module, arguments, partial(_moved, token))[0]
        difference = (after - before).movedim(tokens, 0)[others].abs().max()
        return bool(difference > VISIBLE * before.abs().max())

    if any(changes(token, slice(None, token)) for token in range(count - 1, max(0, count - 1 - TRIED), -1)):
        return "encoder"
    return "decoder" if any(changes(token, slice(token + 1, None)) for token in range(min(TRIED, count - 1))) else "cross"


def _tokens(stream: Tensor) -> int:
    """Return the axis of tokens: the last but one, unless that has size 1 (time first)."""
    return stream.dim() - 2 if stream.shape[-2] > 1 else 0


def _moved(token: int, stream: Tensor) -> Tensor:
    stream = stream.clone()
    at = stream.movedim(_tokens(stream), 0)[token]
    at.copy_(at.flip(-1) + 1)
    return stream
