import itertools
import re
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu import corpus_bleu
from scipy import stats
from torchmetrics.classification import BinaryF1Score

from gates.errors import GateError
from gates.scores.ranking import jaccard
from tests.training.report.fixture import differences_of
from training.stats.bootstrap import majority_class, metric_values, resample_metric, resampled_difference
from training.stats.significance import chance_jaccard, friedman, holm, interval, mcnemar, paired_difference, wilcoxon
from training.stats.tables import agreement, compare_methods, rank_methods, summarise
from training.stats.verdict import verdict

# -- intervals -----------------------------------------------------------------------------------------------------


def test_the_interval_is_students():
    values = [0.80, 0.83, 0.86]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose(interval(values), (0.83, 0.03, low, high, 3))
    one = interval([0.8])
    assert (one.mean, one.seeds) == (0.8, 1)
    assert np.isnan([one.std, one.low, one.high]).all()
    with pytest.raises(GateError, match="no values"):
        interval([])


@pytest.mark.parametrize(
    ("values", "bounds"),
    [
        ([0.97, 1.0, 0.99], (0, 1)),
        ([0.0, 0.001, 0.01], (0, 1)),
        ([-0.99, -0.9], (-1, 1)),
        ([0.2, 3.0, 0.4], (0, 100)),
        ([1.001, 1.5, 4.0], (1, np.inf)),
    ],
)
def test_an_interval_stays_within_the_bounds_of_its_metric(values, bounds):
    free, found = interval(values), interval(values, bounds=bounds)
    assert not bounds[0] <= free.low < free.high <= bounds[1]
    assert bounds[0] < found.low < found.mean < found.high < bounds[1]
    assert (found.mean, found.std) == (free.mean, free.std)


def test_within_bounds_the_interval_is_students_of_the_log_odds():
    """Far from the bounds it is the plain one; the two ends are equally far from the mean in log odds, not in the mean."""
    values, odds = [0.90, 0.93, 0.96], lambda share: np.log(share / (1 - share))
    found = interval(values, bounds=(0, 1))
    error = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / 3**0.5 / (0.93 * 0.07)
    assert odds(found.high) - odds(0.93) == pytest.approx(error)
    assert odds(0.93) - odds(found.low) == pytest.approx(error)
    for far, bounds in (([0.5001, 0.5002, 0.5004], (0, 1)), ([2000.0, 2001.0, 2002.5], (1.0, np.inf))):
        np.testing.assert_allclose(interval(far, bounds=bounds), interval(far), rtol=1e-5, atol=1e-6)
    shifted = interval([2 * value - 1 for value in values], bounds=(-1, 1))
    np.testing.assert_allclose((shifted.low, shifted.high), (2 * found.low - 1, 2 * found.high - 1))
    assert interval([1.0, 1.0], bounds=(0, 1))[2:4] == (1.0, 1.0)
    with pytest.raises(GateError, match=r"values from 0\.5 to 91\.8 are not within 0 and 1"):
        interval([0.5, 91.8], bounds=(0, 1))
    with pytest.raises(GateError, match="are not 1 or more"):
        interval([0.5, 2.0], bounds=(1.0, np.inf))


def test_within_bounds_the_interval_covers_the_mean_better_than_the_plain_one():
    """Of shares near 1, of which the mean is known."""
    random = np.random.default_rng(0)
    draws = random.beta(98, 2, (600, 3))
    bounded = [found.low < 0.98 < found.high for found in (interval(values, bounds=(0, 1)) for values in draws)]
    plain = [found.low < 0.98 < found.high for found in map(interval, draws)]
    assert abs(np.mean(bounded) - 0.95) < abs(np.mean(plain) - 0.95)
    assert np.mean(bounded) > 0.94


# -- metrics -------------------------------------------------------------------------------------------------------


def test_macro_f1_is_the_mean_over_the_classes_that_occur():
    """Scikit-learn's and torchmetrics' choice: a class that neither is nor was answered counts for nothing, one that was
    answered alone counts 0."""
    targets = np.array([0, 0, 0, 3, 3, 3])
    both = metric_values([[0, 0, 0, 3, 3, 0], [0, 0, 0, 3, 3, 2]], targets, "f1")  # classes of one row are not the other's
    assert both == pytest.approx([(6 / 7 + 4 / 5) / 2, (1 + 4 / 5) / 3])
    zeros = np.zeros((1, 6), dtype=int)
    assert metric_values(zeros, targets, "f1") == pytest.approx([1 / 3])
    assert metric_values(zeros, zeros[0], "f1") == [1.0]
    assert metric_values(zeros, targets, "matthews") == [0.0]


def paired(a, b, targets, metric="accuracy", **options):
    """The difference of two systems, as a comparison finds it."""
    first, second = np.atleast_2d(a), np.atleast_2d(b)
    values, draws = resample_metric(np.concatenate([first, second]), targets, metric, **options)
    seeds, examples = first.shape
    return paired_difference(values[:seeds], values[seeds:], draws[:, :seeds], draws[:, seeds:], examples)


# -- the bootstrap -------------------------------------------------------------------------------------------------


def systems(seeds=1, examples=300, better=0.06, random=None, spread=0.0):
    """Predictions of two systems and the targets; the first is better by so much on average."""
    random = random or np.random.default_rng(1)
    targets = random.integers(2, size=examples)
    easy = random.random(examples)

    def predict(accuracy):
        return np.where(0.7 * easy + 0.3 * random.random(examples) < accuracy, targets, 1 - targets)

    rates = 0.7 + random.normal(0, spread, size=(seeds, 2))
    return np.stack([predict(r + better) for r, _ in rates]), np.stack([predict(r) for _, r in rates]), targets


