import functools

import pytest

from tests.training.scoring.subjects import KINDS, make_scores


@pytest.fixture(scope="session")
def scores_of():
    """Scores of a kind of model. They and their subject serve all tests, which leave them as they were."""
    return functools.cache(make_scores)


@pytest.fixture(params=KINDS)
def scores(request, scores_of):
    return scores_of(request.param)


@pytest.fixture
def subject(scores):
    return scores.subject
