"""Measured latency of a model by the number of open gates at each site, without PyTorch.

As in ZipLM (Kurtic, Frantar and Alistarh 2023), the latency of attention with 0, 1, ... heads is measured once on the target
device. The latency of any mask is then a sum.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from gates.errors import GateError
from gates.files import read_json, replacing

Measure = Literal["ms", "x"]
EXPECTED = "a time such as 12ms or, as a share of the dense model's, 0.7x"


@dataclass(frozen=True)
class SiteTimes:
    """The times of one site with 0, 1, ... open gates.

    Args:
        label: The name, such as ``encoder.0``.
        milliseconds: The times ``[gates + 1]``, not falling.
        measured: The times before smoothing, which may fall where an odd number is slower than the next multiple.
    """

    label: str
    milliseconds: Sequence[float]
    measured: Sequence[float] | None = None

    def fastest_from(self, count: int) -> int:
        """Return the number of gates, at least this one, with the least measured time.

        Differences below 1 % of the site's time are noise, so the smallest of such numbers counts.

        >>> SiteTimes("encoder.0", [0.0, 2.0, 3.5, 3.5, 5.0], [0.0, 2.0, 4.0, 3.0, 5.0]).fastest_from(2)
        3
        """
        least = min(self.times[count:]) + 0.01 * self.milliseconds[-1]
        return next(wider for wider in range(count, len(self.times)) if self.times[wider] <= least)

    @property
    def times(self) -> Sequence[float]:
        """Return the measured times, or the smoothed ones where a table has no others."""
        return self.measured or self.milliseconds

    @property
    def gates(self) -> int:
        """Return the number of gates of the site."""
        return len(self.milliseconds) - 1


@dataclass(frozen=True)
class LatencyTable:
    """The duration of one forward pass.

    Args:
        rest: The milliseconds of everything except the gated attention.
        sites: The times of each site, in the model's order.
        unit: The unit of a gate, ``head`` or ``group``.
        inputs: The shapes of the measured inputs, by name.
        hardware: The hardware of the measurement.

    >>> table = LatencyTable(1.0, [SiteTimes("encoder.0", [0.0, 3.0, 4.0]), SiteTimes("encoder.1", [0.0, 1.0, 2.0])])
    >>> table.dense, table.time_of([1, 2]), table.most_within(4.0)
    (7.0, 6.0, 2)
    """

    rest: float
    sites: Sequence[SiteTimes]
    unit: str = "head"
    inputs: Mapping[str, Sequence[int]] | None = None
    hardware: str = ""

    @property
    def dense(self) -> float:
        """Return the milliseconds of the whole model."""
        return self.time_of([site.gates for site in self.sites])

    @property
    def least(self) -> float:
        """Return the milliseconds of the model without open gates."""
        return self.time_of([0] * len(self.sites))

    def time_of(self, counts: Sequence[int]) -> float:
        """Return the milliseconds for the numbers of open gates at the sites, ``[sites]``."""
        return self.rest + math.fsum(site.milliseconds[count] for site, count in zip(self.sites, counts, strict=True))

    def faster_with_more(self, counts: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Return the sites where more gates were faster than these numbers, with both numbers."""
        pairs = ((site.label, count, site.fastest_from(count)) for site, count in zip(self.sites, counts, strict=True))
        return {label: (count, faster) for label, count, faster in pairs if faster > count > 0}

    def most_within(self, limit: float) -> int:
        """Return the largest number of gates of any mask within a limit in milliseconds, exactly."""
        least = [self.rest]  # the least time of any choice, by the number of gates so far
        for site in self.sites:
            sums = [math.inf] * (len(least) + site.gates)
            for before, time in enumerate(least):
                for count, more in enumerate(site.milliseconds):
                    sums[before + count] = min(sums[before + count], time + more)
            least = sums
        return max((count for count, time in enumerate(least) if time <= limit + SLACK), default=0)

    def check_fits(self, gates: Mapping[str, int], unit: str) -> None:
        """Raise :class:`GateError` for the table of another model."""
        own = {site.label: site.gates for site in self.sites}
        if (own, self.unit) != (dict(gates), unit):
            raise GateError(
                f"the latency table has {len(own)} sites with {sum(own.values())} {self.unit}s, and this model has "
                f"{len(gates)} sites with {sum(gates.values())} {unit}s, or other names; measure one of this model"
            )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON with one line per site."""
        content = asdict(self) | {"sites": []}
        rows = ",\n".join(f"    {json.dumps(asdict(site))}" for site in self.sites)
        text = json.dumps(content, indent=2).replace('"sites": []', f'"sites": [\n{rows}\n  ]')
        with replacing(path) as partial:
            partial.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LatencyTable:
        """Read a file of :meth:`write`."""
        content = read_json(path, "latency table")
        try:
            sites = [SiteTimes(str(row["label"]), list(row["milliseconds"]), row.get("measured")) for row in content["sites"]]
            table = cls(content["rest"], sites, str(content["unit"]), content.get("inputs"), str(content.get("hardware", "")))
        except (KeyError, TypeError, ValueError) as error:
            raise GateError(
                f"{str(path)!r} is not a latency table: expected rest, unit, and sites with a label and milliseconds, as "
                "head-gates latency writes it"
            ) from error
        if not sites:
            raise GateError(f"the latency table {str(path)!r} has no sites; measure it again (head-gates latency)")
        for site in sites:
            _check_times(site, str(path))
        _check_number(table.rest, "rest", str(path))
        return table


SLACK = 1e-9
"""The milliseconds by which sums of equal times in another order may differ."""


@dataclass(frozen=True)
class TimeLimit:
    """A budget in time: the maximum milliseconds of a forward pass, predicted by a table."""

    milliseconds: float
    table: LatencyTable

    @classmethod
    def parse(cls, text: str, table: LatencyTable) -> TimeLimit:
        """Read ``12ms`` or ``0.7x``.

        Raises:
            GateError: For another text, or a time that only the dense mask or no mask has.
        """
        number, measure = parse_time(text)
        limit = number * table.dense if measure == "x" else number
        if limit < table.least:
            raise GateError(
                f"the budget is {text}, which is {limit:.4g} ms, but the model takes {table.least:.4g} ms without any "
                f"{table.unit} and {table.dense:.4g} ms with all of them; give a time between these"
            )
        if limit >= table.dense:
            raise GateError(
                f"the budget is {text}, but the dense model takes {table.dense:.4g} ms, so nothing would be pruned; give less, "
                f"down to {table.least:.4g} ms"
            )
        return cls(limit, table)

    def __str__(self) -> str:
        return f"{self.milliseconds:.4g} ms"

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> TimeLimit:
        """Return the limit from a dictionary of :func:`dataclasses.asdict`."""
        table = dict(plain["table"])
        sites = [SiteTimes(**site) for site in table.pop("sites")]
        return cls(plain["milliseconds"], LatencyTable(sites=sites, **table))

    @property
    def most(self) -> int:
        """Return the largest number of gates of any mask within the time."""
        return self.table.most_within(self.milliseconds)

    @property
    def terms(self) -> list[Any]:
        """Return the numbers of the table, as JSON."""
        return [self.table.rest, *(list(site.milliseconds) for site in self.table.sites)]

    def allows(self, counts: Sequence[int]) -> bool:
        """Return whether the numbers of open gates at the sites, ``[sites]``, are within the time."""
        return self.table.time_of(counts) <= self.milliseconds + SLACK


def parse_time(text: str) -> tuple[float, Measure]:
    """Return the number and the measure of a text such as ``12ms`` or ``0.7x``."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(ms|x)", text.strip(), flags=re.ASCII)
    if found is None:
        raise GateError(f"the budget is {text!r}; expected a number of heads, a fraction such as 0.25, or {EXPECTED}")
    number = float(found[1])
    if number == 0 or (found[2] == "x" and number >= 1):
        least = (
            "more than 0 milliseconds, such as 12ms" if found[2] == "ms" else "a share of the dense model's time, such as 0.7x"
        )
        raise GateError(f"the budget is {text!r}; expected {least}")
    return number, "ms" if found[2] == "ms" else "x"


