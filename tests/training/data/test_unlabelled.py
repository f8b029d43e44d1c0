"""Files without labels: the fine-tuned model's own predictions take their place."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from training.config.data import Text
from training.data.synthetic import build_tokenizer
from training.data.text import TextData

WORDS = ["fox", "king", "basil", "sees", "the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A classifier of two classes, and files with one column."""
    path = tmp_path_factory.mktemp("unlabelled")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    tokenizer = build_tokenizer()
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes))
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    for name, rows in (("train", 80), ("test", 40)):
        texts = [" ".join(WORDS[(row * step) % 5] for step in range(1, 3 + row % 4)) for row in range(rows)]
        (path / f"{name}.csv").write_text("\n".join(["sentence", *texts]) + "\n")
    return path


def options_of(folder, **more):
    return Text(train_file=str(folder / "train.csv"), test_file=str(folder / "test.csv"), unlabelled=True, **more)


def test_labels_are_the_classes_that_the_model_predicts(folder):
    data = TextData(options_of(folder, eval_batch_size=7))
    data.build(str(folder / "model"), ["LABEL_0", "LABEL_1"])
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    data.label_by(model)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = (folder / "test.csv").read_text().splitlines()[1:]
    with torch.no_grad():
        expected = [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in texts]
    assert list(data.splits["test"]["labels"]) == expected
    assert set(expected) == {0, 1}
    assert sum(len(data.splits[name]) for name in ("train", "select")) == 80
