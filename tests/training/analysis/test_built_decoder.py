"""A folder with a decoder whose heads are known, through the command."""

import pandas as pd
import pytest

from tests.gates.roles.built_decoder import BUILT, DecoderWeights
from tests.training.analysis.test_roles import WORDS, write_treebank
from training.commands.table import run_command
from training.data.synthetic import word_tokenizer

PLACES = 65


@pytest.mark.parametrize(
    "shuffled", [pytest.param(False, marks=pytest.mark.integration), pytest.param(True, marks=pytest.mark.nightly)]
)
def test_the_command_names_the_heads_of_a_built_decoder_and_none_of_a_shuffled_one(tmp_path, shuffled):
    tokenizer = word_tokenizer(WORDS, max_length=PLACES)
    weights = DecoderWeights(len(tokenizer), PLACES)
    model = weights.write()
    if shuffled:
        weights.shuffle()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    trees = write_treebank(tmp_path, WORDS, rows=80)
    assert run_command("analyze", [str(tmp_path / "model"), "--conllu", trees, "--run_dir", str(tmp_path / "out")]) == 0
    table = pd.read_csv(tmp_path / "out" / "roles.csv")
    assert table[["layer", "head"]].values.tolist() == [[layer, head] for layer in range(2) for head in range(3)]
    if shuffled:
        assert not table["specialised"].any()
    else:
        assert table["roles"].tolist() == [", ".join(roles) or "none" for roles in BUILT]
