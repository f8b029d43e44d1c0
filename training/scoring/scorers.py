"""Scored methods: a scorer turns raw scores into one number per gate, and the highest are kept.

Raw scores come from passes over the scoring data (:mod:`training.scoring.passes`), which run when a score is first needed.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from gates.errors import GateError, first_line
from gates.gating.budget import Budget
from gates.scores.fisher import rearrange
from gates.scores.importance import normalise_by_layer
from gates.scores.ranking import hies, layer_leaders_first, ranking_scores, ranks
from training.runs import processes
from training.runs.cost import NO_COST, Cost, measured
from training.runs.hashing import weights_fingerprint
from training.runs.own_code import code_fingerprint, own_function
from training.scoring.passes import PASSES, VARIANTS, pass_of
from training.scoring.subject import ScoringContext

Work = Callable[[], dict[str, Any]]


class Scores:
    """Scores of a subject's heads, with open gates, without dropout and without autocast.

    Under DDP every process scores its share and all get the whole result.

    Args:
        kept: A function from the name and the work of a pass to its result, which may be that of an earlier call. A result has
            the raw scores and the cost as JSON. By default all passes are made here.
    """

    def __init__(self, subject: ScoringContext, kept: Callable[[str, Work], dict[str, Any]] | None = None) -> None:
        self.subject = subject
        self._kept = kept or (lambda name, work: work())
        self._costs: dict[str, Cost] = {}
        self._raws: dict[str, Tensor] = {}
        self.layer_index = subject.gates.layer_index().cpu()

    def raw(self, name: str) -> Tensor:
        """Return a raw score, ``[gates]`` float64 on the CPU (``fisher-matrix``: ``[gates, gates]``)."""
        if name not in self._raws:
            made = pass_of(name)
            result = self._kept(made, lambda: self._run(made))
            self._costs[made] = Cost.of(result)
            self._raws |= {raw: torch.tensor(values, dtype=torch.float64) for raw, values in result["scores"].items()}
        return self._raws[name]

    def by_layer(self, name: str) -> Tensor:
        """Return a raw score divided by its l2 norm over each layer."""
        return normalise_by_layer(self.raw(name), self.layer_index)

    def cost_of(self, method: str) -> Cost:
        """Return the cost of the passes behind a method, also where another method needed them first."""
        self._need(method)
        passes = dict.fromkeys(pass_of(raw) for raw in scorer(method).raws)
        return functools.reduce(Cost.then, (self._costs[name] for name in passes), NO_COST)

    def ranking(self, method: str, *, alpha: float = 0.5, seed: int = 0) -> Tensor:
        """Return the scores by which a method ranks, ``[gates]`` float64, higher kept first.

        Args:
            method: A name in :data:`SCORERS`.
            alpha: The weight of a weighted method. Choose it on a selection split.
        """
        ranking = scorer(method).ranking
        if ranking is None:
            raise GateError(f"{method} searches a mask for each budget and has no ranking; ask for its mask")
        self._need(method)
        return ranking(self, alpha, seed).double()

    def mask(self, method: str, budget: Budget, *, alpha: float = 0.5, seed: int = 0, minimum_per_layer: int = 0) -> Tensor:
        """Return the 0/1 mask ``[gates]`` of a method at a budget, with exactly the budgeted number of ones."""
        found = scorer(method)
        ranking = self.ranking(found.rearranges or method, alpha=alpha, seed=seed)
        mask = self.subject.gates.mask_of(ranking, budget, minimum_per_layer=minimum_per_layer)
        return rearrange(mask, self.raw("fisher-matrix"), self.layer_index) if found.rearranges else mask

    def _need(self, method: str) -> None:
        """Compute a method's raw scores in their order: a later pass may need an earlier one."""
        for raw in scorer(method).raws:
            self.raw(raw)

    def _run(self, name: str) -> dict[str, Any]:
        with measured(self.subject.device, self.subject.gates) as meter, self.subject.at_rest():
            found = PASSES[name].run(self.subject, self.raw)
        return {"scores": {raw: values.double().tolist() for raw, values in found.items()}, **asdict(meter.cost)}


Ranking = Callable[[Scores, float, int], Tensor]
Value = str | bool | int
"""The value of a method's parameter."""
Made = TypeVar("Made")


