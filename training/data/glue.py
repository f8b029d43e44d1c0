"""The tasks of GLUE as sentences with a class or a number each."""

from __future__ import annotations

from training.config.data import Glue, Ratings
from training.data.ratings import RatingsData
from training.data.text import SentenceReader, TextData


def glue_data(options: Glue) -> SentenceReader:
    """The data module of a task."""
    sentences = options.sentences
    return RatingsData(sentences) if isinstance(sentences, Ratings) else TextData(sentences)
