"""The experiments that a command line chooses, and whether it has what they need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gates.errors import GateError
from training.analysis.observed import is_model_folder
from training.cli.configurations import split_options

OTHER = "--other_data."
DOMAINS, ROLES, SURVIVAL = "domains", "roles", "survival"
WITHOUT_TREES = ("ablate", "one-per-layer", "by-kind")
"""The experiments on a run by default, without trees."""
OF_ROLES = ("conllu", "parser", "relations", "text", "coref", "sentences", "show", "maps")
"""Options that only roles uses."""
TITLES = {
    "ablate": "Each head removed alone",
    "one-per-layer": "One head per layer",
    "by-kind": "Quality against budget, by kind of attention",
    "causal": "Facilitating, irrelevant and interfering heads",
    "relevance": "Relevance of heads",
    ROLES: "Roles of heads",
    SURVIVAL: "Which roles survive",
    DOMAINS: "The same heads on other data",
    "through-training": "Through training",
}


def other_data_options(given: Sequence[str]) -> list[str]:
    """Return the arguments that describe other data, as ``training.fit`` takes them."""
    own = split_options(given, lambda name: name.startswith(OTHER))[0]
    return ["--data." + part.removeprefix(OTHER) if part.startswith(OTHER) else part for part in own]


def as_typed(text: str) -> str:
    """Give options of other data the names that they have on the command line."""
    return re.sub(r"(?:(?<=--)|(?<= )|^)data\.(?=\w)", OTHER.removeprefix("--"), text)


def experiments_of(options: Any) -> list[str]:
    """Return the names of the chosen experiments in the order given.

    The default is roles for a folder with a model and for pruned weights, roles and survival for a run with trees, and
    :data:`WITHOUT_TREES` for a run without.

    Raises:
        GateError: if one is unknown, or there is none.
    """
    if options.experiments is None:
        if is_model_folder(options.run) or options.weights != "dense":
            return [ROLES]
        return [ROLES, SURVIVAL] if _has_trees(options) else list(WITHOUT_TREES)
    chosen = list(dict.fromkeys(name.strip() for name in options.experiments.split(",") if name.strip()))
    for name in chosen:
        if name not in TITLES:
            raise GateError(f"unknown experiment {name!r}; expected some of {', '.join(TITLES)}")
    if not chosen:
        raise GateError(f"--experiments is empty; expected some of {', '.join(TITLES)}")
    return chosen


def check_arguments(options: Any, chosen: Sequence[str], other: Sequence[str]) -> None:
    """Check that every experiment has its files, and that every file is used.

    Args:
        options: The options of the command.
        chosen: The names of the experiments.
        other: The options of other data.

    Raises:
        GateError: if a file is missing or unused, or the run is a folder with a model and an experiment needs a run.
    """
    if (DOMAINS in chosen) != bool(other):
        raise GateError(
            "the experiment domains needs other data; give it, for example with --other_data.test_file FILE"
            if DOMAINS in chosen
            else f"other data are given ({as_typed(other[0])}) and nothing uses them; add the experiment domains"
        )
    _check_trees(options, needed=ROLES in chosen)
    if options.roles is not None and SURVIVAL not in chosen:
        raise GateError(f"--roles is given and nothing uses it; add the experiment {SURVIVAL}")
    if options.weights != "dense" and [name for name in chosen if name != SURVIVAL] != [ROLES]:
        raise GateError(f"--weights {options.weights} is for the experiment roles alone; remove it, or analyze roles by itself")
    if options.weights != "dense" and is_model_folder(options.run):
        raise GateError(f"--weights {options.weights} needs a run, and {options.run!r} is a folder with a model; remove it")
    if options.sentences is not None and options.sentences < 1:
        raise GateError(f"--sentences is {options.sentences}; expected 1 or more")
    if is_model_folder(options.run) and (others := [name for name in chosen if name != ROLES]):
        raise GateError(
            f"{options.run!r} is a folder with a model and no run, so there is nothing to do {others[0]} with; give a run, or "
            f"--experiments {ROLES}"
        )


def _has_trees(options: Any) -> bool:
    return options.conllu is not None or options.parser is not None


def _check_trees(options: Any, *, needed: bool) -> None:
    for name in OF_ROLES if not needed else ():
        if getattr(options, name) is not None:
            raise GateError(f"--{name} is given and nothing uses it; add the experiment roles")
    if needed and not _has_trees(options):
        raise GateError(
            "the experiment roles needs a treebank; give one with --conllu FILE, or texts and what parses them with "
            "--text FILE --parser NAME"
        )
    if options.parser is not None and options.conllu is not None:
        raise GateError("--conllu and --parser are both given; expected one of them, as trees are read or made")
    if options.parser is not None and options.text is None:
        raise GateError(f"--parser {options.parser} has nothing to parse; give texts, one on each line, with --text FILE")
