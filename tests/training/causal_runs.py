"""Small runs of language models for tests, on the generated stories."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.training.runs import make_trainer
from training.config import PrunerOptions
from training.config.data import SyntheticDocuments
from training.data.synthetic_text import SyntheticDocumentsData
from training.pruner.module import HeadPruner
from training.scoring.subject import ScoringContext

MODEL = {
    "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40, "initializer_range": 0.3,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
GROUPED = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 40, "initializer_range": 0.3,
}  # fmt: skip
ROWS = {
    "train_rows": 64, "select_rows": 8, "test_rows": 12, "batch_size": 4, "score_rows": 8, "max_length": 40,
    "eval_batch_size": 32,
}  # fmt: skip
SETTINGS = {"budget": 3, "finetune": 1.0, "prune": 1.0, "retrain": 1.0, "learning_rate": 1e-3}

CONFIG = """
name: tiny_causal_lm
model:
  from_scratch: {model_type: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
    intermediate_size: 32, max_position_embeddings: 40, initializer_range: 0.1}
  unit: group
  budget: 2
  finetune: 1
  min_steps: 0
  refit: false
  prune: 1
  retrain: 1
  learning_rate: 3.0e-3
data:
  class_path: SyntheticDocuments
  init_args: {train_rows: 64, select_rows: 8, test_rows: 12, batch_size: 4, score_rows: 8, max_length: 40}
trainer: {accelerator: cpu, enable_progress_bar: false, log_every_n_steps: 2}
wandb: {mode: disabled}
compare: none
save_every: 8
"""


def make_data(**settings: object) -> SyntheticDocumentsData:
    data = SyntheticDocumentsData(SyntheticDocuments(**(ROWS | settings)))
    data.build(None)
    return data


def make_pruner(data: SyntheticDocumentsData, **settings: object) -> HeadPruner:
    """A built pruner with reproducible weights, large enough that every head matters."""
    torch.manual_seed(0)
    pruner = HeadPruner(PrunerOptions(**({"from_scratch": MODEL} | SETTINGS | settings)), seed=0)
    pruner.build(data.task, data.tokenizer)
    return pruner


def make_subject(data: SyntheticDocumentsData | None = None, **settings: object) -> ScoringContext:
    data = data or make_data()
    return ScoringContext(make_pruner(data, **settings), data, make_trainer(limit_val_batches=1.0))


def write_config(folder: Path) -> str:
    path = folder / "tiny.yaml"
    path.write_text(CONFIG)
    return str(path)