def test_the_bootstrap_of_one_seed_against_all_resamples():
    """All 5^5 resamples of five examples."""
    a, b = np.array([1, 1, 1, 1, 0]), np.array([1, 0, 0, 1, 1])
    targets = np.ones(5, dtype=int)
    differences = np.array([(a[list(drawn)] - b[list(drawn)]).mean() for drawn in itertools.product(range(5), repeat=5)])
    found = paired(a, b, targets, resamples=40_000)
    assert found.difference == pytest.approx(0.2)
    assert found.p == pytest.approx(2 * min((differences <= 0).mean(), (differences >= 0).mean()), abs=0.02)
    assert [found.low, found.high] == pytest.approx(np.quantile(differences, [0.025, 0.975]).tolist(), abs=0.01)


def perplexities(rows, tokens):
    return np.exp(rows.sum(axis=-1) / tokens.sum())


def bleus(rows, references):
    return [corpus_bleu(list(texts), [list(references)]).score for texts in rows]


def results_of(name):
    """Two systems' results on a few examples, the targets, and an independent form of the metric."""
    random = np.random.default_rng(0)
    if name == "bleu":
        references = np.array([" ".join(random.choice([*"abcdef"], 9)) for _ in range(12)])
        rows = [[" ".join(np.where(random.random(9) < kept, text.split(), "x")) for text in references] for kept in (0.9, 0.6)]
        return np.array(rows), references, bleus
    if name == "perplexity":
        tokens = random.integers(5, 30, 40)
        return tokens * random.normal(2, 0.3, (2, 40)), tokens, perplexities
    if name in ("pearson", "spearman"):
        return *numbers_of_systems(), partial(metric_values, metric=name)
    a, b, targets = systems(examples=60)
    return np.concatenate([a, b]), targets, partial(metric_values, metric=name)


@pytest.mark.parametrize("name", ["accuracy", "f1", "matthews", "bleu", "perplexity", "pearson", "spearman"])
def test_the_bootstrap_of_a_metric_is_that_of_resampled_examples(name):
    predictions, targets, slow = results_of(name)
    values, draws = resample_metric(predictions, targets, name, resamples=20, seed=3)
    np.testing.assert_allclose(values, slow(predictions, targets), rtol=1e-9, atol=1e-9)
    drawn = np.random.default_rng(3).integers(len(targets), size=(20, len(targets)))
    np.testing.assert_allclose(draws, [slow(predictions[:, rows], targets[rows]) for rows in drawn], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seeds", [1, 5])
def test_equal_systems_are_level_and_exchanged_ones_mirrored(seeds):
    a, b, targets = systems(seeds)
    assert paired(a, a, targets, resamples=200)[:4] == (0, 0, 0, 1)
    there, back = paired(a, b, targets, resamples=500), paired(b, a, targets, resamples=500)
    np.testing.assert_allclose(back, (-there.difference, -there.high, -there.low, there.p))


def test_the_smallest_p_of_a_bootstrap_is_not_0():
    """(k + 1) / (n + 1): the data themselves are one of the draws (Davison and Hinkley 1997)."""
    right, wrong = np.ones(50, dtype=int), np.zeros(50, dtype=int)
    found = paired(right, wrong, right, resamples=99)
    assert found == (1, 1, 1, pytest.approx(2 / 100))
    assert paired(right, right, right, resamples=99).p == 1  # and none is above 1
    assert resampled_difference(0.0, np.full(99, 1e-17)) == (0, 0, 0, 1)  # what rounding leaves of a tie


def test_all_systems_see_the_same_examples_in_every_draw():
    """Otherwise two equal systems would differ, and pairs gain nothing over unpaired ones."""
    a, b, targets = systems(examples=100)
    values, draws = resample_metric(np.stack([a[0], b[0], a[0]]), targets, resamples=700)  # more than one chunk
    assert (draws[:, 0] == draws[:, 2]).all()
    assert draws[:, 0].std() > 0.01
    errors = (a[0] == targets).astype(float) - (b[0] == targets)
    assert (draws[:, 0] - draws[:, 1]).std() == pytest.approx(errors.std() / 10, rel=0.1)
    assert values.tolist() == [(a[0] == targets).mean(), (b[0] == targets).mean(), (a[0] == targets).mean()]


def test_predictions_that_do_not_fit_are_refused():
    with pytest.raises(GateError, match="unknown metric 'meteor'; expected one of accuracy"):
        paired([0], [0], [0], "meteor")
    with pytest.raises(GateError, match=r"predictions have shape \[4\] and targets \[3\]"):
        metric_values(np.zeros(4, dtype=int), np.zeros(3, dtype=int))


# -- other tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (1, 0), (7, 1), (3, 9), (5, 5)])
def test_mcnemar_against_the_binomial_sum(only_a, only_b):
    a = np.array([True] * only_a + [False] * only_b + [True] * 4 + [False] * 3)
    b = np.array([False] * only_a + [True] * only_b + [True] * 4 + [False] * 3)
    n, least = only_a + only_b, min(only_a, only_b)
    tail = sum(stats.binom.pmf(k, n, 0.5) for k in range(least + 1))
    assert mcnemar(a, b) == pytest.approx(min(1.0, 2 * tail))


def test_holm_steps_down():
    """Bonferroni's factor for the smallest, one less for each next one, never below one before, never above 1."""
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]).tolist() == [1.0, 1.0]
    assert holm([]).size == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_the_plain_and_bonferronis_values_in_the_same_order(p):
    plain, corrected = np.array(p), holm(p)
    assert (corrected >= plain).all()
    assert (corrected <= np.minimum(1, len(p) * plain) + 1e-12).all()
    order = np.argsort(plain, kind="stable")
    assert (np.diff(corrected[order]) >= 0).all()


