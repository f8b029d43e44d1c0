"""What W&B gets of an analysis: the pictures, in the run that was analysed, if it is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import wandb
import yaml

from gates.errors import GateError
from training.config import WandbOptions
from training.config.yaml_text import read_yaml
from training.runs.directory import CONFIG
from training.runs.tracking import reachable, run_id, start


def tracking_of(run: Path) -> WandbOptions | None:
    """Return how a run or comparison appears in W&B, in the mode that works now; None if it is not there or switched off."""
    if not (run / "wandb" / "run_id.txt").is_file() or not (run / CONFIG).is_file():
        return None
    try:
        options = WandbOptions(**(read_yaml(run / CONFIG, "the configuration").get("wandb") or {}))
    except (AttributeError, TypeError, yaml.YAMLError) as error:
        raise GateError(
            f"{str(run / CONFIG)!r} does not say how the run appears in W&B; give the run as it was left"
        ) from error
    found = reachable(options)
    return None if found.mode == "disabled" else found


def send_pictures(options: WandbOptions, run: Path, pictures: Mapping[str, Path]) -> None:
    """Send pictures as media ``analysis/NAME`` to the analysed run, which continues under its own id."""
    known = start(options, run, id=run_id(run), name=options.name or run.name, group=options.group, config={})
    if known is None:
        return
    known.log({f"analysis/{name}": wandb.Image(str(file)) for name, file in pictures.items()})
    known.finish()
