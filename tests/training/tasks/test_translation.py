import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MBart50Tokenizer, MBartConfig, MBartForConditionalGeneration, MBartTokenizer

from gates.errors import GateError
from gates.export.checkpoint import load_pruned, save_pruned
from gates.scores.attention import AttentionEntropy
from gates.scores.importance import head_gradients
from gates.scores.observe import observe_attention
from gates.surgery.remove import remove_heads_, zero_heads_
from tests.models import build
from tests.training.translation_runs import MODEL, make_data, make_pruner
from training.config import Source
from training.data.translation import language_token, set_languages
from training.pruner.distillation import Teacher
from training.tasks.base import encode_sources, encode_targets, shifted_right
from training.tasks.translation import Decoding, begin_with_, generate


@pytest.fixture(scope="module")
def data():
    return make_data()


@pytest.fixture
def pruner(data):
    pruner = make_pruner(data).eval()
    torch.manual_seed(1)
    for parameter in pruner.backbone.parameters():  # weights that make every head matter
        if parameter.dim() >= 2 and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return pruner


def batch_of(data, rows=6):
    batch = next(iter(data.test_dataloader()))
    return {name: value[:rows] for name, value in batch.items()}


def one(batch, row):
    """A sentence alone, without padding."""
    source, target = batch["attention_mask"][row].bool(), batch["labels"][row] != -100
    return {
        "input_ids": batch["input_ids"][row : row + 1, source],
        "attention_mask": batch["attention_mask"][row : row + 1, source],
        "labels": batch["labels"][row : row + 1, target],
    }  # fmt: skip


@pytest.mark.parametrize("sentence_loss", ["mean", "sum"])
def test_losses_of_a_batch_are_those_of_its_sentences(sentence_loss, data, pruner):
    pruner.task.sentence_loss = sentence_loss
    batch = batch_of(data)
    losses, _ = pruner.task.losses(pruner.backbone, batch)
    for row in range(6):
        alone = one(batch, row)
        own = pruner.backbone(**alone)  # Transformers' own loss: the mean over the tokens of one sentence
        expected = own.loss * (alone["labels"].numel() if sentence_loss == "sum" else 1)
        torch.testing.assert_close(losses[row], expected, rtol=1e-4, atol=1e-5)
    whole = pruner.backbone(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")})
    torch.testing.assert_close(pruner.task.batch_loss(losses, batch), whole.loss, rtol=1e-4, atol=1e-5)


def test_label_smoothing_is_the_mixture_with_a_uniform_target_in_training_only(data, pruner):
    batch, task = batch_of(data), pruner.task
    plain, logits = task.losses(pruner.backbone, batch)
    smooth, _ = task.losses(pruner.backbone.train(), batch)
    log_p, valid = logits.log_softmax(-1), batch["labels"] != -100
    uniform = -(log_p.mean(-1) * valid).sum(-1) / valid.sum(-1)
    torch.testing.assert_close(smooth, 0.9 * plain + 0.1 * uniform, rtol=1e-4, atol=1e-5)


def test_his_of_a_batch_is_that_of_its_sentences(data, pruner):
    batch = batch_of(data)
    rows = head_gradients(pruner.gates, lambda: pruner.task.losses(pruner.backbone, batch)[0])
    for row in range(6):
        alone = head_gradients(pruner.gates, lambda row=row: pruner.task.losses(pruner.backbone, one(batch, row))[0])
        torch.testing.assert_close(rows[row], alone[0], rtol=1e-3, atol=1e-5)


def test_entropy_counts_visible_keys_and_valid_queries_of_each_kind(data, pruner):
    batch = batch_of(data)
    pruner.gates.mode = "open"
    sites, backbone = pruner.gates.sites, pruner.backbone
    metric = AttentionEntropy(sites)
    with torch.no_grad(), observe_attention(backbone, sites, [metric], pruner.task.valid_queries(batch)):
        pruner.task.losses(backbone, batch)
    sums, counts = [0.0] * len(sites), [0] * len(sites)
    backbone.set_attn_implementation("eager")
    for row in range(6):  # each sentence alone has no padding: every key before the query is visible
        with torch.no_grad():
            out = backbone(**one(batch, row), output_attentions=True)
        matrices = {"encoder": out.encoder_attentions, "decoder": out.decoder_attentions, "cross": out.cross_attentions}
        for index, site in enumerate(sites):
            p = matrices[site.kind][site.layer][0]  # heads, query, key
            causal = site.kind == "decoder"
            visible = torch.arange(1, p.shape[1] + 1) if causal else torch.full((p.shape[1],), p.shape[2])
            entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)
            counted = visible > 1
            sums[index] = sums[index] + (entropy[:, counted] / visible[counted].log()).sum(-1)
            counts[index] += int(counted.sum())
    expected = torch.cat([total / count for total, count in zip(sums, counts, strict=True)])
    torch.testing.assert_close(metric.compute().float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.integration
def test_gated_pruned_and_reloaded_models_translate_alike(data, pruner, tmp_path):
    batch, task, gates, beams = batch_of(data, 12), pruner.task, pruner.gates, 4
    mask = torch.ones(gates.size)
    mask[:4], mask[5], mask[9], mask[13:15] = 0, 0, 0, 0  # a layer of the encoder without heads, and some of each kind
    gates.mode = "open"
    dense = task.translate(pruner.backbone, batch, beams=beams)
    gates.set_mask_(mask)
    gated = task.translate(pruner.backbone, batch, beams=beams)
    gates.detach()
    assert task.translate(pruner.backbone, batch, beams=beams) == dense
    assert gated != dense
    save_pruned(pruner.backbone, tmp_path / "export", mask, tokenizer=data.tokenizer)
    reloaded = [
        load_pruned(tmp_path / "export"),
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "export", trust_remote_code=True).eval(),
        task.build(Source(str(tmp_path / "export")), data.tokenizer).eval(),
    ]
    for model in reloaded:
        assert task.translate(model, batch, beams=beams) == gated
    no_cache = reloaded[0].generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], num_beams=beams, use_cache=False, max_new_tokens=10,
        max_length=None, do_sample=False, length_penalty=1.0, early_stopping=False,
    )  # fmt: skip
    ids = generate(reloaded[0], batch["input_ids"], batch["attention_mask"], Decoding(beams, max_length=10), beams=beams)
    assert ids.tolist() == no_cache.tolist()
    zeroed = task.translate(zero_heads_(pruner.backbone, mask), batch, beams=beams)
    assert zeroed == gated


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_a_kind_without_any_head_still_translates_alike(kind, data, pruner):
    batch, task, gates = batch_of(data), pruner.task, pruner.gates
    kinds = ("encoder", "decoder", "cross")
    mask = (gates.kind_index() != kinds.index(kind)).float()
    gates.set_mask_(mask)
    gated = task.translate(pruner.backbone, batch, beams=2)
    gates.detach()
    assert task.translate(remove_heads_(pruner.backbone, mask), batch, beams=2) == gated


