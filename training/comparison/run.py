"""One run: set up, train, compare, write the run directory. Reads top to bottom."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger
from rich.console import Console
from rich.table import Table

from gates.attention.sites import site_labels
from gates.errors import GateError
from gates.export.card import ModelCard, update_results
from gates.export.checkpoint import save_pruned
from gates.gating.budget import Budget
from gates.surgery.masks import save_mask
from gates.surgery.remove import why_not_removable
from training.cli.command_line import CommandLine
from training.cli.exit import advised, stdout
from training.comparison.cache import Experiment, ExperimentCache, run_inputs
from training.comparison.experiments import Experiments, weights_of
from training.comparison.latency import achieved, keep_table, timed, told_of_latency
from training.comparison.methods import Method, check_given_masks, file_name, own_method
from training.comparison.plan import PlanEntry, curve_of_run, plan_of_run, retrained, run_seed
from training.comparison.selection import MaskSelector, Selection
from training.comparison.tables import Results, save_translations, score_columns, write_tables
from training.comparison.wandb import send_run
from training.config import Setup, SwapSearch
from training.config.comparison import POST_HOC, RETRAINED, STAGES
from training.config.data_base import MORE
from training.data.base import TaskData
from training.plotting import gate_heat_map, mask_agreement, quality_by_budget
from training.pruner.checkpoints import IDENTITY, check_checkpoint, read_checkpoint, write_checkpoint
from training.pruner.module import HeadPruner
from training.runs import processes, progress
from training.runs.directory import RunDirectory, is_finished, locked_directory, mark_finished, unmark_finished
from training.runs.resume import check_same_inputs, check_same_options, checkpoint_of, identity_of, note_inputs
from training.runs.tracking import lost_in_wandb, make_logger, reachable, versions
from training.setup import make_pruner, open_data, quiet_libraries, start_launched
from training.stats.numbers import CACHE, shown, unit
from training.stats.verdict import ENOUGH, HINT, is_dense, nothing_learned
from training.tasks import base_model_name

# The training of a run: one method, one budget and one seed of what a comparison runs, with loggers.


def train(experiments: Experiments, selector: MaskSelector, own: Method, budget: Budget | None) -> tuple[Selection, Experiment]:
    """Return the heads that the run's method keeps, and the experiment whose weights the run ends with.

    Args:
        experiments: The experiments of the run.
        selector: What chooses masks by them.
        own: The run's method.
        budget: The budget; None for the dense model.
    """
    selection = selector.select(own, budget)
    if own.base == "dense":
        return selection, selection.start
    return selection, retrained(experiments, selection, keeps_weights=True)


def budget_of(experiments: Experiments, own: Method) -> Budget:
    """Return the budget of the run: the one that is given, what a price leaves open, or all heads of a dense model."""
    steering, options = experiments.pruner.steering, experiments.options
    if steering.budget is not None:
        return steering.budget
    if own.base == "dense":
        return steering.budget_of(torch.ones(experiments.pruner.gates.size))
    return steering.budget_of(torch.tensor(experiments.learn({"price": options.price}).result["mask"]))


def keep_checkpoints(run: RunDirectory, experiments: Experiments, final: Experiment, mask: torch.Tensor) -> HeadPruner:
    """Write ``dense.ckpt`` and ``final.ckpt``, and return the module in its final state.

    Args:
        run: The directory to write into.
        experiments: The experiments of the run.
        final: The experiment whose weights the run ends with.
        mask: The gate values ``[gates]`` that it ends with.
    """
    pruner = experiments.with_weights(final, {})
    pruner.gates.set_mask_(mask.to(pruner.device))
    dense = experiments.dense()  # by all processes together
    if processes.is_first():
        _link(weights_of(dense), run.checkpoint("dense"))
        content = read_checkpoint(weights_of(final))
        for part in ("optimizer_states", "lr_schedulers", "callbacks"):
            content.pop(part, None)
        content |= {"state_dict": pruner.state_dict(), "hyper_parameters": dict(experiments.pruner.hparams)}
        identity = identity_of(run_inputs(experiments.setup, experiments.dense_key))
        write_checkpoint(content | {IDENTITY: identity}, run.checkpoint("final"))
    return pruner


def _link(source: Path, target: Path) -> None:
    """The file under a second name, without taking space where the file system can."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with suppress(shutil.SameFileError):
            shutil.copyfile(source, target)


