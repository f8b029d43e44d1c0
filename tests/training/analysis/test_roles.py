"""Roles of the heads of runs and of plain folders, on every task."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from gates.errors import GateError
from gates.export.checkpoint import special_ids
from gates.roles.roles import RULES
from tests.training.analysis.models import make_decoder, make_dense, make_translator
from training.analysis import role_measures as role_texts
from training.analysis.model import observe_folder, observe_run
from training.analysis.role_measures import BATCH, CELLS, Encoded, RoleFiles, RolePasses, read_texts
from training.analysis.roles import roles_of_heads
from training.commands.table import run_command
from training.data.synthetic import word_tokenizer
from training.data.tags import Pieces
from training.report.reading import ATTENTION

WORDS = [f"w{number}" for number in range(40)]


def write_treebank(folder, words, rows=40):
    """Random trees over words of a vocabulary, each word's head among the others."""
    generator = np.random.default_rng(0)
    lines = []
    for _ in range(rows):
        size = int(generator.integers(4, 9))
        for word in range(size):
            head = 0 if word == 0 else int(generator.integers(1, word + 1))
            relation = "root" if head == 0 else ("nsubj" if word % 2 else "obj")
            form = words[int(generator.integers(len(words)))]
            lines.append("\t".join([str(word + 1), form, "_", "_", "_", "_", str(head), relation, "_", "_"]))
        lines.append("")
    (folder / "trees.conllu").write_text("\n".join(lines) + "\n")
    return str(folder / "trees.conllu")


def write_pronouns(folder):
    (folder / "pronouns.txt").write_text("1 [The w1] met w2 because [she] was w3.\n" * 35)
    return str(folder / "pronouns.txt")


def texts_of(data):
    """Words that a run's tokenizer knows."""
    special = set(data.tokenizer.all_special_tokens)
    return sorted(
        word.lstrip("\u2581\u0120") for word in data.tokenizer.get_vocab() if word not in special and word[1:].isalpha()
    )


def made(tmp_path, dense, **more):
    observed = observe_run(dense)
    return roles_of_heads(observed, read_texts(RoleFiles(write_treebank(tmp_path, texts_of(dense.data)), **more), observed))


def test_a_classifier(tmp_path):
    dense = make_dense()
    finding = made(tmp_path, dense, coref=write_pronouns(tmp_path))
    table = finding.tables["roles"]
    assert len(table) == 8
    assert table[["site", "head"]].apply(tuple, axis=1).is_unique
    assert table["syntactic_strength"].between(0, 1).all()
    assert table["coreference_strength"].between(0, 1).all()
    assert table["induction_strength"].isna().all()
    for _, row in table.iterrows():
        held = [rule.name for rule in RULES if row[f"{rule.name}_has"]]
        assert row["roles"] == (", ".join(held) or "none")
        assert row["specialised"] == any(rule.specialised and rule.name in held for rule in RULES)
    layers = finding.tables["roles_by_layer"]
    assert layers["heads"].tolist() == [4, 4]
    assert layers["background"].sum() == (~table["specialised"]).sum()
    syntactic = finding.tables["syntactic"]
    assert list(syntactic.columns[4:]) == [
        f"{relation}, {way}" for way in ("dependent to head", "head to dependent") for relation in ("nsubj", "obj")
    ]
    best = finding.tables["relations"].iloc[0]
    assert syntactic[f"{best['relation']}, {best['direction']}"].max() == best["share"]
    assert next(iter(finding.figures)) == "roles"
    assert any("Not measured: induction" in sentence for sentence in finding.sentences)
    assert any("rare is by frequency in the run's training data" in sentence for sentence in finding.sentences)


def test_a_decoder_has_induction_heads_and_no_separators(tmp_path):
    finding = made(tmp_path, make_decoder())
    table = finding.tables["roles"]
    assert set(table["kind"]) == {"decoder"}
    assert table["induction_strength"].between(0, 1).all()
    assert table["duplicate_baseline"].between(0, 1).all()
    assert table["first-token_strength"].between(0, 1).all()
    assert table["separator_strength"].isna().all()
    assert table["coreference_strength"].isna().all()
    assert any("No head has enough opportunities for" in sentence for sentence in finding.sentences)


