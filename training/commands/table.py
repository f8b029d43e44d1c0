"""Every command: its parser, and its work, which is imported once the line is read."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from jsonargparse import ArgumentParser

from gates.errors import GateError
from training.cli.command_line import (
    COMPARISON_GROUPS,
    GROUPS,
    LIST_METHODS,
    RUN_ONLY_OPTIONS,
    CommandLine,
    build_comparison_parser,
    build_latency_parser,
    build_parser,
    called_as,
    data_options,
    kinds_in,
    parse,
    split_at_dashes,
    split_off,
    split_options,
    with_config,
)
from training.cli.exit import finish
from training.cli.help import Option, help_of_parser, help_of_run, options_of_group
from training.commands import options as parsers
from training.config.data import KINDS
from training.config.run import LatencyOptions
from training.runs import progress
from training.runs.launched import check_alone
from training.runs.own_code import import_from_here

CONTINUES = "the same command continues"
NOTHING = "nothing was written"


@dataclass(frozen=True)
class Command:
    """A command.

    Args:
        work: The ``module:function`` that gets the :class:`CommandLine`.
        groups: The groups of options of a command that trains, with their prefixes.
        hidden: The options that it takes from configurations without using them.
        check: The ``module:function`` that gets the line too, before anything heavy is imported.
        says: A sentence on its work, with names of its options, for a command that takes seconds to load.
        takes_rest: Whether it passes on the arguments after a lone ``--``.
        trains_together: Whether several processes can do it together.
        passes_on: The beginnings of options that the work itself reads.
    """

    purpose: str
    parser: Callable[[], ArgumentParser]
    work: str
    when_stopped: str = NOTHING
    groups: tuple[tuple[type, str], ...] = ()
    hidden: Collection[str] = ()
    check: str | None = None
    says: str = ""
    takes_rest: bool = False
    trains_together: bool = False
    passes_on: Collection[str] = ()

    @property
    def trains(self) -> bool:
        """Return whether it takes the options of a run."""
        return bool(self.groups)


COMMANDS = {
    "fit": Command(
        "learn which heads to keep, compare, export",
        build_parser,
        "training.comparison.run:fit",
        "nothing was written; start again",
        groups=GROUPS,
        trains_together=True,
        check="training.commands.preflight:check_run",
    ),
    "compare": Command(
        "methods x budgets x seeds, at equal training cost",
        build_comparison_parser,
        "training.comparison.grid:compare",
        CONTINUES,
        groups=(*COMPARISON_GROUPS, *GROUPS),
        hidden=RUN_ONLY_OPTIONS,
        trains_together=True,
        check="training.commands.preflight:check_run",
    ),
    "report": Command(
        "runs and comparisons as one page, with pictures", parsers.report_parser, "training.commands.report:report_runs"
    ),
    "summary": Command("tables over runs", parsers.summary_parser, "training.commands.summary:show"),
    "analyze": Command(
        "the function of the heads of a trained model",
        parsers.analyze_parser,
        "training.analysis.analyze:analyze",
        "experiments that had ended are written",
        says="analysing {run}, into {run_dir}",
        takes_rest=True,
        passes_on=("--other_data.",),
    ),
    "sweep": Command(
        "a sweep in W&B's format, on this machine",
        parsers.sweep_parser,
        "training.sweeps.local:run_sweep",
        CONTINUES,
        takes_rest=True,
    ),
    "export": Command(
        "a finished run's model in another form or at another budget",
        parsers.export_parser,
        "training.commands.export:export_run",
        says="exporting {run} as {format}",
        takes_rest=True,
    ),
    "convert": Command(
        "checkpoints whose heads Transformers 4 pruned", parsers.convert_parser, "training.commands.convert:convert_checkpoint"
    ),
    "translate": Command(
        "a file translated by one or more systems, with BLEU",
        parsers.translate_parser,
        "training.commands.translate:translate_files",
    ),
    "latency": Command(
        "how long a model takes with which heads, for budgets in time",
        build_latency_parser,
        "training.commands.latency:measure_latency",
        groups=((LatencyOptions, ""), *GROUPS),
        hidden=RUN_ONLY_OPTIONS,
        check="training.commands.preflight:check_places",
        says="measuring the latency table {output}",
    ),
}


def usage() -> str:
    """Return every command with its purpose."""
    lines = [f"  {name:<10} {command.purpose}" for name, command in COMMANDS.items()]
    first, last = f"usage: {called_as()} COMMAND [OPTIONS]", "COMMAND --help shows a command's options."
    return "\n".join([first, "", *lines, "", last, "--version shows the version."])


def version() -> str:
    """Return the version of the installed product."""
    try:
        return metadata.version("head-gates")
    except metadata.PackageNotFoundError:
        return "not installed"


def run_command(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0, 2 for input that the user can correct, 130 after Ctrl+C."""
    command = COMMANDS[name]
    given = list(sys.argv[1:] if arguments is None else arguments)
    if text := _requested_text(name, command, given):
        return finish(lambda: text, print, when_stopped=NOTHING)
    import_from_here()  # data and scores of the user's own
    return finish(lambda: read(name, given), lambda line: work_on(name, line), when_stopped=command.when_stopped)


