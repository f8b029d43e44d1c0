"""Wrap a model with its gates in one module, train both, and return the model without the closed heads.

The verbs are those of peft. A gated model behaves like the wrapped one, in a plain PyTorch loop or in
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

from gates.artefact import GateConfig, fetch, load_gates_, save_gates
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


def open_heads_by_layer(gates: HeadGates) -> dict[str, list[int]]:
    """Return for each kind the number of heads in each layer whose gate is above 0 in evaluation mode."""
    parts = gates.to_heads(gates.open()).split([site.heads for site in gates.sites])
    counts = [(site.kind, int(part.sum())) for site, part in zip(gates.sites, parts, strict=True)]
    return {kind: [n for own, n in counts if own == kind] for kind in KINDS if kind in dict(counts)}


class SharedGates:
    """Save, load and upload the gates of a model.

    Attributes:
        base_model: The model without gates.
        gates: The gates on its heads.
        gate_config: The configuration of the gates.
    """

    base_model: PreTrainedModel
    gates: HeadGates
    gate_config: GateConfig

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write only the gates, a few kilobytes: ``gate_config.json``, ``gates.safetensors`` and a model card.

        Save trained weights of the model with ``gated.base_model.save_pretrained``.
        """
        part = transformers_part(self.base_model, self.gates.sites)
        auto = own_auto_class(part)
        name = self.gate_config.base_model
        card = gate_card(self.gates, part, open_heads_by_layer(self.gates), base_model=name, auto=auto)
        save_gates(directory, self.gates, self.gate_config, card=card)

    def load_gates_(self, directory: str | os.PathLike[str]) -> Self:
        """Load the gates that :meth:`save_pretrained` wrote to a local folder.

        Raises:
            GateError: For damaged files, gates of another model or other settings. Nothing changes then.
        """
        load_gates_(directory, self.gates, self.gate_config)
        return self

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | bool | None = None, **more: Any
    ) -> huggingface_hub.CommitInfo:
        """Upload the files of :meth:`save_pretrained` to a repository on the Hugging Face Hub, and create it if necessary.

        Args:
            repo_id: The repository, ``user/name``.
            private, token: The arguments of :meth:`huggingface_hub.HfApi.create_repo`.
            more: Further arguments of :meth:`huggingface_hub.HfApi.upload_folder`, such as ``commit_message``.
        """
        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory)
            api = huggingface_hub.HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            return api.upload_folder(repo_id=repo_id, folder_path=directory, **more)


def get_gated_model(model: PreTrainedModel, config: GateConfig | None = None) -> GatedModel:
    """Put a gate on every head of a model.

    Args:
        model: The Transformers model, which is not copied.
        config: The configuration of the gates; None for the defaults of :class:`GateConfig`.

    Raises:
        GateError: If some attention of the model is unknown, or the model is gated already.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    >>> gated = get_gated_model(BertForSequenceClassification(BertConfig(vocab_size=50, **size)))
    >>> gated.print_open_heads()
    open heads: 8 of 8 (100.0%)
      encoder: 8 of 8, by layer 4 4
    """
    return GatedModel(model, config)


