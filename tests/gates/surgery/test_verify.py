"""Removal is checked against the gated model, and a model for which it is not exact is left as it was."""

import copy

import pytest
import torch
import transformers as t

from gates.errors import GateError
from gates.export.checkpoint import load_pruned
from gates.gating.head_gates import HeadGates
from gates.model import get_gated_model
from gates.surgery import remove, slices, verify
from gates.surgery.remove import remove_heads_, zero_heads_
from tests.models import build, inputs, masked, random_mask
from tools.coverage.architectures import BART, BERT, GROUPED_EXPLICIT, T5, VIT, randomise_

SIZES = {"hidden_size": 32, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True)
def _nothing_verified_yet(monkeypatch):
    monkeypatch.setattr(verify, "_VERIFIED", set())


def ids(length, seed=1):
    return torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(seed))


def udop():
    """Its encoder's position bias is two-dimensional and its stack's."""
    sizes = {**T5, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    model = t.UdopForConditionalGeneration(t.UdopConfig(**sizes, max_2d_position_embeddings=64, image_size=8, patch_size=4))
    boxes = torch.rand(2, 7, 4, generator=torch.Generator().manual_seed(1)).sort(-1)[0]
    return model, {
        "input_ids": ids(7),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "bbox": boxes,
        "pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2)),
        "decoder_input_ids": ids(5),
    }


def falcon_h1():
    """Its mixers have multipliers in buffers that are no part of a checkpoint."""
    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
    config = t.FalconH1Config(**GROUPED_EXPLICIT, **sizes, ssm_multipliers=[0.5, 0.7, 1.5, 2.0, 0.3])
    return t.FalconH1ForCausalLM(config), {"input_ids": ids(7)}


def moonshine():
    """Its attention reads the number of its heads from the config."""
    layers = {f"{stack}_{size}": number for stack in ("encoder", "decoder") for size, number in LAYERS.items()}
    model = t.MoonshineForConditionalGeneration(
        t.MoonshineConfig(**SIZES, intermediate_size=40, decoder_start_token_id=1, **layers)
    )
    sound = torch.randn(2, 2000, generator=torch.Generator().manual_seed(2))
    return model, {"input_values": sound, "decoder_input_ids": ids(5)}


LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}


