"""Which experiments a command line asks for, and whether it has what they need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gates.errors import GateError
from training.analysis.observed import checkpoints_in, is_model_folder
from training.cli.configurations import split_options

OTHER = "--other_data."
DOMAINS, ROLES, DYNAMICS, CHANGES, KNOWN = "domains", "roles", "dynamics", "changes", "known-roles"
STORY = ("survival", "disagreement", "closing")
"""What follows from roles and the tables of a run or comparison."""
KNOW_ROLES = (*STORY, CHANGES)
"""Experiments that read ``roles.csv``."""
NO_MODEL = (*KNOW_ROLES, KNOWN)
"""Experiments that load no model of a run."""
WITHOUT_TREES = ("ablate", "one-per-layer", "by-kind")
"""What is done of a run where nothing else is asked for."""
READ_TREES = (ROLES, DYNAMICS)
OF_TREES = ("conllu", "parser", "relations", "text", "coref", "sentences")
"""Options that nothing but :data:`READ_TREES` uses."""
OF_ROLES = ("show", "maps")
"""Options that nothing but roles uses."""
TITLES = {
    "ablate": "Each head removed alone",
    "one-per-layer": "One head per layer",
    "by-kind": "Quality against budget, by kind of attention",
    "causal": "Facilitating, irrelevant and interfering heads",
    "relevance": "Relevance of heads",
    ROLES: "Roles of heads",
    "survival": "Which roles survive",
    "disagreement": "Importance against entropy",
    "closing": "In which order heads close",
    DYNAMICS: "Roles through training",
    CHANGES: "Which heads keep their roles",
    KNOWN: "Roles where the truth is known",
    DOMAINS: "The same heads on other data",
    "through-training": "Through training",
}


def other_data_options(given: Sequence[str]) -> list[str]:
    """The arguments that describe other data, as ``training.fit`` takes them."""
    own = split_options(given, lambda name: name.startswith(OTHER))[0]
    return ["--data." + part.removeprefix(OTHER) if part.startswith(OTHER) else part for part in own]


def as_typed(text: str) -> str:
    """Options of other data by the names that they have on the command line."""
    return re.sub(r"(?:(?<=--)|(?<= )|^)data\.(?=\w)", OTHER.removeprefix("--"), text)


def experiments_of(options: Any) -> list[str]:
    """The experiments by name, in the order asked for. By default of a run roles and what follows from them where trees are
    given, and else :data:`WITHOUT_TREES`; of a folder with a model roles, and of one with checkpoints dynamics.

    Raises:
        GateError: for an unknown one, or none.
    """
    if options.experiments is None:
        if is_model_folder(options.run) or options.weights != "dense":
            return [ROLES]
        if checkpoints_in(options.run):
            return [DYNAMICS]
        return [ROLES, *STORY] if _has_trees(options) else list(WITHOUT_TREES)
    chosen = list(dict.fromkeys(name.strip() for name in options.experiments.split(",") if name.strip()))
    for name in chosen:
        if name not in TITLES:
            raise GateError(f"unknown experiment {name!r}; expected some of {', '.join(TITLES)}")
    if not chosen:
        raise GateError(f"--experiments is empty; expected some of {', '.join(TITLES)}")
    return chosen


def check_asked(options: Any, chosen: Sequence[str], other: Sequence[str]) -> None:
    """Raises :class:`GateError` for files that an experiment lacks, or that none uses.

    Args:
        options: of the command.
        chosen: experiments.
        other: options of other data.
    """
    if (DOMAINS in chosen) != bool(other):
        raise GateError(
            "the experiment domains needs other data; give it, for example with --other_data.test_file FILE"
            if DOMAINS in chosen
            else f"other data are given ({as_typed(other[0])}) and nothing uses them; add the experiment domains"
        )
    _check_trees(options, [name for name in chosen if name in READ_TREES])
    if options.roles is not None and not any(name in KNOW_ROLES for name in chosen):
        raise GateError(f"--roles is given and nothing uses it; add one of the experiments {', '.join(KNOW_ROLES)}")
    if (CHANGES in chosen) != (options.before is not None):
        raise GateError(
            "the experiment changes needs the roles of the model before; give them with --before FILE"
            if CHANGES in chosen
            else "--before is given and nothing uses it; add the experiment changes"
        )
    if options.weights != "dense" and [name for name in chosen if name not in NO_MODEL] != [ROLES]:
        raise GateError(
            f"--weights {options.weights} is for the experiment roles alone; leave it away, or analyze roles by itself"
        )
    if options.weights != "dense" and is_model_folder(options.run):
        raise GateError(f"--weights {options.weights} needs a run, and {options.run!r} is a folder with a model; leave it away")
    if options.sentences is not None and options.sentences < 1:
        raise GateError(f"--sentences is {options.sentences}; expected 1 or more")
    _check_folder(options.run, chosen)


def holds_models(path: str) -> bool:
    """Whether a folder is a model's, or holds those of checkpoints, and is no run."""
    return is_model_folder(path) or bool(checkpoints_in(path))


def _has_trees(options: Any) -> bool:
    return options.conllu is not None or options.parser is not None


def _check_trees(options: Any, readers: Sequence[str]) -> None:
    """Raises :class:`GateError` where the experiments that read trees lack them or have them twice, or are not there."""
    for name in (*(OF_TREES if not readers else ()), *(OF_ROLES if ROLES not in readers else ())):
        if getattr(options, name) is not None:
            raise GateError(f"--{name} is given and nothing uses it; add the experiment roles")
    if readers and not _has_trees(options):
        raise GateError(
            f"the experiment {readers[0]} needs a treebank; give one with --conllu FILE, or texts and what parses them with "
            "--text FILE --parser NAME"
        )
    if options.parser is not None and options.conllu is not None:
        raise GateError("--conllu and --parser are both given; expected one of them, as trees are read or made")
    if options.parser is not None and options.text is None:
        raise GateError(f"--parser {options.parser} has nothing to parse; give texts, one on each line, with --text FILE")


def _check_folder(path: str, chosen: Sequence[str]) -> None:
    """Raises :class:`GateError` for what cannot be done with a folder that is no run."""
    several = bool(checkpoints_in(path))
    if DYNAMICS in chosen and is_model_folder(path) and not several:
        raise GateError(
            f"{path!r} is a folder with one model, and the experiment dynamics looks at several; give a run, or a folder with "
            "checkpoints such as checkpoint-500 and checkpoint-1000"
        )
    allowed = (*(name for name in (ROLES, CHANGES) if is_model_folder(path)), *((DYNAMICS,) if several else ()))
    if allowed and (others := [name for name in chosen if name not in allowed]):
        what = "a model" if is_model_folder(path) else "checkpoints"
        raise GateError(
            f"{path!r} is a folder with {what} and no run, so there is nothing to do {others[0]} with; give a run, or "
            f"--experiments {allowed[0] if is_model_folder(path) else DYNAMICS}"
        )
