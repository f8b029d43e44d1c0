"""``--help`` in the order of use, and ``--help-all`` with every option; both are made from the groups of options."""

from __future__ import annotations

import dataclasses
import re
import shutil
import textwrap
from argparse import Action
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse
from jsonargparse import ArgumentParser

from training.config.data import KINDS
from training.config.model import Time
from training.config.paths import HubName, LocalPath

COLUMN, WIDEST = 30, 110
DEFAULTS = "configs/text.yaml or configs/default.yaml where none is named"
PLAIN = {
    int: "N", float: "X", str: "TEXT", bool: "true|false", list: "[..]", dict: "{..}", Time: "12ms|0.7x", LocalPath: "PATH",
    HubName: "NAME|PATH",
}  # fmt: skip
"""Types in the words of the help."""

IN_ORDER_OF_USE: dict[str, tuple[str, ...]] = {
    "Model": ("model.backbone", "model.from_scratch"),
    "Data": (
        "data", "data.train_file", "data.test_file", "data.select_file", "data.text_column", "data.label_column",
        "data.pair_column", "data.dataset", "data.batch_size", "data.max_length",
    ),
    "Which heads stay": (
        "model.budget", "model.max_loss", "model.keep", "model.price", "model.unit", "model.gate", "model.swaps",
    ),
    "Training": (
        "model.finetune", "model.prune", "model.retrain", "model.min_steps", "model.refit", "model.learning_rate",
        "model.distil", "trainer.accelerator", "trainer.devices", "trainer.precision", "trainer.limit_train_batches",
    ),
    "Comparison at the end": ("compare", "retrained", "curve"),
    "The run": ("config", "name", "run_dir", "existing", "seed", "wandb.mode", "wandb.project"),
}  # fmt: skip


@dataclass(frozen=True)
class Option:
    """An option in the help, or an argument without a name."""

    name: str
    kind: str
    text: str
    default: str = ""
    has_name: bool = True


FURTHER = {
    "config": Option(
        "config", "FILE", "YAML file with any of these options; several add up. Without one, the kind of data decides: "
        "text.yaml, causal_lm.yaml, translation.yaml and so on; without data, the embedded default.yaml."
    ),
    "data": Option("data", "|".join(KINDS), "kind of data; --data.train_file implies Text, --data.train_source ParallelText."),
}  # fmt: skip
"""The options that are no field of a group."""


