"""Small translation runs for tests, on the generated language pair."""

from __future__ import annotations

from pathlib import Path

import torch

from training.config import PrunerOptions
from training.config.data import SyntheticTranslation
from training.data.synthetic_text import SyntheticTranslationData
from training.pruner.module import HeadPruner

MODEL = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0,
}  # fmt: skip
ROWS = {
    "train_rows": 160, "select_rows": 24, "test_rows": 24, "batch_tokens": 256, "score_rows": 32, "max_length": 40,
    "eval_batch_size": 16,
}  # fmt: skip
SETTINGS = {"budget": {"encoder": 3}, "finetune": 1.0, "prune": 1.0, "retrain": 1.0, "learning_rate": 1e-3}

CONFIG = """
name: tiny_translation
model:
  from_scratch: {d_model: 16, encoder_layers: 2, decoder_layers: 1, encoder_attention_heads: 4, decoder_attention_heads: 4,
    encoder_ffn_dim: 24, decoder_ffn_dim: 24}
  budget: {encoder: 3}
  freeze_while_pruning: [decoder, shared]
  finetune: 1
  min_steps: 0
  refit: false
  prune: 1
  retrain: 1
  learning_rate: 1.0e-3
data:
  class_path: SyntheticTranslation
  init_args: {train_rows: 160, select_rows: 24, test_rows: 24, batch_tokens: 256, score_rows: 32, max_length: 40}
trainer: {accelerator: cpu, enable_progress_bar: false, log_every_n_steps: 2}
wandb: {mode: disabled}
compare: none
save_every: 4
curve: [0.5]
"""


def make_data(**settings: object) -> SyntheticTranslationData:
    data = SyntheticTranslationData(SyntheticTranslation(**(ROWS | settings)))
    data.build(None)
    return data


def make_options(**settings: object) -> PrunerOptions:
    """Options of a small run; settings take the place of some of them."""
    return PrunerOptions(**({"from_scratch": MODEL} | SETTINGS | settings))


def make_pruner(data: SyntheticTranslationData | None = None, *, seed: int = 0, **settings: object) -> HeadPruner:
    """A built pruner with reproducible weights."""
    data = data or make_data()
    torch.manual_seed(0)
    pruner = HeadPruner(make_options(**settings), seed=seed)
    pruner.build(data.task, data.tokenizer)
    return pruner


def write_config(folder: Path) -> str:
    path = folder / "tiny.yaml"
    path.write_text(CONFIG)
    return str(path)


def read_texts(path):
    """Return the lines of a file of translations; some may be empty."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]
