"""``python docs/pictures.py``: the pictures of the documentation and those beside the results, from ``notebooks/results``.

Those of pages are SVGs with colours for light and for dark screens, and one GIF. Those of results are the main pictures of
their report.
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
from matplotlib.figure import Figure

from gates.roles.roles import RULES
from training.analysis.depth import depths_of, mean_depths
from training.analysis.role_story_plots import role_depths
from training.plotting import COLOURS, INK, MARKERS, legend_beside, method_styles, styled
from training.report.contents import Contents, Course
from training.report.figures import masks_by_method
from training.report.film import film_strip, gate_animation
from training.report.pictures import main_pictures, pictures_of
from training.report.quality import DENSE, STAGE_TITLES, draw_quality, quality_against_heads, what_is_drawn
from training.report.reading import read_contents
from training.report.role_plots import role_map
from training.report.role_table import read_roles
from training.report.truth import recoveries, ticks

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "notebooks" / "results"
ASSETS = ROOT / "docs" / "assets"

ON_DARK = (
    "#4aa8e0", "#f08c3c", "#3fc79a", "#df9cc4", "#f0b83c", "#8fd0f5", "#c2c25a", "#a79bf5", "#c99a6b", "#dd6bd0", "#a5abb4",
)  # fmt: skip
"""The colours of lines on dark screens, in the order of :data:`training.plotting.COLOURS`."""
SCREENS = {"paper": ("#ffffff", "#1b1e24"), "ink": (INK, "#e4e6ea")} | {
    f"line{index}": pair for index, pair in enumerate(zip(COLOURS, ON_DARK, strict=True))
}
"""Name to the colours on light and on dark screens; matplotlib draws with the first, the file refers to the name."""
QUALITY: dict[str, tuple[str, str, float | None]] = {
    "translation": ("multi30k_all_budgets", "retrained", 24),
    "translation_post_hoc": ("multi30k_all_budgets", "post hoc", None),
    "encoder": ("multi30k_encoder_budgets", "retrained", 32),
}
"""File to the folder of results, the stage, and the lower end of the axis, where one method lies far below the others."""
TASKS = {
    "agreement of the verb": "agreement_seeds",
    "entailment (SICK)": "sick_seeds",
    "sentiment (SST-2)": "sst2_seeds",
    "kinds of questions (TREC)": "trec_seeds",
}
"""What the picture of four tasks calls the folders of their results."""
HEADS = ("agreement_nine", "learned", 9)
"""The folder, method and budget whose gates and masks the pages show."""
TRUTH = "known_truth"
"""The folder of the benchmark whose necessary heads are known; without it there is no picture of it."""
LEFT_OUT = ("flap", "rank-sum-broad", "entropy-low-first", "entropy-high-first", "his-steps", "fisher")
"""Methods that its picture leaves to the table."""
KINDS = {"encoder": "encoder", "decoder": "decoder, on itself", "cross": "decoder, on the encoder"}
SVG: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "figure.facecolor": SCREENS["paper"][0],
    "axes.facecolor": "none",
    "svg.fonttype": "path",
    "svg.hashsalt": "head-gates",  # the same picture is the same file
}


@styled
def prices() -> Figure:
    """Open heads of a translator by kind of attention, against the price of an open head."""
    rows = pd.read_csv(RESULTS / "multi30k_prices" / "prices.csv")
    figure = Figure(figsize=(6.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for index, (kind, name) in enumerate(KINDS.items()):
        counts = rows.filter(regex=rf"^{kind}\.\d+$").sum(axis="columns").groupby(rows["price"]).mean()
        axes.plot(range(len(counts)), counts, color=COLOURS[index], marker=MARKERS[index], markersize=5, label=name)
    axes.set_xticks(range(len(counts)), [f"{price:g}" for price in counts.index])
    axes.set(xlabel="price of an open head", ylabel="open heads, of 48", ylim=(0, 50))
    axes.grid(visible=True, axis="y")
    legend_beside(figure, axes)
    return figure


@styled
def four_tasks() -> Figure:
    """The mask alone on four tasks: accuracy as heads are taken away."""
    figure = Figure(figsize=(8.6, 5.4), layout="constrained")
    contents = {task: read_contents(RESULTS / folder) for task, folder in TASKS.items()}
    styles = method_styles(list(dict.fromkeys(method for one in contents.values() for method in one.methods)))
    panels = figure.subplots(2, 2).flat
    for axes, (task, one) in zip(panels, contents.items(), strict=True):
        draw_quality(axes, one, "post hoc", styles)
        axes.set_title(task, fontsize=9)
    legend_beside(figure, panels[0], [*styles, DENSE])
    figure.suptitle(f"{STAGE_TITLES['post hoc']}; {what_is_drawn(one, 'post hoc')}", fontsize=9)
    return figure


def of_pages() -> Iterator[tuple[str, Figure]]:
    """The pictures of pages by name, as far as their results are there."""
    for name, (folder, stage, lowest) in QUALITY.items():
        yield name, quality_against_heads(read_contents(RESULTS / folder), stage, lowest=lowest)
    yield "tasks", four_tasks()
    yield "prices", prices()
    contents, course, title = of_gates()
    budget = HEADS[-1]
    yield "film", film_strip(course, title)
    kept = {name: values for name, at in contents.masks if at == budget and (values := contents.kept(name, at))}
    yield "masks", masks_by_method(kept, seeds=contents.comparison["seed"].nunique())
    yield "overlap", next(one.figure for one in pictures_of(contents) if one.name == f"agreement_{budget}")
    roles = read_roles(RESULTS / "roles" / "roles.csv")
    yield "roles", role_map(roles, [rule.name for rule in RULES if roles[f"{rule.name}_strength"].notna().any()])
    depths = depths_of(roles)
    yield "depth", role_depths(depths, mean_depths(depths))
    if (RESULTS / TRUTH / "truth.csv").is_file():
        truth = pd.read_csv(RESULTS / TRUTH / "truth.csv")
        yield "truth", ticks(recoveries(truth[~truth["method"].isin(LEFT_OUT)]))


def of_gates() -> tuple[Contents, Course, str]:
    """The results of :data:`HEADS`, its gates over training, and what their pictures are called."""
    folder, method, budget = HEADS
    contents = read_contents(RESULTS / folder)
    return contents, contents.courses[method, budget], f"gates of {method}, {contents.label(budget)}"


def svg(figure: Figure) -> str:
    """A figure as an SVG whose colours follow the reader's screen."""
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
    _, course, title = of_gates()
    (folder / "gates.gif").write_bytes(gate_animation(course, title))


def write_results(results: Path = RESULTS) -> None:
    """Write the main pictures of each folder of results into it, in place of those that are there."""
    for folder in sorted(path.parent for path in results.glob("*/summary.csv")):
        for earlier in folder.glob("*.png"):
            earlier.unlink()
        for picture in main_pictures(read_contents(folder)):
            picture.figure.savefig(folder / f"{picture.name}.png", dpi=150, facecolor="white")


if __name__ == "__main__":
    write_pages(*map(Path, sys.argv[1:2]))
    if not sys.argv[1:]:
        write_results()
