"""What a benchmark is run with: the model, the sizes of its batches, the device, and how long each thing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from gates.errors import GateError, first_line
from training.benchmark.alternate import Effort
from training.benchmark.size import Size


@dataclass(frozen=True)
class Shape:
    """A Transformer that is built with random weights. A feed-forward block is four times as wide as the model."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 30522


SHAPES = {"tiny": Shape(2, 4, 64, 1000), "small": Shape(6, 12, 384), "base": Shape(12, 12, 768)}
"""``small`` is the shape of MiniLM-L6, ``base`` that of BERT-base."""
POSITIONS = 512
DROPOUT = 0.1
LABELS = 2
DEFAULT_SIZES = {"cpu": ("1x128", "8x128", "32x64"), "cuda": ("1x128", "32x128", "32x512"), "quick": ("2x16",)}


@dataclass(frozen=True)
class Setting:
    """What everything is measured with.

    Args:
        shape: name in :data:`SHAPES`; without effect where a model is given.
        model: folder of a model, or None.
        device: ``cpu`` or ``cuda``.
        threads: of the CPU.
        sizes: batches.
        processor_time: whether the time that a CPU worked is measured, in place of the time that went by.
        quick: one short look at everything, to see that it runs: nothing to publish.
    """

    shape: str
    model: str | None
    device: str
    threads: int
    sizes: tuple[Size, ...]
    processor_time: bool = False
    quick: bool = False

    @property
    def on(self) -> torch.device:
        return torch.device(self.device)

    @property
    def effort(self) -> Effort:
        effort = Effort(turns=5, warm_up=1, seconds=1.0) if self.quick else Effort()
        return replace(effort, processor_time=self.processor_time)

    @property
    def compiled_size(self) -> Size:
        """The batch that compiled models are measured with, since compiling takes minutes: the smallest on a CPU, where little
        else is to be gained, and the largest on a GPU."""
        return (min if self.device == "cpu" else max)(self.sizes, key=lambda size: size.batch * size.length)

    def classifier(self) -> PreTrainedModel:
        """The model that is trained and scored, on the device."""
        model = random_classifier(SHAPES[self.shape]) if self.model is None else _loaded(self.model, generates=False)
        return model.to(self.on)  # type: ignore[arg-type]

    def generator(self) -> PreTrainedModel | None:
        """The model that writes text, on the device; None for a model that does not."""
        if self.model is None:
            return random_generator(SHAPES[self.shape]).to(self.on)  # type: ignore[arg-type]
        names = getattr(_config(self.model), "architectures", None) or []
        if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
            return None
        return _loaded(self.model, generates=True).to(self.on)  # type: ignore[arg-type]

    def batch(self, size: Size, vocabulary: int) -> dict[str, Tensor]:
        """Random tokens ``[batch, length]`` without padding, and labels ``[batch]``; the same each time."""
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(5, vocabulary, (size.batch, size.length), generator=draw)
        labels = torch.randint(LABELS, (size.batch,), generator=draw)
        mask = torch.ones_like(ids)
        return {"input_ids": ids.to(self.on), "attention_mask": mask.to(self.on), "labels": labels.to(self.on)}

    def check_lengths(self) -> None:
        """Raises :class:`GateError` for a length beyond the positions of the model, before anything is measured."""
        config = None if self.model is None else _config(self.model).get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or POSITIONS
        for size in self.sizes:
            if size.length > positions:
                raise GateError(f"--sizes has {size.batch}x{size.length}, but the model has {positions} positions; give less")


def random_classifier(shape: Shape) -> PreTrainedModel:
    """A classifier as BERT is, with random weights; the same each time."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.width, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, intermediate_size=4 * shape.width, max_position_embeddings=POSITIONS,
            hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=DROPOUT,
        )
    )  # fmt: skip


def random_generator(shape: Shape) -> PreTrainedModel:
    """A language model as GPT-2 is, with random weights; the same each time."""
    torch.manual_seed(0)
    end = shape.vocabulary - 1
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocabulary, n_embd=shape.width, n_layer=shape.layers, n_head=shape.heads,
            n_positions=2 * POSITIONS, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        )
    )  # fmt: skip


def _config(folder: str) -> PreTrainedConfig:
    """Raises :class:`GateError` for a folder without the configuration of a model."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise GateError(f"--model {folder!r} holds no model: {first_line(error)}") from error


def _loaded(folder: str, *, generates: bool) -> PreTrainedModel:
    """Raises :class:`GateError` for a folder without a model of this kind."""
    kind = AutoModelForCausalLM if generates else AutoModelForSequenceClassification
    make = partial(kind.from_pretrained, folder, local_files_only=True)
    try:
        model = make() if generates else make(num_labels=LABELS, ignore_mismatched_sizes=True)
    except (OSError, ValueError, KeyError) as error:
        raise GateError(f"--model {folder!r} holds no model for text classification: {first_line(error)}") from error
    if model.config.get_text_config().pad_token_id is None:
        model.config.get_text_config().pad_token_id = 0
    return model


@contextmanager
def threads_of(setting: Setting) -> Iterator[None]:
    """So many threads in a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
