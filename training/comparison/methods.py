"""The methods of a comparison: their names, functions and sources.

A method's name is a base with modifiers, such as ``learned``, ``his+swap`` or ``dsp+distil``. A base can have parameters:
``his(granularity=token)``. The base decides which heads stay: a *scored* one by a ranking of the dense model's heads
(:mod:`training.scoring.scorers`), a *learned* one by training gates. A user's own score, ``module:function``
(:mod:`training.scoring.scorers`), ranks heads too. A *given* mask, ``mask:FILE``, is made elsewhere.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from gates.errors import GateError
from gates.gating.budget import Budget
from gates.gating.head_gates import HeadGates
from gates.gating.schedule import closing_ranking
from gates.options import GateFamily
from gates.surgery.masks import parse_mask, read_mask
from training.comparison.selection import KNOWN_MASK, MaskSelector, PriceRun, Selection, closed_by_gates
from training.config import PrunerOptions
from training.config.paths import local_path
from training.runs.cost import NO_COST, Cost
from training.scoring.scorers import SCORE_PARAMETERS, SCORERS, Value, own_score, run_own_score, variant_name
from training.scoring.subject import ScoringContext
from training.stats.numbers import slug

OURS = "ours"
Decides = Literal["each", "once", "price"]
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Rule(Protocol):
    """The way in which a kind of method chooses heads."""

    def choose(self, base: str, selector: MaskSelector, budget: Budget | None, distil: Mapping[str, Any]) -> Selection:
        """Return the heads that a base keeps; see :meth:`training.comparison.selection.Chooser.choose`."""


class AllHeads:
    """The dense model keeps all heads."""

    def choose(self, base: str, selector: MaskSelector, budget: Budget | None, distil: Mapping[str, Any]) -> Selection:
        ones = torch.ones(selector.experiments.pruner.gates.size)
        return Selection(ones, ones, selector.experiments.dense(), {**KNOWN_MASK, **distil}, None)


class GivenMask:
    """A mask from a file is kept as it is."""

    def choose(self, base: str, selector: MaskSelector, budget: Budget | None, distil: Mapping[str, Any]) -> Selection:
        mask = given_mask(base, selector.experiments.pruner.gates)
        return Selection(mask, mask, selector.experiments.dense(), {**KNOWN_MASK, **distil}, None)


class Scored:
    """A score of the dense model's heads ranks them; an unknown alpha is chosen on the selection split."""

    def choose(self, base: str, selector: MaskSelector, budget: Budget | None, distil: Mapping[str, Any]) -> Selection:
        assert budget is not None
        alpha, cost = None, NO_COST
        if SCORERS[base].is_weighted:
            best, cost = selector.best([torch.tensor(selector.score(base, budget, one).result["mask"]) for one in ALPHAS])
            alpha = ALPHAS[best]
        scored = selector.score(base, budget, alpha)
        mask, ranking = torch.tensor(scored.result["mask"]), scored.result["ranking"]
        return Selection(
            mask,
            mask,
            selector.experiments.dense(),
            {**KNOWN_MASK, **distil},
            None if ranking is None else torch.tensor(ranking, dtype=torch.float64),
            cost=Cost.of(scored.result).then(cost),
            alpha=alpha,
        )


class OwnScored:
    """A user's function ranks the heads of the dense model."""

    def choose(self, base: str, selector: MaskSelector, budget: Budget | None, distil: Mapping[str, Any]) -> Selection:
        assert budget is not None
        own, experiments = own_score(base), selector.experiments
        dense, seed = experiments.dense(), experiments.seed
        determined_by = {"experiment": "own score", "dense": dense.key, "method": base, "code": own.code, "seed": seed}

        def work(subject: ScoringContext) -> dict[str, Any]:
            return {"scores": run_own_score(own, subject, seed=seed).tolist()}

        scored = experiments.measure(f"scoring by {base}", determined_by, work)
        ranking = torch.tensor(scored.result["scores"], dtype=torch.float64)
        mask = selector.mask_of(ranking, budget)
        return Selection(mask, mask, dense, {**KNOWN_MASK, **distil}, ranking, Cost.of(scored.result))


