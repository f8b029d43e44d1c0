"""Plan a comparison and do it: every method at every budget, each with its stages, on the dense model of one seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from gates.errors import GateError
from gates.export.cost import cache_bytes, generates
from gates.gating.budget import Budget
from gates.surgery.remove import why_not_removable
from training.comparison.cache import Experiment, ExperimentCache
from training.comparison.experiments import GATES_OVER_TIME, Experiments
from training.comparison.methods import REFITTED_RIVALS, RENAMED, RIVALS, Method, check_given_masks, is_method
from training.comparison.selection import KNOWN_MASK, MaskSelector, Selection
from training.comparison.tables import Results, Row
from training.config import BudgetOption, DistilWeights, EndOfRun, PrunerOptions, Setup
from training.config.comparison import (
    AT_TOTAL_COST,
    FROM_DENSE,
    FROM_SCRATCH,
    POST_HOC,
    RETRAINED,
    WITH_CONSTANTS,
    WITH_MEANS,
    WITH_UNIFORM,
    is_of_dense,
    is_post_hoc,
)
from training.runs import progress
from training.runs.cost import Cost
from training.runs.stored import read_table
from training.scoring.passes import Replacement
from training.setup import open_data, with_min_steps
from training.stats.numbers import CACHE, CLOSED, counted

DENSE = Method("dense")


@dataclass(frozen=True)
class PlanEntry:
    """One method at one budget.

    Args:
        budget: The budget; None for the dense model and given masks, which have a number of heads of their own.
    """

    method: Method
    budget: Budget | None
    stages: tuple[str, ...]


def plan_of_comparison(methods: Sequence[Method], budgets: Sequence[Budget], stages: Sequence[str]) -> Iterator[PlanEntry]:
    """Yield the plan of each seed: the dense model, then every method at every budget, then each given mask.

    ``from scratch`` is run for the dense model and for learned or given masks, as by Voita et al. 2019. A refit assumes that
    closed heads are zero, so methods with ``+refit`` skip the stages that replace closed heads by something else.
    """
    controls = [DENSE, *(method for method in methods if method.base == "dense" and method != DENSE)]
    given = [method for method in methods if method.is_given]
    everything: list[tuple[Method, Budget | None]] = [(control, None) for control in controls]
    everything += [(method, budget) for budget in budgets for method in methods if method not in [*controls, *given]]
    everything += [(method, None) for method in given]
    for method, budget in everything:
        has_scratch = method.is_learned or method.is_given or method == DENSE
        own = [stage for stage in stages if stage != FROM_SCRATCH or has_scratch]
        if "refit" in method.modifiers:
            own = [stage for stage in own if stage in (POST_HOC, RETRAINED, FROM_DENSE, AT_TOTAL_COST)]
        yield PlanEntry(method, budget, tuple(own))


def check_rows(methods: Sequence[Method], stages: Sequence[str]) -> None:
    """Raise :class:`GateError` if methods are compared and none has a row at any stage."""
    pruned = [one for one in plan_of_comparison(methods, [Budget(1, {})], stages) if one.method.base != "dense"]
    if pruned and not any(one.stages for one in pruned):
        raise GateError(
            f"--stages has {', '.join(map(repr, stages))} alone, at which {', '.join(one.method.name for one in pruned)} "
            f"would have no row, because scores are not trained from scratch and a refit replaces no heads; add {POST_HOC!r}"
        )


def training_stage(options: PrunerOptions) -> str | None:
    """Return the stage of a run that trains weights with its heads; None if it trains none.

    A refit starts from the dense model, so all heads get equally long training. Without a refit, or if weights train together
    with the gates, a run is one training through all phases.
    """
    if not options.trains_with_mask:
        return None
    return FROM_DENSE if options.refits and options.pipelined else RETRAINED


def plan_of_run(
    own: Method,
    budget: Budget | None,
    end: EndOfRun,
    kept: Method | None = None,
    *,
    tried: Sequence[Method] = (),
    stage: str | None = None,
) -> Iterator[PlanEntry]:
    """Yield the comparison of a run: the dense model, every rival, and the user's own scores and masks to retrain.

    All are compared at the budget of the run.

    Args:
        budget: The run's budget. None if it is not needed yet.
        kept: The method whose heads the run keeps. Default: the run's method.
        tried: The methods that it chose from.
        stage: The stage that trains weights with a mask; see :func:`training_stage`. None if the run has none.
    """
    kept = kept or own
    named = [*(end.retrained or []), *end.from_scratch]
    outside = [outside_run(name, own) for name in dict.fromkeys(named) if ":" in name]
    refitted = [Method(own.base), *map(Method.parse, REFITTED_RIVALS)] if "refit" in own.modifiers else []
    rivals = [*refitted, *map(Method, RIVALS), *outside] if own != DENSE and end.compare != "none" else []
    known = {method.name: method for method in (DENSE, own, *rivals)} | {own.base: own}
    if own == DENSE:  # which is compared with nothing, whatever a configuration for other runs names
        for name in named:
            Method.parse(name)  # raises
    else:
        check_names(named, known if rivals else [*known, *RIVALS, *REFITTED_RIVALS, *(method.name for method in outside)])
    retrained = set(known) if end.retrained is None else set(end.retrained)
    for method in dict.fromkeys([DENSE, kept, own, *tried, *rivals]):
        stages = []
        if end.compare != "none" or method in (DENSE, own, kept, *tried):
            stages.append(POST_HOC)
        if own != DENSE and stage is not None and (method == kept or (end.compare == "full" and method.name in retrained)):
            stages.append(stage)
        if end.compare == "full" and {method.name, own.base if method == own else method.name} & set(end.from_scratch):
            stages.append(FROM_SCRATCH)
        if stages:
            yield PlanEntry(method, None if method.base == "dense" else budget, tuple(stages))


def outside_run(name: str, own: Method) -> Method:
    """Return the user's own score or mask of a name."""
    method = Method.parse(name)
    if method.modifiers:
        raise GateError(f"{name!r} has a modifier, which only the methods of a comparison have; give {method.base!r}")
    if method.is_given and own.is_learned and own.learned.decides == "price":
        raise GateError(
            f"{name!r} has its own number of heads, but a run with a price ends with a number that is not known before; give "
            "--model.budget, or compare the mask by the command compare"
        )
    return method


