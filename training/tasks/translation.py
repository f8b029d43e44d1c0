"""Translation: the model, the loss of every sentence, and the metrics of translations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from gates.errors import GateError
from training.config import Source
from training.config.text import BleuTokenizer, SentenceLoss
from training.tasks.base import IGNORED, Batch, Task, encode_targets, shifted_right, tokens_of
from training.tasks.encoder_decoder import (
    check_encoder_decoder,
    check_positions,
    check_vocabulary,
    load_encoder_decoder,
    positions,
)
from training.tasks.loading import from_config

# How an encoder-decoder translates: greedy and beam search, and what its translations begin with.


@dataclass(frozen=True)
class Decoding:
    """How sentences are translated.

    Args:
        beams: The number of translations that beam search keeps at a time.
        length_penalty: The power of the length by which a beam's score is divided; above 0 it favours longer translations.
        max_length: The longest translation in tokens. A translation is cut there, at the model's last position, and at twice
            the length of its source plus 10.
        forced_first: The token of the target language of a multilingual model, see :func:`begin_with_`.
    """

    beams: int = 4
    length_penalty: float = 1.0
    max_length: int = 128
    forced_first: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.length_penalty):
            raise GateError(f"length_penalty is {self.length_penalty}; expected a finite number, such as 1")


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    decoding: Decoding,
    *,
    beams: int,
) -> Tensor:
    """Return token ids ``[batch, target]`` of translations, padded on the right, beginning with the decoder's start token."""
    searching: dict[str, Any] = {"length_penalty": decoding.length_penalty, "early_stopping": False} if beams > 1 else {}
    longest = min(decoding.max_length, 2 * input_ids.shape[1] + 10)
    if (limit := positions(model.config, "decoder")) is not None:
        longest = min(longest, limit)
    with torch.no_grad():
        ids: Tensor = model.generate(  # type: ignore[operator]
            input_ids=input_ids,
            attention_mask=attention_mask,
            num_beams=beams,
            do_sample=False,
            use_cache=True,
            max_length=None,
            min_length=0,
            min_new_tokens=None,
            max_new_tokens=longest,
            stopping_criteria=[OwnLength(2 * attention_mask.sum(-1) + 10)],
            **searching,
        )
    return ids


class OwnLength(StoppingCriteria):
    """Ends every translation at a length of its own, so that one that does not end by itself does not depend on the others.

    Args:
        lengths: The lengths ``[batch]``, in new tokens.
    """

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return which translations end here, ``[batch x beams]``."""
        beams = input_ids.shape[0] // len(self.lengths)
        return input_ids.shape[1] > self.lengths.repeat_interleave(beams)  # one token is the start


def decode(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> list[str]:
    """Return the texts of generated ids, on one line each."""
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [" ".join(text.split()) for text in texts]


def begin_with_(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, language: int) -> None:
    """Set the model to translate into a language: its translations begin as the targets that it is trained on do.

    Most models see the language's token first in every target. The first mBART sees it as the decoder's start, since its
    targets end in it and are shifted around.
    """
    assert model.generation_config is not None
    targets = torch.tensor(encode_targets(tokenizer, ["a"]))
    starts = int(shifted_right(model, targets)[0, 0]) == language
    model.generation_config.forced_bos_token_id = None if starts else language
    if starts:
        model.generation_config.decoder_start_token_id = language


# BLEU and chrF by sacrebleu as metrics over a whole split, and the paired bootstrap between systems.

Scorer = Literal["bleu", "chrf"]
SCORERS: tuple[Scorer, ...] = ("bleu", "chrf")
END = 0
"""The byte that ends a text; UTF-8 has it in no other character."""


def make_scorer(name: Scorer, tokenize: BleuTokenizer = "13a", **more: Any) -> BLEU | CHRF:
    """Return sacrebleu's BLEU or chrF; chrF is of characters and has no tokens."""
    if name == "chrf":
        return CHRF(**more)
    try:
        return BLEU(tokenize=tokenize, **more)
    except (ImportError, RuntimeError) as error:
        raise GateError(f"BLEU's tokenizer {tokenize!r} needs a package: pip install 'sacrebleu[{tokenize[:2]}]'") from error


