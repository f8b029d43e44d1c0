"""Read a command line: its default configuration, its parser, and every mistake in one sentence."""

from __future__ import annotations

import difflib
import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, get_loader, set_loader

from gates.errors import GateError
from training.cli.help import kind_of
from training.config import (
    ComparisonOptions,
    DistilWeights,
    DrawSearch,
    EndOfRun,
    LauncherOptions,
    PrunerOptions,
    RefitOptions,
    RestartSearch,
    RunOptions,
    ScratchTraining,
    Setup,
    SwapSearch,
    WandbOptions,
    WeightsKept,
)
from training.config.checks import is_text
from training.config.data import KINDS
from training.config.data_base import Data
from training.config.paths import LocalPath
from training.config.run import LatencyOptions, TrainerOptions
from training.config.yaml_text import check_yaml, read_yaml

# The configuration of a command line that names none.

CONFIGS = Path(__file__).parents[2] / "configs"
PACKAGED_CONFIGS = Path(__file__).parents[1] / "configs"
OF_TRANSLATION = ("--data.train_source", "--data.source_column")
OF_TEXT = ("--data.train_file", "--data.dataset", "--model.backbone")
OF_KINDS = {
    "Documents": "causal_lm.yaml",
    "SyntheticDocuments": "synthetic_causal_lm.yaml",
    "Ratings": "text.yaml",
    "Glue": "glue.yaml",
    "Tags": "token_classification.yaml",
    "Images": "image_classification.yaml",
}
KIND_OF_FILES = {"--data.train_source": "ParallelText", "--data.train_file": "Text"}
"""Options that imply a kind of data if neither the command line nor a configuration names one."""


def with_config(given: Sequence[str]) -> list[str]:
    """Return a command line with its defaults: the configuration for the options, and the kind of data.

    Configurations come first, so that an option overrides them wherever it stands.
    """
    names = [argument.split("=")[0] for argument in given]
    if "--config" not in names:
        named, _ = split_off(given, "--data")
        kind = named[-1].removeprefix("--data=") if named else ""
        return ["--config", str(default_config(names, kind)), *given]
    _, others = split_off(given, "--config")
    configs = [part for file in configurations_in(given) for part in ("--config", shipped(file))]
    implied = next((kind for option, kind in KIND_OF_FILES.items() if option in names), None)
    if implied is None or "--data" in names or "--data.class_path" in names or kinds_in(configs):
        return [*configs, *others]
    return [*configs, "--data", implied, *others]


def default_config(names: Sequence[str] = (), kind: str = "") -> Path:
    """Return the configuration for these options and this kind of data, in a checkout or an installed copy.

    A named kind of data has the one of :data:`OF_KINDS`. Parallel text has ``translation.yaml``, and a model or text of the
    user ``text.yaml``. All else has the embedded ``default.yaml``.
    """
    name = "default.yaml"
    if kind in OF_KINDS:
        name = OF_KINDS[kind]
    elif any(option in names for option in OF_TRANSLATION):
        name = "translation.yaml"
    elif any(option in names for option in OF_TEXT):
        name = "text.yaml"
    found = packaged(name)
    if found is None:
        raise GateError(f"the configuration {name} is not installed; give one with --config")
    return found


def packaged(name: str | Path) -> Path | None:
    """Return the file of this name that comes with the product, or None."""
    return next((folder / name for folder in (CONFIGS, PACKAGED_CONFIGS) if (folder / name).is_file()), None)


def shipped(path: str) -> str:
    """Return a path as it is, or that of the file of this name that comes with the product, such as ``configs/text.yaml``."""
    path = os.path.expanduser(path)
    within = Path(path).relative_to("configs") if Path(path).parts[:1] == ("configs",) else Path(path)
    found = None if Path(path).exists() or within.is_absolute() else packaged(within)
    return path if found is None else str(found)