def test_the_decoder_sees_the_target_shifted_by_one(pruner):
    labels = torch.tensor([[5, 6, 1], [7, 1, -100]])
    assert shifted_right(pruner.backbone, labels).tolist() == [[0, 5, 6], [0, 7, 1]]
    bart = build("bart")
    assert shifted_right(bart, labels).tolist() == [[1, 5, 6], [1, 7, 1]]


def test_a_translation_does_not_depend_on_its_company(data, pruner):
    """Nor where it does not end by itself: it is cut at a length of its own."""
    batch = batch_of(data, 12)
    lengths = batch["attention_mask"].sum(-1)
    shortest = int(lengths.argmin())
    assert 2 * lengths[shortest] + 10 < 2 * lengths.max() + 10 < 128
    together = generate(pruner.backbone, batch["input_ids"], batch["attention_mask"], Decoding(), beams=1)[shortest]
    own = one(batch, shortest)
    alone = generate(pruner.backbone, own["input_ids"], own["attention_mask"], Decoding(), beams=1)[0]
    assert len(alone) == 1 + 2 * lengths[shortest] + 10  # it never ends
    assert together[: len(alone)].tolist() == alone.tolist()
    assert not together[len(alone) :].any()
    assert len(together) > len(alone)


def test_t5_can_be_made_from_scratch(data):
    sizes = {"model_type": "t5", "d_model": 16, "d_kv": 4, "num_layers": 1, "num_heads": 4, "d_ff": 16}
    model = data.task.build(Source(from_scratch=sizes), data.tokenizer).eval()
    losses, _ = data.task.losses(model, batch_of(data))
    assert losses.shape == (6,)
    assert len(data.task.translate(model, batch_of(data), beams=2)) == 6


def test_targets_end_with_the_end_token_whatever_the_tokenizer_does(data):
    whole, texts = data.tokenizer, data.texts["test"].target
    bare = copy.deepcopy(whole)
    bare._tokenizer.post_processor = None
    assert bare(texts[0])["input_ids"][-1] != bare.eos_token_id
    assert encode_targets(bare, texts) == encode_targets(whole, texts) == whole(texts)["input_ids"]
    bare.eos_token = None
    with pytest.raises(GateError, match="has no end token"):
        encode_targets(bare, texts)