def test_a_translator_has_what_is_defined_for_each_kind(tmp_path):
    finding = made(tmp_path, make_translator())
    table = finding.tables["roles"].set_index("kind")
    assert set(table.index) == {"encoder", "decoder", "cross"}
    assert table.loc["encoder", "syntactic_strength"].notna().all()
    assert table.loc[["decoder", "cross"], "syntactic_strength"].isna().all()
    assert table.loc["decoder", "induction_strength"].notna().all()
    assert table.loc[["encoder", "cross"], "induction_strength"].isna().all()
    for name in ("positional", "broad"):
        assert table[f"{name}_strength"].notna().all()
    assert table.loc["cross", "separator_strength"].notna().all()
    assert table.loc[["decoder", "cross"], "rare_strength"].isna().all()  # the language has fewer than 500 words
    assert table.loc["decoder", "separator_strength"].isna().all()  # nothing but the start of a target is special
    assert any("For cross attention only positional" in sentence for sentence in finding.sentences)
    shown, table = json.loads(finding.pages[ATTENTION]), finding.tables["roles"]
    assert [head["name"] for head in shown["heads"]] == (table["site"] + "." + table["head"].astype(str)).tolist()
    assert [head["roles"] for head in shown["heads"]] == table["roles"].tolist()
    for sentence, head in itertools.product(shown["sentences"], shown["heads"]):
        weights = np.array(sentence["weights"][head["site"]][head["head"]])
        queries, keys = sentence["tokens"][head["kind"]]
        assert weights.shape == (len(queries), len(keys))
        assert (abs(weights.sum(axis=1) - 100) <= len(keys) / 2 + 1).all()


# -- folders and the command ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 60}
    BertModel(BertConfig(max_position_embeddings=12, initializer_range=0.5, **size)).save_pretrained(path)
    word_tokenizer([*WORDS, "The", "she", "met"], max_length=12).save_pretrained(path)
    return path


def call(run, out, *arguments):
    return run_command("analyze", [str(run), "--run_dir", str(out), *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the experiment roles needs a treebank; give one with --conllu FILE, or texts and what parses them with --text"),
        (["--experiments", "roles", "--conllu", "x", "--weights", "pruned"], "needs a run, and"),
        (["--experiments", "ablate"], "is a folder with a model and no run, so there is nothing to do ablate with"),
        (["--experiments", "roles", "--conllu", "x", "--relations", " ,"], "--relations is ' ,'; expected names"),
        (["--experiments", "roles", "--conllu", "nowhere.conllu"], "the treebank file 'nowhere.conllu' does not exist"),
    ],
)
def test_bad_input_is_one_sentence(folder, tmp_path, capsys, arguments, message):
    assert call(folder, tmp_path / "out", *arguments) == 2
    first, error = capsys.readouterr().err.split("\n", 1)
    assert first.endswith(": loading libraries")
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_background_is_no_more_than_was_measured(folder, tmp_path):
    """Without pronouns some of it could be coreference heads; relations may have commas in their names."""
    observed, trees = observe_folder(str(folder)), write_treebank(tmp_path, WORDS, rows=60)
    Path(trees).write_text(Path(trees).read_text().replace("\tobj\t", "\tobj, near\t"))
    found = roles_of_heads(observed, read_texts(RoleFiles(trees), observed))
    assert set(found.tables["relations"]["relation"]) == {"nsubj", "obj, near"}
    unmeasured = r"Coreference\b[^.]* heads could be among them"
    assert re.search(unmeasured, " ".join(found.sentences))
    assert "about half" not in " ".join(found.sentences)
    whole = roles_of_heads(observed, read_texts(RoleFiles(trees, coref=write_pronouns(tmp_path)), observed))
    assert not re.search(unmeasured, " ".join(whole.sentences))


