"""Language modelling: documents in one block are as they are alone, and models that would mix them are refused."""

import math
from itertools import pairwise

import pytest
import torch

from gates.errors import GateError
from gates.scores.attention import AttentionEntropy
from gates.scores.importance import gradient_rows
from gates.scores.observe import observe_attention
from tests.training.causal_runs import GROUPED, MODEL, make_data, make_pruner, make_subject
from training.config import RefitOptions, Source
from training.pruner.distillation import Teacher, distillation_terms
from training.pruner.module import evaluate
from training.scoring.refits import quality, refit_if_better_
from training.tasks import CausalLM
from training.tasks.base import IGNORED

SLIDING = {
    "model_type": "mistral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 40, "sliding_window": 5, "initializer_range": 0.3,
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "initializer_range": 0.3,
}  # fmt: skip
BLOOM = {"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.3}
FIELDS = {"gpt2": MODEL, "llama": GROUPED, "mistral": SLIDING}


@pytest.fixture(scope="module")
def data():
    return make_data()


@pytest.fixture(scope="module")
def batch(data):
    found = next(iter(data.test_dataloader()))
    assert (found["position_ids"][:, 1:] == 0).any()  # blocks with several documents
    assert (found["labels"] == IGNORED).any()  # and with padding
    return found


def parts(batch):
    """Every document, or part of one, as a batch of its own, with its row and places."""
    for row, (ids, labels, places) in enumerate(zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True)):
        starts = [*(places == 0).nonzero().flatten().tolist(), len(ids)]
        for start, end in pairwise(starts):
            if labels[start] != IGNORED:
                alone = {"input_ids": ids[None, start:end], "labels": labels[None, start:end]}
                yield row, slice(start, end), alone | {"attention_mask": torch.ones_like(alone["input_ids"])}


@pytest.fixture(scope="module", params=FIELDS)
def subject(request, data):
    return make_subject(data, from_scratch=FIELDS[request.param])


@pytest.fixture(params=["sdpa", "eager"])
def attention(request, subject):
    subject.backbone.set_attn_implementation(request.param)
    return request.param


def test_documents_of_a_block_are_as_they_are_alone(subject, batch, attention):
    """Logits and losses, with positions that start again with each and attention that does not cross."""
    unpacked = CausalLM(packing=False)
    with subject.at_rest(), torch.no_grad():
        losses, logits = subject.task.losses(subject.backbone, batch)
        sums = torch.zeros_like(losses)
        for row, places, alone in parts(batch):
            own, expected = unpacked.losses(subject.backbone, alone)
            torch.testing.assert_close(logits[row, places], expected[0], atol=2e-4, rtol=1e-4)
            sums[row] += own[0] * alone["labels"].shape[1]
    torch.testing.assert_close(losses, sums / (batch["labels"] != IGNORED).sum(-1))


