"""A budget for gates, in a model without training: against the formulas."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gates.errors import GateError
from gates.gating.budget import Budget
from gates.gating.hard_concrete import LOG_ALPHA_LIMIT, Stretch, open_probability
from gates.gating.head_gates import HeadGates
from gates.gating.latency import TimeLimit
from gates.gating.schedule import BudgetController, BudgetSchedule, ramped, rate_of_gates_, set_apart_
from gates.model import GateConfig, get_gated_model
from gates.options import TOP_K_FAMILIES
from gates.scores.importance import normalise_by_layer
from tests.gates.latency_tables import table_of
from tests.models import build, inputs

REACHABLE = open_probability(torch.tensor([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT])).tolist()
"""Open probabilities of a gate at its lower and its upper limit."""


def gated_model(name="bert", **config):
    """Gates with a budget, apart from each other."""
    gated = get_gated_model(build(name).train(), GateConfig(**config))
    with torch.no_grad():
        gated.gates.log_alpha.add_(torch.linspace(-1, 1, gated.gates.size))
    return gated


def expected(gated, kind=None):
    probability, kinds = gated.gates.open_probability().detach(), gated.gates.kind_index()
    return float(probability[kinds == kind].sum() if kind is not None else probability.sum())


@pytest.mark.parametrize("stretch", [Stretch(), Stretch(0.8, -0.4, 1.3)])
def test_a_schedule_goes_straight_to_the_expectation_of_gates_at_their_limits(stretch):
    schedule = BudgetSchedule.of_heads(Budget(8, {}), {"encoder": 32}, stretch, start=0.9)
    log_alpha = torch.full((32,), -LOG_ALPHA_LIMIT)
    log_alpha[:8] = LOG_ALPHA_LIMIT
    last = float(open_probability(log_alpha, stretch).sum())
    for progress, goal in ((0.0, 28.8), (1.0, last), (0.25, 28.8 + 0.25 * (last - 28.8)), (-0.5, 28.8), (7.0, last)):
        assert schedule.goals(progress) == [pytest.approx(goal, abs=1e-4)]
    assert (schedule.kinds, schedule.heads) == ([], [32])


def test_a_schedule_has_a_goal_for_each_budgeted_kind():
    schedule = BudgetSchedule.of_heads(
        Budget(20, {"encoder": 2, "cross": 6}), {"encoder": 8, "decoder": 12, "cross": 12}, Stretch()
    )
    assert (schedule.kinds, schedule.heads) == (["encoder", "cross"], [8, 12])
    assert schedule.goals(0.0) == [8.0, 12.0]
    ends = [kept * REACHABLE[1] + (heads - kept) * REACHABLE[0] for kept, heads in ((2, 8), (6, 12))]
    assert schedule.goals(1.0) == pytest.approx(ends)


def test_a_step_brings_the_expectation_to_a_straight_line_from_the_start_to_the_budget():
    gated = gated_model(budget=3, ramp=0.5)
    start = 8 * float(open_probability(torch.tensor(2.5)))
    end = 3 * REACHABLE[1] + 5 * REACHABLE[0]
    ranking = gated.gates.log_alpha.argsort().tolist()
    for progress, done in ((0.1, 0.2), (0.25, 0.5), (0.5, 1.0), (0.75, 1.0), (1.0, 1.0)):
        gated.step_(progress)
        assert expected(gated) == pytest.approx(start + done * (end - start), abs=1e-3)
        if done < 1:
            assert gated.gates.log_alpha.argsort().tolist() == ranking
    assert int(gated.fix_mask_().sum()) == 3


def test_a_budget_per_kind_holds_each_kind_and_leaves_the_others_whole():
    gated = gated_model("marian", budget={"encoder": 2, "cross": 0.5})
    gated.step_(1.0)
    assert expected(gated, 0) == pytest.approx(2 * REACHABLE[1] + 6 * REACHABLE[0], abs=1e-3)
    assert expected(gated, 2) == pytest.approx(6 * REACHABLE[1] + 6 * REACHABLE[0], abs=1e-3)
    assert expected(gated, 1) == 12
    gated.fix_mask_()
    assert {kind: sum(counts) for kind, counts in gated.open_heads().items()} == {"encoder": 2, "decoder": 12, "cross": 6}


def test_every_layer_keeps_its_minimum():
    gated = gated_model(budget=4, minimum_per_layer=1)  # without one, all of them would be of the second layer
    assert gated.mask().view(2, 4).sum(1).tolist() == [1, 3]
    assert gated_model(budget=4).mask().view(2, 4).sum(1).tolist() == [0, 4]


def test_once_fixed_nothing_moves():
    gated = gated_model(budget=3)
    mask, before = gated.fix_mask_(), gated.gates.log_alpha.detach().clone()
    gated.step_(1.0)
    assert torch.equal(gated.gates.log_alpha.detach(), before)
    assert torch.equal(gated.mask(), mask)


@pytest.mark.parametrize(("family", "values"), [("straight-through-top-k", [8, 6, 3]), ("relaxed-top-k", [10.0, 1.0, 0.1])])
def test_the_top_k_families_go_with_the_progress(family, values):
    gated = gated_model(family=family, budget=3, ramp=1.0)
    found = []
    for progress in (0.0, 0.5, 1.0):
        gated.step_(progress)
        learned = gated.gates.learned
        found.append(learned.current_budget().total if family.startswith("straight") else learned.temperature)
    assert found == pytest.approx(values)


def test_a_budget_given_later_is_the_same():
    first, later = gated_model(budget=3), gated_model()
    log_alpha, generator = later.gates.log_alpha, torch.Generator().manual_seed(1)
    later.gates.generator = generator
    assert later.set_budget_(3) is later
    assert later.gates.log_alpha is log_alpha
    assert later.gates.generator is generator
    assert later.gate_config == first.gate_config
    for gated in (first, later):
        gated.step_(0.4)
    assert torch.equal(first.gates.log_alpha, later.gates.log_alpha)
    assert later(**inputs("bert")).logits.requires_grad


@pytest.mark.parametrize(
    ("done", "length", "value"), [(0, 4, 0.0), (1, 4, 0.25), (4, 4, 1.0), (9, 4, 1.0), (1, 0.3, 1.0), (1, 0, 1.0)]
)
def test_a_ramp(done, length, value):
    assert ramped(done, length) == value


def test_gates_start_apart_by_standard_deviations_of_the_logarithm():
    gates = gated_model().gates
    his = torch.tensor([1.0, 2, 3, 4, 10, 20, 30, 40])
    with torch.no_grad():
        gates.log_alpha.zero_()
    set_apart_(gates, normalise_by_layer(his, gates.layer_index()), 1.5)
    log_alpha = gates.log_alpha.detach()
    assert log_alpha[:4].tolist() == pytest.approx(log_alpha[4:].tolist())  # relative to the layer
    assert log_alpha.std().item() == pytest.approx(1.5, rel=1e-4)
    assert log_alpha[:4].diff().tolist() == pytest.approx(
        (1.5 * torch.tensor([1.0, 2, 3, 4]).log().diff() / torch.tensor([1.0, 2, 3, 4] * 2).log().std()).tolist(), rel=1e-4
    )


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: gated_model(budget=9), "the budget is 9; expected a whole number from 0 to 8"),
        (lambda: gated_model(budget=3, minimum_per_layer=2), "needs 4 heads"),
        (lambda: gated_model(budget=3, kinds=["encoder"]), "or remove kinds"),
        (lambda: gated_model(budget=3, ramp=0.0), "ramp is 0.0"),
        (lambda: gated_model(budget=3, minimum_per_layer=-1), "minimum_per_layer is -1"),
        (lambda: gated_model().step_(0.5), r"step_ needs a budget, but there is none; give one"),
        (lambda: gated_model(budget=3).step_(1.2), "progress is 1.2; expected"),
        (lambda: gated_model(budget=3).step_(-0.5), "progress is -0.5; expected"),
        (lambda: gated_model(budget=3).step_(float("nan")), "progress is nan; expected"),
        (lambda: gated_model().penalty(-0.1), "the price of an open head is -0.1; expected a number of at least 0"),
        (lambda: gated_model().penalty("dear"), "the price of an open head is 'dear'; expected a number"),
        (lambda: gated_model(budget=3).penalty(0.1), "budget of 3, so they need no price"),
        (lambda: gated_model(budget=3).prune_and_unload(), "8 of 8 are above 0; call fix_mask_"),
        (lambda: gated_model().start_from_(torch.ones(7)), r"shape \[7\]; expected one for each of 8 heads"),
        (lambda: gated_model().start_from_(torch.linspace(1, -1, 8)), r"the score of head 4 is -0\.142857; expected"),
        (lambda: gated_model().start_from_(torch.full((8,), torch.inf), by_layer=False), "the score of head 0 is inf"),
    ],
)
def test_what_cannot_be_is_refused(act, message):
    with pytest.raises(GateError, match=message):
        act()


def test_a_budget_that_is_refused_changes_nothing():
    gated = gated_model()
    gates, config = gated.gates, gated.gate_config
    with pytest.raises(GateError, match="the budget is 9; expected"):
        gated.set_budget_(9)
    assert gated.gates is gates
    assert gates.is_attached
    assert (gated.gate_config, gated.steering) == (config, None)


def steered(family="hard-concrete", **options):
    gates = HeadGates(build("bert"), family=family, budget=3 if family in TOP_K_FAMILIES else None)
    return gates, BudgetController(gates, 3, **options)


def test_by_default_the_budget_is_reached_at_the_end_and_layers_have_no_minimum():
    gates, steering = steered("straight-through-top-k")
    steering.step_(0.5)
    assert gates.learned.progress == 0.5
    with torch.no_grad():
        gates.log_alpha.copy_(torch.arange(8.0))
    assert steering.mask().tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("family", ["relaxed-top-k", "clamped-linear"])
def test_a_schedule_that_holds_no_gates_sets_out_from_all(family):
    _, steering = steered(family)
    assert not steering.is_enforced
    assert steering.goals(0.0) == pytest.approx([8.0])


def test_at_a_ramp_of_0_gates_are_only_kept_within_their_limits():
    """Also where the schedule sets out from elsewhere than the gates."""
    gates, steering = steered(start=0.3)
    wild = torch.tensor([-50.0, -1, 0, 1, 2, 3, 4, 50])
    with torch.no_grad():
        gates.log_alpha.copy_(wild)
    steering.enforce_(0.0)
    assert torch.equal(gates.log_alpha.detach(), wild.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT))


def test_gates_that_pay_a_price_are_slowed_beyond_their_ends():
    gates, steering = steered("clamped-linear")
    gates.train().learned()
    with torch.no_grad():
        gates.log_alpha.fill_(-3.0)
    steering.enforce_(1.0)
    assert bool((gates.log_alpha.abs() < 1e-3).all())


def test_heads_without_importance_start_low_and_equal_ones_together():
    gates, _ = steered()
    before = gates.log_alpha.detach().clone()
    set_apart_(gates, torch.full((8,), 2.0), 1.5)
    assert torch.equal(gates.log_alpha.detach(), before)
    set_apart_(gates, torch.zeros(8), 1.5)
    assert torch.equal(gates.log_alpha.detach(), before)
    scores = torch.tensor([0.0, 1e-9, 2e-9, 3e-9, 0, 1e-8, 2e-8, 3e-8])  # in whatever unit
    set_apart_(gates, scores, 0.5)
    assert bool(gates.log_alpha.isfinite().all())
    assert gates.log_alpha.argsort(stable=True).tolist() == [0, 4, 1, 2, 3, 5, 6, 7]
    set_apart_(gates, scores, 100.0)
    assert float(gates.log_alpha.detach().abs().max()) == pytest.approx(LOG_ALPHA_LIMIT)


def test_while_the_learning_rate_is_0_the_price_is_the_one_before():
    """As in the first step of a warm-up."""
    gates, steering = steered()
    optimizer = torch.optim.AdamW([gates.log_alpha], lr=0.0)
    gates.log_alpha.grad = torch.ones(8)
    optimizer.step()
    steering.step_(0.5, optimizer)
    assert steering.price == [0.0]
    assert float(gates.open_probability().detach().sum()) == pytest.approx(sum(steering.goals(0.5)), abs=1e-3)


def price_after_steps(wrap, make=None, *, steps=3, gradients=None):
    """The price, and log_alpha, after some steps with gradients of about 0.02 and a budget."""
    gates, steering = steered()
    inner = (make or (lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.0)))([gates.log_alpha])
    optimizer = wrap(inner)
    for step in range(steps):
        gates.log_alpha.grad = 0.02 * torch.linspace(0.5, 1.5, 8) if gradients is None else gradients[step].clone()
        optimizer.step()
        steering.step_((step + 1) / 10, optimizer)
    return steering.price[0], gates.log_alpha.detach().clone()


private = pytest.mark.filterwarnings("ignore:.*")  # of optimisers that are private, experimental or old
"""For tests with optimisers that warn when they are imported."""


def accelerated(optimizer):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer, device_placement=False)


def lightning(optimizer):
    from pytorch_lightning.core.optimizer import LightningOptimizer

    wrapped = LightningOptimizer(optimizer)
    wrapped.step = optimizer.step  # its own needs a trainer
    return wrapped


def fabric(optimizer):
    from lightning_fabric.strategies import SingleDeviceStrategy
    from lightning_fabric.wrappers import _FabricOptimizer

    return _FabricOptimizer(optimizer, SingleDeviceStrategy())


def sharded(optimizer):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    settings = {name: optimizer.defaults[name] for name in ("lr", "weight_decay")}
    parameters = optimizer.param_groups[0]["params"]
    return ZeroRedundancyOptimizer(parameters, type(optimizer), **settings)


def named(optimizer):
    from torch.distributed.optim import _NamedOptimizer

    (parameter,) = optimizer.param_groups[0]["params"]
    settings = {name: optimizer.defaults[name] for name in ("lr", "weight_decay")}
    return _NamedOptimizer({"log_alpha": parameter}.items(), type(optimizer), **settings)


@pytest.mark.parametrize(
    "wrap",
    [
        accelerated,
        lightning,
        fabric,
        sharded,
        named,
        lambda one: accelerated(sharded(one)),
        lambda one: lightning(sharded(one)),
    ],
)
@private
def test_the_price_is_the_same_whatever_wraps_the_optimiser(wrap, one_process):
    expected, log_alpha = price_after_steps(lambda optimizer: optimizer)
    price, found = price_after_steps(wrap)
    assert price == pytest.approx(expected, rel=1e-5)
    assert expected > 0
    torch.testing.assert_close(found, log_alpha)


def adam_with(**more):
    return lambda parameters: torch.optim.Adam(parameters, lr=0.05, **more)


class OwnName(torch.optim.AdamW):
    """A subclass that takes PyTorch's steps."""