@dataclass(frozen=True)
class Learned:
    """Describe a learned method by the options of :class:`training.pruner.module.HeadPruner`.

    Args:
        source: The paper, or :data:`OURS`.
        decides: ``each``: trained for every budget. ``once``: trained for the smallest budget, whose final log_alpha ranks the
            heads for all. ``price``: trained with a price on open heads, which rank by when they closed.
    """

    what: str
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    decides: Decides = "each"

    @property
    def has_logits(self) -> bool:
        """Whether its ranking are log-weights, whose differences are meaningful."""
        return self.decides != "price" and self.options["gate"] != "clamped-linear"

    def choose(self, base: str, selector: MaskSelector, budget: Budget | None, distil: Mapping[str, Any]) -> Selection:
        assert budget is not None
        changes = {**({} if base == selector.as_configured else self.options), **distil}
        if self.decides == "price":
            return self._by_price(base, selector, budget, changes)
        changes["budget"] = (budget if self.decides == "each" else selector.smallest).option(selector.sizes)
        experiment = selector.experiments.learn(changes)
        ranking = torch.tensor(experiment.result["log_alpha"])
        mask = selector.mask_of(ranking, budget)
        closed = closed_by_gates(experiment.result, mask)
        return Selection(mask, mask, experiment, changes, ranking, Cost.of(experiment.result), closed_by_gates=closed)

    def _by_price(self, base: str, selector: MaskSelector, budget: Budget, changes: Mapping[str, Any]) -> Selection:
        """Return the mask that a price leaves if it meets the budget, and otherwise rank heads by when they closed.

        Every price is trained with. The best mask is taken, and all trainings are paid for.
        """
        configured = selector.experiments.options.price
        assert configured is not None  # the options have put a default in its place
        prices = selector.prices or [configured]
        if pruned := budget.pruned(selector.sizes):  # other kinds of heads stay whole, so nothing trains while they close
            prices = [price if isinstance(price, Mapping) else dict.fromkeys(pruned, price) for price in prices]
        tried = [{**changes, "price": price} for price in prices]
        trained = [selector.experiments.learn(one) for one in tried]
        name = f"{base}+distil" if changes.keys() & selector.distil.keys() else base
        rankings, masks = [], []
        for price, experiment in zip(prices, trained, strict=True):
            own = torch.tensor(experiment.result["mask"])
            selector.price_runs[experiment.key] = PriceRun(name, price, own)
            closed, log_alpha = (torch.tensor(experiment.result[part]) for part in ("closing_step", "log_alpha"))
            rankings.append(closing_ranking(closed, log_alpha))
            # A time is met by fewer heads too, which are no better.
            is_met = budget.time is None and budget.is_met(own, selector.experiments.pruner.gates.kind_index().cpu())
            masks.append(own if is_met else selector.mask_of(rankings[-1], budget))
        best, cost = selector.best(masks)
        selection = Selection(masks[best], masks[best], trained[best], tried[best], rankings[best], cost)
        for experiment in trained:
            selection = selection.paid(experiment)
        return selection


