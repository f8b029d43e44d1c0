import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.config.data import Synthetic
from training.data.base import RunBatches, SplitBatches, grouped_batches
from training.data.synthetic import SyntheticData

LENGTHS = np.random.default_rng(0).integers(3, 60, 997).tolist()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(1, 40), st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_an_epoch_holds_every_example_at_most_once_in_full_batches(lengths, size, seed):
    batches = grouped_batches(lengths, size, seed=seed)
    flat = [index for batch in batches for index in batch]
    size = min(size, len(lengths))
    assert len(set(flat)) == len(flat) == len(lengths) // size * size
    assert {len(batch) for batch in batches} == {size}


def test_grouping_saves_most_of_the_padding():
    def padding(batches):
        return sum(max(LENGTHS[i] for i in batch) * len(batch) - sum(LENGTHS[i] for i in batch) for batch in batches)

    order = np.random.default_rng(1).permutation(len(LENGTHS) // 16 * 16).reshape(-1, 16).tolist()
    assert padding(grouped_batches(LENGTHS, 16, seed=1)) < 0.2 * padding(order)


def test_order_is_a_function_of_the_seed_and_differs_between_epochs():
    run = list(RunBatches(LENGTHS, 16, epochs=2, seed=3))
    assert run == list(RunBatches(LENGTHS, 16, epochs=2, seed=3))
    assert run != list(RunBatches(LENGTHS, 16, epochs=2, seed=4))
    assert run[:62] != run[62:]


@pytest.mark.parametrize("first", [0, 1, 61, 62, 100])
def test_a_resumed_run_goes_on_where_it_stopped(first):
    whole = list(RunBatches(LENGTHS, 16, epochs=2.5, seed=0))
    rest = RunBatches(LENGTHS, 16, epochs=2.5, seed=0, first=first)
    assert list(rest) == whole[first:]
    assert len(rest) == len(whole) == round(2.5 * 62)


def test_processes_share_the_batch_that_one_process_would_see():
    alone = list(RunBatches(LENGTHS, 16, epochs=1, seed=0))
    both = [list(RunBatches(LENGTHS, 8, epochs=1, seed=0, rank=rank, world=2)) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*both, strict=True)] == [sorted(batch) for batch in alone]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_sees_every_example_once(world):
    seen = [i for rank in range(world) for batch in SplitBatches(LENGTHS, 10, rank=rank, world=world) for i in batch]
    assert sorted(seen) == list(range(997))


def test_the_seed_of_a_run_changes_the_order_as_the_datas_own_does():
    def built(seed, of_run):
        data = SyntheticData(Synthetic(train_rows=48, select_rows=3, test_rows=3, batch_size=8, score_rows=16, seed=seed))
        data.order_by(of_run)
        data.build(None)
        return data

    def seen(data):
        return [batch["input_ids"] for loader in (data.train_dataloader(), data.score_dataloader()) for batch in loader]

    one, other, neither = built(1, 4), built(5, 0), built(1, 0)
    assert all(torch.equal(a, b) for a, b in zip(seen(one), seen(other), strict=True))
    assert one.fingerprint() == other.fingerprint() != neither.fingerprint()
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(seen(one), seen(neither), strict=True))
