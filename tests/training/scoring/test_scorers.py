"""Every raw score against loops over single examples, and what methods make of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gates.budget import Budget, budget_mask
from gates.errors import GateError
from gates.scores.fisher import removal_cost
from gates.scores.importance import head_gradients, normalise_by_layer
from gates.scores.ranking import jaccard
from tests.training.runs import MODEL, make_data, make_pruner, make_trainer
from training.runs.cost import Cost
from training.scoring.passes import PASSES, VARIANTS
from training.scoring.scorers import SCORERS, Scoring, scorer
from training.scoring.subject import score_heads

GROUPED = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
RAWS = [name for one in PASSES.values() for name in one.raws]
ROWS = 12


def make_scoring(kind="bert", known=None, **settings):
    unit = {"unit": "group"} if kind == "llama-groups" else {}
    pruner = make_pruner(from_scratch=MODEL if kind == "bert" else GROUPED, **unit, **settings)
    for parameter in pruner.backbone.parameters():  # so large that every head matters
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return Scoring(pruner, make_data(score_rows=ROWS, batch_size=5), make_trainer(), known=known)


@pytest.fixture(scope="module", params=["bert", "llama", "llama-groups"])
def scoring(request):
    return make_scoring(request.param)


def examples(scoring):
    """The scoring data one by one, in the loader's order."""
    for batch in scoring.data.score_dataloader():
        for row in range(len(batch["labels"])):
            length = int(batch["attention_mask"][row].sum())
            cut = {
                name: tensor[row : row + 1, :length] if tensor.dim() == 2 else tensor[row : row + 1]
                for name, tensor in batch.items()
            }
            yield cut


def loss_of(scoring, batch, values=None):
    gates = scoring.pruner.gates
    with gates.use(torch.ones(gates.size) if values is None else values):
        return scoring.losses(batch)


@pytest.fixture(scope="module")
def rows(scoring):
    """dL/dz example by example, through ordinary backpropagation, ``[examples, gates]``."""
    scoring.pruner.eval()
    found = []
    for one in examples(scoring):
        values = torch.ones(scoring.pruner.gates.size, requires_grad=True)
        found.append(torch.autograd.grad(loss_of(scoring, one, values).sum(), values)[0])
    scoring.pruner.train()
    return torch.stack(found).double()


def close(found, expected):
    torch.testing.assert_close(found, expected.double(), atol=1e-6, rtol=2e-3)


def test_his_and_fisher_are_means_over_examples(scoring, rows):
    close(scoring.raw("his"), rows.abs().mean(0))
    close(scoring.raw("signed"), rows.mean(0))
    close(scoring.raw("fisher"), rows.square().mean(0))
    close(scoring.raw("fisher-matrix"), rows.T @ rows / ROWS)
    close(scoring.raw("his_standard_error"), rows.abs().std(0) / ROWS**0.5)


def test_his_per_batch_takes_the_absolute_value_of_a_batchs_mean(scoring, rows):
    close(scoring.raw("his-batch"), torch.stack([part.mean(0).abs() for part in rows.split(5)]).mean(0))


def test_his_per_token_by_hand(scoring):
    """Michel et al.'s released code: context times its gradient, summed over a head's features, absolute per position."""
    gates, total = scoring.pruner.gates, 0.0
    scoring.pruner.eval()
    for one in examples(scoring):
        kept = []

        def keep(module, args, kept=kept):
            args[0].retain_grad()
            kept.append(args[0])

        hooks = [site.output.register_forward_pre_hook(keep) for site in gates.sites]
        loss_of(scoring, one).sum().backward()
        for hook in hooks:
            hook.remove()
        products = [(k * k.grad).detach().unflatten(-1, (size, -1)).sum(-1) for k, size in zip(kept, gates.sizes, strict=True)]
        total = total + torch.cat([product.abs().sum((0, 1)) for product in products])
    scoring.pruner.zero_grad()
    scoring.pruner.train()
    close(scoring.raw("his-token"), total / ROWS)


def test_weight_taylor_is_at_least_the_signed_score(scoring, rows):
    """Its identity with the signed score is in the tests of gates.scores.taylor; here, that the whole set is averaged first."""
    assert bool((scoring.raw("taylor-weights") >= rows.mean(0).abs() * 0.999).all())
    gates, weights = scoring.pruner.gates, [site.output.weight for site in scoring.pruner.gates.sites]
    scoring.pruner.eval()
    mean_loss = torch.cat([loss_of(scoring, one) for one in examples(scoring)]).mean()
    gradients = torch.autograd.grad(mean_loss, weights)
    scoring.pruner.train()
    products = [
        (w * g).abs().sum(0).unflatten(0, (n, -1)).sum(-1) for w, g, n in zip(weights, gradients, gates.sizes, strict=True)
    ]
    close(scoring.raw("taylor-weights"), torch.cat(products).detach())


