"""Models, batches and effort of a benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from training.latency import Effort, Spread, Times, Work, alternate, stopwatch_by

KINDS = ("encoder", "decoder")
DTYPES = ("float32", "bfloat16")
POSITIONS = 512
DEFAULT_SIZES = {"cpu": "1x128,8x128,32x64", "cuda": "1x128,8x64,32x128,32x512", "quick": "2x16"}
Row = dict[str, Any]


class Size(NamedTuple):
    """The size of a batch, in examples and tokens."""

    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}"


@dataclass(frozen=True)
class Shape:
    """The shape of a Transformer with random weights. A feed-forward block is four times as wide as the model."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 30522


SHAPES = {"tiny": Shape(2, 4, 64, 1000), "small": Shape(6, 12, 384), "base": Shape(12, 12, 768)}
"""``small`` is the shape of MiniLM-L6, ``base`` that of BERT-base."""


def random_classifier(shape: Shape) -> PreTrainedModel:
    """Build a BERT classifier with random weights, which are the same each time."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.width, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, intermediate_size=4 * shape.width, max_position_embeddings=POSITIONS,
        )
    )  # fmt: skip


def random_decoder(shape: Shape, *, heads_per_key: int = 4, kept: int | None = None) -> PreTrainedModel:
    """Build a Llama with a small vocabulary, so that the output layer is not most of the work.

    With ``kept``, every layer has this number of heads of the same size.
    """
    torch.manual_seed(0)
    heads = kept or shape.heads
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=min(shape.vocabulary, 4096), hidden_size=shape.width, num_hidden_layers=shape.layers,
            num_attention_heads=heads, num_key_value_heads=max(1, heads // heads_per_key), head_dim=shape.width // shape.heads,
            intermediate_size=8 * shape.width // 3, max_position_embeddings=POSITIONS,  # of three matrices instead of two
        )
    )  # fmt: skip


def random_generator(shape: Shape) -> PreTrainedModel:
    """Build a GPT-2, whose last token ends a text."""
    torch.manual_seed(0)
    end = shape.vocabulary - 1
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocabulary, n_embd=shape.width, n_layer=shape.layers, n_head=shape.heads,
            n_positions=2 * POSITIONS, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The models, batches and effort of a benchmark; see the options of ``python -m tools.benchmark``."""

    shape: str
    device: str
    threads: int
    sizes: tuple[Size, ...]
    processor_time: bool = False
    quick: bool = False

    @property
    def on(self) -> torch.device:
        return torch.device(self.device)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The precisions of passes: both on a GPU."""
        return DTYPES if self.device == "cuda" else DTYPES[:1]

    @property
    def memory_turns(self) -> int:
        """The number of processes for each peak of memory. The tensors on a GPU take the same each time."""
        return 1 if self.quick or self.device == "cuda" else 3

    @property
    def compiled_size(self) -> Size:
        """The one batch for compiled models, since compiling takes minutes: the smallest on a CPU, the largest on a GPU."""
        return (min if self.device == "cpu" else max)(self.sizes, key=lambda size: size.batch * size.length)

    def trained(self, kind: str) -> PreTrainedModel:
        """Build the model of one of :data:`KINDS`, which is trained and scored."""
        return self.build(random_decoder if kind == "decoder" else random_classifier)

    def build(self, make: Callable[[Shape], PreTrainedModel]) -> PreTrainedModel:
        with self.on:  # random numbers of a GPU are drawn there, which takes a tenth of the time
            return make(SHAPES[self.shape])

    def rounded(self, dtype: str, work: Work) -> Work:
        """Return the same work with products in bfloat16; for float32 nothing changes."""

        def run() -> object:
            with torch.autocast(self.device, torch.bfloat16, enabled=dtype == "bfloat16"):
                return work()

        return run

    def batch(self, size: Size, vocabulary: int, *, kind: str = "encoder") -> dict[str, Tensor]:
        """Draw tokens ``[batch, length]``, the same each time. Labels are classes ``[batch]``, or the tokens for a decoder."""
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(5, vocabulary, (size.batch, size.length), generator=draw)
        labels = ids.clone() if kind == "decoder" else torch.randint(2, (size.batch,), generator=draw)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        return {name: tensor.to(self.on) for name, tensor in batch.items()}

    def batch_for(self, model: PreTrainedModel, size: Size, kind: str = "encoder") -> dict[str, Tensor]:
        return self.batch(size, model.config.vocab_size, kind=kind)

    def times(
        self, what: str, variants: Mapping[str, Work], *, clock: Callable[[], float] | None = None, **effort: Any
    ) -> Times:
        """Time variants in turn. ``effort`` names fields of :class:`Effort` that differ from the default.

        On a GPU, two seconds of each measurement keep its parts below three minutes.
        """
        clock = clock or (time.process_time if self.processor_time else None)
        usual = Effort(seconds=2.0) if self.device == "cuda" else Effort()
        chosen = Effort(turns=5, warm_up=1, seconds=1.0) if self.quick else replace(usual, **effort)
        return alternate(what, variants, self.on, chosen, stopwatch=None if clock is None else stopwatch_by(clock))


def cell(spread: Spread | None) -> dict[str, float] | None:
    """Return a spread as a record keeps it."""
    return None if spread is None else asdict(spread)


def columns(times: Times, *names: str, **ratios: tuple[str, str]) -> Row:
    """Return the milliseconds of variants and the ratios of pairs as columns, but for variants that were not timed."""
    row = {f"{name}_ms": cell(times.milliseconds(name)) for name in names if name in times.of}
    return row | {name: cell(times.ratio(*pair)) for name, pair in ratios.items() if {*pair} <= {*times.of}}
