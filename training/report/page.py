"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from PIL import Image

from gates.files import replacing
from training.plotting import MAP, styled
from training.report import captions, tables
from training.report import tables as translations
from training.report.contents import Course, ReportData, Values
from training.report.figures import data_uri, inline_svg, label_heads, label_layers, picture_files, write_pictures
from training.report.pictures import focus_course, frames_of, gate_animation, pictures_of, step_label
from training.report.tables import Table
from training.stats.numbers import counted, slug, unit

# The gates over training as pictures that the reader plays, stops and steps through; without a script, the last of them.

CONTROLS = Markup(
    '<div class="controls" hidden>'
    '<button type="button" data-move="-1" title="One step back">&#9664;&#65038;</button>'
    '<button type="button" data-play>Play</button>'
    '<button type="button" data-move="1" title="One step on">&#9654;&#65038;</button>'
    '<input type="range" min="0" max="{last}" value="{last}" title="Step of training">'
    "<output>{label}</output></div>"
)


def gate_player(course: Course, title: str, *, name: str, label: str) -> Markup:
    """The heat map of gates over training with its controls, as an element of a page.

    Axes are drawn once, as part of the page, in the colours of its text; of every step there is one picture of a pixel per
    gate, which the page's script puts into them.

    Args:
        course: the gates.
        title: of the picture.
        name: unique in the page.
        label: text in place of the picture.
    """
    steps = frames_of(course)
    figure = _heat_map(course, steps[-1], title)
    (image,) = figure.axes[0].images
    pixels = [Image.fromarray(image.to_rgba(Values(course.sites, course.values[step]).grid(), bytes=True)) for step in steps]
    frames = [[step_label(course, step), data_uri(_png(one), "image/png")] for step, one in zip(steps, pixels, strict=True)]
    content = Markup(inline_svg(figure, name, str(escape(label))))
    controls = CONTROLS.format(last=len(steps) - 1, label=frames[-1][0])
    return Markup('<div class="player" data-frames="{}">{}{}</div>').format(json.dumps(frames), content, controls)


@styled
def _heat_map(course: Course, step: int, title: str) -> Figure:
    grid = Values(course.sites, course.values[step]).grid()
    figure = Figure(figsize=(1.6 + 0.26 * max(8, grid.shape[1]), 1.1 + 0.26 * max(4, grid.shape[0])), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, cmap=MAP, vmin=0, vmax=1, aspect="auto", interpolation="none")
    axes.set_title(title)
    label_layers(axes, course.sites)
    label_heads(axes, course.sites)
    figure.colorbar(image, ax=axes, label="gate")
    return figure


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="png")
    return buffer.getvalue()


FIGURES = "figures"
"""Folder beside the page for its pictures."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
"""Content Security Policy: no network, no script but the page's own; a name in the data that looks like code stays text."""


@dataclass(frozen=True)
class Drawn:
    """A picture as the page holds it: its markup, with what :class:`training.report.pictures.Picture` says of it."""

    name: str
    content: Markup
    caption: str
    shown: bool = True
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A directory's part of the page.

    Args:
        id: unique in the page.
        contents: what the directory holds.
        opening: the result in one sentence.
        lead: the picture that the page opens with, of known truth or of quality, its caption being that sentence; None without
            results.
        warning: of a comparison that says nothing; else empty.
        verdict: the result at length.
        pictures: by section.
        tables: by name.
        facts: versions, machine and code, as names and values.
        command: that repeats it; empty if unknown.
    """

    id: str
    contents: ReportData
    opening: str
    lead: Drawn | None
    warning: str
    verdict: Markup
    pictures: dict[str, list[Drawn]]
    tables: dict[str, Table]
    facts: dict[str, str]
    command: str

    @property
    def subtitle(self) -> str:
        contents = self.contents
        parts = ["A comparison" if contents.kind == "comparison" else "A single run"]
        if contents.methods:
            parts.append(counted(len(contents.methods), "method"))
        if contents.budgets:
            of = f" of {contents.size}" if contents.size else ""
            parts.append(", ".join(f"{at}{contents.of_kinds(at)}" for at in contents.budgets) + f"{of} {contents.unit}s")
        if "seed" in contents.comparison:
            parts.append(counted(contents.comparison["seed"].nunique(), "seed"))
        return ", ".join(parts)


def write_report(found: Sequence[ReportData], out: Path) -> None:
    """Write the page and, in ``figures/`` beside it, its pictures as PNG, SVG and GIF (in a folder each, if several)."""
    out.parent.mkdir(parents=True, exist_ok=True)
    ids = unique_ids(found)
    sections, pictures = [], dict[Path, bytes]()
    for identifier, contents in zip(ids, found, strict=True):
        folder = out.parent / FIGURES / (identifier if len(found) > 1 else "")
        section, files = make_section(contents, identifier)
        sections.append(section)
        pictures |= {folder / name: content for name, content in files.items()}
    write_pictures(pictures)
    with replacing(out) as partial:
        partial.write_text(render(sections), encoding="utf-8")


def unique_ids(found: Sequence[ReportData]) -> list[str]:
    """A name for each part of the page, different for directories of the same name."""
    ids: list[str] = []
    for contents in found:
        name, number = slug(contents.name), 2
        while name in ids:
            name, number = f"{slug(contents.name)}_{number}", number + 1
        ids.append(name)
    return ids


def make_section(contents: ReportData, identifier: str) -> tuple[Section, dict[str, bytes]]:
    """A directory's part of the page, and the files of its pictures by name."""
    pictures: dict[str, list[Drawn]] = {}
    files: dict[str, bytes] = {}
    for picture in pictures_of(contents):
        files |= picture_files(picture.figure, picture.name)
        # Letters and digits of ids, and an escaped label, are all that is put into the picture's own markup.
        svg = inline_svg(picture.figure, f"{identifier}-{picture.name}", str(escape(picture.alt)))
        drawn = Drawn(picture.name, Markup(svg), picture.caption, picture.shown, picture.wide)
        pictures.setdefault(picture.section, []).append(drawn)
    opening, lead, said = captions.opening(contents), None, _verdict(contents)
    if found := pictures.pop("truth", []):
        lead, opening = found[0], found[0].caption
    elif found := pictures.get("quality", []):
        first = next((one for one in found if one.name.endswith(slug(contents.stages_by_weight[0]))), found[0])
        found.remove(first)
        lead = replace(first, caption=opening)
        said = Markup("<p>{}</p>{}").format(first.caption, said)
        pictures = {name: held for name, held in pictures.items() if held}
    animated = _animation(contents, identifier, files)
    if animated is not None:
        pictures.setdefault("training", []).insert(0, animated)
    section = Section(
        id=identifier,
        contents=contents,
        opening=opening,
        lead=lead,
        warning=captions.warning(contents),
        verdict=said,
        pictures=pictures,
        tables=_tables(contents),
        facts=_facts(contents),
        command=_command(contents),
    )
    return section, files


