"""Methods x budgets x seeds on the same dense models, at equal training cost. Reads top to bottom: run the experiments of each
seed, write tables, verdict, report."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from jsonargparse import Namespace
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from gates.budget import Budget
from gates.errors import GateError
from training.cli.comparison_parser import OF_A_RUN
from training.cli.ending import stdout
from training.cli.line import CommandLine
from training.comparison.cache import ExperimentCache
from training.comparison.experiments import Experiments
from training.comparison.methods import LEARNED, MODIFIERS, OUTSIDE, Learned, Method, Outside, parse_methods
from training.comparison.options import check_budgets
from training.comparison.plan import plan_of_comparison, run_seed
from training.comparison.selection import MaskSelector
from training.comparison.tables import Results, price_rows, score_columns, write_tables
from training.comparison.to_wandb import send_comparison
from training.comparison.truth import as_markdown, truth_rows
from training.config import (
    BudgetOption,
    ComparisonOptions,
    DistilWeights,
    DrawSearch,
    PrunerOptions,
    RefitSearch,
    Setup,
    SwapSearch,
    group_of,
)
from training.config.setup import data_of
from training.config.stages import FROM_SCRATCH
from training.report.captions import warning
from training.report.contents import Contents
from training.report.page import write_report
from training.report.reading import read_contents
from training.runs import processes, progress
from training.runs.run_directory import UNFINISHED, RunDirectory
from training.scoring.scorers import SCORERS, Scorer
from training.setup import make_trainer, open_data, quiet_libraries

INSTEAD = {
    "seed": "; --seeds has those of a comparison",
    "model.budget": "; --budgets has those of a comparison",
    "model.swaps": "; here swaps are a method, learned+swap",
    "model.refit": "; here it is a method, learned+refit",
    "model.gate": "; here other gates are methods, such as dsp",
    "model.pipelined": "; here it is a method, learned-pipelined",
}
"""What some of these, and options of the module that methods and budgets set, are called in a comparison."""


def compare(line: CommandLine) -> RunDirectory | None:
    """A comparison, or several of a benchmark, as the command line says; or, if it asks for that, the list of methods."""
    quiet_libraries()
    config = line.options
    if config.list_methods:
        show_methods(stdout())
        return None
    parts = data_of(config.data).parts
    return compare_parts(line, parts) if parts else compare_on_one(line)


def compare_parts(line: CommandLine, parts: Mapping[str, Mapping[str, Any]]) -> RunDirectory:
    """A comparison of each data set of a benchmark, in a folder of its name, and over all of them ``truth.csv``.

    Args:
        line: as it was given.
        parts: by name the options of each data set.
    """
    config = line.options
    run = claim(config.run_dir or f"runs/{config.name}-comparison")
    truths = []
    for name, changes in parts.items():
        own = config.clone()
        own.data.init_args.update(Namespace(**changes))
        own.name, own.run_dir = f"{config.name}-{name}", str(run.path / name)
        own.experiments = config.experiments or str(run.path / "experiments")
        part = compare_on_one(replace(line, options=own))
        if (part.path / "truth.csv").is_file():
            truths.append(pd.read_csv(part.path / "truth.csv").assign(program=name))
    if truths and processes.is_first():
        truth = pd.concat(truths, ignore_index=True)
        run.write_table("truth.csv", truth)
        run.write_text("truth.md", as_markdown(truth))
        stdout().print(Markdown(as_markdown(truth)))
    return run


def compare_on_one(line: CommandLine) -> RunDirectory:
    """The comparison on one data set."""
    config, given = line.options, line.given
    options = group_of(ComparisonOptions, config)
    methods, seeds, stages = parse_methods(options.all_methods), options.all_seeds, options.all_stages
    check_unused(config, given)
    check_needed(given, methods, stages)
    setup = Setup.of(config)
    budgets: list[BudgetOption] = list(setup.data.own_budgets or options.all_budgets)
    if FROM_SCRATCH in stages:
        setup.check_scratch()
    run = claim(config.run_dir or f"runs/{config.name}-comparison")
    distil = DistilWeights(**config.distil.as_dict()).changes
    check_methods(setup.model, methods, budgets, distil)
    check_kinds(methods, budgets)
    if setup.model.steering == "multipliers":
        raise GateError(
            "--model.steering multipliers keeps multipliers with the dense model, from which all methods start; a comparison "
            "needs --model.steering price"
        )
    searches: dict[str, Any] = {
        "swaps": SwapSearch(**config.swap.as_dict()),
        "draws": DrawSearch(**config.draws.as_dict()),
        "refits": RefitSearch(**config.refit.as_dict()),
    }
    cache = ExperimentCache(Path(options.experiments) if options.experiments else run.path / "experiments")
    resolved = line.parser.dump(config, skip_unset=False)
    processes.start(make_trainer(setup))
    results = Results()
    plan = list(plan_of_comparison(methods, budgets, stages))
    with progress.stage("comparison", len(seeds) * sum(len(planned.stages) for planned in plan)) as shown:
        for seed in seeds:
            of_seed = setup.with_seed(seed)
            experiments = Experiments(of_seed, open_data(of_seed), cache=cache)
            selector = MaskSelector(experiments, budgets, **searches, distil=distil, prices=options.all_prices)
            check_budgets(budgets, selector.sizes)
            for budget in budgets:  # raises where the minimum per layer does not fit
                experiments.pruner.steering.mask_within(
                    experiments.pruner.gates.log_alpha.detach(), Budget.parse(budget, selector.sizes)
                )
            if seed == seeds[0] and processes.is_first():
                run.path.mkdir(parents=True, exist_ok=True)
                run.write_text("config.yaml", resolved)
            for row in run_seed(experiments, selector, plan, results, shown):
                results.rows.append(row)
                if processes.is_first():
                    run.write_table(UNFINISHED, pd.DataFrame(results.rows))
            results.scores.append(score_columns(experiments, selector, results.rankings))
            results.prices.append(price_rows(experiments, selector))
            results.truth += truth_rows(experiments, results)
            results.pruner, results.data = experiments.pruner, experiments.data
    if processes.is_first():
        write_tables(run, results, name=config.name, methods=methods, budgets=budgets, seeds=seeds, command=line.command)
        (run.path / UNFINISHED).unlink()
        contents = report(run)
        send_comparison(run, setup.wandb, yaml.safe_load(resolved), contents.metric)
        console = stdout()
        show_summary(console, contents)
        for name in ("report.html", "verdict.md", "comparison.csv"):
            console.print(f"{name.split('.')[0]}: {run.path / name}", soft_wrap=True)
    return run


@progress.stage("report")
def report(run: RunDirectory) -> Contents:
    """Write ``report.html`` with its pictures; those of methods that are no longer compared go."""
    shutil.rmtree(run.path / "figures", ignore_errors=True)
    contents = read_contents(run.path)
    write_report([contents], run.path / "report.html")
    return contents


def check_unused(config: Namespace, given: Sequence[str]) -> None:
    """Raises :class:`GateError` for what has no meaning in a comparison: options of single runs on its command line (a
    configuration, which also serves single runs, may hold them), a checkpoint to start from, and training for show."""
    for name, instead in (dict.fromkeys(OF_A_RUN, "") | INSTEAD).items():
        if any(argument.split("=")[0] == f"--{name}" for argument in given):
            raise GateError(f"--{name} is an option of training.fit, which a comparison does not use{instead}")
    if data_of(config.data).own_budgets is not None and any(argument.split("=")[0] == "--budgets" for argument in given):
        raise GateError("--budgets is given, but these data know how many heads are needed; --data.spare says how many more")
    if config.ckpt_path is not None:
        raise GateError("ckpt_path is set, but a comparison trains its own dense models; remove it from the configuration")
    if config.trainer.fast_dev_run:
        raise GateError("--trainer.fast_dev_run trains for show; a short comparison has --trainer.limit_train_batches")


def check_needed(given: Sequence[str], methods: Sequence[Method], stages: Sequence[str]) -> None:
    """Raises :class:`GateError` for options on the command line that belong to methods or stages which are not compared."""
    modifiers = frozenset().union(*(method.modifiers for method in methods))
    used = {
        "--prices": (any(method.is_learned and method.learned.decides == "price" for method in methods), "lambda to --methods"),
        "--swap.": ("swap" in modifiers, "+swap to a method"),
        "--draws.": ("draws" in modifiers, "+draws to a method"),
        "--refit.": ("refit" in modifiers, "+refit to a method"),
        "--distil.": ("distil" in modifiers, "+distil to a method"),
        "--from_scratch_": ("from scratch" in stages, "from scratch to --stages"),
    }
    for beginning, (is_used, add) in used.items():
        for argument in given:
            if argument.startswith(beginning) and not is_used:
                raise GateError(f"{argument.split('=')[0]} is given, but nothing uses it; add {add}, or leave it away")


def check_methods(
    options: PrunerOptions, methods: Sequence[Method], budgets: Sequence[BudgetOption], distil: Mapping[str, float]
) -> None:
    """Whether the module will take the options that each method gives it, before hours of training.

    Raises:
        GateError: for the first that it will not take.
    """
    for method in methods:
        own: dict[str, Any] = dict(method.learned.options) if method.is_learned else {}
        if "distil" in method.modifiers:
            own |= distil
        for budget in budgets:
            replace(options, **{"budget": budget, **own})  # raises


def check_kinds(methods: Sequence[Method], budgets: Sequence[BudgetOption]) -> None:
    """Raises :class:`GateError` if budgets are of different kinds, but a method learns for the smallest of them alone."""
    kinds = {frozenset(budget) if isinstance(budget, dict) else None for budget in budgets}
    once = [method.name for method in methods if method.is_learned and method.learned.decides == "once"]
    if once and len(kinds) > 1:
        raise GateError(
            f"{once[0]} learns once, for the smallest budget, and ranks only heads of the kinds that it prunes; make a "
            "comparison of each kind's budgets"
        )


def show_summary(console: Console, contents: Contents) -> None:
    """Means with their intervals, one row per stage and method, one column per budget."""
    table, summary = Table(title=f"test {contents.metric}, mean over seeds with 95 % interval"), contents.summary
    budgets = sorted(summary["budget"].unique(), reverse=True)
    for name in ("stage", "method", *map(contents.label, budgets)):
        table.add_column(name, justify="left" if name in ("stage", "method") else "right")
    for (stage, method), rows in summary.sort_values("stage", kind="stable").groupby(["stage", "method"], sort=False):
        texts = [
            f"{mean:.4f}" + ("" if math.isnan(low) else f" ({low:.4f} to {high:.4f})")  # one seed has no interval
            for mean, low, high in zip(rows["mean"], rows["low"], rows["high"], strict=True)
        ]
        found = dict(zip(rows["budget"], texts, strict=True))
        table.add_row(str(stage), str(method), *(found.get(budget, "") for budget in budgets))
    console.print(table)
    if said := warning(contents):
        console.print(said, soft_wrap=True)


def claim(path: str) -> RunDirectory:
    """The directory: new, empty, or that of a comparison, which goes on.

    Raises:
        GateError: if it holds something else.
    """
    folder = Path(path)
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise GateError(f"--run_dir {path!r} is or lies in a file ({str(place)!r}); give a directory")
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if held - {"config.yaml", UNFINISHED} and not ((folder / "experiments").is_dir() or "masks.json" in held):
        raise GateError(f"{path!r} holds something else than a comparison; give another --run_dir")
    return RunDirectory(folder)


def show_methods(console: Console) -> None:
    """Every method by name, with what it does and its source."""
    table = Table("method", "what decides which heads stay", "source", title="Methods")
    described: list[tuple[str, Learned | Scorer | Outside]] = [*LEARNED.items(), *SCORERS.items(), *OUTSIDE.items()]
    for name, method in described:
        table.add_row(name, method.what, method.source)
    console.print(table)
    for name, what in MODIFIERS.items():
        console.print(f"+{name}: {what}")
