"""Compare methods x budgets x seeds on the same dense models, at equal training cost.

The file reads from top to bottom: run the experiments of each seed, then write tables, verdict and report.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from jsonargparse import Namespace
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from gates.errors import GateError
from gates.files import is_partial
from gates.gating.budget import Budget
from gates.gating.latency import LatencyTable, TimeLimit
from training.cli.command_line import RUN_ONLY_OPTIONS, CommandLine
from training.cli.exit import stdout
from training.comparison.cache import DETERMINED_BY
from training.comparison.estimate import estimate
from training.comparison.latency import keep_table, limits_of
from training.comparison.methods import LEARNED, MODIFIERS, OUTSIDE, PARAMETERS, Learned, Method, Outside, parse_methods
from training.comparison.on_ray import do_on_ray
from training.comparison.plan import Comparison, check_rows, run_seed
from training.comparison.tables import Results, carried_rows, price_rows, score_columns, truth_rows, without_facts, write_tables
from training.comparison.wandb import send_comparison
from training.config import (
    BudgetOption,
    ComparisonOptions,
    DistilWeights,
    DrawSearch,
    LauncherOptions,
    PrunerOptions,
    RefitOptions,
    RestartSearch,
    SwapSearch,
    group_at,
    group_of,
)
from training.config.comparison import BY_RELEVANCE, FROM_SCRATCH, alone, is_post_hoc
from training.config.setup import data_of
from training.report.captions import warning
from training.report.contents import ReportData
from training.report.figures import check_own_folder, remove_pictures
from training.report.page import FIGURES, write_report
from training.report.reading import read_contents
from training.runs import processes, progress
from training.runs.directory import CONFIG, LATENCY, LOCK, METRICS, UNFINISHED, RunDirectory, only_writer, remove_partials
from training.runs.launched import is_first_process
from training.runs.ray_cluster import connected
from training.runs.resume import check_same_comparison, goes_on
from training.runs.stored import read_table
from training.runs.tracking import lost_in_wandb, reachable
from training.scoring.scorers import SCORERS, Scorer
from training.setup import make_trainer, open_data, quiet_libraries, start_launched
from training.stats.numbers import number, shown, signed, unit
from training.truth.tables import as_markdown

# Check options against each other before anything is read or trained: unused options, and methods, budgets and stages that do
# not go together.

INSTEAD = {
    "seed": "; --seeds has those of a comparison",
    "model.budget": "; --budgets has those of a comparison",
    "model.swaps": "; here swaps are a method, learned+swap",
    "model.refit": "; here it is a method, learned+refit",
    "model.keep": "; here the heads to compare with are methods, obs+refit and his+refit",
    "model.gate": "; here other gates are methods, such as dsp",
    "model.pipelined": "; here it is a parameter, learned(pipelined=false)",
}
"""What some of these, and options of the module that methods and budgets set, are called in a comparison."""


def check_unused(config: Namespace, given: Sequence[str]) -> None:
    """Raise :class:`GateError` for options on the command line that a comparison does not use.

    These are options of single runs, which a shared configuration may have, a checkpoint to start from, and trial training.
    """
    for name, instead in (dict.fromkeys(RUN_ONLY_OPTIONS, "") | INSTEAD).items():
        if any(argument.split("=")[0] == f"--{name}" for argument in given):
            raise GateError(f"--{name} is an option of head-gates fit, which a comparison does not use{instead}")
    if data_of(config.data).own_budgets is not None and any(argument.split("=")[0] == "--budgets" for argument in given):
        raise GateError("--budgets is given, but these data know how many heads are needed; --data.spare says how many more")
    if config.ckpt_path is not None:
        raise GateError("ckpt_path is set, but a comparison trains its own dense models; remove it from the configuration")


def check_needed(given: Sequence[str], methods: Sequence[Method], stages: Sequence[str]) -> None:
    """Raise :class:`GateError` for options on the command line of methods or stages that are not compared."""
    modifiers = frozenset().union(*(method.modifiers for method in methods))
    used = {
        "--prices": (any(method.is_learned and method.learned.decides == "price" for method in methods), "lambda to --methods"),
        "--swap.": ("swap" in modifiers, "+swap to a method"),
        "--restarts.rows": (
            any("restarts" in method.modifiers and "refit" not in method.modifiers for method in methods),
            "+restarts to a method without +refit",
        ),
        "--restarts.": ("restarts" in modifiers, "+restarts to a method"),
        "--draws.": ("draws" in modifiers, "+draws to a method"),
        "--refit.": ("refit" in modifiers, "+refit to a method"),
        "--distil.": ("distil" in modifiers, "+distil to a method"),
        "--from_scratch_": ("from scratch" in stages, "from scratch to --stages"),
    }
    for beginning, (is_used, add) in used.items():
        for argument in given:
            if argument.startswith(beginning) and not is_used:
                raise GateError(f"{argument.split('=')[0]} is given, but nothing uses it; add {add}, or remove it")


def check_methods(
    options: PrunerOptions, methods: Sequence[Method], budgets: Sequence[BudgetOption], distil: Mapping[str, float]
) -> None:
    """Check that the module takes the options of each method, before hours of training."""
    for method in methods:
        own: dict[str, Any] = dict(method.learned.options) if method.is_learned else {}
        if "distil" in method.modifiers:
            own |= distil
        if "refit" in method.modifiers and options.why_not_refitted:
            raise GateError(f"the method {method.name!r} cannot be compared: {options.why_not_refitted}; remove +refit")
        for budget in budgets:
            replace(options, **{"budget": budget, **own})  # raises


def check_fixed(options: PrunerOptions, methods: Sequence[Method], stages: Sequence[str]) -> None:
    """Raise :class:`GateError` for stages and methods that frozen weights do not allow."""
    for stage in stages:
        if options.nothing_trains and stage != FROM_SCRATCH and not is_post_hoc(stage):
            raise GateError(f"{options.nothing_trains}, but --stages has {stage!r}; give 'post hoc' alone")
    for method in methods:
        if options.is_half and method.base in BY_RELEVANCE:
            raise GateError(f"{options.nothing_trains}, but {method.base} needs weights in float32; take it out of --methods")


def check_times(options: PrunerOptions, budgets: Sequence[BudgetOption], *, launcher: str) -> None:
    """Raise :class:`GateError` for a latency table that no budget uses or that does not allow a time.

    Also raise it if the table would be measured on another machine than the one that trains.
    """
    times = [budget for budget in budgets if isinstance(budget, str)]
    if options.latency_table is not None:
        if not times:
            raise GateError("--model.latency_table is given, but no budget is a time; add one to --budgets, or remove it")
        table = LatencyTable.read(options.latency_table)
        for time in times:
            TimeLimit.parse(time, table)  # raises
    elif times and launcher == "ray":
        raise GateError(
            f"--budgets has {times[0]}, and this machine need not be like those of the cluster; measure a table on one of them "
            "(head-gates latency) and give --model.latency_table"
        )


def check_kinds(methods: Sequence[Method], budgets: Sequence[BudgetOption]) -> None:
    """Raise :class:`GateError` if budgets are of different kinds, but a method trains for the smallest of them alone."""
    kinds = {frozenset(budget) if isinstance(budget, dict) else None for budget in budgets}
    once = [method.name for method in methods if method.is_learned and method.learned.decides == "once"]
    if once and len(kinds) > 1:
        raise GateError(
            f"{once[0]} learns once, for the smallest budget, and ranks only heads of the kinds that it prunes; make a "
            "comparison of each kind's budgets"
        )


def compare(line: CommandLine) -> RunDirectory | None:
    """Do the comparison of a command line, or several of a benchmark, or list the methods if that is requested."""
    quiet_libraries()
    config = line.options
    if config.list_methods:
        show_methods(stdout())
        return None
    parts, launcher = data_of(config.data).parts, group_of(LauncherOptions, config)
    cluster = connected(launcher, config.trainer.accelerator) if launcher.launcher == "ray" else nullcontext()
    start_launched(line.setup, line.parser.dump(config, skip_unset=False))
    with locked_directory(config.run_dir or f"runs/{config.name}-comparison") as run, cluster:
        return compare_parts(line, run, parts) if parts else compare_on_one(line, run)


def compare_parts(line: CommandLine, run: RunDirectory, parts: Mapping[str, Mapping[str, Any]]) -> RunDirectory:
    """Compare on each data set of a benchmark, in a folder of its name, and write ``truth.csv`` over all of them."""
    config = line.options
    truths = []
    for name, changes in parts.items():
        own = config.clone()
        own.data.init_args.update(Namespace(**changes))
        own.name, own.run_dir = f"{config.name}-{name}", str(run.path / name)
        own.experiments = config.experiments or str(run.path / "experiments")
        with locked_directory(own.run_dir) as part:
            compare_on_one(replace(line, options=own), part)
        if (part.path / "truth.csv").is_file():
            truths.append(read_table(part.path / "truth.csv").assign(program=name))
    if truths and processes.is_first():
        truth = pd.concat(truths, ignore_index=True)
        run.write_table("truth.csv", truth)
        run.write_text("truth.md", as_markdown(truth))
        stdout().print(Markdown(as_markdown(truth)))
    return run


def compare_on_one(line: CommandLine, run: RunDirectory) -> RunDirectory:
    """Compare on one data set."""
    config = line.options
    comparison = comparison_of(line, run)
    budgets, seeds = comparison.budgets, comparison.seeds
    resolved = line.parser.dump(config, skip_unset=False)
    wandb_options = processes.in_first(lambda: reachable(comparison.setup.wandb))  # before hours of work
    check_own_folder(run.path / FIGURES)  # before hours of work too
    check_same_comparison(run, resolved)
    if any(isinstance(budget, str) for budget in budgets):
        first = comparison.setup.with_seed(seeds[0])
        kept = run.path / LATENCY if goes_on(run, resolved) else None
        budgets = limits_of(budgets, first, kept, partial(open_data, first))
        comparison = replace(comparison, budgets=budgets)
    results = all_results(comparison, run, resolved, group_of(LauncherOptions, config))
    if processes.is_first():
        run.withdraw()
        run.write_text(CONFIG, resolved)
        write_tables(run, results, name=config.name, methods=comparison.methods, seeds=seeds, command=line.command)
        (run.path / UNFINISHED).unlink()
        contents = report(run)
        console = stdout()
        show_summary(console, contents)
        if notice := without_facts(comparison.setup, seeds, results):
            console.print(notice, soft_wrap=True)
        for name in ("report.html", "verdict.md", "comparison.csv"):
            console.print(f"{name.split('.')[0]}: {run.path / name}", soft_wrap=True)
        with lost_in_wandb():  # last, so that nothing else is lost
            send_comparison(run, wandb_options, yaml.safe_load(resolved), contents.metric)
    return run


def comparison_of(line: CommandLine, run: RunDirectory) -> Comparison:
    """Return the comparison of a command line."""
    config, given = line.options, line.given
    options = group_of(ComparisonOptions, config)
    methods, seeds, stages = parse_methods(options.all_methods), options.all_seeds, options.all_stages
    check_unused(config, given)
    check_needed(given, methods, stages)
    check_rows(methods, stages)
    setup = line.setup
    budgets: list[BudgetOption] = list(setup.data.own_budgets or options.all_budgets)
    if isinstance(setup.model.budget, str):  # a time, of a configuration that serves single runs
        setup = replace(setup, model=replace(setup.model, budget=None))
    if FROM_SCRATCH in stages:
        setup.check_scratch()
    distil = group_at(DistilWeights, config, "distil.").changes
    check_methods(setup.model, methods, budgets, distil)
    check_fixed(setup.model, methods, stages)
    check_times(setup.model, budgets, launcher=config.launcher)
    check_kinds(methods, budgets)
    searches: dict[str, Any] = {
        "swaps": group_at(SwapSearch, config, "swap."),
        "restarts": group_at(RestartSearch, config, "restarts."),
        "draws": group_at(DrawSearch, config, "draws."),
        "refits": group_at(RefitOptions, config, "refit."),
    }
    return Comparison(
        setup=alone(setup) if config.launcher == "ray" else setup,
        methods=methods,
        budgets=budgets,
        seeds=seeds,
        stages=stages,
        experiments=Path(options.experiments) if options.experiments else run.path / "experiments",
        searches={**searches, "distil": distil, "prices": options.all_prices},
    )


def all_results(comparison: Comparison, run: RunDirectory, resolved: str, launcher: LauncherOptions) -> Results:
    """Return the results of all seeds. Write ``comparison.unfinished.csv`` after every row."""
    processes.start(make_trainer(comparison.setup))
    results = Results()
    pieces = sum(len(entry.stages) for entry in comparison.plan([Budget(1, {})] * len(comparison.budgets)))
    with progress.stage("comparison", len(comparison.seeds) * pieces) as shown:
        for seed in comparison.seeds:
            experiments, selector = comparison.of_seed(seed)
            results.budgets, plan = selector.budgets, comparison.plan(selector.budgets)
            if seed == comparison.seeds[0]:  # whose data and model fit the options
                if processes.is_first() and not (run.path / METRICS).is_file():
                    run.write_text(CONFIG, resolved)  # that of the tables which are there stays with them
                keep_table(comparison.budgets, run)
                if launcher.launcher == "ray":
                    do_on_ray(comparison, plan, launcher)
                elif expected := estimate(experiments, plan, seeds=len(comparison.seeds)):
                    progress.notice(expected)
            for row in run_seed(experiments, selector, plan, results, shown):
                results.rows.append(row)
                if processes.is_first():
                    run.write_table(UNFINISHED, results.table())
            results.scores.append(score_columns(experiments, selector, results.rankings))
            results.prices.append(price_rows(experiments, selector))
            results.truth += truth_rows(experiments, results)
            results.carried += carried_rows(experiments, results)
            results.pruner, results.data = experiments.pruner, experiments.data
    return results


@progress.stage("report")
def report(run: RunDirectory) -> ReportData:
    """Write ``report.html`` with its pictures, and remove pictures of methods that are no longer compared."""
    remove_pictures(run.path / FIGURES)
    contents = read_contents(run.path)
    write_report([contents], run.path / "report.html")
    return contents


def show_summary(console: Console, contents: ReportData) -> None:
    """Print means with intervals and differences to the dense model: a row per stage and method, two columns per budget."""
    summary, metric = contents.summary, contents.metric
    of = "mean over seeds (95 % interval)" if (summary["seeds"] > 1).any() else "one seed"
    table = Table("stage", "method", title=f"test {metric}{unit(metric)}, {of}")
    budgets = sorted(summary["budget"].unique(), reverse=True)
    for budget in budgets:
        table.add_column(contents.label(budget), justify="right")
        table.add_column("- dense", justify="right")
    of_dense: dict[str, float] = dict(summary[summary["method"] == "dense"][["stage", "mean"]].itertuples(index=False))
    for (stage, method), rows in summary.sort_values("stage", kind="stable").groupby(["stage", "method"], sort=False):
        cells = dict.fromkeys(budgets, ("", ""))
        for budget, mean, low, high in rows[["budget", "mean", "low", "high"]].itertuples(index=False):
            interval = "" if math.isnan(low) else f" ({number(metric, low)} to {number(metric, high)})"  # one seed has none
            lost = mean - of_dense[stage] if stage in of_dense and method != "dense" else math.nan
            cells[budget] = (number(metric, mean) + interval, "" if math.isnan(lost) else signed(shown(metric, lost)))
        table.add_row(str(stage), str(method), *(text for pair in cells.values() for text in pair))
    console.print(table)
    if notice := warning(contents):
        console.print(notice, soft_wrap=True)


def _keeps_experiments(folder: Path) -> bool:
    """Return whether a folder has only experiments, finished or interrupted."""
    if not folder.is_dir():
        return False
    inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return all((path / DETERMINED_BY).is_file() for path in inside)


@contextmanager
def locked_directory(path: str) -> Iterator[RunDirectory]:
    """Lock the directory for the first process, and yield it in all; see :func:`locked_by_one`."""
    with ExitStack() as held:
        yield processes.in_first(lambda: held.enter_context(locked_by_one(path)))


@contextmanager
def locked_by_one(path: str) -> Iterator[RunDirectory]:
    """Lock a directory for this comparison: a new or empty one, or a comparison to continue."""
    folder = Path(path)
    with only_writer(folder) if is_first_process(os.environ) else nullcontext():
        held = {path.name for path in folder.iterdir() if not is_partial(path)} if folder.is_dir() else set()
        is_comparison = _keeps_experiments(folder / "experiments") or held & {"masks.json", UNFINISHED}
        if "checkpoints" in held or (held - {CONFIG, LATENCY, LOCK} and not is_comparison):
            raise GateError(f"{path!r} holds something else than a comparison; give another --run_dir")
        if is_first_process(os.environ):
            remove_partials(folder)
        yield RunDirectory(folder)


def show_methods(console: Console) -> None:
    """Print every method with its parameters, its description and its source."""
    table = Table("method", "parameters, the default first", "what decides which heads stay", "source", title="Methods")
    described: dict[str, Learned | Scorer | Outside] = {**LEARNED, **SCORERS, **OUTSIDE}
    for name, method in described.items():
        if "(" in name:  # a method with other parameters
            continue
        values = {key: "|".join(str(one).lower() for one in own) for key, own in PARAMETERS.get(name, {}).items()}
        table.add_row(name, "\n".join(f"{key}={text}" for key, text in values.items()), method.what, method.source)
    console.print(table)
    for name, what in MODIFIERS.items():
        console.print(f"+{name}: {what}")