def corpus_score(
    name: Scorer, hypotheses: Sequence[str], references: Sequence[str], *, tokenize: BleuTokenizer = "13a"
) -> float:
    """Return BLEU or chrF of a corpus in points, 0 to 100, with sacrebleu's default settings (one reference)."""
    return float(make_scorer(name, tokenize).corpus_score(list(hypotheses), [list(references)]).score)


def bleu_counts(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: BleuTokenizer = "13a") -> NDArray[np.int64]:
    """Return the counts of every text that BLEU adds up over a corpus, ``[texts, 10]``.

    They are the lengths of text and reference in tokens, then the matching and the total n-grams of lengths 1 to 4.
    """
    scorer = make_scorer("bleu", tokenize, effective_order=True)  # it changes the score of a single text and no count
    found = [scorer.sentence_score(text, [reference]) for text, reference in zip(hypotheses, references, strict=True)]
    return np.array([(score.sys_len, score.ref_len, *score.counts, *score.totals) for score in found], dtype=np.int64)


def bleu_of_counts(sums: NDArray[Any]) -> NDArray[np.float64]:
    """Return corpus BLEU ``[...]`` in points from sums of :func:`bleu_counts` ``[..., 10]``, for many corpora at once.

    It is sacrebleu's default, with exponential smoothing.
    """
    sums = np.asarray(sums, dtype=np.float64)
    length, reference = sums[..., 0], sums[..., 1]
    matching, total = sums[..., 2:6], sums[..., 6:10]
    # The k-th length without a match counts 1 / 2^k matches (Chen and Cherry 2014, method 3).
    smoothed = np.where(matching > 0, matching, 0.5 ** np.cumsum(matching == 0, axis=-1))
    defined = (matching.sum(-1) > 0) & (total.min(-1) > 0)
    precisions = np.log(smoothed / np.where(total > 0, total, 1.0)).mean(-1)
    brevity = np.minimum(0.0, 1 - reference / np.where(length > 0, length, 1.0))
    return np.where(defined, 100 * np.exp(precisions + brevity), 0.0)


def signatures(tokenize: BleuTokenizer = "13a") -> dict[str, str]:
    """Return sacrebleu's signature of each metric: all settings and its version, to be stated with every score."""
    found: dict[str, str] = {}
    for name in SCORERS:
        metric = make_scorer(name, tokenize)
        metric.corpus_score(["a"], [["a"]])  # the number of references becomes known here
        found[name] = str(metric.get_signature())
    return found


def paired_bootstrap(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    samples: int = 1000,
    tokenize: BleuTokenizer = "13a",
) -> list[dict[str, Any]]:
    """Compare the first system with each other one by paired bootstrap resampling (Koehn 2004), as sacrebleu does it.

    Returns:
        One row per system, with ``system``. For BLEU and chrF it has the score, and the mean and half the width of the 95 %
        interval over the samples. ``p`` belongs to the difference to the baseline, and is None for the baseline itself.
    """
    for name, hypotheses in systems.items():
        if len(hypotheses) != len(references):
            raise GateError(
                f"the system {name!r} has {len(hypotheses)} translations for {len(references)} references; "
                "translate the same file"
            )
    test = PairedTest(
        [(name, list(hypotheses)) for name, hypotheses in systems.items()],
        {name: make_scorer(name, tokenize, references=[list(references)]) for name in SCORERS},
        references=None,
        test_type="bs",
        n_samples=samples,
    )
    _, found = test()
    rows = []
    for index, system in enumerate(found["System"]):
        row: dict[str, Any] = {"system": system}
        for name, title in (("bleu", "BLEU"), ("chrf", "chrF2")):
            baseline: Any = found[title][0]
            result: Any = found[title][index]
            level = index > 0 and result.score == baseline.score  # sacrebleu's p is its smallest where no resample differs
            p = 1.0 if level else result.p_value
            row |= {name: result.score, f"{name}_mean": result.mean, f"{name}_interval": result.ci, f"{name}_p": p}
        rows.append(row)
    return rows


