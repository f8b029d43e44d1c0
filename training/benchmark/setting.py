"""What a benchmark is run with: the model, the sizes of its batches, the device, and how long each thing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError
from training.benchmark.alternate import Effort
from training.benchmark.models import (
    LABELS,
    POSITIONS,
    SHAPES,
    config_in,
    model_in,
    random_classifier,
    random_decoder,
    random_generator,
)
from training.benchmark.size import Size

DEFAULT_SIZES = {"cpu": ("1x128", "8x128", "32x64"), "cuda": ("1x128", "32x128", "32x512"), "quick": ("2x16",)}
ENCODER, DECODER, GIVEN = "encoder", "decoder", "as given"
MEMORY_TURNS = {"cpu": 3, "cuda": 1}
"""Processes for each peak of memory. What the tensors on a GPU take is the same each time."""


@dataclass(frozen=True)
class Setting:
    """What everything is measured with.

    Args:
        shape: name in :data:`training.benchmark.models.SHAPES`; without effect where a model is given.
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
    def memory_turns(self) -> int:
        """Processes for each peak of memory."""
        return 1 if self.quick else MEMORY_TURNS[self.device]

    @property
    def compiled_size(self) -> Size:
        """The batch that compiled models are measured with, since compiling takes minutes: the smallest on a CPU, where little
        else is to be gained, and the largest on a GPU."""
        return (min if self.device == "cpu" else max)(self.sizes, key=lambda size: size.batch * size.length)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the models that are trained and scored: a random classifier and a random language model, or the one given."""
        return (ENCODER, DECODER) if self.model is None else (GIVEN,)

    def trained(self, kind: str) -> PreTrainedModel:
        """The model of one of :attr:`kinds` that is trained and scored, on the device."""
        if self.model is not None:
            model = model_in(self.model, generates=False)
        else:
            model = (random_decoder if kind == DECODER else random_classifier)(SHAPES[self.shape])
        return model.to(self.on)  # type: ignore[arg-type]

    def classifier(self) -> PreTrainedModel:
        """The classifier among them, or the one given."""
        return self.trained(self.kinds[0])

    def generator(self) -> PreTrainedModel | None:
        """The model that writes text, on the device; None for a model that does not."""
        if self.model is None:
            return random_generator(SHAPES[self.shape]).to(self.on)  # type: ignore[arg-type]
        names = getattr(config_in(self.model), "architectures", None) or []
        if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
            return None
        return model_in(self.model, generates=True).to(self.on)  # type: ignore[arg-type]

    def batch(self, size: Size, vocabulary: int, *, kind: str = ENCODER) -> dict[str, Tensor]:
        """Random tokens ``[batch, length]`` without padding, the same each time, and labels: classes ``[batch]``, or the tokens
        themselves for a decoder."""
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(5, vocabulary, (size.batch, size.length), generator=draw)
        labels = ids.clone() if kind == DECODER else torch.randint(LABELS, (size.batch,), generator=draw)
        mask = torch.ones_like(ids)
        return {"input_ids": ids.to(self.on), "attention_mask": mask.to(self.on), "labels": labels.to(self.on)}

    def batch_for(self, model: PreTrainedModel, size: Size, kind: str) -> dict[str, Tensor]:
        """:meth:`batch` in a model's own vocabulary."""
        return self.batch(size, model.config.get_text_config().vocab_size, kind=kind)

    @property
    def positions(self) -> int:
        """Of the model, as many as a text may have tokens."""
        config = None if self.model is None else config_in(self.model).get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or POSITIONS)

    def check_lengths(self) -> None:
        """Raises :class:`GateError` for a length beyond the positions of the model, before anything is measured."""
        positions = self.positions
        for size in self.sizes:
            if size.length > positions:
                raise GateError(f"--sizes has {size.batch}x{size.length}, but the model has {positions} positions; give less")


@contextmanager
def threads_of(setting: Setting) -> Iterator[None]:
    """So many threads in a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
