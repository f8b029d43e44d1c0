"""The import rules: the library stands alone, the application's packages build on each other in one direction, and importing
anything has no side effects."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "gates").rglob("*.py"))
APPLICATION = sorted((ROOT / "training").rglob("*.py"))
FORBIDDEN = {"training", "pytorch_lightning", "lightning", "wandb"}
LAYERS = (
    ("__main__", "fit", "commands"),
    ("comparison", "analysis", "sweeps"),
    ("setup",),
    ("pruner", "report"),
    ("scoring", "plotting", "latency"),
    ("data", "stats"),
    ("tasks",),
    ("runs", "config", "cli"),
    ("truth",),
    ("gates",),
    ("gates.trainer",),
    ("gates.model",),
    ("gates.artefact", "gates.export"),
    ("gates.search", "gates.recovery", "gates.relevance", "gates.roles"),
    ("gates.scores",),
    ("gates.surgery",),
    ("gates.gating",),
    ("gates.attention",),
    ("gates.modeling_pruned", "gates.files", "gates.errors", "gates.options"),
)
"""Folders and modules from top to bottom: a file imports from its own layer and from those below."""
LONGEST_CLASS, LONGEST_FUNCTION = 350, 60


def name_of(path):
    """The dotted name of a module; a package's is that of its folder."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def nodes_of(path):
    """What is at the top of a file, and all that is in it."""
    tree = ast.parse(path.read_text())
    return tree.body, list(ast.walk(tree))


def imported(path, *, at_top=False):
    """Dotted names that a file imports, ``from a import b`` as ``a.b``; at the top of the file alone, or anywhere."""
    for node in nodes_of(path)[not at_top]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph():
    """For every module of the project the modules it imports."""
    modules = {name_of(path): path for path in [*LIBRARY, *APPLICATION]}
    found = {}
    for name, path in modules.items():
        found[name] = set()
        for target in imported(path):
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != name:
                found[name].add(target)
    return found


def layer_of(name):
    """The depth of a module's folder in ``LAYERS``; None if it is in none."""
    part = ".".join(name.split(".")[:2]) if name.startswith("gates.") else name.removeprefix("training.").split(".")[0]
    return next((depth for depth, parts in enumerate(LAYERS) if part in parts), None)


def test_every_module_has_its_layer():
    assert [name for name in graph() if name != "training" and layer_of(name) is None] == []


def test_imports_run_downwards_only():
    upwards = {
        (name, target)
        for name, targets in graph().items()
        for target in targets
        if layer_of(name) is not None and layer_of(target) is not None and layer_of(target) < layer_of(name)
    }
    assert upwards == set()


def test_there_is_no_circle():
    left = graph()
    while leaves := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in leaves}
    assert left == {}


def test_nothing_is_imported_to_dodge_a_circle():
    """Neither for type checkers alone nor inside a function; a command of the command line is imported by its name."""
    for path in [*LIBRARY, *APPLICATION]:
        assert "TYPE_CHECKING" not in path.read_text(), path
        ours = {name for name in imported(path) if name.split(".")[0] in ("gates", "training")}
        assert ours == {name for name in imported(path, at_top=True) if name.split(".")[0] in ("gates", "training")}, path


def lines_of(node):
    """The lines of a class or function; those of a function's docstring do not count."""
    lines = node.end_lineno - node.lineno + 1
    if not isinstance(node, ast.ClassDef) and ast.get_docstring(node) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


def test_classes_and_functions_can_be_read_in_one_sitting():
    long = {
        (name_of(path), node.name)
        for path in [*LIBRARY, *APPLICATION]
        for node in nodes_of(path)[1]
        if (isinstance(node, ast.ClassDef) and lines_of(node) > LONGEST_CLASS)
        or (isinstance(node, ast.FunctionDef) and lines_of(node) > LONGEST_FUNCTION)
    }
    assert long == set()


def test_few_files_lie_at_the_top():
    assert len(list((ROOT / "training").glob("*.py"))) <= 8
    assert len(list((ROOT / "gates").glob("*.py"))) <= 8


def test_the_library_imports_neither_application_nor_lightning_nor_wandb():
    assert not {name.split(".")[0] for path in LIBRARY for name in imported(path)} & FORBIDDEN


def test_the_library_prints_only_when_asked_to():
    printing = {
        function.name
        for path in LIBRARY
        for function in nodes_of(path)[1]
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing <= {"print_open_heads"}


def test_the_product_imports_no_tools():
    names = {name.split(".")[0] for path in [*LIBRARY, *APPLICATION] for name in imported(path)}
    assert "tools" not in names


@pytest.mark.integration
def test_importing_has_no_side_effects_and_the_library_loads_none_of_them(tmp_path):
    code = (
        f"import sys, {', '.join(map(name_of, LIBRARY))}; print(*sorted(sys.modules))\n"
        f"import {', '.join(map(name_of, APPLICATION))}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    (loaded,) = done.stdout.splitlines()
    assert "gates.modeling_pruned" in loaded.split()
    assert not set(loaded.split()) & FORBIDDEN
    assert list(tmp_path.iterdir()) == []
