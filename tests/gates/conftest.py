"""What the library's tests share."""

import gc

import pytest


@pytest.fixture(scope="module")
def frozen_imports():
    """Trainers and compilers collect garbage after every run. That takes longer than a tiny run where all that PyTorch and
    Transformers have imported is gone through each time, so here it is left out."""
    gc.freeze()
    yield
    gc.unfreeze()