def test_importance_and_entropy_do_not_cross_documents(subject, batch):
    """HIS of a block is that of its documents' summed loss, per token exactly that of each; entropy is that of each query."""
    unpacked, gates, tokens = CausalLM(packing=False), subject.gates, (batch["labels"] != IGNORED).sum(-1)
    with subject.at_rest():
        packed = gradient_rows(gates, lambda: subject.task.losses(subject.backbone, batch)[0])
        example, token = torch.zeros_like(packed.example), torch.zeros_like(packed.token)
        entropies = [AttentionEntropy(gates.sites) for _ in range(2)]
        with (
            torch.no_grad(),
            observe_attention(subject.backbone, gates.sites, [entropies[0]], subject.task.valid_queries(batch)),
        ):
            subject.task.losses(subject.backbone, batch)
        for row, _, alone in parts(batch):
            share = alone["labels"].shape[1] / tokens[row]
            own = gradient_rows(gates, lambda alone=alone: unpacked.losses(subject.backbone, alone)[0])
            example[row] += share * own.example[0]
            token[row] += share * own.token[0]
            with torch.no_grad(), observe_attention(subject.backbone, gates.sites, [entropies[1]], {"decoder": None}):
                unpacked.losses(subject.backbone, alone)
    torch.testing.assert_close(packed.example, example, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(packed.token, token, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(entropies[0].compute(), entropies[1].compute(), atol=1e-5, rtol=1e-4)


def test_the_loss_of_training_is_the_mean_over_tokens(subject, batch):
    losses, logits = subject.task.losses(subject.backbone, batch)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(subject.task.batch_loss(losses, batch), expected)
    assert subject.task.batch_weight(batch) == (batch["labels"] != IGNORED).sum()


def test_evaluation_has_loss_and_perplexities_of_the_whole_split(data):
    """By hand from all tokens of the split, without blocks: over tokens, words and bytes."""
    subject = make_subject(data)
    found = evaluate(subject.trainer, subject.module, data)
    surprise, tokens, correct = 0.0, 0, 0
    with subject.at_rest(), torch.no_grad():
        for block in data.splits["test"]:
            for start, end in zip(block["starts"], [*block["starts"][1:], block["length"]], strict=True):
                ids, labels = (torch.tensor([block[name][start:end]]) for name in ("input_ids", "labels"))
                logits = subject.backbone(ids).logits
                surprise += float(torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum"))
                tokens, correct = tokens + len(ids[0]), correct + int((logits.argmax(-1) == labels).sum())
    texts = data.load_documents()["test"]
    words, size = sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)
    assert tokens == words + len(texts)  # one token for each word, and the ends
    assert found["test_loss"] == pytest.approx(surprise / tokens, rel=1e-5)
    assert found["test_perplexity"] == pytest.approx(math.exp(surprise / tokens), rel=1e-5)
    assert found["test_word_perplexity"] == pytest.approx(math.exp(surprise / words), rel=1e-5)
    assert found["test_byte_perplexity"] == pytest.approx(math.exp(surprise / size), rel=1e-5)
    assert found["test_accuracy"] == pytest.approx(correct / tokens)
    assert found["test_perplexity"] == pytest.approx(math.exp(found["test_loss"]), rel=1e-5)


def test_without_packing_the_split_has_the_same_perplexity_where_documents_fit():
    """A block that holds three documents, and three blocks."""
    fields = MODEL | {"n_positions": 600}
    packed, alone = (make_data(max_length=600, test_rows=3, packing=packing) for packing in (True, False))
    assert (len(packed.splits["test"]), len(alone.splits["test"])) == (1, 3)
    found = []
    for data in (packed, alone):
        subject = make_subject(data, from_scratch=fields)
        found.append(evaluate(subject.trainer, subject.module, data, ("test",)))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_padding_teaches_nothing(data, batch):
    pruner = make_pruner(data)
    teacher = Teacher(pruner.backbone, pruner.gates)
    for parameter in pruner.backbone.parameters():
        parameter.data *= 1.1
    spoilt = batch | {"input_ids": torch.where(batch["labels"] == IGNORED, 7, batch["input_ids"])}
    terms = []
    with torch.no_grad():
        for given in (batch, spoilt):
            output = pruner.backbone(
                given["input_ids"], position_ids=given["position_ids"], use_cache=False, output_hidden_states=True
            )
            terms.append(
                distillation_terms(teacher, data.task, given, output.logits, output, temperature=1.0, hidden_states=True)
            )
    assert float(terms[0][0]) > 0
    torch.testing.assert_close(terms[0], terms[1])


def test_a_refit_stays_if_it_lowers_perplexity(data):
    subject = make_subject(data)
    dense = {name: parameter.detach().clone() for name, parameter in subject.backbone.named_parameters()}
    mask = torch.tensor([1.0, 0, 0, 1, 0, 1, 0, 0])
    found = refit_if_better_(subject, mask, RefitOptions(rows=8), dense)
    assert found.is_applied or found.refitted > found.unrefitted
    assert quality(subject, mask).metric == pytest.approx(found.reached, rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (BERT, "tokens that come later"),
        (BLOOM, r"--data\.packing false"),
        ({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}, r"--data\.max_length 24"),
        ({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 9}, "embeddings of 9"),
        ({"model_type": "vit"}, "takes no text"),
    ],
)
def test_models_that_would_be_wrong_without_a_word_are_refused(data, fields, said):
    with pytest.raises(GateError, match=said):
        data.task.build(Source(from_scratch=fields), data.tokenizer)