class TextScore(Metric):
    """Corpus BLEU or chrF, the same to the last digit as sacrebleu on the whole split, in any batching and under DDP.

    Texts are kept as UTF-8 in one tensor, so that torchmetrics can gather them from all processes.
    """

    full_state_update = False
    higher_is_better = True
    rows: list[Tensor]
    hypotheses: list[Tensor]
    references: list[Tensor]

    def __init__(self, scorer: Scorer, tokenize: BleuTokenizer = "13a") -> None:
        super().__init__()
        self.scorer: Scorer = scorer
        self.tokenize: BleuTokenizer = tokenize
        for name in ("rows", "hypotheses", "references"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, rows: Tensor, hypotheses: Sequence[str], references: Sequence[str]) -> None:
        """Add translations."""
        self.rows.append(rows)
        self.hypotheses.append(_bytes(hypotheses, rows.device))
        self.references.append(_bytes(references, rows.device))

    def compute(self) -> Tensor:
        hypotheses, references = self._texts(self.hypotheses), self._texts(self.references)
        return torch.tensor(corpus_score(self.scorer, hypotheses, references, tokenize=self.tokenize) if references else 0.0)

    def translations(self) -> list[str]:
        """Return the hypotheses of all processes in the order of the split."""
        with self.sync_context(should_sync=self._to_sync, should_unsync=True):
            return self._texts(self.hypotheses)

    def _texts(self, state: list[Tensor] | Tensor) -> list[str]:
        if len(state) == 0:
            return []
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        joined = torch.cat(state) if isinstance(state, list) else state
        texts = bytes(joined.tolist()).split(bytes([END]))[:-1]
        return [texts[position].decode("utf-8") for position in rows.argsort().tolist()]


def _bytes(texts: Sequence[str], device: torch.device) -> Tensor:
    joined = b"".join(text.replace("\0", " ").encode("utf-8") + bytes([END]) for text in texts)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).to(device)


SCRATCH = {
    "model_type": "marian", "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "activation_function": "relu",
    "scale_embedding": True, "init_std": 0.02,
}  # fmt: skip
"""The Transformer of Vaswani et al. 2017 in the shape of Marian; ``model.from_scratch`` overrides any of it. Its weights start
small: with ``d_model ** -0.5``, 6 layers that normalise after every residual need long to leave the unigram loss."""


