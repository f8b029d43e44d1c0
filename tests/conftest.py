"""What all tests need of the process that they run in."""

import gc
import os
import re
import signal
from importlib.metadata import version
from pathlib import Path

import hypothesis  # noqa: F401 (its plugins look at what refers to them, which is not seen of what is frozen)
import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[1]
os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's library is imported: no test waits for what cannot be reached
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is: sums are the same in every process, and the models are tiny
os.environ.pop("COLUMNS", None)  # help and tables have the width that they have where there is no terminal


def pytest_sessionstart():
    """Processes that tests start run this checkout's code, in whatever directory and whatever is installed; and Ctrl+C works
    in them, although a shell starts what it runs in the background with SIGINT ignored, which child processes inherit."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path, config):
    """With ``-m gpu`` only the tests for a GPU are imported: machines with a GPU may lack what the others need."""
    own = ROOT / "tests" / "gpu"
    other = not collection_path.is_relative_to(own) and not own.is_relative_to(collection_path)
    return True if other and config.option.markexpr == "gpu" else None


def pytest_collection_finish():
    """What is imported by now stays: collections of garbage need not go over it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def registered(monkeypatch):
    """Leave the Auto classes as :func:`gates.register` does, for one test."""
    from transformers.models.auto import auto_factory, modeling_auto

    import gates

    for auto in vars(modeling_auto).values():
        if isinstance(auto, type) and getattr(auto, "_model_mapping", None) is not None:
            monkeypatch.setattr(auto, "_model_mapping", auto._model_mapping)
    monkeypatch.setattr(auto_factory, "hf_api", lambda: type("Api", (), {"repo_exists": lambda *_: True}))
    gates.register()


@pytest.fixture(scope="module")
def undrawn():
    """Leave the pictures out of reports: they take longer than a tiny comparison."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.report.page.pictures_of", lambda contents: [])
        yield


_failed: dict[Exception, str] = {}
"""What a fixture raised, with the test that it failed first."""


def _missing(error):
    """Return what an older Transformers lacks, if this is why a test failed and the tested version has it; else None."""
    lacks = r"has no attribute (\w+)$|its configuration has no defaults: '(\w+)'$|(.*); .* use a newer version of Transformers$"
    found = re.search(lacks, str(error))
    tested = re.search(r"^transformers==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    is_older = Version(version("transformers")) < Version(tested[1])
    is_theirs = found and (found[1] is None or str(error).startswith("module transformers"))
    return next(filter(None, found.groups())) if is_older and is_theirs else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip the tests of what an older Transformers does not have."""
    try:
        return (yield)
    except Exception as error:
        if (missing := _missing(error)) is None:
            raise
        pytest.skip(f"Transformers {version('transformers')} lacks it: {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A fixture that fails is one error: that of the first test. Others that need it are skipped, and name that test."""
    try:
        return (yield)
    except Exception as error:  # pytest keeps it, and raises it again for each of them
        if error in _failed:
            pytest.skip(f"it needs what failed for {_failed[error]}")
        _failed[error] = item.nodeid
        raise
