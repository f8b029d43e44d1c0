import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.config.data import Synthetic
from training.data.base import RunBatches, RunTokenBatches, SplitBatches, grouped_batches, token_cuts
from training.data.synthetic import SyntheticData

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(3, 60, 997).tolist()
SOURCE = RANDOM.integers(3, 40, 997)
TARGET = np.clip(SOURCE + RANDOM.integers(-4, 5, 997), 2, 50)
SAMPLERS = {
    "examples": lambda **place: RunBatches(LENGTHS, 16, **place),
    "tokens": lambda **place: RunTokenBatches(SOURCE, TARGET, 300, **place),
}


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


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_order_is_a_function_of_the_seed_and_differs_between_epochs(sampler):
    whole = list(sampler(epochs=2, seed=3))
    assert whole == list(sampler(epochs=2, seed=3))
    assert whole != list(sampler(epochs=2, seed=4))
    half = len(whole) // 2
    assert sorted(map(sorted, whole[:half])) != sorted(map(sorted, whole[half:]))  # other neighbours, not only another order


@pytest.mark.parametrize("first", [0, 1, 61, 62, 100])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_resumed_run_continues_where_it_stopped(sampler, first):
    whole = list(sampler(epochs=2.5, seed=0))
    rest = sampler(epochs=2.5, seed=0, first=first)
    assert list(rest) == whole[first:]
    assert len(rest) == len(whole) == round(2.5 * rest.per_epoch)


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


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 400), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_cuts_are_within_the_budget_and_as_few_as_a_greedy_reader_makes(lengths, budget, multiple):
    cuts = token_cuts(lengths, budget, multiple=multiple)
    assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    if len(lengths) >= multiple:
        assert cuts[-1][1] == len(lengths) // multiple * multiple
        assert all((end - start) % multiple == 0 for start, end in cuts)
    for (start, end), following in zip(cuts, [*cuts[1:], None], strict=True):
        assert end - start <= multiple or max(lengths[start:end]) * (end - start) <= budget
        if following is not None:  # no more would have gone in
            assert max(lengths[start : end + multiple]) * (end + multiple - start) > budget


def test_an_epoch_holds_every_pair_once_and_batches_within_the_budget():
    batches = list(SAMPLERS["tokens"](epochs=1, seed=3))
    assert sorted(index for batch in batches for index in batch) == list(range(997))
    for batch in batches:
        assert max(SOURCE[batch].max(), TARGET[batch].max()) * len(batch) <= 300
    assert sum(TARGET[batch].max() * len(batch) for batch in batches) < 1.08 * TARGET.sum()  # little padding


def test_processes_share_batches_of_tokens():
    alone = list(RunTokenBatches(SOURCE, TARGET, 300, epochs=1, seed=0))
    both = [list(RunTokenBatches(SOURCE, TARGET, 150, epochs=1, seed=0, rank=rank, world=2)) for rank in range(2)]
    assert len(both[0]) == len(both[1])
    assert all(len(a) == len(b) for a, b in zip(*both, strict=True))
    joined = sorted(index for a, b in zip(*both, strict=True) for index in (*a, *b))
    assert len(joined) == len(set(joined)) == 996  # one of an odd number is left out
    assert len(both[0]) == pytest.approx(len(alone), rel=0.1)  # rounding to even sizes costs some
