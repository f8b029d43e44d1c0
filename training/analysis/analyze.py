"""``python -m training analyze RUN --experiments LIST --run_dir DIR``: analyse the heads of a trained model.

Most experiments read the directory and the data of a finished run. The model is the dense one, at the end of fine-tuning. Roles
are also found in a plain folder with a model, and survival reads only the tables of a run or comparison.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from gates.errors import GateError
from training.analysis.heads import (
    ablate_each,
    across_domains,
    by_kind,
    causal_classes,
    one_per_layer,
    relevance_of_heads,
    seconds_of,
    through_training,
)
from training.analysis.model import (
    AnalysisResult,
    LoadedRun,
    is_model_folder,
    load_run,
    observe_folder,
    observe_run,
    setup_of,
)
from training.analysis.role_measures import RoleFiles, read_texts
from training.analysis.roles import roles_of_heads
from training.analysis.survival import survival_of_roles
from training.cli.command_line import CommandLine, split_options
from training.cli.exit import stdout
from training.comparison.estimate import expected, speed_of
from training.runs import progress
from training.runs.cost import measured
from training.runs.directory import LOCK, RunDirectory, only_writer, refuse_file
from training.runs.stored import read_json
from training.runs.tracking import code_version, machine, versions
from training.setup import Setup, open_data, quiet_libraries

# The experiments that a command line chooses, and the check of their options.

OTHER = "--other_data."
DOMAINS, ROLES, SURVIVAL = "domains", "roles", "survival"
WITHOUT_TREES = ("ablate", "one-per-layer", "by-kind")
"""The experiments on a run by default, without trees."""
OF_ROLES = ("conllu", "parser", "relations", "text", "coref", "sentences", "show", "maps")
"""Options that only roles uses."""
TITLES = {
    "ablate": "Each head removed alone",
    "one-per-layer": "One head per layer",
    "by-kind": "Quality against budget, by kind of attention",
    "causal": "Facilitating, irrelevant and interfering heads",
    "relevance": "Relevance of heads",
    ROLES: "Roles of heads",
    SURVIVAL: "Which roles survive",
    DOMAINS: "The same heads on other data",
    "through-training": "Through training",
}


def other_data_options(given: Sequence[str]) -> list[str]:
    """Return the arguments that describe other data, as ``training.fit`` takes them."""
    own = split_options(given, lambda name: name.startswith(OTHER))[0]
    return ["--data." + part.removeprefix(OTHER) if part.startswith(OTHER) else part for part in own]


def as_typed(text: str) -> str:
    """Give options of other data the names that they have on the command line."""
    return re.sub(r"(?:(?<=--)|(?<= )|^)data\.(?=\w)", OTHER.removeprefix("--"), text)


def experiments_of(options: Any) -> list[str]:
    """Return the names of the chosen experiments in the order given.

    The default for a folder with a model and for pruned weights is roles. For a run with trees it is roles and survival, and
    for a run without trees :data:`WITHOUT_TREES`.
    """
    if options.experiments is None:
        if is_model_folder(options.run) or options.weights != "dense":
            return [ROLES]
        return [ROLES, SURVIVAL] if _has_trees(options) else list(WITHOUT_TREES)
    chosen = list(dict.fromkeys(name.strip() for name in options.experiments.split(",") if name.strip()))
    for name in chosen:
        if name not in TITLES:
            raise GateError(f"unknown experiment {name!r}; expected some of {', '.join(TITLES)}")
    if not chosen:
        raise GateError(f"--experiments is empty; expected some of {', '.join(TITLES)}")
    return chosen


def check_arguments(options: Any, chosen: Sequence[str], other: Sequence[str]) -> None:
    """Check that every experiment has its files, and that every file is used."""
    if (DOMAINS in chosen) != bool(other):
        raise GateError(
            "the experiment domains needs other data; give it, for example with --other_data.test_file FILE"
            if DOMAINS in chosen
            else f"other data are given ({as_typed(other[0])}) and nothing uses them; add the experiment domains"
        )
    _check_trees(options, needed=ROLES in chosen)
    if options.roles is not None and SURVIVAL not in chosen:
        raise GateError(f"--roles is given and nothing uses it; add the experiment {SURVIVAL}")
    if options.weights != "dense" and [name for name in chosen if name != SURVIVAL] != [ROLES]:
        raise GateError(f"--weights {options.weights} is for the experiment roles alone; remove it, or analyze roles by itself")
    if options.weights != "dense" and is_model_folder(options.run):
        raise GateError(f"--weights {options.weights} needs a run, and {options.run!r} is a folder with a model; remove it")
    if options.sentences is not None and options.sentences < 1:
        raise GateError(f"--sentences is {options.sentences}; expected 1 or more")
    if is_model_folder(options.run) and (others := [name for name in chosen if name != ROLES]):
        raise GateError(
            f"{options.run!r} is a folder with a model and no run, so there is nothing to do {others[0]} with; give a run, or "
            f"--experiments {ROLES}"
        )


def _has_trees(options: Any) -> bool:
    return options.conllu is not None or options.parser is not None


def _check_trees(options: Any, *, needed: bool) -> None:
    for name in OF_ROLES if not needed else ():
        if getattr(options, name) is not None:
            raise GateError(f"--{name} is given and nothing uses it; add the experiment roles")
    if needed and not _has_trees(options):
        raise GateError(
            "the experiment roles needs a treebank; give one with --conllu FILE, or texts and what parses them with "
            "--text FILE --parser NAME"
        )
    if options.parser is not None and options.conllu is not None:
        raise GateError("--conllu and --parser are both given; expected one of them, as trees are read or made")
    if options.parser is not None and options.text is None:
        raise GateError(f"--parser {options.parser} has nothing to parse; give texts, one on each line, with --text FILE")


# The directory of an analysis: tables, pictures, pages, and the two files that sum up all experiments.


class OutputDirectory:
    """Tables, pictures, ``metrics.json`` and ``analysis.md``. Analyses of the same run add up."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self.files = RunDirectory(path)  # for its atomic writing alone
        self.findings: dict[str, Any] = {}
        refuse_file(path)
        if not path.is_dir() or not any(place.name != LOCK for place in path.iterdir()):
            return
        try:
            known = read_json(path / "metrics.json", dict, mend="give another directory")
            analysed, self.findings = str(known["analysed_run"]), dict(known["experiments"])
        except (OSError, KeyError, TypeError) as error:
            raise GateError(f"--run_dir {str(path)!r} is not empty and holds no analysis; give another directory") from error
        if Path(analysed).resolve() != Path(run).resolve():
            raise GateError(
                f"--run_dir {str(path)!r} holds the analysis of {analysed!r}, not of {run!r}; give another directory"
            )

    def write(self, name: str, result: AnalysisResult, about: dict[str, Any]) -> None:
        """Write the files of one experiment, and the two that sum up all."""
        (self.path / "plots").mkdir(parents=True, exist_ok=True)
        for file, table in result.tables.items():
            self.files.write_table(f"{file}.csv", table)
        for file, figure in result.figures.items():
            for form in ("png", "svg"):
                with self.files.replacing(f"plots/{file}.{form}") as partial:
                    figure.savefig(partial, format=form, dpi=150)
        for file, text in result.pages.items():
            self.files.write_text(file, text)
        figures = [f"plots/{file}.png" for file in result.figures]
        self.findings[name] = {**about, "sentences": result.sentences, "numbers": result.numbers, "figures": figures}
        self.findings = {key: self.findings[key] for key in TITLES if key in self.findings}
        stated = {"code": code_version(), "machine": machine(), "versions": versions()}
        self.files.write_json("metrics.json", {"analysed_run": self.run, "experiments": self.findings, **stated})
        self.files.write_text("analysis.md", self._text())

    def _text(self) -> str:
        lines = [f"# Analysis of {Path(self.run).resolve().name}", ""]
        lines += [
            "The dense model, of a run at the end of fine-tuning; scores from training data, choices on the selection split,",
            "results on the test split, metrics of classifiers in percent. Significance (at 0.05) and intervals",
            "are over test examples, for this model (those of roles over sentences); another seed would train another.",
        ]
        for name, found in self.findings.items():
            lines += ["", f"## {TITLES[name]}", "", *(f"- {sentence}" for sentence in found["sentences"])]
            lines += [line for figure in found["figures"] for line in ("", f"![{TITLES[name]}]({figure})")]
        return "\n".join(lines) + "\n"


