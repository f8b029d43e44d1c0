"""Pictures of quality: what their lines, bands, names and colours are."""

from pathlib import Path

import pandas as pd
import pytest

from training.plotting import COLOURS, method_styles, quality_by_budget
from training.report.contents import ReportData
from training.report.figures import quality_against_heads

NAMES = ("learned", "learned+swap", "his", "hies", "dsp", "entropy-low-first", "random")
LONG = ("my_package.my_module:my_score+swap", "mask:masks/from_a_paper.json", "learned", "his", "random")


def contents_of(methods, seeds=3, budgets=(36, 18, 9)):
    """Accuracies of a formula: the first method is the best, and seed 0 a point below seed 1, a point below seed 2."""
    rows = [
        {"seed": seed, "stage": "retrained", "method": method, "budget": budget, "test_accuracy": 0.9 - lost + seed / 100}
        for seed in range(seeds)
        for method, budget, lost in [
            ("dense", 72, 0.0), *((name, at, 0.02 + at / 3600 + i / 50) for i, name in enumerate(methods) for at in budgets)
        ]
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    means = table.groupby(["stage", "method", "budget"], sort=False, as_index=False)["test_accuracy"].mean()
    summary = means.rename(columns={"test_accuracy": "mean"}).assign(seeds=seeds)
    return ReportData(Path("a"), "comparison", comparison=table, summary=summary)


def test_no_two_methods_share_a_colour_or_a_marker():
    others = [f"method {index}" for index in range(len(COLOURS) - 3)]
    for methods in (NAMES, ("random", "learned"), ("learned", "his", "random", *others)):
        styles = method_styles(methods)
        assert list(styles) == list(methods)
        assert len({style["color"] for style in styles.values()}) == len(methods)
        assert len({style["marker"] for style in styles.values()}) >= min(10, len(methods))
    assert method_styles(["random"])["random"]["color"] == method_styles(NAMES)["random"]["color"]
    many = [f"method {index}" for index in range(60)]
    assert len({str(sorted(style.items())) for style in method_styles(many).values()}) == 60


@pytest.mark.parametrize("methods", [NAMES, LONG])
def test_many_methods_are_named_below_the_plot_in_the_order_of_their_ends(methods):
    """The picture is narrow, so that nothing is off the screen of a phone."""
    figure = quality_against_heads(contents_of(methods), "retrained")
    (axes,), (legend,) = figure.axes, figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["dense", *methods]
    box, plot = legend.get_window_extent(), axes.get_tightbbox()
    assert figure.bbox.y0 <= box.y0 < box.y1 <= plot.y0
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.get_figwidth() <= 4.5
    assert plot.height > 2.5 * figure.dpi
    colours = [line.get_color() for line in axes.lines if line.get_label() in methods]
    assert len(set(colours)) == len(methods)


def test_the_curve_of_a_run_has_its_own_budget_and_the_dense_model_of_each_stage():
    rows = [
        ("dense", "post hoc", 8, 0.9), ("dense", "retrained from dense", 8, 0.95), ("his", "post hoc", 3, 0.7),
        ("his+refit", "retrained from dense", 3, 0.8), ("learned", "post hoc", 3, 0.75),
        ("learned", "retrained from dense", 3, 0.8),
    ]  # fmt: skip
    comparison = pd.DataFrame(rows, columns=["method", "stage", "heads", "select_accuracy"])
    curve = pd.DataFrame([(name, heads, heads / 10) for name in ("learned", "his") for heads in (4, 2)])
    curve.columns = ["method", "heads", "select_accuracy"]
    alone, retrained = quality_by_budget(curve, comparison, metric="accuracy").axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in alone.lines}
    assert lines["his"] == [[2, 20], [3, 70], [4, 40]]
    assert [axes.lines[-1].get_ydata()[0] for axes in (alone, retrained)] == [90, 95]
    assert [marks.get_offsets().tolist() for marks in retrained.collections] == [[[0, 80]], [[1, 80]]]
    assert [label.get_text() for label in retrained.get_xticklabels()] == ["his+refit", "learned"]
    (only,) = quality_by_budget(curve, comparison[comparison["stage"] == "post hoc"], metric="accuracy").axes
    assert only.get_title() == "mask alone"


def test_bands_reach_from_the_lowest_to_the_highest_seed_and_the_picture_says_so():
    figure = quality_against_heads(contents_of(NAMES), "retrained")
    axes = figure.axes[0]
    assert len(axes.collections) == len(NAMES)
    learned = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert learned.min() == pytest.approx(100 * (0.9 - 0.02 - 36 / 3600))
    assert learned.max() == pytest.approx(100 * (0.9 - 0.02 - 9 / 3600 + 0.02))
    line = next(line for line in axes.lines if line.get_label() == "learned")
    assert line.get_ydata()[0] == pytest.approx(100 * (0.9 - 0.02 - 9 / 3600 + 0.01))  # the mean, of 9 heads first
    assert axes.get_title().endswith("bands: lowest to highest of 3 seeds")
    left, right = axes.get_xlim()
    assert left > right  # heads are taken away to the right
    one = quality_against_heads(contents_of(NAMES, seeds=1), "retrained").axes[0]
    assert not one.collections
    assert one.get_title().endswith("of one seed")
