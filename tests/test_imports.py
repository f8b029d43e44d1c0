"""The import rule: the library stands alone, and importing anything has no side effects."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "gates").glob("*.py"))
FORBIDDEN = {"training", "pytorch_lightning", "lightning", "wandb"}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_the_library_imports_neither_application_nor_lightning_nor_wandb(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        assert not {name.split(".")[0] for name in names} & FORBIDDEN


def test_importing_the_whole_library_loads_none_of_them():
    modules = [f"gates.{path.stem}" for path in LIBRARY if path.stem != "__init__"]
    code = f"import sys, {', '.join(modules)}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & FORBIDDEN


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_the_library_prints_only_when_asked_to(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    printing = {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing <= {"print_open_heads"}


def test_importing_has_no_side_effects(tmp_path):
    modules = [
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for folder in ("gates", "training")
        for path in (ROOT / folder).rglob("*.py")
        if path.stem != "__init__"
    ]
    code = f"import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
