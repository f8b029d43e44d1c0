import json

import pytest
import torch
import transformers

from gates.errors import GateError
from tests.models import build, logits
from training.config import PrunerOptions, Source
from training.data.synthetic import build_tokenizer
from training.data.translation import of_words
from training.tasks import Classification, from_config, names_of_classes, stated_labels

BATCH = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}


def load(folder, **more):
    return Classification(["no", "yes"]).build(Source(str(folder), **more), of_words(["a", "b"], max_length=16))


@pytest.mark.parametrize(("finetune", "trunk", "warns"), [(0, True, True), (1, True, False), (0, False, False)])
def test_a_new_classifier_that_is_not_fine_tuned_is_named(tmp_path, capsys, finetune, trunk, warns):
    model = build("bert")
    (model.bert if trunk else model).save_pretrained(tmp_path)
    source = PrunerOptions(backbone=str(tmp_path), finetune=finetune)
    Classification(["no", "yes"]).build(source, of_words(["a", "b"], max_length=16))
    assert ("'classifier.bias' is not in the files" in capsys.readouterr().out) == warns


def test_a_misspelt_field_of_a_new_model_is_named():
    fields = {"model_type": "bert", "num_hiden_layers": 3}
    with pytest.raises(GateError, match="'num_hiden_layers', which a config of bert does not have; did you mean 'num_hidden"):
        from_config(transformers.AutoModelForSequenceClassification, fields)
    assert from_config(transformers.AutoModel, {"model_type": "gpt2", "n_embd": 8, "num_attention_heads": 2, "n_layer": 1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "vit"}, "is a model of type 'vit', which takes no text"),
        ({"model_type": "vit", "vocab_size": 9}, "is a model of type 'vit', which takes no text"),
        ({"model_type": "BERT"}, "the model_type 'BERT', which Transformers does not know; did you mean 'bert'"),
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": ["bert"]}, "Transformers does not know"),
        ({"model_type": "bert", "hidden_size": 30, "num_attention_heads": 8}, "does not make a model: The hidden size"),
    ],
)
def test_a_new_model_that_cannot_be_is_told_by_what_the_user_gave(fields, message):
    with pytest.raises(GateError, match=message):
        Classification(["no", "yes"]).build(Source(from_scratch=fields), build_tokenizer())


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


@pytest.mark.parametrize(
    ("stated", "labels", "named"),
    [
        (["negative", "positive"], ["Negative", "Positive"], ["Negative", "Positive"]),
        (["negative", "positive"], ["0", "1"], ["negative", "positive"]),
        (["LABEL_0", "LABEL_1"], ["0", "1"], ["0", "1"]),
        (["negative", "positive"], ["good", "poor"], "has the classes negative, positive, and the data have good, poor"),
        (["LABEL_0", "LABEL_1"], ["good", "poor"], "label the data with the model's classes or their numbers, 0 to 1"),
        (["negative", "positive"], ["0", "1", "2"], "so it is not clear which is which"),
        (["positive", "negative"], ["negative", "positive"], "or correct id2label in its config.json"),
    ],
)
def test_the_classes_of_a_model_that_is_not_trained_are_never_guessed(stated, labels, named):
    config = transformers.BertConfig(architectures=["BertForSequenceClassification"], id2label=dict(enumerate(stated)))
    if isinstance(named, list):
        assert names_of_classes(labels, config, "mine") == named
    else:
        with pytest.raises(GateError, match=named):
            names_of_classes(labels, config, "mine")
    config.architectures = ["BertModel"]  # it will have a new classifier
    assert names_of_classes(labels, config, "mine") == labels


def test_a_classifier_of_another_size_that_is_not_trained_is_refused(tmp_path):
    build("bert").save_pretrained(tmp_path)
    three = Classification(["a", "b", "c"])
    with pytest.raises(GateError, match=r"'classifier\.\w+' has the shape .* give data with the classes of the model"):
        three.build(PrunerOptions(backbone=str(tmp_path), finetune=0), of_words(["a", "b"], max_length=16))
    assert three.build(PrunerOptions(backbone=str(tmp_path), finetune=1), of_words(["a", "b"], max_length=16)).num_labels == 3