def split_off(given: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """Split the arguments of an option, as ``--option value`` or ``--option=value``, from the others."""
    return split_options(given, lambda name: name == option)


def split_options(given: Sequence[str], chosen: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Split the arguments of the options whose names a function chooses from the others."""
    own: list[str] = []
    others: list[str] = []
    arguments = iter(given)
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not chosen(name):
            others.append(argument)
            continue
        own += [argument, *([value] if not equals and (value := next(arguments, None)) is not None else [])]
    return own, others


def configurations_in(arguments: Sequence[str]) -> list[str]:
    """Return the files that ``--config`` names."""
    values = [argument.removeprefix("--config=") for argument in split_off(arguments, "--config")[0]]
    return [value for value in values if value != "--config"]


def kinds_in(arguments: Sequence[str]) -> list[str]:
    """Return the kinds of data that the configurations of a command line name. The parser reports unreadable files."""
    found = []
    for file in configurations_in(arguments):
        with suppress(GateError, yaml.YAMLError):
            content = read_yaml(file, "the configuration")
            data = content.get("data") if isinstance(content, dict) else None
            found.append(data.get("class_path") if isinstance(data, dict) else data)
    return [kind for kind in found if isinstance(kind, str)]


# The parsers of the commands that take the options of a run.

GROUPS: tuple[tuple[type, str], ...] = (
    (RunOptions, ""),
    (PrunerOptions, "model."),
    (EndOfRun, ""),
    (ScratchTraining, ""),
    (WeightsKept, ""),
    (TrainerOptions, "trainer."),
    (WandbOptions, "wandb."),
)
"""The options of a run except those of its data, each group with its prefix."""
COMPARISON_GROUPS: tuple[tuple[type, str], ...] = (
    (ComparisonOptions, ""),
    (LauncherOptions, ""),
    (RestartSearch, "restarts."),
    (SwapSearch, "swap."),
    (DrawSearch, "draws."),
    (RefitOptions, "refit."),
    (DistilWeights, "distil."),
)
RUN_ONLY_OPTIONS = ("seed", "existing", "ckpt_path", "compare", "retrained", "curve", "patience", "from_scratch")
"""Options of ``training.fit`` that a configuration may hold and a comparison does not use."""
LIST_METHODS = "Show every method with its source, and end."


def build_parser(groups: Sequence[tuple[type, str]] = ()) -> ArgumentParser:
    """Return the parser of the options of a run, and of further groups with their prefixes."""
    parser = ArgumentParser()
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; see the folder configs.")
    for group, prefix in GROUPS:
        parser.add_class_arguments(group, prefix.removesuffix(".") or None)
    parser.add_subclass_arguments(Data, "data", required=True)
    for group, prefix in groups:
        parser.add_class_arguments(group, prefix.removesuffix(".") or None)
    return parser


def build_comparison_parser() -> ArgumentParser:
    """Return the parser of a comparison."""
    parser = build_parser(COMPARISON_GROUPS)
    parser.add_argument("--list_methods", action="store_true", help=LIST_METHODS)
    return parser


def build_latency_parser() -> ArgumentParser:
    """Return the parser of a latency table."""
    return build_parser([(LatencyOptions, "")])


def data_options(kinds: Collection[type] = tuple(KINDS.values())) -> set[str]:
    """Return the options of all kinds of data, which the parser does not list because they depend on the kind."""
    names = {field.name for kind in kinds for field in fields(kind)}
    return {f"--data.{name}" for name in names} | {f"--data.init_args.{name}" for name in names}


# Read a command line, with every mistake in one sentence.

PARSER_OPTIONS = ("--print_config", "--data.class_path", "--data.help")
IN_WORDS = {
    "N": "a whole number", "X": "a number", "TEXT": "a text", "[..]": "a list", "{..}": "one for each kind",
    "PATH": "a path on this machine", "NAME": "a hub name",
}  # fmt: skip
_LOADER = get_loader("yaml")


@dataclass(frozen=True)
class CommandLine:
    """A command line that has been read.

    Args:
        command: The command that starts it again.
        given: The arguments up to a lone ``--``.
        rest: The arguments behind that, for a command that passes them on.
    """

    command: str
    given: tuple[str, ...]
    rest: tuple[str, ...]
    parser: ArgumentParser
    options: Any

    @cached_property
    def setup(self) -> Setup:
        """The options of a run, checked once."""
        return Setup.of(self.options)


def split_at_dashes(arguments: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arguments before a lone ``--``, and those after it."""
    place = list(arguments).index("--") if "--" in arguments else len(arguments)
    return tuple(arguments[:place]), tuple(arguments[place + 1 :])


def parse(parser: ArgumentParser, arguments: Sequence[str], *, also: Collection[str] = ()) -> Any:
    """Return the options that the arguments state. The parser takes those of ``also`` although it does not list them."""
    if unreadable := [argument for argument in arguments if not is_text(argument)]:
        raise GateError(f"the command line has {unreadable[0]!r}, which is not UTF-8 text; write or rename it as UTF-8")
    check_spelling(arguments, parser, also)
    for file in configurations_in(arguments):
        with suppress(yaml.YAMLError):  # the parser names the place
            read_yaml(file, "the configuration")
    parser.exit_on_error = False
    parser.allow_abbrev = False
    set_loader("yaml", _load_checked, (yaml.YAMLError,))  # also for files that a configuration names
    try:
        return parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise GateError(complaint_of(error, parser)) from error


def _load_checked(text: str) -> Any:
    check_yaml(text, repr(text) if len(text) < 60 else "a value")
    return _LOADER(text)


def options_of(parser: ArgumentParser) -> set[str]:
    """Return all options that a parser lists, with the dashes."""
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}


def hints_of(parser: ArgumentParser, kinds: Collection[type] = tuple(KINDS.values())) -> dict[str, Any]:
    """Return the type of every option by its name without dashes, with those of these kinds of data."""
    hints = {action.dest: getattr(action, "_typehint", None) or action.type for action in parser._actions}
    for kind in kinds:
        hints |= {f"data.{option}": hint for option, hint in get_type_hints(kind).items()}
    return {name: hint for name, hint in hints.items() if hint is not None}


def check_spelling(arguments: Sequence[str], parser: ArgumentParser, also: Collection[str] = ()) -> None:
    """Raise :class:`GateError` for the first argument that looks like an option and is none."""
    known = options_of(parser) | set(also)
    dictionaries = tuple(f"--{name}." for name, hint in hints_of(parser).items() if "dict[" in str(hint))
    for argument in arguments:
        name = argument.split("=")[0]
        if name in known and name != "--data" and any(other.startswith(f"{name}.") for other in known):
            raise GateError(f"{name} stands for a group of options; give each as {name}.NAME, or all in a file with --config")
        is_option = name in known or name in PARSER_OPTIONS or name.startswith(dictionaries)
        if name.startswith("--") and name != "--" and not is_option:
            raise GateError(f"there is no option {name}{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the nearest options as the end of a sentence: those of the same last name, or one that is spelt alike."""
    last = {option: option.lstrip("-").rpartition(".")[2] for option in sorted(known) if option != name}
    wanted = name.lstrip("-").rpartition(".")[2]
    near = [option for option in last if last[option] == wanted][:2] or difflib.get_close_matches(name, list(last), n=1)
    if not near:
        alike = difflib.get_close_matches(wanted, list(last.values()), n=1)
        near = [option for option in last if last[option] in alike][:1]
    return f"; did you mean {' or '.join(near)}?" if near else "; --help lists the options"


def complaint_of(error: ArgumentError, parser: ArgumentParser) -> str:
    """Return the parser's error in one sentence with the option, its value and the expected values."""
    text = " ".join(str(error).split())
    known = options_of(parser) | data_options()
    required = re.search(r"(?:arguments are required: |Key \")([\w., -]+)", text)
    if required and "required" in text:
        names = [f"--{name}" if f"--{name}" in known else name.upper() for name in required[1].split(", ")]
        ending = "is missing; give it" if len(names) == 1 else "are missing; give them"
        return f"{' and '.join(names)} {ending}, and see --help"
    if valueless := re.search(r"argument (--[\w.-]+): expected (?:one|at least one) argument", text):
        return f"{valueless[1]} needs a value; see --help"
    if extra := re.search(r"[Uu]nrecognized arguments: (\S+)", text):
        return f"{extra[1]!r} stands where no value is expected; options begin with --, see --help"
    kind_of_data = re.search(r"Problem with given class_path '[\w.]*?(\w+)'.*", text)
    text = kind_of_data[0] if kind_of_data else text
    if "accept" in text and (unknown := re.search(r"[Oo]ption '([\w.-]+)'", text)):
        group = re.search(r"Group '([\w.-]+)'", text)
        return _no_such_option(unknown[1], "data." if kind_of_data else f"{group[1]}." if group else "", kind_of_data, known)
    key = re.search(r'Parser key "([\w.-]+)"', text)
    name = ("data." if kind_of_data else "") + key[1] if key else ""
    value = re.search(r"(?:Given value: ?|Got value: ?|Not of type (?:LocalPath|HubName): ')(\S*?)(?:'? |'?$)", text)
    if name == "data" and value is not None:
        return f"there is no kind of data {value[1]!r}; expected one of {', '.join(KINDS)}"
    if value is not None and (wanted := _wanted(parser, name, kind_of_data[1] if kind_of_data else "")):
        shown_name = f"--{name}" if f"--{name}" in known else name.upper()
        return f"{shown_name} is {value[1] or 'empty'}, which it does not take; expected {wanted}"
    text = text.split(" - Expected a <class")[0].split(" Subtypes: [")[0]  # the parser's own types
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _no_such_option(option: str, prefix: str, kind_of_data: re.Match[str] | None, known: Collection[str]) -> str:
    first = option.split(".")[0]  # an option that is a dictionary may have names below it
    compared = {field.name for field in fields(ComparisonOptions)} | {group.removesuffix(".") for _, group in COMPARISON_GROUPS}
    if not prefix and first in compared:
        return f"the configuration is of a comparison (it has {first}); give it to the command compare"
    fitting = [name for name, kind in KINDS.items() if first in {field.name for field in fields(kind)}]
    if kind_of_data is not None and fitting:
        return f"{kind_of_data[1]} data have no option {first}; choose another kind with --data {' or '.join(fitting)}"
    return f"there is no option {prefix}{option}{did_you_mean(f'--{prefix}{option}', known)}"


def _wanted(parser: ArgumentParser, name: str, kind_of_data: str) -> str:
    """Return the form of an option's value in words, for the named kind of data if any; empty for an unknown option."""
    hint = hints_of(parser, [KINDS[kind_of_data]] if kind_of_data in KINDS else KINDS.values()).get(name)
    if hint is None:
        return ""
    if get_origin(hint) is list and get_origin(inner := get_args(hint)[0]) is Literal:
        return f"a list of {', '.join(map(str, get_args(inner)))}"
    if dict[str, LocalPath] in (hint, *get_args(hint)):
        return "names with a file each, such as {news: FILE}"
    *words, last = (IN_WORDS.get(kind, kind) for kind in kind_of(hint).split("|"))
    return f"{', '.join(words)} or {last}" if words else last


def called_as(command: str = "") -> str:
    """Return a command by the name that the program was called by, such as ``head-gates fit``."""
    file = Path(sys.argv[0])
    if file.parent.name == "training" and file.name in ("__main__.py", "fit.py"):
        return "python -m training.fit" if command == "fit" else f"python -m training {command}".strip()
    return f"head-gates {command}".strip()
