"""What tasks call their metrics for Hugging Face's library evaluate: what its scripts call gives the same numbers."""

import pytest
import sacrebleu
import scipy.stats
import sklearn.metrics
import torch

from training.tasks.causal_lm import CausalLM
from training.tasks.classification import Classification
from training.tasks.regression import Regression
from training.tasks.token_classification import TokenClassification
from training.tasks.translation import Translation
from training.tasks.translation_metrics import TextScore

REFERENCES = {  # with the names of evaluate
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": sklearn.metrics.f1_score,
    "matthews_correlation": sklearn.metrics.matthews_corrcoef,
    "pearsonr": lambda true, predicted: scipy.stats.pearsonr(true, predicted)[0],
    "spearmanr": lambda true, predicted: scipy.stats.spearmanr(true, predicted)[0],
    "sacrebleu": lambda true, predicted, **more: sacrebleu.corpus_bleu(predicted, [true], **more).score,
    "chrf": lambda true, predicted: sacrebleu.corpus_chrf(predicted, [true]).score,
}


def evaluated(task, name, true, predicted):
    stated = task.metric_types()[name]
    return REFERENCES[stated["type"]](true, predicted, **stated.get("args", {}))


@pytest.mark.parametrize(
    "task",
    [Classification(["no", "yes"], "binary_f1"), Classification(["a", "b", "c"]), Regression()],
    ids=["2", "3", "number"],
)
@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef`")
def test_numbers_and_classes(task):
    generator = torch.Generator().manual_seed(0)
    classes = len(task.labels) if isinstance(task, Classification) else 0
    logits = torch.randn(200, classes or 1, generator=generator)
    labels = (
        torch.randint(classes, (200,), generator=generator) if classes else logits[:, 0] + torch.randn(200, generator=generator)
    )
    metrics = task.metrics("test")
    metrics.update(logits if classes else logits[:, 0], labels)
    predicted = logits.argmax(-1) if classes else logits[:, 0]
    found = metrics.compute()
    assert len(found) >= 2
    for name, value in found.items():
        assert float(value) == pytest.approx(evaluated(task, name, labels.numpy(), predicted.numpy()), abs=1e-5)


@pytest.mark.parametrize("tokenize", ["13a", "zh"])
def test_translations_with_the_tokenizer_of_the_task(tokenize):
    task = Translation.__new__(Translation)
    task.bleu_tokenize = tokenize
    predicted, true = ["我们今天去北京看朋友。", "他在家里读书"], ["我们明天去北京看朋友。", "她在家里读书"]
    for name in ("bleu", "chrf"):
        score = TextScore(name, tokenize)
        score.update(torch.arange(2), predicted, true)
        assert float(score.compute()) == pytest.approx(evaluated(task, name, true, predicted), abs=1e-4)


@pytest.mark.parametrize(
    ("tags", "scheme", "expected"),
    [
        (["O", "B-PER", "I-PER"], "BIO", "IOB2"),
        (["O", "B-PER", "E-PER", "S-PER"], "IOBES", "IOBES"),
        (["O", "B-PER", "L-PER", "U-PER"], "IOBES", "BILOU"),
    ],
)
def test_entities_are_those_of_seqevals_strict_mode_in_their_scheme(tags, scheme, expected):
    """What seqeval finds by default is more: an entity that begins with I counts there, and not here."""
    assert TokenClassification(tags, scheme).metric_types()["entity_f1"] == {
        "type": "seqeval",
        "args": {"mode": "strict", "scheme": expected},
    }
    assert "entity_f1" not in TokenClassification(["NOUN", "VERB"]).metric_types()


def test_perplexities_keep_their_names():
    """Since evaluate's loads a model of its own."""
    assert set(CausalLM().metrics("test")) - set(CausalLM().metric_types()) == {
        "perplexity",
        "word_perplexity",
        "byte_perplexity",
    }