def check_names(names: Sequence[str], known: Sequence[str] | Mapping[str, Any]) -> None:
    """Raise :class:`GateError` for the first name that is no method of a run."""
    for name in names:
        if name not in known:
            if name in RENAMED:
                raise GateError(f"the method {name!r} has a new name; use {RENAMED[name]}")
            what = f"{name!r} is a method of comparisons, not of this run" if is_method(name) else f"unknown method {name!r}"
            raise GateError(f"{what}; expected some of {', '.join(known)} in --retrained and --from_scratch, or [] for none")


def uses_of(plan: Sequence[PlanEntry]) -> tuple[bool, ...]:
    """Return the values of ``post_hoc`` that the plan needs in :meth:`MaskSelector.select`, False before True."""
    return tuple(sorted({is_of_dense(stage) for entry in plan for stage in entry.stages}))


def run_seed(
    experiments: Experiments,
    selector: MaskSelector,
    plan: Sequence[PlanEntry],
    results: Results,
    shown: progress.Stage,
) -> Iterator[Row]:
    """Yield the rows of one seed, as planned, and put masks, rankings and gates over time into the results.

    Args:
        shown: The stage to show them in; each row is a step of it.
    """
    check_given_masks([entry.method for entry in plan], experiments.pruner.gates, selector.budgets)
    uses = uses_of(plan)
    for entry in plan:
        method = entry.method
        named = method.name if entry.budget is None else f"{method.name} at {counted(entry.budget.total, 'head')}"
        shown.work_on(named)
        selected = {post_hoc: selector.select(method, entry.budget, post_hoc=post_hoc) for post_hoc in uses}
        selection = selected[uses[0]]
        # Within a time, methods keep different numbers of heads. The largest number that fits identifies the budget.
        in_time = entry.budget if entry.budget is not None and entry.budget.time is not None else None
        total = int(selection.mask.sum()) if in_time is None else in_time.total
        masks = {"mask": selection.mask.int().tolist()}
        if not torch.equal(selected[uses[-1]].mask, selection.mask):  # a search found another one for the dense model's weights
            masks["post_hoc_mask"] = selected[uses[-1]].mask.int().tolist()
        results.masks.append({"seed": experiments.seed, "method": method.name, "budget": total, **masks})
        if selection.ranking is not None:
            results.rankings[total, method.name, experiments.seed] = selection.ranking
        if method.is_learned:
            course = read_table(selection.start.path / GATES_OVER_TIME)
            whose = pd.DataFrame({"seed": experiments.seed, "method": method.name, "budget": total}, index=course.index)
            results.gates.append(pd.concat([whose, course], axis=1))
        for name in entry.stages:
            shown.work_on(f"{named}, {name}")
            used = selected[is_of_dense(name)]
            found = RUN_STAGE[name](experiments, used)
            yield row_of(experiments, method, name, used, found, budget=total)
            shown.advance()


