"""``python -m training analyze RUN --experiments LIST --run_dir DIR``: what the heads of a trained model do.

Reads a finished run's directory and its data; the model is the dense one, at the end of fine-tuning. Roles are also found in a
plain folder with a model, and the experiments about known roles need no more than the tables of a run or comparison.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.markup import escape
from torch import Tensor

from gates.errors import GateError
from training.analysis.causal import causal_classes
from training.analysis.changes import changes_of_roles
from training.analysis.closing import closing_of_roles
from training.analysis.disagreement import disagreement
from training.analysis.heads import ablate_each, across_domains, by_kind, one_per_layer
from training.analysis.known_roles import known_roles
from training.analysis.model import DenseModel, Finding, load_dense, load_pruned, setup_of
from training.analysis.observed import is_model_folder, observe_folder, observe_run
from training.analysis.relevance import relevance_of_heads
from training.analysis.role_texts import RoleFiles, read_texts
from training.analysis.roles import roles_of_heads
from training.analysis.survival import survival_of_roles
from training.analysis.to_wandb import send_pictures, tracking_of
from training.analysis.training import through_training
from training.cli.configurations import split_options
from training.cli.ending import stdout
from training.cli.line import CommandLine
from training.runs import progress
from training.runs.lock import LOCK, only_writer, refuse_file
from training.runs.run_directory import RunDirectory
from training.runs.stored import read_json
from training.runs.tracking import code_version, machine, versions
from training.setup import Setup, open_classification, quiet_libraries

OTHER = "--other_data."
EXPERIMENTS: dict[str, Callable[[DenseModel], Finding]] = {  # of the dense model of a run
    "ablate": ablate_each,
    "one-per-layer": one_per_layer,
    "by-kind": by_kind,
    "causal": causal_classes,
    "relevance": relevance_of_heads,
    "through-training": through_training,
}
DOMAINS, ROLES, CHANGES, KNOWN = "domains", "roles", "changes", "known-roles"
FROM_TABLES: dict[str, Callable[[str, str], Finding]] = {  # of a run's or comparison's directory and roles.csv
    "survival": survival_of_roles,
    "disagreement": disagreement,
    "closing": closing_of_roles,
}
KNOW_ROLES = (*FROM_TABLES, CHANGES)
"""Experiments that read ``roles.csv``."""
NO_MODEL = (*KNOW_ROLES, KNOWN)
"""Experiments that load no model of a run."""
ON_ANY_TASK = ("causal", "relevance", ROLES)
OF_ROLES = ("conllu", "relations", "text", "coref", "sentences")
"""Options that nothing else uses."""
TITLES = {
    "ablate": "Each head removed alone",
    "one-per-layer": "One head per layer",
    "by-kind": "Quality against budget, by kind of attention",
    "causal": "Facilitating, irrelevant and interfering heads",
    "relevance": "Relevance of heads",
    ROLES: "Roles of heads",
    "survival": "Which roles survive",
    "disagreement": "Importance against entropy",
    "closing": "In which order heads close",
    CHANGES: "Which heads keep their roles",
    KNOWN: "Roles where the truth is known",
    DOMAINS: "The same heads on other data",
    "through-training": "Through training",
}


def other_data_options(given: Sequence[str]) -> list[str]:
    """The arguments that describe other data, as ``training.fit`` takes them."""
    own = split_options(given, lambda name: name.startswith(OTHER))[0]
    return ["--data." + part.removeprefix(OTHER) if part.startswith(OTHER) else part for part in own]


def _as_typed(text: str) -> str:
    """Options of other data by the names that they have on the command line."""
    return re.sub(r"(?:(?<=--)|(?<= )|^)data\.(?=\w)", OTHER.removeprefix("--"), text)


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
        raise GateError(_as_typed(str(error))) from error


def analyze(line: CommandLine) -> None:
    """Run the experiments one after the other; each is written as it ends."""
    quiet_libraries()
    options, overrides, other = line.options, line.rest, other_data_options(line.given)
    chosen = list(dict.fromkeys(name.strip() for name in options.experiments.split(",") if name.strip()))
    for name in chosen:
        if name not in TITLES:
            raise GateError(f"unknown experiment {name!r}; expected some of {', '.join(TITLES)}")
    if not chosen:
        raise GateError(f"--experiments is empty; expected some of {', '.join(TITLES)}")
    _check(options, chosen, other)
    with only_writer(Path(options.run_dir)):
        _analyze(line, chosen, overrides, other)


def _check(options: Any, chosen: Sequence[str], other: Sequence[str]) -> None:
    """Raises :class:`GateError` for files that an experiment lacks, or that none uses."""
    if (DOMAINS in chosen) != bool(other):
        raise GateError(
            "the experiment domains needs other data; give it, for example with --other_data.test_file FILE"
            if DOMAINS in chosen
            else f"other data are given ({_as_typed(other[0])}) and nothing uses them; add the experiment domains"
        )
    if ROLES in chosen and options.conllu is None:
        raise GateError("the experiment roles needs a treebank; give one with --conllu FILE")
    for name in OF_ROLES:
        if ROLES not in chosen and getattr(options, name) is not None:
            raise GateError(f"--{name} is given and nothing uses it; add the experiment roles")
    if options.roles is not None and not any(name in KNOW_ROLES for name in chosen):
        raise GateError(f"--roles is given and nothing uses it; add one of the experiments {', '.join(KNOW_ROLES)}")
    if (CHANGES in chosen) != (options.before is not None):
        raise GateError(
            "the experiment changes needs the roles of the model before; give them with --before FILE"
            if CHANGES in chosen
            else "--before is given and nothing uses it; add the experiment changes"
        )
    if options.weights != "dense" and [name for name in chosen if name not in NO_MODEL] != [ROLES]:
        raise GateError(
            f"--weights {options.weights} is for the experiment roles alone; leave it away, or analyze roles by itself"
        )
    if options.weights != "dense" and is_model_folder(options.run):
        raise GateError(f"--weights {options.weights} needs a run, and {options.run!r} is a folder with a model; leave it away")
    if options.sentences is not None and options.sentences < 1:
        raise GateError(f"--sentences is {options.sentences}; expected 1 or more")
    if is_model_folder(options.run) and (others := [name for name in chosen if name not in (ROLES, CHANGES)]):
        raise GateError(
            f"{options.run!r} is a folder with a model and no run, so there is nothing to do {others[0]} with; give a run, or "
            "--experiments roles"
        )


def _analyze(line: CommandLine, chosen: Sequence[str], overrides: Sequence[str], other: Sequence[str]) -> None:
    """The chosen experiments, with the arguments of :mod:`training.fit` in place of the run's, and those of other data."""
    options = line.options
    out = OutputDirectory.claim(Path(options.run_dir), options.run)
    dense: DenseModel | None = None
    elsewhere = other_setup(RunDirectory.finished(options.run), overrides, other) if DOMAINS in chosen else None
    mask: Tensor | None = None
    if any(name not in NO_MODEL for name in chosen) and not is_model_folder(options.run):
        if options.weights == "pruned":
            dense, mask = load_pruned(options.run, overrides)
        else:
            dense = load_dense(options.run, overrides)
    tracking = tracking_of(Path(options.run))
    pictures: dict[str, Path] = {}
    about = {"command": line.command} | ({} if dense is None else {"metric": dense.metric})
    console = stdout()
    for name, experiment in _experiments(options, dense, mask, chosen, elsewhere).items():
        console.print(f"[bold]{TITLES[name]}[/bold]")
        with progress.stage(TITLES[name]):
            finding = experiment()
        out.write(name, finding, about)
        pictures |= {figure: out.path / "plots" / f"{figure}.png" for figure in finding.figures}
        for sentence in finding.sentences:
            console.print(escape(sentence), soft_wrap=True)
    if tracking is not None and pictures:
        send_pictures(tracking, Path(options.run), pictures)
    console.print(f"written: {escape(str(out.path))}", soft_wrap=True)