@dataclass(frozen=True)
class Scorer:
    """A scored method.

    Args:
        raws: The raw scores it needs.
        ranking: A function from (scores, alpha, seed) to numbers ``[gates]``, higher kept first; None for a search without a
            ranking.
        rearranges: The method whose mask it rearranges within each layer; empty for a method that is a ranking.
        is_weighted: Whether its ranking depends on alpha.
    """

    what: str
    source: str
    raws: tuple[str, ...]
    ranking: Ranking | None
    rearranges: str = ""
    is_weighted: bool = False

    @property
    def ranks(self) -> bool:
        """Whether one ranking gives its mask at every budget."""
        return self.ranking is not None


def variant_name(name: str, parameters: Mapping[str, tuple[Value, ...]], chosen: Mapping[str, Value]) -> str:
    """Return a method's name with the parameters that are not at their default, such as ``his(granularity=token)``.

    >>> variant_name("entropy", {"keep": ("low", "high")}, {"keep": "high"})
    'entropy(keep=high)'
    """
    own = [f"{key}={str(chosen[key]).lower()}" for key, values in parameters.items() if chosen[key] != values[0]]
    return f"{name}({', '.join(own)})" if own else name


def variants(name: str, parameters: Mapping[str, tuple[Value, ...]], make: Callable[..., Made | None]) -> dict[str, Made]:
    """Return a method for every choice of its parameters, by name; None stands for a choice that makes no sense."""
    choices = [dict(zip(parameters, values, strict=True)) for values in product(*parameters.values())]
    made = {variant_name(name, parameters, chosen): make(**chosen) for chosen in choices}
    return {name: one for name, one in made.items() if one is not None}


def _by_raw(raw: str, source: str, what: str, *, by_layer: bool = False) -> Scorer:
    """Return a method that ranks by one raw score, as it is or normalised by layer."""
    return Scorer(what, source, (raw,), lambda scores, *_: scores.by_layer(raw) if by_layer else scores.raw(raw))


def _his(granularity: str, normalise: bool, steps: int, order: str) -> Scorer | None:
    raw = next(variant.raw for variant in VARIANTS.values() if variant.granularity == granularity)
    source, what = OF_HIS[raw]
    if order != "best":
        if (granularity, normalise, steps) != ("example", True, 1):
            return None
        leaders = order == "best-of-layer"
        return Scorer(
            "his with the best head of each layer first" if leaders else "keeps what HIS gives up first",
            "control",
            ("his",),
            lambda scores, *_: (
                layer_leaders_first(scores.by_layer("his"), scores.layer_index) if leaders else -scores.by_layer("his")
            ),
        )
    if steps == 1:
        return _by_raw(raw, source, what + (", normalised by layer" if normalise else ""), by_layer=normalise)
    name = raw if normalise else f"{raw}-raw"
    found = f"{name}-steps"
    return Scorer(f"{what}, again after every tenth of the heads", source, (raw, found), lambda scores, *_: scores.raw(found))


def _hies(combine: str, keep: str) -> Scorer:
    """HIS together with entropy; of minus the entropy, the low end is the entropy's high end."""
    sign, source = (1, CHOI if combine == "weights" else "control") if keep == "low" else (-1, OURS)

    def weighted(scores: Scores, alpha: float, seed: int) -> Tensor:
        return hies(scores.by_layer("his"), sign * scores.raw("entropy"), alpha)

    def added(scores: Scores, alpha: float, seed: int) -> Tensor:
        return ranks(scores.by_layer("his")) + ranks(-sign * scores.raw("entropy"))

    if combine == "ranks":
        return Scorer(f"ranks of HIS and of {keep} entropy, added", source, ("his", "entropy"), added)
    return Scorer(f"HIS and {keep} entropy, weighted by alpha", source, ("his", "entropy"), weighted, is_weighted=True)


def _random() -> Scorer:
    def drawn(scores: Scores, alpha: float, seed: int) -> Tensor:
        nothing = torch.zeros(len(scores.layer_index))
        return ranking_scores("random", his=nothing, entropy=nothing, layer_index=scores.layer_index, seed=seed)

    return Scorer("heads drawn by the seed", "control", (), drawn)


