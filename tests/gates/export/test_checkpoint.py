import copy
import json
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export import checkpoint
from gates.export.checkpoint import load_pruned, own_auto_class, save_pruned
from gates.surgery.masks import load_mask
from gates.surgery.remove import remove_heads_
from tests.gates.chosen import chosen
from tests.models import FAMILIES, build, inputs, logits, masked, random_mask, run_fresh

FRESH_PROCESS = """
import json, sys, torch, transformers
for name in ("gates", "training", "torchmetrics", "pytorch_lightning", "wandb", "jsonargparse"):
    sys.modules[name] = None  # importing this project, or what it needs beside torch and transformers, is an error
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
results = {}
for case in json.load(open(sys.argv[1])):
    auto = getattr(transformers, case["auto"])
    model = auto.from_pretrained(case["directory"], trust_remote_code=case["remote"]).eval()
    with torch.no_grad():
        results[case["name"]] = model(**torch.load(case["inputs"]))[0]
torch.save(results, sys.argv[2])
"""


def loaded_again(folder, cases):
    """Load every case in one process without this project; returns what each gave, by name."""
    (folder / "cases.json").write_text(json.dumps(cases))
    run_fresh(FRESH_PROCESS, folder / "cases.json", folder / "results.pt", folder=folder)
    return torch.load(folder / "results.pt")


def save(name, directory, **more):
    model, mask = build(name), random_mask(name)
    return model, mask, save_pruned(model, directory, mask, check_batch=inputs(name), **more, tokenizer=None)


@pytest.mark.integration
def test_every_family_reloads_in_a_process_without_this_project(tmp_path):
    """In pruned form with its own code, in masked and stock form without any."""
    cases, expected = [], {}
    for name in FAMILIES:
        model = build(name)
        torch.save(inputs(name), tmp_path / f"{name}.pt")
        masks = {"pruned": random_mask(name), "masked": random_mask(name)}
        if name == "llama":
            masks["stock"] = torch.tensor([1.0, 0, 1, 0]).repeat(2)
        for form, mask in masks.items():
            reference = masked(model, mask, lambda name=name, model=model: logits(model, inputs(name)))
            directory = save_pruned(
                model, tmp_path / f"{name}-{form}", mask, form=form, check_batch=inputs(name), tokenizer=None
            )
            case = {"name": directory.name, "auto": own_auto_class(model), "directory": str(directory)}
            cases.append(case | {"inputs": str(tmp_path / f"{name}.pt"), "remote": form == "pruned"})
            expected[directory.name] = reference
    found = loaded_again(tmp_path, cases)
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        torch.testing.assert_close(found[name], reference, atol=5e-6, rtol=1e-5, msg=name)


def test_folded_gate_values_survive(tmp_path):
    model, mask = build("bert"), random_mask("bert")
    values = torch.rand(8)
    expected = masked(model, mask * values, lambda: logits(model, inputs("bert")))
    save_pruned(model, tmp_path / "out", mask, values=values, tokenizer=None)
    torch.testing.assert_close(logits(load_pruned(tmp_path / "out").eval(), inputs("bert")), expected, atol=3e-6, rtol=1e-5)


def test_saving_does_not_change_the_model(tmp_path):
    model = build("bert")
    expected = logits(model, inputs("bert"))
    save_pruned(model, tmp_path / "out", random_mask("bert"), tokenizer=None)
    assert torch.equal(logits(model, inputs("bert")), expected)
    assert not hasattr(model.config, "pruned_attention")
    assert not hasattr(model.config, "auto_map")