def render(sections: Sequence[Section]) -> str:
    """The page's HTML; whatever comes from files is escaped."""
    environment = Environment(
        loader=PackageLoader("training.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    assets = Path(__file__).parent / "template"
    style, script = (
        "\n".join((assets / f"{name}.{form}").read_text(encoding="utf-8") for name in ("page", "attention"))
        for form in ("css", "js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        sections=sections, style=Markup(style), script=Markup(script), policy=POLICY.format(digest=digest)
    )


def _animation(contents: ReportData, identifier: str, files: dict[str, bytes]) -> Drawn | None:
    """The player of the gates' course; the same as an animated picture is put to the files."""
    focus = focus_course(contents)
    if focus is None or len(focus[2].steps) < 2:
        return None
    method, budget, course = focus
    title, name = f"gates of {method}, {contents.label(budget)}", f"gates_{slug(method)}_{budget}"
    files[f"{name}.gif"] = gate_animation(course, title)
    alt = f"Heat map of the gates of {method}, layers by heads, from step {course.steps[0]} to {course.steps[-1]} of training."
    content = gate_player(course, title, name=f"{identifier}-{name}", label=alt)
    return Drawn(name, content, captions.gates(contents, course, method, budget))


def _verdict(contents: ReportData) -> Markup:
    """``verdict.md`` without raw HTML and pictures; else what the numbers say."""
    if contents.verdict:
        markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
        tokens = markdown.parse(contents.verdict)
        for token in tokens:
            if token.type in ("heading_open", "heading_close"):
                token.tag = f"h{min(6, int(token.tag[1:]) + 2)}"  # below the page's own headings
        return Markup(markdown.renderer.render(tokens, markdown.options, {}))
    said = captions.headline(contents) or ["There are no results yet."]
    return Markup("").join(Markup("<p>{}</p>").format(text) for text in said)


def _tables(contents: ReportData) -> dict[str, Table]:
    found = []
    if len(contents.budgets) > 1:
        for stage in contents.stages_by_weight:
            words = f"{captions.STAGE_WORDS.get(stage, stage)}: test {contents.metric}{unit(contents.metric)}"
            below = ", below it the 95 % interval of the mean" if captions.has_intervals(contents.summary) else ""
            found.append(tables.budget_table(contents, stage, f"{words}{below}, by {contents.unit}s kept."))
    if len(contents.summary) and contents.kind == "comparison":
        found.append(tables.results_table(contents, captions.results(contents)))
    if len(contents.comparison):
        found.append(tables.experiments_table(contents, shown=contents.kind == "run"))
        found.append(tables.cost_table(contents, captions.cost(contents)))
    if contents.statistics is not None and len(contents.statistics):
        found.append(tables.statistics_table(contents))
    if contents.agreement is not None and len(contents.agreement):
        found.append(tables.agreement_table(contents))
    found += translations.tables_of(contents)
    return {table.name: table for table in found}


def _facts(contents: ReportData) -> dict[str, str]:
    """Machine, versions and code."""
    facts = {}
    for part in ("machine", "versions", "code"):
        held = contents.metrics.get(part)
        for name, value in held.items() if isinstance(held, dict) else ():
            facts[("code " if part == "code" else "") + str(name).replace("_", " ")] = str(value)
    return facts


def _command(contents: ReportData) -> str:
    stated = contents.metrics.get("command")
    if stated or contents.kind == "comparison" or contents.config is None:
        return str(stated or "")
    return "python -m training.fit --config config.yaml --run_dir NEW_DIRECTORY"