def eager_attentions(scoring, one):
    """The model's own attention matrices and the loss, from its eager attention."""
    backbone = scoring.pruner.backbone
    before = backbone.config._attn_implementation
    backbone.set_attn_implementation("eager")
    output = backbone(**{name: tensor for name, tensor in one.items() if name != "labels"}, output_attentions=True)
    backbone.set_attn_implementation(before)
    return output.attentions, torch.nn.functional.cross_entropy(output.logits, one["labels"])


def test_what_attention_says_equals_the_models_own_matrices(scoring):
    scoring.pruner.gates.mode = "open"
    scoring.pruner.eval()
    entropies, largest, gradients = [], [], []
    for one in examples(scoring):
        attentions, loss = eager_attentions(scoring, one)
        found = torch.autograd.grad(loss, attentions)
        parts = list(zip(attentions, found, strict=True))
        gradients.append(torch.cat([(g.abs() * (a > 0)).sum((2, 3))[0] for a, g in parts]))
        p = torch.cat([a.detach()[0].double() for a in attentions])  # [heads, query, key]
        largest.append(p.amax(-1))
        visible = (p > 0).sum(-1)
        entropy = -(p * p.clamp(min=1e-300).log()).sum(-1) / visible.clamp(min=2).double().log()
        entropies.append(entropy[:, visible[0] > 1])
    scoring.pruner.train()
    to_gates = scoring.pruner.gates.to_gates
    close(scoring.raw("entropy"), to_gates(torch.cat(entropies, 1).mean(1)))
    close(scoring.raw("confidence"), to_gates(torch.cat(largest, 1).mean(1)))
    close(scoring.raw("attention-his"), to_gates(torch.stack(gradients).double().mean(0)))


@torch.no_grad()
def test_leave_one_out_by_brute_force(scoring):
    size = scoring.pruner.gates.size
    scoring.pruner.eval()
    expected = torch.zeros(size, dtype=torch.float64)
    for one in examples(scoring):
        dense = loss_of(scoring, one)
        for gate in range(size):
            values = torch.ones(size)
            values[gate] = 0.0
            expected[gate] += float(loss_of(scoring, one, values) - dense) / ROWS
    scoring.pruner.train()
    torch.testing.assert_close(scoring.raw("leave-one-out"), expected, atol=1e-5, rtol=1e-3)


def test_stepwise_his_by_hand(scoring):
    gates = scoring.pruner.gates
    scoring.pruner.eval()
    mask, order = torch.ones(gates.size), []
    while mask.any():  # 4 or 8 gates: one at a time
        rows = []
        for one in examples(scoring):
            leaf = torch.ones(gates.size, requires_grad=True)
            rows.append(torch.autograd.grad(loss_of(scoring, one, mask * leaf).sum(), leaf)[0])
        scores = normalise_by_layer(torch.stack(rows).double().abs().mean(0), gates.layer_index())
        worst = min((float(scores[gate]), gate) for gate in range(gates.size) if mask[gate])[1]
        mask[worst] = 0.0
        order.append(worst)
    scoring.pruner.train()
    assert scoring.keep("his-steps").argsort().tolist() == order


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "his"])
def test_every_variant_of_his_in_steps(scoring, name):
    gates, variant = scoring.pruner.gates, VARIANTS[name]
    scoring.pruner.eval()
    mask, order = torch.ones(gates.size), []
    while mask.any():
        with gates.use(mask):
            rows = [
                head_gradients(gates, lambda batch=batch: scoring.losses(batch), variant.granularity)
                for batch in scoring.data.score_dataloader()
            ]
        his = torch.cat(rows).double().abs().mean(0)
        scores = normalise_by_layer(his, gates.layer_index()) if variant.by_layer else his
        worst = min((float(scores[gate]), gate) for gate in range(gates.size) if mask[gate])[1]
        mask[worst] = 0.0
        order.append(worst)
    scoring.pruner.train()
    assert scoring.keep(f"{name}-steps").argsort().tolist() == order


def test_it_agrees_with_the_scores_of_a_run(scoring):
    expected = score_heads(scoring.pruner, scoring.data.score_dataloader(), scoring.trainer)
    close(scoring.raw("his"), expected.importance.his)
    close(scoring.raw("his_standard_error"), expected.importance.standard_error)
    assert torch.equal(scoring.raw("entropy"), expected.entropy)


