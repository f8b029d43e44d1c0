"""What is logged of a run's course: epochs, phases, learning rates, prices and speed."""

import pandas as pd
import pytest
from pytorch_lightning.loggers import CSVLogger

from tests.training.pruner.fits import N, fit
from tests.training.runs import SETTINGS, make_pruner
from training.pruner.logging import PositionLog


def log_of(folder, **settings):
    """The log of a run of three epochs with a validation at the end of each, by the step that was the last."""
    checks = {"limit_val_batches": 1.0, "val_check_interval": N, "log_every_n_steps": 2}
    fit(make_pruner(**settings), PositionLog(), logger=CSVLogger(folder, name="", version=""), **checks)
    return pd.read_csv(folder / "metrics.csv").assign(done=lambda table: table["step"] + 1)


def test_epoch_phase_and_learning_rates_are_those_of_the_step(tmp_path):
    log = log_of(tmp_path)
    assert log["epoch"].tolist() == pytest.approx((log["done"] / N).tolist())
    assert log["select/accuracy"].notna().sum() == 3
    trained = log[log["train/phase"].notna()].set_index("done")
    assert trained["train/phase"].to_dict() == {step: (step - 1) // N for step in range(2, 3 * N + 1, 2)}
    assert (trained["train/gate_learning_rate"] > 0).tolist() == [phase == 1 for phase in trained["train/phase"]]
    rates = trained["train/learning_rate"]
    assert 0 < rates.iloc[-1] < rates.iloc[1] <= SETTINGS["learning_rate"]
    for name in ("train/price", "train/penalty"):
        paid = log[log[name].notna()].set_index("done")[name]
        in_phase = [trained["train/phase"][step] == 1 for step in paid.index]
        assert (paid[[not inside for inside in in_phase]] == 0).all(), name
        assert paid[in_phase].max() > 0, name
    assert (trained[["train/steps_per_second", "train/examples_per_second"]] > 0).all(axis=None)
    ratio = trained["train/examples_per_second"] / trained["train/steps_per_second"]
    assert ratio.tolist() == pytest.approx([16] * 12)  # examples of a batch


def test_the_price_rises_in_the_prune_phase_alone(tmp_path):
    log = log_of(tmp_path, budget=None, price=0.5, ramp=0.5).dropna(subset=["train/price"]).set_index("done")
    by_phase = [rows["train/price"].tolist() for _, rows in log.groupby("train/phase")]
    assert by_phase == [[0.0] * 4, [0.25, 0.5, 0.5, 0.5], [0.0] * 4]
