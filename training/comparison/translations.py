"""The translations that a run leaves: every evaluated system's, and which differences are real."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from rich.console import Console

from training.comparison.methods import file_name
from training.comparison.tables import Results
from training.data.translation import TranslationData
from training.runs.run_directory import RunDirectory
from training.runs.stored import read_arrays
from training.tasks.translation_metrics import paired_bootstrap

FOLDER = "translations"
SEARCHES = {"greedy": "test_prediction", "beam": "test_prediction_beam"}
"""Where predictions keep the texts of each search."""


def save_translations(run: RunDirectory, results: Results) -> None:
    """Write the translations of the test split, one file per system and search, beside sources and references, and
    ``significance.csv``: the paired bootstrap of every system against the dense one. There is nothing for tasks without
    translations, and a notice in place of a system that translated only a part of the split.

    Args:
        run: to write into.
        results: of its comparison; a system is called METHOD.STAGE.
    """
    if not isinstance(results.data, TranslationData):
        return
    shutil.rmtree(run.path / FOLDER, ignore_errors=True)  # of systems that are no longer compared
    pairs = results.data.texts["test"]
    systems: dict[str, dict[str, list[str]]] = {search: {} for search in SEARCHES}
    for row in results.rows:
        system, texts = f"{row['method']}.{row['stage']}", texts_of(results.predictions[row["experiment"]])
        if any(len(lines) < len(pairs.source) for lines in texts.values()):
            translated = min(map(len, texts.values()))
            notice = f"{translated} of {len(pairs.source)} test sentences were translated by {system}; these are not kept"
            Console().print(notice, markup=False, highlight=False, soft_wrap=True)
            continue
        for search, lines in texts.items():
            systems[search][system] = lines
    if not systems["greedy"]:
        return
    (run.path / FOLDER).mkdir(exist_ok=True)
    named = {f"{system}.{search}": lines for search, own in systems.items() for system, lines in own.items()}
    for name, lines in {"source": pairs.source, "reference": pairs.target, **named}.items():
        run.write_text(f"{FOLDER}/{file_name(name)}.txt", "".join(f"{' '.join(line.split())}\n" for line in lines))
    write_significance(run, systems, pairs.target, results.data)


def texts_of(predictions: Path) -> dict[str, list[str]]:
    """The translations of the test split that an experiment left, by search."""
    arrays = read_arrays(predictions, mend=f"delete {str(predictions.parent)!r} and start again")
    return {search: arrays[name].tolist() for search, name in SEARCHES.items() if name in arrays}


def write_significance(
    run: RunDirectory,
    systems: Mapping[str, Mapping[str, list[str]]],
    reference: list[str],
    data: TranslationData,
    *,
    baseline: str = "dense",
    samples: int = 1000,
) -> None:
    """The paired bootstrap of every system against a baseline, retrained if there is such a row and post hoc otherwise.

    Args:
        run: to write into.
        systems: texts by search and system.
        reference: texts that are right.
        data: says how BLEU takes words apart.
        baseline: method to compare with.
        samples: of the bootstrap.
    """
    rows = []
    for search, texts in systems.items():
        first = next((name for name in (f"{baseline}.retrained", f"{baseline}.post hoc") if name in texts), None)
        if first is None or len(texts) < 2:
            continue
        ordered = {first: texts[first], **{name: own for name, own in sorted(texts.items()) if name != first}}
        tested = paired_bootstrap(ordered, reference, samples=samples, tokenize=data.options.bleu_tokenize)
        rows += [{"search": search, "baseline": first, **row} for row in tested]
    if rows:
        run.write_table(f"{FOLDER}/significance.csv", pd.DataFrame(rows))


def read_texts(path: Path) -> list[str]:
    """The lines of a file that :func:`save_translations` wrote; some may be empty."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]
