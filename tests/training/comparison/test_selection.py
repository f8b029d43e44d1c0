"""What methods decide, on experiments whose results are given."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gates.gating.budget import Budget
from gates.gating.schedule import NOT_CLOSED
from gates.search.sampled_masks import spread_ranks
from tests.training.runs import make_pruner
from training.comparison.cache import Experiment
from training.comparison.methods import LEARNED, Method
from training.comparison.run import best_refitted
from training.comparison.selection import MaskSelector
from training.config import RefitOptions, RestartSearch

CLOSING = {
    0.01: [1, 2, 3, 4, NOT_CLOSED, NOT_CLOSED, NOT_CLOSED, NOT_CLOSED],
    0.1: [NOT_CLOSED, 3, 2, 1, 8, 7, 6, 5],
    1.0: [8, 7, 6, 5, 4, 3, 2, 1],
}
"""When the gates of a tiny model closed, by the price."""
LOG_ALPHA = [0.1, -2.0, 3.0, 0.5, -0.5, 1.0, -1.0, 0.2]
SECONDS = {0.01: 1.0, 0.1: 10.0, 1.0: 100.0}


class GivenExperiments:
    """Experiments of given results; a mask is judged by ``quality``."""

    seed = 0

    def __init__(self, quality):
        self.pruner, self.quality, self.tried, self.searched = make_pruner(price=0.01), quality, [], []
        self.learned: list[tuple[int, float | None, str | None]] = []
        self.options = self.pruner.options

    def learn(self, changes, restart=0):
        self.learned.append((restart, changes.get("init_spread"), changes.get("init_score")))
        price = changes.get("price", 0.01)
        price = price["encoder"] if isinstance(price, dict) else price
        log_alpha = torch.tensor(LOG_ALPHA).roll(restart).tolist()
        found = {"log_alpha": log_alpha, "closing_step": CLOSING[price], "mask": [float(value > 0) for value in LOG_ALPHA]}
        cost = {"steps": 16, "seconds": SECONDS[price], "peak_memory_mb": 100 * price}
        return Experiment(f"price {price}", Path(), found | cost)

    def dense(self):
        return Experiment("dense", Path(), {})

    def freezes_weights(self, changes):
        return bool(replace(self.options, **changes).pipelined)

    def do(self, name, determined_by, make):
        cost = {"steps": 0, "seconds": 3.0, "peak_memory_mb": None}
        return Experiment(name, Path(), {"mask": [0.0] * 4 + [1.0] * 4, "ranking": LOG_ALPHA, **cost})

    def judge(self, masks, search):
        losses = [1 - self.quality(mask.tolist()) for mask in masks]
        self.searched.append(("judge", len(masks), search.rows))
        return Experiment("judged", Path(), {"losses": losses, "steps": 0, "seconds": 11.0, "peak_memory_mb": 50.0})

    def draw(self, mask, scores, budget, search, *, start, changes):
        return self._searched("draw", mask, scores, start.key)

    def swap(self, mask, budget, search, *, start, changes):
        return self._searched("swap", mask, None, start.key)

    def refit(self, mask, search, *, start, changes):
        self.searched.append(("refit", kept(mask), search.rows, start.key))
        cost = {"steps": 0, "seconds": 7.0, "peak_memory_mb": None}
        return Experiment(f"refitted {kept(mask)}", Path(), {"reached": self.quality(mask.tolist()), "loss": 0.0, **cost})

    def _searched(self, how, mask, scores, start):
        """Another mask: the same, turned by one place."""
        self.searched.append((how, kept(mask), scores, start))
        return Experiment(how, Path(), {"mask": mask.roll(1).tolist(), "steps": 0, "seconds": 5.0, "peak_memory_mb": 500.0})

    def post_hoc(self, mask, splits):
        assert splits == ("select",)
        self.tried.append(mask.tolist())
        quality = self.quality(mask.tolist())
        return Experiment("", Path(), {"select_accuracy": quality, "test_accuracy": -quality, "seconds": 0.5})


def kept(mask):
    return mask.nonzero().flatten().tolist()


def select(experiments, budget, prices):
    return MaskSelector(experiments, [4, 2], prices=prices).select(Method("lambda"), Budget(budget, {}))


def test_the_price_is_chosen_at_each_budget_on_the_selection_split_and_all_are_paid_for():
    experiments = GivenExperiments(lambda mask: mask[0] + 0.1 * mask[4])  # head 0 is kept at 0.1 and 1.0
    found = select(experiments, 2, [0.01, 0.1, 1.0])
    assert found.changes["budget"] is None
    assert found.start.key == "price 0.1"
    assert kept(found.mask) == [0, 4]
    assert found.changes["price"] == 0.1
    assert (found.cost.steps, found.cost.seconds, found.cost.peak_memory_mb) == (48, 111 + 3 * 0.5, 100)
    assert torch.equal(found.ranking.argsort(descending=True)[:2].sort().values, torch.tensor([0, 4]))
    experiments.quality = lambda mask: mask[7]
    assert select(experiments, 4, [0.01, 0.1, 1.0]).start.key == "price 0.01"


def test_kinds_without_a_budget_have_no_price():
    """They stay whole, and are to train as they will be used, as with every other method."""
    experiments, prices = GivenExperiments(lambda mask: 1.0), []
    experiments.learn = lambda changes, learn=experiments.learn: prices.append(changes["price"]) or learn({})
    selector = MaskSelector(experiments, [{"encoder": 4}], prices=[0.1, {"encoder": 1.0}])
    selector.select(Method("lambda"), Budget.parse({"encoder": 4}, {"encoder": 8}))
    MaskSelector(experiments, [{"encoder": 4}]).select(Method("lambda"), Budget.parse({"encoder": 4}, {"encoder": 8}))
    assert prices == [{"encoder": 0.1}, {"encoder": 1.0}, {"encoder": 0.01}]


def test_of_equal_prices_the_first_is_taken():
    assert select(GivenExperiments(lambda mask: 1.0), 2, [1.0, 0.1]).start.key == "price 1.0"


def test_a_given_mask_is_taken_as_it_is_at_its_own_budget(tmp_path):
    """Whatever budget is asked for; a search goes on from it, on the weights that the mask is for."""
    (tmp_path / "mask.json").write_text("[[0, 1, 0, 0], [1, 0, 0, 0]]")
    experiments = GivenExperiments(lambda mask: pytest.fail("tried"))
    selector = MaskSelector(experiments, [4, 2])
    found = selector.select(Method(f"mask:{tmp_path / 'mask.json'}"), Budget(4, {}))
    assert (kept(found.mask), kept(found.values)) == ([1, 4], [1, 4])
    assert (found.start.key, found.changes, found.ranking) == ("dense", {"pipelined": False}, None)
    assert (found.cost.steps, found.cost.seconds) == (0, 0.0)
    swapped = selector.select(Method.parse(f"mask:{tmp_path / 'mask.json'}+swap+distil"), Budget(4, {}))
    assert kept(swapped.mask) == [2, 5]
    assert experiments.searched == [("swap", [1, 4], None, "dense")]


def test_a_price_that_leaves_just_the_budget_open_has_its_own_mask():
    """Whatever closed last: those gates are open that it left so, of all kinds or of each."""
    own = [head for head, value in enumerate(LOG_ALPHA) if value > 0]
    experiments = GivenExperiments(lambda mask: 1.0)
    for budget in (len(own), {"encoder": len(own)}):
        selector = MaskSelector(experiments, [budget], prices=[0.01])
        assert kept(selector.select(Method("lambda"), selector.budgets[0]).mask) == own
    assert kept(select(experiments, 4, [0.01]).mask) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("method", "logits"),
    [("learned(pipelined=false)", True), ("dsp", True), ("straight-through", True), ("linear-l1", False), ("lambda", False)],
)
def test_draws_are_around_log_alpha_where_it_is_a_logit_and_else_around_ranks(method, logits):
    experiments = GivenExperiments(lambda mask: 1.0)
    selector = MaskSelector(experiments, [4, 2])
    plain, found = (selector.select(Method.parse(name), Budget(2, {})) for name in (method, f"{method}+draws"))
    ((how, start, scores, weights),) = experiments.searched
    assert (how, start, weights) == ("draw", kept(plain.mask), plain.start.key)
    torch.testing.assert_close(scores, torch.tensor(LOG_ALPHA) if logits else spread_ranks(plain.ranking))
    assert torch.equal(found.mask, plain.mask.roll(1))
    assert found.ranking is None
    assert (found.cost.steps, found.cost.seconds, found.cost.peak_memory_mb) == (
        plain.cost.steps,
        plain.cost.seconds + 5.0,
        500.0,
    )


def test_swaps_start_from_the_best_draw():
    experiments = GivenExperiments(lambda mask: 1.0)
    method = Method.parse("learned+swap+draws")
    assert method.name == "learned+draws+swap"
    assert method.is_ours
    found = MaskSelector(experiments, [4, 2]).select(method, Budget(2, {}))
    (_, first, *_), (how, second, *_) = experiments.searched
    assert first == [2, 5]
    assert (how, second) == ("swap", [3, 6])
    assert kept(found.mask) == [4, 7]


def test_searches_for_a_mask_run_on_the_weights_that_it_is_for():
    """Those of the learned model where training goes on from them, and the dense ones where they are evaluated as they are or
    have rested while gates were learned."""
    for name, used in (("learned(pipelined=false)", "price 0.01"), ("learned", "dense")):
        experiments = GivenExperiments(lambda mask: 1.0)
        selector, method = MaskSelector(experiments, [4, 2]), Method.parse(f"{name}+draws+swap")
        for post_hoc in (False, True):
            selector.select(method, Budget(2, {}), post_hoc=post_hoc)
        searched = [(how, start) for how, _, _, start in experiments.searched]
        assert searched == [("draw", used), ("swap", used), ("draw", "dense"), ("swap", "dense")]


@pytest.mark.parametrize("name", ["learned", "dsp", "linear-l1", "lambda"])
def test_a_runs_own_method_has_the_options_of_the_run_and_others_those_of_their_names(name):
    experiments, changes = GivenExperiments(lambda mask: 1.0), {}
    experiments.learn = lambda made, restart=0, learn=experiments.learn: changes.update(made) or learn({})
    own = LEARNED[name].options
    MaskSelector(experiments, [4, 2], as_configured=name).select(Method(name), Budget(4, {}))
    assert changes.keys() <= {"budget", "price"}
    changes.clear()
    MaskSelector(experiments, [4, 2], as_configured="learned(pipelined=false)").select(Method(name), Budget(4, {}))
    assert own.items() <= changes.items()
    assert changes.get("budget") == {"learned": 4, "dsp": 4, "linear-l1": 2, "lambda": None}[name]


@pytest.mark.parametrize("post_hoc", [True, False])
@pytest.mark.parametrize("name", ["learned+draws", "learned(pipelined=false)"])
def test_weights_are_refitted_to_the_final_mask(name, post_hoc):
    """After any search, on the dense weights where the mask is used on them."""
    experiments = GivenExperiments(lambda mask: 1.0)
    selector = MaskSelector(experiments, [4, 2], refits=RefitOptions(rows=3))
    plain = selector.select(Method.parse(name), Budget(4, {}), post_hoc=post_hoc)
    found = selector.select(Method.parse(f"{name}+refit"), Budget(4, {}), post_hoc=post_hoc)
    weights = "dense" if post_hoc else plain.start.key
    assert experiments.searched[-1] == ("refit", kept(plain.mask), 3, weights)
    assert (found.refit.key, plain.refit) == (f"refitted {kept(plain.mask)}", None)
    assert torch.equal(found.mask, plain.mask)
    assert found.start.key == plain.start.key
    assert found.cost.seconds == plain.cost.seconds + 7


@pytest.mark.parametrize("post_hoc", [True, False])
@pytest.mark.parametrize("helps", [True, False])
def test_swaps_are_taken_before_a_refit_only_if_they_help_behind_it(helps, post_hoc):
    """Both refits are paid for, of the same weights."""
    before, after = [2, 3, 5, 7], [0, 3, 4, 6]
    experiments = GivenExperiments(lambda mask: float(kept(torch.tensor(mask)) == (after if helps else before)))
    selector = MaskSelector(experiments, [4, 2], refits=RefitOptions(rows=3))
    swapped = selector.select(Method.parse("learned+swap"), Budget(4, {}), post_hoc=post_hoc)
    assert kept(swapped.mask) == after
    found = selector.select(Method.parse("learned+swap+refit"), Budget(4, {}), post_hoc=post_hoc)
    weights = "dense" if post_hoc else found.start.key
    assert kept(found.mask) == kept(found.values) == (after if helps else before)
    assert found.ranking is None
    assert experiments.searched[2:4] == [("refit", before, 3, weights), ("refit", after, 3, weights)]
    assert found.cost.seconds == swapped.cost.seconds + 2 * 7


def test_a_refit_that_is_judged_twice_is_paid_for_once():
    """Swaps may come back to a mask that a restart has found."""
    first, second = [2, 3, 5, 7], [0, 3, 4, 6]
    experiments = GivenExperiments(lambda mask: float(kept(torch.tensor(mask)) == first))
    selector = MaskSelector(experiments, [4, 2], restarts=RestartSearch(count=2))
    found = selector.select(Method.parse("learned+restarts+swap+refit"), Budget(4, {}), post_hoc=True)
    assert kept(found.mask) == first
    assert experiments.searched[3] == ("swap", first, None, "dense")
    assert found.refits_paid == {tuple(float(gate in mask) for gate in range(8)) for mask in (first, second, OF_OBS)}
    assert found.cost.seconds == 1.0 + 1.0 + 3.0 + 5.0 + 3 * 7.0


OF_OBS = [4, 5, 6, 7]
"""What the score behind the second start keeps in :class:`GivenExperiments`."""


@pytest.mark.parametrize("mask", [[2, 3, 5, 7], [0, 3, 4, 6], OF_OBS])
def test_of_several_times_of_learning_the_mask_of_lowest_loss_is_taken_and_all_are_paid_for(mask):
    """Gates start equal, apart, and so on, each time with noise of their own; the score that sets them apart is tried too."""
    experiments = GivenExperiments(lambda found: float(kept(torch.tensor(found)) == mask))
    selector = MaskSelector(experiments, [4, 2], restarts=RestartSearch(count=2, rows=6))
    found = selector.select(Method.parse("learned+restarts"), Budget(4, {}))
    assert kept(found.mask) == mask
    assert found.ranking is None
    assert experiments.learned[-2:] == [(0, 0.0, None), (1, 1.0, "obs")]
    assert experiments.searched == [("judge", 3, 6)]
    assert (found.cost.steps, found.cost.seconds, found.cost.peak_memory_mb) == (32, 1.0 + 1.0 + 3.0 + 11.0, 50.0)


class HeldExperiments(GivenExperiments):
    """Gates were held to 4 heads: of 4 that are closed, 3 had closed by themselves the first time, and 2 the second."""

    def learn(self, changes, restart=0):
        found = super().learn(changes, restart)
        log_alpha = torch.tensor(found.result["log_alpha"])
        mask = (log_alpha >= log_alpha.sort().values[4]).float().tolist()
        told = {"mask": mask, "closed": 4, "closed_by_gates": 3 - restart, "price": [0.1]}
        return replace(found, result={**found.result, **told})


@pytest.mark.parametrize(("mask", "share"), [([2, 3, 5, 7], 3 / 4), ([0, 3, 4, 6], 2 / 4), (OF_OBS, None)])
def test_how_many_heads_gates_closed_is_told_of_the_gates_whose_mask_is_taken(mask, share):
    """Of their own budget; a score closes nothing by itself."""
    experiments = HeldExperiments(lambda found: float(kept(torch.tensor(found)) == mask))
    selector = MaskSelector(experiments, [4, 2], restarts=RestartSearch(count=2))
    assert selector.select(Method.parse("learned+restarts"), Budget(4, {})).closed_by_gates == share
    assert selector.select(Method.parse("learned+restarts+swap"), Budget(4, {})).closed_by_gates == share
    assert selector.select(Method("learned"), Budget(4, {})).closed_by_gates == 3 / 4
    assert selector.select(Method("learned"), Budget(2, {})).closed_by_gates is None  # these gates were held to 4
    assert selector.select(Method("his"), Budget(4, {})).closed_by_gates is None
    given = GivenExperiments(lambda found: 1.0)  # a price that is given holds gates to no budget
    assert MaskSelector(given, [4, 2]).select(Method("learned"), Budget(4, {})).closed_by_gates is None


@pytest.mark.parametrize("mask", [[2, 3, 5, 7], [0, 3, 4, 6], OF_OBS])
def test_behind_refits_the_mask_of_the_best_refit_is_taken_and_each_refit_is_paid_for_once(mask):
    """By the selection split; the refit of the mask that is taken is the method's own."""
    experiments, refits = GivenExperiments(lambda found: float(kept(torch.tensor(found)) == mask)), RefitOptions(rows=3)
    selector = MaskSelector(experiments, [4, 2], restarts=RestartSearch(count=2, rows=6), refits=refits)
    found = selector.select(Method.parse("learned+restarts+refit"), Budget(4, {}))
    tried = [("refit", one, 3, "dense") for one in ([2, 3, 5, 7], [0, 3, 4, 6], OF_OBS)]
    assert experiments.searched[:3] == tried
    assert kept(found.mask) == mask
    assert found.refit.key == f"refitted {mask}"
    assert found.cost.seconds == 1.0 + 1.0 + 3.0 + 3 * 7.0


