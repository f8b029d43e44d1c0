"""One gate on every attention head.

A forward pre-hook on each site's *output projection* receives the concatenated heads ``[..., heads * head_dim]``, usually
``[batch, query, heads * head_dim]``, and multiplies each head by its gate. This is exactly the masked output of the papers,
for every attention implementation (eager, SDPA, flash, flex).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from gates.attention.examples import ExampleAxes, count_examples
from gates.attention.modes import evaluating
from gates.attention.output_hooks import Leaves, OutputHooks
from gates.attention.scaling import GatedHeads, multiplies_in_projection, scale_heads
from gates.attention.sites import KINDS, AttentionSite, find_attention
from gates.errors import GateError
from gates.gating.budget import Budget, budget_mask
from gates.gating.calls import Calls, Part, is_backward
from gates.gating.families import learned_gates
from gates.gating.hard_concrete import DEFAULT_STRETCH, HardConcrete, Stretch
from gates.options import TOP_K_FAMILIES, DrawPer, GateFamily, Unit

Mode = Literal["open", "stochastic", "masked"]


class HeadGates(nn.Module):
    """Gates for all heads of a model, in one flat vector ``[gates]`` in site order.

    Args:
        model: A Transformer that :func:`gates.attention.sites.find_attention` covers. It is not modified until
            :meth:`attach`, and never registered as a submodule.
        unit: The unit of a gate: ``head`` for one query head, or ``group`` for a key/value head with all its query heads. A
            closed group also removes its keys and values from the cache.
        stretch, initial_log_alpha, straight_through, anneal, straight_through_from: The arguments of
            :class:`gates.gating.hard_concrete.HardConcrete`. They have no effect on other families.
        draw_per: ``batch`` for one draw per call, shared by the batch, as in the papers. ``example`` for one draw per example,
            which removes most of the noise from the gates' gradients. All positions share a draw. Where shapes do not show
            which rows belong to an example, the first call runs the model several times (:mod:`gates.attention.examples`).
        family: The family of learned gates: ``hard-concrete``, ``relaxed-top-k``, ``straight-through-top-k`` or
            ``clamped-linear``; see :mod:`gates.gating.families`.
        budget: The number of gates that the two top-k families keep: a count (18), a fraction (0.25) or one of these per
            kind ({"encoder": 10}); None for all. Other families have none.
        kinds: The kinds of attention with learned gates, such as ``["encoder"]``; None for all. Gates of other kinds are 1 in
            mode ``"stochastic"``, and accept fixed masks and values.
        only: The path of a submodule whose heads alone get gates, such as ``language_model``.
        sites: The attention modules from :func:`gates.attention.probing.probe_attention`; None to find them.

    Attributes:
        mode: The source of the gate values. ``"open"``: all gates are 1. ``"masked"``: the fixed 0/1 buffer ``mask``
            ``[gates]``. ``"stochastic"``: learned gates, drawn in every call in training mode, and evaluation gates in
            evaluation mode. :meth:`use` overrides the mode temporarily.
        generator: The generator of the draws; None for the global one.

    Gates are always float32. Casting the module moves them and keeps their dtype.

    Raises:
        GateError: If the attention of the model is unknown or covered only in part, or the budget does not fit. A call of the
            attached model raises it for the head masks of Transformers 4, and for attention that bypasses the gates.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> gates = HeadGates(model)
    >>> with gates.attached(), gates.use(torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1])):
    ...     masked = model(torch.randint(50, (3, 7)))
    """

    mask: Tensor
    is_learned: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        unit: Unit = "head",
        *,
        stretch: Stretch = DEFAULT_STRETCH,
        initial_log_alpha: float = 2.5,
        straight_through: bool = False,
        draw_per: DrawPer = "batch",
        anneal: float | None = None,
        straight_through_from: float = 1.0,
        family: GateFamily = "hard-concrete",
        budget: int | float | Mapping[str, int | float] | None = None,
        kinds: Collection[str] | None = None,
        only: str = "",
        sites: tuple[AttentionSite, ...] | None = None,
    ) -> None:
        super().__init__()
        if unit not in get_args(Unit):
            raise GateError(f"the unit is {unit!r}; expected 'head' or 'group'")
        if budget is not None and family not in TOP_K_FAMILIES:
            raise GateError(
                f"{family} gates take no budget, but {budget} is given; remove the budget, or choose {TOP_K_FAMILIES[0]}"
            )
        self.unit: Unit = unit
        self.draw_per: DrawPer = draw_per
        self.sites: tuple[AttentionSite, ...] = find_attention(model, only=only) if sites is None else sites
        self.sizes: list[int] = [site.heads if unit == "head" else site.kv_heads for site in self.sites]
        self.family: GateFamily = family
        self.register_buffer("mask", torch.ones(self.size))
        self.register_buffer("is_learned", _of_kinds(kinds, self.kind_sizes(), self.kind_index()), persistent=False)
        self.learned = learned_gates(
            family,
            Budget(self.size, {}) if budget is None else Budget.parse(budget, self.kind_sizes()),
            self.kind_index(),
            HardConcrete(
                self.size,
                stretch=stretch,
                initial_log_alpha=initial_log_alpha,
                straight_through=straight_through,
                anneal=anneal,
                straight_through_from=straight_through_from,
            ),
        )
        self.mode: Mode = "stochastic"
        self.generator: torch.Generator | None = None
        self._hooks = OutputHooks(model, self.sites)
        self.example_axes = ExampleAxes(model, self.sites)
        self._override: Tensor | None = None
        self._calls = Calls(self.sizes, [site.heads * site.head_dim for site in self.sites])
        self._leaves: Leaves | None = None
        self.has_drawn = False  # whether the gates were drawn for training
        self.to(_device_of(self.sites))

    # -- attaching ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """Return the model of these gates, which is not their submodule."""
        return self._hooks.model

    @property
    def is_attached(self) -> bool:
        return self._hooks.is_attached

    def attach(self) -> Self:
        """Add the hooks to the model. Attaching twice is an error, because every head would be gated twice."""
        self._hooks.attach(self, self._before_call, self._after_call, self._gated)
        return self

    def detach(self) -> None:
        """Remove the hooks. The model is as before :meth:`attach`."""
        self._hooks.detach()

    @contextmanager
    def attached(self) -> Iterator[Self]:
        """Attach the gates for a ``with`` block; gates that are attached already stay attached."""
        was_attached = self.is_attached
        if not was_attached:
            self.attach()
        try:
            yield self
        finally:
            if not was_attached:
                self.detach()

    # -- values ------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Return the number of gates in the whole model."""
        return sum(self.sizes)

    @property
    def heads(self) -> int:
        """Return the number of heads in the whole model."""
        return sum(site.heads for site in self.sites)

    @property
    def log_alpha(self) -> nn.Parameter:
        """Return the trainable parameters, ``[gates]``."""
        return self.learned.log_alpha

    def values(self) -> Tensor:
        """Return the deterministic value of every gate in the present mode, ``[gates]``, detached."""
        if self.mode == "open":
            return torch.ones_like(self.mask)
        if self.mode == "masked":
            return self.mask.clone()
        with evaluating(self.learned):
            return self._one_elsewhere(self.learned()).detach()

    def open(self) -> Tensor:
        """Return which gates are above 0 by :meth:`values`: 0/1, ``[gates]``."""
        return (self.values() > 0).float()

    def open_probability(self) -> Tensor:
        """Return P(z > 0) of every gate, ``[gates]``, with a gradient; 1 for kinds that are not learned."""
        return self._one_elsewhere(self.learned.open_probability())

    def _one_elsewhere(self, values: Tensor) -> Tensor:
        """Replace values ``[..., gates]`` of gates that are not learned by 1."""
        return values if self.is_learned is None else torch.where(self.is_learned, values, 1.0)

    def to_heads(self, values: Tensor) -> Tensor:
        """Expand values per gate ``[..., gates]``, such as a mask, to values per head ``[..., heads]`` in site order."""
        if values.shape[-1] != self.size:
            raise GateError(f"values have shape {list(values.shape)}; expected one for each of {self.size} {self.unit}s")
        return values[..., self._gate_of_head(values.device)]

    def to_gates(self, scores: Tensor) -> Tensor:
        """Average scores per head, floating-point ``[..., heads]``, over the heads of each gate, ``[..., gates]``."""
        if scores.shape[-1] != self.heads:
            raise GateError(f"scores have shape {list(scores.shape)}; expected one for each of {self.heads} heads")
        index = self._gate_of_head(scores.device)
        sums = scores.new_zeros(*scores.shape[:-1], self.size).index_add(-1, index, scores)
        return sums / index.bincount(minlength=self.size)

    def _gate_of_head(self, device: torch.device) -> Tensor:
        """Return the index of each head's gate, ``[heads]``. The query heads of a group are adjacent."""
        per_gate = [site.heads // size for site, size in zip(self.sites, self.sizes, strict=True) for _ in range(size)]
        return torch.arange(self.size).repeat_interleave(torch.tensor(per_gate)).to(device)

    def open_heads(self, mask: Tensor | None = None) -> int:
        """Return the number of heads that a mask ``[gates]`` keeps; by default the buffer ``mask``."""
        return int(self.to_heads(self.mask if mask is None else mask).sum())

    def kind_sizes(self) -> dict[str, int]:
        """Return the number of gates of each kind in the model, such as ``{"encoder": 72}``."""
        kinds = [site.kind for site in self.sites]
        return {
            kind: sum(size for own, size in zip(kinds, self.sizes, strict=True) if own == kind)
            for kind in KINDS
            if kind in kinds
        }

    def kind_index(self) -> Tensor:
        """Return the position of each gate's kind in :data:`gates.attention.sites.KINDS`, ``[gates]``."""
        kinds = torch.tensor([KINDS.index(site.kind) for site in self.sites])
        return kinds.repeat_interleave(torch.tensor(self.sizes)).to(self.mask.device)

    def layer_index(self) -> Tensor:
        """Return the index of each gate's site, ``[gates]``."""
        return torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes)).to(self.mask.device)

    def mask_of(self, scores: Tensor, budget: Budget, *, minimum_per_layer: int = 0) -> Tensor:
        """Return the 0/1 mask ``[gates]`` of the highest scores ``[gates]`` within a budget; see :func:`budget_mask`."""
        kinds, layers = self.kind_index().to(scores.device), self.layer_index().to(scores.device)
        return budget_mask(scores, budget, kind_index=kinds, layer_index=layers, minimum_per_layer=minimum_per_layer)

    def set_mask_(self, mask: Tensor) -> Self:
        """Fix the gates at a 0/1 mask ``[gates]``, or at other values, and switch to mode ``"masked"``."""
        if mask.shape != self.mask.shape:
            raise GateError(f"the mask has shape {list(mask.shape)}; this model has {self.size} {self.unit}s to gate")
        self.mask.copy_(mask)
        self.mode = "masked"
        return self

    @contextmanager
    def use(self, values: Tensor) -> Iterator[None]:
        """Use other gate values for a ``with`` block, with their gradients.

        Args:
            values: The values of the gates, ``[gates]``, or ``[batch, gates]`` for values per example.
        """
        if values.dim() not in (1, 2) or values.shape[-1] != self.size:
            raise GateError(f"gate values have shape {list(values.shape)}; expected [{self.size}] or [batch, {self.size}]")
        before = self._override
        self._override = values
        try:
            yield
        finally:
            self._override = before

    @contextmanager
    def probe(self) -> Iterator[Leaves]:
        """Multiply heads by additional gates of 1 per row and position, with respect to which a loss can be differentiated.

        Calls of the model inside the block fill the yielded dictionary.
        """
        before = self._leaves
        self._leaves = Leaves([site.name for site in self.sites])
        try:
            yield self._leaves
        finally:
            self._leaves = before

    def unreached(self) -> list[str]:
        """Return the names of sites whose attention has not run since :meth:`attach`, such as unused cross-attention."""
        return self._hooks.unreached()

    # -- while the model runs ----------------------------------------------------------------------------------

    def _before_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _refuse_head_masks(kwargs, self)
        self._calls.begin(Part(name, module), lambda: self._values_of_call(module, args, kwargs), (args, kwargs))

    def _after_call(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._calls.end(Part(name, module), output)

    def _gated(self, index: int, projection: nn.Module, heads: Tensor) -> Tensor:
        """Return the concatenated heads that a projection reads times their gates; the same tensor if all of these are one."""
        call = self._calls.running()
        if call is None:
            raise GateError(
                f"the output projection of {self.sites[index].name!r} was called outside of its attention module; call the "
                "module, or detach() the gates"
            )
        axis = None
        if call.values is not None and call.values.dim() == 2:
            inputs = None if call.inputs is None else (call.part.module, *call.inputs)
            axis = self.example_axes.of(index, heads.shape, len(call.values), inputs)
        if (values := call.at(index, heads, axis)) is not None:
            in_projection = self._leaves is None and multiplies_in_projection(projection, heads)
            heads = GatedHeads(heads, values) if in_projection else scale_heads(heads, values)
        return heads if self._leaves is None else scale_heads(heads, self._leaves.ones(index, heads, self.sizes[index]))

    def _values_of_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the gate values of a call that begins, drawn once for all sites, so that gradients come together once."""
        if self._override is not None or self.mode == "open":
            return self._override
        if self.mode == "masked":
            return self.mask.clone()  # a recomputed layer needs the mask of its own call
        if not self.training:
            return self._one_elsewhere(self.learned())
        if torch.is_grad_enabled():
            _check_draw(self)
            self.has_drawn = self.has_drawn or not torch.compiler.is_compiling()
        examples = None
        if self.draw_per == "example":
            named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
            examples = count_examples({**named, **kwargs})
        return self._one_elsewhere(self.learned(self.generator, draws=examples))

    # -- state -------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """Return mode, unit and sites as the bytes of a JSON text, uint8 ``[bytes]``: safetensors keep only tensors.

        The number of bytes is the same in every mode, so that checkpoints have tensors of the same shapes.
        """
        state = {"mode": f"{self.mode:10}", "unit": self.unit, "sites": self._site_sizes()}
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | Mapping[str, Any]) -> None:
        """Set the mode, after a check of unit and sites."""
        saved = read_extra_state(state)
        _check_saved(saved, self.unit, self._site_sizes())
        self.mode = saved["mode"]

    def _site_sizes(self) -> dict[str, int]:
        return {site.name: size for site, size in zip(self.sites, self.sizes, strict=True)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the module without a change of dtype, because half precision would lose small steps."""

        def without_cast(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            return applied if applied.dtype == tensor.dtype else tensor.to(applied.device)

        return super()._apply(without_cast, recurse)

    def extra_repr(self) -> str:
        size = f"sites={len(self.sites)}, gates={self.size}"
        return f"family={self.family}, unit={self.unit}, mode={self.mode}, {size}, attached={self.is_attached}"


def _check_draw(gates: HeadGates) -> None:
    """Raise an error for a draw from which gates cannot learn."""
    if not gates.log_alpha.requires_grad:
        raise GateError(
            "log_alpha requires no gradient, so the gates would never learn; set log_alpha.requires_grad = True (after "
            "what froze all parameters, such as get_peft_model), or fix the gates by set_mask_(mask)"
        )
    if gates.generator is not None and is_backward():
        raise GateError(
            "the gated model is recomputed in a backward pass, and its draw cannot be repeated; checkpoint its layers, as "
            "model.gradient_checkpointing_enable({'use_reentrant': False}) does, not a function around the model"
        )


def _refuse_head_masks(inputs: Mapping[str, Any], gates: HeadGates) -> None:
    for name in ("head_mask", "decoder_head_mask", "cross_attn_head_mask"):  # of Transformers 4
        if inputs.get(name) is not None:
            raise GateError(
                f"{name} was passed to a gated model, and Transformers 5 ignores it; give the values to the gates instead, "
                f"one for each of {gates.size} {gates.unit}s: `with gates.use(values):` for a while, or set_mask_(mask)"
            )


def read_extra_state(state: Tensor | Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of :meth:`HeadGates.get_extra_state`, in bytes or as a dictionary, as a dictionary."""
    saved = dict(json.loads(bytes(state.tolist()))) if isinstance(state, Tensor) else dict(state)
    return {**saved, "mode": str(saved["mode"]).strip()}


def _device_of(sites: Sequence[AttentionSite]) -> torch.device:
    """Return the device of the first output projection whose weights are not on the meta device.

    Where all are offloaded, it is the device on which the hooks of accelerate run the first one.
    """
    devices = [parameter.device for site in sites for parameter in site.output.parameters()]
    run_on = [getattr(getattr(site.output, "_hf_hook", None), "execution_device", None) for site in sites]
    devices += [torch.device(device) for device in run_on if device is not None]
    return next((device for device in devices if device.type != "meta"), devices[0] if devices else torch.device("cpu"))


def _of_kinds(kinds: Collection[str] | None, sizes: Mapping[str, int], kind_index: Tensor) -> Tensor | None:
    """Return which gates are of these kinds, bool ``[gates]``; None if all are."""
    for kind in kinds or ():
        if kind not in sizes:
            raise GateError(f"gates of kind {kind!r} are to be learned; this model has {', '.join(map(repr, sizes))} only")
    if kinds is None or set(sizes) <= set(kinds):
        return None
    return torch.tensor([kind in kinds for kind in KINDS]).to(kind_index.device)[kind_index]


def _check_saved(state: Mapping[str, Any], unit: Unit, sites: dict[str, int]) -> None:
    """Raise :class:`GateError` for the saved state of gates of another unit, or of the sites of another model."""
    if state["unit"] != unit:
        raise GateError(
            f"the checkpoint holds gates per {state['unit']}, but these gates are per {unit}; "
            f"build them with unit={state['unit']!r}"
        )
    if state["sites"] != sites:
        raise GateError(
            f"the checkpoint holds gates for {summary(state['sites'])}, but this model has {summary(sites)}; "
            "use the model it was trained with"
        )


def summary(sites: Mapping[str, int]) -> str:
    """Describe sites with their numbers of gates in an error message."""
    return f"{len(sites)} sites with {sum(sites.values())} gates (first {next(iter(sites), None)!r})"