def curve_of_run(
    experiments: Experiments, selector: MaskSelector, own: Method, fractions: Sequence[float], results: Results
) -> Iterator[Row]:
    """Yield the post hoc quality of every ranking of a run at other budgets, on the selection split.

    Args:
        own: The run's method. Its ranking is that of its gates, before any search.
        fractions: The budgets as fractions of all heads, or of each pruned kind if the run has a budget per kind.
    """
    if not fractions:
        return
    budget, seed = selector.smallest, experiments.seed
    if own == DENSE:  # nothing was compared so far
        for name in RIVALS:
            ranking = selector.select(Method(name), selector.smallest).ranking
            if ranking is not None:
                results.rankings[budget.total, name, seed] = ranking
    # A method with a modifier has the ranking of its base.
    rankings = {method: ranking for (_, method, _), ranking in results.rankings.items() if not Method.parse(method).modifiers}
    if own != DENSE:
        learned = selector.select(Method(own.base), selector.smallest).ranking
        assert learned is not None
        rankings = {own.base: learned, **rankings}
    points = [(curve_budget(budget, fraction, selector.sizes), method) for fraction in fractions for method in rankings]
    with progress.stage("quality by budget", len(points)) as shown:
        for at, method in points:
            shown.work_on(f"{method} at {counted(at.total, 'head')}")
            mask = experiments.pruner.gates.mask_of(rankings[method], at)
            found = experiments.post_hoc(mask, splits=("select",))
            selection = Selection(mask, mask, experiments.dense(), {}, rankings[method])
            yield row_of(experiments, Method(method), POST_HOC, selection, found, budget=int(mask.sum()))
            shown.advance()


def curve_budget(budget: Budget, fraction: float, sizes: Mapping[str, int]) -> Budget:
    """Return the budget of a point of the curve. At least one head is kept.

    Args:
        budget: The budget of the run. With a budget per kind, the fraction is of each pruned kind, and the others stay whole.
    """
    if not budget.per_kind:
        return Budget(max(1, round(fraction * sum(sizes.values()))), {})
    return Budget.parse({kind: max(1, round(fraction * sizes[kind])) for kind in budget.pruned(sizes)}, sizes)


# The stages by name: functions that evaluate a selection, most after some training.


def post_hoc(experiments: Experiments, selection: Selection, *, replacement: Replacement = "zero") -> Experiment:
    """Evaluate the dense model with the mask. A replacement of closed heads is for masks without a refit."""
    return experiments.post_hoc(selection.values, start=selection.refit, replacement=replacement)


def retrained(experiments: Experiments, selection: Selection, *, keeps_weights: bool = False) -> Experiment:
    """Train on from the weights with which the mask was found.

    A run without a retrain phase that freezes its weights while gates are learned trains no weights, for no method.
    """
    start, changes, options = selection.refit or selection.start, selection.changes, experiments.options
    trains = options.trains_with_mask or selection.start.key != experiments.dense().key
    return experiments.retrain(
        selection.values, start=start, changes=changes, steps=None if trains else 0, keeps_weights=keeps_weights
    )


def retrained_from_dense(experiments: Experiments, selection: Selection, *, keeps_weights: bool = False) -> Experiment:
    """Retrain from the dense weights, refitted if the method says so, for as many steps as a known mask gets.

    The steps that trained the gates found the mask and count for nothing else, like the passes of a score.
    """
    distil = {name: value for name, value in selection.changes.items() if name in DistilWeights().changes}
    start, changes = selection.refit or experiments.dense(), {**KNOWN_MASK, **distil}
    return experiments.retrain(selection.values, start=start, changes=changes, keeps_weights=keeps_weights)


def retrained_at_total_cost(experiments: Experiments, selection: Selection) -> Experiment:
    """Retrain for the steps that are left after the passes that found the mask are paid for.

    Selection and retraining together cost what retraining the dense model costs, to within half a step of equally large
    batches. The passes of a teacher are paid for too. If no step is left, the mask is evaluated with the weights it was found
    with.
    """
    dense, distils = experiments.dense(), replace(experiments.options, **selection.changes).distils
    whole = experiments.retrain(torch.ones_like(selection.mask), start=dense, changes=KNOWN_MASK)
    cost, steps = Cost.of(whole.result), whole.result["steps"]
    teacher = cost.backward_examples if distils and not experiments.options.distils else 0.0
    left = round((cost.passes - selection.cost.passes) / (cost.passes + teacher) * steps)
    start, changes = selection.refit or selection.start, selection.changes
    if left < 1:
        return experiments.post_hoc(selection.values, start=start, changes=changes)
    learned = selection.start.key != dense.key  # which has its prune phase behind it
    all_left = steps - (selection.start.result["steps"] if learned else 0)
    return experiments.retrain(selection.values, start=start, changes=changes, steps=left if left < all_left else None)


