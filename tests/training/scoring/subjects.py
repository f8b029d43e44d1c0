"""Small models whose every head matters, with data to score them on."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.training.runs import MODEL, make_data, make_pruner, make_trainer
from training.scoring.passes import PASSES
from training.scoring.scorers import Scores
from training.scoring.subject import ScoringContext

GROUPED = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = ("bert", "llama-groups")
RAWS = [name for one in PASSES.values() for name in one.raws]
ROWS = 12


def make_subject(kind: str = "bert", **settings: object) -> ScoringContext:
    unit = {"unit": "group"} if kind == "llama-groups" else {}
    pruner = make_pruner(from_scratch=MODEL if kind == "bert" else GROUPED, **unit, **settings)
    for parameter in pruner.backbone.parameters():  # so large that every head matters
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return ScoringContext(pruner, make_data(score_rows=ROWS, batch_size=5), make_trainer())


def make_scores(kind: str = "bert", kept=None) -> Scores:
    return Scores(make_subject(kind), kept)


def examples(subject: ScoringContext):
    """The scoring data one by one, in the loader's order."""
    for batch in subject.data.score_dataloader():
        for row in range(len(batch["labels"])):
            length = int(batch["attention_mask"][row].sum())
            yield {
                name: tensor[row : row + 1, :length] if tensor.dim() == 2 else tensor[row : row + 1]
                for name, tensor in batch.items()
            }


def loss_of(subject: ScoringContext, batch: dict[str, Tensor], values: Tensor | None = None) -> Tensor:
    """Per-example losses with gate values, all open by default."""
    with subject.gates.use(torch.ones(subject.gates.size) if values is None else values):
        return subject.losses(batch)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.double(), atol=1e-6, rtol=2e-3)