def test_wilcoxon_is_exact_for_few_blocks_and_refuses_too_few():
    a = np.array([0.9, 0.8, 0.85, 0.7, 0.95, 0.6, 0.65])
    differences = np.array([0.03, 0.02, 0.05, -0.01, 0.04, 0.06, 0.07])
    found = wilcoxon(a, a - differences)
    assert found.p == pytest.approx(stats.wilcoxon(differences, method="exact").pvalue)
    few = wilcoxon([1.0, 2.0, 3.0], [0.0, 2.0, 1.0])
    assert (few.p, few.blocks) == (None, 2)
    assert few.reason == "2 seeds differ; the test needs at least 6 to reach p < 0.05"


def test_friedman_against_scipy():
    random = np.random.default_rng(2)
    values = random.normal(loc=[0.5, 0.25, 0.0, 0.0], size=(40, 4))
    values = values.round(1)  # some ties
    found, reference = friedman(values), stats.friedmanchisquare(*values.T)
    assert found.statistic == pytest.approx(reference.statistic)
    assert found.p == pytest.approx(reference.pvalue, abs=0.01)
    assert np.mean(found.average_ranks) == pytest.approx(2.5)
    assert np.argmin(found.average_ranks) == values.mean(0).argmax()
    assert friedman(values[:5]).reason.startswith("4 methods and 5 seeds")
    assert friedman(np.ones((8, 3))).p == 1.0
    assert friedman(np.tile(np.arange(5), (12, 1))).p == 1 / 10_000  # the data are one of the permutations
    cells = random.normal(size=(7, 3, 4))
    ranks = stats.rankdata(-cells, axis=-1).mean(axis=1)
    assert friedman(cells).average_ranks == pytest.approx(ranks.mean(axis=0))
    assert friedman(cells[:, :1]) == friedman(cells[:, 0])


# -- agreement -----------------------------------------------------------------------------------------------------


def masks_of(kept, heads):
    return [torch.tensor([float(i in chosen) for i in range(heads)]) for chosen in itertools.combinations(range(heads), kept)]


@pytest.mark.parametrize(("kept", "other", "heads"), [(2, 3, 6), (1, 1, 4), (5, 4, 6), (0, 2, 4), (0, 0, 3), (4, 4, 4)])
def test_the_chance_jaccard_is_the_mean_over_all_pairs_of_masks(kept, other, heads):
    pairs = itertools.product(masks_of(kept, heads), masks_of(other, heads))
    expected = np.mean([jaccard(mask, against) for mask, against in pairs])
    assert chance_jaccard(kept, other, heads) == pytest.approx(expected)


def test_the_chance_jaccard_within_groups():
    halves = [list(itertools.product(masks_of(a, 4), masks_of(b, 3))) for a, b in ((1, 2), (3, 1))]
    expected = np.mean([jaccard(torch.cat(mask), torch.cat(against)) for mask, against in itertools.product(*halves)])
    assert chance_jaccard([1, 2], [3, 1], [4, 3]) == pytest.approx(expected)
    with pytest.raises(GateError, match="masks keep 5 and 1 of 4 heads"):
        chance_jaccard(5, 1, 4)


def test_agreement_between_methods_and_between_seeds():
    random = np.random.default_rng(3)
    his = [random.random(8) for _ in range(3)]
    rankings = {(budget, "his", seed): his[seed] for budget in (4, 2) for seed in range(3)}
    rankings |= {(budget, "learned", seed): random.random(8) for budget in (4, 2) for seed in range(3)}

    def top(budget, method, seed):
        return (np.argsort(np.argsort(-rankings[budget, method, seed])) < budget).astype(int).tolist()

    masks = [{"seed": cell[2], "method": cell[1], "budget": cell[0], "mask": top(*cell)} for cell in rankings]
    masks.append({"seed": 0, "method": "his+swap", "budget": 4, "mask": top(4, "his", 0)})
    found = agreement(masks, rankings).set_index(["budget", "method", "other"])
    between = [jaccard(*(torch.tensor(top(4, method, seed)) for method in ("his", "learned"))) for seed in range(3)]
    assert found.loc[(4, "his", "learned"), "jaccard"] == pytest.approx(np.mean(between))
    assert found.loc[(4, "learned", "his")].equals(found.loc[(4, "his", "learned")])
    assert found.loc[(4, "his", "his"), "chance_jaccard"] == pytest.approx(chance_jaccard(4, 4, 8))
    for budget in (4, 2):  # each budget's own rankings
        learned = [torch.tensor(rankings[budget, "learned", seed]) for seed in range(3)]
        pairs = {"learned": itertools.combinations(learned, 2), "his": zip(learned, his, strict=True)}
        for other, both in pairs.items():
            correlations = [(stats.kendalltau(x, y).statistic, stats.spearmanr(x, y).statistic) for x, y in both]
            row = found.loc[(budget, "learned", other), ["kendall", "spearman"]].to_numpy(dtype=float)
            np.testing.assert_allclose(row, np.mean(correlations, axis=0), rtol=1e-5, atol=1e-7)
    assert found.loc[(4, "his+swap", "his"), "jaccard"] == 1
    assert np.isnan(found.loc[(4, "his+swap", "his"), "kendall"])  # a mask without a ranking
    assert np.isnan(found.loc[(4, "his+swap", "his+swap"), "jaccard"])  # one seed


