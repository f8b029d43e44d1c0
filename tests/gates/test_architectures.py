"""Every architecture passes all checks, on a model that is built once, and has the cells of the published table.

Those of :data:`FAST` stand for the others: one of each way to hold projections, keys and biases. The rest is slow.
"""

import csv
from pathlib import Path

import pytest
import torch
import transformers

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.surgery.remove import remove_heads_
from tests.gates.architecture_checks import COLUMNS, ArchitectureChecks
from tools.coverage import architectures as zoo

ROOT = Path(__file__).parents[2]
FAST = (
    "Bert",
    "Albert",  # one module for all layers
    "GPT2",  # fused in blocks
    "Llama",  # grouped queries
    "Falcon (new decoder)",  # fused in groups, grouped queries
    "T5",  # position biases with an axis of heads
    "Bart",
    "ViT",
    "Longformer",  # gated only
    "Splinter",  # eager attention without a mask that says nothing of causality
    "HYV4",  # looks at the name of its attention's implementation
    "Lilt",  # two streams of heads in one module
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.integration] if n not in FAST else []) for n in zoo.BY_NAME]
)
def test_an_architecture(name, subtests):
    with (ROOT / "docs" / "data" / "architectures.csv").open(encoding="utf-8", newline="") as file:
        (published,) = (row for row in csv.DictReader(file) if row["architecture"] == name)
    checks = ArchitectureChecks(zoo.BY_NAME[name])
    for column in COLUMNS[:-1]:  # ONNX has its own tests
        with subtests.test(column):
            assert checks.run(column) == published[column]


@pytest.mark.integration
@pytest.mark.parametrize("name", ["Llama", "DistilBert"])
def test_onnx(name):
    assert ArchitectureChecks(zoo.BY_NAME[name]).run("onnx") == "yes"


@pytest.mark.parametrize(("name", "kept"), [("Llama", 4), ("Qwen3", 4), ("Falcon (multi-query)", 4)])
def test_a_smaller_cache(name, kept):
    """Keys stored per token fall with the groups that lose all their query heads; multi-query attention has one key only."""
    architecture = zoo.BY_NAME[name]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)

    def key_bytes(model):
        with torch.no_grad():
            layers = model(**batch, use_cache=True).past_key_values.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    before = key_bytes(model)
    after = key_bytes(remove_heads_(model, torch.tensor([1.0, 1, 0, 0] * 2)))
    assert after * (2 if architecture.kv_heads == 2 else 1) == before


def test_prophetnet_is_refused_with_the_reason():
    config = transformers.ProphetNetConfig(
        hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=4, vocab_size=50,
        num_decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=48,
    )  # fmt: skip
    with pytest.raises(GateError, match="several future tokens"):
        find_attention(transformers.ProphetNetForConditionalGeneration(config))
