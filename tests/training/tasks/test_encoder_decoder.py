"""The most tokens that a model takes, seen on tiny random models."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from gates.errors import GateError
from training.tasks.encoder_decoder import check_longest, positions

TINY = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TABLES = {kind: TINY | {"max_position_embeddings": 20} for kind in (
    "bert", "roberta", "xlm-roberta-xl", "data2vec-text", "mpnet", "ibert", "markuplm", "layoutlm", "nystromformer",
)}  # fmt: skip
TABLES |= {
    "longformer": TABLES["bert"] | {"attention_window": 4},
    "esm": TABLES["bert"] | {"pad_token_id": 1, "mask_token_id": 4, "position_embedding_type": "absolute"},
    "xmod": TABLES["bert"] | {"default_language": "en_XX"},
    "mpt": {"vocab_size": 50, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 20},
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_positions_ends_where_it_is_said_to(kind):
    config = AutoConfig.for_model(kind, **TABLES[kind])
    model, limit = AutoModel.from_config(config).eval(), positions(config, "encoder")
    assert limit is not None
    model(torch.full((1, limit), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, limit + 1), 7))
    check_longest(config, "it", limit)
    with pytest.raises(GateError, match=f"the longest text has {limit + 1} tokens, but it has {limit} positions"):
        check_longest(config, "it", limit + 1)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("t5", {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}),
        ("llama", TINY | {"max_position_embeddings": 20}),
        ("esm", TABLES["esm"] | {"position_embedding_type": "rotary"}),
        ("xlnet", {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}),
        ("deberta-v2", TINY | {"max_position_embeddings": 20, "position_biased_input": False, "relative_attention": True}),
    ],
)
def test_models_without_a_table_take_any_length(kind, fields):
    config = AutoConfig.for_model(kind, **fields)
    check_longest(config, "it", 40)
    ids = torch.full((1, 40), 7)
    AutoModel.from_config(config).eval()(ids, **({"decoder_input_ids": ids} if kind == "t5" else {}))
