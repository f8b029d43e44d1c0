"""The translations that a run leaves: every evaluated system's, a few side by side, and which differences are real."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.console import Console

from training.data.base import TaskData
from training.data.translation import TranslationData
from training.runs.run_directory import RunDirectory
from training.tasks.translation_metrics import paired_bootstrap, signatures

FOLDER = "translations"
SAMPLES = 20


def save_translations(run: RunDirectory, data: TaskData, system: str, outputs: dict[str, list[str]]) -> None:
    """Write a system's translations of the test split, one file per search, beside sources and references; nothing for
    tasks without translations, and with a notice nothing if only a part of the split was translated.

    Args:
        run: to write into.
        data: whose test split was translated.
        system: such as ``learned.retrained``.
        outputs: texts by search, as :meth:`training.tasks.translation.Translation.outputs` gives them.
    """
    if not outputs or not isinstance(data, TranslationData):
        return
    folder = run.path / FOLDER
    pairs = data.texts["test"]
    for texts in outputs.values():
        if len(texts) < len(pairs.source):
            notice = (
                f"{len(texts)} of {len(pairs.source)} test sentences were translated by {system}; its translations are not kept"
            )
            Console().print(notice, markup=False, highlight=False, soft_wrap=True)
            return
    folder.mkdir(exist_ok=True)
    own = {f"{system}.{search}": texts for search, texts in outputs.items()}
    for name, texts in {"source": pairs.source, "reference": pairs.target, **own}.items():
        run.write_text(f"{FOLDER}/{name}.txt", "".join(f"{' '.join(text.split())}\n" for text in texts))


def compare_translations(run: RunDirectory, data: TaskData, *, baseline: str = "dense", samples: int = 1000) -> None:
    """Write ``samples.tsv``, the first sentences in all systems, and ``significance.csv``: the paired bootstrap of every
    system against the baseline, retrained if there is such a row and post hoc otherwise, for each search.

    Args:
        run: with the translations of :func:`save_translations`.
        data: whose test split was translated.
        baseline: method to compare with.
        samples: of the bootstrap.
    """
    folder = run.path / FOLDER
    if not folder.is_dir() or not isinstance(data, TranslationData):
        return
    found = {path.stem: read_texts(path) for path in sorted(folder.glob("*.txt"))}
    source, reference = found.pop("source"), found.pop("reference")
    shown = {name: texts for name, texts in found.items() if name.endswith(".greedy")}
    table = pd.DataFrame({"source": source, "reference": reference, **shown}).head(SAMPLES)
    with run.replacing(f"{FOLDER}/samples.tsv") as partial:
        table.to_csv(partial, index=False, sep="\t")
    rows = []
    for search in ("greedy", "beam"):
        systems = {name.removesuffix(f".{search}"): texts for name, texts in found.items() if name.endswith(f".{search}")}
        first = next((name for name in (f"{baseline}.retrained", f"{baseline}.post hoc") if name in systems), None)
        if first is None or len(systems) < 2:
            continue
        ordered = {first: systems.pop(first), **systems}
        rows += [
            {"search": search, "baseline": first, **row}
            for row in paired_bootstrap(ordered, reference, samples=samples, tokenize=data.bleu_tokenize)
        ]
    if rows:
        run.write_table(f"{FOLDER}/significance.csv", pd.DataFrame(rows))
    run.write_json(f"{FOLDER}/signatures.json", signatures(data.bleu_tokenize))


def read_texts(path: Path) -> list[str]:
    """The lines of a file that :func:`save_translations` wrote; some may be empty."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]
