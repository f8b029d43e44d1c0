"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from gates.files import replacing
from training.report import captions, tables
from training.report import tables as translations
from training.report.contents import ReportData
from training.report.figures import inline_svg, picture_files, write_pictures
from training.report.pictures import pictures_of
from training.report.tables import Table
from training.stats.numbers import counted, slug, unit

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
    """Write the page and, in ``figures/`` beside it, its pictures as PNG and SVG (in a folder each, if several)."""
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
