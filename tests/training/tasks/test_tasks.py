import json

import pytest
import torch
import transformers

from gates.errors import GateError
from gates.export.checkpoint import save_pruned
from gates.surgery.remove import zero_heads_
from tests.models import build, logits
from training.config import Source
from training.data.synthetic import build_tokenizer
from training.data.translation import of_words
from training.tasks import Classification, from_config, stated_labels
from training.tasks.loading import count_parameters

BATCH = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}


def load(folder, **more):
    return Classification(["no", "yes"]).build(Source(str(folder), **more), of_words(["a", "b"], max_length=16))


def test_a_misspelt_field_of_a_new_model_is_named():
    fields = {"model_type": "bert", "num_hiden_layers": 3}
    with pytest.raises(GateError, match="'num_hiden_layers', which a config of bert has not; did you mean 'num_hidden"):
        from_config(transformers.AutoModelForSequenceClassification, fields)
    assert from_config(transformers.AutoModel, {"model_type": "gpt2", "n_embd": 8, "num_attention_heads": 2, "n_layer": 1})


def test_layers_of_any_name_are_limited_before_they_are_made():
    for fields in ({"model_type": "bert", "num_hidden_layers": 10**12}, {"model_type": "gpt2", "n_layer": 1001}):
        name = list(fields)[1]
        with pytest.raises(GateError, match=f"model.from_scratch has {name}: {fields[name]}; expected at most 1000"):
            from_config(transformers.AutoModel, fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "vit"}, "is a model of type 'vit', which takes no text"),
        ({"model_type": "vit", "vocab_size": 9}, "is a model of type 'vit', which takes no text"),
        ({"model_type": "BERT"}, "the model_type 'BERT', which Transformers does not know; did you mean 'bert'"),
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": ["bert"]}, "Transformers does not know"),
        (
            {"model_type": "bert", "hidden_size": 4_000_000, "num_attention_heads": 8},
            r"a model of 7\d\d,\S+ parameters; expected",
        ),
    ],
)
def test_a_new_model_that_cannot_be_is_told_by_what_the_user_gave(fields, message):
    with pytest.raises(GateError, match=message):
        Classification(["no", "yes"]).build(Source(from_scratch=fields), build_tokenizer())


def test_parameters_are_counted_without_a_draw_and_a_lack_of_memory_is_told(monkeypatch):
    fields = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    config = transformers.AutoConfig.for_model(**fields)
    state = torch.get_rng_state()
    count = count_parameters(transformers.AutoModel, config)
    assert torch.equal(torch.get_rng_state(), state)
    assert count == sum(parameter.numel() for parameter in transformers.AutoModel.from_config(config).parameters())

    def lacking(config):
        if torch.get_default_device().type == "meta":
            return transformers.GPT2Model(config)
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64000000000000 bytes.")

    monkeypatch.setattr(transformers.AutoModel, "from_config", lacking)
    with pytest.raises(GateError, match=f"a model of {count:,} parameters, for which there is no memory here"):
        from_config(transformers.AutoModel, fields)


def test_a_pickle_is_read_only_when_allowed(tmp_path):
    model = build("bert")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(GateError, match=r"--model\.allow_pickle true"):
        load(tmp_path)
    torch.testing.assert_close(logits(load(tmp_path, allow_pickle=True).eval(), BATCH), logits(model, BATCH))


def test_a_hostile_pickle_does_not_run_even_then(tmp_path):
    class Hostile:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    build("bert").config.save_pretrained(tmp_path)
    torch.save({"bert.pooler.dense.weight": Hostile()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(GateError, match="cannot load a classifier"):
        load(tmp_path, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def remote(folder, ran):
    config = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}, "num_labels": 2}
    (folder / "config.json").write_text(json.dumps(config))
    lines = ["from transformers import PretrainedConfig", f"open({str(ran)!r}, 'w').close()"]
    lines += ["class Config(PretrainedConfig):", "    model_type = 'unheard_of'"]
    (folder / "code.py").write_text("\n".join(lines))


def test_code_of_a_backbone_does_not_run_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "model").mkdir()
    remote(tmp_path / "model", tmp_path / "ran")
    for call in (load, lambda folder: stated_labels(str(folder))):
        with pytest.raises(GateError, match=r"--model\.trust_remote_code true"):
            call(tmp_path / "model")
    assert not (tmp_path / "ran").exists()
    stated_labels(str(tmp_path / "model"), trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_an_export_can_be_the_backbone_of_the_next_run(tmp_path):
    model = build("bert")
    save_pruned(model, tmp_path / "export", torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 0]), tokenizer=None)
    again = load(tmp_path / "export").eval()
    kept = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 0])
    torch.testing.assert_close(logits(again, BATCH), logits(zero_heads_(model, kept), BATCH), atol=3e-6, rtol=1e-5)


def test_an_unreadable_architecture_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "telepathy"}')
    with pytest.raises(GateError, match="telepathy"):
        load(tmp_path)