@pytest.mark.parametrize(
    "make",
    [
        adam_with(foreach=True),
        adam_with(fused=True),
        adam_with(capturable=False, differentiable=False),
        lambda parameters: OwnName(parameters, lr=torch.tensor(0.05), weight_decay=0.0),
    ],
)
def test_every_adam_of_pytorch_has_the_same_price(make):
    assert price_after_steps(lambda one: one, make)[0] == pytest.approx(price_after_steps(lambda one: one)[0], rel=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        lambda parameters: torch.optim.SGD(parameters, lr=0.3, dampening=0.5),  # which acts on a momentum alone
        lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.8),
        lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.8, nesterov=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.8, dampening=0.5),
        lambda parameters: torch.optim.Adam(parameters, lr=0.3),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.3, weight_decay=0.0),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.3),
    ],
)
def test_the_rate_is_how_far_a_steady_gradient_moves_a_gate(make):
    """Measured on the optimiser itself: the distance of the last of many steps, for each unit of the gradient."""
    gates, _ = steered()
    optimizer = make([gates.log_alpha])
    for _ in range(400):
        before = gates.log_alpha.detach().clone()
        gates.log_alpha.grad = torch.full((8,), 0.01)
        optimizer.step()
    moved = (before - gates.log_alpha.detach()).mean() / 0.01
    assert float(rate_of_gates_(optimizer, gates)) == pytest.approx(float(moved), rel=1e-2)


