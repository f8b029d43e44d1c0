"""What attention does, found out by calling a module a second time with inputs that differ in one place.

Names and configurations say what an attention module should be. Whether all its heads pass through gates, and whether its
tokens see later ones, is a matter of which output changes with which input. A second call of one module shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from gates.hooks.evaluating import evaluation_copy, running_copy
from gates.hooks.functional import calling_outputs
from gates.sites import AttentionSite, Kind

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
VISIBLE = 1e-6
"""Change of an output, relative to its largest value, that is more than rounding."""
TRIED = 8
"""Tokens from either end that are changed: the first or last ones may be padding, which no other token sees."""


def is_bypassed(module: nn.Module, gated: Sequence[nn.Module], arguments: Arguments) -> bool | None:
    """Whether something that attention mixes reaches a module's outputs other than through its gates.

    The module is called once more with nothing for its output projections, as if all gates were closed, and with one token
    that is not a number. Attention spreads it to every token that sees this one. So where the gates stop all of it, one token
    of the output is not a number, and no other.

    Args:
        module: attention module.
        gated: its output projections that have gates.
        arguments: what it was called with.

    Returns:
        None for a single token, from which it cannot be told; False also for a module that cannot be called again.
    """
    streams = list(_streams(arguments))
    if not streams or streams[0][..., 0].numel() < 2:
        return None
    try:
        outputs = _again(module, arguments, _poisoned, closed=gated)
    except Exception:  # whatever keeps it from being called on its own, such as weights held by other processes
        return False
    shapes = {tensor.shape for tensor in streams}
    for stream in outputs[:1] + [tensor for tensor in outputs[1:] if tensor.shape in shapes]:
        spoilt = stream.isnan().any(-1)
        spoilt[(0,) * spoilt.dim()] = False
        if bool(spoilt.any()):
            return True
    return False


def seen_kinds(model: PreTrainedModel, sites: tuple[AttentionSite, ...], run: Callable[[], Any]) -> list[Kind | None]:
    """The kind of every site by what changes what: the tests' and the coverage table's check of :attr:`AttentionSite.kind`.

    Where a token changes later ones and earlier ones, attention is of kind ``encoder``; where it changes later ones only,
    ``decoder``; where its own tokens change none of each other, its keys come from elsewhere: ``cross``.

    Args:
        model: model in evaluation mode.
        sites: attention modules of the model.
        run: function that runs the model on one example of several tokens without padding.

    Returns:
        One kind for each site, None where its attention was not called.
    """
    found: list[Kind | None] = [None] * len(sites)

    def seen(position: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found[position] = _kind_of_call(module, (args, kwargs))

    with torch.no_grad(), ExitStack() as stack:
        for position, site in enumerate(sites):
            hook = site.module.register_forward_hook(lambda *call, position=position: seen(position, *call), with_kwargs=True)
            stack.callback(hook.remove)
        run()
    return found


def _kind_of_call(module: nn.Module, arguments: Arguments) -> Kind:
    before = _again(module, arguments, lambda stream: stream)[0]
    tokens = _tokens(before)
    count = before.shape[tokens]

    def changes(token: int, others: slice) -> bool:
        after = _again(module, arguments, _moved(token))[0]
        difference = (after - before).movedim(tokens, 0)[others].abs().max()
        return bool(difference > VISIBLE * before.abs().max())

    if any(changes(token, slice(None, token)) for token in range(count - 1, max(0, count - 1 - TRIED), -1)):
        return "encoder"
    return "decoder" if any(changes(token, slice(token + 1, None)) for token in range(min(TRIED, count - 1))) else "cross"


def _again(
    module: nn.Module, arguments: Arguments, change: Callable[[Tensor], Tensor], *, closed: Sequence[nn.Module] = ()
) -> list[Tensor]:
    """Return the tensors of one more call of a module, in evaluation mode, without its caches and without any hook.

    The call runs on a copy that shares the weights, since other threads may be running the module itself.

    Args:
        module: The attention module.
        arguments: The arguments of its last call.
        change: A function that replaces its first stream of tokens; every stream, if any projection is closed.
        closed: The submodules that receive zeros.
    """
    first = next(_streams(arguments))

    def other(value: Any) -> Any:
        if isinstance(value, Cache):
            return None
        return change(value) if value is first or (closed and _is_stream(value)) else value

    args, kwargs = arguments
    alone, inside = evaluation_copy(module)
    with torch.no_grad(), running_copy(), calling_outputs(alone), ExitStack() as stack:
        for projection in closed:
            if projection in inside:
                handle = inside[projection].register_forward_pre_hook(lambda _, given: (torch.zeros_like(given[0]), *given[1:]))
                stack.callback(handle.remove)
        output = alone.forward(*map(other, args), **{name: other(value) for name, value in kwargs.items()})
    return [part for part in (output if isinstance(output, tuple) else (output,)) if _is_stream(part)]


def _streams(arguments: Arguments) -> Iterator[Tensor]:
    """Floating-point inputs that have features for every token."""
    args, kwargs = arguments
    return (value for value in (*args, *kwargs.values()) if _is_stream(value))


def _is_stream(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (2, 3)


def _tokens(stream: Tensor) -> int:
    """The axis of tokens: the last but one, unless that is an axis of one example (time first)."""
    return stream.dim() - 2 if stream.shape[-2] > 1 else 0


def _poisoned(stream: Tensor) -> Tensor:
    stream = stream.clone()
    stream[(0,) * (stream.dim() - 1)] = torch.nan
    return stream


def _moved(token: int) -> Callable[[Tensor], Tensor]:
    def change(stream: Tensor) -> Tensor:
        stream = stream.clone()
        at = stream.movedim(_tokens(stream), 0)[token]
        at.copy_(at.flip(-1) + 1)
        return stream

    return change