class Multilingual:
    """The part of M2M100's tokenizer that knows languages."""

    unk_token_id = 3
    src_lang = tgt_lang = "en"

    def convert_tokens_to_ids(self, token):
        return {"__de__": 7}.get(token, self.unk_token_id)

    def get_lang_id(self, language):
        return {"de": 7}[language]


def test_languages_are_set_by_their_names_and_unknown_ones_refused():
    tokenizer = Multilingual()
    set_languages(tokenizer, source=None, target="de")
    assert (tokenizer.src_lang, tokenizer.tgt_lang, language_token(tokenizer, "de")) == ("en", "de", 7)
    with pytest.raises(GateError, match="does not know the language 'xx'"):
        set_languages(tokenizer, source="xx", target="de")
    assert tokenizer.src_lang == "en"


def test_an_export_says_what_translations_begin_with(data, pruner, tmp_path):
    pruner.gates.detach()
    save_pruned(pruner.backbone, tmp_path / "plain", torch.ones(pruner.gates.size), tokenizer=None)
    task = replace(data.task, decoding=Decoding(1, max_length=20, forced_first=9))
    model = task.build(Source(str(tmp_path / "plain")), data.tokenizer)
    save_pruned(model, tmp_path / "export", torch.ones(pruner.gates.size), tokenizer=None)
    batch = batch_of(data)
    for folder, first in (("plain", False), ("export", True)):
        ids = generate(load_pruned(tmp_path / folder), batch["input_ids"], batch["attention_mask"], Decoding(1), beams=1)
        assert bool((ids[:, 1] == 9).all()) is first
    assert ids.shape[1] <= 1 + 41  # the default of 128 tokens is more than the model has positions


@pytest.mark.parametrize("sentence_loss", ["mean", "sum"])
def test_a_distilled_translator_has_the_task_loss_of_others(sentence_loss):
    data = make_data(sentence_loss=sentence_loss)
    pruner = make_pruner(data, distil=0.5).train()
    pruner.gates.mode = "open"
    batch = next(iter(data.val_dataloader()))
    pruner.log_dict = lambda *args, **kwargs: None
    expected = pruner.task.batch_loss(pruner.task.losses(pruner.backbone, batch)[0], batch)
    found, _ = pruner._taught(Teacher(pruner.backbone, pruner.gates), batch)
    torch.testing.assert_close(found, expected)


VOCABULARY = [
    ("<s>", 0.0),
    ("<pad>", 0.0),
    ("</s>", 0.0),
    ("<unk>", 0.0),
    *((f"\u2581{word}", -1.0) for word in ("a", "dog", "hund")),
]


@pytest.mark.parametrize("kind", [MBartTokenizer, MBart50Tokenizer])
def test_translations_begin_as_the_targets_in_training(kind):
    """mBART starts the decoder with the language, mBART-50 sees it as the first token."""
    tokenizer = kind(vocab=VOCABULARY)
    set_languages(tokenizer, source="en_XX", target="ro_RO")
    language = language_token(tokenizer, "ro_RO")
    torch.manual_seed(0)
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = MBartConfig(vocab_size=len(tokenizer), pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, **small, **heads)
    model = MBartForConditionalGeneration(config).eval()
    begin_with_(model, tokenizer, language)
    seen = shifted_right(model, torch.tensor(encode_targets(tokenizer, ["a hund"])))[0]
    source = torch.tensor(encode_sources(tokenizer, ["a dog"]))
    begun = generate(model, source, torch.ones_like(source), Decoding(1, max_length=5), beams=1)[0]
    place = int((seen == language).nonzero()[0])
    assert place == (0 if kind is MBartTokenizer else 1)
    assert begun[: place + 1].tolist() == seen[: place + 1].tolist()


def test_a_tokenizer_of_another_model_is_refused(data):
    with pytest.raises(GateError, match="but the new model has embeddings of 20; a model needs its own tokenizer"):
        data.task.build(Source(from_scratch=MODEL | {"vocab_size": 20}), data.tokenizer)


def test_greedy_decoding_takes_the_likeliest_token_each_time(data, pruner):
    batch = one(batch_of(data), 0)
    found = generate(pruner.backbone, batch["input_ids"], batch["attention_mask"], Decoding(max_length=8), beams=1)[0]
    ids = [0]
    with torch.no_grad():
        for _ in range(8):
            logits = pruner.backbone(**{**batch, "labels": None}, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
            logits[0] = -torch.inf  # padding is never said
            ids.append(int(logits.argmax()))
            if ids[-1] == 1:
                break
    assert found.tolist()[: len(ids)] == ids
