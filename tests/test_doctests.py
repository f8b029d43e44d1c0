"""The examples in the library's docstrings."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "gates").rglob("*.py")
    if ">>> " in path.read_text()
)


def test_there_are_examples_where_users_look_first():
    assert {"gates.artefact", "gates.model", "gates.trainer"} <= set(MODULES)


@pytest.mark.integration
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
