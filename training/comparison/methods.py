"""The methods that are compared: what each is called, what it does and where it is from.

A method's name is a base with modifiers, such as ``learned``, ``his+swap`` or ``dsp+distil``. The base decides which heads
stay: a *scored* one by a ranking of the dense model's heads (:mod:`training.scoring.scorers`), a *learned* one by training
gates. A user's own score, ``module:function`` (:mod:`training.scoring.own_score`), ranks heads too; a *given* mask,
``mask:FILE``, has been decided on elsewhere.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gates.errors import GateError
from gates.options import GateFamily
from gates.surgery.masks import read_mask
from training.config import PrunerOptions
from training.config.paths import local_path
from training.scoring.own_score import own_score
from training.scoring.scorers import SCORERS
from training.stats.numbers import slug

OURS = "ours"
Decides = Literal["each", "once", "price"]


@dataclass(frozen=True)
class Learned:
    """A learned method: the options of :class:`training.pruner.module.HeadPruner` that make it.

    Args:
        what: in one line.
        source: paper, or :data:`OURS`.
        options: what differs from the configuration.
        decides: ``each``: trained for every budget; ``once``: trained for the smallest budget, whose final log_alpha ranks
            the heads for all; ``price``: trained with a price on open heads, and heads rank by when they closed.
    """

    what: str
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    decides: Decides = "each"

    @property
    def has_logits(self) -> bool:
        """Whether it ranks by log-weights, whose differences mean something."""
        return self.decides != "price" and self.options["gate"] != "clamped-linear"


RESTING: dict[str, Any] = {"gate": "hard-concrete", "pipelined": True}
JOINT: dict[str, Any] = {"gate": "hard-concrete", "pipelined": False}
"""A method is what its name says, whatever a configuration has for single runs."""
PLAIN: dict[str, Any] = {
    "anneal": None, "straight_through": False, "straight_through_from": 1.0, "pipelined": False,
}  # fmt: skip
"""Options of Hard-Concrete gates alone, as other families have to have them."""

LEARNED: dict[str, Learned] = {
    "learned": Learned("Hard-Concrete gates held to the budget, on resting weights, which are retrained then", OURS, RESTING),
    "learned-once": Learned("one such run for the smallest budget ranks the heads for all", OURS, RESTING, decides="once"),
    "learned-obs": Learned(
        "the same from a start by optimal brain surgeon; meant for learned-obs+refit",
        OURS,
        {**RESTING, "start_apart": 1.0, "start_by": "obs"},
    ),
    "learned-joint": Learned("the gates together with the weights", OURS, JOINT),
    "lambda": Learned(
        "Hard-Concrete gates with a price on each open head",
        "Voita et al. 2019",
        {**JOINT, "budget": None, "anneal": None, "draw_per": "batch"},
        decides="price",
    ),
    "priced": Learned("the same, with noise and temperature as configured", OURS, {**JOINT, "budget": None}, decides="price"),
    "dsp": Learned(
        "relaxed top-K of Gumbel-perturbed weights, with the model's (joint); unlike the paper's, gates are at most 1, the "
        "last temperature is 0.1, every example has a draw of its own, and the weights start apart by HIS",
        "Li, Cotterell and Sachan 2021",
        {**PLAIN, "start_apart": 1.0, "start_by": "his", "gate": "relaxed-top-k"},
    ),
    "dsp-pipelined": Learned(
        "the same on resting model weights",
        "Li, Cotterell and Sachan 2021",
        {**PLAIN, "start_apart": 1.0, "start_by": "his", "gate": "relaxed-top-k", "pipelined": True},
    ),
    "straight-through": Learned(
        "exact top-K forward, the sigmoid's gradient backward, from a start by HIS",
        "Bengio et al. 2013",
        {**PLAIN, "start_apart": 1.0, "start_by": "his", "gate": "straight-through-top-k"},
    ),
    "linear-l1": Learned(
        "gates clamped to [0, 1] with an L1 price", "Xiao et al. 2024", {**PLAIN, "gate": "clamped-linear"}, "once"
    ),
}

LEARNED |= {
    f"{name}-pipelined": replace(
        LEARNED[name], what="the same on resting model weights", options={**LEARNED[name].options, "pipelined": True}
    )
    for name in ("priced", "straight-through", "linear-l1")
}

GIVEN = "mask:"
"""What the name of a given mask begins with; its file follows."""


@dataclass(frozen=True)
class Outside:
    """A kind of method that is not part of this project: what it is, and whose."""

    what: str
    source: str


OUTSIDE = {
    "MODULE:FUNCTION": Outside("your own score: a function from a subject to a number for each head", "docs/extending.md"),
    f"{GIVEN}FILE.json": Outside("a mask made elsewhere, at its own number of heads", "docs/extending.md"),
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
    """A method by its name.

    Args:
        base: of :data:`LEARNED` or :data:`training.scoring.scorers.SCORERS`, ``dense``, ``module:function`` or ``mask:FILE``.
        modifiers: of :data:`MODIFIERS`.
    """

    base: str
    modifiers: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, name: str) -> Method:
        """Read ``base+modifier+...``.

        Raises:
            GateError: for a name that is no method, an own score that cannot be imported or a file that holds no mask.
        """
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
        elif base not in BASES:
            raise GateError(
                f"unknown method {name!r}{_nearest(base)}; expected one of {', '.join(BASES)}, a score or mask of your own "
                f"({' or '.join(OUTSIDE)}), or these with +{', +'.join(MODIFIERS)}"
            )
        if base == "dense" and set(modifiers) - {"distil"}:
            raise GateError(f"the method {name!r} changes a mask, but dense keeps all heads; only +distil goes with it")
        if {"rescale", "refit"} <= set(modifiers):
            raise GateError(f"the method {name!r} rescales what it refits; give +refit alone, which can do what +rescale does")
        if "draws" in modifiers and (method.is_given or (base in SCORERS and not SCORERS[base].ranks)):
            raise GateError(f"the method {name!r} draws around a ranking, but {base} has none; leave +draws away")
        if "restarts" in method.modifiers and base != "learned":
            raise GateError(
                f"the method {name!r} is learned anew several times, from equal gates and from a start by obs in turn, which "
                "learned+restarts is for; leave +restarts away"
            )
        if {"restarts", "draws"} <= set(modifiers):
            raise GateError(f"the method {name!r} draws around a ranking, but +restarts has none; leave one of them away")
        return method

    @property
    def name(self) -> str:
        return "+".join([self.base, *(modifier for modifier in MODIFIERS if modifier in self.modifiers)])

    @property
    def is_learned(self) -> bool:
        return self.base in LEARNED

    @property
    def is_given(self) -> bool:
        """Whether its mask is made elsewhere and comes with its own number of heads."""
        return self.base.startswith(GIVEN)

    @property
    def is_own_score(self) -> bool:
        """Whether it ranks by a function of the user's."""
        return ":" in self.base and not self.is_given

    @property
    def is_ours(self) -> bool:
        """Whether this project came up with it; its searches for a better mask are its own whatever mask they start from."""
        return bool(self.modifiers & {"restarts", "draws", "swap"}) or (self.is_learned and self.learned.source == OURS)

    @property
    def learned(self) -> Learned:
        return LEARNED[self.base]


