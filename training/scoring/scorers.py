"""Every scored method behind one interface: raw scores of a dense model, computed when first asked for, and what ranks by them.

Raw scores come from passes over the scoring data (:mod:`training.scoring.passes`). A *scorer* turns them into one number per
gate, higher kept first, or searches a mask for each budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
from torch import Tensor

from gates.budget import Budget, budget_mask
from gates.errors import GateError
from gates.hooks.intercept import observe_head_outputs
from gates.hooks.replacement import MeanHeadOutput
from gates.recovery.rescale import rescaled_gates
from gates.scores.fisher import rearrange
from gates.scores.importance import normalise_by_layer
from gates.scores.ranking import RankingName, ranking_scores
from training.runs.cost import NOTHING, Cost, measured
from training.scoring.passes import PASSES, VARIANTS, pass_of
from training.scoring.subject import batches_on_device, ready_to_score

if TYPE_CHECKING:
    from training.data.base import TaskData
    from training.pruner.module import HeadPruner

Batch = dict[str, Tensor]
SECONDS, PEAK_MEMORY = "seconds", "peak-memory-mb"


class Scoring:
    """What a scorer may see: a dense model of one seed with its training data.

    Scores come from ``data.score_dataloader()`` with open gates, without dropout and without autocast. Under DDP every process
    scores its share and all get the whole result.

    Args:
        pruner: built, with the dense model's weights.
        data: its data.
        trainer: says on which device and in how many processes.
        known: where raw scores are kept, in memory by default. Besides the scores it holds the cost of each pass
            (``gradients-seconds`` and ``gradients-peak-memory-mb``, scalars) and the Fisher matrix ``[gates, gates]``.
    """

    def __init__(
        self,
        pruner: HeadPruner,
        data: TaskData,
        trainer: pl.Trainer,
        *,
        known: MutableMapping[str, Tensor] | None = None,
    ) -> None:
        self.pruner, self.data, self.trainer = pruner, data, trainer
        self.known: MutableMapping[str, Tensor] = {} if known is None else known
        self.device = trainer.strategy.root_device

    def raw(self, name: str) -> Tensor:
        """A raw score, ``[gates]`` float64 on the CPU (``fisher-matrix``: ``[gates, gates]``); see
        :data:`training.scoring.passes.PASSES` for names.

        Raises:
            GateError: for an unknown name, or a score that is not defined for this model.
        """
        if name not in self.known:
            self._run(pass_of(name))
        return self.known[name]

    def cost_of(self, method: str) -> Cost:
        """What the passes behind a method cost when they were run, for whichever method; nothing for one that needs none."""
        self._need(method)
        total = NOTHING
        for name in dict.fromkeys(pass_of(raw) for raw in scorer(method).raws):
            seconds, peak = (self.known.get(f"{name}-{what}") for what in (SECONDS, PEAK_MEMORY))
            total = total.then(Cost(0.0 if seconds is None else float(seconds), None if peak is None else float(peak)))
        return total

    def keep(self, method: str, *, alpha: float = 0.5, seed: int = 0) -> Tensor:
        """The scores by which a method ranks, ``[gates]`` float64, higher kept first.

        Args:
            method: of :data:`SCORERS`.
            alpha: of ``hies``; choose it on a selection split.
            seed: of ``random``.

        Raises:
            GateError: for an unknown method, or one that ranks no heads.
        """
        keep = scorer(method).keep
        if keep is None:
            raise GateError(f"{method} searches a mask for each budget and has no ranking; ask for its mask")
        self._need(method)
        return keep(self, alpha, seed).double()

    def mask(self, method: str, budget: Budget, *, alpha: float = 0.5, seed: int = 0, minimum_per_layer: int = 0) -> Tensor:
        """The 0/1 mask ``[gates]`` of a method at a budget, with exactly the budgeted number of ones.

        Args:
            method, alpha, seed: as of :meth:`keep`.
            budget: gates to keep, in total or per kind.
            minimum_per_layer: gates that every layer keeps.
        """
        found = scorer(method)
        base = found.rearranges or method
        gates = self.pruner.gates
        layers = gates.layer_index().cpu()
        mask = budget_mask(
            self.keep(base, alpha=alpha, seed=seed),
            budget,
            kind_index=gates.kind_index().cpu(),
            layer_index=layers,
            minimum_per_layer=minimum_per_layer,
        )
        return rearrange(mask, self.raw("fisher-matrix"), layers) if found.rearranges else mask

    def rescale(self, mask: Tensor, *, batches: int = 16) -> Tensor:
        """Real gate values for any mask, 0 where it is closed, by :func:`gates.recovery.rescale.rescaled_gates`.

        Args:
            mask: 0/1 ``[gates]``, for the weights that the pruner has now.
            batches: how many of the scoring data's to fit on in each process, at least, spread over all lengths; they have far
                more positions than there are unknowns.

        Returns:
            ``[gates]``, float64 on the CPU.
        """
        task, backbone = self.pruner.task, self.pruner.backbone

        def calibration() -> Iterator[Batch]:
            loader = self.data.score_dataloader()
            every = max(1, len(loader) // batches)
            return islice(batches_on_device(loader, self.trainer, bar=False), 0, None, every)  # a bar per site would be many

        with ready_to_score(self.pruner, self.trainer):
            return rescaled_gates(
                self.pruner.gates, mask, calibration, lambda batch: task.losses(backbone, batch), task.valid_queries
            )

    def mean_outputs(self) -> list[Tensor]:
        """The mean head output of each site, ``[heads * head_dim]``, for :func:`gates.hooks.replacement.mean_replacement`."""
        task, backbone, sites = self.pruner.task, self.pruner.backbone, self.pruner.gates.sites
        means = MeanHeadOutput(sites).to(self.device)
        with ready_to_score(self.pruner, self.trainer), torch.no_grad():
            for batch in self.batches("mean outputs"):
                valid = task.valid_queries(batch)

                def take(site: int, heads: Tensor, valid: dict[str, Tensor | None] = valid) -> None:
                    means.update(site, heads, valid.get(sites[site].kind))

                with observe_head_outputs(sites, take):
                    task.losses(backbone, batch)
        return [mean.cpu() for mean in means.compute()]

    def by_layer(self, name: str) -> Tensor:
        """A raw score divided by its l2 norm over each layer."""
        return normalise_by_layer(self.raw(name), self.pruner.gates.layer_index().cpu())

    # -- passes ------------------------------------------------------------------------------------------------

    def batches(self, description: str) -> Iterator[Batch]:
        """The scoring data of this process, on its device."""
        return batches_on_device(self.data.score_dataloader(), self.trainer, description)

    def losses(self, batch: Batch) -> Tensor:
        """Per-example losses ``[batch]``."""
        return self.pruner.task.losses(self.pruner.backbone, batch)[0]

    def _need(self, method: str) -> None:
        """Compute a method's raw scores in their order, so that a later pass finds the earlier one done."""
        for raw in scorer(method).raws:
            self.raw(raw)

    def _run(self, name: str) -> None:
        """Go over the data once and remember what came out, and what it cost."""
        with measured(self.device) as meter, ready_to_score(self.pruner, self.trainer):
            found = PASSES[name].run(self)
        # The cost first: a process killed in between would leave scores that cost nothing.
        for what, value in ((SECONDS, meter.cost.seconds), (PEAK_MEMORY, meter.cost.peak_memory_mb)):
            if value is not None:
                self.known[f"{name}-{what}"] = torch.tensor(value, dtype=torch.float64)
        for score, values in found.items():
            self.known[score] = values.detach().double().cpu()


