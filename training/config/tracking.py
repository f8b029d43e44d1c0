"""How runs appear in W&B: the options ``--wandb.NAME``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WandbOptions:
    """How the run appears in W&B.

    Args:
        mode: ``auto`` is online when logged in (or as WANDB_MODE says) and offline otherwise.
        project: W&B project.
        name: of the run; by default the run directory's.
        group: to put runs together.
        tags: free labels.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str = "head-gates"
    name: str | None = None
    group: str | None = None
    tags: list[str] | None = None
