"""A model whose attention is watched: that of a run, or one in a folder that Transformers can load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.sites import AttentionSite, find_attention
from training.analysis.model import DenseModel
from training.data.base import TaskData
from training.runs.run_directory import CONFIG
from training.tasks.encoder_decoder import positions
from training.tasks.loading import load_pretrained, read_config, read_tokenizer

UNLIMITED = 1_000_000
"""A tokenizer that does not know its model's length states one beyond all texts."""


@dataclass(frozen=True)
class ObservedModel:
    """A model at rest with what its attention is read on.

    Args:
        backbone: in evaluation mode on ``device``.
        sites: its attention modules.
        tokenizer: its own, or that of the run's data.
        device: to compute on.
        gates: on the model; None for a folder's.
        data: of the run; None for a folder's.
    """

    backbone: PreTrainedModel
    sites: tuple[AttentionSite, ...]
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    gates: HeadGates | None = None
    data: TaskData | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens of a text that the model takes; None where nothing limits them."""
        stated = [positions(self.backbone.config, side) for side in ("encoder", "decoder")]
        limits = [limit for limit in (*stated, self.tokenizer.model_max_length) if limit is not None and limit < UNLIMITED]
        return min(limits, default=None)

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.backbone.config.is_encoder_decoder)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """No gradients, and every gate open."""
        with torch.no_grad():
            if self.gates is None:
                yield
                return
            with self.gates.use(torch.ones(self.gates.size, device=self.device)):
                yield


def is_model_folder(path: str) -> bool:
    """Whether a directory holds a model of Transformers and no run."""
    folder = Path(path)
    return (folder / "config.json").is_file() and not (folder / CONFIG).is_file()


def observe_run(dense: DenseModel) -> ObservedModel:
    """The dense model of a run."""
    assert dense.data.tokenizer is not None
    backbone, gates = dense.pruner.backbone, dense.gates
    return ObservedModel(backbone, gates.sites, dense.data.tokenizer, dense.device, gates, dense.data)


def observe_folder(path: str) -> ObservedModel:
    """A model in a folder, with its own tokenizer; no code from the folder is run.

    Raises:
        GateError: if it cannot be loaded, or its attention is not known.
    """
    tokenizer = read_tokenizer(path)
    config = read_config(path)
    what = "a model"
    backbone = load_pretrained(AutoModel, path, config, what=what, trust_remote_code=False, allow_pickle=False).eval()
    if "input_ids" not in backbone.main_input_name:
        raise GateError(f"{type(backbone).__name__} in {path!r} reads no text; give a model of texts")
    return ObservedModel(backbone, find_attention(backbone), tokenizer, torch.device("cpu"))