class GatedModel(SharedGates, nn.Module):
    """Combine a Transformers model and the gates on its heads, to train both and keep exactly the budgeted heads.

    Both are submodules, so ``parameters``, ``to``, ``train``, ``eval`` and ``state_dict`` include both. Calls and all other
    attributes (``generate``, ``config``, ``device``) go to the model. In training mode each call draws the gates; in evaluation
    mode they have their evaluation values.

    Args:
        model: The Transformers model, or your own module around one. It is not copied and keeps its mode.
        config: The configuration of the gates.

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
        self.closed_by_training: int | None = None
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the gated base model."""
        if not self.gates.is_attached:
            raise GateError("this model's gates were taken off by unload(); call the returned model, or gate it again")
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":  # not set yet, as during a copy
                raise
            return getattr(self.base_model, name)

    # -- training ----------------------------------------------------------------------------------------------

    def penalty(self, price: Tensor | float) -> Tensor:
        """Return the expected price of the open heads, a differentiable scalar to add to the loss.

        It is constant for the two top-k families, which always keep the number of heads of their budget.

        Args:
            price: The price of one open gate, at least 0; one for all or one each, ``[gates]``.

        Raises:
            GateError: For a negative price, or for gates with a budget, which need no price.
        """
        if not isinstance(price, Tensor) and not (isinstance(price, (int, float)) and 0 <= price < math.inf):
            raise GateError(f"the price of an open {self.gates.unit} is {price!r}; expected a number of at least 0")
        if self.steering is not None and self.steering.is_enforced:
            raise GateError(
                f"the gates are held to a budget of {self.gate_config.budget}, so they need no price; remove penalty(), or "
                "make the gates without a budget"
            )
        return l0_penalty(self.gates.open_probability(), price)

    def parameter_groups(self, learning_rate: float, gate_learning_rate: float = 0.05) -> list[dict[str, Any]]:
        """Return parameter groups for an optimiser: the model's, and the gates', which need larger steps and no decay."""
        backbone = [parameter for parameter in self.base_model.parameters() if parameter.requires_grad]
        return [
            {"params": backbone, "lr": learning_rate},
            {"params": [self.gates.log_alpha], "lr": gate_learning_rate, "weight_decay": 0.0},
        ]

    def clamp_(self) -> None:
        """Clamp the gates to their limits. Call it after every optimiser step when training with a price."""
        self.gates.learned.clamp_()

    def step_(self, progress: float, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Move the gates to the schedule of their budget. Call it after every optimiser step.

        Args:
            progress, optimizer: The arguments of :meth:`gates.gating.schedule.BudgetController.step_`.
        """
        if self.steering is None:
            raise GateError(
                "step_ needs a budget, but there is none; give one, such as GateConfig(budget=18), or train with "
                "penalty(price) and clamp_()"
            )
        self.steering.step_(progress, optimizer)
        self._has_stepped = True

    def fix_mask_(self) -> Tensor:
        """End the pruning: fix the gates at :meth:`mask`, for training and evaluation, and return the mask ``[gates]``.

        ``closed_by_training`` then has the number of gates that training had closed, before their rank closed the rest.

        Raises:
            GateError: For gates with a budget that were trained without :meth:`step_`, or that are all equal.
        """
        if self.steering is not None and self.gates.mode != "masked":
            if self.gates.has_drawn and not self._has_stepped:
                raise GateError(
                    "the gates were trained without step_, so their order is unreliable; call step_(progress, optimizer) after "
                    "every optimiser step, or set_mask_(mask()) to use this order"
                )
            if self.steering.is_arbitrary():
                raise GateError(
                    f"all {self.gates.size} gates are equal, so a budget of {self.gate_config.budget} would keep the first; "
                    "train the gates, or call start_from_(scores) first"
                )
        mask, was_open = self.mask(), self.gates.open()
        if self.gates.mode != "masked":
            self.closed_by_training = int(((was_open == 0) & (mask.to(was_open) == 0)).sum())
        self.set_mask_(mask)
        return self.gates.mask.clone()

    def start_from_(self, scores: Tensor, spread: float = 1.0, *, by_layer: bool = True) -> Self:
        """Initialise the gates from scores before training; see :func:`gates.gating.schedule.set_apart_`.

        Args:
            scores: The score of each gate, ``[gates]``, at least 0, such as raw HIS.
            spread: The units of ``log_alpha`` per standard deviation of the log score.
            by_layer: Whether to normalise scores by layer, for scores that are only comparable within a layer.
        """
        check_scores(self.gates, scores)
        scores = scores if scores.is_floating_point() else scores.double()
        if by_layer:
            scores = normalise_by_layer(scores, self.gates.layer_index().to(scores.device))
        set_apart_(self.gates, scores, spread)
        return self

    def set_budget_(self, budget: int | float | dict[str, int | float]) -> Self:
        """Set the budget before training, as ``GateConfig(budget=...)`` does.

        Raises:
            GateError: For a budget that does not fit the model. Nothing changes then.
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
        """Open all gates temporarily."""
        with self.gates.use(torch.ones_like(self.gates.mask)):
            yield self

    # -- open heads --------------------------------------------------------------------------------------------

    def mask(self, budget: int | float | Mapping[str, int | float] | None = None, *, minimum_per_layer: int = 0) -> Tensor:
        """Return the mask of the gates to keep, ``[gates]``; ``gates.to_heads`` turns it into a mask of heads.

        Args:
            budget: The number of gates to keep, the highest ``log_alpha`` first: a count (18), a fraction (0.25) or one of
                these per kind ({"encoder": 10}). None for the fixed mask, else the configured budget, else the gates above 0
                in evaluation mode.
            minimum_per_layer: The number of gates that every layer keeps. It has no effect without a budget.

        Raises:
            GateError: For a budget that does not fit the model, or a budget for a fixed mask.
        """
        gates = self.gates
        if budget is None:
            steers = self.steering is not None and gates.mode != "masked"
            return self.steering.mask() if steers else gates.open()  # type: ignore[union-attr]
        if gates.mode == "masked":
            raise GateError(
                f"the gates are fixed at a mask that keeps {int(gates.mask.sum())}, so a budget of {budget} cannot be chosen; "
                "remove the budget, or set gates.mode = 'stochastic' to choose by log_alpha again"
            )
        parsed = Budget.parse(budget, gates.kind_sizes())
        return gates.mask_of(gates.log_alpha.detach(), parsed, minimum_per_layer=minimum_per_layer)

    def set_mask_(self, mask: Tensor) -> Self:
        """Fix the gates at a mask ``[gates]`` of 0 and 1, for training and evaluation."""
        check_mask(mask, self.gates.size, self.gates.unit)
        self.gates.set_mask_(mask)
        return self

    def open_heads(self) -> dict[str, list[int]]:
        """Return for each kind the number of heads in each layer whose gate is above 0 in evaluation mode."""
        return open_heads_by_layer(self.gates)

    def print_open_heads(self) -> None:
        """Print the numbers of open heads, in total and by kind and layer."""
        table, total = self.open_heads(), self.gates.heads
        count = sum(map(sum, table.values()))
        print(f"open heads: {count} of {total} ({count / total:.1%})")
        for kind, counts in table.items():
            of_kind = sum(site.heads for site in self.gates.sites if site.kind == kind)
            print(f"  {kind}: {sum(counts)} of {of_kind}, by layer {' '.join(map(str, counts))}")
        if self.closed_by_training is not None:
            closed = int((self.gates.mask == 0).sum())
            others = " and the ranking the others" if self.closed_by_training < closed else ""
            print(f"of {closed} closed {self.gates.unit}s, training closed {self.closed_by_training}{others}")

    def refit_(
        self,
        batches: Iterable[Mapping[str, Tensor]],
        *,
        held_out: Iterable[Mapping[str, Tensor]] | None,
        loss: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
        valid: GivenQueries = None,
        **more: Any,
    ) -> list[Refitted]:
        """Fit weights to the dense model without training, to compensate for the closed heads.

        Args:
            batches: The inputs of the model, equal in every iteration. Some hundred examples are enough.
            held_out: Other batches to check the refit. A refit that raises their loss is an error, and the weights do not
                change. None for no check.
            loss: A function from a held-out batch to its scalar loss; None for the loss of the model.
            valid: A function that returns the queries without padding, where these do not follow from the batches and the
                model; see :func:`gates.recovery.refit.found_queries`.
            more: Further arguments of :func:`gates.recovery.refit.refit_`, such as ``ridge`` and ``dense``.

        Returns:
            The refitted projections, in order.

        Raises:
            GateError: If the mask is not fixed yet, a gate is between 0 and 1, or the refit fails or raises the loss on
                held-out batches. The weights do not change then.
        """
        self._check_fixed()
        run, values = (lambda batch: self.base_model(**batch)), self.gates.values()
        if not torch.equal(values, self.mask()):
            raise GateError("some gates are between 0 and 1 in evaluation mode; call set_mask_(mask()) before refit_")
        for given in (batches, held_out or ()):
            if iter(given) is given:
                raise GateError("the batches can be iterated only once; give a list of them, or a data loader")
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
                raise GateError("the model returns no loss for a held-out batch; add labels to the batches, or give loss=...")
            mean.update(found.detach())
        if not mean.update_called:
            raise GateError("there are no held-out batches; expected at least one, or None to apply the refit unchecked")
        return float(mean.compute())

    # -- taking the gates off ----------------------------------------------------------------------------------

    def unload(self) -> PreTrainedModel:
        """Remove the gates and return the base model. Do not use this wrapper afterwards."""
        self.gates.detach()
        return self.base_model

    def prune_and_unload(self, budget: int | float | Mapping[str, int | float] | None = None, **more: Any) -> PreTrainedModel:
        """Remove the gates and the closed heads physically, and return the base model.

        Args:
            budget: The number of gates to keep fully open, as after ``set_mask_(mask(budget))``. None for the gates in
                evaluation mode; those between 0 and 1 are folded into the output projections.
            more: Further arguments of :func:`gates.surgery.remove.remove_heads_`, such as ``example``.

        Raises:
            GateError: If the budget does not fit the model, the mask is not fixed yet, or heads cannot be removed. Nothing
                changes then.
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
        """Write the model without its closed heads, and do not change it in memory.

        Args:
            directory, tokenizer, more: The arguments of :func:`gates.export.checkpoint.save_pruned`.
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
                f"{int(self.gates.open().sum())} of {self.gates.size} are above 0; call fix_mask_() at the end of pruning"
            )

    # -- the artefact ------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, model: PreTrainedModel, directory_or_name: str | os.PathLike[str], **download: Any) -> Self:
        """Attach the gates that :meth:`save_pretrained` wrote to a model.

        Args:
            model: The base model, with the weights of that time.
            directory_or_name: A local folder, or a repository on the Hugging Face Hub.
            download: The arguments of :func:`huggingface_hub.hf_hub_download`, such as ``revision`` and ``token``.

        Raises:
            GateError: For missing or damaged files, or gates of another model. The model does not change then.

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
