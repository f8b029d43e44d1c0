import pytest
import torch

from gates.search.successive_halving import Metered, passes_of, race


def runners(values):
    return [torch.tensor([float(value)]) for value in values]


def test_those_in_front_come_in_order():
    masks = runners([9, 3, 7, 1, 8, 2, 6, 4, 5, 11, 10, 12])
    meter = Metered(lambda mask, share: float(mask))
    assert race(masks, meter) == [3, 5, 1, 7]
    assert meter.passes == 12 / 8 + 8 / 4


def test_a_later_round_corrects_an_earlier_one():
    """The best eight by an eighth of the data are compared again on more."""
    assert race(runners(range(9)), lambda mask, share: float(mask) if share == 1 / 8 else -float(mask)) == [7, 6, 5, 4]


def test_finalists_alone_need_not_run():
    meter = Metered(lambda mask, share: float(mask))
    assert race(runners([4, 3, 2, 1]), meter) == [0, 1, 2, 3]
    assert meter.passes == 0


@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 9, 64])
def test_the_passes_of_a_race_are_known_before(count):
    meter = Metered(lambda mask, share: float(mask))
    masks = runners(range(count))
    for number in race(masks, meter):
        meter(masks[number], 1.0)
    assert meter.passes == passes_of(count)