HARD: dict[str, Any] = {"gate": "hard-concrete", "pipelined": True}
JOINT: dict[str, Any] = HARD | {"pipelined": False}
WITH_PRICE = JOINT | {"budget": None}
OTHERS: dict[str, Any] = {"anneal": None, "straight_through": False, "straight_through_from": 1.0, "pipelined": False}
"""The values that options of Hard-Concrete gates must have for other families."""
FROM_HIS = OTHERS | {"init_spread": 1.0, "init_score": "his"}
LEARNED: dict[str, Learned] = {
    "learned": Learned("Hard-Concrete gates held to the budget, on frozen weights, which are retrained then", OURS, HARD),
    "learned(once=true)": Learned("one run for the smallest budget ranks the heads for all", OURS, HARD, "once"),
    "learned(start=obs)": Learned(
        "the same from a start by optimal brain surgeon; meant for learned(start=obs)+refit",
        OURS,
        HARD | {"init_spread": 1.0, "init_score": "obs"},
    ),
    "learned(pipelined=false)": Learned("the gates together with the weights", OURS, JOINT),
    "lambda": Learned(
        "Hard-Concrete gates with a price on each open head",
        "Voita et al. 2019",
        WITH_PRICE | {"anneal": None, "draw_per": "batch"},
        "price",
    ),
    "lambda(noise=configured)": Learned("the same, with noise and temperature as configured", OURS, WITH_PRICE, "price"),
    "lambda(noise=configured, pipelined=true)": Learned(
        "the same, with noise and temperature as configured", OURS, WITH_PRICE | {"pipelined": True}, "price"
    ),
    "dsp": Learned(
        "relaxed top-K of Gumbel-perturbed weights; unlike the paper's, gates are at most 1 and the last temperature is 0.1; "
        "every example has its own draw, and the weights start in the order of HIS",
        "Li, Cotterell and Sachan 2021",
        FROM_HIS | {"gate": "relaxed-top-k"},
    ),
    "straight-through": Learned(
        "exact top-K forward, the sigmoid's gradient backward, from a start by HIS",
        "Bengio et al. 2013",
        FROM_HIS | {"gate": "straight-through-top-k"},
    ),
    "linear-l1": Learned(
        "gates clamped to [0, 1] with an L1 price", "Xiao et al. 2024", OTHERS | {"gate": "clamped-linear"}, "once"
    ),
}
"""Every learned method by name. Its options replace those that a configuration has for single runs."""
LEARNED |= {
    f"{name}(pipelined=true)": replace(LEARNED[name], options={**LEARNED[name].options, "pipelined": True})
    for name in ("dsp", "straight-through", "linear-l1")
}
LEARNED_PARAMETERS: dict[str, dict[str, tuple[Value, ...]]] = {
    "learned": {"pipelined": (True, False), "start": ("equal", "obs"), "once": (False, True)},
    "lambda": {"noise": ("paper", "configured"), "pipelined": (False, True)},
    "dsp": {"pipelined": (False, True)},
    "straight-through": {"pipelined": (False, True)},
    "linear-l1": {"pipelined": (False, True)},
}
"""The values that each parameter of a learned method can have, the default first. ``pipelined`` says whether the weights are
frozen while gates are learned."""
PARAMETERS = LEARNED_PARAMETERS | SCORE_PARAMETERS
RENAMED = {
    "learned-once": "learned(once=true)",
    "learned-obs": "learned(start=obs)",
    "learned-joint": "learned(pipelined=false)",
    "priced": "lambda(noise=configured)",
    "priced-pipelined": "lambda(noise=configured, pipelined=true)",
    "dsp-pipelined": "dsp(pipelined=true)",
    "straight-through-pipelined": "straight-through(pipelined=true)",
    "linear-l1-pipelined": "linear-l1(pipelined=true)",
    "his-raw": "his(normalise=false)",
    "his-token": "his(granularity=token)",
    "his-token-raw": "his(granularity=token, normalise=false)",
    "his-batch": "his(granularity=batch)",
    "his-batch-raw": "his(granularity=batch, normalise=false)",
    "his-steps": "his(steps=10)",
    "his-raw-steps": "his(normalise=false, steps=10)",
    "his-token-steps": "his(granularity=token, steps=10)",
    "his-token-raw-steps": "his(granularity=token, normalise=false, steps=10)",
    "his-batch-steps": "his(granularity=batch, steps=10)",
    "his-batch-raw-steps": "his(granularity=batch, normalise=false, steps=10)",
    "his-each-layer": "his(order=best-of-layer)",
    "his-inverted": "his(order=worst)",
    "fisher-rearranged": "fisher(rearrange=true)",
    "mean-ablation": "leave-one-out(replacement=mean)",
    "optimal-ablation": "leave-one-out(replacement=constant)",
    "gradient-x-input": "relevance(rule=gradient-x-input)",
    "entropy-low-first": "entropy(keep=high)",
    "entropy-high-first": "entropy",
    "hies-broad": "hies(keep=high)",
    "rank-sum": "hies(combine=ranks)",
    "rank-sum-broad": "hies(combine=ranks, keep=high)",
}
"""Old names of methods, each with its present name."""
RIVALS = ("his", "obs", "entropy", "entropy(keep=high)", "hies", "random")
"""The methods that a run is compared with."""
REFITTED_RIVALS = ("obs+refit", "his+refit", "random+refit")
"""The methods that a refitted run is also compared with."""
CHEAP_RIVALS = REFITTED_RIVALS[:2]
"""The methods whose heads a run keeps if they are better than those of its gates."""

