"""The one exception of the library for input that its user can mend."""

from __future__ import annotations


class GateError(ValueError):
    """Report bad input in one sentence: the value, the expected values, and the remedy.

    Command-line programs print the message and exit with code 2; library users see an ordinary
    :class:`ValueError`.

    >>> from gates import Budget
    >>> Budget.parse(100, {"encoder": 72})
    Traceback (most recent call last):
    gates.errors.GateError: the budget is 100; expected a whole number from 0 to 72 (heads in the model) or a fraction below 1
    """


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, or the kind of an error without one."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
