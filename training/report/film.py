"""The gates of a learned method over its prune phase: as a film strip, and as an animation."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from training.plotting import COLOURS, INK, MAP, figure_image, styled
from training.report.contents import Course, Values
from training.report.figures import label_heads, label_layers
from training.report.picture_files import MARK

FRAMES = 24
"""Of an animation, at most."""
MOMENTS = 7
"""Of a film strip, at most."""
PANEL = 1.12
"""Inches of a picture of a film strip."""
OPEN, EXPECTED, PRICE = "open", "expected", "price"


def frames_of(course: Course, count: int = FRAMES) -> list[int]:
    """Indices of the steps that are shown, equally far apart, from the last one before the gates begin to move to the end."""
    moved = (course.values != course.values[0]).any(axis=1)
    first, last = max(0, int(moved.argmax()) - 1), len(course.steps) - 1
    return sorted({round(first + i * (last - first) / max(1, count - 1)) for i in range(count)})


def step_label(course: Course, index: int) -> str:
    """What a step is called, with its price where that is known; the mask, made of the gates, has no step of its own."""
    if course.ends_in_mask and index == len(course.steps) - 1:
        return "the mask"
    return ", ".join([f"step {course.steps[index]}", *price_labels(course, index)])


def price_labels(course: Course, index: int) -> list[str]:
    """The price of an open head at a step: ``price 0.012``, or one for each kind; none where it is not known."""
    return [f"{kind or 'price'} {prices[index]:.2g}" for kind, prices in course.prices.items() if np.isfinite(prices[index])]


def count_labels(course: Course, index: int) -> list[str]:
    """How many gates are open at a step and, where that is known, how many are expected to be."""
    found = [f"{course.open[index].sum():.3g} {OPEN}"]
    if course.expected is not None and np.isfinite(course.expected[index]):
        found.append(f"{course.expected[index]:.1f} {EXPECTED}")
    return found


@styled
def film_strip(course: Course, title: str) -> Figure:
    """Layer x head pictures of the gates at a few moments, the mask as the last, with the open and expected heads and the price
    under each."""
    moments = frames_of(course, MOMENTS)
    texts = [[*count_labels(course, at), *price_labels(course, at)] for at in moments]
    lines, rows = max(map(len, texts)), len(course.sites)
    figure = Figure(figsize=(0.9 + PANEL * len(moments), 0.95 + 0.15 * lines + 0.115 * max(5, rows)), layout="constrained")
    panels = figure.subplots(1, len(moments), squeeze=False)[0]
    for axes, at, text in zip(panels, moments, texts, strict=True):
        image = axes.imshow(
            Values(course.sites, course.values[at]).grid(), cmap=MAP, vmin=0, vmax=1, aspect="auto", interpolation="none"
        )
        label_layers(axes, course.sites)
        label_heads(axes, course.sites)
        axes.set_title(step_label(course, at).split(",")[0], fontsize=8)
        axes.set_xlabel("\n".join(text), fontsize=7.5)
        axes.set_ylabel("")
        if at != moments[0]:
            axes.tick_params(axis="y", labelleft=False)
    figure.colorbar(image, ax=list(panels), label="gate", aspect=12, pad=0.01).ax.tick_params(labelsize=7)
    figure.suptitle(f"{title} (layers down, heads across)", fontsize=9)
    return figure


def gate_animation(course: Course, title: str) -> bytes:
    """The gates over training as an animated GIF: their heat map; below it, open and expected heads and the price."""
    frames = frames_of(course)
    figure = _animated(course, title)
    above, below = figure.axes[0], figure.axes[1]
    (image,), marker = above.images, below.lines[-1]
    pictures = []
    for frame in frames:
        image.set_data(Values(course.sites, course.values[frame]).grid())
        above.set_title(f"{title}\n{_said(course, frame)}", fontsize=8.5)
        marker.set_xdata([course.steps[frame]] * 2)
        pictures.append(figure_image(figure).convert("RGB"))
    animated = io.BytesIO()
    durations = [250] * (len(pictures) - 1) + [2500]  # milliseconds; the result stays in sight
    pictures[0].save(
        animated, format="gif", save_all=True, append_images=pictures[1:], duration=durations, loop=0, comment=MARK.encode()
    )
    return animated.getvalue()


def _said(course: Course, index: int) -> str:
    return ", ".join([step_label(course, index), *count_labels(course, index)])


@styled
def _animated(course: Course, title: str) -> Figure:
    """The heat map of the last step above; below, lines of open heads, expected heads and prices, and an upright one, which is
    the last of the axes, at the step that is shown."""
    grid = Values(course.sites, course.values[-1]).grid()
    height = 0.6 + 0.2 * max(4, grid.shape[0])
    figure = Figure(figsize=(max(5.0, 1.6 + 0.26 * grid.shape[1]), height + 1.7), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(height, 1.5))
    image = above.imshow(grid, cmap=MAP, vmin=0, vmax=1, aspect="auto", interpolation="none")
    label_layers(above, course.sites)
    label_heads(above, course.sites)
    above.set_title(f"{title}\n{_said(course, 0)}", fontsize=8.5)
    figure.colorbar(image, ax=above, label="gate")
    below.plot(course.steps, course.open.sum(axis=1), color=COLOURS[0], drawstyle="steps-post", label=OPEN)
    if course.expected is not None:
        below.plot(course.steps, course.expected, color=COLOURS[0], linestyle="--", label=EXPECTED)
    below.set(xlabel="optimiser step", ylabel="heads")
    below.set_ylim(0, 1.05 * float(course.open.sum(axis=1).max()))
    below.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    handles = list(below.lines)
    if course.prices:
        right = below.twinx()
        right.spines["right"].set_visible(True)
        for index, (kind, prices) in enumerate(course.prices.items()):
            handles += right.plot(
                course.steps, prices, color=COLOURS[1 + index], linestyle="-.", label=f"{PRICE} {kind}".strip()
            )
        right.set_ylabel(PRICE)
        right.set_ylim(bottom=0)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    below.axvline(course.steps[-1], color=INK, linewidth=1)
    return figure