def test_chance_knows_the_quotas_of_kinds():
    masks = [
        {"seed": 0, "method": name, "budget": 3, "mask": kept} for name, kept in (("a", [1, 1, 0, 1]), ("b", [1, 1, 1, 0]))
    ]
    plain = agreement(masks, {}).set_index(["method", "other"]).loc[("a", "b")]
    by_kind = agreement(masks, {}, quotas={3: [0, 0, 2, 2]}).set_index(["method", "other"]).loc[("a", "b")]
    assert plain["jaccard"] == by_kind["jaccard"] == 0.5
    assert plain["chance_jaccard"] == pytest.approx((1 + 3 * 0.5) / 4)  # the one head that is missing is the same in 1 of 4
    assert by_kind["chance_jaccard"] == pytest.approx((1 + 0.5) / 2)  # and in 1 of 2 where both kinds have their quota
    assert np.isnan(by_kind["kendall"])


# -- tables of a comparison ----------------------------------------------------------------------------------------


def comparison(accuracies, *, seeds=3, examples=800, budget=4, stage="retrained"):
    """A comparison of methods of these accuracies, with its predictions; errors are independent."""
    random = np.random.default_rng(4)
    targets = random.integers(2, size=examples)
    rows, predictions = [], {}
    for method, accuracy in accuracies.items():
        for seed in range(seeds):
            cell = f"{method}-{seed}"
            made = np.where(random.random(examples) < accuracy, targets, 1 - targets)
            predictions[cell] = {"test_prediction": made, "test_target": targets}
            row = {
                "seed": seed,
                "method": method,
                "stage": stage,
                "budget": 8 if method == "dense" else budget,
                "experiment": cell,
            }
            cost = {"steps": 10 + seed, "seconds": 1.5, "peak_memory_mb": 100.0}
            metrics = {"select_accuracy": accuracy, "test_accuracy": (made == targets).mean()}
            rows.append(row | metrics | cost)
    return pd.DataFrame(rows), predictions


CLEAR = {"dense": 0.95, "learned": 0.94, "his": 0.80, "random": 0.60}


def test_the_summary_has_means_intervals_and_costs():
    table, _ = comparison(CLEAR)
    found = summarise(table, "accuracy").set_index("method")
    own = table.loc[table["method"] == "his", "test_accuracy"]
    assert found.loc["his", "mean"] == pytest.approx(own.mean())
    assert found.loc["his", "std"] == pytest.approx(own.std())
    assert found.loc["his", "high"] == interval(own, bounds=(0, 1)).high < 1
    assert (found.loc["his", "steps"], found.loc["his", "seeds"], found.loc["dense", "budget"]) == (11, 3, 8)
    assert found.loc["his", "select_mean"] == pytest.approx(CLEAR["his"])
    assert "select_mean" not in summarise(table.drop(columns="select_accuracy"), "accuracy")
    with pytest.raises(GateError, match="no metric 'f1'; it has accuracy"):
        summarise(table, "f1")


def of(table, method, rival):
    """The row of a pair."""
    return table[(table["method"] == method) & (table["rival"] == rival)].iloc[0]


@pytest.mark.parametrize("seeds", [1, 5])
def test_the_tests_between_methods_are_paired_and_corrected_for_all_pairs(seeds):
    table, predictions = comparison(CLEAR, seeds=seeds)
    table = table.sample(frac=1, random_state=1)  # the order of rows says nothing
    found = compare_methods(table, predictions, "accuracy", resamples=2000)
    made = {
        name: np.stack([predictions[f"{name}-{seed}"]["test_prediction"] for seed in range(seeds)])
        for name in ("learned", "his")
    }
    targets = predictions["his-0"]["test_target"]
    expected = paired(made["learned"], made["his"], targets, resamples=2000)
    row = of(found, "learned", "his")
    np.testing.assert_allclose(row[["difference", "low", "high", "p"]].to_numpy(dtype=float), expected, rtol=1e-9)
    differences = (made["learned"] == targets).mean(1) - (made["his"] == targets).mean(1)
    np.testing.assert_allclose(row[["least", "most"]].to_numpy(dtype=float), [differences.min(), differences.max()])
    assert "dense" not in set(found["method"])
    assert len(found) == 3 * 3  # each method against the two others and the dense model
    pairs = {frozenset(pair): p for *pair, p in found[["method", "rival", "p"]].itertuples(index=False)}
    assert len(pairs) == 6
    assert row["p_holm"] == pytest.approx(
        dict(zip(pairs, holm(list(pairs.values())), strict=True))[frozenset(("learned", "his"))]
    )
    back = of(found, "his", "learned")
    names = ["difference", "low", "high", "least", "most", "p", "p_holm", "ahead", "behind"]
    mirrored = [-row["difference"], -row["high"], -row["low"], -row["most"], -row["least"], row["p"], row["p_holm"], 0, seeds]
    np.testing.assert_allclose(back[names].to_numpy(dtype=float), mirrored)


