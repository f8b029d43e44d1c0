"""What the modifiers of methods are told: the options ``--restarts.NAME``, ``--draws.NAME``, ``--swap.NAME``,
``--refit.NAME`` and ``--distil.NAME``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gates.errors import GateError
from gates.options import LEAST_PASSES


@dataclass(frozen=True)
class SwapSearch:
    """How long to search, and what it takes for a swap.

    Args:
        rows: training examples, as far as there are so many; one half proposes swaps, the other decides on them.
        passes: over a half after which nothing new is tried.
        significance: level of the paired tests by which the deciding half takes swaps.
    """

    rows: int = 2048
    passes: float = 40.0
    significance: float = 0.05

    def __post_init__(self) -> None:
        for name, least in (("rows", 4), ("passes", LEAST_PASSES)):
            if not least <= getattr(self, name) < math.inf:
                raise GateError(f"--swap.{name} is {getattr(self, name)}; expected at least {least}")
        if not 0 < self.significance < 1:
            raise GateError(f"--swap.significance is {self.significance}; expected a level between 0 and 1, such as 0.05")


@dataclass(frozen=True)
class DrawSearch:
    """How masks are drawn around a ranking.

    Args:
        rows: training examples, of which one half decides on the masks by its loss, as for swaps.
        count: masks that are drawn.
        temperature: of the draws, for log_alpha or for ranks on its scale.
    """

    rows: int = 1024
    count: int = 64
    temperature: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("rows", 2), ("count", 1)):
            if getattr(self, name) < least:
                raise GateError(f"--draws.{name} is {getattr(self, name)}; expected at least {least}")
        if not 0 < self.temperature < math.inf:
            raise GateError(f"--draws.temperature is {self.temperature}; expected a number above 0")


@dataclass(frozen=True)
class RestartSearch:
    """How often gates are learned anew, and how the masks are judged.

    Args:
        count: how often the gates are learned, each time with other noise: from equal gates and from a start by optimal brain
            surgeon in turn.
        rows: training examples, of which one half decides on the masks by its loss, as for swaps; with +refit the selection
            split decides, behind a refit of each mask.
    """

    count: int = 4
    rows: int = 2048

    def __post_init__(self) -> None:
        for name, least in (("rows", 2), ("count", 1)):
            if getattr(self, name) < least:
                raise GateError(f"--restarts.{name} is {getattr(self, name)}; expected at least {least}")


@dataclass(frozen=True)
class RefitSearch:
    """How weights are refitted to a mask.

    Args:
        ridges: prices of leaving the old weights, of which the best on the selection split is taken.
        rows: training examples to fit on, at most, spread over all lengths.
        feed_forward: whether the second projections of feed-forward layers are refitted beside those of attention.
    """

    ridges: list[float] = field(default_factory=lambda: [0.01, 0.1, 1.0])
    rows: int = 512
    feed_forward: bool = True

    def __post_init__(self) -> None:
        if not self.ridges or not all(0 < ridge < math.inf for ridge in self.ridges):
            raise GateError(f"--refit.ridges is {self.ridges}; expected numbers above 0, such as [0.01,0.1]")
        if self.rows < 1:
            raise GateError(f"--refit.rows is {self.rows}; expected at least 1")


@dataclass(frozen=True)
class DistilWeights:
    """What ``+distil`` stands for; the module checks it as its own options.

    Args:
        weight: with +distil, of the dense model's answers.
        hidden: with +distil, of the dense model's hidden states.
    """

    weight: float = 0.5
    hidden: float = 0.0

    @property
    def changes(self) -> dict[str, float]:
        """As options of the module."""
        return {"distil": self.weight, "distil_hidden": self.hidden}
