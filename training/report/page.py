"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from gates.files import replacing
from training.report import captions
from training.report.contents import ReportData
from training.report.figures import inline_svg, picture_files, write_pictures
from training.report.pictures import Picture, pictures_of
from training.report.tables import Table, tables_of
from training.stats.numbers import counted, slug

FIGURES = "figures"
"""The folder of a page's pictures, in the folder of the page."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
"""Content Security Policy: no network, no script but the page's own; a name in the data that looks like code stays text."""


@dataclass(frozen=True)
class Section:
    """A directory's part of the page.

    Args:
        outcome: Further sentences on the model of a run, in the words of the terminal.
        lead: The picture that the page opens with, with that sentence as its caption; None without results.
        warning: A warning of a comparison that says nothing; else empty.
        facts: Versions, machine and code, as names and values.
        command: The command that repeats it; empty if unknown.
    """

    id: str
    contents: ReportData
    opening: str
    outcome: list[str]
    lead: Picture | None
    warning: str
    verdict: Markup
    pictures: dict[str, list[Picture]]
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
    """Write the page, and its pictures as PNG and SVG into ``figures/``, with a folder for each of several directories."""
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
    """Return a name for each part of the page, different for directories of the same name."""
    ids: list[str] = []
    for contents in found:
        name, number = slug(contents.name), 2
        while name in ids:
            name, number = f"{slug(contents.name)}_{number}", number + 1
        ids.append(name)
    return ids


def make_section(contents: ReportData, identifier: str) -> tuple[Section, dict[str, bytes]]:
    """Return a directory's part of the page, and the files of its pictures by name."""
    pictures: dict[str, list[Picture]] = {}
    files: dict[str, bytes] = {}
    for picture in pictures_of(contents):
        files |= (drawn := picture_files(picture.figure, picture.name))
        svg = inline_svg(drawn[f"{picture.name}.svg"].decode(), f"{identifier}-{picture.name}")
        pictures.setdefault(picture.section, []).append(replace(picture, svg=Markup(svg)))
    lead, opening = None, captions.opening(contents)
    if found := pictures.pop("truth", []):
        lead, opening = found[0], found[0].caption
    elif found := pictures.get("quality", []):
        first = next((one for one in found if one.name.endswith(slug(contents.stages_by_weight[0]))), found[0])
        found.remove(first)
        lead = replace(first, caption=opening)
        pictures = {name: held for name, held in pictures.items() if held}
    section = Section(
        id=identifier,
        contents=contents,
        opening=opening,
        outcome=captions.outcome_of_run(contents),
        lead=lead,
        warning=captions.warning(contents),
        verdict=_verdict(contents),
        pictures=pictures,
        tables=tables_of(contents),
        facts=_facts(contents),
        command=_command(contents),
    )
    return section, files


def render(sections: Sequence[Section]) -> str:
    """Return the page's HTML; whatever comes from files is escaped."""
    return render_page("page.html", ("page", "attention"), ("page", "attention"), sections=sections)


def render_page(template: str, styles: Sequence[str], scripts: Sequence[str], **values: Any) -> str:
    """Return a page that loads nothing, and runs no script but its own."""
    environment = Environment(
        loader=PackageLoader("training.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    assets = Path(__file__).parent / "template"
    style, script = (
        "\n".join((assets / f"{name}.{form}").read_text(encoding="utf-8") for name in names)
        for form, names in (("css", styles), ("js", scripts))
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = POLICY.format(digest=digest)
    return environment.get_template(template).render(**values, style=Markup(style), script=Markup(script), policy=policy)


def _verdict(contents: ReportData) -> Markup:
    """Return ``verdict.md`` without raw HTML and pictures, or the best methods."""
    if contents.verdict:
        markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
        tokens = markdown.parse(contents.verdict)
        for token in tokens:
            if token.type in ("heading_open", "heading_close"):
                token.tag = f"h{min(6, int(token.tag[1:]) + 2)}"  # below the page's own headings
        return Markup(markdown.renderer.render(tokens, markdown.options, {}))
    sentences = [captions.best_method(contents, stage) for stage in contents.stages_by_weight] or ["There are no results yet."]
    return Markup("").join(Markup("<p>{}</p>").format(text) for text in sentences)


def _facts(contents: ReportData) -> dict[str, str]:
    """Return machine, versions and code."""
    prefixes = {"machine": "", "versions": "", "code": "code "}
    return {
        prefix + str(name).replace("_", " "): str(value)
        for part, prefix in prefixes.items()
        for name, value in contents.metrics.get(part, {}).items()
    }


def _command(contents: ReportData) -> str:
    stated = contents.metrics.get("command")
    if stated or contents.kind == "comparison" or contents.config is None:
        return str(stated or "")
    return "head-gates fit --config config.yaml --run_dir NEW_DIRECTORY"
