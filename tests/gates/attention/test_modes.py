import pytest
import torch
from torch import nn

from gates.attention.intercept import observe_head_outputs
from gates.attention.modes import evaluating
from gates.gating.head_gates import HeadGates
from gates.scores.ablation import ablate
from gates.scores.attention import AttentionConfidence, AttentionEntropy
from gates.scores.importance import attention_gradients, head_gradients
from gates.scores.observe import observe_attention
from tools.coverage import architectures as zoo


def test_every_module_gets_its_own_mode_back_also_after_an_error():
    model, other = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout().eval(), nn.Dropout())).eval(), nn.Dropout()
    model[1][1].train()
    modes = [module.training for part in (model, other) for module in part.modules()]
    assert any(modes)

    def fail():
        with evaluating(model, other):
            assert not any(module.training for part in (model, other) for module in part.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [module.training for part in (model, other) for module in part.modules()] == modes


def losses_of(model, batch):
    return model(**batch)[0].flatten(1).square().sum(1)


def gradients(model, gates, batch):
    return head_gradients(gates, lambda: losses_of(model, batch))


def entropies_and_confidences(model, gates, batch):
    metrics = [AttentionEntropy(gates.sites), AttentionConfidence(gates.sites)]
    with torch.no_grad(), observe_attention(model, gates.sites, metrics, {}):
        model(**batch)
    return torch.cat([metric.compute() for metric in metrics])


def of_matrices(model, gates, batch):
    return attention_gradients(model, gates.sites, lambda: losses_of(model, batch))


def outputs(model, gates, batch):
    found = []
    with torch.no_grad(), observe_head_outputs(model, gates.sites, lambda _, heads: found.append(heads)):
        model(**batch)
    return torch.cat(found)


def ablated(model, gates, batch):
    return ablate(gates, torch.ones(1, 8), [batch], lambda batch: losses_of(model, batch))


@pytest.mark.parametrize("observe", [gradients, entropies_and_confidences, of_matrices, outputs, ablated])
@pytest.mark.parametrize("name", ["Bert", "RoFormer"])  # the second computes attention on its own
def test_a_model_in_training_is_observed_at_rest(name, observe):
    """Dropout of a half, gates drawn half open, and one layer already at rest."""
    model, batch = zoo.build(zoo.BY_NAME[name]), zoo.inputs(zoo.BY_NAME[name])
    gates = HeadGates(model, initial_log_alpha=0.5).attach().eval()
    expected = observe(model, gates, batch)
    for module in model.modules():
        if isinstance(getattr(module, "p", None), float):
            module.p = 0.5
    model.train()
    gates.train()
    next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0].eval()
    modes = [module.training for part in (model, gates) for module in part.modules()]
    torch.testing.assert_close(observe(model, gates, batch), expected)
    assert [module.training for part in (model, gates) for module in part.modules()] == modes
