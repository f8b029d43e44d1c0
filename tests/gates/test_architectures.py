"""Every architecture passes all checks, on a model that is built once, and has the cells of the published table."""

import csv
from pathlib import Path

import pytest
import transformers

from gates.attention.sites import find_attention
from gates.errors import GateError
from tests.gates.architecture_checks import COLUMNS, ArchitectureChecks
from tests.gates.chosen import architectures
from tools.coverage import architectures as zoo

ROOT = Path(__file__).parents[2]


@pytest.mark.integration
@pytest.mark.parametrize("name", architectures())
def test_an_architecture(name, subtests):
    with (ROOT / "docs" / "data" / "architectures.csv").open(encoding="utf-8", newline="") as file:
        (published,) = (row for row in csv.DictReader(file) if row["architecture"] == name)
    checks = ArchitectureChecks(zoo.BY_NAME[name])
    for column in COLUMNS[:-1]:  # ONNX has its own tests
        with subtests.test(column):
            assert checks.run(column) == published[column]


def test_prophetnet_is_refused_with_the_reason():
    config = transformers.ProphetNetConfig(
        hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=4, vocab_size=50,
        num_decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=48,
    )  # fmt: skip
    with pytest.raises(GateError, match="several future tokens"):
        find_attention(transformers.ProphetNetForConditionalGeneration(config))
