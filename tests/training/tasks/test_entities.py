"""Entities in tags, by hand and against regular expressions."""

import random
import re

import numpy as np
import pytest
import torch

from training.config import Source
from training.data.synthetic import build_tokenizer
from training.stats.bootstrap import majority_tag, metric_values, resample_metric
from training.tasks import TokenClassification
from training.tasks.token_classification import EntityF1, entities, entity_counts, entity_f1, scheme_of, stray_tag

TINY_BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("tags", "scheme", "found"),
    [
        ("B-A I-A O B-B", "BIO", {(0, 2, "A"), (3, 4, "B")}),
        ("B-A B-A I-A", "BIO", {(0, 1, "A"), (1, 3, "A")}),
        ("O I-A I-A", "BIO", set()),
        ("B-A I-B I-B", "BIO", {(0, 1, "A")}),
        ("B I O", "BIO", {(0, 2, "")}),
        ("B-A-C I-A-C", "BIO", {(0, 2, "A-C")}),
        ("S-A B-B I-B E-B", "IOBES", {(0, 1, "A"), (1, 4, "B")}),
        ("B-A I-A O", "IOBES", set()),
        ("B-A E-B", "IOBES", set()),
        ("E-A", "IOBES", set()),
        ("U-A B-B L-B", "IOBES", {(0, 1, "A"), (1, 3, "B")}),
        ("", "BIO", set()),
    ],
)
def test_entities_by_hand(tags, scheme, found):
    assert entities(tags.split(), scheme) == found


@pytest.mark.parametrize(("scheme", "parts", "whole"), [("BIO", "BI", "BI*"), ("IOBES", "BIES", "S|BI*E")])
def test_entities_of_one_name_are_matches_of_a_regular_expression(scheme, parts, whole):
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("O" + parts) for _ in range(rng.randint(0, 8)))
        tags = [part if part == "O" else f"{part}-A" for part in text]
        assert entities(tags, scheme) == {(*match.span(), "A") for match in re.finditer(whole, text)}


def test_schemes():
    assert scheme_of({"O", "B-A"}) == "BIO"
    assert scheme_of({"O", "B-A", "E-A"}) == "IOBES"
    assert scheme_of({"O"}) is None
    assert scheme_of({"NOUN", "O"}) is None
    assert stray_tag(["B-A", "I-A", "O", "I-A"], "BIO") == 3
    assert stray_tag(["B-A", "I-A", "O"], "BIO") is None


def test_f1_is_over_all_entities_in_any_batching():
    predicted = [["B-A", "I-A", "O"], ["B-A", "O", "B-B"], ["O"]]
    true = [["B-A", "I-A", "O"], ["B-A", "I-A", "B-B"], ["B-A"]]
    whole, parts = EntityF1("BIO"), EntityF1("BIO")
    whole.update(predicted, true)
    parts.update(predicted[:1], true[:1])
    parts.update(predicted[1:], true[1:])
    assert float(whole.compute()) == float(parts.compute()) == pytest.approx(2 * 2 / (3 + 4))
    assert entity_counts(predicted, true, "BIO").tolist() == [[1, 1, 1], [1, 2, 2], [0, 0, 1]]
    assert float(entity_f1(np.zeros(3))) == 0


def test_statistics_resample_sentences():
    true = np.array(["O B-A I-A", "B-A", "O O"] * 20)
    rows = np.stack([true, np.where(true == "B-A", "O", true)])
    assert metric_values(rows, true, "entity_f1").tolist() == pytest.approx([1, 2 / 3])
    assert metric_values(rows, true, "token_accuracy").tolist() == pytest.approx([1, 100 / 120])
    values, replicates = resample_metric(rows, true, "entity_f1", resamples=50)
    assert values.tolist() == pytest.approx([1, 2 / 3])
    assert (replicates[:, 0] == 1).all()
    assert replicates[:, 1].std() > 0
    assert majority_tag(true) == {"token_accuracy": pytest.approx(60 / 120)}


def test_a_split_without_entities_has_none():
    assert metric_values(np.array(["O O", "O"]), np.array(["O O", "O"]), "entity_f1") == 0


def test_the_loss_is_transformers_own_over_a_batch():
    torch.manual_seed(0)
    task = TokenClassification(["O", "B-X", "I-X"], "BIO")
    model = task.build(Source(from_scratch=TINY_BERT), build_tokenizer()).eval()
    labels = torch.tensor([[-100, 0, 1, 2], [-100, 1, -100, -100]])
    ids = torch.tensor([[3, 4, 5, 6], [7, 5, 4, 1]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    losses, logits = task.losses(model, batch)
    assert (losses.shape, logits.shape) == ((2,), (2, 4, 3))
    torch.testing.assert_close(task.batch_loss(losses, batch), model(**batch).loss)
    assert task.example_weights(batch).tolist() == [3, 1]
    assert task.predictions(logits, batch)[1] == ["O B-X I-X", "B-X"]
