"""Every raw score against loops over single examples."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from gates.relevance.heads import gradient_times_input, head_relevance
from gates.scores.importance import head_gradients, normalise_by_layer
from tests.training.runs import make_data
from tests.training.scoring.subjects import KINDS, RAWS, ROWS, close, examples, loss_of, make_scores, make_subject
from training.scoring.passes import VARIANTS, importance_and_entropy, importance_of, mean_outputs, optimal_constants, rescale
from training.scoring.subject import ScoringContext


@pytest.fixture(scope="module")
def rows_of(scores_of):
    """dL/dz example by example, through ordinary backpropagation, ``[examples, gates]``."""

    @cache
    def rows(kind):
        subject, found = scores_of(kind).subject, []
        with subject.at_rest():
            for one in examples(subject):
                values = torch.ones(subject.gates.size, requires_grad=True)
                found.append(torch.autograd.grad(loss_of(subject, one, values).sum(), values)[0])
        return torch.stack(found).double()

    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_his_and_fisher_are_means_over_examples(kind, scores_of, rows_of):
    scores, rows = scores_of(kind), rows_of(kind)
    close(scores.raw("his"), rows.abs().mean(0))
    close(scores.raw("signed"), rows.mean(0))
    close(scores.raw("fisher"), rows.square().mean(0))
    close(scores.raw("fisher-matrix"), rows.T @ rows / ROWS)
    close(scores.raw("his_standard_error"), rows.abs().std(0) / ROWS**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_his_per_batch_takes_the_absolute_value_of_a_batchs_mean(kind, scores_of, rows_of):
    expected = torch.stack([part.mean(0).abs() for part in rows_of(kind).split(5)]).mean(0)
    close(scores_of(kind).raw("his-batch"), expected)


def test_his_per_token_by_hand(scores, subject):
    """Michel et al.'s released code: context times its gradient, summed over a head's features, absolute per position."""
    gates, total = subject.gates, 0.0
    with subject.at_rest():
        for one in examples(subject):
            kept = []

            def keep(module, args, kept=kept):
                args[0].retain_grad()
                kept.append(args[0])

            hooks = [site.output.register_forward_pre_hook(keep) for site in gates.sites]
            loss_of(subject, one).sum().backward()
            for hook in hooks:
                hook.remove()
            products = [
                (k * k.grad).detach().unflatten(-1, (size, -1)).sum(-1) for k, size in zip(kept, gates.sizes, strict=True)
            ]
            total = total + torch.cat([product.abs().sum((0, 1)) for product in products])
    subject.module.zero_grad()
    close(scores.raw("his-token"), total / ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_taylor_is_at_least_the_signed_score(kind, scores_of, rows_of):
    """The tests of gates.scores.weights have its identity with the signed score; here the whole set is averaged first."""
    scores, subject = scores_of(kind), scores_of(kind).subject
    assert bool((scores.raw("taylor-weights") >= rows_of(kind).mean(0).abs() * 0.999).all())
    gates, weights = subject.gates, [site.output.weight for site in subject.gates.sites]
    with subject.at_rest():
        mean_loss = torch.cat([loss_of(subject, one) for one in examples(subject)]).mean()
    gradients = torch.autograd.grad(mean_loss, weights)
    products = [
        (w * g).abs().sum(0).unflatten(0, (n, -1)).sum(-1) for w, g, n in zip(weights, gradients, gates.sizes, strict=True)
    ]
    close(scores.raw("taylor-weights"), torch.cat(products).detach())


def eager_attentions(subject, one):
    """The model's own attention matrices and the loss, from its eager attention."""
    backbone = subject.backbone
    before = backbone.config._attn_implementation
    backbone.set_attn_implementation("eager")
    output = backbone(**{name: tensor for name, tensor in one.items() if name != "labels"}, output_attentions=True)
    backbone.set_attn_implementation(before)
    return output.attentions, torch.nn.functional.cross_entropy(output.logits, one["labels"])


