"""A user's own score, ``module:function``: from a subject to a number for each gate, higher kept first.

The module is imported from the working directory or the installed packages. What the function may do, and what is checked
afterwards, says :func:`run_own_score`.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from gates.errors import GateError, first_line
from training.runs import processes
from training.runs.fingerprint import weights_fingerprint
from training.runs.own_code import code_fingerprint, own_function
from training.scoring.subject import Subject


@dataclass(frozen=True)
class OwnScore:
    """A function that scores.

    Args:
        name: as it was given, ``module:function``.
        function: from a subject to numbers ``[gates]``.
        code: a hash of the module that was named and of the one that defines the function, by which their later versions are
            told from these. Other modules that they import are not part of it.
    """

    name: str
    function: Callable[[Subject], Any]
    code: str


@functools.cache
def own_score(name: str) -> OwnScore:
    """The function behind ``module:function``, imported once.

    Raises:
        GateError: if there is no such module or function, its import fails, or it does not take one argument.
    """
    function = own_function(name, "score", "a subject")
    module_name = name.partition(":")[0]
    defined_in = getattr(inspect.unwrap(function), "__module__", None) or module_name
    return OwnScore(name, function, code_fingerprint([module_name, defined_in]))


def run_own_score(score: OwnScore, subject: Subject, *, seed: int = 0) -> Tensor:
    """The scores of a subject, ``[gates]`` float64 on the CPU, higher kept first; the same in all processes.

    The function finds the model at rest: on its device, gates open, dropout off, without autocast. torch's random numbers
    start from ``seed``, and those of everything else go on behind it as if it had not run. Gradients that it leaves are
    cleared; changed weights or gates and hooks that it leaves are refused, since all other methods are compared on this model.

    Args:
        score: to be asked.
        subject: with the weights to be scored; of several processes each has its share of the data.
        seed: of the function's random numbers.

    Raises:
        GateError: if the function raises, changes the model, returns anything but a finite number for each gate, the same
            number for all, or in one of several processes others than in the first.
    """
    failure, scores = None, []
    try:
        with subject.at_rest(), _unchanged(score, subject), isolate_rng():
            torch.manual_seed(seed)
            scores = _checked(_called(score, subject), score, subject.gates.size)
    except GateError as error:
        failure = error
    everywhere = processes.gathered((None if failure is None else str(failure), scores))
    if failure is not None:
        raise failure
    for message, _ in everywhere:
        if message is not None:
            raise GateError(message)
    found = torch.tensor([values for _, values in everywhere], dtype=torch.float64)
    if not torch.allclose(found, found[:1], rtol=1e-4, atol=0.0):
        raise GateError(
            f"the score {score.name!r} differs between {len(found)} processes, each of which has its share of the data; sum "
            "over them in the function with subject.summed(values)"
        )
    return found[0]


def _called(score: OwnScore, subject: Subject) -> Any:
    try:
        return score.function(subject)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without the line above
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        at = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        raise GateError(f"the score {score.name!r} raised {type(error).__name__}: {first_line(error)}{at}") from error


def _checked(returned: Any, score: OwnScore, gates: int) -> list[float]:
    """What a function returned, as a number for each gate."""
    try:
        scores = torch.as_tensor(returned).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GateError(
            f"the score {score.name!r} returned {type(returned).__name__!r}; expected a tensor of {gates} numbers, one per gate"
        ) from error
    if scores.shape != (gates,):
        raise GateError(
            f"the score {score.name!r} returned the shape {list(scores.shape)}; expected [{gates}], a number for each gate in "
            "their order"
        )
    finite = torch.isfinite(scores)
    if not finite.all():
        place = int((~finite).nonzero()[0])
        raise GateError(f"the score {score.name!r} is {scores[place]:g} for gate {place}; expected finite numbers")
    if gates > 1 and bool((scores == scores[0]).all()):
        raise GateError(f"the score {score.name!r} is {scores[0]:g} for every gate, which ranks none of them")
    values: list[float] = scores.tolist()
    return values


@contextmanager
def _unchanged(score: OwnScore, subject: Subject) -> Iterator[None]:
    """What a function leaves on parameters and modules is taken away; a changed model is refused.

    Raises:
        GateError: if weights, gates or hooks are others at the end of the ``with`` block.
    """
    backbone, gates = subject.backbone, subject.gates
    modules, parameters = list(subject.module.modules()), [*backbone.parameters(), *gates.parameters()]
    needed, training, hooks = [one.requires_grad for one in parameters], [part.training for part in modules], _hooks(modules)
    weights, own = weights_fingerprint(backbone), (gates.log_alpha.detach().clone(), gates.mask.clone())
    try:
        yield
    finally:
        for parameter, needs in zip(parameters, needed, strict=True):
            parameter.requires_grad_(needs)
            parameter.grad = None
        for part, was in zip(modules, training, strict=True):
            part.training = was
    if weights_fingerprint(backbone) != weights:
        raise GateError(f"the score {score.name!r} changed the model's weights, which all methods share; let it work on a copy")
    same = all(torch.equal(old, new) for old, new in zip(own, (gates.log_alpha, gates.mask), strict=True))
    if not same or not gates.is_attached or gates.mode != "open":
        raise GateError(
            f"the score {score.name!r} changed the gates; have other values in a block of subject.gates.use(values), which "
            "puts them back"
        )
    if _hooks(modules) != hooks:
        raise GateError(
            f"the score {score.name!r} left a hook on the model; remove it in the function with its handle's remove()"
        )


def _hooks(modules: list[torch.nn.Module]) -> list[int]:
    """How many hooks each module has."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [sum(len(getattr(part, kind)) for kind in kinds) for part in modules]