def _split(name: str) -> tuple[str, list[str]]:
    """Base and modifiers; of a given mask only what is a modifier is one, since its path may have a + in it."""
    base, *modifiers = name.split("+")
    if name.startswith(GIVEN):
        while set(modifiers) - set(MODIFIERS):
            base, modifiers = f"{base}+{modifiers[0]}", modifiers[1:]
    return base, modifiers


def is_method(name: str) -> bool:
    """Whether a name has a base and modifiers that there are, whether or not they go together."""
    base, modifiers = _split(name)
    return base in BASES and set(modifiers) <= set(MODIFIERS)


def file_name(method: str) -> str:
    """The name of a method or system without what has a meaning in paths; that of a method of this project stays as it is."""
    return re.sub(r"[^\w.+ -]", "_", method)


def parse_methods(names: Sequence[str]) -> list[Method]:
    """Methods by name, each once.

    Raises:
        GateError: for an unknown name, one given twice, or none.
    """
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
    """What a run with these options is in a comparison: the same training under the same name."""
    if options.prune == 0:
        return Method("dense")
    base = OF_FAMILY[options.gate]
    if options.gate == "hard-concrete" and options.budget is None:
        as_voita = replace(options, **LEARNED["lambda"].options) == options
        base = "lambda" if as_voita else "priced"
    if base == "learned":
        as_obs = replace(options, **LEARNED["learned-obs"].options) == options
        base = "learned-obs" if as_obs else base if options.pipelined else "learned-joint"
    elif options.pipelined:
        base = f"{base}-pipelined"
    return Method(base, frozenset(name for name, used in (("swap", options.swaps), ("refit", options.refit)) if used))


OF_FAMILY: dict[GateFamily, str] = {
    "hard-concrete": "learned",
    "relaxed-top-k": "dsp",
    "straight-through-top-k": "straight-through",
    "clamped-linear": "linear-l1",
}
"""The method that a family of gates makes."""
BASES = ("dense", *LEARNED, *SCORERS)


def _nearest(base: str) -> str:
    """The method that somebody may have meant, in brackets."""
    near = difflib.get_close_matches(base, BASES, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