# What a single run leaves beside the tables: the pruned model, mask files, pictures, and the final table.

SHORT = {"perplexity": "ppl."}
"""Metrics in headings that are not simply cut short."""
BATCH_SIZES = (1, 8, 32)
"""At which the model card states the export's latency."""


@progress.stage("exporting, reloading and checking the pruned model")
def export(run: RunDirectory, pruner: HeadPruner, data: TaskData, metrics: dict[str, float]) -> None:
    """The pruned model, checked on a batch of the test split. Heads that can be gated but not removed are zero in it.

    Args:
        run: to write into.
        pruner: in its final state.
        data: of the run.
        metrics: of the final model, as ``test_accuracy`` and so on.
    """
    gates, options = pruner.gates, pruner.options
    batch = next(iter(data.test_dataloader()))
    shutil.rmtree(run.export, ignore_errors=True)
    gates.detach()
    try:
        save_pruned(
            pruner.backbone,
            run.export,
            gates.to_heads(gates.mask).cpu(),
            form="masked" if why_not_removable(gates.sites) else "pruned",
            tokenizer=data.processor,
            card=ModelCard(
                base_model=base_model_name(options),
                method=options.mask_found_by,
                metrics=metrics_on_test(metrics),
                **source_of(data),
                versions=versions(),
            ),
            measure=BATCH_SIZES,
            check_batch=pruner.task.model_inputs(pruner.backbone, batch),
        )
    finally:
        gates.attach()


def source_of(data: TaskData) -> dict[str, Any]:
    """What a model card says of the data: the hub name of a data set and its configuration, or what kind of data they are; of a
    local folder the last part; and what the metrics are to others."""
    name, subset = getattr(data.options, "dataset", None), getattr(data.options, "subset", None)
    kind = type(data.options).__name__
    stated = Path(name).name if name and Path(name).exists() else name or kind
    more = [name.removeprefix(MORE) for name in data.more_tests]
    further = {"more_splits": more} if more else {}
    return {"dataset": stated, "subset": subset or "", "metric_types": data.task.metric_types(), **further}


def complete_card(run: RunDirectory, results: Results, own: Method) -> None:
    """Put the dense model's results into the export's model card, once the comparison has them: after the same training where
    it was trained on too, and otherwise as it was before pruning."""
    rows = {(row.method, row.stage): row.metrics for row in results.rows}
    dense, pruned = rows.get(("dense", RETRAINED), rows.get(("dense", POST_HOC))), rows.get((own.name, RETRAINED))
    if dense is not None and pruned is not None:
        update_results(run.export / "README.md", metrics_on_test(pruned), metrics_on_test(dense))


def metrics_on_test(row: Mapping[str, Any]) -> dict[str, float]:
    """The results on the test split in a row of the comparison, by the name of the metric; the loss comes last."""
    found = {name.removeprefix("test_"): value for name, value in row.items() if name.startswith("test_")}
    return {name: found[name] for name in sorted(found, key=lambda name: name == "loss")}


