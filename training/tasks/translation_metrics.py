"""BLEU and chrF by sacrebleu as metrics over a whole split, and the paired bootstrap between systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from torch import Tensor
from torchmetrics import Metric

from gates.errors import GateError
from training.config.data import BleuTokenizer

Scorer = Literal["bleu", "chrf"]
SCORERS: tuple[Scorer, ...] = ("bleu", "chrf")
END = 0
"""The byte that ends a text; UTF-8 has it in no other character."""


def make_scorer(name: Scorer, tokenize: BleuTokenizer = "13a", **more: Any) -> BLEU | CHRF:
    """sacrebleu's BLEU or chrF; chrF is of characters and has no tokens.

    Raises:
        GateError: for an unknown tokenizer, or one that needs a package which is not installed.
    """
    if tokenize not in get_args(BleuTokenizer):
        raise GateError(f"BLEU has no tokenizer {tokenize!r} here; expected one of {', '.join(get_args(BleuTokenizer))}")
    if name == "chrf":
        return CHRF(**more)
    try:
        return BLEU(tokenize=tokenize, **more)
    except (ImportError, RuntimeError) as error:
        raise GateError(f"BLEU's tokenizer {tokenize!r} needs a package: pip install 'sacrebleu[{tokenize[:2]}]'") from error


def corpus_score(
    name: Scorer, hypotheses: Sequence[str], references: Sequence[str], *, tokenize: BleuTokenizer = "13a"
) -> float:
    """BLEU or chrF of a corpus in points, 0 to 100, with sacrebleu's default settings (one reference)."""
    return float(make_scorer(name, tokenize).corpus_score(list(hypotheses), [list(references)]).score)


def bleu_counts(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: BleuTokenizer = "13a") -> NDArray[np.int64]:
    """What BLEU adds up over a corpus, for every text ``[texts, 10]``: its length and its reference's in tokens, its matching
    and its total n-grams of lengths 1 to 4."""
    scorer = make_scorer("bleu", tokenize, effective_order=True)  # which of a single text changes the score and no count
    found = [scorer.sentence_score(text, [reference]) for text, reference in zip(hypotheses, references, strict=True)]
    return np.array([(score.sys_len, score.ref_len, *score.counts, *score.totals) for score in found], dtype=np.int64)


def bleu_of_counts(sums: NDArray[Any]) -> NDArray[np.float64]:
    """Corpus BLEU in points from sums of :func:`bleu_counts`, as sacrebleu has it by default (exponential smoothing), for
    many corpora at once.

    Args:
        sums: ``[..., 10]``.

    Returns:
        ``[...]``.
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
    """sacrebleu's signature of each metric: all settings and its version, to be stated with every score."""
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
    """Paired bootstrap resampling (Koehn 2004) of the first system against each other, as sacrebleu does it.

    Args:
        systems: translations of the same sentences by name; the first is the baseline.
        references: of these sentences.
        samples: resampled test sets.
        tokenize: of BLEU.

    Returns:
        One row per system: ``system``, and for BLEU and chrF the score, the mean and half the width of the 95 % interval
        over the samples, and ``p`` of the difference to the baseline (None for the baseline itself).

    Raises:
        GateError: if a system has another number of translations than there are references.
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

    Args:
        scorer: ``bleu`` or ``chrf``.
        tokenize: of BLEU.
        kwargs: passed to :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    higher_is_better = True
    rows: list[Tensor]
    hypotheses: list[Tensor]
    references: list[Tensor]

    def __init__(self, scorer: Scorer, tokenize: BleuTokenizer = "13a", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scorer: Scorer = scorer
        self.tokenize: BleuTokenizer = tokenize
        for name in ("rows", "hypotheses", "references"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, rows: Tensor, hypotheses: Sequence[str], references: Sequence[str]) -> None:
        """Add translations.

        Args:
            rows: position of each sentence in its split, ``[batch]``.
            hypotheses, references: one text each.
        """
        self.rows.append(rows)
        self.hypotheses.append(_bytes(hypotheses, rows.device))
        self.references.append(_bytes(references, rows.device))

    def compute(self) -> Tensor:
        hypotheses, references = self._texts(self.hypotheses), self._texts(self.references)
        return torch.tensor(corpus_score(self.scorer, hypotheses, references, tokenize=self.tokenize) if references else 0.0)

    def translations(self) -> list[str]:
        """The hypotheses of all processes in the order of the split."""
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