def test_whoever_can_read_one_file_of_an_export_can_read_all(tmp_path):
    """Another user, such as a server, loads it; safetensors writes files for their owner alone."""
    save("bert", tmp_path / "out")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}) == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_taken_directory_is_refused(tmp_path, overwrite):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(GateError, match="exists already"):
        save("bert", tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "precious"


def test_an_earlier_export_is_replaced_if_asked_for_and_stays_if_the_new_one_fails(tmp_path, monkeypatch):
    model, mask, directory = save("bert", tmp_path / "out")
    with pytest.raises(GateError, match="exists already"):
        save_pruned(model, directory, mask)
    (directory / "thesis.tex").touch()
    with pytest.raises(GateError, match="exists already"):
        save_pruned(model, directory, mask, overwrite=True)
    (directory / "thesis.tex").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("gates.export.checkpoint.card_text", fails)
        with pytest.raises(RuntimeError):
            save_pruned(model, directory, 1 - mask, overwrite=True)
    assert torch.equal(load_mask(directory / "mask.json", find_attention(model)), mask)
    save_pruned(model, directory, 1 - mask, overwrite=True)
    assert torch.equal(load_mask(directory / "mask.json", find_attention(model)), 1 - mask)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def fails(*arguments, **more):
    raise RuntimeError


def test_nothing_is_kept_when_the_reloaded_model_differs(tmp_path, monkeypatch):
    def spoiled(*arguments, **more):
        model = load_pruned(*arguments, **more)
        with torch.no_grad():
            model.classifier.bias.add_(1.0)
        return model

    monkeypatch.setattr(checkpoint, "load_pruned", spoiled)
    with pytest.raises(GateError, match="differs"):
        save("bert", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("checked", [True, False], ids=["with checksums", "without checksums"])
@pytest.mark.parametrize("damage", ["truncate", "delete", "config", "lost tensor"])
def test_damaged_directories_are_refused(tmp_path, damage, checked):
    _, _, directory = save("bert", tmp_path / "out", form="pruned" if checked else "masked")
    weights = directory / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-500])
    elif damage == "delete":
        weights.unlink()
    elif damage == "config":
        (directory / "config.json").write_text("{")
    else:
        tensors = load_file(weights)
        del tensors["classifier.bias"]
        save_file(tensors, weights, metadata={"format": "pt"})
    if not checked:
        (directory / "checksums.json").unlink()
    with pytest.raises(GateError, match="out"):
        load_pruned(directory)


def hostile(directory, change):
    """Change the pruned shape in a saved config, as someone who also knows of the checksums would."""
    config = json.loads((directory / "config.json").read_text())
    change(config["pruned_attention"])
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "checksums.json").unlink()


SITE = "encoder.layer.0.attention"


@pytest.mark.parametrize(
    "change",
    [
        lambda shapes: shapes.update({'x"); import os; os.system("boom"); ("': shapes.pop(SITE)}),
        lambda shapes: shapes.update({"encoder.layer.7.attention": shapes.pop("encoder.layer.1.attention")}),
        lambda shapes: shapes["encoder.layer.1.attention"]["projections"].update({"self.query": [32, 10**15]}),
        lambda shapes: shapes["encoder.layer.1.attention"]["projections"].update({"self.query": [32, 24]}),
        lambda shapes: shapes["encoder.layer.1.attention"]["attributes"].update({"forward": "boom"}),
        lambda shapes: shapes["encoder.layer.1.attention"].update(heads=3, kv_heads=3),
        lambda shapes: shapes["encoder.layer.1.attention"].update(heads=0, kv_heads=0),
        lambda shapes: shapes.clear(),
    ],
)
def test_impossible_and_hostile_shapes_are_refused(tmp_path, change):
    """By name and number before any weight is used; what only contradicts the weights, by these."""
    model, mask = build("bert"), torch.tensor([0.0, 0, 0, 0, 1, 1, 0, 0])
    save_pruned(model, tmp_path / "out", mask, tokenizer=None)
    hostile(tmp_path / "out", change)
    with pytest.raises(GateError) as caught:
        load_pruned(tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_code_beside_the_weights_does_not_run(tmp_path):
    """Neither the modeling file of an export nor a config class that a config names."""
    _, _, directory = save("bert", tmp_path / "out")
    (directory / "modeling_pruned.py").write_text("raise SystemExit('this ran')")
    (directory / "checksums.json").unlink()
    load_pruned(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "unheard-of", "auto_map": {"AutoConfig": "modeling_pruned.Config"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(GateError, match="cannot be read"):
        load_pruned(directory)


def test_a_pickle_is_not_read(tmp_path):
    _, _, directory = save("bert", tmp_path / "out", form="masked")
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    (directory / "checksums.json").unlink()
    with pytest.raises(GateError, match="cannot be loaded"):
        load_pruned(directory)


@pytest.mark.parametrize("form", ["masked", "stock"])
def test_forms_of_a_dense_shape_are_refused_for_a_pruned_model(tmp_path, form):
    pruned = remove_heads_(build("llama"), torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1]))
    with pytest.raises(GateError, match="this one is pruned"):
        save_pruned(pruned, tmp_path / "out", torch.ones(6), form=form, tokenizer=None)


def test_eager_attention_and_padding_on_the_left(tmp_path):
    """What padded tokens see differs between implementations; they do not count."""
    model, batch = build("llama"), inputs("llama")
    assert int(batch["attention_mask"][1, 0]) == 0
    model.set_attn_implementation("eager")
    save_pruned(model, tmp_path / "out", random_mask("llama"), check_batch=batch, tokenizer=None)


def test_without_a_batch_the_comparison_is_on_random_inputs(tmp_path, monkeypatch):
    monkeypatch.setattr(
        checkpoint,
        "remove_heads_",
        lambda model, mask, values, example: remove_heads_(model, mask, values=mask * 2, example=example),
    )
    with pytest.raises(GateError, match="differs"):
        save_pruned(build("bert"), tmp_path / "out", random_mask("bert"), tokenizer=None)
    assert list(tmp_path.iterdir()) == []


# -- pickles and subclasses --------------------------------------------------------------------------------------


def first_output(model, batch):
    with torch.no_grad():
        return model.eval()(**batch)[0]


def pruned_anew(name, tmp_path):
    """A model without some heads, one layer without any, loaded from its export; or a skip."""
    model = build(name).eval()
    mask = torch.ones(sum(site.heads for site in find_attention(model)))
    mask[: find_attention(model)[0].heads] = 0
    try:
        return load_pruned(save_pruned(model, tmp_path / name, mask, tokenizer=None))
    except GateError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", chosen(FAMILIES, fast=["llama"], integration=["bert", "gpt2", "bart"]))
def test_a_loaded_model_can_be_pickled_copied_and_saved_by_pytorch(tmp_path, name):
    model, batch = pruned_anew(name, tmp_path), inputs(name)
    expected = first_output(model, batch)
    torch.save(model, tmp_path / "model.pt")
    copies = [
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(copy.deepcopy(model))),
    ]
    for number, other in enumerate(copies):
        assert type(other) is type(model)
        torch.testing.assert_close(first_output(other, batch), expected)
        other.save_pretrained(tmp_path / str(number))
        torch.testing.assert_close(first_output(load_pruned(tmp_path / str(number)), batch), expected)