def describe_run(
    results: Results, own: Method, selection: Selection, *, dense_seconds: float, wandb_mode: str
) -> dict[str, Any]:
    """Return what ``metrics.json`` says of the run itself.

    Args:
        results: The results of its comparison.
        own: The run's method.
        selection: The heads that it keeps.
        dense_seconds: The time that the dense model was trained for.
        wandb_mode: How it was logged.
    """
    assert results.pruner is not None
    gates, mask, learned = results.pruner.gates, selection.mask, selection.start.result
    kept = gates.to_heads(mask).split([site.heads for site in gates.sites])

    def rows_of(method: str) -> dict[str, dict[str, Any]]:
        left_out = ("seed", "method", "experiment")
        own_rows = {row.stage: row.as_columns() for row in results.rows if row.method == method}
        return {stage: {name: row[name] for name in row if name not in left_out} for stage, row in own_rows.items()}

    result = rows_of(own.name)[POST_HOC if own.base == "dense" else RETRAINED]
    return {
        "method": own.name,
        "gates": {name: learned[name] for name in ("closed", "closed_by_gates", "price")} if own.is_learned else {},
        "kept": gates.open_heads(mask),
        "data": source_of(results.data) if results.data is not None else {},
        "by_site": {label: int(part.sum()) for label, part in zip(site_labels(gates.sites), kept, strict=True)},
        "result": result,
        "dense": rows_of("dense"),
        "hies_alpha": next((row.selection.alpha for row in results.rows if row.selection.alpha is not None), None),
        "train_seconds": round(dense_seconds + (0.0 if own.base == "dense" else result["seconds"]), 2),
        "wandb_mode": wandb_mode,
    }


@progress.stage("drawing masks and gates")
def write_run(run: RunDirectory, results: Results, own: Method, curve: Sequence[dict[str, Any]]) -> None:
    """The curve, a mask file for each method, and pictures; what an earlier comparison left and this one has not goes."""
    pruner = results.pruner
    assert pruner is not None
    complete_card(run, results, own)
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
    per_kind = bool(pruner.steering.budget_of(masks[own.name]).per_kind)
    figures = {
        "gates": gate_heat_map(gates.sites, gates.to_heads(masks[own.name]), title="heads kept"),
        "agreement": mask_agreement(
            {method: mask for method, mask in masks.items() if method != "dense" or method == own.name},
            gates.kind_index() if per_kind else None,
        ),
    }
    courses = [course for course in results.gates if len(course) and course["method"].iloc[0] == own.name]
    if courses:
        last = torch.tensor(courses[0].iloc[-1, -gates.size :].to_numpy(float))  # the gates are the last columns
        figures["gates_before_retraining"] = gate_heat_map(
            gates.sites, gates.to_heads(last), title="gates at the end of the prune phase"
        )
    if len(table):
        figures["quality_by_budget"] = quality_by_budget(
            table, results.table(), metric=pruner.task.main_metric, lower_is_better=pruner.task.lower_is_better
        )
    for name, figure in figures.items():
        with run.replacing(f"plots/{name}.png") as partial:
            figure.savefig(partial, format="png", dpi=150)


def show_run(console: Console, run: RunDirectory, results: Results, described: dict[str, Any], own: Method) -> None:
    """The final table and the paths of what was written."""
    assert results.pruner is not None
    main = results.pruner.task.main_metric
    table = Table(title=f"{described['kept']} of {results.pruner.gates.heads} heads kept")
    last = main.rpartition("_")[2]
    short = SHORT.get(last, last if len(last) < 6 else f"{last[:3]}.")
    names = {
        "method": "method", "stage": "stage", "heads": "heads", f"select_{main}": f"select {short}",
        f"test_{main}": f"test {short}", "test_loss": "test loss", CACHE: "KV bytes", "steps": "steps", "seconds": "s",
    }  # fmt: skip
    rows = [row.as_columns() for row in sorted(results.rows, key=lambda row: STAGES.index(row.stage))]
    names = {name: title for name, title in names.items() if name != CACHE or CACHE in rows[0]}
    for name, title in names.items():
        table.add_column(title, justify="left" if name in ("method", "stage") else "right", no_wrap=True)
    for row in rows:
        style = "bold" if row["method"] == own.name else None
        table.add_row(
            *(f"{row[n]:.4f}" if isinstance(row[n], float) and n != "seconds" else str(row[n]) for n in names), style=style
        )
    majority = run.read_json("metrics.json").get("majority", {})
    if main in majority:
        scored = {"method": "majority class"} | {f"test_{name}": f"{value:.4f}" for name, value in majority.items()}
        table.add_row(*(scored.get(name, "") for name in names))
    console.print(table)
    if results.data is not None and (more := [f"{split}_{main}" for split in results.data.more_tests]):
        console.print(f"on further test data: {', '.join(more)} in comparison.csv", soft_wrap=True, highlight=False)
    if "latency" in described:
        console.print(told_of_latency(described["latency"]), soft_wrap=True, highlight=False)
    if told := gates_sentence(described["gates"], "a millisecond" if "latency" in described else "an open one"):
        console.print(told, soft_wrap=True, highlight=False)
    dense = pd.Series([row[f"test_{main}"] for row in rows if is_dense(row["method"])], dtype=float)
    if warning := nothing_learned(shown(main, dense), shown(main, majority[main]) if main in majority else None, unit(main)):
        console.print(f"warning: {warning}", soft_wrap=True, highlight=False)
    for name, path in {
        "comparison": run.path / "comparison.csv",
        "verdict": run.path / "verdict.md",
        "masks": run.path / "masks",
        "pictures": run.path / "plots",
        "pruned model": run.export,
    }.items():
        console.print(f"{name}: {path}")
    if reason := why_not_removable(results.pruner.gates.sites):
        console.print(
            f"the heads given up are zeros in the pruned model, and not gone: {reason}", soft_wrap=True, highlight=False
        )
    if described["wandb_mode"] == "offline":
        console.print(f"W&B (offline): upload with  wandb sync {run.path / 'wandb'}/offline-run-*")


