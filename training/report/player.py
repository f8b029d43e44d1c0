"""The gates over training as pictures that the reader plays, stops and steps through; without a script, the last of them."""

from __future__ import annotations

import io
import json

from markupsafe import Markup, escape
from matplotlib.figure import Figure
from PIL import Image

from training.plotting import MAP, styled
from training.report.contents import Course, Values
from training.report.drawing import data_uri, inline_svg
from training.report.figures import label_heads, label_layers
from training.report.film import frames_of, step_label

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
