"""Each way to run an export writes what the gated model writes."""

import pytest
import torch

from gates.export.checkpoint import save_pruned
from gates.head_gates import HeadGates
from tests.training.coverage.test_vllm import PYTHON, needs_vllm
from training.coverage import architectures as zoo
from training.coverage import vllm
from training.coverage.vllm_process import Vllm, opened
from training.coverage.writers import prepared, ways

MASKS = {
    "dense": torch.ones(8),
    "padded": torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0]),
    "pruned": torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1]),
}
IDS = torch.randint(3, zoo.VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
NEW = 4
BY_NAME = {way.name: way for way in ways(Vllm(None))}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    for name, mask in MASKS.items():
        form = "pruned" if name == "pruned" else "stock"
        save_pruned(_llama(), folder / name, mask, form=form, pad_heads=name == "padded", tokenizer=None)
    return folder


def _llama():
    return zoo.build(vllm.wide(zoo.BY_NAME["Llama"]))


@torch.no_grad()
def expected(mask):
    """One token after another, each from the whole text, without a cache."""
    model, ids = _llama(), IDS
    gates = HeadGates(model)
    with gates.attached(), gates.use(mask):
        for _ in range(NEW):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[:, IDS.shape[1] :]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", [name for name, way in BY_NAME.items() if not way.missing])
def test_the_same_tokens(exports, name, kind):
    write = prepared(BY_NAME[name], exports / kind)
    if name == "llama.cpp" and kind == "pruned":
        assert write.startswith("no: RuntimeError")
        return
    written = write(IDS, NEW)
    assert written.shape == (len(IDS), NEW)
    if "int8" not in name:
        assert torch.equal(written, expected(MASKS[kind]))


def test_pytorch_writes_what_the_gated_model_writes(exports):
    for kind, mask in MASKS.items():
        assert torch.equal(prepared(BY_NAME["PyTorch"], exports / kind)(IDS, NEW), expected(mask))


@needs_vllm
@pytest.mark.slow
def test_vllm_writes_the_same_tokens(exports):
    with opened(PYTHON) as process:
        way = next(way for way in ways(process) if way.name == "vLLM")
        for kind, mask in MASKS.items():
            assert torch.equal(prepared(way, exports / kind)(IDS, NEW), expected(mask))


def test_what_is_missing_and_what_fails_is_said(tmp_path):
    assert prepared(BY_NAME["vLLM"], tmp_path) == "not tried: no --vllm_python"
    assert prepared(BY_NAME["PyTorch"], tmp_path / "nowhere").startswith("no: GateError: ")
