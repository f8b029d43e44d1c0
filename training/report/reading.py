"""Read what ``training compare`` or ``training.fit`` left in a directory, with a sentence for each thing that is not there."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gates.attention.sites import KINDS
from gates.errors import GateError, first_line
from gates.roles.roles import RULES
from training.report.contents import GateHistory, ReportData, Site, by_kind, group_labels
from training.report.figures import recoveries
from training.runs.directory import UNFINISHED
from training.runs.stored import RUN_AGAIN, damaged, read_json, read_table, read_text
from training.stats.tables import TEST_COLUMNS, summarise
from training.stats.verdict import is_dense

# ``roles.csv`` of the experiment roles, read again, and what methods keep of every role.

SPECIALISED = "specialised"
"""The column that says whether a head has a role that is no background."""
HAS = [f"{rule.name}_has" for rule in RULES]
NONE = "none"
"""The role of a head without any."""
FIND_AGAIN = "find the roles again with --experiments roles"


def read_roles(path: Path) -> pd.DataFrame:
    """Read a table of the experiment roles: a row for each head, with its kind of attention."""
    try:
        types = dict.fromkeys((SPECIALISED, *HAS), bool) | {"head": int, "site": str}
        table = pd.read_csv(io.StringIO(read_text(path, mend=FIND_AGAIN)), dtype=types)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GateError(
            f"there are no roles in {str(path)!r}; find them with --experiments roles, or give --roles FILE"
        ) from error
    except ValueError as error:
        raise GateError(f"{str(path)!r} is no table of roles: {first_line(error)}") from error
    if lacking := sorted({"site", "head", "roles", SPECIALISED, *HAS} - set(table.columns)):
        raise GateError(f"{str(path)!r} has no column {lacking[0]!r}; give roles.csv of the experiment roles")
    if not len(table):
        raise GateError(f"{str(path)!r} has no head; {FIND_AGAIN}")
    if table.duplicated(["site", "head"]).any():
        raise GateError(f"{str(path)!r} does not have one row for each site and head; {FIND_AGAIN}")
    table["kind"] = table["site"].astype(str).str.partition(".")[0]
    if others := sorted(set(table["kind"]) - set(KINDS)):
        raise GateError(f"{str(path)!r} has the kind of attention {others[0]!r}; expected some of {', '.join(KINDS)}")
    return table


def roles_of_gates(table: pd.DataFrame, sites: Sequence[tuple[str, int]], where: str) -> pd.DataFrame:
    """Return a row for each gate: its site, its number there, and the roles of its head or of all heads of its group."""
    found = []
    for label, gates in sites:
        own = table[table["site"] == label].sort_values("head")
        if not len(own) or len(own) % gates or own["head"].tolist() != list(range(len(own))):
            raise GateError(f"the roles have {len(own)} heads of {label} and {where} {gates}; give the roles of the same model")
        gate = (np.arange(len(own)) // (len(own) // gates)).tolist()
        held = own[[SPECIALISED, *HAS]].groupby(gate).any().reset_index(drop=True)
        found.append(held.assign(site=label, head=range(gates)))
    if others := sorted(set(table["site"]) - {label for label, _ in sites}):
        raise GateError(f"the roles have heads of {others[0]} and {where} none; give the roles of the same model")
    joined = pd.concat(found, ignore_index=True)
    names = [[rule.name for rule in RULES if row[f"{rule.name}_has"]] for _, row in joined.iterrows()]
    return joined.assign(roles=[", ".join(own) or NONE for own in names])[["site", "head", "roles", SPECIALISED, *HAS]]


def members_by_role(table: pd.DataFrame) -> dict[str, NDArray[np.bool_]]:
    """Return which heads have each role that occurs, and which have none, ``[heads]``."""
    groups = {rule.name: table[f"{rule.name}_has"].to_numpy(dtype=bool) for rule in RULES}
    groups[NONE] = (table["roles"] == NONE).to_numpy()
    return {name: members for name, members in groups.items() if members.any()}


Masks = dict[tuple[str, int], dict[int, NDArray[np.float64]]]
"""By method and budget, by seed: 0/1 for every gate or head."""


def role_counts(table: pd.DataFrame, masks: Masks) -> pd.DataFrame:
    """Count the heads of every role that each method keeps, in the mean over seeds."""
    rows = []
    for (method, budget), of_seeds in masks.items():
        kept = np.mean([mask > 0 for mask in of_seeds.values()], axis=0)
        for name, members in members_by_role(table).items():
            counts = {"heads": int(members.sum()), "kept": kept[members].sum()}
            rows.append({"method": method, "budget": budget, "role": name, **counts})
    return pd.DataFrame(rows)


# The attention of each head in a few sentences, from the experiment roles, for pages.

ATTENTION = "attention.json"
HEAD, SENTENCE = ("name", "kind", "roles", "site", "head"), ("name", "tokens", "weights")


def as_text(attention: dict[str, Any]) -> str:
    """Return attention as compact JSON."""
    return json.dumps(attention, separators=(",", ":"))


def read_attention(folder: Path) -> str | None:
    """Return the attention in the folder of a table of roles as compact JSON; None without such a file."""
    path = folder / ATTENTION
    try:
        found = read_json(path, dict, mend=FIND_AGAIN)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        for head in found["heads"]:
            _check(head, found["sentences"])
        _ = found["heads"][found["first"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise damaged(path, "the attention of heads", f"{type(error).__name__}: {error}", FIND_AGAIN) from error
    return as_text(found)


def _check(head: dict[str, Any], sentences: list[dict[str, Any]]) -> None:
    """Raise an error if the attention of a head does not fit a sentence's tokens."""
    _, kind, _, site, number = (head[name] for name in HEAD)
    if kind not in KINDS:
        raise ValueError(f"the kind {kind!r}")
    for sentence in sentences:
        _, tokens, weights = (sentence[name] for name in SENTENCE)
        queries, keys = tokens[kind]
        rows = weights[site][number]
        if len(rows) != len(queries) or any(len(row) != len(keys) for row in rows):
            raise ValueError(f"{head['name']} has weights of other tokens")


