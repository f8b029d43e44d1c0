"""Every scored method behind one interface: a scorer turns raw scores into one number per gate, higher kept first.

Raw scores come from passes over the scoring data (:mod:`training.scoring.passes`), each computed when first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gates.budget import Budget, budget_mask
from gates.errors import GateError
from gates.scores.fisher import rearrange
from gates.scores.importance import normalise_by_layer
from gates.scores.ranking import RankingName, hies, layer_leaders_first, ranking_scores, ranks
from training.runs.cost import NOTHING, Cost, measured
from training.scoring.passes import PASSES, VARIANTS, pass_of
from training.scoring.subject import Subject

OF_COST = {
    "seconds": "seconds", "peak_memory_mb": "peak-memory-mb", "forward_examples": "forward", "backward_examples": "backward",
}  # fmt: skip
"""What is kept of the cost of a pass, and under which name."""


class Scores:
    """Scores of a subject's heads, with open gates, without dropout and without autocast. Under DDP every process scores its
    share and all get the whole result.

    Args:
        subject: with the dense model's weights.
        known: where raw scores are kept, in memory by default. Besides the scores it holds the cost of each pass
            (``gradients-seconds`` and ``gradients-peak-memory-mb``, scalars) and the Fisher matrix ``[gates, gates]``.
    """

    def __init__(self, subject: Subject, known: MutableMapping[str, Tensor] | None = None) -> None:
        self.subject = subject
        self.known: MutableMapping[str, Tensor] = {} if known is None else known
        self.layer_index, self.kind_index = subject.gates.layer_index().cpu(), subject.gates.kind_index().cpu()

    def raw(self, name: str) -> Tensor:
        """A raw score, ``[gates]`` float64 on the CPU (``fisher-matrix``: ``[gates, gates]``); see
        :data:`training.scoring.passes.PASSES` for names.

        Raises:
            GateError: for an unknown name, or a score that is not defined for this model.
        """
        if name not in self.known:
            self._run(pass_of(name))
        return self.known[name]

    def by_layer(self, name: str) -> Tensor:
        """A raw score divided by its l2 norm over each layer."""
        return normalise_by_layer(self.raw(name), self.layer_index)

    def cost_of(self, method: str) -> Cost:
        """The cost of the passes behind a method when they were run, for whichever method; nothing where there are none."""
        self._need(method)
        total = NOTHING
        for name in dict.fromkeys(pass_of(raw) for raw in scorer(method).raws):
            kept = {part: self.known.get(f"{name}-{title}") for part, title in OF_COST.items()}
            total = total.then(Cost.of({part: float(value) for part, value in kept.items() if value is not None}))
        return total

    def ranking(self, method: str, *, alpha: float = 0.5, seed: int = 0) -> Tensor:
        """The scores by which a method ranks, ``[gates]`` float64, higher kept first.

        Args:
            method: of :data:`SCORERS`.
            alpha: of a weighted method; choose it on a selection split.
            seed: of ``random``.

        Raises:
            GateError: for an unknown method, or one that ranks no heads.
        """
        ranking = scorer(method).ranking
        if ranking is None:
            raise GateError(f"{method} searches a mask for each budget and has no ranking; ask for its mask")
        self._need(method)
        return ranking(self, alpha, seed).double()

    def mask(self, method: str, budget: Budget, *, alpha: float = 0.5, seed: int = 0, minimum_per_layer: int = 0) -> Tensor:
        """The 0/1 mask ``[gates]`` of a method at a budget, with exactly the budgeted number of ones.

        Args:
            method, alpha, seed: as of :meth:`ranking`.
            budget: gates to keep, in total or per kind.
            minimum_per_layer: gates that every layer keeps.
        """
        found = scorer(method)
        mask = budget_mask(
            self.ranking(found.rearranges or method, alpha=alpha, seed=seed),
            budget,
            kind_index=self.kind_index,
            layer_index=self.layer_index,
            minimum_per_layer=minimum_per_layer,
        )
        return rearrange(mask, self.raw("fisher-matrix"), self.layer_index) if found.rearranges else mask

    def _need(self, method: str) -> None:
        """Compute a method's raw scores in their order, so that a later pass finds the earlier one done."""
        for raw in scorer(method).raws:
            self.raw(raw)

    def _run(self, name: str) -> None:
        """Go over the data once and remember what came out, and what it cost."""
        with measured(self.subject.device, self.subject.gates) as meter, self.subject.at_rest():
            found = PASSES[name].run(self.subject, self.raw)
        # The cost first: a process killed in between would leave scores that cost nothing.
        for part, title in OF_COST.items():
            if (value := getattr(meter.cost, part)) is not None:
                self.known[f"{name}-{title}"] = torch.tensor(value, dtype=torch.float64)
        for score, values in found.items():
            self.known[score] = values.detach().double().cpu()


Ranking = Callable[[Scores, float, int], Tensor]


@dataclass(frozen=True)
class Scorer:
    """A scored method.

    Args:
        name: of the method.
        source: whom it is from.
        what: it does, in one line.
        raws: raw scores it needs.
        ranking: from (scores, alpha, seed) to numbers ``[gates]``, higher kept first; None for a search without a ranking.
        rearranges: the method whose mask it rearranges within each layer; empty for a method that is a ranking.
        is_weighted: whether its ranking depends on alpha.
    """

    name: str
    source: str
    what: str
    raws: tuple[str, ...]
    ranking: Ranking | None
    rearranges: str = ""
    is_weighted: bool = False

    @property
    def ranks(self) -> bool:
        """Whether one ranking gives its mask at every budget."""
        return self.ranking is not None