@pytest.mark.parametrize(("end", "counts"), [("[UNK]", False), ("[SEP]", True)])
def test_unknown_words_are_words_unless_their_token_is_another_one(folder, end, counts):
    """GPT-2 has one special token for all of them."""
    tokenizer = observe_folder(str(folder)).tokenizer
    tokenizer.eos_token = end
    assert (tokenizer.unk_token_id not in special_ids(tokenizer)) == counts
    assert {tokenizer.cls_token_id, tokenizer.pad_token_id} <= special_ids(tokenizer)


def test_sentences_that_are_too_long_are_left_out_and_told(folder, tmp_path):
    observed = observe_folder(str(folder))
    trees = write_treebank(tmp_path, WORDS, rows=50)
    long = "\n".join("\t".join([str(n), "w1", *"____", str(n - 1), "dep" if n > 1 else "root", "_", "_"]) for n in range(1, 21))
    with open(trees, "a") as stream:
        stream.write(long + "\n\n")
    texts = read_texts(RoleFiles(trees), observed)
    assert (len(texts.trees.pieces), texts.trees.omissions("sentence")) == (50, "1 sentence too long for the model")
    (tmp_path / "long.conllu").write_text(long + "\n")
    with pytest.raises(GateError, match=r"every sentence of .* is longer than the 12 tokens of the model"):
        read_texts(RoleFiles(str(tmp_path / "long.conllu")), observed)


def test_long_sentences_are_read_fewer_at_a_time():
    lengths = [*range(1, 60), 100, 300, 500, *[4] * 40]
    batches = list(Encoded([Pieces([0] * length, [0] * length) for length in lengths], [None] * len(lengths), 0, 0).batches())
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    sizes = [(len(rows), max(lengths[row] for row in rows)) for rows in batches]
    assert all(rows == 1 or (rows * longest**2 <= CELLS and rows <= BATCH) for rows, longest in sizes)
    assert sizes[0] == (BATCH, 4)  # short ones first
    assert sizes[-2:] == [(1, 300), (1, 500)]


def test_widths_of_whole_multiples_change_nothing(tmp_path, monkeypatch):
    dense = make_translator()
    observed, found, widths = observe_run(dense), {}, {}
    files = RoleFiles(write_treebank(tmp_path, texts_of(dense.data)), coref=write_pronouns(tmp_path))
    texts = read_texts(files, observed)
    for multiple in (1, 8):
        monkeypatch.setattr(role_texts, "MULTIPLE", multiple)
        passes = RolePasses(observed, texts)
        passes.run()
        metrics = (passes.positional, passes.sinks, passes.rare, passes.syntactic, passes.coreference, passes.copies)
        found[multiple] = [getattr(one, name) for one in metrics for name in ("hits", "chances", "baseline_hits")]
        widths[multiple] = {texts.trees.ids(rows).shape[1] for rows in texts.trees.batches()}
    assert widths[1] != widths[8]
    assert {width % 8 for width in widths[8]} == {0}
    torch.testing.assert_close(found[1], found[8], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_widths_stay_within_the_model():
    assert [role_texts.width_of([[0] * length], 12) for length in (1, 8, 9, 12)] == [8, 8, 12, 12]
    assert role_texts.width_of([[0] * 9, [0] * 17], None) == 24


@pytest.mark.integration
def test_sentences_by_a_parser_of_ones_own(folder, tmp_path, monkeypatch, capsys):
    trees = write_treebank(tmp_path, WORDS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_parser_of_roles.py").write_text(
        f"import pathlib\ndef trees(texts):\n    return pathlib.Path({trees!r}).read_text()\n"
    )
    (tmp_path / "texts.txt").write_text("w1 w2 w3\nw4 w5\n")
    text = ["--text", "texts.txt"]
    assert call(folder, "parsed", "--parser", "own_parser_of_roles:trees", *text) == 0
    assert "parsed by own_parser_of_roles:trees, so that their trees are not gold" in capsys.readouterr().out
    assert call(folder, "gold", "--conllu", trees, *text) == 0
    assert (tmp_path / "parsed" / "roles.csv").read_bytes() == (tmp_path / "gold" / "roles.csv").read_bytes()
