"""Profiles name what was measured: known operators with known durations, and weights that are counted by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from training.benchmark import profiles
from training.benchmark.profiles import Operators, bytes_read, durations_of_nodes, operators_of
from training.benchmark.setting import Setting
from training.benchmark.size import Size

SETTING = Setting("tiny", None, "cpu", 1, (Size(2, 8),), quick=True)


def test_products_stand_apart_and_the_median_of_each_call_counts():
    durations = {
        ("aten::mm", "[2, 3]"): [1.0, 1.0, 9.0, 1.0],  # twice in each of two passes, once disturbed
        ("aten::mm", "[4, 3]"): [2.0, 4.0],
        ("aten::add", "[2, 3]"): [0.5, 0.5],
    }
    assert Operators.of(durations, passes=2) == Operators(products=2 * 1 + 3, others=0.5, calls=4)


def test_steps_are_what_a_longer_pass_has_more():
    assert Operators(10, 6, 40).less(Operators(4, 3, 10), steps=3) == Operators(2, 1, 10)


def test_nodes_of_onnx_runtime_without_the_first_pass():
    events = [
        {"cat": "Node", "name": f"{node}_kernel_time", "dur": duration, "args": {"op_name": operator}}
        for node, operator, duration in (("a", "MatMul", 9000), ("a", "MatMul", 2000), ("b", "Add", 9000), ("b", "Add", 1000))
    ] + [{"cat": "Session", "name": "model_run", "dur": 5000, "args": {}}]
    assert durations_of_nodes(events) == {("MatMul", "a_kernel_time"): [2.0], ("Add", "b_kernel_time"): [1.0]}


def test_operators_of_pytorch_are_seen():
    a = torch.randn(64, 64)
    found = operators_of(lambda: (a @ a).exp(), passes=3)
    assert found.products > 0
    assert found.others > 0
    assert 2 <= found.calls <= 6  # with what wraps them


def test_embeddings_are_not_read_unless_they_give_the_output():
    classifier, generator = SETTING.classifier(), SETTING.generator()
    looked_up = sum(module.weight.numel() for module in classifier.modules() if isinstance(module, nn.Embedding))
    assert bytes_read(classifier) == 4 * (sum(weight.numel() for weight in classifier.parameters()) - looked_up)
    positions = generator.transformer.wpe.weight.numel()  # the words' give the output
    assert bytes_read(generator) == 4 * (sum(weight.numel() for weight in generator.parameters()) - positions)


def test_texts_are_as_long_as_leaves_room_for_what_is_written(monkeypatch):
    """As where pruned models are timed."""
    rows = {"_of_a_token": [], "_in_onnx_runtime": []}
    for name, found in rows.items():
        monkeypatch.setattr(profiles, name, lambda setting, size, *more, found=found: found.append(size) or {})
    profiles.measure(replace(SETTING, sizes=(Size(1, 512), Size(2, 16), Size(3, 200))))
    assert rows["_of_a_token"] == [Size(1, 128)] * 2 + [Size(3, 128)] * 2
    assert rows["_in_onnx_runtime"] == [Size(1, 512)] * 2 + [Size(3, 200)] * 2


def test_a_token_is_profiled(monkeypatch):
    monkeypatch.setattr(profiles, "NEW_TOKENS", 3)
    dense, pruned = (profiles._of_a_token(SETTING, Size(2, 8), share) for share in profiles.SHARES)
    assert dense["weights_mb"] > pruned["weights_mb"]
    assert dense["products_ms"] > 0
    assert dense["calls"] > 10


@pytest.mark.parametrize("share", profiles.SHARES)
def test_a_pass_in_onnx_runtime_is_profiled(share, tmp_path):
    pytest.importorskip("onnxruntime")
    row = profiles._in_onnx_runtime(SETTING, Size(2, 8), share, tmp_path)
    assert row["products_ms"] > 0
    assert row["others_ms"] > 0