def from_scratch(experiments: Experiments, selection: Selection) -> Experiment:
    """Train new weights with the mask."""
    return experiments.from_scratch(selection.mask)


RUN_STAGE: dict[str, Callable[[Experiments, Selection], Experiment]] = {
    POST_HOC: post_hoc,
    WITH_MEANS: partial(post_hoc, replacement="mean"),
    WITH_CONSTANTS: partial(post_hoc, replacement="constants"),
    WITH_UNIFORM: partial(post_hoc, replacement="uniform"),
    RETRAINED: retrained,
    FROM_DENSE: retrained_from_dense,
    AT_TOTAL_COST: retrained_at_total_cost,
    FROM_SCRATCH: from_scratch,
}


def row_of(
    experiments: Experiments, method: Method, stage: str, selection: Selection, found: Experiment, *, budget: int
) -> Row:
    """Return the row of an evaluated selection."""
    pruner, described = experiments.pruner, dict[str, Any]()
    if generates(pruner.backbone) and not why_not_removable(pruner.gates.sites):
        described[CACHE] = cache_bytes(pruner.gates.sites, pruner.gates.to_heads(selection.mask))
    if selection.closed_by_gates is not None:
        described[CLOSED] = round(selection.closed_by_gates, 4)
    return Row(
        seed=experiments.seed,
        method=method.name,
        stage=stage,
        budget=budget,
        heads=pruner.gates.open_heads(selection.mask),
        described=described,
        metrics={name: value for name, value in found.result.items() if name.startswith(("select_", "test_"))},
        cost=cost_of(found, stage, selection),
        selection=selection,
        experiment=found,
    )


def cost_of(found: Experiment, stage: str, selection: Selection) -> dict[str, Any]:
    """Return the cost of finding the mask and of retraining, and the examples of the former alone. Evaluation is free."""
    trained = not is_post_hoc(stage) and found.result["steps"] > 0
    of_mask = selection.cost.as_row()
    whole = selection.cost.then(Cost.of(found.result)).as_row() if trained else of_mask
    return whole | {f"selection_{name}": of_mask[name] for name in ("forward_examples", "backward_examples")}


# Budgets of a comparison against the model that is pruned.


def check_budgets(options: Sequence[BudgetOption], budgets: Sequence[Budget], heads: int) -> None:
    """Raise an error for two budgets of equally many heads, or one of none or of all."""
    totals = [budget.total for budget in budgets]
    for index, total in enumerate(totals):
        if total in totals[:index]:
            same = f"{options[totals.index(total)]} and {options[index]}"
            raise GateError(
                f"--budgets has {same}, which both keep {total} heads; remove one of them, or compare them in two commands"
            )
        if total in (0, heads):
            raise GateError(f"--budgets has {options[index]!r}, which is {total} heads; nothing can be compared there")


# A comparison, in one process or on a cluster.


@dataclass(frozen=True)
class Comparison:
    """Hold the options of a comparison.

    Args:
        searches: The further options of :class:`MaskSelector`.
    """

    setup: Setup
    methods: Sequence[Method]
    budgets: Sequence[BudgetOption]
    seeds: Sequence[int]
    stages: Sequence[str]
    experiments: Path
    searches: Mapping[str, Any]

    def plan(self, budgets: Sequence[Budget]) -> list[PlanEntry]:
        """Return the plan of each seed, in the order of the tables."""
        return list(plan_of_comparison(self.methods, budgets, self.stages))

    def of_seed(self, seed: int) -> tuple[Experiments, MaskSelector]:
        """Return the experiments of a seed, and the selector of their masks."""
        setup = self.setup.with_seed(seed)
        data = open_data(setup)
        experiments = Experiments(with_min_steps(setup, data), data, cache=ExperimentCache(self.experiments))
        selector = MaskSelector(experiments, self.budgets, **self.searches)
        check_budgets(self.budgets, selector.budgets, experiments.pruner.gates.size)
        pruner = experiments.pruner
        for budget in selector.budgets:  # raises where the minimum per layer does not fit
            pruner.steering.mask_within(pruner.gates.log_alpha.detach(), budget)
        return experiments, selector
