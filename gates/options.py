"""Names of the choices that gates offer, without what implements them: command lines list them before they load anything."""

from __future__ import annotations

from typing import Literal

GateFamily = Literal["hard-concrete", "relaxed-top-k", "straight-through-top-k", "clamped-linear"]
TOP_K_FAMILIES: tuple[GateFamily, ...] = ("relaxed-top-k", "straight-through-top-k")
"""Gate families that have a budget of their own."""

DrawPer = Literal["batch", "example"]
Unit = Literal["head", "group"]

NO_KIND = "{0} {{}}, which names no kind of heads; give a number, or one for a kind, such as {{encoder: {1}}}"
"""The error message for a budget or price per kind that names no kind; filled with its subject and an example."""

MIN_SWAP_PASSES = 6  # 1 to evaluate the mask + 4 for the race of all candidates + 1 to test one swap
