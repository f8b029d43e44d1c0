"""``python -m tools.deployment``: what loads and runs exports, and what is shown where something is missing or fails."""

import sys

import pytest

from tools.coverage import architectures as zoo
from tools.deployment import __main__ as deployment
from tools.deployment import routes, runtimes, vllm
from tools.deployment.in_vllm import heads_by_layer

OWN = ("Laguna", "Gemma4")
COSTLY = ("torch.compile", "Transformers' exporter", "--format onnx")
VLLM = """
import os

__version__ = "0"

class SamplingParams:
    def __init__(self, **options):
        self.options = options

class LLM:
    def __init__(self, model, **options):
        print("loading", model)
        self.told = options.get("hf_overrides", {}).get("per_layer_config", {})
        assert "mute" not in model
        if "dies" in model:
            os._exit(7)

    def generate(self, texts, parameters, use_tqdm):
        step = {layer: type("One", (), {"logprob": -heads["num_attention_heads"]}) for layer, heads in self.told.items()}
        return [type("Result", (), {"outputs": [type("Text", (), {"token_ids": (5,), "logprobs": [step]})]})]
"""


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("Llama", ["by layer"]),
        ("Bert", ["stock", "by layer", "padded"]),
        ("NomicBert", ["by layer"]),
        *(pytest.param(n, [], marks=pytest.mark.integration) for n in OWN),
    ],
)
def test_routes(name, refused):
    (architecture,) = (row for row in routes.ARCHITECTURES if row.name == name)
    found = {route: routes.try_route(architecture, route) for route in routes.ROUTES}
    assert [route for route, cell in found.items() if cell.startswith("no: ")] == refused
    assert {cell for route, cell in found.items() if route not in refused} == {"yes"}


def test_another_model_than_the_saved_one_is_a_failure(monkeypatch):
    monkeypatch.setattr(routes, "save_pruned", lambda *_, **__: None)
    monkeypatch.setattr(routes, "_loaded", lambda *_: zoo.build(zoo.BY_NAME["Llama"], seed=1))
    assert routes.try_route(zoo.BY_NAME["Llama"], "stock").startswith("FAILED: differs by")


@pytest.fixture(scope="module")
def pruned():
    return runtimes.subjects()


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if "torch.export" in name else ())
        for name in runtimes.RUNTIMES
        if not any(part in name for part in COSTLY)
    ],
)
def test_runtimes(pruned, name):
    """All run all models, except for continuous batching with uneven heads. Kernels of int4 may need other devices."""
    run, *packages = runtimes.RUNTIMES[name]
    found = {subject: runtimes.try_runtime(run, model, *packages) for subject, model in pruned.items()}
    for subject, cell in found.items():
        if name.startswith("continuous") and not subject.startswith(("dense", "stock")):
            assert cell.startswith("no: ValueError: continuous batching keeps as many key/value heads for every layer")
        elif "int4, weights, `" in name:
            runs = subject != "stock, padded" or not found["dense"].startswith("yes")
            assert cell.startswith("yes") or (cell.startswith("no") and runs)
        else:
            assert cell.startswith(("yes", "not tried: torchao"))


def test_vllm_in_another_interpreter(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, config in (
        ("good", '{"pruned_attention": {"2.x": {"heads": 3, "kv_heads": 1}}}'),
        ("mute", "{}"),
        ("dies", "{}"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    job = {"backend": "transformers", "texts": [[3, 4]], "new": 1, "vocabulary": 50, "repeats": 2}
    good, mute, dies = vllm.ask(sys.executable, [{**job, "folder": str(tmp_path / name)} for name in ("good", "mute", "dies")])
    assert (good["tokens"], good["probabilities"], len(good["seconds"])) == ([[5]], [{"2": -3}], 2)
    assert mute == {"error": 'AssertionError: assert "mute" not in model'}
    assert dies == {"error": "its process ended with exit code 7"}
    assert vllm.ask("/bin/false", [job]) == [{"error": "not tried: it ended with exit code 1"}]
    assert list(heads_by_layer({"10.x": {"heads": 3, "kv_heads": 1}})["per_layer_config"]) == [10]


def test_the_page_has_the_counts_of_its_data(tmp_path, monkeypatch):
    rows = deployment.read(deployment.DATA)
    for table, names in (("runtimes", runtimes.RUNTIMES), ("routes", [row.name for row in routes.ARCHITECTURES])):
        assert list(dict.fromkeys(row["row"] for row in rows if row["table"] == table)) == list(names)
    page = deployment.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(deployment, "PAGE", tmp_path / "page.md")
    deployment.PAGE.write_text(page, encoding="utf-8")
    deployment.write_counts()
    assert deployment.PAGE.read_text(encoding="utf-8") == page
    with pytest.raises(SystemExit, match="2"):
        deployment.main(["speeds"])
