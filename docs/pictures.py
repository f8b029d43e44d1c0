"""``python docs/pictures.py``: the pictures of README and documentation, drawn from ``notebooks/results``.

Each is an SVG with colours for light and for dark screens, small enough for a phone's width.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "notebooks" / "results"
ASSETS = ROOT / "docs" / "assets"

COLOURS = {
    "paper": ("#ffffff", "#1b1e24"),
    "ink": ("#1c1f23", "#e4e6ea"),
    "faint": ("#d9dbdf", "#3a3f48"),
    "blue": ("#0072b2", "#56b4e9"),
    "sky": ("#3f9bd1", "#a3d5f2"),
    "orange": ("#c44f00", "#f08c3c"),
    "green": ("#007f5f", "#3fc79a"),
    "purple": ("#a8558c", "#df9cc4"),
    "grey": ("#6f757e", "#9aa1ab"),
}
"""Name to the colours on light and on dark screens; matplotlib draws with the first, the file refers to the name."""
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
LINES = {
    "learned": ("learned gates", "blue", "o", "-"),
    "learned+swap": ("learned gates + swaps", "sky", "s", "--"),
    "his": ("Head Importance Score", "orange", "^", "-"),
    "his+swap": ("Head Importance Score + swaps", "orange", "v", ":"),
    "dsp": ("Differentiable Subset Pruning", "green", "D", "-."),
    "entropy-low-first": ("attention entropy, low first", "purple", "D", "-."),
    "random": ("random heads", "grey", "x", ":"),
}
"""Method to its name in the legend, colour, marker and dashes."""
TITLES = {"post hoc": "mask alone, no further training", "retrained": "trained on with the mask"}
PICTURES: dict[str, tuple[str, str, float]] = {
    "translation": ("multi30k_all_budgets", "retrained", 24),
    "translation_post_hoc": ("multi30k_all_budgets", "post hoc", 0),
    "encoder": ("multi30k_encoder_budgets", "retrained", 32),
    "agreement": ("agreement", "post hoc", 70),
    "sick": ("sick", "post hoc", 55),
    "sst2": ("sst2", "post hoc", 50),
    "sst2_retrained": ("sst2", "retrained", 80),
}
"""File to the folder of results, the stage, and the lower end of the axis in points."""
KINDS = {
    "encoder": ("encoder", "orange", "^"),
    "decoder": ("decoder, on itself", "green", "D"),
    "cross": ("decoder, on the encoder", "blue", "o"),
}
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.edgecolor": LIGHT["ink"],
    "xtick.color": LIGHT["ink"],
    "ytick.color": LIGHT["ink"],
    "grid.color": LIGHT["faint"],
    "figure.facecolor": LIGHT["paper"],
    "axes.facecolor": "none",
    "svg.fonttype": "path",
    "svg.hashsalt": "head-gates",  # the same picture is the same file
}


def quality(folder: str, stage: str, lowest: float) -> Figure:
    """Quality on the test split against the heads kept: a line per method, beside the dense model.

    Args:
        folder: with ``summary.csv``, in ``notebooks/results``.
        stage: ``post hoc`` or ``retrained``.
        lowest: lower end of the axis, in points; what lies below it is written at the edge.
    """
    rows = pd.read_csv(RESULTS / folder / "summary.csv").query("stage == @stage")
    in_percent = rows["mean"].max() <= 1
    rows = rows.assign(mean=rows["mean"] * (100 if in_percent else 1))
    dense = rows.query("method == 'dense'")
    kept = rows.query("method != 'dense'")
    budgets = sorted(kept["budget"].unique(), reverse=True)
    figure = Figure(figsize=(4.2, 3.9), layout="constrained")
    axes = figure.subplots()
    axes.axhline(dense["mean"].item(), color=LIGHT["ink"], linestyle=(0, (1, 1.5)), label=f"all {dense['budget'].item()} heads")
    for method, (name, colour, marker, dashes) in LINES.items():
        line = kept[kept["method"] == method].sort_values("budget", ascending=False)
        places = [budgets.index(budget) for budget in line["budget"]]
        axes.plot(places, line["mean"], color=LIGHT[colour], marker=marker, linestyle=dashes, markersize=5, label=name)
        below = line[line["mean"] < lowest]
        for budget, value in zip(below["budget"], below["mean"], strict=True):
            place = (budgets.index(budget), lowest)
            axes.annotate(f"{value:.1f} ↓", place, xytext=(0, 3), textcoords="offset points", ha="center", color=LIGHT[colour])
    top = max(rows["mean"].max(), dense["mean"].item())
    axes.set(xlim=(-0.3, len(budgets) - 0.7), ylim=(lowest, top + 0.04 * (top - lowest)))
    whole = dense["budget"].item() - (96 if "encoder" in folder else 0)
    axes.set_xticks(range(len(budgets)), [str(budget - dense["budget"].item() + whole) for budget in budgets])
    of_what = "encoder heads kept" if "encoder" in folder else "heads kept"
    measure = "test accuracy, percent" if in_percent else "test BLEU"
    axes.set(xlabel=f"{of_what}, of {whole}", ylabel=measure, title=TITLES[stage])
    axes.grid(visible=True, axis="y")
    handles, labels = axes.get_legend_handles_labels()
    shown = [(handle, label) for handle, label in zip(handles, labels, strict=True) if len(handle.get_xdata()) > 0]
    figure.legend(*zip(*shown, strict=True), loc="outside lower center", ncols=2 if len(shown) < 7 else 1)
    return figure


def prices() -> Figure:
    """Open heads of a translator by kind of attention, against the price of an open head."""
    rows = pd.read_csv(RESULTS / "multi30k_prices" / "prices.csv")
    figure = Figure(figsize=(4.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for kind, (name, colour, marker) in KINDS.items():
        counts = rows.filter(regex=rf"^{kind}\.\d+$").sum(axis="columns")
        axes.plot(range(len(rows)), counts, color=LIGHT[colour], marker=marker, markersize=5, label=name)
    axes.set_xticks(range(len(rows)), [f"{price:g}" for price in rows["price"]])
    axes.set(xlabel="price of an open head", ylabel="open heads, of 48", ylim=(0, 50))
    axes.grid(visible=True, axis="y")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def svg(figure: Figure) -> str:
    """A figure as an SVG whose colours follow the reader's screen."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r"([1-9]\.\d\d)\d+", r"\1", text)  # places to a hundredth of a point; scales, below 1, stay exact
    for name, light in LIGHT.items():
        text = text.replace(light, f"var(--{name})")
    scheme = [";".join(f"--{name}:{pair[dark]}" for name, pair in COLOURS.items()) for dark in (0, 1)]
    style = f"<style>svg{{{scheme[0]}}}@media (prefers-color-scheme:dark){{svg{{{scheme[1]}}}}}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda tag: tag[1] + style, text, count=1) + "\n"


def main(folder: Path = ASSETS) -> None:
    """Write every picture into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        drawn = {name: quality(*what) for name, what in PICTURES.items()} | {"prices": prices()}
        for name, figure in drawn.items():
            (folder / f"{name}.svg").write_text(svg(figure), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
