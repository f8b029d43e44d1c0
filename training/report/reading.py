"""Read what ``training compare`` or ``training.fit`` left in a directory, with a sentence for each thing that is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from gates.errors import GateError, first_line
from training.report.contents import COMBINATION, Contents, Course, Site, Values, group_labels
from training.runs.run_directory import UNFINISHED
from training.stats.statistics import overlap
from training.stats.verdict import is_dense

Masks = tuple[tuple[Site, ...], np.ndarray]


def read_contents(path: Path) -> Contents:
    """Read a directory of ``training compare`` or ``training.fit``.

    Raises:
        GateError: if it is neither, or one of its files is damaged.
    """
    comparison, metrics = _table(path, "comparison.csv"), _json(path, "metrics.json") or {}
    unfinished = comparison is None
    if unfinished:
        comparison = _table(path, UNFINISHED)
    is_table = comparison is not None and {"method", "stage", "heads"} <= set(comparison.columns)
    if not is_table and not (isinstance(metrics, dict) and "heads" in metrics):
        raise GateError(
            f"{str(path)!r} holds neither a comparison nor a run: it has no comparison.csv with the columns method, stage and "
            "heads; give a directory that training compare or training.fit wrote"
        )
    compared = "seed" in comparison.columns if comparison is not None else isinstance(metrics["heads"], int)
    contents = Contents(path, "comparison" if compared else "run", metrics=metrics)
    if comparison is None:
        contents.missing.append("There is no comparison.csv, so there is no table of results.")
    else:
        contents.comparison = comparison
        if unfinished:
            contents.missing.append("The comparison did not end: rows may be missing. The same command goes on where it was.")
    if not metrics:
        contents.missing.append("There is no metrics.json, so the command, the machine and the versions are unknown.")
    contents.metric = _main_metric(contents)
    contents.config = _text(path, "config.yaml")
    _read_tables(contents)
    _read_heads(contents)
    _read_translations(contents)
    if contents.config is None:
        contents.missing.append("There is no config.yaml, so the configuration is not shown.")
    return contents


def _main_metric(contents: Contents) -> str:
    stated = contents.metrics.get("main_metric")
    measured = [name.removeprefix("test_") for name in contents.comparison.columns if name.startswith("test_")]
    if stated and measured and stated not in measured:
        raise GateError(
            f"metrics.json in {str(contents.path)!r} names the main metric {stated!r}, but comparison.csv has no column "
            f"test_{stated}; it has {', '.join(measured)}"
        )
    named = (name for name in measured if name != "loss" and not name.startswith("beam_"))
    return str(stated or next(named, "accuracy"))


def _read_tables(contents: Contents) -> None:
    """Results over seeds; of a single run, the run's own."""
    path, rows = contents.path, contents.comparison
    if len(rows) and contents.kind == "run":
        rows = rows.assign(seed=contents.metrics.get("seed", 0), budget=rows["heads"])
        contents.comparison = rows
        contents.curve = _table(path, "curve.csv")
        if contents.curve is None or not len(contents.curve):
            contents.curve = None
            contents.missing.append("There is no curve.csv, so quality at other budgets is not shown.")
    if contents.kind == "comparison":
        contents.statistics = _optional(contents, "statistics.csv", "differences between methods are not tested")
        contents.agreement = _optional(contents, "agreement.csv", "the agreement of methods over seeds is not shown")
        contents.verdict = _text(path, "verdict.md")
        summary = _optional(contents, "summary.csv", "means are shown without intervals")
        if summary is not None:
            contents.summary = summary
            return
    main = f"test_{contents.metric}"
    if len(rows):
        costs = {name: (name, "mean") for name in ("steps", "seconds", "peak_memory_mb") if name in rows}
        means = {"seeds": ("seed", "nunique"), "mean": (main, "mean"), **costs}
        contents.summary = rows.groupby(COMBINATION, sort=False, as_index=False).agg(**means)


