"""Every architecture of the coverage table can be refitted, also those whose heads can be gated but not removed."""

import pytest
import torch

from gates.head_gates import HeadGates
from gates.recovery.refit import refit_
from training.coverage import architectures as zoo


@pytest.mark.parametrize("name", list(zoo.BY_NAME))
def test_no_projection_is_worse_and_the_outputs_come_nearer_to_the_dense_models(name):
    model, batch, mask = zoo.build(zoo.BY_NAME[name]), zoo.inputs(zoo.BY_NAME[name]), zoo.random_mask(zoo.BY_NAME[name])
    gates = HeadGates(model)

    @torch.no_grad()
    def output(values):
        with gates.attached(), gates.use(values):
            return model(**batch)[0]

    dense, pruned = output(torch.ones_like(mask)), output(mask)
    done = refit_(gates, mask, lambda: [batch], lambda one: model(**one), lambda one: {})
    assert done
    assert all(one.after <= one.before for one in done)
    assert (output(mask) - dense).norm() < 0.95 * (pruned - dense).norm()
