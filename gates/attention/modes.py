"""Change temporarily how modules run: in evaluation mode, as a copy in evaluation mode that shares their weights, or with
attention in another precision."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from gates.attention.own_method import OwnMethod


class HasModules(Protocol):
    """Describe a module with submodules."""

    def modules(self) -> Iterator[nn.Module]: ...


@contextmanager
def evaluating(*models: HasModules) -> Iterator[None]:
    """Put modules and their submodules into evaluation mode, without dropout; each returns to its own mode afterwards."""
    training = [module for model in models for module in model.modules() if module.training]
    try:
        for module in training:  # not by eval(), which a module may override
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def evaluation_copy(module: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Return a copy of a module in evaluation mode and a dictionary from every inner module to its copy.

    The copy shares all weights and buffers and has no hooks. Running it calls no hook and changes no mode, so other threads
    may use the module at the same time.
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


def attention_to_train(device: torch.device) -> AbstractContextManager[object]:
    """Compute fused attention in float32 during a ``with`` block, under autocast on a CPU.

    There its backward pass in bfloat16 takes up to six times as long as in float32 (PyTorch 2.13). That was half of a step
    with frozen weights. Attention with dropout is not fused and stays as it is.
    """
    is_slow = device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return _SingleAttention() if is_slow else nullcontext()


class _SingleAttention(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        is_fused = func is scaled_dot_product_attention and args and not named.get("dropout_p")
        if is_fused and torch.is_autocast_enabled("cpu") and args[0].dtype != torch.float64:
            args, named = tree_map_only(Tensor, _as_single, (args, dict(named)))
            with torch.autocast("cpu", enabled=False):
                return func(*args, **named).to(torch.get_autocast_dtype("cpu"))
        return func(*args, **named)


def _as_single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


_THREAD = threading.local()


@contextmanager
def running_copy() -> Iterator[None]:
    """Mark that this thread runs a copy, so that :func:`check_original` raises an error."""
    before, _THREAD.runs_copy = getattr(_THREAD, "runs_copy", False), True
    try:
        yield
    finally:
        _THREAD.runs_copy = before


def check_original() -> None:
    """Raise an error where a copy runs the original module, as a ``forward`` that was replaced by a closure does."""
    if getattr(_THREAD, "runs_copy", False):
        raise RuntimeError("the copy of a module runs the original")


def _rebound(value: Any, owner: nn.Module, copy: nn.Module) -> Any:
    """Return a method stored on a module, such as a replaced ``forward``, bound to the copy."""
    if isinstance(value, MethodType) and value.__self__ is owner:
        return MethodType(value.__func__, copy)
    if isinstance(value, partial):
        return partial(value.func, *(copy if argument is owner else argument for argument in value.args), **value.keywords)
    return value


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Freeze all parameters of some modules; those that required gradients require them again afterwards."""
    trainable = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def kept_generators(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Restore the random generators of the CPU and of the model's devices afterwards; seed them first if a seed is given.

    The generators of other devices are not touched, as they would be by ``torch.manual_seed``.
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


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has spread the weights over processes, so that the model runs in all of them or in none."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())