class OwnBert(transformers.BertForSequenceClassification):
    """A subclass that computes what its stock class computes."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class LargerBert(OwnBert):
    """A subclass with a weight of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(()))


class OtherBert(OwnBert):
    """A subclass that computes something else."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits + 1
        return output


def own_bert(kind):
    torch.manual_seed(0)
    return kind(build("bert").config).eval()


@pytest.mark.parametrize("form", ["pruned", "masked"])
def test_a_subclass_is_exported_as_its_stock_class_and_loaded_as_either(tmp_path, form):
    model, batch = own_bert(OwnBert), {"input_ids": torch.arange(12).view(2, 6)}
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 0])
    path = save_pruned(model, tmp_path / "export", mask, form=form, tokenizer=None)
    assert type(model) is OwnBert
    loaded, own = load_pruned(path), load_pruned(path, model_class=OwnBert)
    assert loaded.config.architectures == ["BertForSequenceClassification"]
    assert isinstance(own, OwnBert)
    torch.testing.assert_close(first_output(own, batch), first_output(loaded, batch))
    again = load_pruned(save_pruned(own, tmp_path / "again", None if form == "pruned" else mask, tokenizer=None))
    torch.testing.assert_close(first_output(again, batch), first_output(loaded, batch))


def test_a_pruned_subclass_is_saved_by_the_function_that_its_save_pretrained_names(tmp_path):
    model, batch = own_bert(OwnBert), {"input_ids": torch.arange(12).view(2, 6)}
    expected = first_output(remove_heads_(model, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 0])), batch)
    message = (
        r"OwnBert is your own subclass.*call gates\.save_pruned\(model, directory\), which writes it as BertForSequenceClass"
    )
    with pytest.raises(GateError, match=message):
        model.save_pretrained(tmp_path / "refused")
    assert not list(tmp_path.rglob("*.*"))
    loaded = load_pruned(save_pruned(model, tmp_path / "export"))
    torch.testing.assert_close(first_output(loaded, batch), expected)


def test_a_subclass_that_is_more_than_its_stock_class_is_refused(tmp_path):
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1])
    with pytest.raises(GateError, match="LargerBert has the weight 'scale', which BertForSequenceClassification does not have"):
        save_pruned(own_bert(LargerBert), tmp_path / "export", mask, tokenizer=None)
    with pytest.raises(GateError, match="differ"):
        save_pruned(own_bert(OtherBert), tmp_path / "export", mask, tokenizer=None)
    assert not (tmp_path / "export").exists()