@pytest.mark.parametrize("seeds", [2, 4])
def test_two_to_four_seeds_are_described_and_not_tested(seeds):
    table, predictions = comparison(CLEAR, seeds=seeds)
    found = compare_methods(table, predictions, "accuracy", resamples=100)
    assert found[["low", "high", "p", "p_holm"]].isna().all(axis=None)
    assert (of(found, "his", "random")["ahead"], of(found, "his", "learned")["behind"]) == (seeds, seeds)
    cells = table.set_index(["method", "seed"])["test_accuracy"]
    row = of(found, "his", "random")
    assert row["difference"] == pytest.approx((cells["his"] - cells["random"]).mean())
    assert (row["least"], row["most"]) == pytest.approx(((cells["his"] - cells["random"]).agg(["min", "max"])).tolist())
    assert row["seeds"] == seeds


def test_a_pair_is_tested_on_the_seeds_that_both_have():
    table, predictions = comparison(CLEAR, seeds=6)
    table = table[~((table["method"] == "his") & (table["seed"] < 2))]
    found = compare_methods(table, predictions, "accuracy", resamples=500)
    assert of(found, "learned", "his")["seeds"] == 4
    assert np.isnan(of(found, "learned", "his")["p_holm"])
    tested = found.dropna(subset=["p"])
    pairs = {frozenset(pair): p for *pair, p in tested[["method", "rival", "p"]].itertuples(index=False)}
    assert set(pairs) == {frozenset(p) for p in (("learned", "random"), ("learned", "dense"), ("random", "dense"))}
    corrected = dict(zip(pairs, holm(list(pairs.values())), strict=True))
    ends = [frozenset(pair) for pair in zip(tested["method"], tested["rival"], strict=True)]
    np.testing.assert_allclose(tested["p_holm"], [corrected[pair] for pair in ends])


def test_predictions_must_be_there_and_of_the_same_examples():
    table, predictions = comparison(CLEAR)
    other = {**predictions, "his-1": {**predictions["his-1"], "test_target": 1 - predictions["his-1"]["test_target"]}}
    with pytest.raises(GateError, match="the experiment 'his-1' was tested on other examples than 'learned-0'"):
        compare_methods(table, other, "accuracy", resamples=10)
    del predictions["his-1"]
    with pytest.raises(GateError, match="the experiment 'his-1' has no predictions"):
        compare_methods(table, predictions, "accuracy", resamples=10)


@pytest.mark.parametrize(
    ("accuracies", "parts", "absent"),
    [
        (
            CLEAR,
            ["**4 heads**: learned has the best mean", "Significantly behind: his (-", "learned wins.", "dense model's (",
             "corrected by Holm's method", "above the best rival, his (significantly).", "at 1 of 1 budget retrained",
             "Average ranks are not tested: 3 methods and 5 seeds"],
            ["Not significantly behind"],
        ),
        (
            {"dense": 0.9, "learned": 0.85, "his": 0.85, "random": 0.6},
            ["Significantly behind: random", "Not significantly behind:", "No method wins."],
            ["his wins", "learned wins"],
        ),
        (
            {"learned": 0.7, "his": 0.9, "random": 0.6},
            ["his has the best mean", "own methods, learned, is below his by", "(significantly)", "at 0 of 1 budget retrained"],
            [],
        ),
    ],
)  # fmt: skip
def test_the_verdict_names_a_winner_only_where_all_others_are_behind(accuracies, parts, absent):
    table, predictions = comparison(accuracies, seeds=5)
    tests = compare_methods(table, predictions, "accuracy", resamples=2000)
    text = verdict(summarise(table, "accuracy"), tests, ranks=rank_methods(table, "accuracy"))
    assert [part for part in parts if part not in text] == []
    assert [part for part in absent if part in text] == []


@pytest.mark.parametrize("seeds", [2, 4])
def test_of_few_seeds_nothing_is_claimed(seeds):
    """However clear it is."""
    table, _ = comparison({**CLEAR, "near": 0.94}, seeds=seeds)
    cells = table.pivot(index="seed", columns="method", values="test_accuracy")
    cells["near"] = cells["learned"] + np.where(cells.index == 0, 0.012, -0.02)  # ahead in one seed, behind in the mean
    table["test_accuracy"] = [cells.loc[row.seed, row.method] for row in table.itertuples()]
    text = verdict(summarise(table, "accuracy"), differences_of(table), ranks=rank_methods(table, "accuracy"))
    about, said = text.split("## Retrained")
    assert "Fewer than 5 seeds allow no test and no winner" in about
    assert "ignifican" not in said
    assert " wins" not in said
    assert "evel" not in said
    gaps = 100 * (cells["his"] - cells["learned"])
    assert f"Behind in every seed: his ({gaps.mean():+.1f}, from {gaps.max():+.1f} to {gaps.min():+.1f}), random (" in said
    near = 100 * (cells["near"] - cells["learned"]).mean()
    assert f"Behind in the mean but not in every seed: near ({near:+.1f}, behind in {seeds - 1} of {seeds} seeds)." in said
    below = (cells["learned"] < cells["dense"]).sum()
    ends = abs(100 * (cells["learned"] - cells["dense"])).agg(["min", "max"])
    shown = [f"{end:.1f}" if end >= 0.05 else "less than 0.1" for end in ends]
    range_over_seeds = f", by {shown[0]} to {shown[1]}" * int(below == seeds)
    assert f"below the dense model's (in {below} of {seeds} seeds{range_over_seeds})" in said
    assert f"above the best rival, near (in {seeds - 1} of {seeds} seeds)" in said


