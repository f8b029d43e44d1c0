"""What the library's tests share."""

import gc

import pytest
from torch import distributed


@pytest.fixture(scope="module")
def frozen_imports():
    """Trainers and compilers collect garbage after every run. That takes longer than a tiny run where all that PyTorch and
    Transformers have imported is gone through each time, so here it is left out."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def one_process():
    """A job of PyTorch with one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
