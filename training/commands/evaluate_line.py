"""What can be wrong with the line of ``python -m training evaluate``, told before PyTorch is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gates.errors import GateError
from training.cli.line import CommandLine
from training.commands.evaluate_parser import FORMS
from training.commands.unused import check_no_others
from training.config.checks import check_positive
from training.config.paths import local_path
from training.runs.outputs import check_output_folder
from training.runs.run_directory import CONFIG

RESULTS, TABLE = "results.json", "results.csv"


def check_line(line: CommandLine) -> None:
    """Raises :class:`GateError` for a missing package, and for values that are none or do not go together."""
    options = line.options
    check_harness()
    tasks = task_names(options.tasks)
    for task in tasks:
        if is_file(task) and not Path(task).is_file():
            raise GateError(f"--tasks has {task!r}, and there is no such file; check the path")
    if options.limit is not None and (options.limit <= 0 or (options.limit > 1 and options.limit % 1)):
        raise GateError(f"--limit is {options.limit}; expected a number of examples, or a share between 0 and 1")
    if options.fewshot is not None and options.fewshot < 0:
        raise GateError(f"--fewshot is {options.fewshot}; expected 0 or more")
    check_positive(**{"--batch_size": options.batch_size})
    if not is_run(options.model):
        check_no_others(line.given, "a model that is no run", ("--forms",))
    elif not options.forms or len(set(options.forms)) < len(options.forms):
        raise GateError(f"--forms is {options.forms}; expected some of {', '.join(FORMS)}, each once")
    if (folder := output_folder(options.model, options.output)) is not None:
        check_output_folder(folder, (RESULTS, TABLE))


def check_harness() -> None:
    """Raises :class:`GateError` if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise GateError("evaluate needs lm-evaluation-harness, which is not installed; run pip install 'lm_eval[hf]'")


def task_names(text: str) -> list[str]:
    """Names and files, each once, in their order. Raises :class:`GateError` for none."""
    names = [local_path(name) if is_file(name) else name for name in map(str.strip, text.split(","))]
    if not all(names):
        raise GateError(f"--tasks is {text!r}; expected names or files, separated by commas")
    return list(dict.fromkeys(names))


def is_file(task: str) -> bool:
    """Whether a task is a file's name rather than one of the harness's."""
    return task.endswith((".yaml", ".yml"))


def is_run(model: str) -> bool:
    """Whether it is a directory that fit wrote, or began to."""
    return (Path(model) / CONFIG).is_file()


def output_folder(model: str, output: str | None) -> Path | None:
    """Where results go; None for nowhere."""
    if output is not None:
        return Path(output)
    return Path(model) / "evaluation" if is_run(model) else None
