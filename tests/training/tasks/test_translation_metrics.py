import numpy as np
import pytest
import sacrebleu
import torch

from training.tasks.translation import TextScore, bleu_counts, bleu_of_counts, corpus_score, paired_bootstrap, signatures

WORDS = ("aé", "ß", "bär", "c", "d", "e", "f")
REFERENCES = [f"the {word} dog runs over the {word} field, again and again ({n})." for n, word in enumerate(WORDS)]
HYPOTHESES = [text.replace("runs", "walks") if n % 2 else text.replace("again and", "") for n, text in enumerate(REFERENCES)]


@pytest.mark.parametrize(("name", "reference"), [("bleu", sacrebleu.corpus_bleu), ("chrf", sacrebleu.corpus_chrf)])
def test_scores_are_sacrebleus_in_any_batching_and_order(name, reference):
    expected = reference(HYPOTHESES, [REFERENCES]).score
    assert corpus_score(name, HYPOTHESES, REFERENCES) == pytest.approx(expected)
    metric = TextScore(name)
    for rows in ([5, 2], [0], [6, 1, 3, 4]):
        metric.update(torch.tensor(rows), [HYPOTHESES[row] for row in rows], [REFERENCES[row] for row in rows])
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-6)
    assert metric.translations() == HYPOTHESES


def test_an_empty_translation_keeps_its_place():
    metric = TextScore("bleu")
    metric.update(torch.tensor([1, 0]), ["", "a b c d"], ["x", "a b c d"])
    assert metric.translations() == ["a b c d", ""]
    metric.reset()
    assert metric.translations() == []


def test_the_bootstrap_tells_a_worse_system_from_an_equal_one():
    references = REFERENCES * 10
    systems = {"good": references, "same": list(references), "bad": HYPOTHESES * 10}
    good, same, bad = paired_bootstrap(systems, references, samples=200)
    assert (good["system"], good["bleu"]) == ("good", pytest.approx(100))
    assert same["bleu_p"] == 1
    assert bad["bleu_p"] < 0.05
    assert bad["bleu"] == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES * 10, [references]).score)


def test_bleu_from_counts_is_sacrebleus_whatever_matches():
    random = np.random.default_rng(0)
    vocabulary = np.array([*"abcdefgh", "it's", "1,000", "."])
    for _ in range(60):
        references = [" ".join(random.choice(vocabulary, random.integers(1, 9))) for _ in range(4)]
        hypotheses = [" ".join(random.choice(vocabulary, random.integers(0, 9))) for _ in range(4)]
        sums = bleu_counts(hypotheses, references).sum(0)
        assert float(bleu_of_counts(sums)) == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=1e-9)


def test_bleu_from_counts_takes_many_corpora():
    counts = np.stack([bleu_counts(HYPOTHESES, REFERENCES).sum(0), bleu_counts(REFERENCES, REFERENCES).sum(0)])
    expected = [sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score, 100.0]
    assert bleu_of_counts(counts) == pytest.approx(expected)
    assert float(bleu_of_counts(bleu_counts(["x"] * 3, ["a b c d e"] * 3).sum(0))) == 0


def test_bleu_of_chinese_needs_its_own_tokens():
    references, hypotheses = ["我喜欢在公园里散步。"], ["我喜欢在公园散步。"]
    assert corpus_score("bleu", hypotheses, references) < 1  # one token without spaces
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="zh").score
    assert corpus_score("bleu", hypotheses, references, tokenize="zh") == pytest.approx(expected)
    assert expected > 30
    assert "tok:zh" in signatures("zh")["bleu"]
    one, _ = paired_bootstrap({"a": hypotheses, "b": references}, references, samples=5, tokenize="zh")
    assert one["bleu"] == pytest.approx(expected)