def _experiments(
    options: Any, dense: DenseModel | None, mask: Tensor | None, chosen: Sequence[str], elsewhere: Setup | None
) -> dict[str, Callable[[], Finding]]:
    """What is to be done, by name; files are read here, so that what is wrong with them shows before the long part.

    Args:
        options: of the command.
        dense: model of the run, with its dense weights or those of its end; None for a folder with a model, and where nothing
            needs one.
        mask: of the gates, with the weights of the end.
        chosen: experiments.
        elsewhere: the run with other data; None without the experiment that needs them.
    """
    found: dict[str, Callable[[], Finding]] = {}
    for name in chosen:
        roles = options.roles or str(Path(options.run_dir) / "roles.csv")
        if name in FROM_TABLES:
            found[name] = partial(FROM_TABLES[name], options.run, roles)
            continue
        if name == KNOWN:
            found[name] = partial(known_roles, options.run)
            continue
        if name == CHANGES:
            found[name] = partial(changes_of_roles, options.before, roles)
            continue
        if name == ROLES:
            relations = tuple(part.strip() for part in (options.relations or "").split(",") if part.strip())
            files = RoleFiles(options.conllu, options.text, options.coref, relations, options.sentences)
            observed = observe_folder(options.run) if dense is None else observe_run(dense, mask)
            found[name] = partial(roles_of_heads, observed, read_texts(files, observed))
            continue
        assert dense is not None
        if name not in ON_ANY_TASK:
            dense.need_classifier(name)
        if name == DOMAINS:
            assert elsewhere is not None
            found[name] = partial(across_domains, dense, open_classification(elsewhere))
        else:
            found[name] = partial(EXPERIMENTS[name], dense)
    return found


