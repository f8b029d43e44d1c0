"""``python docs/pictures.py``: draw the pictures of the documentation from ``notebooks/results``.

They are SVGs with colours for light and for dark screens.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from gates.roles.roles import RULES
from training.plotting import COLOURS, INK, method_styles, styled
from training.report.contents import GateHistory, ReportData
from training.report.figures import DENSE, draw_quality, masks_by_method, recoveries, ticks, what_is_drawn
from training.report.pictures import COLOUR_OF, film_strip, pictures_of, role_map
from training.report.reading import read_contents, read_roles

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "notebooks" / "results"
ASSETS = ROOT / "docs" / "assets"

ON_DARK = (
    "#4aa8e0", "#f08c3c", "#3fc79a", "#df9cc4", "#f0b83c", "#8fd0f5", "#c2c25a", "#a79bf5", "#c99a6b", "#dd6bd0", "#a5abb4",
)  # fmt: skip
"""The colours of lines on dark screens, in the order of :data:`training.plotting.COLOURS`."""
GREYS = {"separator": "#686d75", "first-token": "#4c515a", "broad": "#363b43"}
"""The greys of background roles on dark screens, where pale greys would be the most striking cells."""
SCREENS = (
    {"paper": ("#ffffff", "#1b1e24"), "ink": (INK, "#e4e6ea")}
    | {f"line{index}": pair for index, pair in enumerate(zip(COLOURS, ON_DARK, strict=True))}
    | {f"grey{index}": (COLOUR_OF[role], dark) for index, (role, dark) in enumerate(GREYS.items())}
)
"""Name to the colours on light and on dark screens; matplotlib draws with the first, the file refers to the name."""
TASKS = {
    "number of the verb (agreement)": "agreement_seeds",
    "entailment (SICK)": "sick_seeds",
    "sentiment (SST-2)": "sst2_seeds",
    "kind of a question (TREC)": "trec_seeds",
}
"""The titles of the four tasks, and the folders of their results."""
FRONT = {"learned": "learned gates", "his": "Head Importance Score", "random": "random heads"}
"""The methods of the picture on the front page, and their titles."""
DRAWN = ("learned", "learned+refit", "obs+refit", "his", "his+refit", "random", "random+refit")
"""The methods of the picture of each task."""
HEADS = ("agreement_from_dense", "learned", 9)
"""The folder, method and budget whose gates and masks the pages show."""
TRUTH = "known_truth"
"""The folder of the benchmark whose necessary heads are known; without it there is no picture of it."""
LEFT_OUT = ("flap", "hies(combine=ranks, keep=high)", "entropy(keep=high)", "entropy", "his(steps=10)", "fisher")
"""Methods that its picture leaves to the table."""
SVG: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "figure.facecolor": SCREENS["paper"][0],
    "axes.facecolor": "none",
    "svg.fonttype": "path",
    "svg.hashsalt": "head-gates",  # the same picture is the same file
}


@styled
def front() -> Figure:
    """Draw the mean accuracy over the four tasks against the heads that are kept, for the mask alone and with a refit."""
    rows = pd.concat([pd.read_csv(RESULTS / folder / "comparison.csv").assign(task=folder) for folder in TASKS.values()])
    cells = 100 * rows.query("stage == 'post hoc'").groupby(["method", "heads", "task"])["test_accuracy"].mean().unstack()
    mean = cells.dropna().mean(axis=1)  # where all tasks have a result
    figure = Figure(figsize=(5.4, 4.4), layout="constrained")  # narrow, so that a phone can show it
    axes = figure.subplots()
    [(heads, dense)] = mean["dense"].items()
    axes.axhline(dense, color=INK, linewidth=1, linestyle=":", label=f"all {heads} heads")
    for colour, (method, title) in zip(COLOURS, FRONT.items(), strict=False):
        for name, how, style in ((method, "mask alone", "o-"), (f"{method}+refit", "refitted", "s--")):
            line = pd.concat([mean[name], pd.Series({heads: dense})]).sort_index()
            axes.plot(line.index, line, style, color=colour, markersize=4, label=f"{title}, {how}")
    axes.set_xscale("log", base=2)
    kept = sorted({*mean["learned"].index, heads})
    axes.set_xticks(kept, [str(number) for number in kept])
    axes.minorticks_off()
    axes.set_xlabel(f"attention heads that stay, of {heads}")
    axes.set_ylabel("mean test accuracy, %")
    figure.legend(fontsize=8.5, frameon=False, loc="outside lower center", ncols=2)
    return figure


@styled
def four_tasks() -> Figure:
    """Draw the accuracy on four tasks as heads are removed, with the mask alone and with a refit."""
    figure = Figure(figsize=(5.8, 6.2), layout="constrained")
    contents = {task: read_contents(RESULTS / folder) for task, folder in TASKS.items()}
    for one in contents.values():
        one.summary = one.summary[one.summary["method"].isin([DENSE, *DRAWN])]
    styles = method_styles(DRAWN)
    panels = list(figure.subplots(2, 2).flat)
    for axes, (task, one) in zip(panels, contents.items(), strict=True):
        draw_quality(axes, one, "post hoc", styles)
        axes.set_title(task, fontsize=9)
    lines = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    names = sorted(lines, key=[*styles, DENSE, *lines].index)
    figure.legend([lines[name] for name in names], names, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    figure.suptitle(f"without training; {what_is_drawn(one, 'post hoc')}", fontsize=9)
    return figure


def of_pages() -> Iterator[tuple[str, Figure]]:
    """Yield the pictures of pages by name."""
    yield "front", front()
    yield "tasks", four_tasks()
    contents, history, title = of_gates()
    budget = HEADS[-1]
    yield "film", film_strip(history, title)
    yield "masks", masks_by_method(contents.kept_at(budget), seeds=contents.comparison["seed"].nunique())
    yield "overlap", next(one.figure for one in pictures_of(contents) if one.name == f"agreement_{budget}")
    roles = read_roles(RESULTS / "roles" / "roles.csv")
    yield "roles", role_map(roles, [rule.name for rule in RULES if roles[f"{rule.name}_strength"].notna().any()])
    if (RESULTS / TRUTH / "truth.csv").is_file():
        truth = pd.read_csv(RESULTS / TRUTH / "truth.csv")
        yield "truth", ticks(recoveries(truth[~truth["method"].isin(LEFT_OUT)]))


def of_gates() -> tuple[ReportData, GateHistory, str]:
    """Return the results of :data:`HEADS`, the gates over training, and the title of their pictures."""
    folder, method, budget = HEADS
    contents = read_contents(RESULTS / folder)
    return contents, contents.histories[method, budget], f"gates of {method}, {contents.label(budget)}"


def svg(figure: Figure) -> str:
    """Return a figure as an SVG whose colours follow the reader's screen."""
    for part in figure.findobj(lambda one: isinstance(one, Text | Line2D)):
        if same_color(part.get_color(), "white"):  # drawn on a dark cell, which is dark on every screen
            part.set_color("#fefefe")
    buffer = io.StringIO()
    with matplotlib.rc_context(SVG):
        figure.set_facecolor(SVG["figure.facecolor"])
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r"([1-9]\.\d\d)\d+", r"\1", text)  # places to a hundredth of a point; scales, below 1, stay exact
    for name, (light, _) in SCREENS.items():
        text = text.replace(light.lower(), f"var(--{name})")
    scheme = [";".join(f"--{name}:{pair[dark]}" for name, pair in SCREENS.items()) for dark in (0, 1)]
    style = f"<style>svg{{{scheme[0]}}}@media (prefers-color-scheme:dark){{svg{{{scheme[1]}}}}}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda tag: tag[1] + style, text, count=1) + "\n"


def write_pages(folder: Path = ASSETS) -> None:
    """Write the pictures of the pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in of_pages():
        (folder / f"{name}.svg").write_text(svg(figure), encoding="utf-8")


if __name__ == "__main__":
    write_pages(*map(Path, sys.argv[1:2]))
