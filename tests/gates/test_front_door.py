"""``import gates``: the names that users are told of, and what importing them costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import gates


def test_every_line_of_the_stub_is_a_public_name():
    assert len(Path(gates.__file__ + "i").read_text().splitlines()) == len(gates.__all__)


@pytest.mark.parametrize("name", gates.__all__)
def test_a_public_name_is_the_one_of_its_module(name):
    found = getattr(gates, name)
    assert found.__name__ == name
    assert found.__module__.startswith("gates.")
    summary, *_ = found.__doc__.splitlines()
    assert summary.endswith((".", ":"))
    assert ">>> " in found.__doc__  # run by tests/test_doctests.py


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Gate'"):
        _ = gates.Gate


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, gates; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "torchmetrics", "pytorch_lightning", "wandb"} & set(loaded)