class OwnStep(torch.optim.AdamW):
    """As in a library that keeps its state in another form."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": 1, "state1": parameter.grad, "state2": parameter.grad**2}
                parameter.sub_(group["lr"] * parameter.grad.sign())


def closed(optimizer):
    """An optimiser that needs a closure."""
    step = optimizer.step
    optimizer.step = lambda: step(lambda: torch.ones(()))
    return optimizer


def local(optimizer):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    return PostLocalSGDOptimizer(optimizer, averager)


@pytest.mark.parametrize(
    ("make", "wrap"),
    [
        (torch.optim.RMSprop, None),
        (torch.optim.Adagrad, None),
        (torch.optim.RAdam, None),
        (torch.optim.Adamax, None),
        (torch.optim.ASGD, None),
        (torch.optim.Rprop, None),
        (torch.optim.LBFGS, closed),
        (OwnStep, None),
        (lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), None),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=1.0), None),
        (torch.optim.RMSprop, accelerated),
        (torch.optim.AdamW, local),
    ],
)
@private
def test_optimisers_whose_steps_are_not_known_are_refused(make, wrap, one_process):
    gates, steering = steered()
    optimizer = (wrap or (lambda one: one))(make([torch.nn.Parameter(torch.ones(8)), gates.log_alpha]))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(8)
    optimizer.step()
    before = gates.log_alpha.detach().clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
    with pytest.raises(GateError, match="step size is unknown"):
        steering.step_(0.5, optimizer)
    assert torch.equal(gates.log_alpha.detach(), before)


@private
def test_an_optimiser_of_other_parameters_is_refused(one_process):
    other = torch.nn.Parameter(torch.ones(8, 8))
    _, steering = steered()
    for optimizer in (torch.optim.SGD([other], lr=0.1), sharded(torch.optim.AdamW([other]))):
        with pytest.raises(GateError, match="the optimiser does not train the gates"):
            steering.step_(0.5, optimizer)
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    with pytest.raises(GateError, match="trained by Muon"):
        steering.step_(0.5, torch.optim.Muon([other]))


def test_a_step_that_a_gradient_scaler_skips_leaves_the_price():
    gates, steering = steered()
    optimizer = torch.optim.AdamW([gates.log_alpha], lr=0.05)
    steering.step_(0.1, optimizer)
    assert steering.price == [0.0]
    assert float(gates.open_probability().detach().sum()) == pytest.approx(sum(steering.goals(ramped(0.1, 1.0))), abs=1e-3)


PROCESS = """
import os, sys
import torch
from torch import distributed
from torch.distributed.optim import ZeroRedundancyOptimizer
from tests.gates.gating.test_schedule import steered

