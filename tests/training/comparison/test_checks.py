import pytest

from gates.errors import GateError
from training.comparison.grid import check_fixed
from training.config import PrunerOptions


@pytest.mark.parametrize("option", ["freeze", "freeze_while_pruning"])
def test_weights_that_are_all_fixed_are_trained_from_scratch_alone(option):
    fixed, free = (PrunerOptions(backbone="some/model", budget=3, **{option: names}) for names in ([".*"], ["embeddings"]))
    check_fixed(fixed, [], ["post hoc", "post hoc with means", "from scratch"])
    check_fixed(free, [], ["post hoc", "retrained"])
    with pytest.raises(
        GateError, match=rf"{option} has '\.\*', which fixes all weights, but --stages has 'retrained from dense'"
    ):
        check_fixed(fixed, [], ["post hoc", "retrained from dense"])