EXPECTED, PRICE = "expected", "price"
"""Columns of gates over time: the number of gates expected to be open, and the price of an open one (``price/KIND``)."""
NOT_GATES = re.compile(rf"seed|method|budget|{EXPECTED}|{PRICE}(/\w+)?")
SAMPLES = "samples.tsv"
SIGNIFICANCE = "translations/significance.csv"
COLUMNS = {
    "comparison.csv": ("seed", "method", "stage", "budget", "heads"),
    "curve.csv": ("method", "stage", "budget", "heads"),
    "summary.csv": ("stage", "method", "budget", "seeds", "mean"),
    "statistics.csv": TEST_COLUMNS,
    "agreement.csv": ("budget", "method", "other", "jaccard", "chance_jaccard"),
    "scores.csv": ("seed", "gate", "kind", "layer", "head"),
    "gates_over_time.csv": ("seed", "method", "budget", "step"),
    SIGNIFICANCE: ("search", "baseline", "system", "bleu", "bleu_p"),
}
"""The columns that each table must have."""

T = TypeVar("T")


def read_contents(path: Path, roles: Path | None = None) -> ReportData:
    """Read a directory of ``training compare`` or ``training.fit``.

    Args:
        roles: A table of the experiment roles about the same model; by default the directory's own ``roles.csv``, if any.
    """
    comparison, metrics = _table(path, "comparison.csv"), _if_there(read_json, path / "metrics.json", dict) or {}
    unfinished = _table(path, UNFINISHED) if comparison is None else None
    truth = _table(path, "truth.csv")
    if comparison is None and unfinished is None and truth is None and "heads" not in metrics:
        raise GateError(
            f"{str(path)!r} holds neither a comparison nor a run: it has no comparison.csv; give a directory of "
            "head-gates fit or head-gates compare"
        )
    contents = ReportData(path, "run" if "run" in metrics else "comparison", metrics=metrics)
    contents.truth = None if truth is None or not len(truth) else recoveries(truth)
    if comparison is not None:
        contents.comparison = comparison
    elif unfinished is not None:
        contents.comparison = unfinished
        contents.missing.append("The comparison did not end: rows may be missing. The same command continues it.")
    else:
        contents.missing.append("There is no comparison.csv, so there is no table of results.")
    if not metrics:
        contents.missing.append(
            "There is no metrics.json, so the command, the machine and the versions are unknown. It is written last: the run "
            "may have been stopped between two tables."
        )
    contents.metric = _main_metric(contents)
    contents.config = _if_there(read_text, path / "config.yaml")
    _read_tables(contents)
    _read_heads(contents)
    _read_translations(contents)
    table = roles or path / "roles.csv"
    if roles is not None or table.is_file():
        contents.roles, contents.attention = read_roles(table), read_attention(table.parent)
    if contents.config is None:
        contents.missing.append("There is no config.yaml, so the configuration is not shown.")
    return contents


