import copy
import itertools

import pytest
import pytorch_lightning as pl
import torch

from gates.errors import GateError
from gates.importance import normalise_by_layer
from tests.training.runs import MODEL, STEPS_PER_EPOCH, make_data, make_pruner, make_trainer
from training.module import HeadPruner
from training.scoring import score_importance


class Watch(pl.Callback):
    """Notes the phase, the gates and the learning rates of every step."""

    def __init__(self):
        self.phases, self.modes, self.rates, self.open = [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.phases.append(pl_module.phase(trainer.global_step))
        self.rates.append({group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.modes.append(pl_module.gates.mode)
        self.open.append(float(pl_module.gates.hard_concrete.open_probability().sum().detach()))


def fit(pruner=None, trainer=None, **more):
    pruner, trainer = pruner or make_pruner(), trainer or make_trainer()
    trainer.fit(pruner, make_data(), **more)
    return pruner


def state(pruner):
    return {name: tensor.clone() for name, tensor in pruner.state_dict().items() if torch.is_tensor(tensor)}


@pytest.mark.parametrize("steering", ["projection", "multipliers"])
@pytest.mark.parametrize("settle", [1.0, 0.0])
@pytest.mark.parametrize(("budget", "expected"), [(3, 3), (0.5, 4), (0, 0), (8, 8), ({"encoder": 2}, 2)])
def test_the_run_ends_with_exactly_the_budget(budget, expected, settle, steering):
    pruner = fit(make_pruner(budget=budget, settle=settle, steering=steering, warm_up=0.0))
    assert pruner.gates.mode == "masked"
    assert pruner.gates.mask.sum() == expected
    assert set(pruner.gates.mask.tolist()) <= {0.0, 1.0}


def test_phases_modes_and_learning_rates():
    watch = Watch()
    fit(trainer=make_trainer(callbacks=[watch]))
    n = STEPS_PER_EPOCH
    assert watch.phases == ["warm-up"] * n + ["prune"] * n + ["settle"] * n
    assert watch.modes == ["open"] * n + ["stochastic"] * n + ["masked"] * n
    gate_rates = [rates["gates"] for rates in watch.rates]
    assert gate_rates == [0.0] * n + [0.05] * n + [0.0] * n
    backbone = [rates["backbone"] for rates in watch.rates]
    peak = backbone.index(max(backbone))
    assert peak == 2
    assert backbone[: peak + 1] == sorted(backbone[: peak + 1])
    assert backbone[peak:] == sorted(backbone[peak:], reverse=True)
    assert backbone[-1] == pytest.approx(1e-3 / (3 * n - 3), rel=1e-3)


def test_projection_holds_the_expectation_to_its_course():
    watch = Watch()
    pruner = fit(trainer=make_trainer(callbacks=[watch]))
    n = STEPS_PER_EPOCH
    prune = watch.open[n : 2 * n - 1]
    final = float(pruner.target.target(1.0) * 8)
    assert all(later <= earlier + 1e-4 for earlier, later in itertools.pairwise(prune))
    assert prune[-1] == pytest.approx(final, abs=1e-3)
    assert 3 < final < 3.2


def test_gates_start_apart_as_his_ranks_them():
    """Right before the first prune step, log_alpha ranks the heads as HIS of the dense model does."""
    starts = {}

    class AtStart(pl.Callback):
        def __init__(self, spread):
            self.spread = spread

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            if trainer.global_step == STEPS_PER_EPOCH and self.spread not in starts:
                starts[self.spread] = pl_module.gates.log_alpha.detach().clone()
                expected = score_importance(pl_module, pl_module.trainer.datamodule.score_dataloader(), trainer).his
                starts["his"] = normalise_by_layer(expected, pl_module.gates.layer_index())

    for spread in (0.0, 0.3):
        fit(make_pruner(his_start=spread), make_trainer(callbacks=[AtStart(spread)]))
    assert torch.equal(starts[0.0], torch.full((8,), 2.5))
    assert torch.equal(starts[0.3].argsort(), starts["his"].argsort())
    assert starts[0.3].std() == pytest.approx(0.3, rel=1e-3)
    assert starts[0.3].mean() == pytest.approx(2.5, abs=1e-5)


def test_gates_rest_outside_the_prune_phase():
    pruner = make_pruner()
    start = pruner.gates.log_alpha.detach().clone()

    class AtEndOfWarmUp(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == STEPS_PER_EPOCH:
                assert torch.equal(pl_module.gates.log_alpha, start)
                assert pl_module.gates.log_alpha not in trainer.optimizers[0].state

    fit(pruner, make_trainer(callbacks=[AtEndOfWarmUp()]))
    assert not torch.equal(pruner.gates.log_alpha, start)


def test_a_price_closes_heads_and_a_higher_one_closes_more():
    kept = [
        int(fit(make_pruner(budget=None, price=price, prune=5.0, warm_up=0.0)).gates.mask.sum()) for price in (0.0, 0.05, 5.0)
    ]
    assert kept[0] == 8
    assert kept[0] > kept[2]
    assert kept[1] >= kept[2] == 0


def test_a_price_per_kind_that_the_model_lacks():
    with pytest.raises(GateError, match="'cross'"):
        make_pruner(budget=None, price={"cross": 0.1})


def test_frozen_parameters_stay_and_gates_still_learn():
    pruner = make_pruner(freeze=[".*"])
    before = state(pruner)
    fit(pruner)
    for name, tensor in state(pruner).items():
        if name.startswith("backbone."):
            assert torch.equal(tensor, before[name])
    assert not torch.equal(pruner.gates.log_alpha, before["gates.hard_concrete.log_alpha"])


def test_freezing_by_pattern():
    pruner = make_pruner(freeze=["embeddings", r"layer\.0\."])
    frozen = {name for name, p in pruner.backbone.named_parameters() if not p.requires_grad}
    expected = {name for name, _ in pruner.backbone.named_parameters() if "embeddings" in name or "layer.0." in name}
    assert frozen == expected
    with pytest.raises(GateError, match="'decoder' matches no parameter"):
        make_pruner(freeze=["decoder"])


def test_clipping_leaves_the_gates_alone():
    norms = {}
    for clip in (None, 1e-6):
        pruner = make_pruner(warm_up=0.0)
        found = []

        class Note(pl.Callback):
            def on_before_zero_grad(self, trainer, pl_module, optimizer, found=found):
                if pl_module.gates.log_alpha.grad is not None:
                    backbone = torch.stack([p.grad.norm() for p in pl_module.backbone.parameters() if p.grad is not None])
                    found.append((float(pl_module.gates.log_alpha.grad.norm()), float(backbone.norm())))

        fit(pruner, make_trainer(callbacks=[Note()], gradient_clip_val=clip, limit_train_batches=2))
        norms[clip] = found[-1]
    assert norms[None][1] > 1e-3
    assert norms[1e-6][1] <= 1.1e-6
    assert norms[1e-6][0] > 1e-6


def test_accumulated_halves_equal_whole_batches():
    """Without dropout, in the warm-up: two batches of 8 accumulated are one of 16 of the same examples."""
    model = MODEL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    class FirstHalves(torch.utils.data.Sampler):
        def __init__(self, batches):
            self.batches = [half for batch in batches for half in (batch[:8], batch[8:])]

        def __len__(self):
            return len(self.batches)

        def __iter__(self):
            return iter(self.batches)

    results = []
    for accumulate in (1, 2):
        pruner = make_pruner(from_scratch=model, warm_up=100.0, prune=0.1, settle=0.0)
        data = make_data()
        if accumulate == 2:
            whole = data.train_dataloader

            def halves(whole=whole, data=data):
                data.trainer.lightning_module  # noqa: B018 - the loader asks its trainer for the length of the run
                return data._loader("train", FirstHalves(list(whole().batch_sampler)))

            data.train_dataloader = halves
        make_trainer(accumulate_grad_batches=accumulate, limit_train_batches=7 * accumulate, max_steps=6).fit(pruner, data)
        results.append(state(pruner))
    start = state(make_pruner(from_scratch=model))
    for name, tensor in results[0].items():
        if name.startswith("backbone."):
            torch.testing.assert_close(tensor, results[1][name], atol=1e-4, rtol=1e-3, msg=name)
    assert not torch.allclose(results[0]["backbone.classifier.weight"], start["backbone.classifier.weight"], atol=1e-3)


@pytest.mark.parametrize("at", [5, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 7, 2 * STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH + 3])
@pytest.mark.parametrize("steering", ["projection", "multipliers"])
def test_resuming_gives_the_same_result(tmp_path, at, steering):
    whole = state(fit(make_pruner(steering=steering)))

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == at:
                trainer.save_checkpoint(tmp_path / "at.ckpt")

    fit(make_pruner(steering=steering), make_trainer(callbacks=[Save()]))
    torch.manual_seed(99)  # whatever happened before
    resumed = state(fit(make_pruner(steering=steering), make_trainer(), ckpt_path=tmp_path / "at.ckpt", weights_only=True))
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_a_resumed_run_has_its_own_learning_rates(tmp_path):
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == STEPS_PER_EPOCH:
                trainer.save_checkpoint(tmp_path / "at.ckpt")

    fit(make_pruner(), make_trainer(callbacks=[Save()]))
    watch = Watch()
    other = make_pruner(gate_learning_rate=0.2, learning_rate=2e-3)
    fit(other, make_trainer(callbacks=[watch]), ckpt_path=tmp_path / "at.ckpt", weights_only=True)
    unbroken = Watch()
    fit(make_pruner(gate_learning_rate=0.2, learning_rate=2e-3), make_trainer(callbacks=[unbroken]))
    assert watch.rates == unbroken.rates[STEPS_PER_EPOCH:]
    assert watch.rates[0]["gates"] == 0.2


def test_the_seed_decides_the_run():
    first, again, other = (state(fit(make_pruner(seed=seed))) for seed in (0, 0, 1))
    log_alpha = "gates.hard_concrete.log_alpha"
    assert torch.equal(first[log_alpha], again[log_alpha])
    assert not torch.equal(first[log_alpha], other[log_alpha])


def test_bf16_mixed_keeps_gates_in_float32():
    pruner = fit(trainer=make_trainer(precision="bf16-mixed"))
    assert pruner.gates.log_alpha.dtype == torch.float32
    assert pruner.gates.mask.sum() == 3


def test_nan_loss_stops_with_advice():
    pruner = make_pruner(warm_up=0.0)
    with torch.no_grad():
        pruner.backbone.classifier.bias.fill_(float("nan"))
    with pytest.raises(GateError, match=r"the loss is nan at step 0.*--existing resume"):
        fit(pruner)


def test_a_fixed_mask_is_trained_with_from_the_end_of_the_warm_up():
    watch = Watch()
    pruner = make_pruner()
    pruner.fixed_mask = torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1])
    start = pruner.gates.log_alpha.detach().clone()
    fit(pruner, make_trainer(callbacks=[watch]))
    n = STEPS_PER_EPOCH
    assert watch.modes == ["open"] * n + ["masked"] * 2 * n
    assert torch.equal(pruner.gates.mask, pruner.fixed_mask)
    assert torch.equal(pruner.gates.log_alpha, start)


def test_masked_heads_do_not_train():
    pruner = make_pruner(warm_up=0.0)
    pruner.fixed_mask = torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1])
    rows = pruner.backbone.bert.encoder.layer[0].attention.self.query.weight
    before = rows.detach().clone()
    pruner.hparams["weight_decay"] = 0.0
    fit(pruner)
    assert torch.equal(rows[:4], before[:4])
    assert not torch.equal(rows[4:], before[4:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 99}, "99"),
        ({"budget": {"decoder": 2}}, "'decoder'"),
        ({"prune": 0.0}, "prune is 0"),
        ({"settle": -1.0}, "settle is -1"),
        ({"ramp": 0.0}, "ramp is 0"),
        ({"minimum_per_layer": 2}, "needs 4 heads"),
        ({"from_scratch": {"model_type": "telepathy"}}, "telepathy"),
        ({"from_scratch": {"model_type": "bert", "hidden_size": 10, "num_attention_heads": 4}}, "hidden size"),
        ({"backbone": "also"}, "both a pretrained model .'also'."),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(GateError, match=message):
        make_pruner(**settings)


def test_an_unknown_backbone(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = make_data()
    for name in (str(tmp_path), str(tmp_path / "missing"), "nobody/nothing"):
        with pytest.raises(GateError, match="cannot load a model"):
            HeadPruner(backbone=name).build(data.task, data.tokenizer)


def test_the_minimum_per_layer_is_kept():
    pruner = fit(make_pruner(minimum_per_layer=1, budget=2))
    assert [int(part.sum()) for part in pruner.gates.mask.split(4)] == [1, 1]


def test_building_twice_changes_nothing():
    pruner = make_pruner()
    backbone = copy.copy(pruner.backbone)
    data = make_data()
    pruner.build(data.task, data.tokenizer)
    assert pruner.backbone.state_dict().keys() == backbone.state_dict().keys()
    assert pruner.gates.is_attached
