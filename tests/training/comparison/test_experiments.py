"""Cells of one seed: what a stopped one has cost."""

import pytest
import pytorch_lightning as pl
import torch

from tests.models import FAMILIES
from tests.training.runs import MODEL, make_data, make_pruner, make_trainer
from training.comparison.cache import CellCache, key_of
from training.comparison.experiments import NUMERICS, Cells, Scratch, behaviour_of
from training.comparison.from_scratch import train_from_scratch
from training.pruner.averaging import AverageWeights
from training.pruner.callbacks import CostInCheckpoints
from training.runs.cost import Cost
from training.runs.progress import cell_progress

DEFAULT = Scratch()


class StopsOnce(pl.Callback):
    """Ends the first training at a step, as a fault would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            self.step = None
            raise RuntimeError("stopped")


def make_cells(folder, *more, scratch=DEFAULT, **settings):
    with cell_progress(1, visible=False) as progress:
        return Cells(
            lambda options: make_pruner(**(settings | options)),
            make_data(),
            lambda *callbacks, **overrides: make_trainer(
                callbacks=[*more, *callbacks], **({"limit_val_batches": 1.0} | overrides)
            ),
            trainer_settings=dict.fromkeys(NUMERICS) | {"average_last": 1},
            seed=0,
            cache=CellCache(folder),
            progress=progress,
            save_every=2,
            scratch=scratch,
        )


@pytest.fixture
def cells(tmp_path):
    return make_cells(tmp_path, StopsOnce(9))


@pytest.mark.parametrize("changed", [{"hidden_dropout_prob": 0.3}, {"num_attention_heads": 2}, {"hidden_act": "relu"}])
def test_what_a_model_does_with_the_same_weights_is_part_of_its_key(tmp_path, changed):
    keys = [key_of(make_cells(tmp_path, from_scratch=MODEL | more, budget=2).dense_is) for more in ({}, {}, changed)]
    assert keys[0] == keys[1] != keys[2]


def test_how_a_translator_generates_is_part_of_its_key():
    model = FAMILIES["marian"].build()
    before = behaviour_of(model)
    model.generation_config.no_repeat_ngram_size = 3
    assert behaviour_of(model) != before


def test_averaging_over_another_retrain_phase_is_another_cell(tmp_path):
    """Of the same dense model, which knows the sum of the phases alone."""
    found = []
    for last, prune in ((1, 1.0), (1, 1.75), (3, 1.0), (3, 1.75)):
        cells = make_cells(tmp_path, budget=2, prune=prune, retrain=2 - prune)
        cells.dense_is["trainer"]["average_last"] = last
        found.append(cells._averaged_over())
    assert found == [{}, {}, {"prune": 1.0, "retrain": 1.0}, {"prune": 1.75, "retrain": 0.25}]


def test_new_weights_are_not_those_the_dense_model_began_with(tmp_path):
    class First(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.weights = {name: tensor.clone() for name, tensor in pl_module.backbone.state_dict().items()}
            self.steps = trainer.max_steps, pl_module.boundaries

    first = First()
    cells = make_cells(tmp_path, first, from_scratch=MODEL)
    began = {name: tensor.clone() for name, tensor in cells.pruner.backbone.state_dict().items()}
    mask = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
    cell = cells.from_scratch(mask)
    assert cell.result["steps"] == 3 * 16
    weights = [name for name, tensor in began.items() if tensor.dim() > 1 and "token_type" not in name]
    assert not [name for name in weights if torch.equal(first.weights[name], began[name])]
    longer = make_cells(tmp_path, first, from_scratch=MODEL, scratch=Scratch(4.0, 1e-4)).from_scratch(mask)
    assert longer.key != cell.key
    assert longer.result["steps"] == 4 * 16


def test_batches_of_evaluation_matter_only_where_they_are_limited(tmp_path):
    cells = make_cells(tmp_path, from_scratch=MODEL)
    settings = dict.fromkeys(NUMERICS) | {"average_last": 1}
    keys = {}
    for limit in (None, 1.0, 2):
        for size in (8, 16):
            data = cells.data
            data.eval_batch_size = size
            other = Cells(
                lambda options: cells.pruner, data, cells.make_trainer, seed=0, cache=cells.cache, progress=cells.progress,
                save_every=2, trainer_settings=settings | {"limit_test_batches": limit},
            )  # fmt: skip
            keys[limit, size] = key_of(other.dense_is)
    assert keys[None, 8] == keys[None, 16]
    assert keys[1.0, 8] == keys[1.0, 16]
    assert keys[2, 8] != keys[2, 16]


class Averaged(AverageWeights):
    """Notes the steps whose weights go into an average."""

    def __init__(self, last, every):
        super().__init__(last, every)
        self.at = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        before = self.count
        super().on_train_batch_end(trainer, pl_module, *args)
        if self.count != before:
            self.at.append(trainer.global_step)


@pytest.mark.parametrize(("epochs", "end"), [(None, 3 * 16), (4.0, 4 * 16)])
def test_new_weights_are_averaged_over_the_last_checkpoints_of_their_training(tmp_path, epochs, end):
    """As those of a run are: it is one phase, whatever phases the comparison has."""
    found = []
    averages = Averaged(5, 8)
    cells = make_cells(tmp_path, averages, from_scratch=MODEL, retrain=0.25, prune=1.75, scratch=Scratch(epochs))
    cells.from_scratch(torch.ones(8))
    found.append(averages.at)
    averages, pruner, data = Averaged(5, 8), make_pruner(from_scratch=MODEL, retrain=0.25, prune=1.75), make_data()
    make_trainer().fit(pruner, data)
    factory = lambda *callbacks, **more: make_trainer(callbacks=[averages, *callbacks], **({"limit_val_batches": 1.0} | more))  # noqa: E731
    train_from_scratch(pruner, data, torch.ones(8), factory, method="dense", epochs=epochs)
    found.append(averages.at)
    assert found == [[end - 32, end - 24, end - 16, end - 8, end]] * 2


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