def convex_minorant(times: Sequence[float]) -> list[tuple[int, float]]:
    """Return the corners ``(gates, milliseconds)`` of the largest convex function below the times of a site.

    A count above this function never pays, because two other counts on two equal sites take less together. This relaxes the
    multiple-choice knapsack problem (Sinha and Zoltners 1979).

    Args:
        times: The milliseconds with 0, 1, ... open gates.
    """
    corners: list[tuple[int, float]] = []
    for point in enumerate(times):
        while len(corners) > 1 and _slope(corners[-2], point) <= _slope(corners[-2], corners[-1]):
            corners.pop()
        corners.append(point)
    return corners


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def _check_times(site: SiteTimes, source: str) -> None:
    if site.gates < 1:
        raise GateError(
            f"the latency table {source!r} has {len(site.milliseconds)} times for {site.label!r}; expected two or more"
        )
    for value in site.milliseconds:
        _check_number(value, site.label, source)
    if site.measured is not None and len(site.measured) != len(site.milliseconds):
        raise GateError(
            f"the latency table {source!r} has {len(site.measured)} measured times for {site.label!r}; expected "
            f"{len(site.milliseconds)}, one for each of its milliseconds"
        )
    for one, more in pairwise(site.milliseconds):
        if more < one:
            raise GateError(
                f"the latency table {source!r} has {more} ms after {one} ms for {site.label!r}, but with more open a site does "
                "not take less; measure it again, or smooth it"
            )


def _check_number(value: Any, name: str, source: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise GateError(f"the latency table {source!r} has {value!r} for {name!r}; expected milliseconds from 0")