@pytest.mark.parametrize("method", SCORERS)
def test_every_method_holds_every_budget(scoring, method):
    gates = scoring.pruner.gates
    for count in (0, 1, 3, gates.size):
        mask = scoring.mask(method, Budget(count, {}), seed=1)
        assert mask.shape == (gates.size,)
        assert int(mask.sum()) == count
        assert set(mask.tolist()) <= {0.0, 1.0}
    layered = scoring.mask(method, Budget(2, {}), minimum_per_layer=1)
    assert [int(part.sum()) for part in layered.split(gates.sizes)] == [1, 1]
    if SCORERS[method].ranks:
        keep = scoring.keep(method)
        assert keep.dtype == torch.float64
        assert bool(torch.isfinite(keep).all())


def test_rearranging_costs_no_more_than_the_search(scoring):
    layers, matrix = scoring.pruner.gates.layer_index(), scoring.raw("fisher-matrix")
    for count in range(scoring.pruner.gates.size + 1):
        masks = [scoring.mask(name, Budget(count, {})) for name in ("fisher", "fisher-rearranged")]
        search, rearranged = (float(removal_cost(mask, matrix, layers)) for mask in masks)
        assert rearranged <= search + 1e-12
    with pytest.raises(GateError, match="has no ranking"):
        scoring.keep("fisher-rearranged")


def test_named_rankings_are_what_they_say(scoring):
    layers = scoring.pruner.gates.layer_index()
    assert torch.equal(scoring.keep("his"), normalise_by_layer(scoring.raw("his"), layers))
    assert torch.equal(scoring.keep("his-inverted"), -scoring.keep("his"))
    assert torch.equal(scoring.keep("entropy-low-first"), scoring.raw("entropy"))
    assert torch.equal(scoring.keep("entropy-high-first"), -scoring.raw("entropy"))
    ends = [scoring.keep("hies", alpha=alpha).argsort().tolist() for alpha in (1.0, 0.0)]
    assert ends == [scoring.keep("his").argsort().tolist(), scoring.keep("entropy-high-first").argsort().tolist()]
    assert not torch.equal(scoring.keep("random", seed=1), scoring.keep("random", seed=2))