Keep = Callable[[Scoring, float, int], Tensor]


@dataclass(frozen=True)
class Scorer:
    """A scored method.

    Args:
        name: of the method.
        source: whom it is from.
        what: it does, in one line.
        raws: raw scores it needs.
        keep: from (scoring, alpha, seed) to scores ``[gates]``, higher kept first; None for a search without a ranking.
        rearranges: the method whose mask it rearranges within each layer; empty for a method that is a ranking.
    """

    name: str
    source: str
    what: str
    raws: tuple[str, ...]
    keep: Keep | None
    rearranges: str = ""

    @property
    def ranks(self) -> bool:
        """Whether one ranking gives its mask at every budget."""
        return self.keep is not None


def _by_raw(name: str, raw: str, source: str, what: str, *, by_layer: bool = False) -> Scorer:
    """A method that ranks by one raw score, as it is or normalised by layer."""
    return Scorer(name, source, what, (raw,), lambda scoring, *_: scoring.by_layer(raw) if by_layer else scoring.raw(raw))


def _his(name: str) -> Scorer:
    """A variant of HIS with all heads open."""
    variant = VARIANTS[name]
    what = OF_HIS[variant.raw][1] + (", normalised by layer" if variant.by_layer else "")
    return _by_raw(name, variant.raw, OF_HIS[variant.raw][0], what, by_layer=variant.by_layer)


