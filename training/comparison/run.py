"""One run: set up, train, compare, write the run directory. Reads top to bottom."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger

from gates.attention.sites import site_labels
from gates.errors import GateError
from gates.export.card import ModelCard, update_results
from gates.export.checkpoint import Form, copy_in_form, save_pruned
from gates.export.cost import Cost, measure_cost
from gates.gating.budget import Budget
from gates.surgery.masks import save_mask
from gates.surgery.remove import why_not_removable
from training.cli.command_line import CommandLine
from training.cli.exit import advised, stdout
from training.comparison.cache import Experiment, ExperimentCache, run_inputs
from training.comparison.estimate import estimate
from training.comparison.experiments import Experiments, read_weights, weights_of
from training.comparison.latency import achieved, keep_table, timed
from training.comparison.methods import CHEAP_RIVALS, Method, check_given_masks, file_name, mask_found_by, own_method
from training.comparison.plan import (
    PlanEntry,
    curve_of_run,
    plan_of_run,
    retrained,
    retrained_from_dense,
    run_seed,
    training_stage,
)
from training.comparison.quality import fewest_heads, measure_of
from training.comparison.selection import MaskSelector, Selection
from training.comparison.tables import Results, against_dense, against_second, save_translations, score_columns, write_tables
from training.comparison.terminal import show_run
from training.comparison.wandb import send_run
from training.config import PrunerOptions, Setup, SwapSearch
from training.config.comparison import FROM_DENSE
from training.config.data_base import MORE
from training.config.model import AUTO
from training.data.base import TaskData
from training.plotting import gate_heat_map, heads_within_loss, mask_agreement, quality_by_budget
from training.pruner.checkpoints import IDENTITY, KEPT, check_checkpoint, read_checkpoint, write_checkpoint
from training.pruner.module import HeadPruner
from training.report.captions import card_notes
from training.runs import processes, progress
from training.runs.directory import BUDGET_SEARCH, RunDirectory, is_finished, locked_directory, mark_finished, unmark_finished
from training.runs.resume import check_same_inputs, check_same_options, checkpoint_of, identity_of, note_inputs
from training.runs.tracking import lost_in_wandb, make_logger, reachable, versions
from training.scoring.refits import RefitError
from training.setup import make_pruner, open_data, quiet_libraries, start_launched, with_min_steps
from training.tasks import base_model_name

# The training of a run: one method, one budget and one seed of a comparison, with loggers.


@dataclass(frozen=True)
class Kept:
    """The heads that a run keeps.

    Args:
        own: The run's own method; without ``+refit`` if this model cannot be refitted.
        method: The method that chose them: the run's own, or a rival that does better on the selection split.
        selection: The heads, and where their weights come from.
        reached: The main metric on the selection split by method, each refitted; empty if nothing was compared.
    """

    own: Method
    method: Method
    selection: Selection
    reached: dict[str, float]


def with_found_budget(experiments: Experiments, run: RunDirectory) -> Experiments:
    """Return the experiments of a run with the budget ``auto``, with the fewest heads that keep the dense model's quality.

    Their own budget is a placeholder. The search is kept in ``budget.json``.
    """
    options = experiments.setup.model
    method = Method.parse("obs+refit") if options.refits else Method("obs")
    try:
        heads, points = fewest_heads(experiments, method, options.max_loss)
    except RefitError as error:
        progress.notice(f"the budget is searched without a refit: {error}")
        method = Method("obs")
        heads, points = fewest_heads(experiments, method, options.max_loss)
    if processes.is_first():
        found = {
            "budget": heads,
            "max_loss": options.max_loss,
            "measure": measure_of(experiments.pruner.task),
            "method": method.name,
            "points": [asdict(one) for one in points],
        }
        run.write_json(BUDGET_SEARCH, found)
    return Experiments(experiments.setup.with_budget(heads), experiments.data, cache=experiments.cache)


def choose_heads(selector: MaskSelector, own: Method, budget: Budget | None, options: PrunerOptions, *, post_hoc: bool) -> Kept:
    """Return the heads to keep: those of the run's method or, with a refit, the best of it and of cheap rivals.

    Args:
        post_hoc: Whether they are for the dense model; see :meth:`MaskSelector.select`.
    """
    select = partial(selector.select, budget=budget, post_hoc=post_hoc)
    if "refit" not in own.modifiers:
        return Kept(own, own, select(own), {})
    assert budget is not None
    try:
        if options.keep == "best":
            selections = {method: select(method) for method in (own, *map(Method.parse, CHEAP_RIVALS))}
            best, reached = best_refitted(selector, selections)
            return Kept(own, best, selections[best], reached)
        return Kept(own, own, select(own), {})
    except RefitError as error:  # such as weights that two projections share
        progress.notice(f"the run continues without a refit: {error}")
        own = replace(own, modifiers=own.modifiers - {"refit"})
        return Kept(own, own, select(own), {})


def best_refitted(selector: MaskSelector, selections: Mapping[Method, Selection]) -> tuple[Method, dict[str, float]]:
    """Return the method with ``+refit`` whose refit is best on the selection split, and all metrics, the best first."""
    results = {method: one.refit.result for method, one in selections.items() if one.refit is not None}
    best_first = sorted(results, key=lambda method: selector.goodness(results[method]), reverse=True)
    return best_first[0], {method.name: results[method]["reached"] for method in best_first}


def budget_of(experiments: Experiments, own: Method) -> Budget:
    """Return the budget of the run: the given one, the heads that a price leaves open, or all heads of a dense model."""
    steering, options = experiments.pruner.steering, experiments.options
    if steering.budget is not None:
        return steering.budget
    if own.base == "dense":
        return steering.budget_of(torch.ones(experiments.pruner.gates.size))
    return steering.budget_of(torch.tensor(experiments.learn({"price": options.price}).result["mask"]))


def trained(experiments: Experiments, kept: Kept, stage: str | None) -> Experiment:
    """Return the experiment with the final weights of a run; a run without pruning has those of the dense model."""
    if kept.method.base == "dense":
        return kept.selection.start
    train = retrained_from_dense if stage == FROM_DENSE else retrained
    return train(experiments, kept.selection, keeps_weights=True)


def keep_checkpoints(
    run: RunDirectory, experiments: Experiments, final: Experiment, kept: Kept, learned: Experiment
) -> HeadPruner:
    """Write ``dense.ckpt`` and ``final.ckpt``, and return the module in its final state.

    Args:
        final: The experiment whose weights the run ends with.
        learned: The experiment that learned the gates; their log_alpha stays in ``final.ckpt``, whichever heads are kept.
    """
    pruner = experiments.with_weights(final, {})
    gates = {name: value for name, value in read_weights(weights_of(learned)).items() if name.startswith("gates.")}
    pruner.load_state_dict(gates, strict=False)
    pruner.gates.set_mask_(kept.selection.values.to(pruner.device))
    dense = experiments.dense()  # by all processes together
    if processes.is_first():
        _link(weights_of(dense), run.checkpoint("dense"))
        content = read_checkpoint(weights_of(final))
        for part in ("optimizer_states", "lr_schedulers", "callbacks"):
            content.pop(part, None)
        content |= {"state_dict": pruner.state_dict(), "hyper_parameters": dict(experiments.pruner.hparams)}
        content[KEPT] = kept.method.name
        identity = identity_of(run_inputs(experiments.setup, experiments.dense_key))
        write_checkpoint(content | {IDENTITY: identity}, run.checkpoint("final"))
    return pruner


def _link(source: Path, target: Path) -> None:
    """Give the file a second name, as a hard link if the file system has them."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with suppress(shutil.SameFileError):
            shutil.copyfile(source, target)


