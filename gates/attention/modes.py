"""Put modules into evaluation mode: for a while, or in a copy that shares their weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gates.attention.own_method import OwnMethod


class HasModules(Protocol):
    """A module, with all its submodules."""

    def modules(self) -> Iterator[nn.Module]: ...


@contextmanager
def evaluating(*models: HasModules) -> Iterator[None]:
    """Put modules with all their submodules into evaluation mode, so without dropout, for the length of a ``with`` block. Each
    gets back the mode it had, also where they differ."""
    training = [module for model in models for module in model.modules() if module.training]
    try:
        for module in training:  # not by eval(), which a module may have made to do more than that
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def evaluation_copy(module: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Return a copy of a module in evaluation mode, without hooks, that shares all weights and buffers; and a dictionary from
    every module inside the original to its copy.

    Running the copy calls no hook and changes no mode, so that other threads may use the module at the same time.
    """
    copies = {part: object.__new__(type(part)) for part in module.modules()}
    for part, copy in copies.items():
        methods = {name: value.before for name, value in vars(part).items() if isinstance(value, OwnMethod)}
        state = {name: _rebound(value, part, copy) for name, value in ({**vars(part), **methods}).items()}
        for name in methods:
            if state[name] is None:  # the class has it
                del state[name]
        state |= {name: type(value)() for name, value in state.items() if "_hooks" in name and isinstance(value, dict)}
        for name in ("_parameters", "_buffers"):
            state[name] = dict(state[name])
        state["_modules"] = {name: copies.get(child) for name, child in state["_modules"].items()}
        state["training"] = False
        vars(copy).update(state)
    return copies[module], copies


class _Thread(threading.local):
    runs_copy = False


_THREAD = _Thread()


@contextmanager
def running_copy() -> Iterator[None]:
    """Mark that this thread runs a copy, for the length of a ``with`` block: :func:`check_original` then raises an error."""
    before, _THREAD.runs_copy = _THREAD.runs_copy, True
    try:
        yield
    finally:
        _THREAD.runs_copy = before


def check_original() -> None:
    """Raise an error where a copy runs the original module, as a ``forward`` that was replaced by a closure does."""
    if _THREAD.runs_copy:
        raise RuntimeError("the copy of a module runs the original")


def _rebound(value: Any, owner: nn.Module, copy: nn.Module) -> Any:
    """Return a method that is stored on a module, such as a replaced ``forward``, as a method of its copy."""
    if isinstance(value, MethodType) and value.__self__ is owner:
        return MethodType(value.__func__, copy)
    if isinstance(value, partial):
        return partial(value.func, *(copy if argument is owner else argument for argument in value.args), **value.keywords)
    return value


# Parameters that require no gradients for a while.


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Have modules with all their parameters require no gradients, for the length of a ``with`` block. Those that required
    gradients do so again afterwards."""
    trainable = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


# The random number generators that a model draws from, kept as they were.


@contextmanager
def kept_generators(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Restore the generators of the CPU and of the model's devices after the ``with`` block; with a seed, set them for its
    length.

    The generators of other devices are not touched. ``torch.manual_seed`` would seed them too, at once or when they are
    initialised.
    """
    devices = {parameter.device for parameter in model.parameters()}
    generators = [torch.default_generator, *(_generator(device) for device in devices if device.type in ("cuda", "mps"))]
    states = [generator.get_state() for generator in generators]
    try:
        if seed is not None:
            for generator in generators:
                generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    torch.cuda.init()  # no generators exist before
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


# Whether PyTorch has spread a model's weights over processes.


def is_sharded(model: nn.Module) -> bool:
    """Whether a process holds a part alone of some weight (FSDP2), so that the model runs in all or in none."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())
