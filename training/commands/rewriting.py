"""``python -m training summary DIRECTORY... --rewrite``: summary, tests and verdict of finished comparisons, anew."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from gates.errors import GateError
from gates.files import replacing
from training.runs.checksums import changing
from training.runs.stored import read_json, read_table
from training.stats.statistics import rank_methods, restate, summarise
from training.stats.verdict import verdict


def rewrite(path: Path) -> None:
    """Write ``summary.csv``, ``statistics.csv`` and ``verdict.md`` of a directory from its rows and the tests that it has.

    Predictions are not needed, so tests are taken over where they are claims still, see
    :func:`training.stats.statistics.restate`. The command that made the comparison makes all of them.

    Args:
        path: that ``training.fit`` or ``training compare`` wrote.

    Raises:
        GateError: if there is no finished comparison.
    """
    try:
        metrics = read_json(path / "metrics.json", dict)
        comparison, earlier = (read_table(path / name) for name in ("comparison.csv", "statistics.csv"))
        metric = str(metrics["main_metric"])
        lower = bool(metrics.get("lower_is_better", False))
        summary, tests = summarise(comparison, metric), restate(comparison, earlier, metric, lower_is_better=lower)
        check_complete(path, summary)
        said = verdict(
            summary,
            tests,
            main_metric=metric,
            lower_is_better=lower,
            ours=metrics["ours"],
            ranks=rank_methods(comparison, metric, lower_is_better=lower),
            kinds={int(budget): kinds for budget, kinds in metrics["budgets_by_kind"].items()},
            unit=metrics["unit"],
            within={int(budget): time for budget, time in metrics.get("within", {}).items()},
            majority=metrics.get("majority", {}).get(metric),
        )
    except (GateError, PermissionError):  # say what is wrong better
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GateError(
            f"{str(path)!r} does not hold a finished comparison: metrics.json, comparison.csv or statistics.csv is missing"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise GateError(
            f"metrics.json, comparison.csv or statistics.csv in {str(path)!r} is not as training.fit or training compare "
            "writes it; start that command again"
        ) from error
    files = {"summary.csv": summary.to_csv(index=False), "statistics.csv": tests.to_csv(index=False), "verdict.md": said}
    with changing(path, files):
        for name, text in files.items():
            with replacing(path / name) as partial:
                partial.write_text(text, encoding="utf-8")


def check_complete(path: Path, summary: pd.DataFrame) -> None:
    """Whether a summary is of all that the stored one is of.

    Raises:
        GateError: if rows of ``comparison.csv`` are gone.
    """
    if not (path / "summary.csv").is_file():
        return
    cell = ["stage", "budget", "method"]
    earlier = read_table(path / "summary.csv", needed=(*cell, "seeds"))
    stored, found = (table.set_index(cell)["seeds"] for table in (earlier, summary))
    lacking = stored[found.reindex(stored.index).fillna(0) < stored]
    if len(lacking):
        stage, budget, method = lacking.index[0]
        raise GateError(
            f"comparison.csv in {str(path)!r} has lost rows: {method} at {budget}, {stage}, was of {lacking.iloc[0]} seeds and "
            f"has {int(found.reindex(lacking.index).fillna(0).iloc[0])} now; start the comparison's command again"
        )
