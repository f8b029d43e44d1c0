"""A model with its gates in one module: wrap it, train both, hand back the model without the heads that closed.

The verbs are those of peft. ``gated`` behaves like the model it wraps, in a plain PyTorch loop as in
:class:`gates.trainer.GatedTrainer`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import huggingface_hub
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from transformers import PreTrainedModel

from gates.artefact import GateConfig, fetch, load_gates_, save_gates, upload
from gates.attention.sites import KINDS
from gates.errors import GateError
from gates.export.card import gate_card
from gates.export.checkpoint import SavesPretrained, own_auto_class, save_pruned
from gates.gating.budget import Budget, check_mask
from gates.gating.head_gates import HeadGates
from gates.gating.price import l0_penalty
from gates.gating.schedule import check_scores, set_apart_
from gates.recovery.refit import GivenQueries, Refitted, found_queries, refit_
from gates.scores.importance import normalise_by_layer
from gates.surgery.remove import remove_heads_, transformers_part

# How many heads are open, by kind and layer.


def open_heads_by_layer(gates: HeadGates) -> dict[str, list[int]]:
    """Heads whose gate is above 0 in evaluation mode: for each kind, their number in each of its layers."""
    parts = gates.to_heads(gates.open()).split([site.heads for site in gates.sites])
    counts = [(site.kind, int(part.sum())) for site, part in zip(gates.sites, parts, strict=True)]
    return {kind: [n for own, n in counts if own == kind] for kind in KINDS if kind in dict(counts)}


def open_heads_as_text(gates: HeadGates) -> str:
    """How many heads are open, in total and by kind and layer, in lines."""
    table = open_heads_by_layer(gates)
    count, total = sum(map(sum, table.values())), gates.heads
    lines = [f"open heads: {count} of {total} ({count / total:.1%})"]
    for kind, counts in table.items():
        of = sum(site.heads for site in gates.sites if site.kind == kind)
        lines.append(f"  {kind}: {sum(counts)} of {of}, by layer {' '.join(map(str, counts))}")
    return "\n".join(lines)


# A gated model's own artefact: its gates alone, written to a folder or to the hub.


class SharedGates:
    """What a model with gates can do with them alone.

    Attributes:
        base_model: the model without gates.
        gates: on its heads.
        gate_config: that they are made with.
    """

    base_model: PreTrainedModel
    gates: HeadGates
    gate_config: GateConfig

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the gates alone, a few kilobytes: ``gate_config.json``, ``gates.safetensors`` and a model card.

        The model's own weights are not included; if they were trained too, save them with
        ``gated.base_model.save_pretrained``.
        """
        part = transformers_part(self.base_model, self.gates.sites)
        auto = own_auto_class(part)
        name = self.gate_config.base_model
        card = gate_card(self.gates, part, open_heads_by_layer(self.gates), base_model=name, auto=auto)
        save_gates(directory, self.gates, self.gate_config, card=card)

    def load_gates_(self, directory: str | os.PathLike[str]) -> Self:
        """Bring the gates to the state that :meth:`save_pretrained` left in a local folder.

        Raises:
            GateError: for damaged files, gates of another model or of other settings; nothing is changed then.
        """
        load_gates_(directory, self.gates, self.gate_config)
        return self

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | bool | None = None, **more: Any
    ) -> huggingface_hub.CommitInfo:
        """Upload what :meth:`save_pretrained` writes to a repository on the Hugging Face hub, made if it is missing.

        Args:
            repo_id: ``user/repository``.
            private, token: see :meth:`huggingface_hub.HfApi.create_repo`.
            more: ``commit_message``, ``revision`` and what else :meth:`huggingface_hub.HfApi.upload_folder` takes.
        """
        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory)
            return upload(directory, repo_id, private=private, token=token, **more)


def get_gated_model(model: PreTrainedModel, config: GateConfig | None = None) -> GatedModel:
    """Put a gate on every head of a model.

    Args:
        model: Transformers model, which is wrapped and not copied.
        config: configuration of the gates; None for the defaults of :class:`GateConfig`.

    Raises:
        GateError: if the model's attention is unknown or covered only in part, or gated already.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    >>> gated = get_gated_model(BertForSequenceClassification(BertConfig(vocab_size=50, **size)))
    >>> gated.print_open_heads()
    open heads: 8 of 8 (100.0%)
      encoder: 8 of 8, by layer 4 4
    """
    return GatedModel(model, config)