# The other outputs of a run: the pruned model, mask files, pictures, and the final table.

BATCH_SIZES = (1, 8, 32)
"""The batch sizes of the latencies in the model card."""


@progress.stage("exporting, reloading and checking the pruned model")
def export(run: RunDirectory, pruner: HeadPruner, data: TaskData, kept: Kept, metrics: dict[str, float]) -> Cost | None:
    """Write the pruned model, and check it on a batch of the test split. Heads that cannot be removed are zero in it.

    Args:
        metrics: The metrics of the final model, as ``test_accuracy`` and so on.

    Returns:
        The size and speed of the pruned model and of the dense one; None where heads cannot be removed.
    """
    gates, options = pruner.gates, pruner.options
    batch = pruner.task.model_inputs(pruner.backbone, next(iter(data.test_dataloader())))
    form: Form = "masked" if why_not_removable(gates.sites) else "pruned"
    shutil.rmtree(run.export, ignore_errors=True)
    gates.detach()
    try:
        mask, cost = gates.to_heads(gates.mask).cpu(), None
        if form == "pruned":
            cut, _ = copy_in_form(pruner.backbone, mask, form, batch)
            cost = measure_cost(pruner.backbone, cut, batch, batch_sizes=BATCH_SIZES)
        save_pruned(
            pruner.backbone,
            run.export,
            mask,
            form=form,
            tokenizer=data.processor,
            card=ModelCard(
                base_model=base_model_name(options),
                method=mask_found_by(options, kept.method, is_refitted=kept.selection.is_refitted),
                metrics=metrics_on_test(metrics),
                **source_of(data),
                versions=versions(),
                cost=cost,
            ),
            check_batch=batch,
        )
    finally:
        gates.attach()
    return cost