def _main_metric(contents: ReportData) -> str:
    stated = contents.metrics.get("main_metric")
    measured = [name.removeprefix("test_") for name in contents.comparison.columns if name.startswith("test_")]
    if stated and measured and stated not in measured:
        raise GateError(
            f"metrics.json in {str(contents.path)!r} names the main metric {stated!r}, but comparison.csv has no column "
            f"test_{stated}; it has {', '.join(measured)}"
        )
    named = (name for name in measured if name != "loss" and not name.startswith("beam_"))
    return str(stated or next(named, "accuracy"))


def _read_tables(contents: ReportData) -> None:
    """Read the results over seeds, and of a single run its curve."""
    path = contents.path
    if contents.kind == "run":
        contents.curve = _optional(contents, "curve.csv", "quality at other budgets is not shown")
    contents.statistics = _optional(contents, "statistics.csv", "differences between methods are not tested")
    contents.agreement = _optional(contents, "agreement.csv", "the agreement of methods is not shown")
    contents.verdict = _if_there(read_text, path / "verdict.md")
    summary = _table(path, "summary.csv")
    if summary is not None:
        contents.summary = summary
    elif len(contents.comparison):
        contents.summary = summarise(contents.comparison, contents.metric)


def _read_heads(contents: ReportData) -> None:
    """Read scores, masks and gates over time."""
    path = contents.path
    scores = _optional(contents, "scores.csv", "HIS and entropy are not shown")
    if scores is not None:
        contents.scores = scores.assign(label=[f"{k}.{n}" for k, n in zip(scores["kind"], scores["layer"], strict=True)])
    _read_masks(contents)
    _read_kinds(contents)
    sites = next(iter(contents.masks.values()), ((), None))[0]
    contents.prices = _table(path, "prices.csv", ("seed", "method", "price", "open", *(site.label for site in sites)))
    gates = _optional(contents, "gates_over_time.csv", "open heads over training are not shown")
    if gates is not None:
        for (method, budget), rows in gates.groupby(["method", "budget"], sort=False):
            key, history = (str(method), int(str(budget))), _history(rows)
            sites, masks = contents.masks.get(key, ((), np.empty(0)))
            contents.histories[key] = history.ending_in(masks.mean(axis=0)) if sites == history.sites else history


def _read_translations(contents: ReportData) -> None:
    """Read sample sentences with the signatures of their metrics, and of a run the tests of its systems."""
    contents.samples = _if_there(_samples, contents.path / SAMPLES)
    if contents.samples is None and contents.metric == "bleu":
        contents.missing.append(f"There is no {SAMPLES}, so no translations are shown.")
    contents.signatures = contents.metrics.get("signatures", {})
    if contents.kind == "run":
        contents.significance = _table(contents.path, SIGNIFICANCE)