class GatedModel(SharedGates, nn.Module):
    """A Transformers model and the gates on its heads: train both, then keep exactly the budgeted heads.

    Both are submodules, so ``parameters``, ``to``, ``train``, ``eval`` and ``state_dict`` cover them together. Calls go to
    the model, and so does every attribute that is not listed here (``generate``, ``config``, ``device``).

    In training mode the gates are drawn anew for each call; in evaluation mode they take their evaluation values.

    Args:
        model: Transformers model, or a module of one's own around one, which is wrapped and not copied and stays in its mode.
        config: configuration of the gates.

    A plain loop that ends with exactly three heads:

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    >>> model = BertForSequenceClassification(BertConfig(vocab_size=50, **size))
    >>> gated = GatedModel(model, GateConfig(budget=3)).train()
    >>> optimizer = torch.optim.AdamW(gated.parameter_groups(5e-5, gate_learning_rate=0.05))
    >>> for step in range(4):
    ...     gated(input_ids=torch.randint(50, (3, 7)), labels=torch.tensor([0, 1, 0])).loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     gated.step_((step + 1) / 4, optimizer)
    >>> mask = gated.fix_mask_()  # from here on the weights can be trained with the mask
    >>> smaller = gated.prune_and_unload()
    >>> len(get_gated_model(smaller).mask())
    3
    """

    def __init__(self, model: PreTrainedModel, config: GateConfig | None = None) -> None:
        super().__init__()
        if isinstance(model, GatedModel):
            raise GateError("this model is gated already; unload() it first")
        config = config or GateConfig()
        name = config.base_model or getattr(model, "name_or_path", "")
        self.gate_config = replace(config, base_model=name)
        self.gates = config.gates_for(model)
        transformers_part(model, self.gates.sites)  # raises where heads could not be removed in the end
        self.gates.attach()
        self.steering = config.steering_for(self.gates)
        self.base_model = model
        self._has_stepped = False
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base model's forward, gated."""
        if not self.gates.is_attached:
            raise GateError("this model's gates were taken off (unload); call the model that came back, or gate it again")
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":  # asked for before there is one, as when a copy is made
                raise
            return getattr(self.base_model, name)

    # -- training ----------------------------------------------------------------------------------------------

    def penalty(self, price: Tensor | float) -> Tensor:
        """The price of the heads in expectation, to be added to the loss: a differentiable scalar.

        The two top-k families always keep as many heads as their budget says, so that it is a constant for them.

        Args:
            price: price of one open gate, at least 0, the same for all or one each, ``[gates]``; see
                :func:`gates.gating.price.l0_penalty`.

        Raises:
            GateError: for gates that are held to a budget, whose number follows from no price, or a number below 0.
        """
        if not isinstance(price, Tensor) and not (isinstance(price, (int, float)) and 0 <= price < math.inf):
            raise GateError(f"the price of an open {self.gates.unit} is {price!r}; expected a number of at least 0")
        if self.steering is not None and self.steering.is_enforced:
            raise GateError(
                f"the gates are held to a budget of {self.gate_config.budget}, so no price is to be paid; leave out penalty(), "
                "or make the gates without a budget"
            )
        return l0_penalty(self.gates.open_probability(), price)

    def parameter_groups(self, learning_rate: float, gate_learning_rate: float = 0.05) -> list[dict[str, Any]]:
        """Trainable parameters for an optimiser: the model's, and the gates', which need far longer steps and no decay."""
        backbone = [parameter for parameter in self.base_model.parameters() if parameter.requires_grad]
        return [
            {"params": backbone, "lr": learning_rate},
            {"params": [self.gates.log_alpha], "lr": gate_learning_rate, "weight_decay": 0.0},
        ]

    def clamp_(self) -> None:
        """Bring the gates back into their limits; call it after every optimiser step of a training with a price."""
        self.gates.learned.clamp_()

    def step_(self, progress: float, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Hold the gates to their way to the budget; call it after every optimiser step.

        Args:
            progress, optimizer: see :meth:`gates.gating.schedule.BudgetController.step_`.

        Raises:
            GateError: without a budget, or for a progress outside 0 to 1.
        """
        if self.steering is None:
            raise GateError(
                "step_ leads gates to a budget, and there is none; give one, for example GateConfig(budget=18), or train with "
                "penalty(price) and clamp_()"
            )
        self.steering.step_(progress, optimizer)
        self._has_stepped = True

    def fix_mask_(self) -> Tensor:
        """End the pruning: fix the gates at :meth:`mask`, for training and evaluation alike, and return it, ``[gates]``.

        Raises:
            GateError: for gates with a budget that were trained without :meth:`step_`, or that are all equal.
        """
        if self.steering is not None and self.gates.mode != "masked":
            if self.gates.has_drawn and not self._has_stepped:
                raise GateError(
                    "the gates were trained and never led to their budget, so their order says little; call step_(progress, "
                    "optimizer) after every step of the optimiser, or set_mask_(mask()) to keep the order as it is"
                )
            if self.steering.is_arbitrary():
                raise GateError(
                    f"all {self.gates.size} gates are equal, so a budget of {self.gate_config.budget} would keep the first; "
                    "train the gates, or begin with start_from_(scores)"
                )
        self.set_mask_(self.mask())
        return self.gates.mask.clone()

    def start_from_(self, scores: Tensor, spread: float = 1.0, *, by_layer: bool = True) -> Self:
        """Set the gates apart by scores before they are trained; see :func:`gates.gating.schedule.set_apart_`.

        Args:
            scores: of each gate, ``[gates]``, at least 0, such as raw HIS.
            spread: units of ``log_alpha`` for each standard deviation of the logarithm.
            by_layer: whether scores are normalised by layer first, as those of one layer alone can be compared.
        """
        check_scores(self.gates, scores)
        scores = scores if scores.is_floating_point() else scores.double()
        if by_layer:
            scores = normalise_by_layer(scores, self.gates.layer_index().to(scores.device))
        set_apart_(self.gates, scores, spread)
        return self

    def set_budget_(self, budget: int | float | dict[str, int | float]) -> Self:
        """Give gates a budget before they are trained; the same as ``GateConfig(budget=...)`` from the first.

        Raises:
            GateError: for a budget that the model cannot have; nothing is changed then.
        """
        config, before = replace(self.gate_config, budget=budget), self.gates
        gates = config.gates_for(self.base_model)
        self.steering = config.steering_for(gates)
        gates.learned.log_alpha = before.log_alpha  # an optimiser may have it already
        gates.generator = before.generator
        before.detach()
        self.gate_config, self.gates = config, gates.train(before.training).attach()
        return self

    @contextmanager
    def disable_gates(self) -> Iterator[Self]:
        """The ungated model for the length of a ``with`` block."""
        with self.gates.use(torch.ones_like(self.gates.mask)):
            yield self

    # -- what is open ------------------------------------------------------------------------------------------

    def mask(self, budget: int | float | Mapping[str, int | float] | None = None, *, minimum_per_layer: int = 0) -> Tensor:
        """Which gates to keep: 0/1, ``[gates]``; ``gates.to_heads`` turns it into a mask of heads.

        Args:
            budget: number of gates to keep, the highest ``log_alpha`` first: a count (18), a fraction (0.25) or one of these
                per kind ({"encoder": 10}). None for a mask that is fixed, or the configured budget, or without one the gates
                above 0 in evaluation mode.
            minimum_per_layer: number of gates that every layer keeps; without effect where no budget is given.

        Raises:
            GateError: for a budget that the model cannot have, or one beside a mask that is fixed already.
        """
        gates = self.gates
        if budget is None:
            steers = self.steering is not None and gates.mode != "masked"
            return self.steering.mask() if steers else gates.open()  # type: ignore[union-attr]
        if gates.mode == "masked":
            raise GateError(
                f"the gates are fixed at a mask that keeps {int(gates.mask.sum())}, so a budget of {budget} cannot be chosen; "
                "leave it out, or set gates.mode = 'stochastic' to choose by log_alpha again"
            )
        parsed = Budget.parse(budget, gates.kind_sizes())
        return gates.mask_of(gates.log_alpha.detach(), parsed, minimum_per_layer=minimum_per_layer)

    def set_mask_(self, mask: Tensor) -> Self:
        """Fix the gates at a 0/1 mask ``[gates]``, for training and evaluation alike."""
        check_mask(mask, self.gates.size, self.gates.unit)
        self.gates.set_mask_(mask)
        return self

    def open_heads(self) -> dict[str, list[int]]:
        """Heads whose gate is above 0 in evaluation mode: for each kind, their number in each of its layers."""
        return open_heads_by_layer(self.gates)

    def print_open_heads(self) -> None:
        """Print how many heads are open, in total and by kind and layer."""
        print(open_heads_as_text(self.gates))

    def refit_(
        self,
        batches: Iterable[Mapping[str, Tensor]],
        *,
        held_out: Iterable[Mapping[str, Tensor]] | None,
        loss: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
        valid: GivenQueries = None,
        **more: Any,
    ) -> list[Refitted]:
        """Make up for the closed heads without training: the weights behind the open ones are fitted to the dense model.

        Args:
            batches: inputs of the model, the same ones each time they are gone through; some hundred examples are enough.
            held_out: Other batches, which judge the refit. If their loss rises, the weights stay as they were, and that is an
                error. None to apply the refit without a judgement.
            loss: A function from a held-out batch to its loss, a scalar; None for the loss that the model computes itself.
            valid: what padding the batches have, where it does not follow from them and the model; see
                :func:`gates.recovery.refit.found_queries`.
            more: ``ridge``, ``dense`` and what else :func:`gates.recovery.refit.refit_` takes.

        Returns what was refitted, in order.

        Raises:
            GateError: for gates with a budget whose mask is not fixed yet, values between 0 and 1, a refit that raises the loss
                on held-out batches, or what the functions raise; the weights stay as they were.
        """
        self._check_fixed()
        run, values = (lambda batch: self.base_model(**batch)), self.gates.values()
        if not torch.equal(values, self.mask()):
            raise GateError("some gates are between 0 and 1 in evaluation mode; call set_mask_(mask()) before refit_")
        for given in (batches, held_out or ()):
            if iter(given) is given:
                raise GateError("the batches can be gone through only once; give a list of them, or a data loader")
        if held_out is not None:
            more["held_out_loss"] = partial(self._mean_loss, held_out, loss)
        return refit_(self.gates, self.mask(), lambda: batches, run, partial(found_queries, self.gates, run, valid), **more)

    def _mean_loss(
        self, batches: Iterable[Mapping[str, Tensor]], loss: Callable[[Mapping[str, Tensor]], Tensor] | None
    ) -> float:
        mean = MeanMetric(nan_strategy=math.inf).to(self.gates.mask.device)  # over the batches of all processes
        for batch in batches:
            found = getattr(self(**batch), "loss", None) if loss is None else loss(batch)
            if found is None:
                raise GateError("the model gives no loss for a held-out batch; add labels to the batches, or give loss=...")
            mean.update(found.detach())
        if not mean.update_called:
            raise GateError("there are no held-out batches; expected at least one, or None to apply the refit unjudged")
        return float(mean.compute())

    # -- taking the gates off ----------------------------------------------------------------------------------

    def unload(self) -> PreTrainedModel:
        """The base model without a trace of the gates; this wrapper is of no further use."""
        self.gates.detach()
        return self.base_model

    def prune_and_unload(self, budget: int | float | Mapping[str, int | float] | None = None, **more: Any) -> PreTrainedModel:
        """The base model without the closed heads: they are physically gone, and the gates with them.

        Args:
            budget: number of gates to keep, which then count fully (as after ``set_mask_(mask(budget))``); None for what this
                model computes in evaluation mode, gates between 0 and 1 folded into the output projections.
            more: further arguments of :func:`gates.surgery.remove.remove_heads_`, such as ``example``.

        Raises:
            GateError: for a budget that the model cannot have, a mask not fixed yet, or heads that cannot go; nothing changes.
        """
        if budget is None:
            self._check_fixed()
        mask = self.mask(budget)
        values = self.gates.values() if budget is None else torch.ones_like(mask)
        self.gates.detach()
        try:
            return remove_heads_(self.base_model, self.gates.to_heads(mask), values=self.gates.to_heads(values), **more)
        except BaseException:
            self.gates.attach()
            raise

    def save_pruned(self, directory: str | os.PathLike[str], *, tokenizer: SavesPretrained | None = None, **more: Any) -> Path:
        """Write the model without its closed heads, and leave it as it is here.

        Args:
            directory, tokenizer, more: see :func:`gates.export.checkpoint.save_pruned`.

        Raises:
            GateError: for gates with a budget whose mask is not fixed yet, and for what the function raises.
        """
        self._check_fixed()
        mask, values = (self.gates.to_heads(tensor) for tensor in (self.mask(), self.gates.values()))
        self.gates.detach()
        try:
            return save_pruned(self.base_model, directory, mask, values=values, tokenizer=tokenizer, **more)
        finally:
            self.gates.attach()

    def _check_fixed(self) -> None:
        if self.steering is not None and self.gates.mode != "masked":
            raise GateError(
                f"the gates have a budget of {self.gate_config.budget}, but their mask is not fixed: "
                f"{int(self.gates.open().sum())} of {self.gates.size} are above 0; call fix_mask_() where pruning ends"
            )

    # -- the artefact ------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, model: PreTrainedModel, directory_or_name: str | os.PathLike[str], **download: Any) -> Self:
        """Gate a model as it was when :meth:`save_pretrained` wrote the artefact.

        Args:
            model: the base model, with the weights it had then.
            directory_or_name: a local folder, or a repository on the Hugging Face hub.
            download: ``revision``, ``token`` and what else :func:`huggingface_hub.hf_hub_download` takes.

        Raises:
            GateError: for files that are missing or damaged, or gates of another model; the model is left as it was.

        >>> from transformers import BertConfig, BertModel
        >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
        >>> model = BertModel(BertConfig(vocab_size=50, **size))
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as directory:
        ...     GatedModel(model).set_mask_(torch.tensor([1.0, 0, 0, 0, 0, 1, 0, 0])).save_pretrained(directory)
        ...     gated = GatedModel.from_pretrained(BertModel(model.config), directory)
        >>> gated.open_heads()
        {'encoder': [1, 1]}
        """
        directory = fetch(directory_or_name, **download)
        gated = cls(model, GateConfig.from_json_file(directory / "gate_config.json"))
        try:
            return gated.load_gates_(directory)
        except GateError:
            gated.unload()
            raise
