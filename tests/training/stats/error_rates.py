"""How often the whole procedure of a comparison (the test of every pair, Holm's correction) claims a difference.

``python -m tests.training.stats.error_rates`` prints the table of docs/explanation/statistics.md. Eight methods are compared,
28 pairs, on 0/1 outcomes with a mean of 0.85, as accuracy has them, or on numbers where one source of chance is to be the only
one. In the table every model gets the same 70 % of the examples right, so that two models differ on 15 % of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from training.stats.bootstrap import MeanMetric, resample_metric, resampled_difference
from training.stats.significance import crossed_difference, holm

METHODS = 8
FIRST, SECOND = np.array(list(combinations(range(METHODS), 2))).T
"""The two methods of every pair."""
CHUNK = 50
"""Families at a time."""
MEAN = MeanMetric(lambda outcomes, targets: np.asarray(outcomes)[..., None], lambda means: means[..., 0])


@dataclass(frozen=True)
class World:
    """A source of outcomes.

    Args:
        seeds: The seeds of each method.
        examples: The examples of the test split.
        seed_spread: The standard deviation of a method's accuracy over seeds, as a share.
        example_spread: The standard deviation over examples of a method's accuracy, the same for all seeds.
        hits: Whether outcomes are 0 or 1, drawn in every seed. Otherwise they are the probabilities.
        settled: The share of the examples that every model gets right.
        ahead: The true lead of the first method over the others, as a share.
    """

    seeds: int
    examples: int = 500
    seed_spread: float = 0.0
    example_spread: float = 0.0
    hits: bool = False
    settled: float = 0.0
    ahead: float = 0.0

    def draw(self, families: int, random: np.random.Generator) -> np.ndarray:
        """Draw outcomes ``[families, methods, seeds, examples]``."""
        of_seed = random.normal(0, self.seed_spread, (families, METHODS, self.seeds, 1))
        of_example = random.normal(0, self.example_spread, (families, METHODS, 1, self.examples))
        of_method = np.where(np.arange(METHODS) == 0, self.ahead, 0.0)[:, None, None]
        share = 0.85 + of_method + of_seed + of_example
        if not self.hits:
            return share.astype(np.float32)
        open_share = (share - self.settled) / (1 - self.settled)
        right = np.arange(self.examples) < self.settled * self.examples
        return (right | (random.random(share.shape) < open_share)).astype(np.float32)


def p_values(outcomes: np.ndarray, *, resamples: int = 1000) -> np.ndarray:
    """Return p of every pair ``[families, pairs]`` as :func:`training.stats.tables.compare_methods` does, not corrected."""
    families, _, seeds, examples = outcomes.shape
    values, draws = resample_metric(outcomes.reshape(-1, examples), np.zeros(examples), MEAN, resamples=resamples)
    values = values.reshape(families, METHODS, seeds)
    means = draws.reshape(resamples, families, METHODS, seeds).mean(axis=-1)
    differences = values[:, FIRST] - values[:, SECOND]
    if seeds == 1:
        found = [
            resampled_difference(differences[family, pair, 0], means[:, family, a] - means[:, family, b]).p
            for family in range(families)
            for pair, (a, b) in enumerate(zip(FIRST, SECOND, strict=True))
        ]
        return np.reshape(found, (families, -1))
    spread = [(means[..., a] - means[..., b]).var(axis=0, ddof=1) for a, b in zip(FIRST, SECOND, strict=True)]
    return crossed_difference(differences, np.stack(spread, axis=1) * examples / (examples - 1), examples)[3]


@dataclass(frozen=True)
class Rates:
    """Shares of families, each with a Monte Carlo error of ``(share * (1 - share) / families) ** 0.5``.

    Args:
        wrong: The share of families in which a pair of equal methods was called different.
        found: The share in which a different pair was found, the mean over such pairs; NaN without any.
        alone: The share of pairs of equal methods with p < 0.05 before the correction.
    """

    wrong: float
    found: float
    alone: float


def simulate(world: World, families: int, *, seed: int = 0, **options: int) -> Rates:
    """Return the rates of the procedure in a world, over a number of families."""
    random = np.random.default_rng(seed)
    parts = [p_values(world.draw(CHUNK, random), **options) for _ in range(0, families, CHUNK)]
    p = np.concatenate(parts)
    called = np.array([holm(family) for family in p]) < 0.05
    different = (FIRST == 0) & (world.ahead != 0)
    return Rates(
        float(called[:, ~different].any(axis=1).mean()),
        float(called[:, different].mean()) if different.any() else np.nan,
        float((p[:, ~different] < 0.05).mean()),
    )


def table(families: int) -> str:
    """Errors and power as a Markdown table; the same families at every difference."""
    lines = ["| seeds | test examples | spread over seeds | no difference | 2 points | 4 points | 8 points |",
             "| --: | --: | --: | --: | --: | --: | --: |"]  # fmt: skip
    for seeds in (5, 10):
        for examples in (500, 2000):
            for spread in (0.0, 0.005, 0.02):
                cells = []
                for ahead in (0.0, 0.02, 0.04, 0.08):
                    world = World(seeds, examples, spread, example_spread=0.05, hits=True, settled=0.7, ahead=ahead)
                    rates = simulate(world, families, resamples=500)
                    cells.append(f"{rates.found if ahead else rates.wrong:.2f}")
                lines.append(f"| {seeds} | {examples} | {100 * spread:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(400))
