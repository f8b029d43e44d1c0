"""Cells of one seed: what a stopped one has cost."""

import pytest
import pytorch_lightning as pl
import torch

from tests.training.runs import make_data, make_pruner, make_trainer
from training.cache import CellCache
from training.callbacks import CostInCheckpoints
from training.cells import NUMERICS, Cells
from training.cost import Cost
from training.progress import cell_progress


class StopsOnce(pl.Callback):
    """Ends the first training at a step, as a fault would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            self.step = None
            raise RuntimeError("stopped")


@pytest.fixture
def cells(tmp_path):
    stop = StopsOnce(9)
    with cell_progress(1, visible=False) as progress:
        yield Cells(
            lambda options: make_pruner(**options),
            make_data(),
            lambda *callbacks, **overrides: make_trainer(callbacks=[stop, *callbacks], **overrides),
            trainer_settings=dict.fromkeys(NUMERICS),
            seed=0,
            cache=CellCache(tmp_path),
            progress=progress,
            save_every=2,
        )


def test_a_stopped_cell_reports_its_whole_cost(cells, tmp_path):
    with pytest.raises(RuntimeError, match="stopped"):
        cells.dense()
    (last,) = tmp_path.glob(".*/last.ckpt")
    content = torch.load(last, weights_only=True)
    assert content["global_step"] == 8 - 2  # the last one whose next loss was seen
    assert CostInCheckpoints.read(last).seconds > 0
    content[CostInCheckpoints.KEY] = {"seconds": 1000.0, "peak_memory_mb": 1e6}
    torch.save(content, last)
    result = cells.dense().result
    assert 1000 < result["seconds"] < 1000 + 300
    assert result["peak_memory_mb"] == 1e6
    assert result["steps"] == 16


def test_checkpoints_of_before_have_cost_nothing_yet(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    assert CostInCheckpoints.read(tmp_path / "last.ckpt") == Cost()
