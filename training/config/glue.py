"""The tasks of GLUE (Wang et al. 2019), each with its columns and the metric that it is known by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, get_args

from gates.errors import GateError
from training.config.classification import Ratings, SentenceOptions, Text
from training.config.data_base import check_share
from training.config.paths import HubName

GlueTask = Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]
COLUMNS = {
    "cola": ("sentence",), "sst2": ("sentence",), "mrpc": ("sentence1", "sentence2"), "qqp": ("question1", "question2"),
    "stsb": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis"), "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"), "wnli": ("sentence1", "sentence2"),
}  # fmt: skip
METRICS: Mapping[str, Mapping[str, str]] = {
    "cola": {"metric": "matthews"},
    "mrpc": {"metric": "binary_f1", "positive": "equivalent"},
    "qqp": {"metric": "binary_f1", "positive": "duplicate"},
    "stsb": {"metric": "pearson"},
}
"""Of those that are not known by accuracy."""


@dataclass(frozen=True)
class Glue(SentenceOptions):
    """A task of the GLUE benchmark. The labels of its test split are hidden, so results are on its validation split, and
    choices are made on a part of the training examples.

    Args:
        subset: name of the task: ``cola``, ``sst2``, ``mrpc``, ``qqp``, ``stsb``, ``mnli``, ``qnli``, ``rte`` or ``wnli``.
        metric: by which choices are made (default: the one that the task is known by).
        mismatched: with ``mnli``, whether results are on texts of other kinds than those trained on; those on the others stand
            beside them, as test_matched_accuracy or test_mismatched_accuracy.
        dataset: hub name of GLUE, or a folder that holds it.
        select_fraction: share of the training examples set aside for selection.
        tokenizer: hub name or folder; by default the model's.
    """

    reader: ClassVar[str] = "training.data.glue:glue_data"

    subset: GlueTask = "sst2"
    metric: Literal["accuracy", "f1", "binary_f1", "matthews", "pearson", "spearman"] | None = None
    mismatched: bool = False
    dataset: HubName = field(default=HubName("nyu-mll/glue"))
    select_fraction: float = 0.1
    tokenizer: HubName | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.select_fraction)
        if self.subset not in get_args(GlueTask):
            raise GateError(f"subset is {self.subset!r}; expected one of {', '.join(get_args(GlueTask))}")
        if self.mismatched and self.subset != "mnli":
            raise GateError(f"mismatched is of mnli alone, and subset is {self.subset!r}; leave it out")
        rates = self.subset == "stsb"
        if self.metric is not None and (self.metric in ("pearson", "spearman")) != rates:
            expected = "pearson or spearman" if rates else "accuracy, f1, binary_f1 or matthews"
            raise GateError(f"metric is {self.metric!r}; expected {expected} for {self.subset}")

    @property
    def sentences(self) -> Text | Ratings:
        """The same as options of sentences with a class, or with a number."""
        told: dict[str, Any] = {name: value for name, value in asdict(self).items() if name not in ("metric", "mismatched")}
        told |= zip(("text_column", "pair_column"), COLUMNS[self.subset], strict=False)
        told |= METRICS.get(self.subset, {})
        if self.metric is not None:
            told["metric"] = self.metric
            if self.metric != "binary_f1":
                told.pop("positive", None)
        told["test_split"] = "validation"
        if self.subset == "mnli":
            judged, beside = ("mismatched", "matched") if self.mismatched else ("matched", "mismatched")
            told |= {"test_split": f"validation_{judged}", "more_tests": {beside: f"validation_{beside}"}}
        kind = Ratings if self.subset == "stsb" else Text
        return kind(**told, label_column="label")