distributed.init_process_group("gloo")
others = [torch.nn.Parameter(torch.ones(100)) for _ in range(3)]
gates, steering = steered()
optimizer = ZeroRedundancyOptimizer([gates.log_alpha, *others], torch.optim.AdamW, lr=0.05, weight_decay=0.0)
for step in range(3):
    gates.log_alpha.grad = 0.02 * torch.linspace(0.5, 1.5, 8)
    for other in others:
        other.grad = torch.ones_like(other)
    optimizer.step()
    steering.step_((step + 1) / 10, optimizer)
has_state = bool(optimizer.optim.state.get(gates.log_alpha))
torch.save([steering.price[0], gates.log_alpha.detach(), has_state], f"{sys.argv[1]}/{os.environ['RANK']}.pt")
distributed.destroy_process_group()
"""


@pytest.mark.nightly
def test_processes_that_share_out_the_state_of_adam_have_one_price(tmp_path):
    (tmp_path / "process.py").write_text(PROCESS)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(tmp_path / "process.py")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launch, str(tmp_path)], check=True, capture_output=True, env=environment, cwd=tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    price, log_alpha = price_after_steps(lambda optimizer: optimizer)
    assert sorted(has_state for *_, has_state in found) == [False, True]
    for other_price, other, _ in found:
        assert other_price == pytest.approx(price, rel=1e-5)
        torch.testing.assert_close(other, log_alpha)


def test_a_time_is_come_to_in_a_straight_line_and_the_mask_is_within_it():
    model = build("bert")
    table = table_of(model, [0.0, 3.0, 4.0, 5.0, 5.0])
    gates = HeadGates(model)
    with torch.no_grad():
        gates.log_alpha.add_(torch.linspace(-1, 1, gates.size))
    limit = TimeLimit.parse("0.6x", table)
    steering = BudgetController(gates, limit)
    first = float(steering.time.time(gates.open_probability().detach()))
    for progress in (0.2, 0.6, 1.0):
        steering.step_(progress)
        found = float(steering.time.time(gates.open_probability().detach()))
        assert found == pytest.approx(first + progress * (limit.milliseconds - first), abs=1e-3)
    assert steering.price[0] > 0
    assert steering.budget.is_met(steering.mask(), gates.kind_index())
    assert 0 < int(steering.mask().sum()) <= limit.most


def test_gates_of_a_dear_site_close_before_those_of_a_cheap_one():
    model = build("bert")
    table = table_of(model, [0.0, 1.0, 2.0, 3.0, 4.0])
    dear = replace(table.sites[0], milliseconds=[5 * one for one in table.sites[0].milliseconds])
    gates = HeadGates(model)
    BudgetController(gates, TimeLimit.parse("0.6x", replace(table, sites=[dear, *table.sites[1:]]))).step_(0.5)
    first, *others = [float(part.mean()) for part in gates.open_probability().detach().split(gates.sizes)]
    assert all(first < other for other in others)


def test_a_time_is_for_hard_concrete_gates_of_all_kinds_of_the_model_that_was_measured():
    model, other = build("bert"), build("bart")
    limit = TimeLimit.parse("0.6x", table_of(model, [0.0, 1.0, 2.0, 3.0, 4.0]))
    for family in ("clamped-linear", *TOP_K_FAMILIES):
        with pytest.raises(GateError, match=f"{family} are not held to a time"):
            BudgetController(HeadGates(model, family=family), limit)
    with pytest.raises(GateError, match="gates of some kinds alone are not held to a time"):
        BudgetController(HeadGates(model, kinds=[]), limit)
    with pytest.raises(GateError, match="measure one of this model"):
        BudgetController(HeadGates(other), limit)
