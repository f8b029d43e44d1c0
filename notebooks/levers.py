"""Measure the parts of the learned method: change one or a few, and judge them on the selection split.

    python notebooks/levers.py FOLDER [--only NAME --only NAME] -- --config FILE --budgets 9 --seeds 0,1 ...

where the arguments after ``--`` are those of ``training compare``, without ``--methods`` and ``--run_dir``. Among them
``--model.prune`` changes the steps of the gates, and with ``--stages "post hoc"`` no mask is trained on. Writes
FOLDER/levers.csv, a row for each lever, stage and budget, and FOLDER/verdict.md, the same as a table. Comparisons share their
experiments, so the same command continues a stopped one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gates.errors import GateError
from gates.files import replacing
from training.cli.command_line import split_at_dashes
from training.cli.exit import finish
from training.commands.table import run_command
from training.config.comparison import FROM_DENSE, POST_HOC
from training.stats.numbers import scale, shown

LEVERS: dict[str, tuple[str, list[str]]] = {
    "as configured": ("learned", []),
    "with a refit": ("learned+refit", []),
    "started by optimal brain surgeon, with a refit": ("learned(start=obs)+refit", []),
    "refined by swaps": ("learned+swap", []),
    "falling temperature": ("learned", ["--model.anneal", "0.05"]),
    "start by HIS": ("learned", ["--model.init_spread", "1"]),
    "start by optimal brain surgeon": ("learned", ["--model.init_spread", "1", "--model.init_score", "obs"]),
    "rounded from 70 % of the prune phase": ("learned", ["--model.straight_through_from", "0.7"]),
    "distilled": ("learned+distil", []),
    "one draw per batch": ("learned", ["--model.draw_per", "batch"]),
    "one draw per batch, refined by swaps": ("learned+swap", ["--model.draw_per", "batch"]),
    "distilled, refined by swaps": ("learned+distil+swap", []),
    "at least one head per layer": ("learned", ["--model.minimum_per_layer", "1"]),
    "target reached at the end": ("learned", ["--model.ramp", "1"]),
    "best of several draws": ("learned+draws", []),
    "together with the weights": ("learned(pipelined=false)", []),
    "gate learning rate 0.1": ("learned", ["--model.gate_learning_rate", "0.1"]),
    "refined by swaps, with a refit": ("learned+swap+refit", []),
    "best of several draws, with a refit": ("learned+draws+refit", []),
    "half the training, with a refit": ("learned+refit", ["--model.retrain", "0.45"]),
    "twice the training, with a refit": ("learned+refit", ["--model.retrain", "1.8"]),
    "optimal brain surgeon, with a refit": ("obs+refit", []),
    "HIS, with a refit": ("his+refit", []),
}
"""By name the method that is compared, and how its options differ from the configuration's. Steps are those of the gates."""
STAGES = (POST_HOC, FROM_DENSE)


def measure(folder: Path, name: str, arguments: Sequence[str]) -> pd.DataFrame:
    """Compare one lever, and return its rows; see :func:`rows_of`.

    Raises:
        GateError: if the comparison ends early, which has printed the reason.
    """
    method, changes = LEVERS[name]
    run = folder / "runs" / "".join(letter if letter.isalnum() else "-" for letter in name)
    own = ["--methods", method, "--run_dir", str(run), "--experiments", str(folder / "experiments")]
    if run_command("compare", ["--stages", ",".join(STAGES), *arguments, *own, *changes]) != 0:
        raise GateError(f"the comparison of {name!r} did not end")
    return rows_of(run, name)


def rows_of(run: Path, name: str) -> pd.DataFrame:
    """Return a row for each stage and budget: the mean of the seeds, each seed's result, and the mean of the dense model."""
    metric = "select_" + json.loads((run / "metrics.json").read_text(encoding="utf-8"))["main_metric"]
    rows = pd.read_csv(run / "comparison.csv")
    dense = rows.query("method == 'dense'").groupby("stage")[metric].mean()
    pruned = rows.query("method != 'dense'").groupby(["stage", "budget"], sort=False)[metric]
    table = pruned.agg(["mean", "count", list]).reset_index()
    table = table.rename(columns={"count": "seeds", "list": "each"}).assign(metric=metric)
    table["dense"] = table["stage"].map(dense)
    table.insert(0, "lever", name)
    return table


def as_text(table: pd.DataFrame) -> str:
    """Return Markdown with a row for each lever and a column for each stage and budget, on the scale that is shown."""
    metric = str(table["metric"].iloc[0])
    name = metric.removeprefix("select_")
    means = table.assign(mean=shown(name, table["mean"]).round(1))
    wide = means.pivot(index="lever", columns=["budget", "stage"], values="mean")
    wide = wide.reindex(list(dict.fromkeys(table["lever"])))
    titles = [f"{budget} heads, {stage}" for budget, stage in wide.columns.to_flat_index()]
    lines = ["| | " + " | ".join(titles) + " |", "| --- |" + " --: |" * len(titles)]
    lines += [
        f"| {lever} | " + " | ".join(map(str, row)) + " |" for lever, row in zip(wide.index, wide.to_numpy(), strict=True)
    ]
    seeds = f"mean of {table['seeds'].min()} seeds" if table["seeds"].min() > 1 else "one seed"
    return "\n".join([*lines, "", f"{metric}{scale(name)}, {seeds}.", ""])


def run(options: argparse.Namespace, further: Sequence[str]) -> None:
    """Measure one lever after the other, and write the tables after each."""
    names = options.only or list(LEVERS)
    for name in names:
        if name not in LEVERS:
            raise GateError(f"--only has {name!r}; expected one of {'; '.join(LEVERS)}")
    folder, tables = Path(options.folder), []
    for name in names:
        tables.append(measure(folder, name, further))
        table = pd.concat(tables, ignore_index=True)
        for file, text in {"levers.csv": table.to_csv(index=False), "verdict.md": as_text(table)}.items():
            with replacing(folder / file) as partial:
                partial.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for input that its user can mend."""
    own, further = split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", help="where results go")
    parser.add_argument("--only", action="append", metavar="NAME", help="a lever; give it several times for several levers")
    return finish(
        lambda: parser.parse_args(own),
        lambda options: run(options, further),
        when_stopped="the same command continues",
    )


if __name__ == "__main__":
    sys.exit(main())
