"""The one exception of the library for input that its user can mend."""

from __future__ import annotations


class GateError(ValueError):
    """Bad input: the message is one sentence naming the value, what was expected and how to mend it.

    Command-line programs print the message and exit with code 2; library users see an ordinary
    :class:`ValueError`.
    """


def first_line(error: BaseException) -> str:
    """The first line of another library's message, for a sentence of our own; its kind if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
