"""Words with tags: what files hold, where labels stand, and what is refused."""

import json

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from gates.errors import GateError
from tests.training.data.texts import write
from training.config.data import Tags
from training.data.synthetic import build_tokenizer
from training.data.tagged_files import Tagged, check_tags, read_tagged
from training.data.tags import TagsData, encode_words
from training.tasks.base import IGNORED

OPTIONS = Tags(train_file="a", test_file="b")
CONLL = "-DOCSTART- -X- O\n\nthe DT O\nking NN B-PER\n\n# a comment of a few words\nfox NN B-ANI\nsees VB O\n# # O\n"
CONLLU = (
    "# text = zum Ort\n1-2\tzum\t_\t_\t_\t_\t_\t_\t_\t_\n1\tzu\tzu\tADP\tAPPR\t_\t3\tcase\t_\t_\n"
    "2\tdem\tder\tDET\tART\t_\t3\tdet\t_\t_\n2.1\tnull\t_\tX\t_\t_\t_\t_\t_\t_\n3\tOrt\tOrt\tNOUN\tNN\t_\t0\troot\t_\t_\n\n"
)


def lines(*sentences):
    """Sentences as word/tag texts in CoNLL columns."""
    return "\n\n".join("\n".join(word.replace("/", "\t") for word in own.split()) for own in sentences) + "\n"


def opened(folder, train, test=None, tokenizer=None, stated=None, **more):
    (tokenizer or build_tokenizer()).save_pretrained(folder / "tokenizer")
    files = {"train_file": write(folder / "train.conll", train), "test_file": write(folder / "test.conll", test or train)}
    data = TagsData(Tags(**files, select_file=files["test_file"], tokenizer=str(folder / "tokenizer"), **more))
    data.build(None, stated)
    return data


@pytest.mark.parametrize("name", ["a.conll", "a.txt", "a.bio.gz"])
def test_conll_columns(tmp_path, name):
    found = read_tagged(write(tmp_path / name, CONLL), OPTIONS)
    assert found == [Tagged(["the", "king"], ["O", "B-PER"]), Tagged(["fox", "sees", "#"], ["B-ANI", "O", "O"])]
    of_second = Tags(train_file="a", test_file="b", tags_column="2")
    assert read_tagged(str(tmp_path / name), of_second)[0].tags == ["DT", "NN"]


@pytest.mark.parametrize(("column", "tags"), [(None, ["ADP", "DET", "NOUN"]), ("xpos", ["APPR", "ART", "NN"])])
def test_conllu_has_syntactic_words(tmp_path, column, tags):
    options = Tags(train_file="a", test_file="b", tags_column=column)
    assert read_tagged(write(tmp_path / "a.conllu.gz", CONLLU), options) == [Tagged(["zu", "dem", "Ort"], tags)]


def test_lists_of_words_and_tags(tmp_path):
    rows = [{"tokens": ["the", "king"], "ner_tags": ["O", "B-PER"], "id": 1}, {"tokens": ["fox"], "ner_tags": ["O"], "id": 2}]
    found = [Tagged(["the", "king"], ["O", "B-PER"]), Tagged(["fox"], ["O"])]
    assert read_tagged(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))), OPTIONS) == found
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert read_tagged(str(tmp_path / "a.parquet"), OPTIONS) == found


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.conll", "", r"is empty"),
        ("a.conll", "the\n", r"has 1 columns; expected words and tags"),
        ("a.conll", "the DT\nking NN B\n", r"line 2 of .* has 3 columns; expected 2"),
        ("a.tsv", "the\tO\nking\t\n", r"line 2 of .* has no tag"),
        ("a.conllu", "1\tthe\tDET\n", r"line 1 of .* has 3 columns; expected the 10 of CoNLL-U"),
        ("a.conllu", CONLLU.replace("NOUN", "_"), r"line 6 of .* has no tag"),
        ("a.conllu", "# text = alone\n", r"has no sentence"),
        ("a.csv", "the,O\n", r"has the ending '.csv'; expected one of .conll"),
        ("a.jsonl", '{"tokens": ["a"], "labels": ["O"], "tags": ["O"]}\n', r"several columns for the tags.*--data.tags_column"),
        ("a.jsonl", '{"text": ["a"], "tags": ["O"]}\n', r"no column for the words.*'text', 'tags'"),
        ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}\n', r"example 1 of .* has 2 words and 1 tags"),
        ("a.jsonl", '{"tokens": "a b", "tags": ["O"]}\n', r"the words of example 1 of .* are 'a b'; expected a list"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [null]}\n', r"has the tag None"),
    ],
)
def test_what_a_file_lacks_is_told_with_its_place(tmp_path, name, text, said):
    with pytest.raises(GateError, match=said):
        read_tagged(write(tmp_path / name, text), OPTIONS)


def test_tags_of_training_are_all_there_are():
    train = [Tagged(["a", "b"], ["O", "B-PER"])]
    assert check_tags({"train": train}) == ["B-PER", "O"]
    assert check_tags({"train": train}, ["O", "B-PER", "B-LOC"]) == ["O", "B-PER", "B-LOC"]
    assert check_tags({"train": train}, ["NEGATIVE", "POSITIVE"]) == ["B-PER", "O"]
    with pytest.raises(
        GateError, match=r"the test split has the tag 'B-LOC' \(sentence 2, word 1\).*a tag of the training split"
    ):
        check_tags({"train": train, "test": [*train, Tagged(["c"], ["B-LOC"])]})
    with pytest.raises(GateError, match="all training words have the tag 'O'"):
        check_tags({"train": [Tagged(["a"], ["O"])]})
    with pytest.raises(GateError, match="has the tag 'a b'; expected tags without spaces"):
        check_tags({"train": [Tagged(["a", "b"], ["a b", "O"])]})


