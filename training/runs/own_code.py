"""Code that results depend on: a user's own, found from the working directory, and hashes of source files."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash

from gates.errors import GateError, first_line


def import_from_here() -> None:
    """Make modules in the working directory importable, as under ``python -m``."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def code_fingerprint(modules: Iterable[str]) -> str:
    """Return a hash of the files of imported modules, by name. Modules that they import are not part of it."""
    digest = xxhash.xxh3_128()
    for name in dict.fromkeys(modules):
        file = getattr(sys.modules.get(name), "__file__", None)  # Python's own have none
        digest.update(f"{name} ".encode() + (Path(file).read_bytes() if file else b""))
    return digest.hexdigest()


def folders_fingerprint(*folders: Path) -> str:
    """Return a hash of all Python modules in folders, by their paths in these folders."""
    digest = xxhash.xxh3_128()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{folder.name}/{file.relative_to(folder).as_posix()} ".encode() + file.read_bytes())
    return digest.hexdigest()


def own_function(name: str, what: str, takes: str) -> Callable[..., Any]:
    """Import the function behind ``module:function``."""
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        dotted = ".".join(Path(module_name).with_suffix("").parts)
        raise GateError(f"the {what} {name!r} names a file; name its module, as an import does: {dotted}:{attribute}")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise GateError(f"the {what} {name!r} is no module:function; expected a name such as my_package.my_module:my_{what}")
    module = _imported(module_name, name, what)
    function = getattr(module, attribute, None)
    if function is None:
        package = module_name.split(".")[0]
        functions = {other: value for other, value in vars(module).items() if inspect.isfunction(value)}
        known = [other for other, value in functions.items() if value.__module__.split(".")[0] == package and other[0] != "_"]
        raise GateError(f"the module {module_name!r} has no {attribute!r}; it has {', '.join(known) or 'no function'}")
    if not callable(function):
        raise GateError(f"the {what} {name!r} is {function!r}; expected a function that takes {takes}")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise GateError(
            f"the {what} {name!r} cannot be called with {takes} alone ({error}); have it take one argument"
        ) from error
    except ValueError:
        pass  # some callables that are not written in Python have no signature
    return function


def _imported(module_name: str, name: str, what: str) -> Any:
    import_from_here()
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise GateError(
                f"there is no module {error.name!r} for the {what} {name!r} in {os.getcwd()!r} or among the installed "
                "packages; check its name, or start the command in its folder"
            ) from error
        raise GateError(
            f"the module of the {what} {name!r} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from error