def source_of(data: TaskData) -> dict[str, Any]:
    """Return the facts of a model card on the data, with only the last part of a local path."""
    name, subset = getattr(data.options, "dataset", None), getattr(data.options, "subset", None)
    files = [file for split, file in getattr(data.options, "files", {}).items() if split.startswith("test")]
    local = name if name and Path(name).exists() else next(iter(files), None)
    stated = Path(local).name if local else name or type(data.options).__name__
    more = [name.removeprefix(MORE) for name in data.more_tests]
    further = {"more_splits": more} if more else {}
    return {"dataset": stated, "subset": subset or "", "metric_types": data.task.metric_types(), **further}


def cost_of_export(cost: Cost) -> dict[str, Any]:
    """Return the size and speed of the pruned model, for ``metrics.json``."""
    latency = [{"batch_size": row.batch_size, "ratio": round(row.ratio, 4)} for row in cost.latency]
    sizes = {"dense_parameters": cost.dense_parameters, "pruned_parameters": cost.pruned_parameters}
    return {**sizes, "latency": latency, "hardware": cost.hardware}


def complete_card(run: RunDirectory, results: Results, kept: Method) -> None:
    """Add the results of the dense model, the interval and the warnings of a run to the model card.

    The dense model is retrained if the kept one was, and otherwise as before pruning.
    """
    if kept.base != "dense":
        dense, pruned = (metrics_on_test(results.last_row(name).metrics) for name in ("dense", kept.name))
        update_results(run.export / "README.md", pruned, dense, card_notes(run.read_json("metrics.json")))


