"""What an attention module returns, as its code says, so that what stands in for it can return the same."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

WITH_WEIGHTS = 2
"""Outputs of most attention modules: what the output projection gives, and the attention probabilities or None."""


@functools.cache
def returned(forward: Callable[..., Any], output: str) -> tuple[int, bool]:
    """How many outputs a forward pass has, and whether they come as a list.

    Args:
        forward: forward pass of a class of attention, as the class has it.
        output: path of its output projection.

    Returns:
        1 where it returns a tensor by itself; :data:`WITH_WEIGHTS` where it returns more, or its code does not tell.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return WITH_WEIGHTS, False
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    if not values:
        return WITH_WEIGHTS, False
    meant = _meant(tree, values[-1])
    if isinstance(meant, ast.Call) and _calls(meant, output):
        return 1, False
    return WITH_WEIGHTS, isinstance(meant, ast.List) or (isinstance(meant, ast.BinOp) and isinstance(meant.left, ast.List))


def _meant(tree: ast.AST, value: ast.expr) -> ast.expr:
    """What a name was last assigned; any other expression as it is."""
    if not isinstance(value, ast.Name):
        return value
    given = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == value.id for to in node.targets)
    ]
    return max(given, key=lambda one: one.lineno, default=value)


def _calls(call: ast.Call, output: str) -> bool:
    """Whether a call is that of the output projection, or of a dropout on its result, and gives nothing else."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return name in (output.split(".")[0], "dropout", "resid_dropout", "proj_drop", "out_drop", "to_out", "projection_dropout")
