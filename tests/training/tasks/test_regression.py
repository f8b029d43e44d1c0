"""A number for each sentence: loss, metrics and model."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import BertConfig, BertForSequenceClassification

from gates.errors import GateError
from training.config import Source
from training.data.synthetic import build_tokenizer
from training.data.translation import of_words
from training.pruner.distillation import Teacher, distillation_terms, number_mse
from training.stats.bootstrap import metric_values, resample_metric
from training.tasks import Classification, Regression

FIELDS = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
BATCH = {
    "input_ids": torch.tensor([[3, 4, 5, 6], [7, 5, 4, 1], [8, 9, 3, 4]]),
    "attention_mask": torch.ones(3, 4, dtype=torch.long),
    "labels": torch.tensor([0.5, 3.0, 4.5]),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Regression().build(Source(from_scratch=FIELDS), build_tokenizer()).eval()


def test_the_loss_is_the_one_that_transformers_has_for_numbers(model):
    losses, predicted = Regression().losses(model, BATCH)
    assert losses.shape == (3,)
    assert predicted.shape == (3, 1)
    torch.testing.assert_close(losses.mean(), model(**BATCH).loss)


def correlations(predicted, targets, *, rows=32):
    """What the metrics of the task find, in batches, and what statistics find of the same numbers."""
    metrics = Regression().metrics("select")
    predicted, targets = torch.as_tensor(predicted, dtype=torch.float32), torch.as_tensor(targets, dtype=torch.float32)
    for part, labels in zip(predicted.split(rows), targets.split(rows), strict=True):
        metrics.update(part, labels)
    found = {name: float(value) for name, value in metrics.compute().items()}
    assert found == {name: float(metric_values(predicted.numpy(), targets.numpy(), name)) for name in found}
    return found, predicted.double().numpy(), targets.double().numpy()


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e30])
@pytest.mark.parametrize("of_targets", [False, True])
def test_where_one_of_both_is_always_the_same_there_is_no_correlation(constant, of_targets):
    """Undefined as SciPy has it, which no table and no choice between masks can take; so on every resample of examples."""
    varied, same = np.random.default_rng(0).normal(size=101), np.full(101, constant)
    predicted, targets = (varied, same) if of_targets else (same, varied)
    assert correlations(predicted, targets)[0] == {"pearson": 0.0, "spearman": 0.0}
    for name in ("pearson", "spearman"):
        assert not resample_metric(predicted[None], targets, name, resamples=50)[1].any()


def rated(random, levels=None):
    """So many ratings that the sum of the ranks of one level is above 2 ** 31, and predictions with or without levels."""
    targets = random.integers(1, 6, size=150_000)
    predicted = targets + random.normal(size=len(targets))
    return (predicted if levels is None else np.round(predicted)), targets


def with_an_outlier(random):
    targets = random.normal(size=5000)
    predicted = targets + random.normal(size=5000)
    predicted[0], targets[0] = 200, 100
    return predicted, targets


HARD = {
    "ratings": rated,
    "ratings with ties": lambda random: rated(random, levels=5),
    "an outlier": with_an_outlier,
    "a large offset": lambda random: (1000 + 0.01 * (y := random.normal(size=5000)) + 0.01 * random.normal(size=5000), y),
    "the last digit": lambda random: (5 + 1e-6 * random.normal(size=500), random.normal(size=500)),
    "two examples": lambda random: (np.array([0.3, 0.4]), np.array([2.0, 1.0])),
    "large": lambda random: (1e30 * (y := random.normal(size=50)) + 1e30 * random.normal(size=50), 1e-30 * y),
}


@pytest.mark.parametrize("name", HARD)
def test_correlations_of_hard_numbers_are_those_of_scipy(name):
    found, predicted, targets = correlations(*HARD[name](np.random.default_rng(0)), rows=5000)
    assert found["pearson"] == pytest.approx(stats.pearsonr(predicted, targets).statistic, abs=1e-9)
    assert found["spearman"] == pytest.approx(stats.spearmanr(predicted, targets).statistic, abs=1e-9)


def test_resamples_without_the_outlier_have_the_correlation_of_the_others():
    random = np.random.default_rng(1)
    targets = random.normal(size=20)
    predicted = targets + random.normal(size=20)
    predicted[3], targets[4] = 1e9, -1e9
    drawn = np.random.default_rng(0).integers(20, size=(40, 20))
    expected = [stats.pearsonr(predicted[rows], targets[rows]).statistic for rows in drawn]
    assert any(not {3, 4} & set(rows) for rows in drawn.tolist())
    replicates = resample_metric(predicted[None], targets, "pearson", resamples=40)[1][:, 0]
    np.testing.assert_allclose(replicates, expected, atol=1e-6)


def test_a_number_is_learned_from_the_dense_models(model):
    student, teacher = torch.tensor([[1.0], [4.0]], requires_grad=True), torch.tensor([[2.0], [2.0]])
    distance = number_mse(student, teacher)
    assert float(distance.detach()) == pytest.approx(2.5)
    distance.backward()
    assert student.grad[:, 0].tolist() == [-1.0, 2.0]

    class Fixed(Teacher):
        def __init__(self):
            self.only_stack = "encoder"

        def __call__(self, task, batch, *, hidden_states):
            return teacher, None

    batch = {"labels": torch.tensor([0.0, 1.0])}
    terms = distillation_terms(Fixed(), Regression(), batch, student, None, temperature=1.0, hidden_states=False)
    assert [float(term.detach()) for term in terms] == pytest.approx([2.5, 0])
    batch = {"labels": torch.tensor([0, 0])}  # a class alone has a probability of 1, whatever its logit
    terms = distillation_terms(Fixed(), Classification(["one"]), batch, student, None, temperature=1.0, hidden_states=False)
    assert float(terms[0].detach()) == 0


@pytest.mark.parametrize(
    ("task", "wanted"), [(Classification(["a", "b"]), "single_label_classification"), (Regression(), "regression")]
)
@pytest.mark.parametrize("before", ["multi_label_classification", "regression", None])
def test_a_model_says_what_it_was_trained_for_and_not_what_the_backbone_was(task, wanted, before, tmp_path):
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
    others = {"finetuning_task": "stsb", "task_specific_params": {"text-classification": {"function_to_apply": "none"}}}
    config = BertConfig(**fields, num_labels=5, problem_type=before, **others)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    model = task.build(Source(str(tmp_path)), of_words(["a", "b"], max_length=16))
    assert model.config.problem_type == wanted
    assert model.config.num_labels == len(model.config.id2label) == len(model.config.label2id)
    assert not getattr(model.config, "finetuning_task", None)
    assert not getattr(model.config, "task_specific_params", None)


def test_a_tokenizer_with_more_tokens_than_the_model_has(tmp_path):
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 4}
    BertForSequenceClassification(BertConfig(**fields)).save_pretrained(tmp_path)
    tokenizer = of_words(["a", "b"], max_length=16)
    for task in (Classification(["a", "b"]), Regression()):
        with pytest.raises(GateError, match=r"the tokenizer has tokens up to number 4, but .* has embeddings of 4"):
            task.build(Source(str(tmp_path)), tokenizer)