def options_of_group(group: type, prefix: str = "") -> list[Option]:
    """Return the options of a dataclass, with the texts of its docstring and those of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(group.__mro__):
        for entry in parse(base.__doc__ or "").params if dataclasses.is_dataclass(base) else ():
            texts |= {name.strip(): " ".join((entry.description or "").split()) for name in entry.arg_name.split(",")}
    hints = get_type_hints(group)
    return [
        Option(f"{prefix}{field.name}", kind_of(hints[field.name]), texts[field.name], default_of(field))
        for field in dataclasses.fields(group)
        if field.init
    ]


def kind_of(hint: Any) -> str:
    """Return the form of a value of a type."""
    origin = get_origin(hint)
    if origin is Literal:
        return "|".join(map(str, get_args(hint)))
    if origin in (Union, UnionType):
        kinds = [kind_of(one) for one in get_args(hint) if one is not NoneType]
        return "|".join(dict.fromkeys(kinds))
    return PLAIN.get(origin or hint, "VALUE")


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as it is typed on a command line."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return "" if value is MISSING else _as_typed(value)


def _as_typed(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", "")


def help_of_parser(command: str, parser: ArgumentParser) -> str:
    """Return the help of a command that does not train."""
    options = [_option_of(action) for action in parser._actions if action.dest != "help"]
    arguments = [option.kind for option in options if not option.has_name]
    parts = [f"usage: {' '.join([command, *arguments, '[OPTIONS]'])}", str(parser.description)]
    parts += ["\n".join(map(_entry, options)), *([parser.epilog] if parser.epilog else [])]
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    return "\n\n".join("\n".join(line for one in part.split("\n") for line in _wrapped(one, width)) for part in parts)


def _wrapped(line: str, width: int) -> list[str]:
    return [line] if line.startswith(" ") else textwrap.wrap(line, width, break_on_hyphens=False, break_long_words=False)


def _option_of(action: Action) -> Option:
    hint = getattr(action, "_typehint", None) or action.type
    has_name = bool(action.option_strings)
    named = (
        isinstance(action.metavar, str) and action.metavar[0].isalpha()
    )  # jsonargparse names choices and lists in its own way
    kind = str(action.metavar) if named else kind_of(hint) if hint is not None else ""
    kind += "..." if not has_name and action.nargs in ("*", "+") else ""
    shown = has_name and action.nargs != 0 and action.default not in (None, "")
    text = f"{action.help} Required." if has_name and action.required else str(action.help)
    return Option(action.dest, kind, text, _as_typed(action.default) if shown else "", has_name)


def help_of_run(
    usage: str,
    purpose: str,
    groups: Sequence[tuple[type, str]],
    *,
    own: Mapping[str, Sequence[Option]],
    hidden: Collection[str] = (),
    everything: bool,
) -> str:
    """Return the help of a command that trains, from its groups of options with their prefixes."""
    sections = {title: list(options) for title, options in own.items()}
    if everything:
        sections |= {"General": [FURTHER["config"], FURTHER["data"]]}
        sections |= {_title(group, prefix): options_of_group(group, prefix) for group, prefix in groups}
        sections |= data_sections()
    else:
        known = FURTHER | {option.name: option for group, prefix in groups for option in options_of_group(group, prefix)}
        known |= {option.name: option for option in options_of_group(KINDS["Text"], "data.")}
        for title, names in IN_ORDER_OF_USE.items():
            sections[title] = [_shortened(known[name]) for name in names]
    sections = {title: [option for option in options if option.name not in hidden] for title, options in sections.items()}
    sections = {title: options for title, options in sections.items() if options}
    last = "" if everything else "\n--help-all shows every option, with those of the other kinds of data."
    last = f"\nDefaults stand in brackets; a configuration, also {DEFAULTS}, may have others.{last}"
    return "\n".join([usage, "", purpose, "", *(_section(title, options) for title, options in sections.items())]) + last


def data_sections() -> dict[str, list[Option]]:
    """Return the options of data by section: those that several kinds share, then those of each kind alone.

    Options that differ only in their default are shown once, with the default of every kind.
    """
    kinds: dict[tuple[str, str, str], dict[str, str]] = {}
    for name, kind in KINDS.items():
        for option in options_of_group(kind, "data."):
            kinds.setdefault((option.name, option.kind, option.text), {})[name] = option.default
    sections: dict[str, list[Option]] = {"--data.NAME: Options of several kinds of data": []}
    sections |= {f"--data {name}: {_first_line(kind)}": [] for name, kind in KINDS.items()}
    for (name, what, text), defaults in kinds.items():
        if len(defaults) == 1:
            own, default = next(iter(defaults.items()))
            section = f"--data {own}: {_first_line(KINDS[own])}"
        else:
            section = next(iter(sections))
            by_default: dict[str, list[str]] = {}
            for owner, value in defaults.items():
                by_default.setdefault(value, []).append(owner)
            every = len(defaults) == len(KINDS) and len(by_default) == 1
            default = "; ".join(value if every else f"{', '.join(owners)}: {value}" for value, owners in by_default.items())
        sections[section].append(Option(name, what, text, default))
    return sections


def _shortened(option: Option) -> Option:
    return option if option.name in FURTHER else replace(option, text=_first_sentence(option.text))


def _first_sentence(text: str) -> str:
    """Return the text up to the first stop that ends a sentence; a year follows ``et al.``."""
    return re.split(r"(?<=[a-z)])\. (?=[A-Z])", text)[0]


def _first_line(group: type) -> str:
    return plain((group.__doc__ or "").strip().splitlines()[0].rstrip("."))


def _title(group: type, prefix: str) -> str:
    return f"--{prefix}NAME: {_first_line(group)}" if prefix else _first_line(group)


def plain(text: str) -> str:
    """Return a text without the markup of docstrings."""
    return re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("``", "")


def _section(title: str, options: Sequence[Option]) -> str:
    return "\n".join([f"{title}:", *(_entry(option) for option in options), ""])


def _entry(option: Option) -> str:
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    head = f"  --{option.name} {option.kind}".rstrip() if option.has_name else f"  {option.kind}"
    text = option.text if option.text.endswith(".") or not option.text else f"{option.text}."
    if option.default and "default:" not in text:
        text += f" [{option.default}]"
    text = plain(text)
    lines = textwrap.wrap(text, max(30, width - COLUMN - 2), break_on_hyphens=False, break_long_words=False)
    indented = [" " * (COLUMN + 2) + line for line in lines]
    if len(head) <= COLUMN and indented:
        indented[0] = head.ljust(COLUMN + 2) + lines[0]
        return "\n".join(indented)
    return "\n".join([head, *indented])