EXPERIMENTS: dict[str, Callable[[LoadedRun], AnalysisResult]] = {  # of the dense model of a run
    "ablate": ablate_each,
    "one-per-layer": one_per_layer,
    "by-kind": by_kind,
    "causal": causal_classes,
    "relevance": relevance_of_heads,
    "through-training": through_training,
}


def other_setup(run: RunDirectory, overrides: Sequence[str], other: Sequence[str]) -> Setup:
    """Return the setup of a finished run with other data.

    Args:
        overrides: Arguments of :mod:`training.fit` that replace those of the run.
        other: Those of other data, which come after them.
    """
    setup_of(run, overrides)  # so that an error of both together is one of the other data
    try:
        return setup_of(run, [*overrides, *other], "the options of other data")
    except GateError as error:
        raise GateError(as_typed(str(error))) from error


def analyze(line: CommandLine) -> None:
    """Run the experiments one after the other, and write each when it ends."""
    quiet_libraries()
    other = other_data_options(line.given)
    chosen = experiments_of(line.options)
    check_arguments(line.options, chosen, other)
    with only_writer(Path(line.options.run_dir)):
        _analyze(line, chosen, other)


def _analyze(line: CommandLine, chosen: Sequence[str], other: Sequence[str]) -> None:
    options, overrides = line.options, line.rest
    out = OutputDirectory(Path(options.run_dir), options.run)
    dense: LoadedRun | None = None
    elsewhere = other_setup(RunDirectory.finished(options.run), overrides, other) if DOMAINS in chosen else None
    if any(name != SURVIVAL for name in chosen) and not is_model_folder(options.run):
        dense = load_run(options.run, overrides, options.weights)
    about = {"command": line.command} | ({} if dense is None else {"metric": dense.metric})
    console, device = stdout(), torch.device("cpu") if dense is None else dense.device
    experiments = _experiments(options, dense, chosen, elsewhere)
    if len(experiments) > 1:
        titles = "; ".join(TITLES[name] for name in experiments)
        console.print(f"{len(experiments)} experiments: {titles}", soft_wrap=True, highlight=False)
    if dense is not None and set(experiments) <= set(WITHOUT_TREES) and (speed := speed_of(dense)) is not None:
        progress.notice(expected(sum(seconds_of(name, dense, speed) for name in experiments)))
    for name, experiment in experiments.items():
        console.print(f"[bold]{TITLES[name]}[/bold]")
        try:
            with progress.stage(TITLES[name]), measured(device, None) as meter:
                result = experiment()
        except GateError as error:
            if options.experiments is not None or name != SURVIVAL:
                raise
            console.print(f"left out: {escape(str(error))}", soft_wrap=True)  # a run without a mask has roles only
            continue
        cost = {"seconds": round(meter.cost.seconds, 2), "peak_memory_mb": meter.cost.peak_memory_mb}
        out.write(name, result, about | cost)
        for sentence in result.sentences:
            console.print(escape(sentence), soft_wrap=True)
    console.print(f"written: {escape(str(out.path))}", soft_wrap=True)


