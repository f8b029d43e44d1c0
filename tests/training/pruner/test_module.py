import copy
import itertools
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
import pytorch_lightning as pl
import torch

from gates.errors import GateError
from gates.gating.families import END_TEMPERATURE, RelaxedTopK
from gates.gating.schedule import NOT_CLOSED
from gates.options import GateFamily
from tests.training.runs import MODEL, STEPS_PER_EPOCH, make_data, make_options, make_pruner, make_trainer
from training.pruner.module import HeadPruner
from training.scoring.scorers import Scores
from training.scoring.subject import ScoringContext

FAMILIES = get_args(GateFamily)
SAVED = (5, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 7, 2 * STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH + 3)
"""Steps after which checkpoints are kept: in every phase, and at the ends of two."""


class Watch(pl.Callback):
    """Notes the phase, the gates and the learning rates of every step."""

    def __init__(self):
        self.phases, self.modes, self.rates, self.open, self.log_alpha, self.steered = [], [], [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.phases.append(pl_module.phase(trainer.global_step))
        self.rates.append({group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        gates = pl_module.gates
        self.modes.append(gates.mode)
        self.open.append(float(gates.learned.open_probability().sum().detach()))
        self.log_alpha.append(gates.log_alpha.detach().clone())
        self.steered.append(gates.log_alpha in trainer.optimizers[0].state)


class Save(pl.Callback):
    """Keeps checkpoints of some steps in a folder."""

    def __init__(self, folder, steps=SAVED):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def fit(pruner=None, trainer=None, **more):
    pruner, trainer = pruner or make_pruner(), trainer or make_trainer()
    trainer.fit(pruner, make_data(), **more)
    return pruner


def state(pruner):
    return {name: tensor.clone() for name, tensor in pruner.state_dict().items() if "_extra_state" not in name}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


class Trained(NamedTuple):
    """A run that has ended."""

    pruner: HeadPruner
    start: torch.Tensor
    state: dict
    watch: Watch
    folder: Path

    def checkpoint(self, step):
        return self.folder / f"{step}.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Whole runs by their settings, each trained once; they are not to be changed."""
    done = {}

    def train(**settings):
        key = repr(sorted(settings.items()))
        if key not in done:
            pruner, watch, folder = make_pruner(**settings), Watch(), tmp_path_factory.mktemp("run")
            start = pruner.gates.log_alpha.detach().clone()
            fit(pruner, make_trainer(callbacks=[watch, Save(folder)]))
            done[key] = Trained(pruner, start, state(pruner), watch, folder)
        return done[key]

    return train


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.integration)


@pytest.mark.parametrize(
    ("budget", "expected", "retrain"),
    [
        (3, 3, 1.0),
        (0.5, 4, 1.0),
        (0, 0, 0.0),
        (8, 8, 0.0),
        ({"encoder": 2}, 2, 0.0),
        *(slow(*each) for each in ((3, 3, 0.0), (0.5, 4, 0.0), (0, 0, 1.0), (8, 8, 1.0), ({"encoder": 2}, 2, 1.0))),
    ],
)
def test_the_run_ends_with_exactly_the_budget(budget, expected, retrain):
    pruner = fit(make_pruner(budget=budget, retrain=retrain, finetune=0.0))
    assert pruner.gates.mode == "masked"
    assert pruner.gates.mask.sum() == expected
    assert set(pruner.gates.mask.tolist()) <= {0.0, 1.0}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("gate", "settings", "expected"),
    [
        *((gate, {}, 3) for gate in FAMILIES),
        ("hard-concrete", {"budget": {"encoder": 2}}, 2),
        ("straight-through-top-k", {"budget": 2, "minimum_per_layer": 1}, 2),
        *(slow(gate, {"budget": {"encoder": 2}}, 2) for gate in FAMILIES[1:]),
        *(slow(gate, {"budget": 2, "minimum_per_layer": 1}, 2) for gate in FAMILIES if gate != "straight-through-top-k"),
    ],
)
def test_every_family_ends_with_exactly_the_budget(gate, settings, expected, trained):
    found = trained(gate=gate, **settings)
    gates, steering = found.pruner.gates, found.pruner.steering
    assert gates.mask.sum() == expected
    assert torch.equal(gates.mask, steering.mask_within(gates.log_alpha.detach(), steering.budget))
    assert not torch.equal(gates.log_alpha, found.start)
    if "minimum_per_layer" in settings:
        assert [int(part.sum()) for part in gates.mask.split(4)] == [1, 1]


def test_the_straight_through_top_k_comes_down_to_the_budget():
    found, goals = [], []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if pl_module.gates.mode == "stochastic":
                with torch.no_grad():
                    found.append(int(pl_module.gates.learned().sum()))
                goals.append(sum(pl_module.goals(trainer.global_step)))

    fit(make_pruner(gate="straight-through-top-k", ramp=0.5), make_trainer(callbacks=[Note()]))
    assert found == goals
    assert found == [round(8 - 5 * min(1.0, (step + 1) / 8)) for step in range(STEPS_PER_EPOCH)]


def test_temperatures_and_rounding_follow_the_prune_phase():
    found = {}

    class Note(pl.Callback):
        def __init__(self, gate):
            self.course = found.setdefault(gate, [])

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            learned = pl_module.gates.learned
            if pl_module.gates.mode == "stochastic":
                self.course.append(
                    learned.temperature if isinstance(learned, RelaxedTopK) else (learned.stretch.temperature, learned.rounds)
                )

    relaxed = make_pruner(gate="relaxed-top-k", ramp=0.5)
    fit(relaxed, make_trainer(callbacks=[Note("relaxed")]))
    hard = make_pruner(anneal=0.05, straight_through_from=0.5)
    fit(hard, make_trainer(callbacks=[Note("hard")]))
    temperatures, rounds = zip(*found["hard"], strict=True)
    assert temperatures[0] == pytest.approx(0.33)
    assert temperatures[-1] == pytest.approx(0.05)
    factors = [later / earlier for earlier, later in itertools.pairwise(temperatures)]
    assert factors == pytest.approx([factors[0]] * 15)
    assert rounds == (False,) * 8 + (True,) * 8
    assert len(set(found["relaxed"][7:])) == 1
    assert found["relaxed"][7] == pytest.approx(END_TEMPERATURE)
    assert found["relaxed"][0] > found["relaxed"][1]
    assert hard.gates.mask.sum() == 3


@pytest.mark.parametrize("gate", FAMILIES)
def test_a_finetune_with_any_family_starts_every_family(gate, trained):
    other = FAMILIES[FAMILIES.index(gate) - 1]
    dense = trained(gate=gate).checkpoint(STEPS_PER_EPOCH)
    assert_same(state(fit(make_pruner(gate=other), ckpt_path=dense, weights_only=True)), trained(gate=other).state)


@pytest.mark.parametrize("settings", [{"budget": None}, {"budget": {"encoder": 2}}])
def test_a_finetune_serves_every_budget_and_the_price(settings, trained):
    dense = trained(gate="hard-concrete").checkpoint(STEPS_PER_EPOCH)
    found = fit(make_pruner(**settings), ckpt_path=dense, weights_only=True)
    assert_same(state(found), trained(gate="hard-concrete", **settings).state)


@pytest.mark.parametrize("gate", ["clamped-linear", "relaxed-top-k"])
def test_resuming_other_families_gives_the_same_result(tmp_path, gate):
    settings = {"gate": gate, "price": 0.5, "gate_learning_rate": 0.2}
    at = STEPS_PER_EPOCH + 9
    whole = fit(make_pruner(**settings), make_trainer(callbacks=[Save(tmp_path, [at])]))
    torch.manual_seed(99)
    resumed = fit(make_pruner(**settings), ckpt_path=tmp_path / f"{at}.ckpt", weights_only=True)
    assert_same(state(resumed), state(whole))
    assert torch.equal(whole.closing_step, resumed.closing_step)
    assert bool((whole.closing_step != NOT_CLOSED).any())


@pytest.mark.parametrize("gate", ["hard-concrete", "clamped-linear"])
def test_the_closing_step_is_when_a_gate_closed_for_good(gate):
    history = {}

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if pl_module.gates.mode == "stochastic":
                history[trainer.global_step] = pl_module.gates.values()
            if trainer.global_step == STEPS_PER_EPOCH + 1:  # so that they do not all close together
                with torch.no_grad():
                    pl_module.gates.log_alpha.add_(torch.linspace(-1, 1, 8))

    settings = {"price": 0.3, "gate_learning_rate": 0.2, "budget": None, "prune": 2.0, "retrain": 0.0}
    pruner = fit(make_pruner(gate=gate, **settings), make_trainer(callbacks=[Note()]))
    for gate_number, step in enumerate(pruner.closing_step.tolist()):
        closed = [at for at, values in history.items() if values[gate_number] == 0]
        is_closed = history[max(history)][gate_number] == 0
        assert (step != NOT_CLOSED) == is_closed
        if is_closed:
            assert all(at in closed for at in range(step, max(history) + 1))
            assert step - 1 not in closed
    assert len(set(pruner.closing_step.tolist())) > 3
    assert torch.equal(pruner.gates.mask == 0, pruner.closing_step != NOT_CLOSED)


def test_pipelined_the_backbone_rests_while_gates_are_learned():
    weights, gates = {}, {}

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            weights[trainer.global_step] = pl_module.backbone.classifier.weight.detach().clone()
            gates[trainer.global_step] = pl_module.gates.log_alpha.detach().clone()

    n = STEPS_PER_EPOCH
    pruner = fit(make_pruner(pipelined=True), make_trainer(callbacks=[Note()]))
    assert torch.equal(weights[n], weights[2 * n])
    assert not torch.equal(weights[n - 1], weights[n])
    assert not torch.equal(weights[2 * n], weights[2 * n + 1])
    assert not torch.equal(gates[n], gates[2 * n])
    assert pruner.gates.mask.sum() == 3
    fixed = make_pruner(pipelined=True)
    with fixed.fixed_to(pruner.gates.mask.clone()):
        fit(fixed, make_trainer(callbacks=[Note()], max_steps=2 * n))
    assert not torch.equal(weights[n], weights[2 * n])


def test_at_rest_the_backbone_has_no_dropout_and_no_gradients_of_its_own():
    seen = {}

    class Note(pl.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            backbone = pl_module.backbone
            grads = [parameter.grad is not None for parameter in backbone.parameters()]
            seen[trainer.global_step] = (backbone.training, any(grads), backbone.classifier.weight.requires_grad)

    n = STEPS_PER_EPOCH
    pruner = fit(make_pruner(pipelined=True, freeze=["classifier"]), make_trainer(callbacks=[Note()]))
    phases = {"finetune": range(1, n), "prune": range(n + 1, 2 * n), "retrain": range(2 * n + 1, 3 * n)}
    for phase, steps in phases.items():
        assert {seen[step] for step in steps} == {(phase != "prune", phase != "prune", False)}
    assert not pruner.backbone.classifier.weight.requires_grad  # frozen by the user, whatever woke up
    assert pruner.backbone.bert.embeddings.word_embeddings.weight.requires_grad


def test_one_kernel_steps_all_parameters_unless_gradients_are_scaled(monkeypatch):
    class Note(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            found.append([group["fused"] for group in trainer.optimizers[0].param_groups])

    found = []
    fit(trainer=make_trainer(callbacks=[Note()], max_steps=1))
    trainer = make_trainer(callbacks=[Note()], max_steps=1)
    monkeypatch.setattr(trainer.precision_plugin, "scaler", object(), raising=False)
    fit(trainer=trainer)
    assert found == [[True] * 3, [False] * 3]


def test_phases_modes_and_learning_rates(trained):
    watch, n = trained(gate="hard-concrete").watch, STEPS_PER_EPOCH
    assert watch.phases == ["finetune"] * n + ["prune"] * n + ["retrain"] * n
    assert watch.modes == ["open"] * n + ["stochastic"] * n + ["masked"] * n
    gate_rates = [rates["gates"] for rates in watch.rates]
    assert gate_rates == [0.0] * n + [0.05] * n + [0.0] * n
    backbone = [rates["backbone"] for rates in watch.rates]
    for cycle in (backbone[:n], backbone[2 * n :]):  # of the dense model to its end, and when weights train again
        peak = cycle.index(max(cycle))
        assert peak == 0
        assert cycle == sorted(cycle, reverse=True)
        assert cycle[-1] == pytest.approx(1e-3 / (n - 1), rel=1e-3)
    assert backbone[:n] == backbone[2 * n :]


def test_the_price_holds_the_expectation_to_its_course(trained):
    found, n = trained(gate="hard-concrete"), STEPS_PER_EPOCH
    prune = found.watch.open[n : 2 * n - 1]
    final = found.pruner.steering.budget_controller.schedule.goals(1.0)[0]
    assert all(later <= earlier + 1e-4 for earlier, later in itertools.pairwise(prune))
    assert prune[-1] == pytest.approx(final, abs=1e-3)
    assert 3 < final < 3.2


@pytest.mark.parametrize("score", ["his", "obs"])
def test_gates_start_apart_as_a_score_ranks_them(score):
    """Right before the first prune step, log_alpha ranks the heads as the score of the dense model does."""
    starts = {}

    class AtStart(pl.Callback):
        def __init__(self, spread):
            self.spread = spread

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            if trainer.global_step == STEPS_PER_EPOCH and self.spread not in starts:
                starts[self.spread] = pl_module.gates.log_alpha.detach().clone()
                scores = Scores(ScoringContext(pl_module, trainer.datamodule, trainer), {})
                starts["scores"] = scores.ranking(score, seed=0)

    for spread in (0.0, 0.3):
        fit(
            make_pruner(init_spread=spread, init_score=score),
            make_trainer(callbacks=[AtStart(spread)], max_steps=STEPS_PER_EPOCH + 1),
        )
    assert torch.equal(starts[0.0], torch.full((8,), 2.5))
    assert torch.equal(starts[0.3].argsort(), starts["scores"].argsort())
    assert starts[0.3].std() == pytest.approx(0.3, rel=1e-3)
    assert starts[0.3].mean() == pytest.approx(2.5, abs=1e-5)
    for gate, mean, spread in (("relaxed-top-k", 0.0, 0.3), ("clamped-linear", 1.0, 0.0)):
        starts.clear()
        first_step = make_trainer(callbacks=[AtStart("here")], max_steps=STEPS_PER_EPOCH + 1)
        fit(make_pruner(init_spread=0.3, init_score=score, gate=gate), first_step)
        assert starts["here"].mean() == pytest.approx(mean, abs=1e-5)
        assert starts["here"].std() == pytest.approx(spread, abs=1e-3)


def test_gates_rest_outside_the_prune_phase(trained):
    found, n = trained(gate="hard-concrete"), STEPS_PER_EPOCH
    log_alpha = found.watch.log_alpha
    assert all(torch.equal(at, found.start) for at in log_alpha[:n])
    assert found.watch.steered == [False] * n + [True] * 2 * n  # no zero gradients before, which would count in Adam
    assert not torch.equal(log_alpha[n], found.start)
    assert all(torch.equal(at, log_alpha[2 * n - 1]) for at in log_alpha[2 * n :])


def test_a_price_closes_heads_and_a_higher_one_closes_more():
    settings = {"budget": None, "prune": 2.0, "finetune": 0.0, "retrain": 0.0, "gate_learning_rate": 0.25}
    kept = [int(fit(make_pruner(price=price, **settings)).gates.mask.sum()) for price in (0.0, 0.05, 5.0)]
    assert kept[0] == 8
    assert kept[0] > kept[2]
    assert kept[1] >= kept[2] == 0


def test_frozen_parameters_stay_and_gates_still_learn():
    pruner = make_pruner(freeze=[".*"])
    before, start = state(pruner), pruner.gates.log_alpha.detach().clone()
    fit(pruner)
    for name, tensor in state(pruner).items():
        if name.startswith("backbone."):
            assert torch.equal(tensor, before[name])
    assert not torch.equal(pruner.gates.log_alpha, start)


def test_freezing_by_pattern():
    pruner = make_pruner(freeze=["embeddings", r"layer\.0\."])
    frozen = {name for name, p in pruner.backbone.named_parameters() if not p.requires_grad}
    expected = {name for name, _ in pruner.backbone.named_parameters() if "embeddings" in name or "layer.0." in name}
    assert frozen == expected
    with pytest.raises(GateError, match="'decoder' matches no parameter"):
        make_pruner(freeze=["decoder"])


@pytest.mark.parametrize(
    "patterns",
    [{"freeze": [".+"]}, {"freeze_while_pruning": ["bert", "class"]}, {"freeze": ["bert"], "freeze_while_pruning": ["^c"]}],
)
def test_patterns_that_fix_everything_are_refused_unless_they_say_so(patterns):
    said = rf"every parameter of BertForSequenceClassification is fixed by .*; give --model.{list(patterns)[-1]} '\["
    with pytest.raises(GateError, match=said):
        make_pruner(**patterns)
    make_pruner(freeze=["bert"])


def test_clipping_leaves_the_gates_alone():
    norms = {}
    for clip in (None, 1e-6):
        pruner = make_pruner(finetune=0.0, pipelined=False)
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
    """Without dropout, in fine-tuning: two batches of 8 accumulated are one of 16 of the same examples."""
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
        pruner = make_pruner(from_scratch=model, finetune=100.0, prune=0.1, retrain=0.0)
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


def test_keeping_checkpoints_changes_nothing(trained):
    assert_same(state(fit(make_pruner())), trained(gate="hard-concrete").state)


@pytest.mark.parametrize("at", SAVED)
def test_resuming_gives_the_same_result(at, trained):
    whole = trained(gate="hard-concrete")
    torch.manual_seed(99)  # whatever happened before
    resumed = fit(make_pruner(), ckpt_path=whole.checkpoint(at), weights_only=True)
    assert_same(state(resumed), whole.state)


def test_a_resumed_run_has_its_own_learning_rates(trained):
    rates = {"gate_learning_rate": 0.2, "learning_rate": 2e-3}
    dense, watch, unbroken = trained(gate="hard-concrete").checkpoint(STEPS_PER_EPOCH), Watch(), Watch()
    fit(make_pruner(**rates), make_trainer(callbacks=[watch]), ckpt_path=dense, weights_only=True)
    fit(make_pruner(**rates), make_trainer(callbacks=[unbroken]))
    assert watch.rates == unbroken.rates[STEPS_PER_EPOCH:]
    assert watch.rates[0]["gates"] == 0.2


def test_the_seed_decides_the_run(trained):
    """That the same seed gives the same run is in test_keeping_checkpoints_changes_nothing."""
    first, other = trained(gate="hard-concrete").pruner, fit(make_pruner(seed=1))
    assert not torch.equal(first.gates.log_alpha, other.gates.log_alpha)


def test_bf16_mixed_keeps_gates_in_float32():
    pruner = fit(trainer=make_trainer(precision="bf16-mixed"))
    assert pruner.gates.log_alpha.dtype == torch.float32
    assert pruner.gates.mask.sum() == 3


@pytest.mark.parametrize(
    ("init_spread", "said"),
    [
        (0.0, r"the loss is nan at step 0.*--ckpt_path"),
        (1.0, r"the loss of example 0 is nan, so no head has a score; .*a learning rate that was too high"),
    ],
)
def test_nan_loss_stops_with_advice(init_spread, said):
    pruner = make_pruner(finetune=0.0, init_spread=init_spread)
    with torch.no_grad():
        pruner.backbone.classifier.bias.fill_(float("nan"))
    with pytest.raises(GateError, match=said):
        fit(pruner)


def test_fixed_values_are_trained_with_from_the_first_step_of_their_block(trained):
    """In all phases; whoever wants a dense fine-tuning first goes on from its end, as a comparison does."""
    mask, n = torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1]), STEPS_PER_EPOCH
    dense = trained(gate="hard-concrete").checkpoint(n)
    for steps, more in ((3 * n, {}), (2 * n, {"ckpt_path": dense, "weights_only": True})):
        pruner, watch = make_pruner(), Watch()
        start = pruner.gates.log_alpha.detach().clone()
        with pruner.fixed_to(mask):
            fit(pruner, make_trainer(callbacks=[watch]), **more)
        assert watch.modes == ["masked"] * steps
        assert torch.equal(pruner.gates.mask, mask)
        assert torch.equal(pruner.gates.log_alpha, start)


def test_values_are_fixed_for_their_block_alone(trained):
    pruner, dense = make_pruner(), trained(gate="hard-concrete").checkpoint(STEPS_PER_EPOCH)
    with pytest.raises(RuntimeError, match="stopped"), pruner.fixed_to(torch.zeros(8)):
        raise RuntimeError("stopped")
    found = fit(pruner, ckpt_path=dense, weights_only=True)
    assert_same(state(found), trained(gate="hard-concrete").state)


def test_masked_heads_do_not_train():
    pruner = make_pruner(finetune=0.0, weight_decay=0.0)
    rows = pruner.backbone.bert.encoder.layer[0].attention.self.query.weight
    before = rows.detach().clone()
    with pruner.fixed_to(torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1])):
        fit(pruner)
    assert torch.equal(rows[:4], before[:4])
    assert not torch.equal(rows[4:], before[4:])


def test_an_unknown_backbone(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    data = make_data()
    for name in (str(tmp_path), str(tmp_path / "missing"), "nobody/nothing"):
        with pytest.raises(GateError, match="cannot load a model"):
            HeadPruner(make_options(backbone=name, from_scratch=None)).build(data.task, data.tokenizer)


def test_building_twice_changes_nothing():
    pruner = make_pruner()
    backbone = copy.copy(pruner.backbone)
    data = make_data()
    pruner.build(data.task, data.tokenizer)
    assert pruner.backbone.state_dict().keys() == backbone.state_dict().keys()
    assert pruner.gates.is_attached
