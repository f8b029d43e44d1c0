"""Running text of the user's own: files of all kinds, where documents end, and what is refused."""

import json
import re

import pandas as pd
import pytest
import torch

from gates.errors import GateError
from tests.training.data.texts import write
from training.config.data import Documents
from training.data.documents import DocumentsData, set_aside, stream_documents
from training.tasks.base import IGNORED

TEXT = "One story, first line.\nIts second line.\n\nAnother story.\n   \nA third one with déjà vu.\n"
STORIES = ["One story, first line.\nIts second line.", "Another story.", "A third one with déjà vu."]


def opened(train, test, **settings):
    own = {"max_length": 8, "batch_size": 2, "vocab_size": 60}
    data = DocumentsData(Documents(train_file=train, test_file=test, **(own | settings)))
    data.build(None)
    return data


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("blank_line", STORIES),
        ("line", ["One story, first line.", "Its second line.", "Another story.", "A third one with déjà vu."]),
        ("file", [TEXT.strip()]),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_documents_of_a_text_file_end_where_it_is_said(tmp_path, documents, expected, name):
    for text in (TEXT, TEXT.replace("\n", "\r\n"), f"\ufeff{TEXT}\n\n"):
        assert list(stream_documents(write(tmp_path / name, text), documents)) == expected


def test_the_only_column_has_the_documents_unless_one_is_named(tmp_path):
    file = str(tmp_path / "a.parquet")
    pd.DataFrame({"story": STORIES}).to_parquet(file)
    assert DocumentsData(Documents(train_file=file, test_file=file)).load_documents()["test"] == STORIES
    data = DocumentsData(Documents(train_file=str(tmp_path / "a.parquet"), test_file="b.txt", text_column="text"))
    with pytest.raises(GateError, match=r"no column 'text' for the text; it has 'story'"):
        data.load_documents()


def test_further_test_texts_are_splits_of_their_own(tmp_path):
    train, test, news = (
        write(tmp_path / name, text) for name, text in (("a.txt", TEXT * 4), ("b.txt", TEXT), ("c.txt", "déjà lu\n"))
    )
    one, alone, other = opened(train, test, more_tests={"news": news}), opened(train, test), opened(train, news)
    assert (one.more_tests, alone.more_tests) == (["test_news"], [])
    assert one.splits["test_news"][:] == other.splits["test"][:]
    assert one.splits["test"][:] == alone.splits["test"][:]
    assert sum(batch["bytes"].sum().item() for batch in one.more_test_dataloader("test_news")) == len("déjà lu".encode())
    assert len({data.fingerprint() for data in (one, alone, other)}) == 3
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": 1, "body": "one"}) + "\n")
    with pytest.raises(
        GateError, match=r"test_news split has no column for the text; it has 'id', 'body'\. Give --data.text_column, the same"
    ):
        opened(train, test, more_tests={"news": str(tmp_path / "d.jsonl")})
    (tmp_path / "c.txt").write_text(" \n")
    with pytest.raises(GateError, match=r"c\.txt' is empty"):
        opened(train, test, more_tests={"news": news})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("word", "the name 'word', a prefix of the metric word_perplexity"),
        ("byte", "the name 'byte', a prefix of the metric byte_perplexity"),
        *((name, f"the name {name!r}; expected lower-case letters") for name in ("News", "a_b", "", 3)),
    ],
)
def test_names_of_further_test_texts_are_those_of_columns_and_of_no_metric(name, said):
    with pytest.raises(GateError, match=re.escape(said)):
        Documents(train_file="a.txt", test_file="b.txt", more_tests={name: "c.txt"})


def test_batches_are_padded_as_a_document_of_its_own(tmp_path):
    data = opened(write(tmp_path / "a.txt", TEXT * 4), write(tmp_path / "b.txt", TEXT))
    batches = list(data.test_dataloader())
    padded = next(batch for batch in batches if (batch["labels"] == IGNORED).any())
    length = int((padded["labels"][-1] != IGNORED).sum())
    assert length < 8
    assert padded["position_ids"][-1, length:].tolist() == list(range(8 - length))
    assert "attention_mask" not in padded
    alone = opened(write(tmp_path / "a.txt", TEXT * 4), write(tmp_path / "b.txt", TEXT), packing=False)
    for batch in alone.test_dataloader():
        assert torch.equal(batch["attention_mask"] == 1, batch["labels"] != IGNORED)


def test_a_trained_tokenizer_is_taken_over_by_what_goes_on(tmp_path):
    train, test = write(tmp_path / "a.txt", TEXT * 4), write(tmp_path / "b.txt", TEXT)
    data = opened(train, test)
    data.write_files(tmp_path)
    again = DocumentsData(Documents(train_file=train, test_file=test, max_length=8, vocab_size=50))
    again.use_files_of(tmp_path)
    again.build(None)
    assert again.tokenizer.get_vocab() == data.tokenizer.get_vocab()


def test_unknown_characters_of_an_evaluated_split_are_told(tmp_path):
    data = opened(write(tmp_path / "a.txt", TEXT * 4), write(tmp_path / "b.txt", "One 文 story"))
    (notice,) = data.notices
    assert "of the test split are unknown to the tokenizer" in notice
    assert opened(write(tmp_path / "a.txt", TEXT * 4), write(tmp_path / "b.txt", TEXT)).notices == []


def test_a_part_is_set_aside_by_text():
    train, select = set_aside(["a", "b", "a", "c", "b", "d"], 0.25)
    assert len(select) == 1
    assert not {*train} & {*select}
    assert len(train) + len(select) * ["a", "b", "a", "c", "b", "d"].count(select[0]) == 6
    with pytest.raises(GateError, match=r"--data\.select_file"):
        set_aside(["a", "a"], 0.5)


def test_text_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(GateError, match="does not exist"):
        opened(str(tmp_path / "none.txt"), "b.txt")
    with pytest.raises(GateError, match="is empty"):
        opened(write(tmp_path / "a.txt", TEXT), write(tmp_path / "b.txt", " \n"))
    with pytest.raises(GateError, match="max_length is 1; expected at least 2"):
        Documents(train_file="a", test_file="b", max_length=1)
    with pytest.raises(GateError, match=r"--data\.test_file is not"):
        Documents(train_file="a")
    with pytest.raises(GateError, match="give one"):
        Documents()
    pd.DataFrame({"text": ["a", None]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(GateError, match="'text' of document 2 of the train split is None"):
        opened(str(tmp_path / "a.parquet"), write(tmp_path / "b.txt", TEXT))
