"""The checks before a run or a comparison is continued: same options, same inputs, own checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from gates.errors import GateError, first_line
from training.config import RunOptions
from training.config.run import Compared
from training.config.yaml_text import read_yaml
from training.runs.directory import AT_THE_END, CONFIG, METRICS, RunDirectory
from training.runs.hashing import key_of
from training.runs.stored import read_json


def read_options(file: Path, *, mend: str) -> dict[str, Any]:
    """Return the options in a resolved configuration, by their names with dots."""
    try:
        return flat_options(read_yaml(file, "the configuration"))
    except (GateError, yaml.YAMLError, AttributeError, RecursionError) as error:
        raise GateError(f"{str(file)!r} cannot be read ({first_line(error)}); {mend}") from error


def flat_options(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return options by their names with dots."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping) and value and prefix in ("", "data.", "trainer.", "wandb."):
            flat |= flat_options(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def is_among(option: str, names: Collection[str]) -> bool:
    """Return whether an option is one of these names, or begins with one that ends in ``.`` or ``_``."""
    groups = tuple(name for name in names if name.endswith((".", "_")))
    return option in names or option.startswith(groups)


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values are equal and of one type. A budget of 1 is one head, and of 1.0 all heads."""
    return json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)


def _first_difference(began: Mapping[str, Any], now: Mapping[str, Any], names: Collection[str], free: Collection[str]) -> str:
    """Return ``NAME was A and is B now`` for the first option that differs and is not free, or an empty text."""
    for name in sorted(names):
        if not same_value(began.get(name), now.get(name)) and not is_among(name, free):
            return f"{name} was {began.get(name)!r} and is {now.get(name)!r} now"
    return ""


FREE_WHEN_RESUMED = (
    "config",  # where options are read from; they are compared one by one
    "run_dir", "existing", "name", "wandb.", "trainer.enable_", "trainer.log_every_n_steps",  # names, places and displays
    "ckpt_path",  # checked by checkpoint_of
    "save_every",
    "data.init_args.num_workers",  # a batch is a function of seed and step
    *AT_THE_END,
)  # fmt: skip
"""Options, or beginnings of them, that change no result of the training, so that a resumed run may have others."""
FORMAT = 10
"""The version of runs and experiments. Raise it when their meaning or computation changes."""
RUN_INPUTS = "run_inputs.json"
"""The file with everything that a run's training depends on: options, and fingerprints of data, model and code."""
OPTIONS = "options"
INPUTS = {
    "weights": "model (its first weights)",
    "model": "model (its configuration)",
    OPTIONS: "options of the module",
    "data": "data (their content)",
    "code": "own code of data and task",
    "continues": "checkpoint to start from (its content)",
    "processes": "number of processes",
    "format": "version of head-gates",
}
"""Entries of :data:`RUN_INPUTS` that may change without an option, in words."""


def check_same_options(run: RunDirectory, resolved: str) -> None:
    """Raise :class:`GateError` if a resumed run compares less, or has other options than its beginning but for free ones."""
    began, now = _options_of(run), flat_options(yaml.safe_load(resolved))
    if difference := _first_difference(began, now, began.keys() | now.keys(), FREE_WHEN_RESUMED):
        raise GateError(
            f"--existing resume continues a run with the same options, but {difference}; give "
            f"--config {run.path / CONFIG}, or another --run_dir"
        )
    before, wanted = began.get("compare"), now.get("compare")
    values = get_args(Compared)  # from the shortest on
    if before in values and wanted in values[: values.index(before)]:
        raise GateError(
            f"--existing resume would replace the comparison of --compare {before} by the shorter one of --compare {wanted}; "
            f"give --compare {before}, or another --run_dir"
        )


def check_same_inputs(run: RunDirectory, determined_by: Mapping[str, Any]) -> None:
    """Raise :class:`GateError` if a resumed run has other data, code or first weights than its beginning. Write nothing."""
    began = _began_with(run, "start a new run, or delete this file if you are sure that its data are as they were")
    if began is None:
        return
    for name in sorted(began.keys() | determined_by.keys(), key=lambda name: (name != "format", name)):
        if not same_value(began.get(name), determined_by.get(name)):
            raise GateError(
                f"--existing resume continues the run in {str(run.path)!r} with the same inputs, but this has changed since: "
                f"its {INPUTS.get(name, name)}; restore it, or give another --run_dir"
            )


