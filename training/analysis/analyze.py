"""``python -m training analyze RUN --experiments LIST --run_dir DIR``: Michel et al.'s (2019) experiments on a finished run.

The run is of a classifier. Reads its directory and its data; the model is the dense one, at the end of fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.markup import escape

from gates.errors import GateError
from training.analysis.causal import causal_classes
from training.analysis.heads import ablate_each, across_domains, by_kind, one_per_layer
from training.analysis.model import DenseModel, Finding, load_dense, setup_of
from training.analysis.relevance import relevance_of_heads
from training.analysis.training import through_training
from training.cli.configurations import split_options
from training.cli.ending import stdout
from training.cli.line import CommandLine
from training.data.classification import ClassificationData
from training.runs import progress
from training.runs.lock import LOCK, only_writer, refuse_file
from training.runs.run_directory import RunDirectory
from training.runs.stored import read_json
from training.runs.tracking import code_version, machine, versions
from training.setup import open_classification, quiet_libraries

OTHER = "--other_data."
EXPERIMENTS: dict[str, Callable[[DenseModel], Finding]] = {
    "ablate": ablate_each,
    "one-per-layer": one_per_layer,
    "by-kind": by_kind,
    "causal": causal_classes,
    "relevance": relevance_of_heads,
    "through-training": through_training,
}
DOMAINS = "domains"
TITLES = {
    "ablate": "Each head removed alone",
    "one-per-layer": "One head per layer",
    "by-kind": "Quality against budget, by kind of attention",
    "causal": "Facilitating, irrelevant and interfering heads",
    "relevance": "Relevance of heads",
    DOMAINS: "The same heads on other data",
    "through-training": "Through training",
}


def other_data_options(given: Sequence[str]) -> list[str]:
    """The arguments that describe other data, as ``training.fit`` takes them."""
    own = split_options(given, lambda name: name.startswith(OTHER))[0]
    return ["--data." + part.removeprefix(OTHER) if part.startswith(OTHER) else part for part in own]


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
    if (DOMAINS in chosen) != bool(other):
        raise GateError(
            "the experiment domains needs other data; give it, for example with --other_data.test_file FILE"
            if DOMAINS in chosen
            else f"other data are given ({other[0]}) and nothing uses them; add the experiment domains"
        )
    with only_writer(Path(options.run_dir)):
        _analyze(line, chosen, overrides, other)


def _analyze(line: CommandLine, chosen: Sequence[str], overrides: Sequence[str], other: Sequence[str]) -> None:
    """The chosen experiments, with the arguments of :mod:`training.fit` in place of the run's, and those of other data."""
    options = line.options
    out = OutputDirectory.claim(Path(options.run_dir), options.run)
    dense = load_dense(options.run, overrides)
    other_data: ClassificationData | None = None
    if other:  # read first, so that what is wrong with it shows before the long part
        other_data = open_classification(setup_of(dense.run, [*overrides, *other]))
    console = stdout()
    for name in chosen:
        console.print(f"[bold]{TITLES[name]}[/bold]")
        with progress.stage(TITLES[name]):
            if name == DOMAINS:
                assert other_data is not None
                finding = across_domains(dense, other_data)
            else:
                finding = EXPERIMENTS[name](dense)
        out.write(name, finding, {"command": line.command, "metric": dense.metric})
        for sentence in finding.sentences:
            console.print(escape(sentence), soft_wrap=True)
    console.print(f"written: {escape(str(out.path))}", soft_wrap=True)


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
            "The dense model at the end of fine-tuning; scores from training data, choices on the selection split, results",
            "on the test split, metrics x 100. Significance (at 0.05) and intervals are over test examples, for this model;",
            "another seed would train another.",
        ]
        for name, found in self.findings.items():
            lines += ["", f"## {TITLES[name]}", "", *(f"- {sentence}" for sentence in found["sentences"])]
            lines += [line for figure in found["figures"] for line in ("", f"![{TITLES[name]}]({figure})")]
        return "\n".join(lines) + "\n"