def test_the_label_stands_at_the_first_piece(tmp_path):
    folder = tmp_path / "pieces"
    folder.mkdir()
    words = "unhappy/B-X cat/O"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##hap", "##py", "cat"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))

    data = opened(tmp_path, lines(words), tokenizer=BertTokenizerFast(str(folder / "vocab.txt")))
    row = data.splits["train"][0]
    assert row["input_ids"] == [2, 4, 5, 6, 7, 3]
    assert row["labels"] == [IGNORED, 0, IGNORED, IGNORED, 1, IGNORED]
    batch = data.collate("train")([row, {"input_ids": [2, 7, 3], "labels": [IGNORED, 1, IGNORED], "length": 3}])
    assert batch["labels"][1].tolist() == [IGNORED, 1, IGNORED, IGNORED, IGNORED, IGNORED]
    assert batch["attention_mask"].sum(-1).tolist() == [6, 3]


LONG = "the/O " * 9 + "king/B-PER"


def test_long_sentences_are_told(tmp_path):
    short = ["the/O king/B-PER"] * 3
    data = opened(tmp_path, lines(*short, LONG), lines(*short), max_length=8)
    assert data.splits["train"].num_rows == 3
    assert data.notices == ["1 of 4 train sentences are left out: they have more than 8 tokens"]
    with pytest.raises(
        GateError, match=r"sentence 4 of the select split has 1\d tokens, more than 8.*--data.skip_long_sentences"
    ):
        opened(tmp_path, lines(*short), lines(*short, LONG), max_length=8)
    data = opened(tmp_path, lines(*short), lines(*short, LONG), max_length=8, skip_long_sentences=True)
    assert [data.splits[name].num_rows for name in ("select", "test")] == [3, 3]
    with pytest.raises(GateError, match="3 of 4 train sentences have more than 8 tokens"):
        opened(tmp_path, lines(short[0], LONG, LONG, LONG), lines(*short), max_length=8)


def test_entities_are_measured_where_tags_are_whole(tmp_path):
    assert opened(tmp_path, lines("the/O king/B-PER")).task.scheme == "BIO"
    data = opened(tmp_path, lines("the/O king/I-PER"))
    assert data.task.scheme is None
    assert "the train split has the tag 'I-PER' (sentence 1, word 2) outside of a whole BIO entity" in data.notices[0]
    with pytest.raises(GateError, match="in IOB1, write B- at the first word"):
        opened(tmp_path, lines("the/O king/I-PER"), metric="entity_f1")
    with pytest.raises(GateError, match="entity_f1 needs BIO or IOBES tags such as B-PER, but the tags are DET, NOUN"):
        opened(tmp_path, lines("the/DET king/NOUN"), metric="entity_f1")


def test_the_order_of_a_fine_tuned_model_stays_and_counts(tmp_path):
    text = lines("the/O king/B-PER")
    data, other = opened(tmp_path, text, stated=["O", "B-PER", "I-PER"]), opened(tmp_path, text)
    assert data.labels == ["O", "B-PER", "I-PER"]
    assert other.labels == ["B-PER", "O"]
    assert data.fingerprint() != other.fingerprint()


def test_hub_data_name_their_tags(tmp_path):
    features = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("string")),
            "ner_tags": datasets.List(datasets.ClassLabel(names=["O", "B-PER"])),
        }
    )
    rows = datasets.Dataset.from_dict({"tokens": [["the", "king"]], "ner_tags": [[0, 1]]}, features=features)
    data = TagsData(Tags(dataset="some"))
    assert data._of_hub("train", rows) == [Tagged(["the", "king"], ["O", "B-PER"])]
    hidden = datasets.Dataset.from_dict({"tokens": [["the"]], "ner_tags": [[-1]]}, features=features)
    with pytest.raises(GateError, match="hidden labels"):
        data._of_hub("test", hidden)


# -- words and the pieces that they are cut into --


def make_tokenizer(*, spaces):
    """One token per letter between special tokens; with spaces, a mark of its own for the space before a word."""
    letters = ["Ġ", *"abc"] if spaces else [*"abc", "##a", "##b", "##c"]
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []) if spaces else models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if spaces else pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")


def test_every_piece_has_its_word():
    tokenizer = make_tokenizer(spaces=False)
    (pieces,) = encode_words(tokenizer, [["ab", "c", " ", "cc"]], None)  # the third has no piece
    assert tokenizer.convert_ids_to_tokens(pieces.ids) == ["[CLS]", "a", "##b", "c", "c", "##c", "[SEP]"]
    assert pieces.words == [-1, 0, 0, 1, 3, 3, -1]


def test_words_behind_a_space_keep_it():
    tokenizer = make_tokenizer(spaces=True)
    (pieces,) = encode_words(tokenizer, [["ab", "c"]], None)
    assert tokenizer.convert_ids_to_tokens(pieces.ids) == ["[CLS]", "a", "b", "Ġ", "c", "[SEP]"]
    assert pieces.words == [-1, 0, 0, 1, 1, -1]


def test_sentences_that_are_too_long_or_without_a_piece_are_left_out():
    tokenizer = make_tokenizer(spaces=True)
    found = encode_words(tokenizer, [["ab"], ["abc"], ["z"]], 4)
    assert [pieces is None for pieces in found] == [False, True, True]
