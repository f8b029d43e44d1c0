"""``import gates``: the names that users are told of, and what importing them costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import gates


@pytest.mark.parametrize("name", gates.__all__)
def test_a_public_name_is_the_one_of_its_module(name):
    found = getattr(gates, name)
    assert found.__name__ == name
    assert found.__module__.startswith("gates.")
    summary, *_ = found.__doc__.splitlines()
    assert summary.endswith((".", ":"))
    assert ">>> " in found.__doc__  # run by tests/test_doctests.py


def test_the_stub_names_the_same():
    lines = Path(gates.__file__ + "i").read_text().splitlines()
    stated = [name.split(" as ")[1] for line in lines for name in line.split(" import ")[1].split(", ")]
    assert sorted(stated) == sorted(gates.__all__)
    for line in lines:
        module, names = line.removeprefix("from ").split(" import ")
        assert {gates._MODULE_OF[name.split(" as ")[0]] for name in names.split(", ")} == {module}


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Gate'"):
        _ = gates.Gate


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, gates; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "torchmetrics", "pytorch_lightning", "wandb"} & set(loaded)