def test_of_one_seed_every_test_is_said_to_be_of_it():
    table, predictions = comparison({**CLEAR, "near": 0.9399}, seeds=1)
    tests = compare_methods(table, predictions, "accuracy", resamples=2000)
    text = verdict(summarise(table, "accuracy"), tests, ranks=rank_methods(table, "accuracy"))
    about, said = text.split("## Retrained")
    assert "so there is no winner" in about
    for absent in ("mean", "rank", "own methods"):  # words of several seeds
        assert absent not in text.replace("Significant means", "")
    assert "p < 0.05 in a paired bootstrap over test examples" in about
    assert "For this one seed, significantly behind: his (-" in said
    assert "For this one seed, not significantly behind: " in said
    named = (
        said.count("For this one seed, significantly")
        + said.count("For this one seed, not significantly")
        + said.count("significantly for this one seed")
    )
    assert said.count("ignifican") == named
    assert " wins" not in said


def test_seeds_of_different_numbers_are_told_apart():
    table, predictions = comparison(CLEAR, seeds=6)
    table = table[~((table["method"] == "his") & (table["seed"] < 3))]
    tests = compare_methods(table, predictions, "accuracy", resamples=2000)
    text = verdict(summarise(table, "accuracy"), tests)
    assert "Fewer than 5 seeds allow no test" in text
    assert "Others are means over seeds" in text
    assert "Significantly behind: random (" in text
    assert "Behind in every seed: his (" in text
    assert "No method wins." in text


def test_the_gap_to_the_best_is_over_the_seeds_that_both_have():
    """The seeds that one method misses are the easy ones, so the difference of the means is another number."""
    table, _ = comparison({"learned": 0.9, "his": 0.8}, seeds=4)
    table["test_accuracy"] = 0.7 + 0.05 * (table["seed"] >= 2) + 0.02 * (table["method"] == "learned")
    table = table[~((table["method"] == "his") & (table["seed"] >= 2))]
    assert "his (-2.0, from -2.0 to -2.0)" in verdict(summarise(table, "accuracy"), differences_of(table))


def test_the_best_own_method_is_chosen_on_the_selection_split_and_the_best_rival_on_test():
    rows = {"learned": (0.80, 0.90), "learned+swap": (0.95, 0.85), "his": (0.85, 0.80), "random": (0.7, 0.99)}
    summary = pd.DataFrame(
        [
            {"stage": "retrained", "method": name, "budget": 4, "seeds": 2, "mean": test, "select_mean": select}
            for name, (test, select) in rows.items()
        ]
    ).assign(low=0.0, high=1.0)
    tests, ours = pd.DataFrame(columns=["stage", "budget"]), ("learned", "learned+swap")
    text = verdict(summary, tests, ours=ours)
    assert "highest mean on the selection split" in text
    assert "The best of this project's own methods, learned, is below his by 5.0." in text
    assert "at 0 of 1 budget retrained" in text
    text = verdict(summary.drop(columns="select_mean"), tests, ours=ours)
    assert "Without results on a selection split, the best of this project's own methods is chosen on test" in text
    assert "own methods, learned+swap, is 10.0 above the best rival, his." in text
    tied = summary.assign(select_mean=0.9)
    assert "own methods, learned, is below his" in verdict(tied, tests, ours=ours)  # test does not decide among equals


def test_a_comparison_without_own_methods_does_not_speak_of_them():
    table, _ = comparison({"learned": 0.9, "his": 0.8}, seeds=3)
    summary, tests = summarise(table, "accuracy"), differences_of(table)
    assert "own methods" in verdict(summary, tests)
    assert "own methods" not in verdict(summary, tests, ours=())


def test_equal_seeds_have_no_interval_of_width_zero():
    table, _ = comparison({"his": 0.8, "random": 0.7}, seeds=2)
    table["test_accuracy"] = np.where(table["method"] == "his", 0.802, table["test_accuracy"])
    assert "his has the best mean, 80.2 (the same in 2 seeds)." in verdict(summarise(table, "accuracy"), differences_of(table))


def test_overlapping_intervals_claim_no_winner_even_if_the_paired_test_is_significant():
    """Seeds that are far apart in the same way: the paired difference is certain, the means are not."""
    table, predictions = comparison({"learned": 0.9, "his": 0.8}, seeds=5, examples=3000)
    summary = summarise(table, "accuracy")
    summary[["low", "high"]] += [-0.2, 0.2]
    text = verdict(summary, compare_methods(table, predictions, "accuracy", resamples=2000))
    assert "Significantly behind: his" in text
    assert "overlaps with that of his, so there is no winner" in text


def test_methods_with_the_same_predictions_share_the_best_mean():
    table, predictions = comparison({"learned": 0.9, "his": 0.8}, seeds=5)
    twin = table[table["method"] == "learned"].assign(method="hies")
    table = pd.concat([table, twin], ignore_index=True)
    tests = compare_methods(table, predictions, "accuracy", resamples=500)
    assert tests.set_index(["method", "rival"]).loc[("learned", "hies"), "p"] == 1
    text = verdict(summarise(table, "accuracy"), tests)
    assert "learned and hies share the best mean" in text
    assert "No method wins." in text
    assert "learned, is level with the best rival, hies" in text


