"""Pruned models under ``torch.export`` and ``torch.compile``: an encoder, a decoder with grouped queries, an encoder-decoder,
each with a layer without heads."""

import shutil

import pytest
import torch

from gates.modeling_pruned import Headless
from gates.surgery.remove import remove_heads_
from tests.gates.chosen import chosen
from tools.coverage import architectures as zoo

NAMES = ("Bert", "Llama", "Bart", "T5")


def pruned(name):
    architecture = zoo.BY_NAME[name]
    model = remove_heads_(zoo.build(architecture), zoo.random_mask(architecture))
    assert any(isinstance(module, Headless) for module in model.modules())
    return model


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs, use_cache=False)[0] if "decoder_input_ids" in inputs else model(**inputs)[0]


def inputs(name, **sizes):
    return zoo.inputs(zoo.BY_NAME[name], padding=False, **sizes)


@pytest.mark.parametrize("name", chosen(NAMES, fast=(), integration=("Llama", "Bart")))
def test_torch_export_equals_eager_at_another_size(name):
    model, given = pruned(name), inputs(name)
    settings = {"use_cache": False} if name != "Bert" else {}
    axes = {key: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for key in given} | dict.fromkeys(settings)
    program = torch.export.export(model, (), {**given, **settings}, dynamic_shapes=axes)
    for sizes in ({}, {"batch": 5, "length": 12}):
        other = inputs(name, **sizes)
        with torch.no_grad():
            found = program.module()(**other, **settings)[0]
        torch.testing.assert_close(found, output(model, other), atol=5e-6, rtol=2e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(
    ("backend", "name"),
    chosen(
        [*(("aot_eager", name) for name in NAMES), ("inductor", "Llama")],
        fast=(),
        integration=[("aot_eager", "Bert"), ("aot_eager", "Bart")],
    ),
)
def test_torch_compile_equals_eager_without_a_graph_break(name, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    model, given = pruned(name), inputs(name)
    expected = output(model, given)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(output(compiled, given), expected, atol=5e-6, rtol=2e-5)