def work_on(name: str, line: CommandLine) -> object:
    """Do the work of a command."""
    command = COMMANDS[name]
    _check_temporary_files()
    if not command.trains_together:
        check_alone(name, os.environ)
    if command.check is not None:
        load(command.check)(line)
    if command.trains and line.options.trainer.enable_progress_bar is False:
        progress.hide()
    if not (sentence := first_line(command, line)):
        return load(command.work)(line)
    with progress.stage(f"{sentence}: loading libraries"):
        work = load(command.work)
    return work(line)


def first_line(command: Command, line: CommandLine) -> str:
    """Return a sentence on the work of a command; empty for one that is done in a second or two."""
    if getattr(line.options, "list_methods", False):
        return ""
    if command.trains_together:
        return str(load("training.commands.preflight:announcement")(line))
    return command.says.format(**vars(line.options))


def _check_temporary_files() -> None:
    """Raise an error where no directory takes temporary files, because PyTorch and matplotlib need one to be imported."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise GateError(
            f"no temporary files can be written ({error.args[-1]}); set TMPDIR to a directory that takes them"
        ) from error


def read(name: str, given: Sequence[str]) -> CommandLine:
    """Read the command line of a command."""
    command = COMMANDS[name]
    parser = command.parser()
    own, rest = split_at_dashes(given)
    if rest and not command.takes_rest:
        raise GateError(f"{name} passes nothing on, so nothing may follow --, but {rest[0]!r} does; put options before it")
    if command.trains:
        options = parse(parser, with_config(own), also=_data_options(own))
    else:
        options = parse(parser, split_options(own, lambda name: name.startswith(tuple(command.passes_on)))[1])
    return CommandLine(f"{called_as(name)} {shlex.join(given)}".rstrip(), own, rest, parser, options)


def load(path: str) -> Callable[[Any], Any]:
    """Return the function that ``module:function`` names."""
    module, _, name = path.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return found


def _data_options(given: Sequence[str]) -> set[str]:
    """Return the options of the data that may stand on this line: any for a kind of data of the user's own."""
    chosen = [argument.removeprefix("--data=") for argument in split_off(given, "--data")[0] if argument != "--data"]
    chosen = chosen or kinds_in(given)
    if any("." in name and name.rpartition(".")[2] not in KINDS for name in chosen):
        return {argument.split("=")[0] for argument in given if argument.startswith("--data.")}
    return data_options()


def _requested_text(name: str, command: Command, given: Sequence[str]) -> str | None:
    """Return the text of ``--version`` or of the help, if the line asks for one."""
    before = split_at_dashes(given)[0]
    if "--version" in before:
        return f"head-gates {version()}"
    everything = "--help-all" in before
    if not (everything or "--help" in before or "-h" in before):
        return None
    if not command.trains:
        return help_of_parser(called_as(name), command.parser())
    compared = [option for group in COMPARISON_GROUPS if not group[1] for option in options_of_group(*group)]
    own = {
        "compare": {"The comparison": [*compared, Option("list_methods", "", LIST_METHODS)]},
        "latency": {"The measurement": options_of_group(LatencyOptions)},
    }
    return help_of_run(
        f"usage: {called_as(name)} [OPTIONS]",
        f"{command.purpose[0].upper()}{command.purpose[1:]}.",
        command.groups,
        own=own.get(name, {}),
        hidden=command.hidden,
        everything=everything,
    )