def _by_raw(name: str, raw: str, source: str, what: str, *, by_layer: bool = False) -> Scorer:
    """A method that ranks by one raw score, as it is or normalised by layer."""
    return Scorer(name, source, what, (raw,), lambda scores, *_: scores.by_layer(raw) if by_layer else scores.raw(raw))


def _his(name: str) -> Scorer:
    """A variant of HIS with all heads open."""
    variant = VARIANTS[name]
    what = OF_HIS[variant.raw][1] + (", normalised by layer" if variant.by_layer else "")
    return _by_raw(name, variant.raw, OF_HIS[variant.raw][0], what, by_layer=variant.by_layer)


def _in_steps(name: str) -> Scorer:
    """A variant of HIS that is found again as heads go."""
    raw, found = VARIANTS[name].raw, f"{name}-steps"
    what = f"{name} again after every tenth of the heads"
    return Scorer(found, OF_HIS[raw][0], what, (raw, found), lambda scores, *_: scores.raw(found))


def _ranking(name: RankingName, raws: tuple[str, ...], source: str, what: str) -> Scorer:
    """A method of :data:`gates.scores.ranking.RANKINGS`; of HIS and entropy only what it needs is computed."""

    def rank(scores: Scores, alpha: float, seed: int) -> Tensor:
        layers = scores.layer_index
        found = {raw: scores.raw(raw) if raw in raws else torch.zeros(len(layers)) for raw in ("his", "entropy")}
        return ranking_scores(name, his=found["his"], entropy=found["entropy"], layer_index=layers, alpha=alpha, seed=seed)

    return Scorer(name, source, what, raws, rank, is_weighted=name == "hies")


def _rank_sum_broad(scores: Scores, alpha: float, seed: int) -> Tensor:
    """Important and broad: the ranks of HIS and of high entropy, added."""
    return ranks(scores.by_layer("his")) + ranks(scores.raw("entropy"))


def _hies_broad(scores: Scores, alpha: float, seed: int) -> Tensor:
    """HIES the other way round: of minus the entropy, its low end is the entropy's high end."""
    return hies(scores.by_layer("his"), -scores.raw("entropy"), alpha)


MICHEL, DSP, CHOI = "Michel, Levy and Neubig 2019", "Li, Cotterell and Sachan 2021", "Choi et al. 2025"
KWON, VOITA, OURS = "Kwon et al. 2022", "Voita et al. 2019", "this project"
ACHTIBAT = "Achtibat et al. 2024"
KURTIC = "Kurtic, Frantar and Alistarh 2023"
OF_HIS = {
    "his": (MICHEL, "E|dL/dz| per example"),
    "his-token": (f"{MICHEL} (code)", "absolute values per token"),
    "his-batch": (f"{DSP} (code)", "absolute values per batch"),
}
"""Source of each raw HIS and what it is, in one line."""
_ALL = (
    *(_his(name) for name in VARIANTS),
    *(_in_steps(name) for name in VARIANTS),
    Scorer(
        "his-each-layer",
        "control",
        "his with the best head of each layer first",
        ("his",),
        lambda scores, *_: layer_leaders_first(scores.by_layer("his"), scores.layer_index),
    ),
    _ranking("his-inverted", ("his",), "control", "keeps what HIS gives up first"),
    _by_raw("attention-his", "attention-his", "lecture notes", "E sum|dL/dA| over the attention weights A"),
    _by_raw("fisher", "fisher", KWON, "diagonal Fisher information of the gates"),
    Scorer("fisher-rearranged", KWON, "rearranged by each layer's Fisher block", ("fisher", "fisher-matrix"), None, "fisher"),
    _by_raw("taylor-weights", "taylor-weights", "Molchanov et al. 2019", "sum|w dL/dw| over the output weights"),
    _by_raw("obs", "obs", KURTIC, "error behind the kept heads' best update, as the loss feels it (optimal brain surgeon)"),
    _by_raw("leave-one-out", "leave-one-out", MICHEL, "what closing the head alone adds to the loss"),
    _by_raw("mean-ablation", "mean-ablation", "Wang et al. 2023", "the same with the head's mean output in its place"),
    _by_raw("optimal-ablation", "optimal-ablation", "Li and Janson 2024", "the same with the constant that costs least"),
    _by_raw("shapley", "shapley", "Held and Yang 2023", "what the head adds on average over all coalitions of heads; signed"),
    _by_raw("flap", "flap", "An et al. 2024", "fluctuation of the head's output times its output weights"),
    _by_raw("greedy-gnorm", "greedy-gnorm", "Guo and Sheridan 2026", "|dL/dQ| |dL/dK| |dL/dV|, again after every head"),
    _by_raw("relevance", "relevance", ACHTIBAT, "share of the layer's relevance to the prediction, absolute values (AttnLRP)"),
    _by_raw("gradient-x-input", "gradient-x-input", "Shrikumar et al. 2016", "the same of head output times gradient"),
    _by_raw("confidence", "confidence", VOITA, "mean of the largest attention weight"),
    _ranking("entropy-low-first", ("entropy",), "control", "gives up low attention entropy first"),
    _ranking("entropy-high-first", ("entropy",), CHOI, "gives up high attention entropy first"),
    _ranking("hies", ("his", "entropy"), CHOI, "HIS and low entropy, weighted by alpha"),
    _ranking("rank-sum", ("his", "entropy"), "control", "ranks of HIS and of low entropy, added"),
    Scorer("hies-broad", OURS, "HIS and high entropy, weighted by alpha", ("his", "entropy"), _hies_broad, is_weighted=True),
    Scorer("rank-sum-broad", OURS, "ranks of HIS and of high entropy, added", ("his", "entropy"), _rank_sum_broad),
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