MICHEL, DSP, CHOI = "Michel, Levy and Neubig 2019", "Li, Cotterell and Sachan 2021", "Choi et al. 2025"
KWON, VOITA, OURS = "Kwon et al. 2022", "Voita et al. 2019", "this project"
OF_HIS = {
    "his": (MICHEL, "E|dL/dz| per example"),
    "his-token": (f"{MICHEL} (code)", "absolute values per token"),
    "his-batch": (f"{DSP} (code)", "absolute values per batch"),
}
"""Source and description of each raw HIS."""
_PLAIN = {
    "fisher": _by_raw("fisher", KWON, "diagonal Fisher information of the gates"),
    "fisher(rearrange=true)": Scorer(
        "the same, rearranged by each layer's Fisher block", KWON, ("fisher", "fisher-matrix"), None, rearranges="fisher"
    ),
    "leave-one-out": _by_raw("leave-one-out", MICHEL, "what closing the head alone adds to the loss"),
    "leave-one-out(replacement=mean)": _by_raw(
        "mean-ablation", "Wang et al. 2023", "the same with the head's mean output in its place"
    ),
    "leave-one-out(replacement=constant)": _by_raw(
        "optimal-ablation", "Li and Janson 2024", "the same with the constant that costs least"
    ),
    "relevance": _by_raw(
        "relevance", "Achtibat et al. 2024", "share of the layer's relevance to the prediction, absolute values (AttnLRP)"
    ),
    "relevance(rule=gradient-x-input)": _by_raw(
        "gradient-x-input", "Shrikumar et al. 2016", "the same of head output times gradient"
    ),
    "entropy": Scorer("gives up high attention entropy first", CHOI, ("entropy",), lambda scores, *_: -scores.raw("entropy")),
    "entropy(keep=high)": _by_raw("entropy", "control", "gives up low attention entropy first"),
    "attention-his": _by_raw("attention-his", "lecture notes", "E sum|dL/dA| over the attention weights A"),
    "taylor-weights": _by_raw("taylor-weights", "Molchanov et al. 2019", "sum|w dL/dw| over the output weights"),
    "obs": _by_raw(
        "obs",
        "Kurtic, Frantar and Alistarh 2023",
        "error behind the kept heads' best update, as the loss feels it (optimal brain surgeon)",
    ),
    "shapley": _by_raw("shapley", "Held and Yang 2023", "mean contribution of the head to all coalitions of heads; signed"),
    "flap": _by_raw("flap", "An et al. 2024", "fluctuation of the head's output times its output weights"),
    "greedy-gnorm": _by_raw("greedy-gnorm", "Guo and Sheridan 2026", "|dL/dQ| |dL/dK| |dL/dV|, again after every head"),
    "confidence": _by_raw("confidence", VOITA, "mean of the largest attention weight"),
    "random": _random(),
}
SCORE_PARAMETERS: dict[str, dict[str, tuple[Value, ...]]] = {
    "his": {
        "granularity": ("example", "token", "batch"),
        "normalise": (True, False),
        "steps": (1, 10),
        "order": ("best", "best-of-layer", "worst"),
    },
    "fisher": {"rearrange": (False, True)},
    "leave-one-out": {"replacement": ("zero", "mean", "constant")},
    "relevance": {"rule": ("attnlrp", "gradient-x-input")},
    "entropy": {"keep": ("low", "high")},
    "hies": {"combine": ("weights", "ranks"), "keep": ("low", "high")},
}
"""The values that each parameter of a scored method can have, the default first."""
SCORERS: dict[str, Scorer] = {
    **variants("his", SCORE_PARAMETERS["his"], _his),
    **_PLAIN,
    **variants("hies", SCORE_PARAMETERS["hies"], _hies),
}
"""Every scored method by name; a name has the parameters that are not at their default."""


def scorer(method: str) -> Scorer:
    """Return a scored method by its name."""
    if method not in SCORERS:
        raise GateError(f"unknown scored method {method!r}; expected one of {', '.join(SCORERS)}")
    return SCORERS[method]


# A user's own score, ``module:function``: a function from a subject to a number for each gate, higher kept first.


@dataclass(frozen=True)
class OwnScore:
    """A user's function that scores.

    Args:
        code: The hash of the named module and of the module that defines the function, without their imports.
    """

    name: str
    function: Callable[[ScoringContext], Any]
    code: str


@functools.cache
def own_score(name: str) -> OwnScore:
    """Import a user's score once."""
    function = own_function(name, "score", "a subject")
    module_name = name.partition(":")[0]
    defined_in = getattr(inspect.unwrap(function), "__module__", None) or module_name
    return OwnScore(name, function, code_fingerprint([module_name, defined_in]))