@pytest.mark.parametrize(
    ("reached", "losses", "expected"),
    [
        ([0.7, 0.8, 0.6], [0.1, 0.9, 0.1], ["obs+refit", "learned+refit", "his+refit"]),
        ([0.7, 0.7, 0.7], [0.5, 0.4, 0.3], ["his+refit", "obs+refit", "learned+refit"]),  # a small split has ties
        ([0.7, 0.7, 0.7], [0.5, 0.5, 0.5], ["learned+refit", "obs+refit", "his+refit"]),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_best_refit_is_that_of_the_metric_and_then_of_the_loss(reached, losses, expected, sign):
    experiments = GivenExperiments(quality=lambda mask: 0.5)
    experiments.pruner.task.lower_is_better = sign < 0
    methods = [Method.parse(name) for name in ("learned+refit", "obs+refit", "his+refit")]
    results = {
        name: {"reached": sign * value, "loss": loss} for name, value, loss in zip(methods, reached, losses, strict=True)
    }
    selections = {method: SimpleNamespace(refit=Experiment(method.name, Path(), results[method])) for method in methods}
    best, found = best_refitted(MaskSelector(experiments, [4]), selections)
    assert best.name == expected[0]
    assert found == {name: results[Method.parse(name)]["reached"] for name in expected}
    assert list(found) == expected