def _experiments(
    options: Any, dense: LoadedRun | None, chosen: Sequence[str], elsewhere: Setup | None
) -> dict[str, Callable[[], AnalysisResult]]:
    """Return the experiments by name. Files are read here, so that errors in them show before the long part."""
    found: dict[str, Callable[[], AnalysisResult]] = {}
    for name in chosen:
        if name == SURVIVAL:
            found[name] = partial(survival_of_roles, options.run, options.roles or str(Path(options.run_dir) / "roles.csv"))
        elif name == ROLES:
            observed = observe_folder(options.run) if dense is None else observe_run(dense)
            relations, maps = _names("relations", options.relations), _names("maps", options.maps)
            given = {name: getattr(options, name) for name in ("conllu", "text", "coref", "parser", "show")}
            files = RoleFiles(**given, relations=relations, most_sentences=options.sentences, maps=maps)
            found[name] = partial(roles_of_heads, observed, read_texts(files, observed))
        elif name == DOMAINS:
            assert dense is not None
            assert elsewhere is not None
            vocabulary_of = str(dense.run.checkpoint("dense"))  # a new vocabulary would mean nothing to the model
            found[name] = partial(across_domains, dense, open_data(elsewhere, vocabulary_of))
        else:
            assert dense is not None
            found[name] = partial(EXPERIMENTS[name], dense)
    return found


def _names(option: str, listed: str | None) -> tuple[str, ...]:
    """Split names at commas. There are none where the option is not given."""
    names = tuple(part.strip() for part in (listed or "").split(",") if part.strip())
    if listed is not None and not names:
        raise GateError(f"--{option} is {listed!r}; expected names separated by commas; remove the option for its default")
    return names
