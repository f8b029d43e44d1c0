"""Models of small runs, as an analysis loads them."""

from types import SimpleNamespace

import torch

from tests.training import causal_runs, runs, translation_runs
from training.analysis.model import LoadedRun

BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64,
    "eos_token_id": 3, "bos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip


def loaded(pruner, data):
    return LoadedRun(pruner.eval(), data, runs.make_trainer(), None, SimpleNamespace(model=pruner.options))


def make_dense(from_scratch=None, **settings):
    """A random classifier with weights so large that its heads matter."""
    more = {} if from_scratch is None else {"from_scratch": from_scratch}
    pruner = runs.make_pruner(**more, **settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in pruner.backbone.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5 * 2)
    return loaded(pruner, runs.make_data(test_rows=120))


def make_decoder():
    data = causal_runs.make_data()
    return loaded(causal_runs.make_pruner(data), data)


def make_translator():
    data = translation_runs.make_data()
    return loaded(translation_runs.make_pruner(data), data)
