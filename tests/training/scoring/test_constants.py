"""Constants in place of closed heads against a minimiser that knows nothing of gates."""

import pytest
import torch

from tests.training.scoring.subjects import ROWS
from training.scoring.passes import constant_of_each, mean_outputs, optimal_constants


def loss_by_hand(subject, mask, constants):
    """The mean loss of a model whose output projections read constants instead of closed heads."""
    sites, kept = subject.gates.sites, mask.split(subject.gates.sizes)
    hooks = []
    for site, part, constant in zip(sites, kept, constants, strict=True):
        kept_features = part.bool().repeat_interleave(len(constant) // len(part))

        def replace(module, args, open_=kept_features, constant=constant):
            return (torch.where(open_, args[0], constant.to(args[0])), *args[1:])

        hooks.append(site.output.register_forward_pre_hook(replace))
    with subject.at_rest():
        losses = torch.cat([subject.losses(batch) for batch in subject.data.score_dataloader()])
    for hook in hooks:
        hook.remove()
    return losses.double().mean()


@pytest.mark.integration
def test_they_are_near_where_a_second_order_minimiser_ends(scores_of):
    """Those of several heads together go most of the way."""
    subject = scores_of("bert").subject
    gates, means = subject.gates, mean_outputs(subject)
    mask = torch.ones(gates.size)
    mask[[0, 5, 6]] = 0.0
    (found,) = zip(*optimal_constants(subject, mask.unsqueeze(0), steps=32), strict=True)
    leaves = [mean.clone().requires_grad_() for mean in means]
    search = torch.optim.LBFGS(leaves, max_iter=20, line_search_fn="strong_wolfe")

    def closure():
        search.zero_grad()
        loss = loss_by_hand(subject, mask, leaves)
        loss.backward()
        return loss

    search.step(closure)
    subject.module.zero_grad()
    with torch.no_grad():
        of_mean, ours, best = (float(loss_by_hand(subject, mask, each)) for each in (means, found, leaves))
    assert best < of_mean
    assert of_mean - ours > 0.5 * (of_mean - best)


def test_kept_heads_and_no_steps_have_the_mean(subject):
    gates, means = subject.gates, mean_outputs(subject)
    mask = torch.ones(1, gates.size)
    mask[0, 0] = 0.0
    pairs = list(zip(optimal_constants(subject, mask, steps=2), means, gates.sizes, strict=True))
    moved = torch.cat([(found[0] != mean).unflatten(0, (size, -1)).any(1) for found, mean, size in pairs])
    assert moved.tolist() == [True] + [False] * (gates.size - 1)
    assert torch.equal(torch.cat(optimal_constants(subject, mask, steps=0), dim=1)[0], torch.cat(means))


@pytest.mark.integration
def test_a_head_alone_never_costs_more_than_with_its_mean(scores):
    means, constants = scores.raw("mean-ablation"), scores.raw("optimal-ablation")
    assert bool((constants <= means + 1e-6).all())
    assert bool((constants < means - 1e-3).any())


@pytest.mark.integration
def test_each_gate_has_the_constants_fitted_for_it(scores_of):
    subject = scores_of("llama-groups").subject
    gates = subject.gates
    together = constant_of_each(subject)
    for gate in (0, gates.size - 1):
        mask = torch.ones(gates.size)
        mask[gate] = 0.0
        alone = optimal_constants(subject, mask.unsqueeze(0))
        site = int(gates.layer_index()[gate])
        at = gate - sum(gates.sizes[:site])
        own, shared = (part.unflatten(-1, (gates.sizes[site], -1)) for part in (alone[site][0], together[site]))
        torch.testing.assert_close(shared[at], own[at])


def test_examples_are_thinned_out(scores_of):
    subject = scores_of("llama-groups").subject
    mask = torch.ones(1, subject.gates.size)
    mask[0, 0] = 0.0
    few, whole, more = (optimal_constants(subject, mask, rows=rows, steps=3)[0] for rows in (4, ROWS, 100))
    assert not torch.equal(few, whole)
    assert torch.equal(whole, more)