def _history(rows: pd.DataFrame) -> GateHistory:
    """Return the mean over seeds at every step.

    Args:
        rows: A column per gate, named like ``encoder.3.11``, perhaps with ``expected``, ``price`` and ``price/KIND``.
    """
    by_step = rows.set_index("step").drop(columns=["seed", "method", "budget"]).dropna(axis="columns", how="all")
    gates = by_step[[name for name in by_step if not NOT_GATES.fullmatch(str(name))]]
    means, is_open = by_step.groupby(level="step").mean(), (gates > 0).astype(float).groupby(level="step").mean()
    sites, order = by_kind(group_labels([str(name).rpartition(".")[0] for name in gates.columns]))
    prices = {str(name).partition("/")[2]: means[name].to_numpy() for name in means if str(name).split("/")[0] == PRICE}
    of_kinds = {kind: values for kind, values in prices.items() if kind}
    if len({values.tobytes() for values in of_kinds.values()}) <= 1:  # all kinds pay the same
        of_kinds = {"": next(iter(prices.values()))} if prices else {}
    return GateHistory(
        sites,
        means.index.to_numpy(),
        means[list(gates)].to_numpy()[:, order],
        is_open.to_numpy()[:, order],
        rows["seed"].nunique(),
        expected=means[EXPECTED].to_numpy() if EXPECTED in means else None,
        prices=of_kinds,
    )


def read_masks(path: Path) -> tuple[list[tuple[str, int, int]], Masks, set[tuple[str, int]]]:
    """Return label, gates and heads of each site of a run or comparison, and its masks without those of the dense model.

    The last part has the methods and budgets whose masks of the dense weights are different ones.
    """
    entries, listed = (read_json(path / name, list) for name in ("masks.json", "sites.json"))
    masks: Masks = {}
    searched_again = set()
    try:
        sites = [(str(one["label"]), int(one["gates"]), int(one.get("heads", one["gates"]))) for one in listed]
        gates = sum(size for _, size, _ in sites)
        for entry in entries:
            key = str(entry["method"]), int(entry["budget"])
            if not is_dense(key[0]):
                masks.setdefault(key, {})[int(entry["seed"])] = np.array(entry["mask"], dtype=float).reshape(gates)
            if "post_hoc_mask" in entry:
                searched_again.add(key)
    except (KeyError, TypeError, ValueError) as error:
        raise GateError(
            f"masks.json and sites.json in {str(path)!r} do not belong together: expected masks with one number per gate of "
            "the sites, as head-gates compare writes them"
        ) from error
    return sites, masks, searched_again


def _read_masks(contents: ReportData) -> None:
    found = _if_there(read_masks, contents.path)
    if found is None or not found[0]:
        contents.missing.append("There are no masks (masks.json), so they are not shown.")
        return
    sites, masks, contents.searched_again = found
    ordered, places = by_kind(tuple(Site(label, gates) for label, gates, _ in sites))
    contents.masks = {key: (ordered, np.stack(list(of_seeds.values()))[:, places]) for key, of_seeds in masks.items()}


def _read_kinds(contents: ReportData) -> None:
    stated = contents.metrics.get("budgets_by_kind") or {}
    try:
        contents.kinds = {int(budget): {kind: int(kept) for kind, kept in of.items()} for budget, of in stated.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise GateError(
            f"budgets_by_kind in metrics.json in {str(contents.path)!r} is {stated!r}; expected heads by kind by budget"
        ) from error


def _optional(contents: ReportData, name: str, consequence: str) -> pd.DataFrame | None:
    """Read a table; None if it is not there or has no rows, which ``missing`` says then."""
    table = _table(contents.path, name)
    if table is None:
        contents.missing.append(f"There is no {name}, so {consequence}.")
    return table if table is not None and len(table) else None


def _table(path: Path, name: str, needed: Sequence[str] = ()) -> pd.DataFrame | None:
    return _if_there(partial(read_table, needed=needed or COLUMNS.get(name, ())), path / name)


def _samples(path: Path) -> pd.DataFrame | None:
    """Read translations, which are texts whatever they look like."""
    text = read_text(path)
    try:
        table = pd.read_csv(io.StringIO(text), sep="\t", dtype=str, keep_default_na=False) if text else None
    except ValueError as error:
        raise damaged(path, "a table", first_line(error), RUN_AGAIN) from error
    if table is not None and (lacking := sorted({"source", "reference"} - set(table.columns))):
        raise damaged(path, "a table", f"it has no column {lacking[0]!r}", RUN_AGAIN)
    return table


def _if_there(read: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return read(*arguments)
    except (FileNotFoundError, NotADirectoryError):
        return None
