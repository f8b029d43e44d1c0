"""Pruned models under ``torch.export`` and ``torch.compile``: an encoder, a decoder with grouped queries, an encoder-decoder,
each with a layer without heads."""

import shutil

import pytest
import torch

from gates.modeling_pruned import Headless
from gates.surgery.remove import remove_heads_
from tools.coverage import architectures as zoo

ALL = pytest.mark.parametrize("name", ["Bert", "Llama", "Bart", pytest.param("T5", marks=pytest.mark.integration)])


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


@pytest.mark.integration
@ALL
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


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own
@ALL
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.integration,
                pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
            ],
        ),
    ],
)
def test_torch_compile_equals_eager_without_a_graph_break(name, backend):
    model, given = pruned(name), inputs(name)
    expected = output(model, given)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(output(compiled, given), expected, atol=5e-6, rtol=2e-5)
