"""Hooks on the input of every site's output projection, and the check that attention goes through them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from gates.attention.layouts import without_adapter
from gates.attention.modes import check_original, evaluation_copy, running_copy
from gates.attention.own_method import Use, call_output, calling_outputs
from gates.attention.sites import AttentionSite, check_width
from gates.errors import GateError


class Leaves(dict[tuple[int, torch.Size, torch.dtype], Tensor]):
    """Gates of 1 with respect to which a loss can be differentiated, one for every row and position of a site.

    The leaf tensors ``[..., gates]``, in float32, are stored by the site, and by the shape ``[..., heads * head_dim]`` and the
    dtype of its heads. A module that runs several times on one shape has one leaf for all its passes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names

    def ones(self, site: int, heads: Tensor, gates: int) -> Tensor:
        """Return the leaf for a site's heads ``[..., heads * head_dim]``, and create it if necessary."""
        if not torch.is_grad_enabled():
            raise GateError(
                f"the attention at {self._names[site]!r} runs without a graph, under torch.no_grad or reentrant activation "
                "checkpointing, so its heads have no gradients; turn that off while heads are scored"
            )
        place = (site, heads.shape, heads.dtype)
        if place not in self:
            self[place] = torch.ones(*heads.shape[:-1], gates, device=heads.device, requires_grad=True)
        return self[place]


# The functions below call an attention module a second time with inputs that differ in one place. The outputs that change show
# whether all heads pass through gates. Names and configs do not prove it.

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[int, nn.Module, Tensor], Tensor]


def is_bypassed(module: nn.Module, gated: Sequence[nn.Module], arguments: Arguments) -> bool | None:
    """Return whether attention reaches a module's outputs without passing its gates.

    The module is called once more with zeros for its output projections, as if all gates were closed, and with one token of
    NaN. Attention spreads NaN to every token that sees this one. If the gates stop all attention, only one token of the output
    is NaN.

    Args:
        gated: Its output projections with gates.

    Returns:
        None for a single token, which shows nothing; False also for a module that cannot be called again.
    """
    streams = list(_streams(arguments))
    if not streams or streams[0][..., 0].numel() < 2:
        return None
    try:
        outputs = call_again(module, arguments, _poisoned, closed=gated)
    except Exception:  # it cannot be called alone, for example because other processes hold its weights
        return False
    shapes = {tensor.shape for tensor in streams}
    for stream in outputs[:1] + [tensor for tensor in outputs[1:] if tensor.shape in shapes]:
        spoilt = stream.isnan().any(-1)
        spoilt[(0,) * spoilt.dim()] = False
        if bool(spoilt.any()):
            return True
    return False


