import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.base import RunTokenBatches, token_cuts

RANDOM = np.random.default_rng(0)
SOURCE = RANDOM.integers(3, 40, 997)
TARGET = np.clip(SOURCE + RANDOM.integers(-4, 5, 997), 2, 50)


def run(**more):
    return RunTokenBatches(SOURCE, TARGET, 300, **({"epochs": 2, "seed": 3} | more))


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
    batches = list(run(epochs=1))
    assert sorted(index for batch in batches for index in batch) == list(range(997))
    for batch in batches:
        assert max(SOURCE[batch].max(), TARGET[batch].max()) * len(batch) <= 300


def test_there_is_little_padding():
    batches = list(run(epochs=1))
    padded = sum(TARGET[batch].max() * len(batch) for batch in batches)
    assert padded < 1.08 * TARGET.sum()


def test_order_is_a_function_of_the_seed_and_differs_between_epochs():
    whole = list(run())
    assert whole == list(run())
    assert whole != list(run(seed=4))
    half = len(whole) // 2
    assert sorted(map(sorted, whole[:half])) != sorted(map(sorted, whole[half:]))  # other neighbours, not only another order


@pytest.mark.parametrize("first", [0, 1, 50, 100])
def test_a_resumed_run_goes_on_where_it_stopped(first):
    whole = list(run(epochs=1.7))
    rest = run(epochs=1.7, first=first)
    assert list(rest) == whole[first:]
    assert len(rest) == len(whole)


def test_processes_share_the_batch_that_one_process_would_see():
    alone = list(RunTokenBatches(SOURCE, TARGET, 300, epochs=1, seed=0))
    both = [list(RunTokenBatches(SOURCE, TARGET, 150, epochs=1, seed=0, rank=rank, world=2)) for rank in range(2)]
    assert len(both[0]) == len(both[1])
    assert all(len(a) == len(b) for a, b in zip(*both, strict=True))
    joined = sorted(index for a, b in zip(*both, strict=True) for index in (*a, *b))
    assert len(joined) == len(set(joined)) == 996  # one of an odd number is left out
    assert len(both[0]) == pytest.approx(len(alone), rel=0.1)  # rounding to even sizes costs some