def run_own_score(score: OwnScore, subject: ScoringContext, *, seed: int = 0) -> Tensor:
    """Return the scores of a subject, ``[gates]`` float64 on the CPU; the same in all processes.

    The function gets the model at rest: on its device, gates open, dropout off, without autocast. Its random numbers are those
    of ``seed``, and others are not affected. Gradients that it leaves are cleared. Changed weights or gates and new hooks are
    refused, since all other methods are compared on this model.

    Args:
        subject: The model to score. Each of several processes has its share of the data.

    Raises:
        GateError: If the function raises or changes the model, or if processes disagree. Also if it does not return a finite
            number for each gate, or returns the same for all.
    """
    failure, scores = None, []
    try:
        with subject.at_rest(), _unchanged(score, subject), isolate_rng():
            torch.manual_seed(seed)
            scores = _checked(_called(score, subject), score, subject.gates.size)
    except GateError as error:
        failure = error
    everywhere = processes.gathered((None if failure is None else str(failure), scores))
    if failure is not None:
        raise failure
    for message, _ in everywhere:
        if message is not None:
            raise GateError(message)
    found = torch.tensor([values for _, values in everywhere], dtype=torch.float64)
    if not torch.allclose(found, found[:1], rtol=1e-4, atol=0.0):
        raise GateError(
            f"the score {score.name!r} differs between {len(found)} processes, which score a share of the data each; sum over "
            "them in the function with subject.summed(values)"
        )
    return found[0]


def _called(score: OwnScore, subject: ScoringContext) -> Any:
    try:
        return score.function(subject)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without the line above
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        at = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        raise GateError(f"the score {score.name!r} raised {type(error).__name__}: {first_line(error)}{at}") from error


def _checked(returned: Any, score: OwnScore, gates: int) -> list[float]:
    try:
        scores = torch.as_tensor(returned).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GateError(
            f"the score {score.name!r} returned {type(returned).__name__!r}; expected a tensor of {gates} numbers, one per gate"
        ) from error
    if scores.shape != (gates,):
        raise GateError(
            f"the score {score.name!r} returned the shape {list(scores.shape)}; expected [{gates}], a number for each gate in "
            "their order"
        )
    finite = torch.isfinite(scores)
    if not finite.all():
        place = int((~finite).nonzero()[0])
        raise GateError(f"the score {score.name!r} is {scores[place]:g} for gate {place}; expected finite numbers")
    if gates > 1 and bool((scores == scores[0]).all()):
        raise GateError(f"the score {score.name!r} is {scores[0]:g} for every gate, which ranks none of them")
    values: list[float] = scores.tolist()
    return values


@contextmanager
def _unchanged(score: OwnScore, subject: ScoringContext) -> Iterator[None]:
    """Restore flags and clear gradients after a ``with`` block, and refuse a changed model."""
    backbone, gates = subject.backbone, subject.gates
    modules, parameters = list(subject.module.modules()), [*backbone.parameters(), *gates.parameters()]
    needed, training, hooks = [one.requires_grad for one in parameters], [part.training for part in modules], _hooks(modules)
    weights, own = weights_fingerprint(backbone), (gates.log_alpha.detach().clone(), gates.mask.clone())
    try:
        yield
    finally:
        for parameter, needs in zip(parameters, needed, strict=True):
            parameter.requires_grad_(needs)
            parameter.grad = None
        for part, was in zip(modules, training, strict=True):
            part.training = was
    if weights_fingerprint(backbone) != weights:
        raise GateError(f"the score {score.name!r} changed the model's weights, which all methods share; let it work on a copy")
    same = all(torch.equal(old, new) for old, new in zip(own, (gates.log_alpha, gates.mask), strict=True))
    if not same or not gates.is_attached or gates.mode != "open":
        raise GateError(
            f"the score {score.name!r} changed the gates; use other values in a block of subject.gates.use(values), which "
            "restores them"
        )
    if _hooks(modules) != hooks:
        raise GateError(
            f"the score {score.name!r} left a hook on the model; remove it in the function with its handle's remove()"
        )


def _hooks(modules: list[torch.nn.Module]) -> list[int]:
    """Return the number of hooks of each module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [sum(len(getattr(part, kind)) for kind in kinds) for part in modules]
