"""The gates over time as a film strip, with the price where it is known; masks by method."""

import json
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from tests.training.report.fixture import write_run
from training.report.contents import GateHistory, Site, Values, by_kind
from training.report.figures import masks_by_method
from training.report.pictures import film_strip
from training.report.reading import read_contents

SITES = (Site("encoder.0", 2), Site("encoder.1", 3))


def history(**more):
    """Five gates, of which two close over eleven steps, the first from step 0 on."""
    steps = np.arange(0, 110, 10)
    falling = np.clip(1 - steps / 50, 0, 1)
    values = np.column_stack([falling, falling**2, *[np.ones(11)] * 3])
    return GateHistory(SITES, steps, values, (values > 0).astype(float), **more).ending_in(np.array([0.0, 0, 1, 0, 1]))


def test_a_film_strip_shows_moments_with_open_and_expected_heads_and_the_price():
    prices = {"": np.linspace(0, 0.02, 11)}
    shown = history(expected=np.linspace(5, 3.2, 11), prices=prices)
    figure = film_strip(shown, "title")
    panels = [axes for axes in figure.axes if axes.images and axes.get_title()]
    assert len(panels) == 7
    assert panels[0].get_title() == "step 0"
    assert panels[-1].get_title() == "the mask"
    said = [axes.get_xlabel().split("\n") for axes in panels]
    assert said[0] == ["5 open", "5.0 expected", "price 0"]
    assert said[3] == ["3 open", "3.9 expected", "price 0.012"]
    assert said[-1] == ["2 open"]
    for axes in panels:
        step = shown.steps.tolist().index(int(axes.get_title().split()[1])) if axes is not panels[-1] else -1
        assert np.array_equal(
            axes.images[0].get_array().filled(np.nan), Values(SITES, shown.values[step]).grid(), equal_nan=True
        )
    boxes = [axes.get_tightbbox() for axes in panels]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    assert film_strip(history(), "title").axes[0].get_xlabel() == "5 open"


def test_the_price_is_read_where_it_is_logged(tmp_path):
    run = write_run(tmp_path / "run")
    gates = pd.read_csv(run / "gates_over_time.csv")
    steps = gates["step"].to_numpy()
    gates.assign(expected=8 - steps / 30, price=steps / 1000).to_csv(run / "gates_over_time.csv", index=False)
    ((_, found),) = read_contents(run).histories.items()
    assert len(found.sites) == 2
    assert found.values.shape[1] == 8
    assert found.expected[:-1].tolist() == pytest.approx((8 - steps / 30).tolist())
    assert found.prices[""][:-1].tolist() == pytest.approx((steps / 1000).tolist())
    assert np.isnan(found.prices[""][-1])  # the mask has no price


@pytest.mark.integration
@pytest.mark.parametrize("command", ["fit", "compare"])
def test_a_real_run_shows_what_it_logged(full_run, compared, command):
    run = (full_run if command == "fit" else compared)[0]
    found = read_contents(run).histories["learned", 3]
    log = pd.read_csv(full_run[0] / "metrics.csv").dropna(subset=["train/price"]).set_index("step")
    log = log.loc[found.steps[:-1] - 1]
    assert found.prices.keys() == {""}
    assert found.prices[""][:-1].tolist() == pytest.approx(log["train/price"].tolist())
    assert found.expected[:-1].tolist() == pytest.approx(log["heads/expected"].tolist(), rel=1e-6)
    assert found.prices[""][-2] > 0
    under = [axes.get_xlabel() for axes in film_strip(found, "title").axes if axes.get_xlabel()]
    assert all("expected" in text and "price" in text for text in under[:-1])
    assert under[-1] == "3 open"


def test_one_price_of_all_kinds_is_shown_once(tmp_path):
    run = write_run(tmp_path / "run")
    gates = pd.read_csv(run / "gates_over_time.csv")
    for cross, shown in ((0.5, {""}), (0.7, {"encoder", "cross"})):
        priced = gates.assign(price=max(cross, 0.5), **{"price/encoder": 0.5, "price/cross": cross})
        priced.to_csv(run / "gates_over_time.csv", index=False)
        ((_, found),) = read_contents(run).histories.items()
        assert found.prices.keys() == shown


def test_masks_of_methods_lie_side_by_side_with_their_mean():
    kept = {"learned": Values(SITES, np.array([1, 0, 1, 0, 0])), "his": Values(SITES, np.array([0.5, 0, 0, 1, 0.5]))}
    figure = masks_by_method(kept, seeds=2)
    panels = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    assert list(panels) == ["learned", "his", "mean of the methods"]
    mean = panels["mean of the methods"].images[0].get_array().compressed().tolist()
    assert mean == [0.75, 0, 0.5, 0.5, 0.25]
    assert figure.axes[-1].get_xlabel() == "share of 2 seeds that keep the head"
    boxes = [axes.get_window_extent() for axes in figure.axes if axes.axison]
    assert not any(one.overlaps(other) for index, one in enumerate(boxes) for other in boxes[:index])


def test_sites_stand_kind_after_kind(tmp_path):
    sites = (Site("encoder.0", 1), Site("decoder.0", 2), Site("cross.0", 1), Site("decoder.1", 2), Site("cross.1", 1))
    ordered, places = by_kind(sites)
    assert [site.label for site in ordered] == ["encoder.0", "decoder.0", "decoder.1", "cross.0", "cross.1"]
    assert places.tolist() == [0, 1, 2, 4, 5, 3, 6]
    run = write_run(tmp_path / "run")
    listed = [{"label": label, "gates": 4} for label in ("encoder.0", "cross.0")]
    (run / "sites.json").write_text(
        json.dumps([{"label": "cross.0", "gates": 2}, *listed[:1], {"label": "cross.1", "gates": 2}])
    )
    (run / "gates_over_time.csv").unlink()
    entry = json.loads((run / "masks.json").read_text())[0]
    kept = read_contents(run).kept(entry["method"], 3)
    assert [site.label for site in kept.sites] == ["cross.0", "cross.1", "encoder.0"]
    assert kept.values.tolist() == [*entry["mask"][:2], *entry["mask"][6:], *entry["mask"][2:6]]
