"""A model whose attention is watched: that of a run, or one in a folder that Transformers can load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.sites import AttentionSite, find_attention
from training.analysis.model import DenseModel
from training.config import Source
from training.config.paths import HubName
from training.data.base import TaskData
from training.runs.run_directory import CONFIG
from training.tasks.encoder_decoder import check_vocabulary, positions
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
        mask: of the gates in force, ``[gates]``; None for all open.
    """

    backbone: PreTrainedModel
    sites: tuple[AttentionSite, ...]
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    gates: HeadGates | None = None
    data: TaskData | None = None
    mask: Tensor | None = None

    @property
    def kept(self) -> Tensor:
        """Places of the heads that are not pruned, in the order of all heads."""
        if self.gates is None or self.mask is None:
            return torch.arange(sum(site.heads for site in self.sites), device=self.device)
        return self.gates.to_heads(self.mask).nonzero().flatten()

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The number of its site, and its number there, of every head that is not pruned."""
        places = [(number, head) for number, site in enumerate(self.sites) for head in range(site.heads)]
        return [places[place] for place in self.kept.tolist()]

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
        """No gradients, and every gate open, but for those that are pruned."""
        with torch.no_grad():
            if self.gates is None:
                yield
                return
            with self.gates.use(torch.ones(self.gates.size, device=self.device) if self.mask is None else self.mask):
                yield


def is_model_folder(path: str) -> bool:
    """Whether a directory holds a model of Transformers and no run."""
    folder = Path(path)
    return (folder / "config.json").is_file() and not (folder / CONFIG).is_file()


def observe_run(dense: DenseModel, mask: Tensor | None = None) -> ObservedModel:
    """The dense model of a run, or that at its end under its mask ``[gates]``."""
    if dense.data.tokenizer is None:
        raise GateError("the experiment roles is of words, and these data have no tokenizer; choose among causal and relevance")
    backbone, gates = dense.pruner.backbone, dense.gates
    return ObservedModel(backbone, gates.sites, dense.data.tokenizer, dense.device, gates, dense.data, mask)


def observe_folder(path: str) -> ObservedModel:
    """A model in a folder, with its own tokenizer; no code from the folder is run.

    Raises:
        GateError: if it cannot be loaded, or its attention is not known.
    """
    tokenizer = read_tokenizer(path)
    config = read_config(path)
    what = "a model"
    backbone = load_pretrained(AutoModel, Source(HubName(path)), config, what=what).eval()
    if "input_ids" not in backbone.main_input_name:
        raise GateError(f"{type(backbone).__name__} in {path!r} reads no text; give a model of texts")
    check_vocabulary(backbone, tokenizer, repr(path))
    return ObservedModel(backbone, find_attention(backbone), tokenizer, torch.device("cpu"))
