"""Gates on models with LoRA adapters of peft."""

import copy

import pytest
import torch

from gates.artefact import GateConfig
from gates.attention.output_hooks import gates_on
from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import load_pruned
from gates.gating.head_gates import HeadGates
from gates.model import GatedModel, get_gated_model
from gates.recovery.rescale import rescaled_gates
from gates.scores.importance import head_gradients
from gates.scores.weights import output_weights
from gates.surgery.remove import remove_heads_, zero_heads_
from tests.models import build, inputs, logits, random_mask

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft's own calls
TARGETS = {
    "bert": ["query", "value", "attention.output.dense"],
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj"],
    "gpt2": ["attn.c_attn", "attn.c_proj"],
}
NAMES = pytest.mark.parametrize("name", TARGETS)


def adapted(name, model=None):
    """Return a PEFT model; the layers of the given model are replaced in place."""
    options = {"target_modules": TARGETS[name], "init_lora_weights": False, "fan_in_fan_out": name == "gpt2"}
    return peft.get_peft_model(build(name) if model is None else model, peft.LoraConfig(r=4, **options)).eval()


@NAMES
def test_sites_and_gated_outputs_are_those_of_the_merged_model(name):
    adapter, batch = adapted(name), inputs(name)
    model, plain = adapter.base_model.model, copy.deepcopy(adapter).merge_and_unload()
    with_adapters, without = find_attention(model), find_attention(plain)
    for site, own in zip(with_adapters, without, strict=True):
        assert (site.name, site.kind, site.heads, site.kv_heads) == (own.name, own.kind, own.heads, own.kv_heads)
    values = torch.rand(8, generator=torch.Generator().manual_seed(0)) * random_mask(name)
    found = []
    for one in (model, plain):
        gates = HeadGates(one).eval()
        with gates.attached(), gates.use(values):
            rows = head_gradients(gates, lambda one=one: one(**batch).logits.square().flatten(1).sum(1))
            found.append((logits(one, batch), rows))
    torch.testing.assert_close(found[0][0], found[1][0], atol=5e-6, rtol=2e-5)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5 * float(found[1][1].abs().max()), rtol=1e-3)


@NAMES
def test_what_reads_or_cuts_weights_says_that_adapters_are_to_be_merged(name, tmp_path):
    model, mask, batch = adapted(name).base_model.model, random_mask(name), inputs(name)
    before = logits(model, batch)
    gates = HeadGates(model)
    for use in (
        lambda: remove_heads_(model, mask),
        lambda: zero_heads_(model, mask),
        lambda: output_weights(gates),
        lambda: rescaled_gates(gates, mask, lambda: [batch], lambda batch: model(**batch), lambda batch: {}),
        lambda: get_gated_model(model).set_mask_(mask).prune_and_unload(),
    ):
        with pytest.raises(GateError, match=r"has an adapter \(peft's .*merge_and_unload\(\)"):
            use()
    gates_on(find_attention(model))[0].detach()  # of the last, which were put on again
    with pytest.raises(GateError, match="merge_and_unload"):
        get_gated_model(model).set_mask_(mask).save_pruned(tmp_path / "out", tokenizer=None)
    assert not (tmp_path / "out").exists()
    gates_on(find_attention(model))[0].detach()
    assert torch.equal(logits(model, batch), before)


@pytest.mark.parametrize(
    ("name", "targets"), [("bert", ["query", "value", "dense"]), ("llama", "all-linear"), ("gpt2", ["c_attn"])]
)
def test_with_peft_gates_and_adapters_train_save_merge_and_prune(name, targets, tmp_path):
    batch = inputs(name)
    config = peft.LoraConfig(
        r=4, target_modules=targets, lora_dropout=0.1, init_lora_weights=False, fan_in_fan_out=name == "gpt2"
    )
    adapter = peft.get_peft_model(build(name), config)
    gated = get_gated_model(adapter, GateConfig(budget=3, draw_per="example")).train()
    optimizer = torch.optim.AdamW(gated.parameter_groups(1e-2, gate_learning_rate=0.05))
    trained = [parameter for parameter in gated.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    for step in range(3):
        gated(**batch).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gated.step_((step + 1) / 3)
    assert all(bool((parameter != old).any()) for parameter, old in zip(trained, before, strict=True))
    mask = gated.fix_mask_()
    expected = logits(gated.eval(), batch)

    gated.save_pretrained(tmp_path / "gates")
    adapter.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(build(name), tmp_path / "adapter")
    again = GatedModel.from_pretrained(again, tmp_path / "gates").eval()
    torch.testing.assert_close(logits(again, batch), expected)

    with pytest.raises(GateError, match=r"adapter \(peft's Linear\).*merge_and_unload"):
        gated.prune_and_unload()
    plain = get_gated_model(gated.unload().merge_and_unload()).set_mask_(mask).eval()
    plain.save_pruned(tmp_path / "pruned", tokenizer=None, check_batch=batch)
    torch.testing.assert_close(logits(load_pruned(tmp_path / "pruned").eval(), batch), expected, atol=5e-6, rtol=2e-5)
    pruned = plain.prune_and_unload()
    torch.testing.assert_close(logits(pruned, batch), expected, atol=5e-6, rtol=2e-5)
    assert sum(site.heads for site in find_attention(pruned)) == 3


@NAMES
def test_adapters_may_come_and_go_after_the_gates(name):
    model, mask, batch = build(name), random_mask(name), inputs(name)
    gated = get_gated_model(model).set_mask_(mask).eval()
    dense = logits(gated, batch)
    adapter = adapted(name, model)
    plain = build(name)
    plain.load_state_dict(copy.deepcopy(adapter).merge_and_unload().state_dict())
    with_adapters = logits(get_gated_model(plain).set_mask_(mask).eval(), batch)
    assert not torch.allclose(with_adapters, dense, atol=1e-3)
    torch.testing.assert_close(logits(gated, batch), with_adapters, atol=5e-6, rtol=2e-5)
    assert gates_on(find_attention(model)) == [gated.gates]
    with pytest.raises(GateError, match="already carries other gates"):
        HeadGates(model).attach()
    adapter.unload()
    torch.testing.assert_close(logits(gated, batch), dense)
    adapted(name, model)
    plain = gated.unload()
    assert not any(vars(part).get("_head_gates") or part._forward_pre_hooks for part in plain.modules())
