"""The whole procedure of a comparison on methods that are all alike, and on one that is better."""

import numpy as np
import pandas as pd
import pytest

from tests.training.stats.error_rates import FIRST, METHODS, SECOND, World, p_values, simulate
from training.stats.significance import holm
from training.stats.tables import compare_methods

WORLDS = {
    "seeds alone": {"seed_spread": 0.018},
    "examples alone": {"example_spread": 0.3},
    "both": {"seed_spread": 0.018, "example_spread": 0.3},
    "mostly seeds": {"seed_spread": 0.018, "example_spread": 0.1},
    "hits and misses": {"seed_spread": 0.01, "example_spread": 0.2, "hits": True},
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize(
    ("examples", "families"),
    [pytest.param(300, 400, marks=pytest.mark.integration), pytest.param(600, 3000, marks=pytest.mark.nightly)],
)
def test_equal_methods_are_seldom_called_different(examples, families, seeds, name):
    """The Monte Carlo error at 5 % is 1.1 points of 400 families, and 0.4 of 3,000."""
    rates = simulate(World(seeds, examples, **WORLDS[name]), families, resamples=500)
    assert rates.wrong <= 0.06
    assert rates.alone <= 0.06


@pytest.mark.integration
def test_of_one_seed_equal_models_are_seldom_called_different():
    """Models that are equally good on the population of examples: with one seed, nothing else is claimed."""
    assert simulate(World(1, 800, example_spread=0.3, hits=True), 150, resamples=3000).wrong <= 0.06


@pytest.mark.nightly
@pytest.mark.parametrize(("examples", "hits"), [(500, False), (800, True)])
def test_of_one_seed_equal_models_are_seldom_called_different_in_many_families(examples, hits):
    """500 families: a Monte Carlo error of 1 point at 5 %."""
    assert simulate(World(1, examples, example_spread=0.3, hits=hits), 500, resamples=10_000).wrong <= 0.06


@pytest.mark.integration
def test_a_real_difference_is_found():
    """One method is better than seven others, all of which differ by half a point between seeds; 2,000 test examples."""
    world = {"examples": 2000, "seed_spread": 0.005, "example_spread": 0.05, "hits": True, "settled": 0.7}
    five = simulate(World(5, **world, ahead=0.08), 100, resamples=300)
    ten = simulate(World(10, **world, ahead=0.04), 100, resamples=300)
    assert five.found > 0.9
    assert ten.found > 0.9
    assert max(five.wrong, ten.wrong) <= 0.06


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_the_simulated_procedure_is_that_of_a_comparison(seeds):
    random = np.random.default_rng(seeds)
    outcomes = World(seeds, 200, 0.02, 0.2, hits=True).draw(1, random)
    targets = random.integers(2, size=200)
    rows, predictions = [], {}
    for method in range(METHODS):
        for seed in range(seeds):
            key = f"{method}-{seed}"
            made = np.where(outcomes[0, method, seed] == 1, targets, 1 - targets)
            predictions[key] = {"test_prediction": made, "test_target": targets}
            rows.append({"method": f"m{method}", "seed": seed, "stage": "retrained", "budget": 4, "experiment": key})
    found = compare_methods(pd.DataFrame(rows), predictions, "accuracy", resamples=1000).set_index(["method", "rival"])
    corrected = [found.loc[(f"m{a}", f"m{b}"), "p_holm"] for a, b in zip(FIRST, SECOND, strict=True)]
    if seeds == 3:
        assert np.isnan(corrected).all()
    else:
        np.testing.assert_allclose(corrected, holm(p_values(outcomes)[0]), rtol=1e-4)
