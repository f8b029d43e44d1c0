import pytest
import torch

from gates.errors import GateError
from gates.export import checkpoint
from gates.export.checkpoint import load_pruned, save_pruned
from gates.surgery.verify import check_same_outputs
from tests.gates.chosen import chosen
from tools.coverage import architectures as zoo

HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("form", ["pruned", "masked"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", chosen(["Llama", "Gemma2", "T5", "Whisper"], fast=(), integration=["Llama", "T5"]))
def test_models_in_half_precision_are_saved(tmp_path, name, dtype, form):
    """Their rotary frequencies are rounded by .half() and exact once loaded; T5 loads some layers in float32."""
    architecture = zoo.BY_NAME[name]
    model = zoo.build(architecture).to(dtype)
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    save_pruned(model, tmp_path / "out", zoo.random_mask(architecture), form=form, tokenizer=None)
    assert load_pruned(tmp_path / "out").dtype == dtype
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[key])
        assert buffer.dtype == buffers[key].dtype


@pytest.mark.parametrize("dtype", HALF)
def test_a_changed_weight_is_noticed_below_the_rounding_of_outputs(tmp_path, monkeypatch, dtype):
    def spoiled(*arguments, **more):
        model = load_pruned(*arguments, **more)
        with torch.no_grad():
            model.model.norm.weight[0] *= 1.01
        return model

    architecture = zoo.BY_NAME["Llama"]
    monkeypatch.setattr(checkpoint, "load_pruned", spoiled)
    with pytest.raises(GateError, match=r"differs from the saved one in 'model.norm.weight'"):
        save_pruned(zoo.build(architecture).to(dtype), tmp_path / "out", zoo.random_mask(architecture), tokenizer=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_other_outputs_are_noticed_in_every_type(dtype):
    """A head too many is more than rounding."""
    architecture = zoo.BY_NAME["Llama"]
    one, other = zoo.build(architecture).to(dtype), zoo.build(architecture).to(dtype)
    gates = torch.ones(8)
    check_same_outputs(one, other, zoo.inputs(architecture), gates)
    gates[3] = 0
    with pytest.raises(GateError, match="differs"):
        check_same_outputs(one, other, zoo.inputs(architecture), gates)