def _in_steps(name: str) -> Scorer:
    """A variant of HIS that is found again as heads go."""
    raw, found = VARIANTS[name].raw, f"{name}-steps"
    what = f"{name} again after every tenth of the heads"
    return Scorer(found, OF_HIS[raw][0], what, (raw, found), lambda scoring, *_: scoring.raw(found))


def _ranking(name: RankingName, raws: tuple[str, ...], source: str, what: str) -> Scorer:
    """A method of :data:`gates.scores.ranking.RANKINGS`; of HIS and entropy only what it needs is computed."""

    def keep(scoring: Scoring, alpha: float, seed: int) -> Tensor:
        layers = scoring.pruner.gates.layer_index().cpu()
        scores = {raw: scoring.raw(raw) if raw in raws else torch.zeros(len(layers)) for raw in ("his", "entropy")}
        return ranking_scores(name, his=scores["his"], entropy=scores["entropy"], layer_index=layers, alpha=alpha, seed=seed)

    return Scorer(name, source, what, raws, keep)


MICHEL, DSP, CHOI = "Michel, Levy and Neubig 2019", "Li, Cotterell and Sachan 2021", "Choi et al. 2025"
KWON, VOITA = "Kwon et al. 2022", "Voita et al. 2019"
OF_HIS = {
    "his": (MICHEL, "E|dL/dz| per example"),
    "his-token": (f"{MICHEL} (code)", "absolute values per token"),
    "his-batch": (f"{DSP} (code)", "absolute values per batch"),
}
"""Source of each raw HIS and what it is, in one line."""
_ALL = (
    *(_his(name) for name in VARIANTS),
    *(_in_steps(name) for name in VARIANTS),
    _ranking("his-inverted", ("his",), "control", "keeps what HIS gives up first"),
    _by_raw("attention-his", "attention-his", "lecture notes", "E sum|dL/dA| over the attention weights A"),
    _by_raw("fisher", "fisher", KWON, "diagonal Fisher information of the gates"),
    Scorer("fisher-rearranged", KWON, "rearranged by each layer's Fisher block", ("fisher", "fisher-matrix"), None, "fisher"),
    _by_raw("taylor-weights", "taylor-weights", "Molchanov et al. 2019", "sum|w dL/dw| over the output weights"),
    _by_raw("leave-one-out", "leave-one-out", MICHEL, "what closing the head alone adds to the loss"),
    _by_raw("confidence", "confidence", VOITA, "mean of the largest attention weight"),
    _ranking("entropy-low-first", ("entropy",), "control", "gives up low attention entropy first"),
    _ranking("entropy-high-first", ("entropy",), CHOI, "gives up high attention entropy first"),
    _ranking("hies", ("his", "entropy"), CHOI, "HIS and low entropy, weighted by alpha"),
    _ranking("rank-sum", ("his", "entropy"), "control", "ranks of HIS and of low entropy, added"),
    _ranking("random", (), "control", "heads drawn by the seed"),
)
SCORERS: dict[str, Scorer] = {found.name: found for found in _ALL}


def scorer(method: str) -> Scorer:
    """A scored method by its name.

    Raises:
        GateError: for a name that is none.
    """
    if method not in SCORERS:
        raise GateError(f"unknown scored method {method!r}; expected one of {', '.join(SCORERS)}")
    return SCORERS[method]
