"""Give one module a function in place of a method of its class, until its last user leaves.

A library can be changed by replacing one of its functions, but then every thread and every other model calls the replacement,
and an interrupt can leave it in place. An attribute of one module concerns the calls of that module alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

_LOCK = threading.Lock()


class OwnMethod:
    """A module's own method, which several users share.

    Args:
        module: The module.
        name: The name of the method.
        function: The function that is called with this object and the arguments of the method.
    """

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self.module = module
        self.name = name
        self.function = function
        self.before = vars(module).get(name)  # another method of the module's own, as Accelerate gives it
        self.users: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)

    def replaced(self) -> Callable[..., Any]:
        """Return the method that the module would call otherwise."""
        return getattr(type(self.module), self.name).__get__(self.module) if self.before is None else self.before


class Use:
    """One use of a module's own method.

    Args:
        own: The method.
        user: What the method knows of this user.
    """

    def __init__(self, own: OwnMethod, user: Any) -> None:
        self.own = own
        self.user = user

    def remove(self) -> None:
        """End this use. After the last one, the module calls the method of its class again."""
        own, states = self.own, vars(self.own.module)
        with _LOCK:
            own.users[:] = [user for user in own.users if user is not self.user]
            while isinstance(own, OwnMethod) and not own.users and states.get(own.name) is own:
                if own.before is None:
                    del states[own.name]
                    return
                own = states[own.name] = own.before  # one below, whose users may have left before


def use_method(module: nn.Module, name: str, function: Callable[..., Any], user: Any) -> Use:
    """Have a module call a function in place of a method, until :meth:`Use.remove`.

    Args:
        module, name, function: See :class:`OwnMethod`.
        user: What the function finds among the ``users`` of its first argument. Each user is an object of its own.
    """
    with _LOCK:
        own = vars(module).get(name)
        if not isinstance(own, OwnMethod) or own.function is not function:
            vars(module)[name] = own = OwnMethod(module, name, function)
        own.users.append(user)
    return Use(own, user)