class OutputDirectory:
    """Tables, pictures, ``metrics.json`` and ``analysis.md``; analyses of the same run add up.

    Args:
        path: of the directory.
        run: that is analysed, as it was given.
        findings: of earlier analyses, from ``metrics.json``.
    """

    def __init__(self, path: Path, run: str, findings: dict[str, Any]) -> None:
        self.path, self.run, self.findings = path, run, findings
        self.files = RunDirectory(path)  # for its atomic writing alone

    @classmethod
    def claim(cls, path: Path, run: str) -> OutputDirectory:
        """Check the directory; nothing is written yet.

        Raises:
            GateError: if it holds something else, or the analysis of another run.
        """
        refuse_file(path)
        if not path.is_dir() or not any(place.name != LOCK for place in path.iterdir()):
            return cls(path, run, {})
        try:
            known = read_json(path / "metrics.json", dict, mend="give another directory")
            analysed, findings = str(known["analysed_run"]), dict(known["experiments"])
        except GateError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GateError(f"--run_dir {str(path)!r} is not empty and holds no analysis; give another directory") from error
        if Path(analysed).resolve() != Path(run).resolve():
            raise GateError(
                f"--run_dir {str(path)!r} holds the analysis of {analysed!r}, not of {run!r}; give another directory"
            )
        return cls(path, run, findings)

    def write(self, name: str, finding: Finding, about: dict[str, Any]) -> None:
        """The files of one experiment, and the two that sum up all."""
        (self.path / "plots").mkdir(parents=True, exist_ok=True)
        for file, table in finding.tables.items():
            self.files.write_table(f"{file}.csv", table)
        for file, figure in finding.figures.items():
            self._write_figure(file, figure)
        for file, text in finding.pages.items():
            self.files.write_text(file, text)
        figures = [f"plots/{file}.png" for file in finding.figures]
        self.findings[name] = {**about, "sentences": finding.sentences, "numbers": finding.numbers, "figures": figures}
        self.findings = {key: self.findings[key] for key in TITLES if key in self.findings}
        self.files.write_json(
            "metrics.json",
            {
                "analysed_run": self.run,
                "experiments": self.findings,
                "code": code_version(),
                "machine": machine(),
                "versions": versions(),
            },
        )
        self.files.write_text("analysis.md", self._text())

    def _write_figure(self, name: str, figure: Figure) -> None:
        for form in ("png", "svg"):
            with self.files.replacing(f"plots/{name}.{form}") as partial:
                figure.savefig(partial, format=form, dpi=150)

    def _text(self) -> str:
        lines = [f"# Analysis of {Path(self.run).resolve().name}", ""]
        lines += [
            "The dense model, of a run at the end of fine-tuning; scores from training data, choices on the selection split,",
            "results on the test split, metrics x 100. Significance (at 0.05) and intervals",
            "are over test examples, for this model (those of roles over sentences); another seed would train another.",
        ]
        for name, found in self.findings.items():
            lines += ["", f"## {TITLES[name]}", "", *(f"- {sentence}" for sentence in found["sentences"])]
            lines += [line for figure in found["figures"] for line in ("", f"![{TITLES[name]}]({figure})")]
        return "\n".join(lines) + "\n"
