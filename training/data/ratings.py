"""Sentences with a number each, such as how alike two sentences are."""

from __future__ import annotations

from collections.abc import Mapping

from training.config.data import Ratings
from training.data.labels import check_numbers
from training.data.text import SentenceReader
from training.tasks import Regression


class RatingsData(SentenceReader):
    """Single or paired sentences with a number each.

    Args:
        options: what the data are told.
    """

    options: Ratings

    def numbers_of(self, labels: Mapping[str, list[str]], stated_labels: list[str] | None) -> dict[str, float]:
        """The numbers that the labels are."""
        return check_numbers(labels)

    @property
    def task(self) -> Regression:
        return Regression(self.options.metric)
