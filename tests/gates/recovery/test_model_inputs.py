"""The rows that count are those that the model's own code says, and the fit is that of a dense system on them."""

import pytest
import torch
import transformers as t

from gates import get_gated_model
from gates.attention.inputs import example_inputs
from gates.attention.sites import weight_by_output
from gates.attention.valid import stack_of
from gates.errors import GateError
from gates.recovery.refit import found_queries
from tests.gates.chosen import architectures
from tests.gates.layouts import TIME_FIRST
from tools.coverage import architectures as zoo
from tools.coverage.tiny import tiny_config

SOUND = torch.tensor([[1] * 8000, [1] * 5000 + [0] * 3000, [1] * 6500 + [0] * 1500])
FRAMES = torch.tensor([[1] * 128, [1] * 70 + [0] * 58, [1] * 101 + [0] * 27])
LABELS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, -100, -100], [5, 6, -100, -100, -100]])


def tiny(config_class, model_class, length=12, **more):
    """A tiny model whose heads and biases matter, and a batch with a padded text."""
    config = tiny_config(config_class())
    if config_class is t.Kosmos2_5Config:
        config.text_config.layers = 2
    torch.manual_seed(0)
    model = zoo.randomise_(model_class(config)).eval()
    return model, {**example_inputs(model, batch=3, length=length, padded=True), **more}


def of_sound(model, batch):
    return {"encoder.layers": model._get_feature_vector_attention_mask(24, batch["attention_mask"])}