@dataclass
class Translation(Task):
    """Translation with an ``AutoModelForSeq2SeqLM``.

    Args:
        label_smoothing: The share of the target probability that is spread over the vocabulary, while training only: losses
            for evaluation and for scores of heads are plain.
        sentence_loss: The loss of a sentence: the ``mean`` over its target tokens, or their ``sum``. It decides on the weight
            of a long sentence in HIS; training minimises the mean over all tokens of a batch either way.
        beam_splits: The splits (``select``, ``test``) that are translated by beam search too, next to greedy decoding.
    """

    tokenizer: PreTrainedTokenizerBase
    label_smoothing: float = 0.1
    sentence_loss: SentenceLoss = "mean"
    bleu_tokenize: BleuTokenizer = "13a"
    decoding: Decoding = field(default_factory=Decoding)
    beam_splits: tuple[str, ...] = ("test",)
    main_metric: str = field(default="bleu", init=False)

    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Load a pretrained encoder-decoder, or make a new Transformer whose sizes default to :data:`SCRATCH`; see
        :meth:`Task.build`."""
        if source.backbone is None:
            model, name = self._new(source.from_scratch or {}, tokenizer), "the new model"
            mend = ", or raise max_position_embeddings in --model.from_scratch"
        else:
            model, name, mend = load_encoder_decoder(source), repr(source.backbone), ""
        check_positions(model.config, name, self.decoding.max_length, mend=mend)
        check_vocabulary(model, tokenizer, name)
        if self.decoding.forced_first is not None:
            begin_with_(model, tokenizer, self.decoding.forced_first)
        return model

    def _new(self, fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        # A model that starts with a given model_type takes that type's own defaults.
        sizes = SCRATCH if fields.get("model_type", "marian") == "marian" else {}
        tokens = {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": pad, "forced_eos_token_id": None}
        positions = {"max_position_embeddings": self.decoding.max_length + 1} if sizes else {}
        ours = {**tokens, **positions, "vocab_size": len(tokenizer)}
        given = {**sizes, **fields}
        own = ours | given
        model = from_config(AutoModelForSeq2SeqLM, given, ours)
        check_encoder_decoder(model.config, str(own["model_type"]))
        model.generation_config = GenerationConfig(
            pad_token_id=pad,
            eos_token_id=end,
            decoder_start_token_id=own["decoder_start_token_id"],
            num_beams=self.decoding.beams,
            length_penalty=self.decoding.length_penalty,
            max_length=self.decoding.max_length,
            bad_words_ids=[[pad]],
        )
        return model

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of every sentence ``[batch]``, float32, by ``sentence_loss``, and the logits ``[batch,
        target, vocabulary]``. Labels are smoothed (Szegedy et al. 2016) if the model is in training mode."""
        labels = batch["labels"]
        inputs = self.model_inputs(model, batch)
        logits = model(**inputs, use_cache=False).logits.float()
        per_token = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            reduction="none",
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing if model.training else 0.0,
        ).unflatten(0, labels.shape)
        total = per_token.sum(-1)
        return (total if self.sentence_loss == "sum" else total / tokens_of(labels)), logits

    def batch_loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the mean over all target tokens of the batch, for both kinds of a sentence's loss."""
        tokens = tokens_of(batch["labels"])
        total = losses if self.sentence_loss == "sum" else losses * tokens
        return total.sum() / tokens.sum()

    def batch_weight(self, batch: Batch) -> float:
        """Return the number of target tokens, so that every token counts alike in all processes."""
        return float(tokens_of(batch["labels"]).sum())

    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Return the source, its mask, and the target shifted by one: the decoder sees the tokens before the predicted one."""
        return {
            "input_ids": batch["input_ids"],
            "attention_mask": batch["attention_mask"],
            "decoder_input_ids": shifted_right(model, batch["labels"]),
        }

    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the source tokens for the encoder, the target tokens for the decoder and across; padding does not count."""
        target = batch["labels"] != IGNORED
        return {"encoder": batch["attention_mask"], "decoder": target, "cross": target}

    def metrics(self, split: str) -> MetricCollection:
        """Return BLEU and chrF of greedy decoding, and on ``beam_splits`` ``beam_bleu`` and ``beam_chrf`` of beam search."""
        searches = ("", "beam_") if split in self.beam_splits else ("",)
        names: dict[str, Any] = {
            f"{search}{name}": TextScore(name, self.bleu_tokenize) for search in searches for name in SCORERS
        }
        return MetricCollection(names, compute_groups=False)

    def metric_types(self) -> dict[str, dict[str, Any]]:
        bleu = {"type": "sacrebleu", "args": {"tokenize": self.bleu_tokenize}}
        return {"bleu": bleu, "beam_bleu": bleu, "chrf": {"type": "chrf"}, "beam_chrf": {"type": "chrf"}}

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        """Translate the batch's sources greedily, and by beam search if the metrics have it."""
        for search in ("", "beam_"):
            if f"{search}bleu" in metrics:
                texts = self.translate(model, batch, beams=self.decoding.beams if search else 1)
                for name in SCORERS:
                    metrics[f"{search}{name}"].update(batch["row"], texts, batch["reference"])

    def outputs(self, metrics: MetricCollection) -> dict[str, list[str]]:
        """Return the translations, as ``greedy`` and ``beam``."""
        searches = {"greedy": "bleu", "beam": "beam_bleu"}
        return {
            search: metrics[name].translations()  # type: ignore[operator]
            for search, name in searches.items()
            if name in metrics
        }

    def translate(self, model: PreTrainedModel, batch: Batch, *, beams: int) -> list[str]:
        """Return translations of a batch's sources, with the cache, by greedy decoding (1 beam) or beam search."""
        ids = generate(model, batch["input_ids"], batch["attention_mask"], self.decoding, beams=beams)
        return decode(self.tokenizer, ids)
