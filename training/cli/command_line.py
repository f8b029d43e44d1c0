"""A command line: read, with mistakes told in one sentence."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shlex
from argparse import ArgumentError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
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
    RefitSearch,
    RestartSearch,
    RunOptions,
    ScratchTraining,
    SwapSearch,
    WandbOptions,
    WeightsKept,
)
from training.config.checks import is_text
from training.config.data import KINDS, Data
from training.config.paths import HubName, LocalPath
from training.config.run import LatencyOptions, TrainerOptions
from training.config.yaml_text import check_yaml, read_text, read_yaml

# Which configuration a command line begins with.

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
"""Configurations of kinds of data that are named without one."""
OF_COMPARISONS = ("methods", "budgets", "seeds", "stages")
"""Options of the command compare alone that a configuration may hold."""
KIND_OF_FILES = {"--data.train_source": "ParallelText", "--data.train_file": "Text"}
"""Options that say which kind of data is meant, where neither the command line nor a configuration does."""


def with_config(given: Sequence[str]) -> list[str]:
    """A command line with what it leaves open: the configuration for what it names, and the kind of data.

    Configurations come first, so that an option counts more than they do wherever it stands. Without ``--config`` that is
    ``translation.yaml`` for parallel text, the one of :data:`OF_KINDS` for a kind of data that is named, ``text.yaml`` for a
    model or text of one's own, and otherwise the embedded ``default.yaml``.
    """
    names = [argument.split("=")[0] for argument in given]
    if "--config" not in names:
        return ["--config", str(default_config(names, kind_in(given))), *given]
    configs, others = split_off(given, "--config")
    configs = [part if part == "--config" else _shipped_part(part) for part in configs]
    implied = next((kind for option, kind in KIND_OF_FILES.items() if option in names), None)
    if implied is None or "--data" in names or "--data.class_path" in names or kinds_in(configs):
        return [*configs, *others]
    return [*configs, "--data", implied, *others]


def kind_in(given: Sequence[str]) -> str:
    """The kind of data that a command line names; empty if it names none."""
    named, _ = split_off(given, "--data")
    return named[-1].removeprefix("--data=") if named else ""


def default_config(names: Sequence[str] = (), kind: str = "") -> Path:
    """The configuration for these options and this kind of data, in a checkout or as packaged with an installed copy."""
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
    """The file that comes with the product, in a checkout or an installed copy; None if there is none of this name."""
    return next((folder / name for folder in (CONFIGS, PACKAGED_CONFIGS) if (folder / name).is_file()), None)


def split_off(given: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """The arguments of an option with their values, as ``--option value`` or ``--option=value``, and the others."""
    return split_options(given, lambda name: name == option)


def split_options(given: Sequence[str], chosen: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """The arguments of some options with their values, as ``--option value`` or ``--option=value``, and the others.

    Args:
        given: arguments.
        chosen: function that says of an option's name whether it is one of them.
    """
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


def kinds_in(configs: Sequence[str]) -> list[str]:
    """The kinds of data that configurations name; what cannot be read the parser will complain of.

    Args:
        configs: as :func:`split_off` gives them.
    """
    found = []
    for _, content in _contents(configs):
        data = content.get("data")
        kind = data.get("class_path") if isinstance(data, dict) else data
        found += [kind] if isinstance(kind, str) else []
    return found


def check_is_no_comparison(configs: Sequence[str], known: Collection[str]) -> None:
    """Raises :class:`GateError` for a configuration that says what is compared, if the command compares nothing.

    Args:
        configs: as :func:`split_off` gives them.
        known: the options of the command.
    """
    for file, content in _contents(configs):
        for key in OF_COMPARISONS:
            if key in content and f"--{key}" not in known:
                raise GateError(f"the configuration {file!r} is of a comparison (it has {key}); give it to the command compare")


def _contents(configs: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files that can be read, with what they hold."""
    for file in (argument.removeprefix("--config=") for argument in configs if argument != "--config"):
        with suppress(GateError, yaml.YAMLError):
            content = read_yaml(file, "the configuration")
            if isinstance(content, dict):
                yield file, content


def shipped(path: str) -> str:
    """A file as it is named, or the one of this name that comes with the product, such as ``configs/text.yaml``."""
    path = os.path.expanduser(path)
    within = Path(path).relative_to("configs") if Path(path).parts[:1] == ("configs",) else Path(path)
    found = None if Path(path).exists() or within.is_absolute() else packaged(within)
    return path if found is None else str(found)


def _shipped_part(part: str) -> str:
    """The same for an argument, ``--config=PATH`` or the path alone."""
    option, equals, path = part.rpartition("=") if part.startswith("--config=") else ("", "", part)
    return f"{option}{equals}{shipped(path)}"


# The command line of a run, which comparisons and sweeps add to.

GROUPS: tuple[tuple[type, str], ...] = (
    (RunOptions, ""),
    (PrunerOptions, "model."),
    (EndOfRun, ""),
    (ScratchTraining, ""),
    (WeightsKept, ""),
    (TrainerOptions, "trainer."),
    (WandbOptions, "wandb."),
)
"""The options of a run beside those of its data, each with its prefix."""


def build_parser(prog: str = "python -m training.fit") -> ArgumentParser:
    """What reads the options of a run from a command line and configurations."""
    parser = ArgumentParser(prog=prog)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; see the folder configs.")
    for group, prefix in GROUPS:
        parser.add_class_arguments(group, prefix.removesuffix(".") or None)
    parser.add_subclass_arguments(Data, "data", required=True)
    return parser