def call_again(
    module: nn.Module, arguments: Arguments, change: Callable[[Tensor], Tensor], *, closed: Sequence[nn.Module] = ()
) -> list[Tensor]:
    """Return the tensors of one more call of a module, in evaluation mode, without caches and hooks.

    The call runs on a copy that shares the weights, because other threads may run the module itself.

    Args:
        change: A function that replaces its first stream of tokens, or every stream if a projection is closed.
        closed: The projections that get zeros.
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
    """Yield the floating-point inputs that have features for every token."""
    args, kwargs = arguments
    return (value for value in (*args, *kwargs.values()) if _is_stream(value))


def _is_stream(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (2, 3)


def _poisoned(stream: Tensor) -> Tensor:
    stream = stream.clone()
    stream[(0,) * (stream.dim() - 1)] = torch.nan
    return stream


def gates_on(sites: Sequence[AttentionSite]) -> list[nn.Module]:
    """Return the gates that are attached to these sites, each once."""
    found = [getattr(without_adapter(site.output), "_head_gates", None) for site in sites]
    return list(dict.fromkeys(gates for gates in found if gates is not None))


class OutputHooks:
    """Hooks that replace the heads of each site before their output projection."""

    def __init__(self, model: nn.Module, sites: tuple[AttentionSite, ...]) -> None:
        self.model = model
        self._sites = sites
        self._handles: list[RemovableHandle | Use] = []
        self._on: dict[int, tuple[nn.Module, RemovableHandle]] = {}  # the module with each site's hook
        self._marked: list[nn.Module] = []
        self._fired: set[int] = set()
        self._passed: set[tuple[int, int]] = set()  # thread and site, in the present call of each attention module
        self._probed: set[type[nn.Module]] = set()

    @property
    def is_attached(self) -> bool:
        return bool(self._handles)

    def attach(
        self,
        gates: nn.Module,
        before_call: Callable[..., None],
        after_call: Callable[..., None],
        change: Change,
    ) -> None:
        """Add the hooks to the model.

        Args:
            gates: The gates of the hooks, which :func:`gates_on` finds.
            before_call: A function that is called before the model and before each part with a site. Its arguments are the
                path, the module, and the positional and keyword arguments.
            after_call: A function that is called afterwards, also after an error. Its arguments are the path, the module, the
                positional arguments and the output.
            change: A function from the index of a site, its output projection and its concatenated heads
                ``[..., heads * head_dim]`` to their replacement.
        """
        if self.is_attached:
            raise GateError("these gates are attached already; detach() them before attaching again")
        taken = [site.name for site in self._sites if gates_on([site])]
        if taken:
            raise GateError(f"{type(self.model).__name__} already carries other gates (at {taken[0]!r}); detach() those first")
        first: dict[int, str] = {}
        for site in self._sites:
            if (other := first.setdefault(id(site.output), site.name)) != site.name:
                raise GateError(
                    f"{other!r} and {site.name!r} of {type(self.model).__name__} share one module as their output projection, "
                    "so that the gates of both would act on either; give each a module of its own (they may share its weights)"
                )
        forget_compiled()
        try:
            for name, part in _around(self.model, self._sites).items():
                self._handles.append(part.register_forward_pre_hook(partial(before_call, name), with_kwargs=True))
                self._handles.append(part.register_forward_hook(partial(after_call, name), always_call=True))
            for index, site in enumerate(self._sites):
                self._handles += call_output(site.module)
                self._handles.append(site.module.register_forward_pre_hook(partial(self._follow, change, index)))
                self._handles.append(site.module.register_forward_hook(partial(self._after_attention, index), with_kwargs=True))
                self._follow(change, index)
                self._marked.append(without_adapter(site.output))
                object.__setattr__(self._marked[-1], "_head_gates", gates)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Remove the hooks. The model is as before :meth:`attach`."""
        if self._handles:
            forget_compiled()
        for handle in (*self._handles, *(handle for _, handle in self._on.values())):
            handle.remove()
        for module in self._marked:
            vars(module).pop("_head_gates", None)
        for known in (self._handles, self._marked, self._on, self._fired):
            known.clear()

    def unreached(self) -> list[str]:
        """Return the names of the sites whose attention has not run since :meth:`attach`, outside compiled code."""
        return [site.name for index, site in enumerate(self._sites) if index not in self._fired]

    def _follow(self, change: Change, index: int, *_: Any) -> None:
        """Move the hook to the site's present output projection, because an adapter may have been added or removed."""
        output = self._sites[index].output
        module, handle = self._on.get(index, (None, None))
        if output is module:
            return
        if handle is not None:
            forget_compiled()
            handle.remove()
        self._on[index] = (output, output.register_forward_pre_hook(partial(self._on_output, change, index)))

    def _on_output(self, change: Change, index: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.compiler.is_compiling():
            check_original()
        check_width(self._sites[index], args[0])
        heads = change(index, module, args[0])  # may run the model, so the records below come after it
        if not torch.compiler.is_compiling():
            self._fired.add(index)
            self._passed.add((threading.get_ident(), index))
        return None if heads is args[0] else (heads, *args[1:])

    def _after_attention(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            return
        passed = (threading.get_ident(), index)
        if passed not in self._passed:
            raise GateError(
                f"{type(module).__name__} at {self._sites[index].name!r} bypasses its output projection, so its gates have no "
                "effect; detach() them, and use another model or attention implementation"
            )
        self._passed.discard(passed)
        self._probe(index, module, (args, kwargs))

    def _probe(self, index: int, module: nn.Module, arguments: Arguments) -> None:
        """Check once for each class, by one more call of a module, that no attention bypasses the gates."""
        if type(module) in self._probed or torch.jit.is_tracing():
            return
        gated = [site.output for site in self._sites if site.module is module]
        bypassed = is_bypassed(module, gated, arguments)
        if bypassed:
            raise GateError(
                f"{type(module).__name__} at {self._sites[index].name!r} has attention that bypasses the gates of its "
                f"{sum(site.heads for site in self._sites if site.module is module)} heads; detach() them, and use another "
                "model or describe all its streams of heads in gates.attention.layouts.LAYOUTS"
            )
        if bypassed is not None:
            self._probed.add(type(module))


def _around(model: nn.Module, sites: Sequence[AttentionSite]) -> dict[str, nn.Module]:
    """Return every module that contains a site or is one, by its path, because each may be called alone."""
    holds = {name.rsplit(".", levels)[0] for name in (site.name for site in sites) for levels in range(name.count(".") + 1)}
    return {name: part for name, part in model.named_modules() if not name or name in holds}


def forget_compiled() -> None:
    """Discard compiled code, which does not notice added or removed hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