GIVEN = "mask:"
"""The beginning of the name of a given mask; its file follows."""


@dataclass(frozen=True)
class Outside:
    """Describe a kind of method that is not part of this project."""

    what: str
    source: str


OUTSIDE = {
    "MODULE:FUNCTION": Outside(
        "your own score: a function from a subject to a number for each head", "docs/howto/extending.md"
    ),
    f"{GIVEN}FILE.json": Outside("a mask made elsewhere, at its own number of heads", "docs/howto/extending.md"),
}

MODIFIERS = {
    "restarts": "the best of several times of learning, by training data; with +refit, by the refit on the selection split",
    "draws": "the best of masks drawn around the ranking, by training data, without training",
    "swap": "the mask is refined by swaps on training data, without training; with +refit, if its refit is better then",
    "rescale": "kept heads are rescaled by least squares (Kwon et al. 2022)",
    "refit": "the weights behind the heads are refitted by least squares, without training",
    "distil": "trained with distillation from the dense model",
}


@dataclass(frozen=True)
class Method:
    """Hold the base and the modifiers of a method.

    Args:
        base: A name in :data:`LEARNED` or :data:`training.scoring.scorers.SCORERS`, ``dense``, ``module:function`` or
            ``mask:FILE``.
        modifiers: Names in :data:`MODIFIERS`.
    """

    base: str
    modifiers: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, name: str) -> Method:
        """Read ``base+modifier+...``."""
        base, modifiers = _split(name)
        for modifier in modifiers:
            if modifier not in MODIFIERS:
                raise GateError(f"the method {name!r} has the modifier {modifier!r}; expected some of {', '.join(MODIFIERS)}")
        if len(set(modifiers)) < len(modifiers):
            raise GateError(f"the method {name!r} names a modifier twice; give each once")
        if base.startswith(GIVEN):
            base = GIVEN + local_path(base.removeprefix(GIVEN))
        method = cls(base, frozenset(modifiers))
        if method.is_given:
            read_mask(base.removeprefix(GIVEN))  # raises
        elif method.is_own_score:
            own_score(base)  # raises
        else:
            method = replace(method, base=_with_parameters(base))
        if base == "dense" and set(modifiers) - {"distil"}:
            raise GateError(f"the method {name!r} changes a mask, but dense keeps all heads; only +distil goes with it")
        if {"rescale", "refit"} <= set(modifiers):
            raise GateError(f"the method {name!r} rescales and refits; give +refit alone, which includes +rescale")
        scored = SCORERS.get(method.base)
        if "draws" in modifiers and (method.is_given or (scored is not None and not scored.ranks)):
            raise GateError(f"the method {name!r} draws around a ranking, but {base} has none; remove +draws")
        if "restarts" in method.modifiers and method.base != "learned":
            raise GateError(
                f"the method {name!r} cannot be learned several times, from equal gates and from a start by obs in turn; use "
                "learned+restarts, or remove +restarts"
            )
        if {"restarts", "draws"} <= set(modifiers):
            raise GateError(f"the method {name!r} draws around a ranking, but +restarts has none; remove one of them")
        return method

    @property
    def name(self) -> str:
        return "+".join([self.base, *(modifier for modifier in MODIFIERS if modifier in self.modifiers)])

    @property
    def is_learned(self) -> bool:
        return self.base in LEARNED

    @property
    def is_given(self) -> bool:
        """Whether its mask is read from a file and has its own number of heads."""
        return self.base.startswith(GIVEN)

    @property
    def is_own_score(self) -> bool:
        """Whether it ranks by a user's function."""
        return ":" in self.base and not self.is_given

    @property
    def is_ours(self) -> bool:
        """Whether it is from this project. Searches for better masks are, but for those that start from a user's score."""
        searches = bool(self.modifiers & {"restarts", "draws", "swap"}) and not self.is_own_score
        return searches or (self.is_learned and self.learned.source == OURS)

    @property
    def learned(self) -> Learned:
        return LEARNED[self.base]

    @property
    def has_logits(self) -> bool:
        return self.is_learned and self.learned.has_logits

    def budget(self, selector: MaskSelector, budget: Budget | None) -> Budget | None:
        return own_budget(self.base, selector.experiments.pruner.gates, selector.budgets) if self.is_given else budget

    def choose(self, selector: MaskSelector, budget: Budget | None, distil: Mapping[str, Any]) -> Selection:
        rule: Rule = OwnScored() if self.is_own_score else GivenMask() if self.is_given else RULES[self.base]
        return rule.choose(self.base, selector, budget, distil)


