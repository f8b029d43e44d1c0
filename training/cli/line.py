"""A command line: read, with mistakes told in one sentence."""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from argparse import ArgumentError
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader

from gates.errors import GateError
from training.cli.help import kind_of
from training.cli.run_parser import data_options
from training.cli.values import check_arguments, hints_of
from training.config.data import KINDS
from training.config.paths import LocalPath
from training.config.yaml_text import check_yaml

IN_WORDS = {
    "N": "a whole number", "X": "a number", "TEXT": "a text", "[..]": "a list", "{..}": "one for each kind",
    "PATH": "a path on this machine", "NAME": "a hub name",
}  # fmt: skip
LONGEST = 300
"""Characters of a complaint of the parser's."""
_LOADER = get_loader("yaml")
OF_THE_PARSER = ("--print_config", "--data.class_path", "--data.help")


@dataclass(frozen=True)
class CommandLine:
    """What a command was told.

    Args:
        command: as which it can be started again.
        given: its arguments, up to a lone ``--``.
        rest: the arguments behind that, for a command that passes them on.
        parser: that read them.
        options: what they say.
    """

    command: str
    given: tuple[str, ...]
    rest: tuple[str, ...]
    parser: ArgumentParser
    options: Any


def split_at_dashes(arguments: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What stands before a lone ``--`` on a command line, and what is passed on behind it."""
    place = list(arguments).index("--") if "--" in arguments else len(arguments)
    return tuple(arguments[:place]), tuple(arguments[place + 1 :])


def parse(parser: ArgumentParser, arguments: Sequence[str], *, also: Collection[str] = ()) -> Any:
    """What the arguments say.

    Args:
        parser: of the command.
        arguments: of the command line.
        also: options that the parser takes although it does not list them.

    Raises:
        GateError: for an option that does not exist, naming the nearest, or a value that an option does not take.
    """
    check_spelling(arguments, {*options_of(parser), *also})
    check_arguments(arguments, parser)
    parser.exit_on_error = False
    parser.allow_abbrev = False
    set_loader("yaml", _load_within_limits, (yaml.YAMLError,))  # also for files that a configuration names
    try:
        return parser.parse_args(list(arguments))
    except UnicodeDecodeError as error:
        named = next(filter(_is_no_text, configurations_in(arguments)), None)
        raise GateError(f"{'a configuration' if named is None else repr(named)} is not UTF-8 text; save it as UTF-8") from error
    except RecursionError as error:
        raise GateError(f"a value or configuration ({' '.join(configurations_in(arguments))}) is nested without end") from error
    except ArgumentError as error:
        raise GateError(shortened(one_sentence(str(error), parser))) from error


def configurations_in(arguments: Sequence[str]) -> list[str]:
    """The files that ``--config`` names."""
    after = [value for name, value in itertools.pairwise(arguments) if name == "--config"]
    return after + [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]


def _is_no_text(file: str) -> bool:
    try:
        Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return isinstance(error, UnicodeDecodeError)
    return False


def _load_within_limits(text: str) -> Any:
    """YAML as the parser reads it, unless it is beyond all limits."""
    check_yaml(text, "a value")
    return _LOADER(text)


def options_of(parser: ArgumentParser) -> set[str]:
    """All that a parser lists, with the dashes."""
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}


def check_spelling(arguments: Sequence[str], known: Collection[str]) -> None:
    """Raises :class:`GateError` for the first argument that looks like an option and is none."""
    for argument in arguments:
        name = argument.split("=")[0]
        if name in known and name != "--data" and is_group(name, known):
            raise GateError(f"{name} stands for a group of options; give each as {name}.NAME, or all in a file with --config")
        if not name.startswith("--") or name == "--" or name in known or name in OF_THE_PARSER:
            continue
        if any(name.startswith(f"{option}.") for option in known if not is_group(option, known)):  # an entry of a dictionary
            continue
        raise GateError(f"there is no option {name}{did_you_mean(name, known)}")


def is_group(option: str, known: Collection[str]) -> bool:
    """Whether an option stands for others that begin with its name."""
    return any(other.startswith(f"{option}.") for other in known)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The nearest options, as the end of a sentence."""
    last = name.lstrip("-").rpartition(".")[2]
    same = sorted(option for option in known if option.lstrip("-").rpartition(".")[2] == last)
    near = same[:2] or difflib.get_close_matches(name, sorted(known), n=1)
    if not near:
        ends = {option.lstrip("-").rpartition(".")[2]: option for option in sorted(known, reverse=True)}
        near = [ends[end] for end in difflib.get_close_matches(last, list(ends), n=1)]
    near = [option for option in near if option != name]
    return f"; did you mean {' or '.join(near)}?" if near else "; --help lists the options"


def one_sentence(message: str, parser: ArgumentParser) -> str:
    """The parser's complaint in one line: which option, which value, what was expected."""
    text = " ".join(message.split())
    missing = re.search(r"(?:arguments are required: |Key \")([\w., -]+)", text)
    if missing and "required" in text:
        names = [name.strip() for name in missing[1].split(",")]
        shown_names = [f"--{name}" if f"--{name}" in options_of(parser) else name.upper() for name in names]
        ending = "is missing; give it" if len(shown_names) == 1 else "are missing; give them"
        return f"{' and '.join(shown_names)} {ending}, and see --help"
    if absent := re.search(r"File does not exist: '?([^']+)'?", text):
        return f"the configuration {absent[1]!r} does not exist; check --config"
    if valueless := re.search(r"argument (--[\w.-]+): expected (?:one|at least one) argument", text):
        return f"{valueless[1]} needs a value; see --help"
    nested = re.search(r"Problem with given class_path .*", text)
    text = text if nested is None else nested[0]
    key = re.search(r'Parser key "([\w.-]+)"', text)
    name = ("data." if nested else "") + key[1] if key else ""
    value = re.search(r"(?:Given value: ?|Got value: ?|Not of type (?:LocalPath|HubName): ')(\S*?)(?:'? |'?$)", text)
    if extra := re.search(r"[Uu]nrecognized arguments: (\S+)", text):
        return f"{extra[1]!r} stands where no value is expected; options begin with --, see --help"
    unknown = re.search(r"[Oo]ption '([\w.-]+)'(?: is not accepted)?", text)
    kind_of_data = re.search(r"given class_path '[\w.]*?(\w+)'", text)
    if unknown is not None and "accept" in text:
        group = re.search(r"Group '([\w.-]+)'", text)
        option = unknown[1].split(".")[0]  # which may have names below it
        if kind_of_data is not None and f"--data.{option}" in data_options():
            fitting = [name for name, options in KINDS.items() if option in {field.name for field in fields(options)}]
            return f"{kind_of_data[1]} data have no option {option}; choose another kind with --data {' or '.join(fitting)}"
        wrong = ("data." if nested else f"{group[1]}." if group else "") + unknown[1]
        return f"there is no option {wrong}{did_you_mean(f'--{wrong}', {*options_of(parser), *data_options()})}"
    if name == "data" and value is not None:
        return f"there is no kind of data {value[1]!r}; expected one of {', '.join(KINDS)}"
    below = re.search(r"value: NestedArg\(key='([\w.-]+)'", text)
    if below is not None and nested is None and not name.startswith("data"):  # an option below one that is no group
        wrong = f"{name}.{below[1]}"
        return f"there is no option {wrong}{did_you_mean(f'--{wrong}', {*options_of(parser), *data_options()})}"
    if value is not None and (wanted := _wanted(parser, name, kind_of_data[1] if kind_of_data else "")):
        shown_name = f"--{name}" if f"--{name}" in options_of(parser) | data_options() else name.upper()
        return f"{shown_name} is {value[1] or 'empty'}, which it does not take; expected {wanted}"
    return text


def shortened(sentence: str) -> str:
    """Without what the parser says of its own types, and never longer than a few lines."""
    sentence = sentence.split(" - Expected a <class")[0].split(" Subtypes: [")[0]
    return sentence if len(sentence) <= LONGEST else f"{sentence[:LONGEST]} ..."


def _wanted(parser: ArgumentParser, name: str, kind_of_data: str) -> str:
    """What a value of an option looks like, in words; empty for an option that is not known.

    Args:
        parser: that knows the option.
        name: without dashes.
        kind_of_data: whose options those of data are, since kinds share names; empty where none is said.
    """
    hints = hints_of(parser)
    if kind_of_data in KINDS:
        hints |= {f"data.{option}": hint for option, hint in get_type_hints(KINDS[kind_of_data]).items()}
    hint = hints.get(name)
    if get_origin(hint) is list and get_origin(inner := get_args(hint)[0]) is Literal:
        return f"a list of {', '.join(map(str, get_args(inner)))}"
    if dict[str, LocalPath] in (hint, *get_args(hint)):
        return "names with a file each, such as {news: FILE}"
    kinds = kind_of(hint).split("|") if name in hints else []
    words = [IN_WORDS.get(kind, kind) for kind in kinds]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def shown(program: Sequence[str], given: Sequence[str]) -> str:
    """A command as it is typed in a shell."""
    return shlex.join([*program, *given])
