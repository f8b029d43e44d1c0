"""What a run that is resumed goes on with: the options and the inputs that it began with, and one of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gates.errors import GateError, first_line
from training.config import RunOptions
from training.config.yaml_text import read_yaml
from training.runs.directory import CONFIG, METRICS, RunDirectory
from training.runs.hashing import key_of
from training.runs.stored import read_json

# The resolved options of runs and comparisons, as their ``config.yaml`` has them, one beside another.


def read_options(file: Path, *, mend: str) -> dict[str, Any]:
    """The options in a configuration, by their names with dots.

    Args:
        file: the configuration.
        mend: what to do if it is damaged.

    Raises:
        GateError: if it cannot be read.
    """
    try:
        return flat_options(read_yaml(file, "the configuration"))
    except (GateError, yaml.YAMLError, AttributeError, RecursionError) as error:
        raise GateError(f"{str(file)!r} cannot be read ({first_line(error)}); {mend}") from error


def flat_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their names with dots."""
    return dict(_flat(content))


def is_among(option: str, names: Collection[str]) -> bool:
    """Whether an option is one of these names, or begins with one of them that ends in ``.`` or ``_``."""
    groups = tuple(name for name in names if name.endswith((".", "_")))
    return option in names or option.startswith(groups)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal and of one type: a budget of 1 is a head, one of 1.0 all heads."""
    return json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value and prefix in ("", "data.", "trainer.", "wandb."):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


FREE_WHEN_RESUMED = {
    "config": "where options were read from; they are compared one by one",
    "run_dir": "where results are written",
    "existing": "what is done to results that are there",
    "name": "what results are called",
    "ckpt_path": "see checkpoint_of, which checks it",
    "save_every": "how much work is lost when the run is stopped",
    "compare": "experiments after training; each is known by all that determines it",
    "retrained": "the same",
    "from_scratch": "the same",
    "from_scratch_epochs": "the same",
    "from_scratch_learning_rate": "the same",
    "curve": "the same",
    "wandb.": "where the run is logged",
    "data.init_args.num_workers": "how fast batches are made; a batch is a function of seed and step",
    "trainer.enable_": "what is shown",
    "trainer.log_every_n_steps": "how often is logged",
}
"""Options, or beginnings of them, that may be others when a run is resumed, since they change no result; with what they say."""
FORMAT = 8
"""Of runs and experiments; a change in what they mean or how they are computed must raise it."""
RUN_INPUTS = "run_inputs.json"
"""All that a run's training depends on: options, and fingerprints of what these name."""
OPTIONS = "options"
"""Among these, the options of the module; earlier versions did not note them, nor whose checkpoints were."""
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
"""Parts of these that may change without an option, in words."""


def check_same_options(run: RunDirectory, resolved: str) -> None:
    """Whether a run that is resumed has the options that it began with, but for those that change no result.

    Args:
        run: that is gone on with.
        resolved: the configuration of this command, as YAML.

    Raises:
        GateError: naming the first option that differs.
    """
    file, began, now = run.path / CONFIG, _options_of(run), flat_options(yaml.safe_load(resolved))
    for name in sorted(began.keys() | now.keys()):
        if not same_value(began.get(name), now.get(name)) and not is_among(name, FREE_WHEN_RESUMED):
            raise GateError(
                f"--existing resume goes on with the options that the run began with, but {name} was {began.get(name)!r} and "
                f"is {now.get(name)!r} now; give --config {file}, or another --run_dir"
            )


def check_same_inputs(run: RunDirectory, determined_by: Mapping[str, Any]) -> None:
    """Whether a run that is resumed finds the data and the first weights that it began with. Writes nothing.

    Args:
        run: that is gone on with.
        determined_by: all that its training depends on, as JSON.

    Raises:
        GateError: naming what is another.
    """
    began = _began_with(run, "begin the run anew, or delete this file if you are sure that its data are as they were")
    if began is None:
        return
    for name in sorted(began.keys() | determined_by.keys(), key=lambda name: (name != "format", name)):
        if not same_value(began.get(name), determined_by.get(name)):
            raise GateError(
                f"--existing resume goes on with what the run in {str(run.path)!r} began with, but this has changed since: its "
                f"{INPUTS.get(name, name)}; bring back what it was, or give another --run_dir"
            )


