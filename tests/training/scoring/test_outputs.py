"""What heads put out: values that make up for closed ones, and their means."""

import pytest
import torch

from gates.gating.budget import Budget
from tests.training.scoring.subjects import close, examples, loss_of
from training.config import RefitOptions
from training.scoring.passes import mean_outputs, refit, rescale


def test_rescaling_brings_the_output_nearer_and_leaves_all_else(scores, subject):
    gates, module = subject.gates, subject.module
    mask = scores.mask("fisher", Budget(gates.size // 2, {}))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items() if "_extra_state" not in name}
    values = rescale(subject, mask)
    assert torch.equal(values == 0, mask == 0)
    assert module.training
    assert all(torch.equal(before[name], module.state_dict()[name]) for name in before)
    errors = []
    last, seen = gates.sites[0].output, []
    hook = last.register_forward_hook(lambda module, args, output: seen.append(output))
    for candidate in (torch.ones_like(mask), mask, values.float()):
        seen.clear()
        with subject.at_rest(), torch.no_grad():
            for one in examples(subject):
                loss_of(subject, one, candidate)
        errors.append(torch.cat([output[0] for output in seen]))
    hook.remove()
    assert float((errors[2] - errors[0]).norm()) <= float((errors[1] - errors[0]).norm()) * (1 + 1e-6)


@pytest.mark.parametrize("feed_forward", [True, False])
def test_refitting_brings_the_stream_nearer_and_changes_output_projections_alone(subject, feed_forward):
    gates, module = subject.gates, subject.module
    mask = torch.ones(gates.size)
    mask[0] = 0
    before = {name: tensor.clone() for name, tensor in module.state_dict().items() if torch.is_tensor(tensor)}
    try:
        dense = {name: before[f"backbone.{name}"] for name, _ in subject.backbone.named_parameters()}
        done = refit(subject, mask, dense, RefitOptions(ridges=[0.01], rows=16, feed_forward=feed_forward))
        after = {name: tensor.clone() for name, tensor in module.state_dict().items() if torch.is_tensor(tensor)}
    finally:
        module.load_state_dict(before | {name: value for name, value in module.state_dict().items() if name not in before})
    changed = {
        name.removeprefix("backbone.").rpartition(".")[0] for name in before if not torch.equal(before[name], after[name])
    }
    assert changed == {one.name for one in done}
    assert {site for site in changed if any(site.startswith(own.name) for own in gates.sites)}
    assert (len(changed) > len(gates.sites)) == feed_forward
    assert all(one.after <= one.before for one in done)
    assert module.training


def test_mean_outputs_are_those_of_all_positions(subject):
    seen = []
    hook = subject.gates.sites[1].output.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    with subject.at_rest(), torch.no_grad():
        for one in examples(subject):
            loss_of(subject, one)
    hook.remove()
    close(mean_outputs(subject)[1], torch.cat(seen).double().mean(0))