def over_budgets(accuracies, budgets, **options):
    return pd.concat([comparison(accuracies, budget=budget, **options)[0] for budget in budgets], ignore_index=True)


def test_ranks_over_enough_seeds():
    table = over_budgets(CLEAR, (4, 3, 2), seeds=7)
    ranks, test = rank_methods(table.sample(frac=1, random_state=0), "accuracy")["retrained"]
    assert list(ranks["method"]) == ["learned", "his", "random"]
    assert list(ranks["average_rank"]) == [1, 2, 3]
    assert test.blocks == 7
    assert test.p < 0.01
    means = table.groupby(["seed", "method"])["test_accuracy"].mean().unstack()
    pairs = list(itertools.combinations(["learned", "his", "random"], 2))
    p = [stats.wilcoxon(means[name] - means[other], method="exact").pvalue for name, other in pairs]
    np.testing.assert_allclose(ranks["p_holm"], [np.nan, *holm(p)[:2]])
    text = verdict(summarise(table, "accuracy"), pd.DataFrame(columns=["stage", "budget"]), ranks={"retrained": (ranks, test)})
    assert "Average ranks over 7 seeds and their budgets (1 is best): learned 1.0, his 2.0, random 3.0." in text
    assert "with Holm's correction for all pairs, his, random rank behind learned." in text
    assert "Not tested against it: his" in text


def test_budgets_of_a_seed_are_no_further_blocks():
    """With three seeds, nine cells are three blocks: nothing is tested. And doubled budgets leave p as it is."""
    ranks, test = rank_methods(over_budgets(CLEAR, (4, 3, 2), seeds=3), "accuracy")["retrained"]
    assert (test.p, test.blocks) == (None, 3)
    assert test.reason == "3 methods and 3 seeds; the test needs at least 3 methods and 6 seeds"
    assert ranks["p_holm"].isna().all()
    table, _ = comparison({"a": 0.8, "b": 0.79, "c": 0.78}, seeds=6, examples=300)
    once, twice = rank_methods(table, "accuracy"), rank_methods(pd.concat([table, table.assign(budget=2)]), "accuracy")
    assert twice["retrained"][1] == once["retrained"][1]
    pd.testing.assert_frame_equal(twice["retrained"][0], once["retrained"][0])


def test_ranks_are_tested_at_each_stage_alone():
    """A method may be best post hoc and worst retrained."""
    turned = {"learned": 0.6, "his": 0.8, "random": 0.94}
    table = pd.concat([over_budgets(CLEAR, (4, 2), seeds=6), over_budgets(turned, (4, 2), seeds=6, stage="post hoc")])
    found = rank_methods(table, "accuracy")
    order = {stage: list(ranks["method"]) for stage, (ranks, _) in found.items()}
    assert order == {"retrained": ["learned", "his", "random"], "post hoc": ["random", "his", "learned"]}
    assert all(test.blocks == 6 for _, test in found.values())
    text = verdict(summarise(table, "accuracy"), pd.DataFrame(columns=["stage", "budget"]), ranks=found)
    parts = ["## Retrained", "learned 1.0, his 2.0", "## Post hoc", "random 1.0, his 2.0"]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)


def test_a_block_is_a_seed_with_all_that_is_compared():
    """A given mask has one budget and takes no blocks from the others; where it is one of two, what both have is tested."""
    table = over_budgets(CLEAR, (4, 2), seeds=6)
    given = comparison({"mask:file.json": 0.9}, budget=4, seeds=6)[0]
    ranks, test = rank_methods(pd.concat([table, given], ignore_index=True), "accuracy")["retrained"]
    assert (set(ranks["method"]), test.blocks) == (set(CLEAR) - {"dense"}, 6)
    alone = pd.concat([table[table["method"] == "his"], given], ignore_index=True)
    ranks, test = rank_methods(alone, "accuracy")["retrained"]
    assert (set(ranks["method"]), test.blocks) == ({"his", "mask:file.json"}, 6)
    lacking = table[~((table["seed"] == 3) & (table["budget"] == 2) & (table["method"] == "his"))]
    assert rank_methods(lacking, "accuracy")["retrained"][1].blocks == 5
    apart = table[table["seed"] == table["method"].map({"learned": 0, "his": 1})]
    ranks, test = rank_methods(apart, "accuracy")["retrained"]
    assert (set(ranks["method"]), test.reason) == ({"learned", "his"}, "no seed has all methods")
    assert rank_methods(table.iloc[:0], "accuracy") == {}


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([1, 5, 7]), st.integers(0, 1000))
def test_p_values_and_intervals_say_the_same(seeds, seed):
    a, b, targets = systems(seeds, 80, 0.08, np.random.default_rng(seed), spread=0.02)
    found = paired(a, b, targets, resamples=500, seed=seed)
    assert found.low <= found.difference + 0.1
    if found.p < 0.04:
        assert not found.low < 0 < found.high
    if found.p > 0.06:
        assert found.low <= 0 <= found.high


# -- the majority class --------------------------------------------------------------------------------------------


def test_the_majority_class_is_what_a_constant_answer_scores():
    targets = np.array([2, 2, 2, 0, 1])
    expected = {name: float(metric_values(np.full(5, 2), targets, name)) for name in ("accuracy", "f1", "matthews")}
    assert majority_class(targets) == expected
    assert expected["accuracy"] == 0.6
    assert expected["matthews"] == 0