def _read_heads(contents: Contents) -> None:
    """Scores, masks and gates over time, which the two kinds of directory hold in different files."""
    compared = contents.kind == "comparison"
    scores = _optional(contents, "scores.csv" if compared else "scores/heads.csv", "HIS and entropy are not shown")
    if scores is not None:
        if "seed" not in scores:
            scores = scores.assign(seed=contents.metrics.get("seed", 0))
        contents.scores = scores.assign(label=[f"{k}.{n}" for k, n in zip(scores["kind"], scores["layer"], strict=True)])
        if contents.mean_score("his") is None or contents.mean_score("entropy") is None:
            contents.missing.append("HIS and entropy were not both scored, so one is not drawn against the other.")
    contents.masks = dict(_comparison_masks(contents) if compared else _run_masks(contents))
    if not contents.masks:
        contents.missing.append(f"There are no masks ({'masks.json' if compared else 'masks/*.json'}), so they are not shown.")
    _read_kinds(contents)
    if not compared and contents.masks:
        contents.agreement = _run_agreement(contents)
    contents.prices = _table(contents.path, "prices.csv")
    if contents.prices is not None and contents.masks:
        labels = {site.label for site in next(iter(contents.masks.values()))[0]}
        _check_columns(contents, "prices.csv", contents.prices, {"seed", "method", "price", "open", *labels})
    name = "gates_over_time.csv" if compared else "scores/gates_over_time.csv"
    gates = _optional(contents, name, "open heads over training are not shown")
    if gates is not None and len(gates):
        if not compared:
            learned = [budget for method, budget in contents.masks if method == "learned"] or contents.budgets[:1] or [0]
            gates = gates.assign(seed=0, method="learned", budget=learned[0])
        for (method, budget), rows in gates.groupby(["method", "budget"], sort=False):
            key, course = (str(method), int(str(budget))), _course(rows)
            sites, masks = contents.masks.get(key, ((), np.empty(0)))
            # A run's own file goes on to its end, with the mask.
            contents.courses[key] = course.ending_in(masks.mean(axis=0)) if compared and sites == course.sites else course


def _read_translations(contents: Contents) -> None:
    """For translation, sample sentences with the signatures of their metrics; of a run also the tests of its systems."""
    compared = contents.kind == "comparison"
    name = "samples.tsv" if compared else "translations/samples.tsv"
    contents.samples = _table(contents.path, name, sep="\t", dtype=str, keep_default_na=False)
    _check_columns(contents, name, contents.samples, {"source", "reference"})
    if contents.samples is None and contents.metric == "bleu":
        contents.missing.append(f"There is no {name}, so no translations are shown.")
    stated = contents.metrics.get("signatures") if compared else _json(contents.path, "translations/signatures.json")
    if isinstance(stated, dict):
        contents.signatures = {str(metric): str(signature) for metric, signature in stated.items()}
    if not compared:
        contents.significance = _table(contents.path, "translations/significance.csv")
        needed = {"search", "baseline", "system", "bleu", "bleu_p"}
        _check_columns(contents, "translations/significance.csv", contents.significance, needed)


def _check_columns(contents: Contents, name: str, table: pd.DataFrame | None, needed: set[str]) -> None:
    """Raises :class:`GateError` for a table without columns that it needs."""
    lacking = sorted(needed - set(table.columns)) if table is not None else []
    if lacking:
        raise GateError(f"{str(contents.path / name)!r} has no column {', '.join(map(repr, lacking))}; write the results again")


def _course(rows: pd.DataFrame) -> Course:
    """The mean over seeds at every step; columns are named like ``encoder.3.11``."""
    gates = rows.drop(columns=["seed", "method", "budget"]).set_index("step").dropna(axis="columns", how="all")
    values, is_open = gates.groupby(level="step").mean(), (gates > 0).astype(float).groupby(level="step").mean()
    sites = group_labels([".".join(str(name).split(".")[:2]) for name in gates.columns])
    return Course(sites, values.index.to_numpy(), values.to_numpy(), is_open.to_numpy(), rows["seed"].nunique())


def _comparison_masks(contents: Contents) -> Iterator[tuple[tuple[str, int], Masks]]:
    masks, sites = _json(contents.path, "masks.json"), _json(contents.path, "sites.json")
    if not masks or not sites:
        return
    try:
        order = tuple(Site(site["label"], int(site["gates"])) for site in sites)
        found: dict[tuple[str, int], list[list[float]]] = {}
        for entry in masks:
            key = entry["method"], int(entry["budget"])
            found.setdefault(key, []).append(entry["mask"])
            if "post_hoc_mask" in entry:
                contents.searched_again.add(key)
        for key, of_seeds in found.items():
            if not is_dense(key[0]):
                stacked = np.array(of_seeds, dtype=float).reshape(len(of_seeds), sum(site.gates for site in order))
                yield key, (order, stacked)
    except (KeyError, TypeError, ValueError) as error:
        raise GateError(
            f"masks.json and sites.json in {str(contents.path)!r} do not belong together: expected masks with one number per "
            "gate of the sites, as training compare writes them"
        ) from error


