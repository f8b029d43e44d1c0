"""The course of the gates, in the log and as a table."""

import pytest
import torch

from tests.training.pruner.fits import N, fit
from tests.training.runs import make_pruner
from training.pruner.logging import GateLog


class Logged(GateLog):
    """Keeps the gates and what was logged of them."""

    def __init__(self):
        super().__init__()
        self.logged, self.seen = {}, {}

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.seen[trainer.global_step] = pl_module.gates.values(), pl_module.gates.open_probability().detach()
        super().on_train_batch_end(trainer, pl_module, *args)

    def _record(self, trainer, pruner, step):
        log_dict = pruner.log_dict
        pruner.log_dict = lambda values, **_: self.logged.update({step: values})
        super()._record(trainer, pruner, step)
        pruner.log_dict = log_dict


@pytest.mark.parametrize("settings", [{}, {"budget": {"encoder": 3}}, {"budget": None}])
def test_open_expected_and_target_heads_are_logged(settings):
    log, pruner = Logged(), make_pruner(**settings)
    fit(pruner, log, log_every_n_steps=2)
    assert log.steps == list(log.logged) == list(range(2, 3 * N + 1, 2))
    for step, logged in log.logged.items():
        values, probability = log.seen[step]
        is_open = (values > 0).float()
        expected = probability if N < step <= 2 * N else is_open
        for name, counts in (("open", is_open), ("expected", expected)):
            assert logged[f"heads/{name}"] == pytest.approx(float(counts.sum()))
            assert logged[f"heads/{name}/encoder"] == pytest.approx(float(counts.sum()))
            assert logged[f"heads/{name}/encoder.1"] == pytest.approx(float(counts[4:].sum()))
        assert ("heads/target" in logged) == (settings.get("budget", 3) is not None)
    if settings == {}:
        assert log.logged[2]["heads/target"] == pytest.approx(pruner.steering.budget_controller.schedule.goals(0.0)[0])
        assert log.logged[3 * N]["heads/target"] == log.logged[3 * N]["heads/open"] == 3


def test_the_table_has_a_column_for_each_gate_and_goes_on_after_a_stop():
    log, pruner = Logged(), make_pruner()
    fit(pruner, log, log_every_n_steps=4)
    table = log.table(pruner)
    heads = [f"encoder.{layer}.{head}" for layer in range(2) for head in range(4)]
    assert list(table.columns) == ["step", "expected", "price", *heads]
    assert table["step"].tolist() == [4, 8, 12, 16, 20, 24]
    for row in table.itertuples(index=False):
        assert list(row[3:]) == pytest.approx(log.seen[row.step][0].tolist())
    assert table["expected"].tolist() == pytest.approx([logged["heads/expected"] for logged in log.logged.values()])
    assert table["price"].iloc[[0, 1, 4, 5]].tolist() == [0] * 4  # nothing is paid outside the prune phase
    assert table["price"].iloc[3] == pytest.approx(pruner.steering.budget_controller.price[0])
    again = GateLog()
    again.load_state_dict(log.state_dict())
    assert again.table(pruner).equals(table)
    assert list(GateLog().table(pruner).columns) == ["step", *heads]
    assert torch.equal(torch.tensor(table.iloc[-1, 3:].to_numpy(dtype="float32")), pruner.gates.mask)
