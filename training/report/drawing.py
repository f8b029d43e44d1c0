"""Figures as files and as parts of a page; the gates over training as an animation."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from gates.files import replacing
from training.plotting import INK, MAP, STYLE, figure_image
from training.report.contents import Course, Values
from training.report.figures import label_heads, label_layers

FRAMES = 24
"""Of an animation, at most."""
SVG: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "head-gates", "font.family": ["DejaVu Sans"]}
"""Text stays text (small, searchable, in the reader's font), and the same figure is the same file."""
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def save_figure(figure: Figure, folder: Path, name: str) -> None:
    """``NAME.png`` and ``NAME.svg``, on white."""
    for form in ("png", "svg"):
        with replacing(folder / f"{name}.{form}") as partial, matplotlib.rc_context(SVG):
            metadata = NO_METADATA if form == "svg" else None
            figure.savefig(partial, format=form, dpi=150, facecolor="white", metadata=metadata)


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


def frames_of(course: Course) -> list[int]:
    """Indices of the steps that an animation shows, from the last one before the gates begin to move."""
    moved = (course.values != course.values[0]).any(axis=1)
    first, last = max(0, int(moved.argmax()) - 1), len(course.steps) - 1
    return sorted({round(first + i * (last - first) / max(1, FRAMES - 1)) for i in range(FRAMES)})


def gate_animation(course: Course, title: str) -> bytes:
    """The heat map of gates over training as an animated GIF."""
    frames = frames_of(course)
    grid = Values(course.sites, course.values[0]).grid()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.6 + 0.26 * max(8, grid.shape[1]), 1.3 + 0.26 * max(4, grid.shape[0])), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(grid, cmap=MAP, vmin=0, vmax=1, aspect="auto", interpolation="none")
        label_layers(axes, course.sites)
        label_heads(axes, course.sites)
        figure.colorbar(image, ax=axes, label="gate")
        pictures = []
        for frame in frames:
            image.set_data(Values(course.sites, course.values[frame]).grid())
            axes.set_title(f"{title}\nstep {course.steps[frame]}")
            pictures.append(figure_image(figure).convert("RGB"))
            figure.set_layout_engine("none")  # nothing moves from frame to frame
    animated = io.BytesIO()
    durations = [250] * (len(pictures) - 1) + [2000]  # milliseconds; the result stays in sight
    pictures[0].save(animated, format="gif", save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return animated.getvalue()


def data_uri(content: bytes, kind: str) -> str:
    """Content inside a page, such as a picture of kind ``image/gif``."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