def trocr():
    """Its attention has the width of its input."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40, "vocab_size": 50}
    return t.TrOCRForCausalLM(t.TrOCRConfig(**sizes, max_position_embeddings=48)), {"input_ids": ids(7)}


def fsmt():
    """Its attention has the width of its input."""
    sizes = {name: value for name, value in BART.items() if name != "vocab_size"}
    config = t.FSMTConfig(**sizes, langs=["en", "de"], src_vocab_size=50, tgt_vocab_size=50)
    return t.FSMTForConditionalGeneration(config), {"input_ids": ids(7), "decoder_input_ids": ids(5)}


def made(make):
    torch.manual_seed(0)
    model, batch = make()
    return randomise_(model).eval(), batch


def output(model, batch):
    with torch.no_grad():
        return model(**batch)[0]


def gated(model, batch, mask, run=output):
    return masked(model, mask, lambda: run(model, batch))


def mask_of(model, seed):
    """Heads at random, without any in the first site, the second, or anywhere."""
    size = HeadGates(model).size
    mask = (torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.6).float()
    mask[:4] = 1 - mask[:4] if seed == 0 else 0
    mask[4:8] *= seed != 1
    return mask * (seed != 2)


class Unchanged:
    """What a model was, to see that it is that again."""

    def __init__(self, model, batch):
        self.model, self.batch = model, batch
        self.tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.values = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.modules = list(model.modules())
        self.training = [module.training for module in self.modules]
        self.hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in self.modules]
        self.config = copy.deepcopy(model.config.to_dict())
        self.output = output(model, batch) if not model.training else None

    def check(self):
        found = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        assert found.keys() == self.tensors.keys()
        assert all(found[name] is self.tensors[name] and torch.equal(found[name], self.values[name]) for name in found)
        modules = list(self.model.modules())
        assert len(modules) == len(self.modules)
        assert all(one is other for one, other in zip(modules, self.modules, strict=True))
        assert [module.training for module in modules] == self.training
        assert [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules] == self.hooks
        assert self.model.config.to_dict() == self.config
        assert "save_pretrained" not in vars(self.model)
        if self.output is not None:
            assert torch.equal(output(self.model, self.batch), self.output)


# -- architectures that were wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("make", [udop, falcon_h1, moonshine])
def test_removed_and_reloaded_equals_gated(make, seed, tmp_path):
    model, batch = made(make)
    mask = mask_of(model, seed)
    expected, dense = gated(model, batch, mask), output(model, batch)
    assert (dense - expected).abs().max() > 0.1
    remove_heads_(model, mask, example=batch)
    torch.testing.assert_close(output(model, batch), expected, atol=3e-6, rtol=1e-5)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(output(load_pruned(tmp_path).eval(), batch), expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("make", [trocr, fsmt])
def test_attention_of_the_width_of_its_input_is_refused(make):
    model, batch = made(make)
    before = Unchanged(model, batch)
    with pytest.raises(GateError, match="gated but not removed: it assumes that its heads"):
        remove_heads_(model, mask_of(model, 0), example=batch)
    before.check()


# -- the check -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [trocr, fsmt])
def test_a_model_that_fails_without_its_heads_is_left_as_it_was(make, monkeypatch):
    monkeypatch.setattr("gates.attention.sites.GATE_ONLY_CLASSES", {})
    model, batch = made(make)
    before = Unchanged(model, batch)
    with pytest.raises(GateError, match=r"cannot be removed, so nothing was changed: .*use form='masked'"):
        remove_heads_(model, mask_of(model, 0), values=torch.rand(HeadGates(model).size), example=batch)
    before.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_that_computes_something_else_is_left_as_it_was(dtype, monkeypatch):
    monkeypatch.setattr(slices, "STACK_BIAS_CLASSES", ())
    model, batch = made(udop)
    model.to(dtype)
    batch["pixel_values"] = batch["pixel_values"].to(dtype)
    before = Unchanged(model, batch)
    with pytest.raises(GateError, match=r"nothing was changed: the output of .*SelfAttention' differs"):
        remove_heads_(model, mask_of(model, 0), example=batch)
    before.check()


def test_an_error_of_the_surgery_itself_changes_nothing(monkeypatch):
    """At the last site, when all others were cut."""

    class Rigid(torch.nn.Linear):
        def __init__(self, features_in, features_out):
            super().__init__(features_in, features_out)

    model = build("bert")
    model.bert.encoder.layer[1].attention.output.dense.__class__ = Rigid
    before = Unchanged(model, inputs("bert"))
    mask = torch.tensor([1.0, 0, 1, 1, 1, 0, 0, 1])
    with pytest.raises(GateError, match=r"cannot be removed, so nothing was changed: .*bias"):
        remove_heads_(model, mask, values=torch.full_like(mask, 0.5))
    before.check()


def test_gates_folded_into_a_site_that_keeps_all_heads_are_taken_back(monkeypatch):
    monkeypatch.setattr(verify, "TOLERANCES", {torch.float32: -1.0})
    model = build("bert")
    before = Unchanged(model, inputs("bert"))
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 1])
    with pytest.raises(GateError, match="nothing was changed"):
        remove_heads_(model, mask, values=torch.full_like(mask, 0.5))
    before.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert", "llama", "bart", "vit"])
def test_rounding_passes(name, dtype):
    model, mask = build(name).to(dtype), random_mask(name)
    remove_heads_(model, mask, values=torch.rand(len(mask), generator=torch.Generator().manual_seed(3)))
    assert model.config.pruned_attention


def test_rounding_does_not_add_up_from_layer_to_layer():
    """Sharp attention makes much of small differences: at the end they are larger than a mistake would be at its site."""
    torch.manual_seed(0)
    model = randomise_(t.T5ForConditionalGeneration(t.T5Config(**{**T5, "num_layers": 12, "num_decoder_layers": 12}))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith((".q.weight", ".k.weight")):
            parameter.data *= 4
    generator = torch.Generator().manual_seed(0)
    keep, values = (torch.rand(HeadGates(model).size, generator=generator) for _ in range(2))
    assert remove_heads_(model.half(), (keep < 0.6).float(), values=values).config.pruned_attention


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 1.01), (torch.bfloat16, 1.1)])
def test_a_small_mistake_is_seen_in_half_precision(dtype, factor, monkeypatch):
    def scaled(cut, gate):
        return slices.sliced_projections(cut, gate * factor)

    monkeypatch.setattr(remove, "sliced_projections", scaled)
    model = build("llama").to(dtype)
    before = Unchanged(model, inputs("llama"))
    with pytest.raises(GateError, match="nothing was changed: the output of"):
        remove_heads_(model, torch.tensor([1.0, 0, 1, 1, 1, 0, 0, 1]))
    before.check()


def test_a_change_of_shape_is_verified_once(monkeypatch):
    calls, read = [], verify._outputs
    monkeypatch.setattr(verify, "_outputs", lambda *given: calls.append(1) or read(*given))

    def removed(mask, change=lambda model: model):
        model = change(build("bert"))
        remove_heads_(model, torch.tensor(mask), example=inputs("bert"))
        return len(calls)

    assert removed([1.0, 1, 1, 1, 1, 1, 1, 1]) == 0  # nothing to verify
    assert removed([1.0, 0, 1, 1, 1, 1, 0, 0]) == 2
    assert removed([1.0, 0, 1, 1, 1, 1, 0, 0]) == 2
    assert removed([0.0, 1, 1, 1, 1, 0, 0, 1]) == 2  # other heads, as many of each site
    assert removed([1.0, 0, 0, 1, 1, 1, 0, 0]) == 4
    assert removed([1.0, 0, 1, 1, 1, 1, 0, 0], lambda model: model.double()) == 6

    def replaced(model):
        model.bert.encoder.layer[0].intermediate.intermediate_act_fn = torch.nn.Tanh()
        return model

    assert removed([1.0, 0, 1, 1, 1, 1, 0, 0], replaced) == 8


def test_a_failed_check_is_not_remembered(monkeypatch):
    monkeypatch.setattr("gates.attention.sites.GATE_ONLY_CLASSES", {})
    model, batch = made(trocr)
    for _ in range(2):
        with pytest.raises(GateError, match="nothing was changed"):
            remove_heads_(model, mask_of(model, 0), example=batch)


def test_training_mode_is_kept_and_the_check_is_at_rest():
    model = build("bert").train()
    model.bert.embeddings.eval()
    training = {name: module.training for name, module in model.named_modules()}
    remove_heads_(model, random_mask("bert"))  # with dropout, the outputs would differ
    after = {name: module.training for name, module in model.named_modules()}
    assert all(after[name] == training[name] for name in after if name in training)
    assert not model.bert.embeddings.dropout.training


def test_the_check_takes_no_random_numbers_from_anybody():
    def state_after():
        model = build("bert")
        torch.manual_seed(5)
        remove_heads_(model, random_mask("bert"))
        return torch.get_rng_state()

    checked, verified_before = state_after(), state_after()
    assert torch.equal(checked, verified_before)


# -- the inputs ------------------------------------------------------------------------------------------------


def cross_attending():
    return randomise_(t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50, add_cross_attention=True)))


def test_inputs_that_are_not_known_are_asked_for():
    model, mask = build("bert"), random_mask("bert")
    model.main_input_name = "spectra"
    before = Unchanged(model, inputs("bert"))
    with pytest.raises(GateError, match=r"none are known for BertForSequenceClassification .* as example=\{name: tensor"):
        remove_heads_(model, mask)
    with pytest.raises(GateError, match="BertForSequenceClassification fails on 'input_ids'"):
        remove_heads_(model, mask, example={"input_ids": torch.full((1, 3), 1000)})
    before.check()
    remove_heads_(model, mask, example=inputs("bert"))
    assert model.config.pruned_attention


def test_attention_that_the_inputs_do_not_reach_is_not_cut_unseen():
    """The gated model passes the example on."""
    model, mask = cross_attending(), torch.tensor([1.0, 1, 0, 0, 0, 1, 0, 1])
    before = Unchanged(model.eval(), {"input_ids": ids(6)})
    with pytest.raises(GateError, match="crossattention' does not run on them; give inputs"):
        remove_heads_(model, mask)
    before.check()
    example = {"input_ids": ids(6), "encoder_hidden_states": torch.randn(2, 5, 32)}
    expected = gated(model, example, mask)
    pruned = get_gated_model(model).set_mask_(mask).prune_and_unload(example=example)
    torch.testing.assert_close(output(pruned, example), expected, atol=3e-6, rtol=1e-5)


def test_sites_that_never_run_are_cut_where_others_of_their_class_do():
    """LLaVA leaves out the last layer of its vision tower."""
    parts = {"text_config": t.LlamaConfig(**BERT), "vision_config": t.CLIPVisionConfig(**{**VIT, "num_hidden_layers": 3})}
    model = randomise_(t.LlavaForConditionalGeneration(t.LlavaConfig(**parts, image_token_index=40))).eval()
    example = {"input_ids": torch.cat([torch.full((2, 4), 40), ids(5)], 1), "pixel_values": torch.randn(2, 3, 8, 8)}
    mask = torch.tensor([1.0, 0, 1, 0] * 5)
    expected = gated(model, example, mask)
    torch.testing.assert_close(output(remove_heads_(model, mask, example=example), example), expected, atol=3e-6, rtol=1e-5)


def test_what_hooks_do_is_seen_although_such_a_removal_was_checked_before():
    """A hook that adds to what the heads give acts on other features once some are gone."""
    config = t.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, vocab_size=60)
    mask = torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1])
    remove_heads_(t.BertModel(config), mask)
    model = t.BertModel(config).eval()
    torch.nn.init.normal_(model.encoder.layer[0].attention.output.dense.weight)
    model.encoder.layer[0].attention.output.dense.register_forward_pre_hook(lambda _, given: (given[0].cumsum(-1),))
    before = [parameter.shape for parameter in model.parameters()]
    with pytest.raises(GateError, match="nothing was changed"):
        remove_heads_(model, mask)
    assert [parameter.shape for parameter in model.parameters()] == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gate_values_are_finite_numbers(value):
    model = build("bert")
    values = torch.ones(8)
    values[2] = value
    for change in (zero_heads_, remove_heads_):
        with pytest.raises(GateError, match=f"a gate value is {value}"):
            change(model, torch.ones(8), values=values)
