"""``python -m training analyze RUN --experiments LIST --run_dir DIR``: what the heads of a trained model do.

Reads a finished run's directory and its data; the model is the dense one, at the end of fine-tuning. Roles are also found in a
plain folder with a model or its checkpoints, and the experiments about known roles need no more than the tables of a run or
comparison.
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
from training.analysis.asked import (
    CHANGES,
    DOMAINS,
    DYNAMICS,
    KNOWN,
    NO_MODEL,
    ROLES,
    STORY,
    TITLES,
    as_typed,
    check_asked,
    experiments_of,
    holds_models,
    other_data_options,
)
from training.analysis.causal import causal_classes
from training.analysis.changes import changes_of_roles
from training.analysis.closing import closing_of_roles
from training.analysis.disagreement import disagreement
from training.analysis.dynamics import dynamics_of
from training.analysis.embedded_roles import embedded_roles
from training.analysis.heads import ablate_each, across_domains, by_kind, one_per_layer
from training.analysis.known_roles import known_roles
from training.analysis.looks import looks_of_checkpoints, looks_of_run
from training.analysis.model import DenseModel, Finding, load_dense, load_pruned, setup_of
from training.analysis.observed import observe_folder, observe_run
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
from training.runs.run_directory import CONFIG, RunDirectory
from training.setup import Setup, open_data, quiet_libraries

EXPERIMENTS: dict[str, Callable[[DenseModel], Finding]] = {  # of the dense model of a run
    "ablate": ablate_each,
    "one-per-layer": one_per_layer,
    "by-kind": by_kind,
    "causal": causal_classes,
    "relevance": relevance_of_heads,
    "through-training": through_training,
}
FROM_TABLES: dict[str, Callable[[str, str], Finding]] = {  # of a run's or comparison's directory and roles.csv
    "survival": survival_of_roles,
    "disagreement": disagreement,
    "closing": closing_of_roles,
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
    """Run the experiments one after the other; each is written as it ends."""
    quiet_libraries()
    options, overrides, other = line.options, line.rest, other_data_options(line.given)
    chosen = experiments_of(options)
    check_asked(options, chosen, other)
    with only_writer(Path(options.run_dir)):
        _analyze(line, chosen, overrides, other)


def _analyze(line: CommandLine, chosen: Sequence[str], overrides: Sequence[str], other: Sequence[str]) -> None:
    """The chosen experiments, with the arguments of :mod:`training.fit` in place of the run's, and those of other data."""
    options = line.options
    out = OutputDirectory.claim(Path(options.run_dir), options.run)
    dense: DenseModel | None = None
    elsewhere = other_setup(RunDirectory.finished(options.run), overrides, other) if DOMAINS in chosen else None
    mask: Tensor | None = None
    if any(name not in NO_MODEL for name in chosen) and not holds_models(options.run):
        if options.weights == "pruned":
            dense, mask = load_pruned(options.run, overrides)
        else:
            dense = load_dense(options.run, overrides)
    tracking = tracking_of(Path(options.run))
    pictures: dict[str, Path] = {}
    about = {"command": line.command} | ({} if dense is None else {"metric": dense.metric})
    console, device = stdout(), torch.device("cpu") if dense is None else dense.device
    for name, experiment in _experiments(options, dense, mask, chosen, elsewhere, overrides).items():
        console.print(f"[bold]{TITLES[name]}[/bold]")
        try:
            with progress.stage(TITLES[name]), measured(device, None) as meter:
                finding = experiment()
        except GateError as error:
            if options.experiments is not None or name not in STORY:
                raise
            console.print(f"left out: {escape(str(error))}", soft_wrap=True)  # nobody asked for it by name
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
    options: Any,
    dense: DenseModel | None,
    mask: Tensor | None,
    chosen: Sequence[str],
    elsewhere: Setup | None,
    overrides: Sequence[str],
) -> dict[str, Callable[[], Finding]]:
    """What is to be done, by name; files are read here, so that what is wrong with them shows before the long part.

    Args:
        options: of the command.
        dense: model of the run, with its dense weights or those of its end; None for a folder with a model, and where nothing
            needs one.
        mask: of the gates, with the weights of the end.
        chosen: experiments.
        elsewhere: the run with other data; None without the experiment that needs them.
        overrides: arguments in place of the run's.
    """
    found: dict[str, Callable[[], Finding]] = {}
    for name in chosen:
        roles = options.roles or str(Path(options.run_dir) / "roles.csv")
        if name in FROM_TABLES:
            found[name] = partial(FROM_TABLES[name], options.run, roles)
        elif name == KNOWN:
            found[name] = _known(options.run, overrides)
        elif name == CHANGES:
            found[name] = partial(changes_of_roles, options.before, roles)
        elif name == ROLES:
            observed = observe_folder(options.run) if dense is None else observe_run(dense, mask)
            found[name] = partial(roles_of_heads, observed, read_texts(_files(options), observed))
        elif name == DYNAMICS:
            found[name] = _dynamics(options, dense)
        else:
            assert dense is not None
            found[name] = _of_run(name, dense, elsewhere)
    return found


def _known(run: str, overrides: Sequence[str]) -> Callable[[], Finding]:
    """Roles of compiled models, which a table of their truth stands for, or of trained ones of the generated language."""
    trained = (Path(run) / CONFIG).is_file() and not (Path(run) / "truth.csv").is_file()
    return partial(embedded_roles, run, overrides) if trained else partial(known_roles, run)


def _files(options: Any) -> RoleFiles:
    relations, maps = _names("relations", options.relations), _names("maps", options.maps)
    return RoleFiles(
        options.conllu, options.text, options.coref, relations, options.sentences, options.parser, options.show, maps
    )


def _names(option: str, listed: str | None) -> tuple[str, ...]:
    """Names separated by commas; none where the option is not given."""
    names = tuple(part.strip() for part in (listed or "").split(",") if part.strip())
    if listed is not None and not names:
        raise GateError(f"--{option} is {listed!r}; expected names separated by commas, or leave it out")
    return names


def _dynamics(options: Any, dense: DenseModel | None) -> Callable[[], Finding]:
    files = _files(options)
    if dense is None:
        return lambda: dynamics_of(looks_of_checkpoints(options.run, lambda observed: read_texts(files, observed)))
    texts = read_texts(files, observe_run(dense))
    return lambda: dynamics_of(looks_of_run(dense, texts))


def _of_run(name: str, dense: DenseModel, elsewhere: Setup | None) -> Callable[[], Finding]:
    """An experiment on the dense model of a run."""
    if name == DOMAINS:
        assert elsewhere is not None
        vocabulary_of = str(dense.run.checkpoint("dense"))  # a vocabulary trained anew would mean nothing to the model
        return partial(across_domains, dense, open_data(elsewhere, vocabulary_of))
    return partial(EXPERIMENTS[name], dense)