def metrics_on_test(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the test results of a row of the comparison by the name of the metric, the loss last."""
    found = {name.removeprefix("test_"): value for name, value in row.items() if name.startswith("test_")}
    return {name: found[name] for name in sorted(found, key=lambda name: name == "loss")}


def describe_run(
    results: Results, own: Method, learned: Mapping[str, Any], kept: Kept, *, dense_seconds: float, wandb_mode: str
) -> dict[str, Any]:
    """Return the entry ``run`` of ``metrics.json``; ``learned`` is the result of the experiment that learned the gates."""
    assert results.pruner is not None
    gates, mask = results.pruner.gates, kept.selection.mask
    by_site = gates.to_heads(mask).split([site.heads for site in gates.sites])

    def rows_of(method: str) -> dict[str, dict[str, Any]]:
        left_out = ("seed", "method", "experiment")
        own_rows = {row.stage: row.as_columns() for row in results.rows if row.method == method}
        return {stage: {name: row[name] for name in row if name not in left_out} for stage, row in own_rows.items()}

    main = f"select_{results.pruner.task.main_metric}"
    result = rows_of(kept.method.name)[results.last_row(kept.method.name).stage]
    return {
        "method": kept.method.name,
        "learned": own.name,
        "selection": kept.reached,
        "refits_dropped": list(
            dict.fromkeys(row.method for row in results.rows if "+refit" in row.method and not row.selection.is_refitted)
        ),
        "gates": {name: learned[name] for name in ("closed", "closed_by_gates", "price")} if own.is_learned else {},
        "kept": gates.open_heads(mask),
        "data": source_of(results.data) if results.data is not None else {},
        "by_site": {label: int(part.sum()) for label, part in zip(site_labels(gates.sites), by_site, strict=True)},
        "result": result,
        "dense": rows_of("dense"),
        "random": next((row[main] for row in rows_of("random+refit").values()), None),
        "hies_alpha": next((row.selection.alpha for row in results.rows if row.selection.alpha is not None), None),
        "train_seconds": round(dense_seconds + (0.0 if own.base == "dense" else result["seconds"]), 2),
        "wandb_mode": wandb_mode,
    }


@progress.stage("drawing masks and gates")
def write_run(
    run: RunDirectory,
    results: Results,
    own: Method,
    kept: Method,
    curve: Sequence[dict[str, Any]],
    described: Mapping[str, Any],
) -> None:
    """Write the curve, a mask file for each method, and pictures, in place of those of an earlier comparison."""
    pruner = results.pruner
    assert pruner is not None
    gates, table = pruner.gates, pd.DataFrame(curve)
    for folder in ("masks", "plots"):
        shutil.rmtree(run.path / folder, ignore_errors=True)
        (run.path / folder).mkdir()
    if len(table):
        run.write_table("curve.csv", table)
    else:
        (run.path / "curve.csv").unlink(missing_ok=True)
    masks = {str(entry["method"]): torch.tensor(entry["mask"]).float() for entry in results.masks}
    for method, mask in masks.items():
        save_mask(run.path / "masks" / f"{file_name(method)}.json", gates.to_heads(mask), gates.sites, method=method)
    per_kind = bool(pruner.steering.budget_of(masks[kept.name]).per_kind)
    figures = {
        "mask": gate_heat_map(gates.sites, gates.to_heads(masks[kept.name]), title="heads kept"),
        "agreement": mask_agreement(
            {method: mask for method, mask in masks.items() if method != "dense" or method == own.name},
            gates.kind_index() if per_kind else None,
        ),
    }
    courses = [course for course in results.gates if len(course) and course["method"].iloc[0] == own.name]
    if courses:
        last = torch.tensor(courses[0].iloc[-1, -gates.size :].to_numpy(float))  # the gates are the last columns
        figures["gates"] = gate_heat_map(gates.sites, gates.to_heads(last), title="gates at the end of the prune phase")
    if len(table):
        figures["quality_by_budget"] = quality_by_budget(
            table, results.table(), metric=pruner.task.main_metric, lower_is_better=pruner.task.lower_is_better
        )
    if search := described.get("budget_search"):
        figures["budget"] = heads_within_loss(search, pruner.task.main_metric, gates.unit)
    for name, figure in figures.items():
        with run.replacing(f"plots/{name}.png") as partial:
            figure.savefig(partial, format="png", dpi=150)


# The command.


def fit(line: CommandLine) -> RunDirectory:
    """Do the run of a command line. A finished run that is resumed does not change."""
    quiet_libraries()
    setup = line.setup
    own = own_method(setup.model)
    plan = list(plan_of_run(own, None, setup.end, stage=training_stage(setup.model)))  # raises for names of no method
    check_plan(setup, plan)
    options = line.options.clone()
    options.existing = "refuse"  # of this call alone: a run that is started from the file replaces nothing unasked
    resolved = line.parser.dump(options, skip_unset=False)
    start_launched(setup, resolved)
    with ExitStack() as held:
        run = processes.in_first(lambda: held.enter_context(locked_directory(setup.run)))
        run = replace(run, is_written=run.is_written and processes.is_first())
        if run.resumes:
            check_same_options(run, resolved)
            if is_finished(run, resolved):
                more = "give --compare posthoc or full for more rows, or another --run_dir for a new run"
                progress.notice(f"the run in {str(run.path)!r} is already finished; {more}")
                return run
        setup = replace(setup, wandb=processes.in_first(lambda: reachable(setup.wandb)))  # before there is anything to lose
        again = "" if setup.run.run_dir is not None else f"--run_dir {shlex.quote(str(run.path))} "
        with advised(lambda: f"continue with {again}--existing resume" if run.holds(resolved) else None):
            train_and_compare(setup, own, plan, run, resolved, command=line.command)
    return run


def expected_time(experiments: Experiments, own: Method) -> str:
    """Return in a sentence how long a run takes, with the heads that it chooses from and the search for a budget."""
    end, options = experiments.setup.end, experiments.setup.model
    tried = [own, *map(Method.parse, CHEAP_RIVALS)] if "refit" in own.modifiers and options.keep == "best" else []
    plan = list(plan_of_run(own, None, end, tried=tried, stage=training_stage(options)))
    points = 0 if end.compare == "none" else len(end.curve) * len(plan)
    searched = experiments.pruner.gates.size.bit_length() if options.budget == AUTO else 0
    return estimate(experiments, plan, points=points, refits=searched, exports=own.base != "dense")


def check_plan(setup: Setup, plan: Sequence[PlanEntry]) -> None:
    """Raise :class:`GateError` for options of the training that do not go together with those of the comparison."""
    reason = setup.model.nothing_trains
    if reason and setup.end.compare == "full" and setup.end.retrained != []:
        raise GateError(f"{reason}, so nothing can be trained on; give --compare posthoc or --retrained []")
    if reason and setup.model.retrain > 0:
        raise GateError(f"{reason}, but retrain is {setup.model.retrain:g} epochs; set --model.retrain 0")
    if setup.model.budget == AUTO and (given := [entry.method.name for entry in plan if entry.method.is_given]):
        raise GateError(f"{given[0]!r} has its own number of heads, but the budget is {AUTO}; give --model.budget a number")
    if setup.end.from_scratch:
        setup.check_scratch()


def train_and_compare(
    setup: Setup, own: Method, plan: Sequence[PlanEntry], run: RunDirectory, resolved: str, *, command: str
) -> None:
    """Do all that a run does in its directory.

    Args:
        plan: The plan of its comparison, without a budget.
        resolved: All options, as YAML.
        command: The command that starts the run again.
    """
    is_automatic = setup.model.budget == AUTO
    experiments = open_experiments(setup, plan, run)
    prepare(experiments, run, resolved)
    if expected := expected_time(experiments, own):
        progress.notice(expected)
    wandb_logger = make_logger(setup.wandb, run.path, yaml.safe_load(resolved))
    loggers = [CSVLogger(run.path, name="", version=""), *([wandb_logger] if wandb_logger else [])]
    with experiments.logged_to(loggers):
        experiments.dense()
        if is_automatic:
            experiments = with_found_budget(experiments, run)
    with experiments.logged_to(loggers):
        setup, data, gates = experiments.setup, experiments.data, experiments.pruner.gates
        budget = budget_of(experiments, own)
        swaps = SwapSearch(passes=setup.model.swaps) if setup.model.swaps else SwapSearch()
        selector = MaskSelector(experiments, [budget.option(gates.kind_sizes())], swaps=swaps, as_configured=own.base)
        learned = selector.select(Method(own.base), budget if own.is_learned else None).start
        stage = training_stage(setup.model)
        kept = choose_heads(selector, own, budget if own.is_learned else None, setup.model, post_hoc=stage == FROM_DENSE)
        own = kept.own
    with experiments.logged_to(loggers, after=learned.result["steps"] if stage == FROM_DENSE else 0):
        final = trained(experiments, kept, stage)
    pruner = keep_checkpoints(run, experiments, final, kept, learned)
    metrics = final if own.base != "dense" else experiments.post_hoc(kept.selection.values)
    cost = processes.in_first(lambda: export(run, pruner, data, kept, metrics.result))
    latency = achieved(setup, pruner, data)

    tried = list(map(Method.parse, kept.reached))
    plan = list(plan_of_run(own, budget, setup.end, kept.method, tried=tried, stage=stage))
    results = Results(pruner=pruner, data=data, budgets=[budget])
    curve = compare(experiments, selector, own, plan, results)
    methods = [entry.method for entry in plan]
    seconds = experiments.dense().result["seconds"]
    if not processes.is_first():
        return
    described = describe_run(results, own, learned.result, kept, dense_seconds=seconds, wandb_mode=setup.wandb.mode)
    described |= {} if latency is None else {"latency": latency}
    described |= {} if cost is None else {"cost": cost_of_export(cost)}
    described |= {"against_dense": against_dense(results, kept.method), "lead": against_second(results, kept.reached)}
    described |= {"budget_search": run.read_json(BUDGET_SEARCH)} if is_automatic else {}
    run.withdraw()
    run.join_logs()
    write_run(run, results, own, kept.method, curve, described)
    save_translations(run, results)
    name, seeds, more = setup.run.name, [setup.run.seed], {"run": described}
    write_tables(run, results, name=name, methods=methods, seeds=seeds, command=command, more=more)
    complete_card(run, results, kept.method)
    show_run(stdout(), run, results, described)
    mark_finished(run)
    if wandb_logger is not None:
        with lost_in_wandb():  # last, so that nothing else is lost
            send_run(wandb_logger, run, results, described)


def compare(
    experiments: Experiments, selector: MaskSelector, own: Method, plan: Sequence[PlanEntry], results: Results
) -> list[dict[str, Any]]:
    """Put the rows and scores of a run's comparison into its results, and return its curve."""
    end = experiments.setup.end
    compares = end.compare != "none"
    with progress.stage("comparison", sum(len(entry.stages) for entry in plan)) as shown:
        results.rows += run_seed(experiments, selector, plan, results, shown)
    curve = [row.as_columns() for row in curve_of_run(experiments, selector, own, end.curve if compares else [], results)]
    if own.is_learned or compares:
        results.scores.append(score_columns(experiments, selector, results.rankings))
    return curve


def open_experiments(setup: Setup, plan: Sequence[PlanEntry], run: RunDirectory) -> Experiments:
    """Read the data, build the model and check the options against both."""
    data = open_data(setup, checkpoint_of(setup.run, run))
    setup = with_min_steps(timed(setup, run, data), data)
    if setup.model.budget == AUTO:
        setup = setup.with_budget(0.9999)  # rounded to all heads, until the dense model is trained
    if setup.model.refit and setup.model.why_not_refitted:
        progress.notice(f"the run continues without a refit: {setup.model.why_not_refitted}")
    pruner = make_pruner(setup, data)
    given = pruner.steering.budget
    if given is not None:  # 0.25 and 18 of 72 heads are the same budget
        setup = setup.with_budget(given.option(pruner.gates.kind_sizes()))
    check_given_masks([entry.method for entry in plan], pruner.gates, [given or Budget(1, {})])
    if setup.run.ckpt_path is not None:
        check_checkpoint(setup.run.ckpt_path, pruner)
    return Experiments(setup, data, cache=ExperimentCache(run.path / "experiments"), pruner=pruner)


def prepare(experiments: Experiments, run: RunDirectory, resolved: str) -> None:
    """Check the directory of a resumed run, or create a new one with the resolved options."""
    setup, trainer = experiments.setup, experiments.trainer()  # raises for its settings before anything is written
    began = run_inputs(setup, experiments.dense_key)
    if run.resumes:
        check_same_inputs(run, began)
    processes.wait_for_all()  # the others may still read what lies there
    if run.is_written:
        unmark_finished(run)
        run.create(resolved)
        keep_table([setup.model.budget], run)
        experiments.data.write_files(run.path)
        note_inputs(run, began)
    processes.start(trainer)