def data_options(kinds: Collection[type] = tuple(KINDS.values())) -> set[str]:
    """The options of all kinds of data, which the parser does not list since they depend on the kind."""
    names = {field.name for kind in kinds for field in fields(kind)}
    return {f"--data.{name}" for name in names} | {f"--data.init_args.{name}" for name in names}


# The command line of a comparison: that of a run, and what is compared.

COMPARISON_GROUPS: tuple[tuple[type, str], ...] = (
    (ComparisonOptions, ""),
    (LauncherOptions, ""),
    (RestartSearch, "restarts."),
    (SwapSearch, "swap."),
    (DrawSearch, "draws."),
    (RefitSearch, "refit."),
    (DistilWeights, "distil."),
)
RUN_ONLY_OPTIONS = ("seed", "existing", "ckpt_path", "compare", "retrained", "curve", "patience", "from_scratch")
"""Options of ``training.fit`` that a configuration may hold and a comparison does not use."""
LIST_METHODS = "Show every method with its source, and end."


def build_comparison_parser() -> ArgumentParser:
    """What reads the options of a comparison from a command line and configurations."""
    parser = build_parser(prog="python -m training compare")
    for group, prefix in COMPARISON_GROUPS:
        parser.add_class_arguments(group, prefix.removesuffix(".") or None)
    parser.add_argument("--list_methods", action="store_true", help=LIST_METHODS)
    return parser


# The command line that measures a latency table: that of the run it is for, and what is measured.


def build_latency_parser() -> ArgumentParser:
    """What reads the options of a table from a command line and configurations."""
    parser = build_parser(prog="python -m training latency")
    parser.add_class_arguments(LatencyOptions, None)
    return parser


# What stands on a command line and in configurations, looked at as text before the parser makes values of it.

ANOTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML takes for octal ones, such as 010, or for minutes and seconds, such as 1:30."""


def hints_of(parser: ArgumentParser) -> dict[str, Any]:
    """The type of every option, by its name without dashes; of data, those of all kinds."""
    hints = {action.dest: getattr(action, "_typehint", None) or action.type for action in parser._actions}
    for kind in KINDS.values():
        hints |= {f"data.{option}": hint for option, hint in get_type_hints(kind).items()}
    return {name: hint for name, hint in hints.items() if hint is not None}


def check_arguments(arguments: Sequence[str], parser: ArgumentParser) -> None:
    """Whether values and configurations on a command line can be read, within limits, and say what they seem to.

    Args:
        arguments: of the command line.
        parser: that will read them.

    Raises:
        GateError: for a configuration that cannot be read, text beyond the limits of :mod:`training.config.yaml_text` or that
            is not UTF-8, and numbers in other digits than 0 to 9 or to another base than they look.
    """
    hints = {name: hint for name, hint in hints_of(parser).items() if name != "data"}  # which stands for all of them
    for name, value in _named(arguments):
        if not is_text(value):
            raise GateError(f"{name or 'the command line'} has {value!r}, which is not UTF-8 text; write or rename it as UTF-8")
        if name == "--config" and os.path.exists(value):
            content = _as_written(read_text(value, "the configuration"), f"the configuration {value!r}")
        else:
            content = _as_written(value, name or repr(value[:60]))
        if name != "--config":
            content = {name.lstrip("-").removesuffix("+"): content}
        for option, number in _scalars(content, hints.keys()):
            check_number(option, number, hints[option])


def check_number(option: str, text: str, hint: Any) -> None:
    """Raises :class:`GateError` for a number that is written otherwise than one reads it, where an option takes numbers."""
    if takes_text(hint):
        return
    if not text.isascii() and _is_number(text):
        raise GateError(f"--{option} is {text!r}, whose digits are not those from 0 to 9; write it in these")
    if ANOTHER_BASE.fullmatch(text):
        raise GateError(f"--{option} is {text}, which YAML takes for another number; write it in decimal")


def takes_text(hint: Any) -> bool:
    """Whether a value of a type, or a part of it, may be any text."""
    parts = get_args(hint)[1:] if get_origin(hint) is dict else get_args(hint)
    return hint in (str, LocalPath, HubName) or any(takes_text(part) for part in parts)


def _named(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Values with the options before them; those of none have an empty name."""
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            if equals:
                yield name, value
                name = ""
        else:
            yield name, argument
            name = ""


def _as_written(text: str, named: str) -> Any:
    """The content of YAML with every value as a text; None for what is no YAML, of which the parser will complain."""
    with suppress(yaml.YAMLError):
        check_yaml(text, named)
        return yaml.load(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    return None


def _scalars(content: Any, known: Collection[str], name: str = "") -> Iterator[tuple[str, str]]:
    """The single values in a configuration, with the options they are of."""
    if name in known:
        yield from ((name, text) for text in _leaves(content))
    elif isinstance(content, Mapping):
        for key, value in content.items():
            inner = f"{name}.{key}" if name else str(key)
            yield from _scalars(value, known, inner.replace("data.init_args.", "data."))


def _leaves(content: Any) -> Iterator[str]:
    if isinstance(content, Mapping):
        content = list(content.values())
    if isinstance(content, list):
        for one in content:
            yield from _leaves(one)
    elif isinstance(content, str):
        yield content


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


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


RENAMED = {"start_apart": "init_spread", "start_by": "init_score"}
"""Old names of options, each with its present name."""


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
    renamed = [option for option in known if option.endswith(f".{RENAMED.get(last)}")]
    near = same[:2] or renamed or difflib.get_close_matches(name, sorted(known), n=1)
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
