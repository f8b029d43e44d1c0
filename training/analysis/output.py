"""The directory of an analysis: tables, pictures, pages, and the two files that sum up all experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from gates.errors import GateError
from training.analysis.arguments import TITLES
from training.analysis.model import Finding
from training.runs.lock import LOCK, refuse_file
from training.runs.run_directory import RunDirectory
from training.runs.stored import read_json
from training.runs.tracking import code_version, machine, versions


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