def _run_masks(contents: Contents) -> Iterator[tuple[tuple[str, int], Masks]]:
    found = {}
    for file in sorted((contents.path / "masks").glob("*.json")):
        content = _json(contents.path, f"masks/{file.name}")
        try:
            sites = tuple(Site(f"{site['kind']}.{site['layer']}", int(site["heads"])) for site in content["sites"])
            mask = [float(head in site["kept"]) for site in content["sites"] for head in range(int(site["heads"]))]
        except (KeyError, TypeError, ValueError) as error:
            raise GateError(
                f"{str(file)!r} is not a mask file: expected JSON as gates.surgery.masks.save_mask writes it"
            ) from error
        found[file.stem] = ((file.stem, int(sum(mask))), (sites, np.array([mask])))
    order = [method for method in contents.methods if method in found]
    for method in [*order, *(name for name in found if name not in order)]:
        yield found[method]


def _run_agreement(contents: Contents) -> pd.DataFrame:
    """How much the masks of a run's methods share, beside what random masks of their sizes would."""
    rows, per_kind = [], bool(contents.kinds)
    for ((method, budget), (sites, mask)), ((other, _), (_, others)) in combinations(contents.masks.items(), 2):
        kept, theirs = (mask[0] > 0).astype(int), (others[0] > 0).astype(int)
        if len(kept) == len(theirs) and kept.sum() == theirs.sum() > 0:
            kinds = np.repeat([site.kind for site in sites], [site.gates for site in sites]) if per_kind else None
            jaccard, chance = overlap(kept, theirs, kinds)
            rows.append({"budget": budget, "method": method, "other": other, "jaccard": jaccard, "chance_jaccard": chance})
    return pd.DataFrame(rows, columns=["budget", "method", "other", "jaccard", "chance_jaccard"])


def _read_kinds(contents: Contents) -> None:
    """What budgets per kind keep of the kinds that they prune: a comparison says it, a run's masks show it."""
    if contents.kind == "comparison":
        stated = contents.metrics.get("budgets_by_kind") or {}
        try:
            contents.kinds = {int(budget): {kind: int(kept) for kind, kept in of.items()} for budget, of in stated.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise GateError(
                f"budgets_by_kind in metrics.json in {str(contents.path)!r} is {stated!r}; expected heads by kind by budget"
            ) from error
    elif named := _kinds_of_budget(contents):
        for (_, budget), (sites, masks) in contents.masks.items():
            parts = list(zip(sites, Values(sites, masks[0]).by_site(), strict=True))
            contents.kinds[budget] = {kind: int(sum(part.sum() for site, part in parts if site.kind == kind)) for kind in named}


def _kinds_of_budget(contents: Contents) -> list[str]:
    """The kinds that a run's configuration gives a budget; none for one budget of all."""
    try:
        config = yaml.safe_load(contents.config or "")
    except (yaml.YAMLError, ValueError):  # shown as it is, and read for nothing else
        return []
    match config:
        case {"model": {"budget": dict(budget)}}:
            return list(budget)
    return []


def _optional(contents: Contents, name: str, consequence: str) -> pd.DataFrame | None:
    table = _table(contents.path, name)
    if table is None:
        contents.missing.append(f"There is no {name}, so {consequence}.")
    return table


def _table(path: Path, name: str, **how: Any) -> pd.DataFrame | None:
    """A table; None if there is no such file."""
    try:
        return pd.read_csv(path / name, **how)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
    except (OSError, ValueError) as error:
        raise GateError(f"cannot read {str(path / name)!r} as a table: {first_line(error)}") from error


def _json(path: Path, name: str) -> Any:
    text = _text(path, name)
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise GateError(f"cannot read {str(path / name)!r} as JSON: {first_line(error)}") from error


def _text(path: Path, name: str) -> str | None:
    try:
        return (path / name).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise GateError(f"cannot read {str(path / name)!r}: {first_line(error)}") from error
