import copy

import pytest
import torch

from gates.sites import find_attention, is_attention
from gates.surgery.pruned import Headless
from training.coverage.runtimes import RUNTIMES, Runtime, packages, runtime_table, subjects, try_runtime

COSTLY = ("torch.compile", "Transformers' exporter", "--format onnx")
"""Seconds each, more than these tests may take; the command runs them."""
QUICK = [runtime for runtime in RUNTIMES if not any(part in runtime.name for part in COSTLY)]


def of_installed(runtime):
    reason = f"{', '.join(runtime.missing)} is not installed"
    return pytest.param(runtime, marks=pytest.mark.skipif(bool(runtime.missing), reason=reason), id=runtime.name)


@pytest.fixture(scope="module")
def models():
    return subjects()


def test_the_models_are_what_the_page_says(models):
    heads = [len([module for module in model.modules() if is_attention(module)]) for model in models.values()]
    assert heads == [3, 3, 3, 3, 2]
    sizes = {name: [site.heads for site in find_attention(model)] for name, model in models.items()}
    assert (sizes["stock, equal layers"], sizes["stock, padded"]) == ([2, 2, 2], [4, 4, 4])
    assert sizes["uneven heads"] == [3, 2, 2]
    assert sum(isinstance(module, Headless) for module in models["a layer without heads"].modules()) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("runtime", [of_installed(runtime) for runtime in QUICK])
@pytest.mark.parametrize("name", ["dense", "stock, equal layers", "stock, padded", "uneven heads", "a layer without heads"])
def test_what_runs_a_pruned_model(models, runtime, name):
    """Everything that runs the dense model; continuous batching of other than stock forms is refused in one sentence. Kernels
    of int4 need packages or devices of their own; where they run the dense model, they run the padded one of its widths."""
    found = try_runtime(runtime, models[name])
    if "continuous" in runtime.name and name in ("uneven heads", "a layer without heads"):
        assert found.startswith("no: ValueError: continuous batching keeps as many key/value heads for every layer")
    elif "int4, weights, `" in runtime.name:
        runs_dense = name == "stock, padded" and try_runtime(runtime, models["dense"]).startswith("yes")
        assert found.startswith("yes") or (found.startswith("no: ") and not runs_dense), found
    else:
        assert found.startswith("yes"), found


def test_the_model_is_left_as_it_was(models):
    before = copy.deepcopy(models["uneven heads"].state_dict())
    for runtime in [runtime for runtime in QUICK if not runtime.missing][:5]:
        try_runtime(runtime, models["uneven heads"])
    after = models["uneven heads"].state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_what_is_missing_and_what_fails_is_said():
    def fail(model, ids):
        raise RuntimeError("it does not | run\nat all")

    absent, failing = Runtime("one", fail, ("no_such_package",)), Runtime("two", fail)
    lines = runtime_table([absent, failing], {"dense": torch.nn.Linear(1, 1)})
    assert lines[2:] == [
        "| one | not tried: no_such_package is not installed |",
        "| two | no: RuntimeError: it does not / run |",
    ]


def test_versions_of_what_is_installed():
    assert "peft" in packages()
    assert "no_such_package" not in packages()
