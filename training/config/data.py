"""The data of a run: the options ``--data NAME`` and ``--data.OPTION``.

One class for each kind of data says what its reader is told. The readers are in :mod:`training.data`; they are imported when
the data are opened. Data of your own are a subclass of one of these with a reader of its own.
"""

from __future__ import annotations

from training.config.classification import (
    ClassificationOptions,
    ClassMetric,
    KnownTruth,
    RatingMetric,
    Ratings,
    SentenceFiles,
    SentenceOptions,
    Synthetic,
    Text,
)
from training.config.data_base import Data, DataOptions
from training.config.documents import DocumentOptions, Documents, SyntheticDocuments
from training.config.glue import Glue
from training.config.images import Images
from training.config.tags import Tags
from training.config.translation import (
    BleuTokenizer,
    ParallelText,
    SentenceLoss,
    Subwords,
    SyntheticTranslation,
    TranslationOptions,
)

__all__ = [
    "KINDS",
    "TOKENIZER_FILES",
    "BleuTokenizer",
    "ClassMetric",
    "ClassificationOptions",
    "Data",
    "DataOptions",
    "DocumentOptions",
    "Documents",
    "Glue",
    "Images",
    "KnownTruth",
    "ParallelText",
    "RatingMetric",
    "Ratings",
    "SentenceFiles",
    "SentenceLoss",
    "SentenceOptions",
    "Subwords",
    "Synthetic",
    "SyntheticDocuments",
    "SyntheticTranslation",
    "Tags",
    "Text",
    "TranslationOptions",
]

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model",
    "sentencepiece.model", "source.spm",
)  # fmt: skip
"""One of which a folder with a tokenizer has."""
KINDS = {
    kind.__name__: kind
    for kind in (
        Text,
        Ratings,
        Glue,
        Tags,
        Images,
        ParallelText,
        Documents,
        Synthetic,
        SyntheticTranslation,
        SyntheticDocuments,
        KnownTruth,
    )
}
"""The kinds of data that come with the product, by name."""
