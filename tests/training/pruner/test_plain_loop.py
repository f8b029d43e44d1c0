"""A loop in plain PyTorch does what the application's module does: the same heads from the same batches and noise."""

import pytest
import torch

from gates.model import GateConfig, GatedModel
from tests.training.runs import make_data, make_pruner, make_trainer
from training.pruner import module
from training.scoring import passes


class PlainLoop:
    """What ``fit`` does with a budget, in plain PyTorch on batches in a given order."""

    def __init__(self, model, *, budget, seed, rates, batches, his):
        self.gated = GatedModel(model, GateConfig(budget=budget, draw_per="example", ramp=0.6))
        self.seed, self.rates, self.batches, self.his = seed, rates, batches, his

    def run(self, pruning_steps):
        gated = self.gated.train()
        optimizer = torch.optim.AdamW(gated.parameter_groups(1e-3, gate_learning_rate=0.05), weight_decay=0.0)
        if self.his is not None:
            gated.start_from_(self.his)
        for step, batch in enumerate(self.batches):
            optimizer.param_groups[0]["lr"] = self.rates[step]
            noise = (self.seed * 1_000_003 + step) * 4096 + 1
            gated.gates.generator = torch.Generator().manual_seed(noise)
            torch.manual_seed(noise)  # of dropout
            gated(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            gated.step_(min(1.0, (step + 1) / pruning_steps), optimizer)
            if step + 1 == pruning_steps:
                gated.fix_mask_()
        return gated


@pytest.mark.parametrize(("budget", "init_spread", "retrain"), [(3, 1.0, 0.5), (0.5, 0.0, 0.0), ({"encoder": 2}, 1.0, 0.0)])
def test_a_plain_loop_does_what_fit_does(monkeypatch, budget, init_spread, retrain):
    batches, rates, importance = [], [], []

    def recorded(subject, name):
        importance.append(passes.importance_of(subject))
        return starting_scores(subject, name)

    starting_scores = module.starting_scores
    monkeypatch.setattr(module, "starting_scores", recorded)

    class Record(module.pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            batches.append({name: tensor.clone() for name, tensor in batch.items()})
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    phases = {"finetune": 0.0, "prune": 1.0, "retrain": retrain}
    pruner = make_pruner(seed=5, budget=budget, init_spread=init_spread, weight_decay=0.0, pipelined=False, **phases)
    twin = make_pruner(seed=5, budget=budget, init_spread=init_spread, weight_decay=0.0, pipelined=False, **phases)
    twin.gates.detach()
    make_trainer(callbacks=[Record()]).fit(pruner, make_data())

    his = importance[0].his if init_spread else None
    loop = PlainLoop(twin.backbone, budget=budget, seed=5, rates=rates, batches=batches, his=his)
    gated = loop.run(pruner.schedule.prune)
    torch.testing.assert_close(gated.gates.log_alpha, pruner.gates.log_alpha, atol=1e-6, rtol=0)
    assert gated.gates.log_alpha.detach().std() > 0.05
    assert torch.equal(gated.mask(), pruner.gates.mask)
    for name, parameter in pruner.backbone.named_parameters():
        torch.testing.assert_close(gated.base_model.get_parameter(name), parameter, atol=1e-6, rtol=1e-5)
