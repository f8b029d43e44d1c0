"""Check the options and paths of a run before PyTorch is loaded: most typing mistakes, within a second or two.

Contents of files and of models are checked where they are read.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from gates.errors import GateError
from gates.gating.latency import LatencyTable
from training.cli.command_line import COMPARISON_GROUPS, CommandLine
from training.config import ComparisonOptions, LauncherOptions, Setup, group_at, group_of
from training.config.comparison import BY_RELEVANCE, alone
from training.config.data import Documents, Images, ParallelText, SentenceFiles, Tags
from training.config.model import AUTO, GivenBudget
from training.data.files import check_there
from training.runs.directory import RunDirectory, refuse_busy
from training.runs.launched import check_alone, is_first_process, launched
from training.runs.ray_cluster import check_ray
from training.stats.numbers import kinds_kept

# Options on a command line that nothing would use. A configuration may have them, because it may serve other runs too.


def _streams(setup: Setup) -> bool:
    return isinstance(setup.data, Documents) and setup.data.streaming


STREAMED = ("--data.kept_blocks", "--data.select_blocks", "--data.test_blocks", "--data.shuffle_buffer")
USED: dict[str, tuple[Callable[[Setup], bool], str]] = {
    "--model.distil_temperature": (lambda setup: setup.model.distil > 0, "add --model.distil, such as 0.5"),
    "--model.price": (
        lambda setup: setup.model.budget is None or setup.model.gate == "clamped-linear",
        "add --model.budget null, so that the price decides how many heads stay",
    ),
    "--model.latency_table": (
        lambda setup: setup.model.is_timed,
        "add --model.budget with a time, such as 0.7x",
    ),
    "--model.max_loss": (lambda setup: setup.model.budget == AUTO, "add --model.budget auto"),
    "--model.init_score": (lambda setup: setup.model.init_spread != 0, "add --model.init_spread, such as 1"),
    "--model.temperature": (lambda setup: setup.model.gate == "hard-concrete", "it is of hard-concrete gates"),
    "--model.initial_log_alpha": (lambda setup: setup.model.gate == "hard-concrete", "it is of hard-concrete gates"),
    "--data.max_length": (lambda setup: not isinstance(setup.data, Images), "images have no length"),
    "--average_every": (lambda setup: setup.weights.average_last > 1, "add --average_last, such as 5"),
    "--retrained": (lambda setup: setup.end.compare == "full" or not setup.end.retrained, "add --compare full"),
    "--from_scratch": (lambda setup: setup.end.compare == "full" or not setup.end.from_scratch, "add --compare full"),
    "--curve": (lambda setup: setup.end.compare != "none" or not setup.end.curve, "add --compare posthoc"),
    "--from_scratch_epochs": (lambda setup: bool(setup.end.from_scratch), "add --from_scratch [learned]"),
    "--from_scratch_learning_rate": (lambda setup: bool(setup.end.from_scratch), "add --from_scratch [learned]"),
    **dict.fromkeys(STREAMED, (_streams, "add --data.streaming true")),
}
"""By option, whether something uses it, and what to do otherwise."""
COMPARISON_SPELLINGS = ("--model.distil_temperature", "--model.init_score", "--average_every", "--data.max_length", *STREAMED)
"""Those that no method of a comparison would use by itself."""


def check_used(setup: Setup, given: Sequence[str], among: Collection[str] = tuple(USED)) -> None:
    """Raise :class:`GateError` for the first option on the command line, among those, that changes nothing in a run."""
    names = {argument.split("=")[0] for argument in given}
    for option, (is_used, instead) in USED.items():
        if option in names and option in among and not is_used(setup):
            raise GateError(f"{option} is given, but nothing in this run uses it; {instead}, or remove it")


def check_no_others(given: Sequence[str], option: str, others: Collection[str]) -> None:
    """Raise :class:`GateError` for the first of the other options that is given, because this option does not use it."""
    for argument in given:
        if (name := argument.split("=")[0]) in others:
            raise GateError(f"{name} is given, but {option} does not use it; remove one of them")


def check_run(line: CommandLine) -> None:
    """Raise :class:`GateError` for options that cannot be used, and for files and folders that are not there."""
    world = launched(os.environ)
    if getattr(line.options, "list_methods", False) or (world is None and not is_first_process(os.environ)):
        return  # the process that started this one has checked
    setup = line.setup
    methods = setup.end.retrained or []
    if "methods" in line.options:
        for group, prefix in COMPARISON_GROUPS:
            group_at(group, line.options, prefix)  # raises
        _check_launcher(group_of(LauncherOptions, line.options), setup, line.given)
        options = group_of(ComparisonOptions, line.options)
        methods = options.all_methods
        _check_budgets("--budgets", options.all_budgets)
        distils = any("+distil" in str(method) for method in methods)
        check_used(setup, line.given, set(COMPARISON_SPELLINGS) - ({"--model.distil_temperature"} if distils else set()))
    else:
        check_used(setup, line.given)
        _check_budgets("--model.budget", [setup.model.budget])
        if world is None:  # otherwise the first process claims it for all
            RunDirectory.claim(setup.run.run_dir, setup.run.name, setup.run.existing)
    if world is not None:
        world.fitted(setup.trainer)  # raises
    elif setup.run.run_dir is not None:
        refuse_busy(Path(setup.run.run_dir))
    if setup.model.latency_table is not None:
        setup.within(LatencyTable.read(setup.model.latency_table))  # raises
    if isinstance(setup.data, Tags):
        _check_one_prediction(methods)
    check_places(line)


def announcement(line: CommandLine) -> str:
    """Return the request in a sentence. The time it takes is known once data and model are read."""
    setup = line.setup
    model, budget = setup.model.backbone or "a new model", setup.model.budget
    if "methods" in line.options:
        options = group_of(ComparisonOptions, line.options)
        methods, budgets, seeds = len(options.all_methods), len(options.all_budgets), len(options.all_seeds)
        work = f"comparing on {model}: methods {methods}, budgets {budgets}, seeds {seeds}"
    elif setup.model.prune == 0 and budget is None:
        work = f"training {model} with all heads"
    else:
        work = f"pruning {model} to {_in_words(budget, setup.model.unit)}"
    folder = "" if setup.run.run_dir is None else f", in {setup.run.run_dir}"
    return f"{work}{folder}"


def _in_words(budget: GivenBudget | None, unit: str) -> str:
    if budget is None:
        return "the heads that are worth their price"
    if budget == AUTO:
        return "the fewest heads that keep its quality"
    if isinstance(budget, float) and budget <= 1:
        return f"{100 * budget:g} % of its {unit}s"
    if isinstance(budget, dict):
        return f"{kinds_kept(budget)} {unit}s"
    return f"{budget} {unit}s" if isinstance(budget, int | float) else f"heads within a time of {budget}"


def check_places(line: CommandLine) -> None:
    """Raise :class:`GateError` for files and folders that are not there. Work offline if the hub does not answer."""
    backbone, data = line.setup.model.backbone, line.setup.data
    if backbone is not None:
        _check_folder(backbone)
    for split, file in _files_of(line.setup):
        check_there(file, split)
    names = (backbone, getattr(data, "dataset", None), getattr(data, "tokenizer", None))
    elsewhere = [name for name in names if name is not None and not Path(name).exists()]
    if elsewhere and not os.environ.get("HF_HUB_OFFLINE") and not _hub_answers():
        os.environ["HF_HUB_OFFLINE"] = "1"  # before its library is imported, which would try again for a minute
        print(
            f"warning: {elsewhere[0]!r} is not a folder here, and the Hugging Face Hub does not answer; only its cache is used",
            file=sys.stderr,
        )


def _hub_answers() -> bool:
    """Return whether the server of the hub, or the proxy before it, takes a connection within 2 seconds."""
    server = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    address = urlsplit(getproxies().get(server.scheme, "")) if not proxy_bypass(server.hostname or "") else None
    address = address if address and address.hostname else server
    answers: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            port = address.port or (80 if address.scheme == "http" else 443)
            socket.create_connection((str(address.hostname), port), timeout=2.0).close()
            answers.append(True)

    attempt = Thread(target=connect, daemon=True)  # looking up a name has no time limit of its own
    attempt.start()
    attempt.join(timeout=3.0)
    return bool(answers)


def _check_budgets(option: str, budgets: Sequence[object]) -> None:
    for budget in budgets:
        if isinstance(budget, int | float) and budget == 0:
            raise GateError(f"{option} has {budget}, which keeps no head; expected at least 1 head")


def _check_launcher(options: LauncherOptions, setup: Setup, given: Sequence[str]) -> None:
    if options.launcher == "ray":
        alone(setup)  # raises
        check_alone("--launcher ray", os.environ)
        check_ray(options)
        return
    for argument in given:
        if argument.startswith("--ray_"):
            raise GateError(f"{argument.split('=')[0]} is given, but nothing uses it; add --launcher ray, or remove it")


def _check_one_prediction(methods: Sequence[str]) -> None:
    for method in methods:
        if str(method).split("+")[0] in BY_RELEVANCE:
            raise GateError(
                f"{method} follows the one prediction of an example back through the model, and with --data Tags every word "
                "has its own; take it out of the methods"
            )


def _check_folder(backbone: str) -> None:
    """Raise :class:`GateError` for the path of a model that is not there. Other texts are names on the hub."""
    folder = Path(backbone)
    if folder.is_file():
        raise GateError(f"--model.backbone {backbone!r} is a file; give the folder or hub name of a model (GGUF is not read)")
    if not folder.is_dir() and (folder.is_absolute() or backbone.startswith((".", "~")) or backbone.count("/") > 1):
        raise GateError(f"the model folder {backbone!r} does not exist; check --model.backbone")


def _files_of(setup: Setup) -> Iterator[tuple[str, str]]:
    """Yield the local files of the data with their splits."""
    data = setup.data
    if isinstance(data, ParallelText):
        yield from ((split, file) for split, files in data.local.items() for file in files)
    elif isinstance(data, SentenceFiles | Tags | Documents):
        yield from data.files.items()
    elif isinstance(data, Images):
        for split, folder in data.folders.items():
            if not Path(folder).is_dir():
                raise GateError(f"the {split} folder {folder!r} does not exist; check the path")