def gates_sentence(learned: Mapping[str, Any], priced: str = "an open one") -> str:
    """In one line, how far the gates decided themselves and what one was worth at the end; empty where nothing was learned.

    Args:
        learned: what ``metrics.json`` says of them.
        priced: what they paid for.
    """
    if not learned or not learned["price"]:  # a price that was given, and the exact top K, leave no gate to a budget
        return ""
    text = f"of {learned['closed']} gates that are closed, {learned['closed_by_gates']} had closed by themselves"
    few = learned["closed_by_gates"] < ENOUGH * learned["closed"]
    rest = f", and the rest was closed by their rank; {HINT}" if few else ""
    return f"{text}{rest}; price of {priced} at the end: {', '.join(f'{each:.3g}' for each in learned['price'])}"


# The command.


def fit(line: CommandLine) -> RunDirectory:
    """The whole run, as its command line says; one that has ended and is resumed is left as it is."""
    quiet_libraries()
    setup = Setup.of(line.options)
    own = own_method(setup.model)
    if setup.model.nothing_trains and setup.end.compare == "full" and setup.end.retrained != []:
        raise GateError(f"{setup.model.nothing_trains}, so nothing can be trained on; give --compare posthoc or --retrained []")
    if setup.model.nothing_trains and setup.model.retrain > 0:
        raise GateError(f"{setup.model.nothing_trains}, but retrain is {setup.model.retrain:g} epochs; set --model.retrain 0")
    asked = list(plan_of_run(own, None, setup.end))  # raises for names of no method
    if setup.end.from_scratch:
        setup.check_scratch()
    kept = line.options.clone()
    kept.existing = "refuse"  # of this call alone: a run that is started from the file replaces nothing unasked
    resolved = line.parser.dump(kept, skip_unset=False)
    start_launched(setup, resolved)
    with ExitStack() as held:
        run, first = processes.in_first(lambda: held.enter_context(locked_directory(setup.run)))
        first = first and processes.is_first()
        if run.resumes:
            check_same_options(run, resolved)
            if is_finished(run, resolved):
                if first:
                    stdout().print(
                        f"the run in {str(run.path)!r} is finished; nothing is to be resumed, and its data were not read",
                        soft_wrap=True,
                    )
                return run
        setup = replace(setup, wandb=processes.in_first(lambda: reachable(setup.wandb)))  # before there is anything to lose
        again = "" if setup.run.run_dir is not None else f"--run_dir {shlex.quote(str(run.path))} "
        with advised(lambda: f"go on with {again}--existing resume" if run.holds(resolved) else None):
            train_and_compare(line, setup, own, asked, run, resolved, first=first)
    return run


