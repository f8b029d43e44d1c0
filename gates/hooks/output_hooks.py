"""Hooks on the input of every site's output projection, and the check that attention goes through them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gates.errors import GateError
from gates.hooks.evaluating import check_original
from gates.hooks.functional import call_output
from gates.hooks.own_method import Use
from gates.hooks.probe import Arguments, is_bypassed
from gates.sites import AttentionSite, check_width
from gates.surgery.adapters import without_adapter


def gates_on(sites: Sequence[AttentionSite]) -> list[nn.Module]:
    """The gates that are attached to these sites, each once."""
    found = [getattr(without_adapter(site.output), "_head_gates", None) for site in sites]
    return list(dict.fromkeys(gates for gates in found if gates is not None))


class OutputHooks:
    """Hooks that hand out what the heads of each site give to their output projection, and put something else in its place.

    Args:
        model: any model; only its hooks change.
        sites: attention modules of the model.
    """

    def __init__(self, model: nn.Module, sites: tuple[AttentionSite, ...]) -> None:
        self.model = model
        self._sites = sites
        self._handles: list[RemovableHandle | Use] = []
        self._on: dict[int, tuple[nn.Module, RemovableHandle]] = {}  # what has each site's hook
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
        change: Callable[[int, Tensor], Tensor],
    ) -> None:
        """Put the hooks on.

        Args:
            gates: module that they act for; :func:`gates_on` finds it.
            before_call: A function that is called before the model and before each part that holds a site: with its path,
                the module, the positional and the keyword arguments.
            after_call: A function that is called after it, also after an error: with its path, the module, the positional
                arguments and the output.
            change: function from the index of a site and its concatenated heads ``[..., heads * head_dim]`` to
                what its output projection is given in their place.

        Raises:
            GateError: if hooks are on already, these or those of other gates, or sites share one output projection, whose calls
                cannot be told apart.
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
        """Take the hooks off; the model is again as it was before :meth:`attach`."""
        if self._handles:
            forget_compiled()
        for handle in (*self._handles, *(handle for _, handle in self._on.values())):
            handle.remove()
        for module in self._marked:
            vars(module).pop("_head_gates", None)
        for known in (self._handles, self._marked, self._on, self._fired):
            known.clear()

    def unreached(self) -> list[str]:
        """Names of the sites whose attention has not run since :meth:`attach`, outside compiled code."""
        return [site.name for index, site in enumerate(self._sites) if index not in self._fired]

    def _follow(self, change: Callable[[int, Tensor], Tensor], index: int, *_: Any) -> None:
        """Put the hook on what the site's output projection is: an adapter may have come around it, or gone, since."""
        output = self._sites[index].output
        module, handle = self._on.get(index, (None, None))
        if output is module:
            return
        if handle is not None:
            forget_compiled()
            handle.remove()
        self._on[index] = (output, output.register_forward_pre_hook(partial(self._on_output, change, index)))

    def _on_output(
        self, change: Callable[[int, Tensor], Tensor], index: int, module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        if not torch.compiler.is_compiling():
            check_original()
        check_width(self._sites[index], args[0])
        heads = change(index, args[0])  # may run the model, so that what is noted here comes after it
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
                f"{type(module).__name__} at {self._sites[index].name!r} goes round its output projection, so its gates have "
                "no effect; detach() them, and use another model or attention implementation"
            )
        self._passed.discard(passed)
        self._probe(index, module, (args, kwargs))

    def _probe(self, index: int, module: nn.Module, arguments: Arguments) -> None:
        """See once for each class whether the gates stop all that attention does, at the price of one more call of a module."""
        if type(module) in self._probed or torch.jit.is_tracing():
            return
        gated = [site.output for site in self._sites if site.module is module]
        bypassed = is_bypassed(module, gated, arguments)
        if bypassed:
            raise GateError(
                f"{type(module).__name__} at {self._sites[index].name!r} hands on attention that does not pass the gates of "
                f"its {sum(site.heads for site in self._sites if site.module is module)} heads; detach() them, and use "
                "another model or describe all its streams of heads in gates.surgery.layouts.LAYOUTS"
            )
        if bypassed is not None:
            self._probed.add(type(module))


def _around(model: nn.Module, sites: Sequence[AttentionSite]) -> dict[str, nn.Module]:
    """Return every module that holds a site or is one, by its path: each of them may be called alone."""
    holds = {name.rsplit(".", levels)[0] for name in (site.name for site in sites) for levels in range(name.count(".") + 1)}
    return {name: part for name, part in model.named_modules() if not name or name in holds}


def forget_compiled() -> None:
    """Have code that was compiled so far compiled anew: it does not look whether hooks were put on or taken off since."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
