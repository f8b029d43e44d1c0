"""Figures as files and as parts of a page."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from training.plotting import INK
from training.report.picture_files import MARK

SVG: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "head-gates", "font.family": ["DejaVu Sans"]}
"""Text stays text (small, searchable, in the reader's font), and the same figure is the same file."""
NO_METADATA: dict[str, str | None] = {"Date": None, "Creator": None, "Format": None, "Type": None}


def picture_files(figure: Figure, name: str) -> dict[str, bytes]:
    """The content of ``NAME.png`` and ``NAME.svg``, on white, with the mark of a report's pictures."""
    drawn, marks = {}, {"png": {"Software": MARK}, "svg": NO_METADATA | {"Creator": MARK}}
    for form, metadata in marks.items():
        buffer = io.BytesIO()
        with matplotlib.rc_context(SVG):
            figure.savefig(buffer, format=form, dpi=150, facecolor="white", metadata=metadata)
        drawn[f"{name}.{form}"] = buffer.getvalue()
    return drawn


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """A figure as an element of a page: transparent, its ink in the page's text colour, its ids under the given name.

    Args:
        figure: drawn in the project's style, whose ink it looks for.
        name: unique in the page.
        label: text in place of the picture; goes into an attribute and must come escaped.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(SVG):
        figure.savefig(buffer, format="svg", transparent=True, metadata=NO_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, count=1, flags=re.DOTALL)  # it would hold for the whole page
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg, referred = re.sub(r">\s+<", "><", svg), set(re.findall(r'#([^")]+)', svg))
    # Nothing refers to names of groups and of images, and equal images would have equal ones.
    svg = re.sub(r' id="([^"]+)"', lambda name: name[0] if name[1] in referred else "", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r'="[^"]*"', lambda value: re.sub(r"(\.\d\d)\d+", r"\1", value[0]), svg)  # 1/100 point is enough
    width = re.search(r'viewBox="0 0 ([\d.]+) ', svg)
    size = f' style="max-width: {float(width[1]) * 1.5:.0f}px"' if width else ""
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", svg))
    return svg.replace("<svg", f'<svg class="chart" role="img" aria-label="{label}"{size}', 1)


def data_uri(content: bytes, kind: str) -> str:
    """Content inside a page, such as a picture of kind ``image/gif``."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
