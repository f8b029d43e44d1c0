"""``python -m training analyze RUN --experiments LIST --run_dir DIR``: show what the heads of a trained model do.

Most experiments read the directory and the data of a finished run. The model is the dense one, at the end of fine-tuning. Roles
are also found in a plain folder with a model, and survival reads only the tables of a run or comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor

from gates.errors import GateError
from training.analysis.arguments import (
    DOMAINS,
    ROLES,
    SURVIVAL,
    TITLES,
    as_typed,
    check_arguments,
    experiments_of,
    other_data_options,
)
from training.analysis.causal import causal_classes
from training.analysis.heads import ablate_each, across_domains, by_kind, one_per_layer
from training.analysis.model import DenseModel, Finding, load_dense, load_pruned, setup_of
from training.analysis.observed import is_model_folder, observe_folder, observe_run
from training.analysis.output import OutputDirectory
from training.analysis.relevance import relevance_of_heads
from training.analysis.role_texts import RoleFiles, read_texts
from training.analysis.roles import roles_of_heads
from training.analysis.survival import survival_of_roles
from training.analysis.to_wandb import send_pictures, tracking_of
from training.analysis.training import through_training
from training.cli.ending import stdout
from training.cli.line import CommandLine
from training.runs import progress
from training.runs.cost import measured
from training.runs.lock import only_writer
from training.runs.run_directory import RunDirectory
from training.setup import Setup, open_data, quiet_libraries

EXPERIMENTS: dict[str, Callable[[DenseModel], Finding]] = {  # of the dense model of a run
    "ablate": ablate_each,
    "one-per-layer": one_per_layer,
    "by-kind": by_kind,
    "causal": causal_classes,
    "relevance": relevance_of_heads,
    "through-training": through_training,
}


def other_setup(run: RunDirectory, overrides: Sequence[str], other: Sequence[str]) -> Setup:
    """What a run was told, with other data.

    Args:
        run: finished.
        overrides: arguments of :mod:`training.fit` in place of the run's.
        other: those of other data, which come after them.

    Raises:
        GateError: for an argument that :mod:`training.fit` does not take.
    """
    setup_of(run, overrides)  # so that what is wrong with both together lies with the other data
    try:
        return setup_of(run, [*overrides, *other], "the options of other data")
    except GateError as error:
        raise GateError(as_typed(str(error))) from error


def analyze(line: CommandLine) -> None:
    """Run the experiments one after the other, and write each when it ends."""
    quiet_libraries()
    options, overrides, other = line.options, line.rest, other_data_options(line.given)
    chosen = experiments_of(options)
    check_arguments(options, chosen, other)
    with only_writer(Path(options.run_dir)):
        _analyze(line, chosen, overrides, other)


def _analyze(line: CommandLine, chosen: Sequence[str], overrides: Sequence[str], other: Sequence[str]) -> None:
    options = line.options
    out = OutputDirectory.claim(Path(options.run_dir), options.run)
    dense: DenseModel | None = None
    elsewhere = other_setup(RunDirectory.finished(options.run), overrides, other) if DOMAINS in chosen else None
    mask: Tensor | None = None
    if any(name != SURVIVAL for name in chosen) and not is_model_folder(options.run):
        if options.weights == "pruned":
            dense, mask = load_pruned(options.run, overrides)
        else:
            dense = load_dense(options.run, overrides)
    tracking = tracking_of(Path(options.run))
    pictures: dict[str, Path] = {}
    about = {"command": line.command} | ({} if dense is None else {"metric": dense.metric})
    console, device = stdout(), torch.device("cpu") if dense is None else dense.device
    for name, experiment in _experiments(options, dense, mask, chosen, elsewhere).items():
        console.print(f"[bold]{TITLES[name]}[/bold]")
        try:
            with progress.stage(TITLES[name]), measured(device, None) as meter:
                finding = experiment()
        except GateError as error:
            if options.experiments is not None or name != SURVIVAL:
                raise
            console.print(f"left out: {escape(str(error))}", soft_wrap=True)  # a run without a mask has roles only
            continue
        cost = {"seconds": round(meter.cost.seconds, 2), "peak_memory_mb": meter.cost.peak_memory_mb}
        out.write(name, finding, about | cost)
        pictures |= {figure: out.path / "plots" / f"{figure}.png" for figure in finding.figures}
        for sentence in finding.sentences:
            console.print(escape(sentence), soft_wrap=True)
    if tracking is not None and pictures:
        send_pictures(tracking, Path(options.run), pictures)
    console.print(f"written: {escape(str(out.path))}", soft_wrap=True)


def _experiments(
    options: Any, dense: DenseModel | None, mask: Tensor | None, chosen: Sequence[str], elsewhere: Setup | None
) -> dict[str, Callable[[], Finding]]:
    """Return the experiments by name. Files are read here, so that errors in them show before the long part.

    Args:
        options: The options of the command.
        dense: The model of the run, with its dense or its final weights. None for a folder with a model or survival alone.
        mask: The mask of the gates, with the final weights.
        chosen: The names of the experiments.
        elsewhere: The run with other data. None without the experiment that needs them.
    """
    found: dict[str, Callable[[], Finding]] = {}
    for name in chosen:
        if name == SURVIVAL:
            found[name] = partial(survival_of_roles, options.run, options.roles or str(Path(options.run_dir) / "roles.csv"))
        elif name == ROLES:
            observed = observe_folder(options.run) if dense is None else observe_run(dense, mask)
            found[name] = partial(roles_of_heads, observed, read_texts(_files(options), observed))
        else:
            assert dense is not None
            found[name] = _of_run(name, dense, elsewhere)
    return found


def _files(options: Any) -> RoleFiles:
    relations, maps = _names("relations", options.relations), _names("maps", options.maps)
    return RoleFiles(
        options.conllu, options.text, options.coref, relations, options.sentences, options.parser, options.show, maps
    )


def _names(option: str, listed: str | None) -> tuple[str, ...]:
    """Split names at commas. There are none where the option is not given."""
    names = tuple(part.strip() for part in (listed or "").split(",") if part.strip())
    if listed is not None and not names:
        raise GateError(f"--{option} is {listed!r}; expected names separated by commas, or leave it out")
    return names


def _of_run(name: str, dense: DenseModel, elsewhere: Setup | None) -> Callable[[], Finding]:
    if name == DOMAINS:
        assert elsewhere is not None
        vocabulary_of = str(dense.run.checkpoint("dense"))  # a new vocabulary would mean nothing to the model
        return partial(across_domains, dense, open_data(elsewhere, vocabulary_of))
    return partial(EXPERIMENTS[name], dense)