def test_what_attention_says_equals_the_models_own_matrices(scores, subject):
    entropies, largest, gradients = [], [], []
    with subject.at_rest():
        for one in examples(subject):
            attentions, loss = eager_attentions(subject, one)
            found = torch.autograd.grad(loss, attentions)
            parts = list(zip(attentions, found, strict=True))
            gradients.append(torch.cat([(g.abs() * (a > 0)).sum((2, 3))[0] for a, g in parts]))
            p = torch.cat([a.detach()[0].double() for a in attentions])  # [heads, query, key]
            largest.append(p.amax(-1))
            visible = (p > 0).sum(-1)
            entropy = -(p * p.clamp(min=1e-300).log()).sum(-1) / visible.clamp(min=2).double().log()
            entropies.append(entropy[:, visible[0] > 1])
    to_gates = subject.gates.to_gates
    close(scores.raw("entropy"), to_gates(torch.cat(entropies, 1).mean(1)))
    close(scores.raw("confidence"), to_gates(torch.cat(largest, 1).mean(1)))
    close(scores.raw("attention-his"), to_gates(torch.stack(gradients).double().mean(0)))


@torch.no_grad()
def test_leave_one_out_by_brute_force(scores, subject):
    size = subject.gates.size
    expected = torch.zeros(size, dtype=torch.float64)
    with subject.at_rest():
        for one in examples(subject):
            dense = loss_of(subject, one)
            for gate in range(size):
                values = torch.ones(size)
                values[gate] = 0.0
                expected[gate] += float(loss_of(subject, one, values) - dense) / ROWS
    torch.testing.assert_close(scores.raw("leave-one-out"), expected, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_mean_ablation_by_brute_force(scores, subject):
    gates, means = subject.gates, mean_outputs(subject)
    widths = [len(mean) // size for mean, size in zip(means, gates.sizes, strict=True)]
    expected = torch.zeros(gates.size, dtype=torch.float64)
    places = [(site, at) for site, size in enumerate(gates.sizes) for at in range(size)]
    with subject.at_rest():
        for one in examples(subject):
            dense = loss_of(subject, one)
            for gate, (site, at) in enumerate(places):

                def instead(module, args, features=slice(at * widths[site], (at + 1) * widths[site]), mean=means[site]):
                    heads = args[0].clone()
                    heads[..., features] = mean[features].to(heads)
                    return (heads, *args[1:])

                hook = gates.sites[site].output.register_forward_pre_hook(instead)
                expected[gate] += float(loss_of(subject, one) - dense) / ROWS
                hook.remove()
    torch.testing.assert_close(scores.raw("mean-ablation"), expected, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_shapley_values_add_up_to_all_that_heads_do(scores, subject):
    size = subject.gates.size
    with subject.at_rest():
        ends = [
            torch.cat([loss_of(subject, one, torch.full((size,), value)) for one in examples(subject)]).double().mean()
            for value in (0.0, 1.0)
        ]
    assert float(scores.raw("shapley").sum()) == pytest.approx(float(ends[0] - ends[1]), rel=1e-4)
    assert bool((scores.raw("shapley_standard_error") > 0).all())


def order_of_steps(gates, scores_at):
    """Gates in the order in which they go if the lowest goes and the others are scored again; so few go one by one."""
    mask, order = torch.ones(gates.size), []
    while mask.any():
        scores = scores_at(mask)
        worst = min((float(scores[gate]), gate) for gate in range(gates.size) if mask[gate])[1]
        mask[worst] = 0.0
        order.append(worst)
    return order


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_of_his_in_steps(scores_of, name):
    scores, variant = scores_of("llama-groups"), VARIANTS[name]
    subject, gates = scores.subject, scores.subject.gates

    def scores_at(mask):
        with gates.use(mask):
            rows = [
                head_gradients(gates, lambda batch=batch: subject.losses(batch), variant.granularity)
                for batch in subject.data.score_dataloader()
            ]
        his = torch.cat(rows).double().abs().mean(0)
        return normalise_by_layer(his, gates.layer_index()) if variant.by_layer else his

    with subject.at_rest():
        order = order_of_steps(gates, scores_at)
    assert scores.raw(f"{name}-steps").argsort().tolist() == order


@pytest.mark.parametrize("kind", ["llama", "llama-groups"])
def test_greedy_gnorm_by_hand(kind, scores_of):
    """Of heads with rows of their own; how the rows of each family lie is in the tests of gates.scores.weights."""
    scores, subject = scores_of(kind), scores_of(kind).subject
    gates = subject.gates

    def scores_at(mask):
        norms = []
        for one in examples(subject):
            with gates.use(mask):
                norms.append(subject.task.losses(subject.backbone, one)[1].norm())
        torch.stack(norms).mean().backward()
        found = []
        for site, size in zip(gates.sites, gates.sizes, strict=True):
            product = 1.0
            for path in (site.layout.query, site.layout.key, site.layout.value):
                heads = site.projection(path).weight.grad.double().unflatten(0, (-1, site.head_dim)).square().sum((1, 2))
                shared = heads.repeat_interleave(max(1, size // len(heads)))  # by several gates
                squares = shared.view(size, -1).sum(1)
                product = product * squares.sqrt()
            found.append(product)
        subject.module.zero_grad()
        return torch.cat(found)

    with subject.at_rest():
        order = order_of_steps(gates, scores_at)
    assert scores.ranking("greedy-gnorm").argsort().tolist() == order


@pytest.mark.parametrize("name", ["relevance", "gradient-x-input"])
@pytest.mark.parametrize("kind", ["bert", "llama-groups"])
def test_relevance_is_that_of_the_predicted_class_example_by_example(kind, scores_of, name):
    scores, subject = scores_of(kind), scores_of(kind).subject
    find = {"relevance": head_relevance, "gradient-x-input": gradient_times_input}[name]
    with subject.at_rest():
        for raw, signed in ((name, False), (f"{name}-signed", True)):
            rows = [find(subject.gates, [one], signed=signed) for one in examples(subject)]
            close(scores.raw(raw), subject.gates.to_gates(torch.stack(rows).mean(0)))
    method = {"relevance": "relevance", "gradient-x-input": "relevance(rule=gradient-x-input)"}[name]
    assert torch.equal(scores.ranking(method), scores.raw(name))


def test_they_agree_with_the_scores_of_a_run(scores, subject):
    importance, entropy = importance_and_entropy(subject)
    close(scores.raw("his"), importance.his)
    close(scores.raw("his_standard_error"), importance.standard_error)
    assert torch.equal(scores.raw("entropy"), entropy)
    assert all(torch.equal(own, again) for own, again in zip(importance, importance_of(subject), strict=True))


def score_a_share(rank, world, folder):
    """One of several processes, each with its share of 13 examples; every process writes what it found."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    scores = make_scores()
    data = make_data(score_rows=13, batch_size=2)
    data.trainer = SimpleNamespace(
        global_rank=rank, world_size=world, lightning_module=None, strategy=scores.subject.trainer.strategy
    )
    scores.subject = ScoringContext(scores.subject.module, data, scores.subject.trainer)
    found = {name: scores.raw(name) for name in RAWS}
    found["rescaled"] = rescale(scores.subject, torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0]), rows=1000)
    found["means"] = torch.cat(mean_outputs(scores.subject))
    closed = torch.tensor([[1.0, 0, 1, 0, 0, 1, 1, 1]])
    for rows in (5, 13):
        found[f"constants of {rows}"] = torch.cat(optimal_constants(scores.subject, closed, steps=3, rows=rows), dim=1)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.nightly
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


@pytest.mark.integration
def test_the_subject_is_left_as_it_was_even_with_frozen_weights(scores_of):
    subject = make_subject(freeze=[".*"])
    pruner, scores = subject.module, type(scores_of("bert"))(subject)
    pruner.gates.set_mask_(torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0]))
    frozen = [parameter.requires_grad for parameter in pruner.parameters()]
    values = [scores.raw(name) for name in RAWS]
    assert all(float(value.abs().sum()) > 0 for value in values)
    assert pruner.gates.mode == "masked"
    assert pruner.training
    assert frozen == [parameter.requires_grad for parameter in pruner.parameters()]
    assert all(parameter.grad is None for parameter in pruner.parameters())
    for name, value in zip(RAWS, values, strict=True):
        close(value, scores_of("bert").raw(name))
