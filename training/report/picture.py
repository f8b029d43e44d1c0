"""What a picture of a report is."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

SECTIONS = ("truth", "quality", "heads", "roles", "training", "agreement", "scores")


@dataclass(frozen=True)
class Picture:
    """A picture of a report.

    Args:
        name: of its files.
        section: one of :data:`SECTIONS`.
        figure: the picture.
        caption: what it shows, with its result.
        alt: what it looks like, for who does not see it.
        shown: whether it is open from the start; others are one click away.
        wide: whether it has several panels side by side and scrolls on a narrow screen.
    """

    name: str
    section: str
    figure: Figure
    caption: str
    alt: str
    shown: bool = True
    wide: bool = False