def train_and_compare(
    line: CommandLine, setup: Setup, own: Method, asked: Sequence[PlanEntry], run: RunDirectory, resolved: str, *, first: bool
) -> None:
    """Do all that a run does in its directory.

    Args:
        line: The command line.
        setup: The options of the run.
        own: The run's method.
        asked: What the run is compared with.
        run: The directory to write into.
        resolved: All options, as YAML.
        first: Whether this is the first of the processes that share the directory.
    """
    checkpoint = checkpoint_of(setup.run, run, first)
    data = open_data(setup, checkpoint)
    setup = timed(setup, run, data)
    pruner = make_pruner(setup, data)
    given = pruner.steering.budget
    if given is not None:  # 0.25 and 18 of 72 heads are the same budget
        canonical: dict[str, Any] = {"budget": given.option(pruner.gates.kind_sizes())}
        setup = replace(setup, model=replace(setup.model, **canonical))
    check_given_masks([planned.method for planned in asked], pruner.gates, [given or Budget(1, {})])
    if setup.run.ckpt_path is not None:
        check_checkpoint(setup.run.ckpt_path, pruner)
    experiments = Experiments(setup, data, cache=ExperimentCache(run.path / "experiments"), pruner=pruner)
    prepare(experiments, run, resolved, first=first)
    wandb_logger = make_logger(setup.wandb, run.path, yaml.safe_load(resolved))
    with experiments.logged_to([CSVLogger(run.path, name="", version=""), *([wandb_logger] if wandb_logger else [])]):
        budget = budget_of(experiments, own)
        swaps = SwapSearch(passes=setup.model.swaps) if setup.model.swaps else SwapSearch()
        options = [budget.option(pruner.gates.kind_sizes())]
        selector = MaskSelector(experiments, options, swaps=swaps, as_configured=own.base)
        selection, final = train(experiments, selector, own, budget)
    pruner = keep_checkpoints(run, experiments, final, selection.values)
    metrics = final if own.base != "dense" else experiments.post_hoc(selection.values)
    processes.in_first(lambda: export(run, pruner, data, metrics.result))
    latency = achieved(setup, pruner, data)

    plan, results = list(plan_of_run(own, budget, setup.end)), Results(pruner=pruner, data=data, budgets=[budget])
    compares = setup.end.compare != "none"
    with progress.stage("comparison", sum(len(planned.stages) for planned in plan)) as shown:
        results.rows += run_seed(experiments, selector, plan, results, shown)
    curve = [row.as_columns() for row in curve_of_run(experiments, selector, own, setup.end.curve if compares else [], results)]
    methods = [planned.method for planned in plan]
    if compares:
        results.scores.append(score_columns(experiments, selector, results.rankings))
    seconds = experiments.dense().result["seconds"]
    if processes.is_first():
        described = describe_run(results, own, selection, dense_seconds=seconds, wandb_mode=setup.wandb.mode)
        described |= {} if latency is None else {"latency": latency}
        run.withdraw()
        run.join_logs()
        write_run(run, results, own, curve)
        save_translations(run, results)
        name, seeds, more = setup.run.name, [setup.run.seed], {"run": described}
        write_tables(run, results, name=name, methods=methods, seeds=seeds, command=line.command, more=more)
        show_run(stdout(), run, results, described, own)
        mark_finished(run)
        if wandb_logger is not None:
            with lost_in_wandb():  # last, so that nothing else is lost
                send_run(wandb_logger, run, results, described)


def prepare(experiments: Experiments, run: RunDirectory, resolved: str, *, first: bool) -> None:
    """Check what a resumed run finds in its directory, or create the directory.

    Args:
        experiments: The experiments of the run.
        run: The directory.
        resolved: All options, as YAML.
        first: Whether this is the first of the processes that share the directory.
    """
    setup, trainer = experiments.setup, experiments.trainer()  # raises for its settings before anything is written
    began = run_inputs(setup, experiments.dense_key)
    if run.resumes:
        check_same_inputs(run, began)
    processes.wait_for_all()  # the others may still read what lies there
    if first:
        unmark_finished(run)
        run.create(resolved)
        keep_table([setup.model.budget], run)
        experiments.data.write_files(run.path)
        note_inputs(run, began)
    processes.start(trainer)