def test_rescaling_brings_the_output_nearer_and_leaves_all_else(scoring):
    gates = scoring.pruner.gates
    mask = scoring.mask("fisher", Budget(gates.size // 2, {}))
    before = {name: tensor.clone() for name, tensor in scoring.pruner.state_dict().items() if torch.is_tensor(tensor)}
    values = scoring.rescale(mask)
    assert torch.equal(values == 0, mask == 0)
    assert scoring.pruner.training
    assert all(torch.equal(before[name], scoring.pruner.state_dict()[name]) for name in before)
    scoring.pruner.eval()
    errors = []
    last, seen = gates.sites[0].output, []
    hook = last.register_forward_hook(lambda module, args, output: seen.append(output))
    for candidate in (torch.ones_like(mask), mask, values.float()):
        seen.clear()
        with torch.no_grad():
            for one in examples(scoring):
                loss_of(scoring, one, candidate)
        errors.append(torch.cat([output[0] for output in seen]))
    hook.remove()
    scoring.pruner.train()
    assert float((errors[2] - errors[0]).norm()) <= float((errors[1] - errors[0]).norm()) * (1 + 1e-6)


def test_mean_outputs_are_those_of_all_positions(scoring):
    scoring.pruner.eval()
    seen = []
    hook = scoring.pruner.gates.sites[1].output.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    with torch.no_grad():
        for one in examples(scoring):
            loss_of(scoring, one)
    hook.remove()
    scoring.pruner.train()
    close(scoring.mean_outputs()[1], torch.cat(seen).double().mean(0))


def test_one_pass_serves_many_scores_and_is_remembered(monkeypatch):
    known: dict = {}
    scoring = make_scoring(known=known)
    count, losses = [0], scoring.pruner.task.losses

    def counted(*arguments):
        count[0] += 1
        return losses(*arguments)

    monkeypatch.setattr(scoring.pruner.task, "losses", counted)
    for method in ("random", "his", "his-raw", "his-token", "his-batch", "fisher", "taylor-weights", "his-inverted"):
        scoring.keep(method)
    scoring.mask("fisher-rearranged", Budget(3, {}))
    assert count[0] == 3  # three batches of at most five
    scoring.keep("rank-sum")
    scoring.keep("confidence")
    assert count[0] == 6
    assert known["his"] is scoring.raw("his")
    assert scoring.cost_of("random") == Cost()
    seconds = float(known["gradients-seconds"] + known["attention-seconds"])
    assert scoring.cost_of("rank-sum").seconds == pytest.approx(seconds)
    again = make_scoring(known=dict(known))
    monkeypatch.setattr(again.pruner.task, "losses", lambda *arguments: pytest.fail("computed twice"))
    assert torch.equal(again.keep("rank-sum"), scoring.keep("rank-sum"))
    assert torch.equal(again.mask("fisher-rearranged", Budget(3, {})), scoring.mask("fisher-rearranged", Budget(3, {})))


def test_steps_do_not_pay_for_the_first_pass_twice():
    scoring = make_scoring()
    scoring.keep("his-steps")
    assert set(scoring.known) >= {"his", "his-steps", "gradients-seconds", "steps-seconds"}
    total = float(scoring.known["gradients-seconds"] + scoring.known["steps-seconds"])
    assert scoring.cost_of("his-steps").seconds == pytest.approx(total)


def test_every_method_that_uses_a_pass_is_charged_its_peak_memory():
    known = {"gradients-seconds": 2.0, "gradients-peak-memory-mb": 700.0, "attention-seconds": 1.0}
    known |= {"attention-peak-memory-mb": 300.0, "his": 1.0, "entropy": 1.0, "confidence": 1.0}
    scoring = make_scoring(known={name: torch.tensor(value, dtype=torch.float64) for name, value in known.items()})
    assert scoring.cost_of("his") == scoring.cost_of("his-raw") == Cost(2.0, 700.0)
    assert scoring.cost_of("confidence") == Cost(1.0, 300.0)
    assert scoring.cost_of("rank-sum") == Cost(3.0, 700.0)
    del scoring.known["gradients-peak-memory-mb"]  # scores from before it was kept
    assert scoring.cost_of("his") == Cost(2.0)


def test_a_pass_measures_its_peak_memory():
    scoring = make_scoring()
    peak = scoring.cost_of("confidence").peak_memory_mb
    assert (peak is not None) == Path("/proc/self/status").exists()
    assert peak is None or peak > 10


def test_the_pruner_is_left_as_it_was_even_with_frozen_weights():
    scoring = make_scoring(freeze=[".*"])
    pruner = scoring.pruner
    pruner.gates.set_mask_(torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0]))
    frozen = [parameter.requires_grad for parameter in pruner.parameters()]
    values = [scoring.raw(name) for name in RAWS]
    assert all(float(value.abs().sum()) > 0 for value in values)
    assert pruner.gates.mode == "masked"
    assert pruner.training
    assert frozen == [parameter.requires_grad for parameter in pruner.parameters()]
    assert all(parameter.grad is None for parameter in pruner.parameters())
    plain = make_scoring()
    for name, value in zip(RAWS, values, strict=True):
        close(value, plain.raw(name))


def test_names_are_checked_and_described():
    with pytest.raises(GateError, match="'best'"):
        scorer("best")
    scoring = make_scoring()
    with pytest.raises(GateError, match="'best'"):
        scoring.raw("best")
    for name, found in SCORERS.items():
        assert found.name == name
        assert found.source
        assert found.what
        assert set(found.raws) <= set(RAWS)


def test_the_seed_decides_a_random_mask():
    scoring = make_scoring()
    layers = scoring.pruner.gates.layer_index()
    mask = scoring.mask("random", Budget(4, {}), seed=5)
    generator = torch.Generator().manual_seed(5)
    expected = torch.rand(8, dtype=torch.float64, generator=generator).topk(4).indices.sort().values
    assert mask.nonzero().flatten().tolist() == expected.tolist()
    same = budget_mask(scoring.keep("random", seed=5), Budget(4, {}), kind_index=torch.zeros(8), layer_index=layers)
    assert jaccard(mask, same) == 1.0


def score_a_share(rank, world, folder):
    """One of several processes, each with its share of 13 examples; every process writes what it found."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    scoring = make_scoring()
    scoring.data = make_data(score_rows=13, batch_size=2)
    scoring.data.trainer = SimpleNamespace(global_rank=rank, world_size=world, lightning_module=None)
    found = {name: scoring.raw(name) for name in RAWS}
    found["rescaled"] = scoring.rescale(torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0]), batches=100)
    found["means"] = torch.cat(scoring.mean_outputs())
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for world, folder in ((1, tmp_path / "one"), (2, tmp_path / "two")):
        torch.multiprocessing.spawn(score_a_share, (world, str(folder)), nprocs=world)
    expected = torch.load(tmp_path / "one" / "0.pt", weights_only=True)
    for rank in range(2):
        found = torch.load(tmp_path / "two" / f"{rank}.pt", weights_only=True)
        for name, value in expected.items():
            if not name.startswith("his-batch"):  # other batches
                torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-3)
