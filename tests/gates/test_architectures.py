"""Every architecture of the coverage table passes all checks, on a model that is built once.

Those of :data:`FAST` stand for the others: one of each way to hold projections, keys and biases. The rest is slow.
"""

import pytest
import torch
import transformers

from gates.errors import GateError
from gates.sites import find_attention
from gates.surgery.remove import remove_heads_
from tests.gates.architecture_checks import COLUMNS, NOT_APPLICABLE, ArchitectureChecks
from tools.coverage import architectures as zoo

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
REFUSED = {  # check and architectures whose cell is "no", with a part of the reason
    "entropy": dict.fromkeys(("Longformer", "BigBird", "LED"), "block-sparse attention does not see all keys"),
    "prune": {name: "" for name, architecture in zoo.BY_NAME.items() if architecture.gate_only},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n not in FAST else []) for n in zoo.BY_NAME])
def test_an_architecture(name, subtests):
    architecture = zoo.BY_NAME[name]
    checks = ArchitectureChecks(architecture)
    for column in COLUMNS[:-1]:  # ONNX has its own tests
        with subtests.test(column):
            cell = checks.run(column)
            if name in REFUSED.get(column, {}):
                assert cell.startswith("no: ")
                assert REFUSED[column][name] in cell
            elif column == "generate" and architecture.generates and not architecture.gate_only:
                assert cell == ("dynamic" if name == "Falcon (ALiBi)" else "dynamic, static")
            elif (architecture.gate_only and column in ("generate", "reload")) or column == "generate":
                assert cell == NOT_APPLICABLE
            else:
                assert cell in (("fast", "explicit") if column == "entropy" else ("yes",))


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