def _split(name: str) -> tuple[str, list[str]]:
    """Return the base and the modifiers; the path of a given mask may have a + in it."""
    base, *modifiers = name.split("+")
    if name.startswith(GIVEN):
        while set(modifiers) - set(MODIFIERS):
            base, modifiers = f"{base}+{modifiers[0]}", modifiers[1:]
    return base, modifiers


def _with_parameters(base: str) -> str:
    """Return the name of a base with its parameters in their order and without those at their default."""
    found = re.fullmatch(r"([^()]*?)\s*(?:\((.*)\))?", base.strip())
    name, text = (base, None) if found is None else found.groups()
    if name in RENAMED:
        raise GateError(f"the method {base!r} has a new name; use {RENAMED[name]}")
    if name not in NAMES:
        raise GateError(
            f"unknown method {base!r}{_nearest(name)}; expected one of {', '.join(NAMES)}, a score or mask of your own "
            f"({' or '.join(OUTSIDE)}), or these with +{', +'.join(MODIFIERS)}"
        )
    parameters = PARAMETERS.get(name, {})
    chosen = {key: values[0] for key, values in parameters.items()}
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in parameters:
            known = f"expected some of {', '.join(parameters)}" if parameters else f"{name} has none"
            raise GateError(f"the method {base!r} has the parameter {key!r}; {known}")
        by_text = {str(one).lower(): one for one in parameters[key]}
        if value.lower() not in by_text:
            raise GateError(f"the method {base!r} has {key}={value}; expected {key} to be one of {', '.join(by_text)}")
        chosen[key] = by_text[value.lower()]
    full = variant_name(name, parameters, chosen)
    if full not in BASES:
        possible = [one for one in BASES if one.partition("(")[0] == name]
        raise GateError(f"the method {base!r} has parameters that do not go together; expected one of {', '.join(possible)}")
    return full


def is_method(name: str) -> bool:
    """Return whether a name has a base and modifiers that exist, whether or not they go together."""
    base, modifiers = _split(name)
    return base in BASES and set(modifiers) <= set(MODIFIERS)


def file_name(method: str) -> str:
    """Return the name of a method or system without characters that have a meaning in paths."""
    return re.sub(r"[^\w.+ (),=-]", "_", method)


def parse_methods(names: Sequence[str]) -> list[Method]:
    """Return the methods of names."""
    methods = [Method.parse(str(name).strip()) for name in names]
    if not methods:
        raise GateError("no method is given; name some with --methods, for example learned,his,random")
    doubles = [method.name for index, method in enumerate(methods) if method in methods[:index]]
    if doubles:
        raise GateError(f"the method {doubles[0]!r} is given twice; give each once")
    by_slug: dict[str, str] = {}
    for method in methods:
        other = by_slug.setdefault(slug(method.name), method.name)
        if other != method.name:
            raise GateError(f"{other!r} and {method.name!r} have the same name in files and pictures; rename one of them")
    return methods


def own_method(options: PrunerOptions) -> Method:
    """Return the method with the training of a run with these options."""
    if options.prune == 0:
        return Method("dense")
    name = OF_FAMILY[options.gate]
    chosen: dict[str, Value] = {"pipelined": bool(options.pipelined)}
    if options.gate == "hard-concrete" and options.budget is None:
        as_voita = replace(options, **LEARNED["lambda"].options) == options
        name, chosen["noise"] = "lambda", "paper" if as_voita else "configured"
    elif name == "learned" and replace(options, **LEARNED["learned(start=obs)"].options) == options:
        chosen["start"] = "obs"
    parameters = PARAMETERS[name]
    base = variant_name(name, parameters, {key: chosen.get(key, values[0]) for key, values in parameters.items()})
    return Method(base, frozenset(name for name, used in (("swap", options.swaps), ("refit", options.refits)) if used))