def of_frames(model, batch):
    lengths = ((batch["attention_mask"].sum(1) - 1) // 2 + 1 - 1) // 2 + 1
    target = batch["labels"] != -100
    return {"model.encoder.layers": torch.arange(32) < lengths.unsqueeze(1), "model.decoder.layers": target}


def behind_the_picture(model, batch):
    picture = torch.ones(3, 17, dtype=torch.long)
    return {
        "image_encoder.vision_model.encoder.layers": picture,
        "encoder.layer": torch.cat([picture, batch["attention_mask"]], dim=1),
    }


def of_patches(model, batch):
    return {
        "vision_model.encoder.layer": batch["flattened_patches"].sum(-1) != 0,
        "text_model.model.layers": batch["attention_mask"],
        "image_to_text_projection.x_attn": torch.ones(3, 64),
    }


def idefics3():
    return tiny(t.Idefics3Config, t.Idefics3Model)


def llava():
    return tiny(t.LlavaConfig, t.LlavaModel)


def altclip():
    """Texts as long as pictures, and the attention of both is bidirectional."""
    model, batch = tiny(t.AltCLIPConfig, t.AltCLIPModel)
    rows = (batch["pixel_values"].shape[-1] // model.config.vision_config.patch_size) ** 2 + 1
    ids, mask = torch.randint(3, 100, (3, rows)), torch.ones(3, rows, dtype=torch.long)
    mask[1, rows - 4 :] = 0
    return model, {"pixel_values": batch["pixel_values"], "input_ids": ids, "attention_mask": mask}


def kosmos():
    model, batch = tiny(t.Kosmos2_5Config, t.Kosmos2_5Model)
    batch["flattened_patches"][1, -3:] = 0  # a smaller picture
    return model, batch


def fsmt(length=12):
    """Time comes before the examples in its states, and with three tokens both axes are equally long."""
    ids = torch.randint(3, 40, (3, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, -1] = mask[2, -1] = 0  # not symmetric
    model = zoo.randomise_(t.FSMTForConditionalGeneration(t.FSMTConfig(**TIME_FIRST))).eval()
    model.config.use_cache = False  # with a cache, FSMT makes no causal mask
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100), "decoder_input_ids": ids}


def of_translation(_, batch):
    return {"model.encoder.layers": batch["attention_mask"], "model.decoder.layers": batch["labels"] != -100}


def choices():
    model = t.BertForMultipleChoice(tiny_config(t.BertConfig()))
    mask = torch.ones(3, 4, 7, dtype=torch.long)
    mask[:, 1::2, 5:] = 0
    return zoo.randomise_(model).eval(), {"input_ids": torch.randint(3, 50, (3, 4, 7)), "attention_mask": mask}


MODELS = {
    "Idefics3": (idefics3, lambda _, b: {"vision_model.encoder.layers": None, "text_model.layers": b["attention_mask"]}),
    "LLaVA": (llava, lambda _, b: {"vision_tower.encoder.layers": None, "language_model.layers": b["attention_mask"]}),
    "AltCLIP": (
        altclip,
        lambda _, b: {"vision_model.encoder.layers": None, "text_model.roberta.encoder.layers": b["attention_mask"]},
    ),
    "Wav2Vec2": (lambda: tiny(t.Wav2Vec2Config, t.Wav2Vec2Model, attention_mask=SOUND), of_sound),
    "WavLM": (lambda: tiny(t.WavLMConfig, t.WavLMModel, attention_mask=SOUND), of_sound),
    "HuBERT": (lambda: tiny(t.HubertConfig, t.HubertModel, attention_mask=SOUND), of_sound),
    "Speech2Text": (
        lambda: tiny(
            t.Speech2TextConfig,
            t.Speech2TextForConditionalGeneration,
            attention_mask=FRAMES,
            labels=LABELS,
            decoder_input_ids=LABELS.clamp(min=1),
        ),
        of_frames,
    ),
    "GIT": (lambda: tiny(t.GitConfig, t.GitModel), behind_the_picture),
    "Kosmos-2.5": (kosmos, of_patches),
    "FSMT": (fsmt, of_translation),
    "FSMT, square": (lambda: fsmt(3), of_translation),
    "choices": (choices, lambda _, b: {"bert.encoder.layer": b["attention_mask"].flatten(0, 1)}),
    **{
        name: (
            lambda name=name: (zoo.build(zoo.BY_NAME[name]), zoo.inputs(zoo.BY_NAME[name])),
            lambda _, b, stack=stack: {stack: b["attention_mask"]},
        )
        for name, stack in {
            "Bert": "bert.encoder.layer",
            "Llama": "model.layers",
            "OPT": "model.decoder.layers",
            "GPT2": "transformer.h",
            "GPTNeo": "transformer.h",
        }.items()
    },
}


def dense_fit(x, y, weight, ridge, has_bias):
    """The weight of least squares near a weight, by one stacked system in float64."""
    x, y, weight = x.double(), y.double(), weight.double()
    x, y = (x - x.mean(0), y - y.mean(0)) if has_bias else (x, y)
    price = (ridge * x.square().sum(0).mean()).sqrt()
    rows = torch.cat([x, price * torch.eye(x.shape[1], dtype=x.dtype)])
    return torch.linalg.lstsq(rows, torch.cat([y, price * weight.T])).solution.T


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # of WavLM
@pytest.mark.parametrize("name", list(MODELS))
def test_a_refit_is_the_dense_least_squares_fit_on_the_rows_that_count(name):
    """Of the first site of every stack, before which nothing is lost: its inputs and outputs are those of the dense model."""
    build, rows_of = MODELS[name]
    model, batch = build()
    gated = get_gated_model(model)
    expected = rows_of(model, batch)
    sites = gated.gates.sites
    assert {stack_of(site) for site in sites} == set(expected)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for stack, valid in expected.items():
        index, site = next((number, one) for number, one in enumerate(sites) if stack_of(one) == stack)
        calls = []
        handle = site.output.register_forward_hook(lambda _, args, output, calls=calls: calls.append((args[0], output)))
        with torch.no_grad(), gated.disable_gates():
            gated(**batch)
        handle.remove()
        ((x, y),) = calls
        if name.startswith("FSMT") or name == "WavLM":
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        mask = torch.ones(gated.gates.size)
        first = sum(gated.gates.sizes[:index])
        mask[first + 1] = 0
        kept = torch.ones(site.heads, site.head_dim)
        kept[:: site.heads // gated.gates.sizes[index]][1] = 0
        kept = kept.flatten().bool()
        counted = torch.ones(x.shape[:-1], dtype=torch.bool) if valid is None else valid.bool()
        name_of_weight = next(key for key, module in model.named_modules() if module is site.output)
        weight = weight_by_output(site.output).detach().clone()
        reference = dense_fit(x[counted][:, kept], y[counted], weight[:, kept], 0.01, site.output.bias is not None)
        gated.set_mask_(mask).refit_([batch], held_out=None, ridge=0.01, feed_forward=False)
        found = weight_by_output(model.get_submodule(name_of_weight)).detach()
        torch.testing.assert_close(found[:, kept].double(), reference, rtol=1e-3, atol=1e-4)
        assert torch.equal(found[:, ~kept], weight[:, ~kept])
        model.load_state_dict(before)
        gated.gates.mode = "stochastic"
        if x[~counted].any():  # the fit on all rows is another one, so that the test can tell them apart
            on_all = dense_fit(x.flatten(0, -2)[:, kept], y.flatten(0, -2), weight[:, kept], 0.01, site.output.bias is not None)
            assert (on_all - reference).abs().max() > 2e-3


def found(model, batch, valid=None):
    gated = get_gated_model(model)
    return gated, found_queries(gated.gates, lambda one: model(**one), valid, batch)


def test_given_masks_are_taken_and_the_others_are_found():
    model, batch = idefics3()
    own = torch.ones(3, 16, dtype=torch.bool)
    own[0, 3:] = False
    _, rows = found(model, batch, lambda one: {"vision_model": own})
    assert rows["vision_model"] is own
    assert torch.equal(rows["text_model.layers.0.self_attn"], batch["attention_mask"].bool())
    assert not any(name.startswith("vision_model.") for name in rows)


def test_nothing_runs_for_text_alone_or_where_all_is_given():
    model, batch = zoo.build(zoo.BY_NAME["Bert"]), zoo.inputs(zoo.BY_NAME["Bert"])
    gates = get_gated_model(model).gates
    rows = found_queries(gates, None, None, batch)  # None cannot be called
    assert all(rows[site.name] is batch["attention_mask"] for site in gates.sites)
    other = {"attention_mask": batch["attention_mask"], "pixel_values": torch.zeros(1)}
    assert found_queries(gates, None, lambda _: {"encoder": None}, other) == {"encoder": None}


def test_rows_that_are_not_certain_are_refused_with_a_way_out():
    """A picture's learned queries cannot be told from others where there is one example."""
    model, batch = kosmos()
    batch = {name: tensor[:1] for name, tensor in batch.items()}
    gated = get_gated_model(model)
    mask = torch.ones(gated.gates.size)
    mask[0] = 0
    gated.set_mask_(mask)
    with pytest.raises(GateError, match=r"padding rows of 'image_to_text_projection.x_attn'.*valid=lambda batch: \{'im"):
        gated.refit_([batch], held_out=None)
    assert gated.refit_([batch], held_out=None, valid=lambda one: {"image_to_text_projection.x_attn": None})


def test_layers_that_disagree_say_nothing(monkeypatch):
    """Sparse attention may leave out keys that are no padding."""
    model = zoo.build(zoo.BY_NAME["HYV4"])
    batch = zoo.inputs(zoo.BY_NAME["HYV4"])
    batch["attention_mask"] = batch["attention_mask"][:, None, None].bool() & torch.ones(8, 8, dtype=torch.bool).tril()
    with pytest.raises(GateError, match=r"padding rows of 'model.layers.0.self_attn' in this batch are unknown"):
        found(model, batch)


@pytest.mark.parametrize("name", architectures(only=lambda row: row.input in ("text", "text-to-text")))
def test_what_the_model_hands_to_its_attention_agrees_with_the_mask_of_a_text(name, monkeypatch):
    """The evidence is sound where the truth is known: it says the text's mask, or that it is not certain."""
    architecture = zoo.BY_NAME[name]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)
    if "attention_mask" not in batch or architecture.input not in ("text", "text-to-text"):
        pytest.skip("reads no text alone")
    monkeypatch.setattr("gates.recovery.refit._is_text", lambda _: False)
    if name in ("HYV4", "Longformer", "BigBird", "LED"):
        with pytest.raises(GateError, match="the padding rows of"):
            found(model, batch)
        return
    gated, rows = found(model, batch)
    for site in gated.gates.sites:
        if site.kind == "encoder" or not model.config.is_encoder_decoder:
            assert torch.equal(rows[site.name].bool(), batch["attention_mask"].bool())
        else:
            assert rows[site.name] is None
