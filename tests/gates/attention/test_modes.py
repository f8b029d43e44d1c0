import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from gates.attention.intercept import observe_head_outputs
from gates.attention.modes import attention_to_train, evaluating
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


def fused_dtypes(dropout_p=0.0, precision=torch.bfloat16):
    """Return the dtypes of queries in PyTorch's fused attention, of its output, and the gradient of the queries."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    bias, seen = torch.randn(2, 1, 5, 5), set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "attention" in str(func):
                seen.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with Seen(), torch.autocast("cpu", precision, enabled=precision != torch.float32), attention_to_train(torch.device("cpu")):
        output = scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout_p)
    output.sum().backward()
    return seen, output.dtype, query.grad


def test_attention_to_train_is_in_float32_under_autocast():
    seen, dtype, gradient = fused_dtypes()
    assert (seen, dtype) == ({torch.float32}, torch.bfloat16)
    alone, dtype, expected = fused_dtypes(precision=torch.float32)
    assert (alone, dtype) == ({torch.float32}, torch.float32)
    torch.testing.assert_close(gradient, expected)  # far closer than in bfloat16


def test_attention_outside_of_autocast_keeps_its_precision():
    query = torch.randn(2, 3, 5, 4)
    with torch.autocast("cpu", torch.bfloat16), attention_to_train(torch.device("cpu")):
        assert scaled_dot_product_attention(*[query.double()] * 3).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert scaled_dot_product_attention(query, query, query).dtype == torch.float32


def test_attention_with_dropout_is_left_to_autocast():
    seen, dtype, _ = fused_dtypes(dropout_p=0.5)
    assert torch.float32 not in seen
    assert dtype == torch.bfloat16


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