def check_same_data(run: RunDirectory, fingerprint: Callable[[], str]) -> None:
    """Whether data that a finished run's configuration names are what they were, encoded as they were. What a run of an earlier
    version noted is not compared.

    Args:
        run: finished.
        fingerprint: that of the data as they are now.

    Raises:
        GateError: if they have changed.
    """
    began = _began_with(run)
    if began is not None and began.get("format") == FORMAT and began["data"] != fingerprint():
        raise GateError(
            f"the data, as the model's tokenizer or processor encodes them, have changed since the run in {str(run.path)!r} "
            "was trained on them, or other versions of the libraries encode them otherwise; bring back what they were, or "
            "name them behind a lone --, as with --data.train_file FILE, if they are meant"
        )


def note_inputs(run: RunDirectory, determined_by: Mapping[str, Any]) -> None:
    """Note what a run begins with; of one that goes on this is noted already."""
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


def checkpoint_of(options: RunOptions, run: RunDirectory, first: bool) -> str | None:
    """Return the checkpoint in the folder of the run whose files the data need, such as a vocabulary; None where there is none.

    Raises:
        GateError: For one that would be overwritten, and one that a run which is resumed did not begin with.
    """
    if not run.resumes:
        if first and options.ckpt_path is not None and run.path.resolve() in Path(options.ckpt_path).resolve().parents:
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
    run: RunDirectory, mend: str = "go on with the run (--existing resume), or begin it anew"
) -> dict[str, Any] | None:
    """What a run has noted that it began with; None for one that was stopped before, or of an earlier version.

    Args:
        run: that began.
        mend: what a user can do about a damaged note.
    """
    try:
        return read_json(run.path / RUN_INPUTS, dict, mend=mend)
    except FileNotFoundError:
        return None


def _options_of(run: RunDirectory) -> dict[str, Any]:
    """The options that a run began with, by their names with dots."""
    return read_options(run.path / CONFIG, mend="begin the run anew")


# What a comparison whose tables are there may go on with: more methods, budgets and seeds, of the same dense models.

COMPARED = (
    "seed", "seeds", "methods", "budgets", "stages", "prices", "experiments", "list_methods", "restarts.", "swap.", "draws.",
    "refit.", "distil.", "model.budget", "launcher", "ray_",
)  # fmt: skip
"""Options that say what is compared and where, or beginnings of them: new tables are of what is asked for now."""
FREE = {*FREE_WHEN_RESUMED, *COMPARED}


def goes_on(run: RunDirectory, resolved: str) -> bool:
    """Whether a comparison goes on with what an earlier call measured: after :func:`check_same_comparison` that of finished
    tables, and otherwise only of just the same configuration.

    Args:
        run: the comparison's directory.
        resolved: the configuration of this command, as YAML.
    """
    file = run.path / CONFIG
    return (run.path / METRICS).is_file() or (file.is_file() and file.read_text(encoding="utf-8") == resolved)


def check_same_comparison(run: RunDirectory, resolved: str) -> None:
    """Whether new tables would be of the same model, data and training as the finished ones that they take the place of.

    Args:
        run: the comparison's directory.
        resolved: the configuration of this command, as YAML.

    Raises:
        GateError: naming the first option that differs.
    """
    file = run.path / CONFIG
    if not (run.path / METRICS).is_file() or not file.is_file():
        return
    began = read_options(file, mend="remove it to have it written anew")
    now = flat_options(yaml.safe_load(resolved))
    for name in sorted(began.keys() & now.keys()):
        if not same_value(began[name], now[name]) and not is_among(name, FREE):
            raise GateError(
                f"{str(run.path)!r} holds a comparison whose {name} was {began[name]!r} and is {now[name]!r} now, so its "
                "tables are not replaced; give another --run_dir"
            )