def check_same_data(run: RunDirectory, fingerprint: Callable[[], str]) -> None:
    """Raise :class:`GateError` if the data of a finished run, or their encoding, have changed."""
    began = _began_with(run)
    if began is None or began.get("data") != fingerprint():
        raise GateError(
            f"the encoded data have changed since the run in {str(run.path)!r} was trained on them, or other versions of the "
            "libraries encode them otherwise; restore them, or name new data after a lone --, as with --data.train_file FILE"
        )


def note_inputs(run: RunDirectory, determined_by: Mapping[str, Any]) -> None:
    """Write the inputs that a run begins with, unless a resumed run has them."""
    if not run.resumes or not (run.path / RUN_INPUTS).is_file():
        run.write_json(RUN_INPUTS, determined_by)


def identity_of(determined_by: Mapping[str, Any]) -> str:
    """Return the identity of a run that begins with this, which its final checkpoint has."""
    return key_of(json.loads(json.dumps(determined_by)))  # as it is read from a file


def noted_identity(run: RunDirectory, name: str) -> str | None:
    """Return the identity of one of a run's checkpoints, ``dense`` or ``final``; None for a run that has noted nothing."""
    began = _began_with(run)
    if began is None:
        return None
    return identity_of({part: value for part, value in began.items() if part != OPTIONS} if name == "dense" else began)


def checkpoint_of(options: RunOptions, run: RunDirectory) -> str | None:
    """Return the checkpoint whose folder holds files that the data need, such as a vocabulary; None where there is none."""
    if not run.resumes:
        if run.is_written and options.ckpt_path is not None and run.path.resolve() in Path(options.ckpt_path).resolve().parents:
            raise GateError(
                f"--ckpt_path {options.ckpt_path!r} lies in the run that would be overwritten; give another --run_dir"
            )
        return options.ckpt_path
    began = _options_of(run).get("ckpt_path")
    if options.ckpt_path != began:
        raise GateError(
            f"--existing resume continues the run's own training, but ckpt_path was {began!r} and is now "
            f"{options.ckpt_path!r}; leave it as it was, or give another --run_dir"
        )
    return str(run.checkpoint("dense")) if (run.path / RUN_INPUTS).is_file() else began


def _began_with(
    run: RunDirectory, mend: str = "continue the run (--existing resume), or start a new one"
) -> dict[str, Any] | None:
    """Return the noted inputs of a run, or None if it was stopped before it noted them."""
    try:
        return read_json(run.path / RUN_INPUTS, dict, mend=mend)
    except FileNotFoundError:
        return None


def _options_of(run: RunDirectory) -> dict[str, Any]:
    return read_options(run.path / CONFIG, mend="start a new run")


# A comparison with finished tables may be continued with more methods, budgets and seeds of the same dense models.

COMPARED = (
    "seed", "seeds", "methods", "budgets", "stages", "prices", "experiments", "list_methods", "restarts.", "swap.", "draws.",
    "refit.", "distil.", "model.budget", "launcher", "ray_",
)  # fmt: skip
"""Options, or beginnings of them, of the grid of a comparison and its place."""
FREE = (*FREE_WHEN_RESUMED, *COMPARED)


def goes_on(run: RunDirectory, resolved: str) -> bool:
    """Return whether a comparison continues an earlier one: one with finished tables, or one of the same configuration."""
    return (run.path / METRICS).is_file() or RunDirectory(run.path).holds(resolved)


def check_same_comparison(run: RunDirectory, resolved: str) -> None:
    """Raise :class:`GateError` if new tables would replace finished ones of another model, other data or other training."""
    file = run.path / CONFIG
    if not (run.path / METRICS).is_file() or not file.is_file():
        return
    began, now = read_options(file, mend="remove it so that it is written again"), flat_options(yaml.safe_load(resolved))
    if difference := _first_difference(began, now, began.keys() & now.keys(), FREE):
        raise GateError(
            f"{str(run.path)!r} holds a comparison whose {difference}, so its tables are not replaced; give another --run_dir"
        )
