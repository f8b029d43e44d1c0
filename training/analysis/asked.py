"""Which experiments a command line asks for, and whether it has what they need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gates.errors import GateError
from training.analysis.observed import is_model_folder
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
OF_ROLES = ("conllu", "relations", "text", "coref", "sentences")
"""Options that nothing else uses."""
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
    """The experiments by name, in the order asked for. By default roles with what follows from them where trees are given, of
    a plain folder roles alone, and of a run without trees :data:`WITHOUT_TREES`.

    Raises:
        GateError: for an unknown one, or none.
    """
    if options.experiments is None:
        if is_model_folder(options.run) or options.weights != "dense":
            return [ROLES]
        return [ROLES, *STORY] if options.conllu is not None else list(WITHOUT_TREES)
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
    if ROLES in chosen and options.conllu is None:
        raise GateError("the experiment roles needs a treebank; give one with --conllu FILE")
    for name in OF_ROLES:
        if ROLES not in chosen and getattr(options, name) is not None:
            raise GateError(f"--{name} is given and nothing uses it; add the experiment roles")
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
    if is_model_folder(options.run) and (others := [name for name in chosen if name not in (ROLES, CHANGES)]):
        raise GateError(
            f"{options.run!r} is a folder with a model and no run, so there is nothing to do {others[0]} with; give a run, or "
            "--experiments roles"
        )