def mask_found_by(options: PrunerOptions, kept: Method, *, is_refitted: bool) -> str:
    """Describe in one line how a run finds its heads and trains its weights."""
    if options.prune == 0:
        return "no pruning: the dense model, with all its heads"
    gates = "Hard-Concrete" if options.gate == "hard-concrete" else options.gate
    found = f"learned {gates} gates" if kept.is_learned else f"the heads of the highest {kept.base}"
    searched = ", with a search by swaps" if "swap" in kept.modifiers else ""
    refitted = "weights refitted to the dense model by least squares; " if is_refitted else ""
    trained = "weights retrained with the mask" if options.retrain > 0 else "weights as they were trained with the gates"
    if options.is_half:
        trained = f"weights as they were, in {options.dtype}"
    elif options.retrain == 0 and options.pipelined:
        trained = "weights not trained with the mask"
    return f"{found}{searched}; {refitted}{trained}"


OF_FAMILY: dict[GateFamily, str] = {
    "hard-concrete": "learned",
    "relaxed-top-k": "dsp",
    "straight-through-top-k": "straight-through",
    "clamped-linear": "linear-l1",
}
"""The method of each family of gates."""
RULES: dict[str, Rule] = {"dense": AllHeads(), **LEARNED, **dict.fromkeys(SCORERS, Scored())}
BASES = tuple(RULES)
NAMES = tuple(dict.fromkeys(base.partition("(")[0] for base in BASES))


def _nearest(base: str) -> str:
    """Return the nearest name in brackets."""
    near = difflib.get_close_matches(base, NAMES, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# Masks from files: ``mask:FILE`` as a method.

content_of = cache(read_mask)
"""The content of a mask file, read once, so that all seeds have the same mask."""


def given_mask(base: str, gates: HeadGates) -> Tensor:
    """Return the mask ``[gates]`` of ``mask:FILE``."""
    path = base.removeprefix(GIVEN)
    mask = gates.to_gates(parse_mask(content_of(path), gates.sites, source=path)).cpu()
    if not set(mask.tolist()) <= {0.0, 1.0}:
        gate = int(((mask > 0) & (mask < 1)).nonzero()[0])
        raise GateError(
            f"the mask file {path!r} keeps some query heads of key/value head {gate} and drops others; with --model.unit group "
            "keep or drop them together"
        )
    if mask.sum() in (0, gates.size):
        raise GateError(f"the mask file {path!r} keeps {int(mask.sum())} of {gates.size} {gates.unit}s; give one to compare")
    return mask


def own_budget(base: str, gates: HeadGates, budgets: Sequence[Budget]) -> Budget:
    """Return the budget with as many heads as a given mask keeps."""
    mask, kinds = given_mask(base, gates), gates.kind_index().cpu()
    counted = [budget for budget in budgets if budget.time is None]
    if not counted:
        raise GateError(f"{base!r} has its own number of heads, but the budget is a time; compare it at that number")
    for budget in counted:
        if budget.is_met(mask, kinds):
            return budget
    kept: Any = int(mask.sum())
    if any(budget.per_kind for budget in counted):
        places = kinds.unique().tolist()
        kept = {kind: int(mask[kinds == place].sum()) for kind, place in zip(gates.kind_sizes(), places, strict=True)}
    totals = ", ".join(str(budget.total) for budget in counted)
    raise GateError(
        f"{base!r} keeps {kept} of {gates.size} {gates.unit}s and is compared at that alone, but the budgets keep {totals}; "
        f"add {kept} to --budgets (for a run, have it as --model.budget)"
    )


def check_given_masks(methods: Sequence[Method], gates: HeadGates, budgets: Sequence[Budget]) -> None:
    """Raise :class:`GateError` for the first given mask that is not of this model or fits no budget."""
    for method in methods:
        if method.is_given:
            own_budget(method.base, gates, budgets)
