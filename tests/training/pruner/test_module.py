import itertools
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
import pytorch_lightning as pl
import torch

from gates.errors import GateError
from gates.gating.families import RelaxedTopK
from gates.gating.schedule import NOT_CLOSED
from gates.options import GateFamily
from tests.training.pruner.fits import Each, N, Save, assert_same, fit, make_data, state
from tests.training.runs import MODEL, make_pruner, make_trainer
from training.pruner.module import HeadPruner
from training.scoring.scorers import Scores
from training.scoring.subject import ScoringContext

FAMILIES = get_args(GateFamily)
SAVED = (N, N + 5, 2 * N, 2 * N + 3)
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
            fit(pruner, watch, Save(folder, *SAVED))
            done[key] = Trained(pruner, start, state(pruner), watch, folder)
        return done[key]

    return train


@pytest.mark.parametrize(
    ("gate", "settings", "expected"),
    [
        *((gate, {}, 3) for gate in FAMILIES),
        ("clamped-linear", {"budget": {"encoder": 2}}, 2),
        ("straight-through-top-k", {"budget": 2, "minimum_per_layer": 1}, 2),
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


def test_temperatures_and_rounding_follow_the_prune_phase():
    relaxed, hard = [], []

    def note(course, names):
        def noted(trainer, pruner):
            if pruner.gates.mode == "stochastic":
                course.append([getattr(pruner.gates.learned, name) for name in names])

        return Each(noted)

    fit(make_pruner(gate="relaxed-top-k", ramp=0.5), note(relaxed, ["temperature"]))
    fit(make_pruner(anneal=0.05, straight_through_from=0.5), note(hard, ["stretch", "rounds"]))
    temperatures, rounds = [stretch.temperature for stretch, _ in hard], [rounds for _, rounds in hard]
    assert temperatures[0] == pytest.approx(0.33)
    assert temperatures[-1] == pytest.approx(0.05)
    factors = [later / earlier for earlier, later in itertools.pairwise(temperatures)]
    assert factors == pytest.approx([factors[0]] * (N - 1))
    assert rounds == [False] * (N // 2) + [True] * (N // 2)
    relaxed = [temperature for (temperature,) in relaxed]
    assert len(set(relaxed[N // 2 - 1 :])) == 1
    assert relaxed[N // 2 - 1] == pytest.approx(RelaxedTopK.end_temperature)
    assert relaxed[0] > relaxed[1]


@pytest.mark.parametrize("gate", ["hard-concrete", "clamped-linear"])
def test_a_finetune_with_any_family_starts_every_family(gate, trained):
    other = FAMILIES[FAMILIES.index(gate) - 1]
    dense = trained(gate=gate).checkpoint(N)
    assert_same(state(fit(make_pruner(gate=other), ckpt_path=dense)), trained(gate=other).state)


def test_resuming_gates_with_a_memory_gives_the_same_result(tmp_path):
    settings = {"gate": "clamped-linear", "price": 0.5, "gate_learning_rate": 0.4}
    whole = fit(make_pruner(**settings), Save(tmp_path, N + 5))
    torch.manual_seed(99)
    resumed = fit(make_pruner(**settings), ckpt_path=tmp_path / f"{N + 5}.ckpt")
    assert_same(state(resumed), state(whole))
    assert torch.equal(whole.closing_step, resumed.closing_step)
    assert bool((whole.closing_step != NOT_CLOSED).any())


@pytest.mark.parametrize("gate", ["hard-concrete", "clamped-linear"])
def test_the_closing_step_is_when_a_gate_closed_for_good(gate):
    history = {}

    def note(trainer, pruner):
        if pruner.gates.mode == "stochastic":
            history[trainer.global_step] = pruner.gates.values()
        if trainer.global_step == N + 1:  # so that they do not all close together
            with torch.no_grad():
                pruner.gates.log_alpha.add_(torch.linspace(-1, 1, 8))

    settings = {"price": 0.3, "gate_learning_rate": 0.2, "budget": None, "prune": 4.0, "retrain": 0.0}
    pruner = fit(make_pruner(gate=gate, **settings), Each(note))
    for gate_number, step in enumerate(pruner.closing_step.tolist()):
        closed = [at for at, values in history.items() if values[gate_number] == 0]
        is_closed = history[max(history)][gate_number] == 0
        assert (step != NOT_CLOSED) == is_closed
        if is_closed:
            assert all(at in closed for at in range(step, max(history) + 1))
            assert step - 1 not in closed
    assert len(set(pruner.closing_step.tolist())) > 3
    assert torch.equal(pruner.gates.mask == 0, pruner.closing_step != NOT_CLOSED)


def test_pipelined_the_backbone_is_frozen_while_gates_are_learned():
    """It has no dropout and no gradients then; parameters that the user froze stay so afterwards."""
    weights, gates, seen = {}, {}, {}

    def note(trainer, pruner):
        weights[trainer.global_step] = pruner.backbone.bert.pooler.dense.weight.detach().clone()
        gates[trainer.global_step] = pruner.gates.log_alpha.detach().clone()

    class Note(pl.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            backbone = pl_module.backbone
            grads = [parameter.grad is not None for parameter in backbone.parameters()]
            seen[trainer.global_step] = (backbone.training, any(grads), backbone.classifier.weight.requires_grad)

    pruner = fit(make_pruner(pipelined=True, freeze=["classifier"]), Each(note), Note())
    assert torch.equal(weights[N], weights[2 * N])
    assert not torch.equal(weights[N - 1], weights[N])
    assert not torch.equal(weights[2 * N], weights[2 * N + 1])
    assert not torch.equal(gates[N], gates[2 * N])
    phases = {"finetune": range(1, N), "prune": range(N + 1, 2 * N), "retrain": range(2 * N + 1, 3 * N)}
    for phase, steps in phases.items():
        assert {seen[step] for step in steps} == {(phase != "prune", phase != "prune", False)}
    assert not pruner.backbone.classifier.weight.requires_grad
    assert pruner.backbone.bert.embeddings.word_embeddings.weight.requires_grad
    fit(make_pruner(pipelined=True), Each(note), fixed=pruner.gates.mask.clone(), max_steps=2 * N)
    assert not torch.equal(weights[N], weights[2 * N])


def test_phases_modes_and_learning_rates(trained):
    watch = trained(gate="hard-concrete").watch
    assert watch.phases == ["finetune"] * N + ["prune"] * N + ["retrain"] * N
    assert watch.modes == ["open"] * N + ["stochastic"] * N + ["masked"] * N
    assert [rates["gates"] for rates in watch.rates] == [0.0] * N + [0.05] * N + [0.0] * N
    backbone = [rates["backbone"] for rates in watch.rates]
    cycle = backbone[:N]  # of the dense model to its end; the next one is when weights train again
    assert cycle.index(max(cycle)) == 0
    assert cycle == sorted(cycle, reverse=True)
    assert cycle[-1] == pytest.approx(1e-3 / (N - 1), rel=1e-3)
    assert cycle == backbone[2 * N :]


@pytest.mark.parametrize(
    ("score", "gate", "mean", "spread"),
    [
        ("his", "hard-concrete", 2.5, 0.3),
        ("obs", "hard-concrete", 2.5, 0.3),
        ("his", "relaxed-top-k", 0.0, 0.3),
        ("his", "clamped-linear", 1.0, 0.0),
    ],
)
def test_gates_start_apart_as_a_score_ranks_them(score, gate, mean, spread):
    """Right before the first prune step, log_alpha ranks the heads as the score of the dense model does."""
    starts = {}

    class AtStart(pl.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            if trainer.global_step == N and not starts:
                starts["log_alpha"] = pl_module.gates.log_alpha.detach().clone()
                starts["scores"] = Scores(ScoringContext(pl_module, trainer.datamodule, trainer)).ranking(score, seed=0)

    fit(make_pruner(init_spread=0.3, init_score=score, gate=gate), AtStart(), max_steps=N + 1)
    assert starts["log_alpha"].mean() == pytest.approx(mean, abs=1e-5)
    assert starts["log_alpha"].std() == pytest.approx(spread, abs=1e-3)
    if spread:
        assert torch.equal(starts["log_alpha"].argsort(), starts["scores"].argsort())


def test_gates_rest_outside_the_prune_phase(trained):
    found, n = trained(gate="hard-concrete"), N
    log_alpha = found.watch.log_alpha
    assert all(torch.equal(at, found.start) for at in log_alpha[:n])
    assert found.watch.steered == [False] * n + [True] * 2 * n  # no zero gradients before, which would count in Adam
    assert not torch.equal(log_alpha[n], found.start)
    assert all(torch.equal(at, log_alpha[2 * n - 1]) for at in log_alpha[2 * n :])


def test_freezing_by_pattern():
    pruner = make_pruner(freeze=["embeddings", r"layer\.0\."])
    frozen = {name for name, p in pruner.backbone.named_parameters() if not p.requires_grad}
    expected = {name for name, _ in pruner.backbone.named_parameters() if "embeddings" in name or "layer.0." in name}
    assert frozen == expected


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
        found = []

        class Note(pl.Callback):
            def on_before_zero_grad(self, trainer, pl_module, optimizer, found=found):
                if pl_module.gates.log_alpha.grad is not None:
                    backbone = torch.stack([p.grad.norm() for p in pl_module.backbone.parameters() if p.grad is not None])
                    found.append((float(pl_module.gates.log_alpha.grad.norm()), float(backbone.norm())))

        fit(make_pruner(finetune=0.0, pipelined=False), Note(), gradient_clip_val=clip, limit_train_batches=2)
        norms[clip] = found[-1]
    assert norms[None][1] > 1e-3
    assert norms[1e-6][1] <= 1.1e-6
    assert norms[1e-6][0] > 1e-6


@pytest.mark.parametrize("at", SAVED)
def test_resuming_gives_the_same_result(at, trained):
    whole = trained(gate="hard-concrete")
    torch.manual_seed(99)  # whatever happened before
    resumed = fit(make_pruner(), ckpt_path=whole.checkpoint(at))
    assert_same(state(resumed), whole.state)


def test_a_resumed_run_has_its_own_learning_rates(trained):
    rates = {"gate_learning_rate": 0.2, "learning_rate": 2e-3}
    watch, unbroken = Watch(), Watch()
    fit(make_pruner(**rates), watch, ckpt_path=trained(gate="hard-concrete").checkpoint(N))
    fit(make_pruner(**rates), unbroken)
    assert watch.rates == unbroken.rates[N:]
    assert watch.rates[0]["gates"] == 0.2


def test_bf16_mixed_keeps_gates_in_float32():
    pruner = fit(precision="bf16-mixed")
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
    """In all phases; a dense fine-tuning before it is a run of its own, whose end is continued, as in a comparison."""
    mask = torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1])
    for steps, start in ((3 * N, None), (2 * N, trained(gate="hard-concrete").checkpoint(N))):
        pruner, watch = make_pruner(), Watch()
        before = pruner.gates.log_alpha.detach().clone()
        fit(pruner, watch, fixed=mask, ckpt_path=start)
        assert watch.modes == ["masked"] * steps
        assert torch.equal(pruner.gates.mask, mask)
        assert torch.equal(pruner.gates.log_alpha, before)


def test_values_are_fixed_for_their_block_alone(trained):
    pruner = make_pruner()
    with pytest.raises(RuntimeError, match="stopped"), pruner.fixed_to(torch.zeros(8)):
        raise RuntimeError("stopped")
    found = fit(pruner, ckpt_path=trained(gate="hard-concrete").checkpoint(N))
    assert_same(state(found), trained(gate="hard-concrete").state)


def test_masked_heads_do_not_train():
    pruner = make_pruner(finetune=0.0, weight_decay=0.0)
    rows = pruner.backbone.bert.encoder.layer[0].attention.self.query.weight
    before = rows.detach().clone()
    fit(pruner, fixed=torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1]))
    assert torch.equal(rows[:4], before[:4])
    assert not torch.equal(rows[4:], before[4:])


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


def test_frozen_parameters_stay_and_gates_still_learn():
    pruner = make_pruner(freeze=[".*"])
    before, start = state(pruner), pruner.gates.log_alpha.detach().clone()
    fit(pruner)
    for name, tensor in state(pruner).items():
        if name.startswith("backbone."):
            assert torch.equal(tensor, before[name])
    assert not torch.equal(pruner.gates.log_alpha, start)


@pytest.mark.parametrize("settings", [{"budget": None}, {"budget": {"encoder": 2}}])
def test_a_finetune_serves_every_budget_and_the_price(settings, trained):
    dense = trained(gate="hard-concrete").checkpoint(N)
    found = fit(make_pruner(**settings), ckpt_path=dense)
    assert_same(state(found), trained(gate="hard-concrete", **settings).state)
