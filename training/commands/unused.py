"""Options on a command line that nothing would use. A configuration, which may serve other runs too, may have them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gates.errors import GateError
from training.config import Setup
from training.config.data import Documents, Images


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
        lambda setup: isinstance(setup.model.budget, str),
        "add --model.budget with a time, such as 0.7x",
    ),
    "--model.start_by": (lambda setup: setup.model.start_apart != 0, "add --model.start_apart, such as 1"),
    "--model.temperature": (lambda setup: setup.model.gate == "hard-concrete", "it is of hard-concrete gates"),
    "--model.initial_log_alpha": (lambda setup: setup.model.gate == "hard-concrete", "it is of hard-concrete gates"),
    "--data.max_length": (lambda setup: not isinstance(setup.data, Images), "images have no length"),
    "--average_every": (lambda setup: setup.weights.average_last > 1, "add --average_last, such as 5"),
    "--from_scratch_epochs": (lambda setup: bool(setup.end.from_scratch), "add --from_scratch [learned]"),
    "--from_scratch_learning_rate": (lambda setup: bool(setup.end.from_scratch), "add --from_scratch [learned]"),
    **dict.fromkeys(STREAMED, (_streams, "add --data.streaming true")),
}
"""Options by what uses them, and what to do where it does not."""


IN_COMPARISONS = ("--model.distil_temperature", "--model.start_by", "--average_every", "--data.max_length", *STREAMED)
"""Those of them that no method of a comparison would use by itself."""


def check_used(setup: Setup, given: Sequence[str], among: Collection[str] = tuple(USED)) -> None:
    """Raises :class:`GateError` for the first option that is given and changes nothing.

    Args:
        setup: of the run.
        given: arguments of the command line.
        among: options that are looked at.
    """
    names = {argument.split("=")[0] for argument in given}
    for option, (is_used, instead) in USED.items():
        if option in names and option in among and not is_used(setup):
            raise GateError(f"{option} is given, but nothing in this run uses it; {instead}, or leave it away")


def check_no_others(given: Sequence[str], option: str, others: Collection[str]) -> None:
    """Raises :class:`GateError` for the first option that is given beside one that takes no notice of it.

    Args:
        given: arguments of the command line.
        option: with its value, if that is what takes no notice.
        others: that it does not use.
    """
    for argument in given:
        if (name := argument.split("=")[0]) in others:
            raise GateError(f"{name} is given, but {option} does not use it; leave one of them away")