@pytest.mark.parametrize(("majority", "warned"), [(None, False), (0.949, False), (0.9500000001, True), (0.96, True)])
def test_a_dense_model_that_has_learned_nothing_is_warned_of(majority, warned):
    table, predictions = comparison(dict.fromkeys(CLEAR, 0.90) | {"dense": 0.95})
    table.loc[table["method"] == "dense", "test_accuracy"] = 0.95
    tests = compare_methods(table, predictions, "accuracy", resamples=100)
    said = verdict(summarise(table, "accuracy"), tests, majority=majority)
    assert ("not above the majority class" in said) == warned
    if warned:
        assert f"would score {100 * majority:.1f}." in said
    trained = pd.concat([table, table.assign(stage="retrained from dense").replace({"test_accuracy": 0.95}, 0.99)])
    said = verdict(summarise(trained, "accuracy"), tests, majority=majority)
    assert ("not above the majority class" in said) == warned  # though another stage is


# -- metrics of which less is better -------------------------------------------------------------------------------


def falling(means, seeds, *, spread=0.05):
    """A comparison of perplexities, with the negative log likelihoods behind them."""
    random = np.random.default_rng(1)
    tokens, rows, predictions = np.full(50, 20), [], {}
    for seed in range(seeds):
        shared = random.normal(0, spread, 50)
        for method, mean in means.items():
            surprise = 20 * (np.log(mean) + shared + random.normal(0, spread / 50, 50))
            value = float(np.exp(surprise.sum() / tokens.sum()))
            key, budget = f"{method}{seed}", 8 if method == "dense" else 4
            where = {"seed": seed, "method": method, "stage": "retrained", "budget": budget, "experiment": key}
            costs = {"steps": 1, "seconds": 1.0, "peak_memory_mb": 1.0}
            rows.append(where | {"test_perplexity": value, "select_perplexity": value} | costs)
            predictions[key] = {"test_prediction": surprise, "test_target": tokens}
    return pd.DataFrame(rows), predictions


def said_of(means, seeds):
    table, predictions = falling(means, seeds)
    tests = compare_methods(table, predictions, "perplexity", lower_is_better=True, resamples=2000)
    ranks = rank_methods(table, "perplexity", lower_is_better=True)
    summary = summarise(table, "perplexity")
    return tests, ranks, verdict(summary, tests, main_metric="perplexity", lower_is_better=True, ranks=ranks)


@pytest.mark.parametrize("seeds", [1, 3, 6])
def test_the_lowest_perplexity_is_ahead_everywhere(seeds):
    """In tests, ranks and words; the differences are those of the numbers themselves."""
    tests, ranks, text = said_of({"dense": 10.0, "learned": 12.0, "his": 15.0, "random": 40.0}, seeds)
    pair = tests[(tests["method"] == "learned") & (tests["rival"] == "random")].iloc[0]
    assert (pair["ahead"], pair["behind"]) == (seeds, 0)
    assert pair["difference"] == pytest.approx(-28, abs=2)
    assert ranks["retrained"][0]["method"].tolist() == ["learned", "his", "random"]
    assert "test perplexity (lower is better)" in text
    value = "result" if seeds == 1 else "mean"
    assert f"learned has the best {value}, 12" in text
    assert re.search(rf"The best {value} is 2\.\d above the dense model's", text)
    if seeds > 1:
        assert "lowest mean on the selection split" in text
        assert re.search(r"learned, is 3\.\d below the best rival, his", text)
        assert "at or below every rival's at 1 of 1 budget retrained" in text
    if seeds == 1:
        assert re.search(r"For this one seed, significantly behind: his \(\+3\.\d\), random \(\+2[78]", text)
    elif seeds == 3:
        near, far = map(float, re.search(r"Behind in every seed: .* random \(\+2.*?, from \+(.*?) to \+(.*?)\)", text).groups())
        assert 27 < near < far < 29
    else:
        assert re.search(r"Significantly behind: his \(\+3", text)
        assert "learned wins." in text


# -- numbers, and one class of two ---------------------------------------------------------------------------------


def numbers_of_systems():
    random = np.random.default_rng(0)
    targets = np.round(random.uniform(0, 5, size=40), 1)
    return targets + random.normal(0, [[0.3], [1.0], [3.0]], size=(3, 40)), targets


def test_binary_f1_is_of_the_second_class():
    random = np.random.default_rng(0)
    targets = random.integers(2, size=50)
    predictions = np.where(random.random((3, 50)) < 0.6, targets, random.integers(2, size=(3, 50)))
    expected = [float(BinaryF1Score()(torch.tensor(row), torch.tensor(targets))) for row in predictions]
    np.testing.assert_allclose(metric_values(predictions, targets, "binary_f1"), expected, rtol=1e-6)
    assert metric_values(1 - predictions[0], 1 - targets, "binary_f1") != pytest.approx(expected[0])
    assert metric_values([0, 0], [0, 0], "binary_f1") == 0  # neither is nor was answered
    assert majority_class([0, 0, 1])["binary_f1"] == 0
    assert majority_class([0, 1, 1])["binary_f1"] == pytest.approx(0.8)
    assert "binary_f1" not in majority_class([0, 1, 2])


def test_the_bootstrap_agrees_with_mcnemar_on_many_examples():
    a, b, targets = systems(examples=2000, better=0.02)
    assert paired(a, b, targets).p == pytest.approx(mcnemar(a[0] == targets, b[0] == targets), abs=0.02)
