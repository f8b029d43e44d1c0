"""Training on a stream: blocks by number, bounded splits, what is set aside, and what the data are known by."""

import json
import shutil
from itertools import islice

import pytest
import torch

from gates.errors import GateError
from tests.training.causal_runs import MODEL
from training.config.data import Documents
from training.data.documents import DocumentsData, StreamedDocumentsData, StreamedRows
from training.data.synthetic_text import generate_documents
from training.fit import main as fit

STORIES = generate_documents(120, seed=5)
SIZES = {"max_length": 16, "batch_size": 2, "vocab_size": 200, "score_rows": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stories")
    for name, part in (("train", STORIES[:80]), ("select", STORIES[80:100]), ("test", STORIES[100:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return {f"{name}_file": str(folder / f"{name}.jsonl") for name in ("train", "select", "test")}


def opened(files, run_seed=0, **more):
    told = SIZES | {"streaming": True, "train_blocks": 20, "kept_blocks": 12, "shuffle_buffer": 16} | files | more
    data = StreamedDocumentsData(Documents(**told))
    data.order_by(run_seed)
    data.build(None)
    return data


def inputs(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def test_rows_are_known_by_number():
    begun = 0

    def begin():
        nonlocal begun
        begun += 1
        return ({"number": number} for number in range(100))

    rows = StreamedRows(begin)
    assert [rows[number]["number"] for number in (0, 1, 2, 7, 8, 50)] == [0, 1, 2, 7, 8, 50]
    assert begun == 1
    assert [rows[number]["number"] for number in (50, 51, 3)] == [50, 51, 3]
    assert begun == 3


def test_splits_are_those_of_data_read_whole_where_there_is_no_more(files):
    streamed = opened(files, select_blocks=10_000, test_blocks=10_000, kept_blocks=10_000, shuffle_buffer=1)
    whole = DocumentsData(Documents(**SIZES, **files))
    whole.build(None)
    assert streamed.tokenizer.get_vocab() == whole.tokenizer.get_vocab()
    for name in ("train", "select", "test"):
        assert streamed.splits[name][:] == whole.splits[name][:]
    assert streamed.notices == whole.notices == []


def test_splits_are_bounded_and_it_is_said(files):
    data = opened(files, select_blocks=5, test_blocks=7)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 12, "select": 5, "test": 7}
    assert data.notices == [
        "the select split is its first 5 blocks; --data.select_blocks takes more of the stream",
        "the test split is its first 7 blocks; --data.test_blocks takes more of the stream",
    ]


def test_further_test_texts_are_streamed_as_the_first_are(files):
    more = {"other": files["select_file"], "again": files["test_file"]}
    data, alone, whole = opened(files, test_blocks=7, more_tests=more), opened(files, test_blocks=7), opened(files)
    assert data.more_tests == ["test_again", "test_other"]
    assert data.splits["test_again"][:] == data.splits["test"][:] == alone.splits["test"][:]
    assert data.splits["test_other"][:] == whole.splits["select"].select(range(7))[:]
    assert "the test_other split is its first 7 blocks; --data.test_blocks takes more of the stream" in data.notices
    assert data.fingerprint() != alone.fingerprint()
    assert data.fingerprint() == opened(files, test_blocks=7, more_tests=dict(reversed(more.items()))).fingerprint()


def test_training_goes_over_all_texts_again_and_again_in_new_orders(files):
    data = opened(files)
    documents = sum(len(row["starts"]) for row in islice(data.rows_of(STORIES[:80]), 10_000))
    assert documents > 80  # parts of documents
    tokens = [token for row in data.rows_of(STORIES[:80]) for token in row["labels"]]
    stream = data._endless()
    passes = [[], []]
    for own in passes:
        while len(own) < len(tokens):
            own += next(stream)["labels"]
    assert sorted(passes[0][: len(tokens)]) == sorted(tokens)
    assert passes[0][:50] != passes[1][:50]


@pytest.mark.parametrize("first", [1, 25])
def test_a_run_that_is_resumed_sees_what_an_unbroken_one_sees(files, first):
    batches = opened(files).batches_of_run(epochs=3, first=0, rank=0, world=1)
    assert len(batches) == 30
    whole = inputs(opened(files)._loader("train", batches, opened(files).training_rows))
    data = opened(files)
    rest = data._loader("train", data.batches_of_run(epochs=3, first=first, rank=0, world=1), data.training_rows)
    assert inputs(rest) == whole[first:]


def test_the_order_is_that_of_the_run_and_the_splits_are_not(files):
    one, again, other = (opened(files, seed) for seed in (1, 1, 2))
    assert inputs(one.train_dataloader()) == inputs(again.train_dataloader()) != inputs(other.train_dataloader())
    for name in ("train", "select", "test"):
        assert one.splits[name][:] == other.splits[name][:]
    assert inputs(one.score_dataloader()) != inputs(other.score_dataloader())  # a choice among them


def test_texts_are_set_aside_for_selection_and_never_trained_on(files):
    """Neither are those that occur again."""
    given = {name: file for name, file in files.items() if name != "select_file"}
    data = opened(given, select_fraction=0.3)
    train, select = (set(data._texts(name, 0)) for name in ("train", "select"))
    assert train | select == set(STORIES[:80])
    assert not train & select
    assert 0.1 < len(select) / 80 < 0.5
    with pytest.raises(GateError, match=r"the select split has no text; .* a larger --data.select_fraction"):
        opened(given, select_fraction=1e-9)


def test_no_more_documents_are_read_than_batches_need(files, monkeypatch):
    data, asked = opened(files), 0

    def endless(seed, buffer):
        nonlocal asked
        while True:
            asked += 1
            yield STORIES[asked % 80]

    monkeypatch.setattr(data, "at_once", 3)
    object.__setattr__(data.streams["train"], "texts", endless)
    rows, tokens = data.training_rows, 0
    for number in range(200):
        tokens += rows[number]["length"]
        documents = tokens / 16 / 2  # each has at least 30 tokens
        assert asked <= documents + 3 + 16


def test_data_are_known_by_their_content(files, tmp_path):
    first = opened(files).fingerprint()
    assert opened(files).fingerprint() == first
    copied = {name: str(tmp_path / f"{name}.jsonl") for name in files}
    for name, file in files.items():
        shutil.copy(file, tmp_path / f"{name}.jsonl")
    assert opened(copied).fingerprint() == first
    changed = (tmp_path / "train_file.jsonl").read_text()
    place = changed.rindex("the ")
    (tmp_path / "train_file.jsonl").write_text(changed[:place] + "so " + changed[place + 4 :])
    assert opened(copied).fingerprint() != first
    others = [opened(files, 1), opened(files, train_blocks=21), opened(files, shuffle_buffer=17)]
    assert len({first, *(data.fingerprint() for data in others)}) == 4


@pytest.fixture(scope="module")
def arguments(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    model = json.dumps(MODEL | {"n_layer": 1})
    data = json.dumps(SIZES | files | {"streaming": True, "train_blocks": 16, "kept_blocks": 12, "shuffle_buffer": 16})
    (folder / "stream.yaml").write_text(
        f"model: {{from_scratch: {model}, budget: 2, finetune: 1, prune: 1, retrain: 1, min_steps: 0, refit: false}}\n"
        f"data: {{class_path: Documents, init_args: {data}}}\n"
        "trainer: {accelerator: cpu, enable_progress_bar: false}\nwandb: {mode: disabled}\nsave_every: 3\n"
    )
    return ["--config", str(folder / "stream.yaml"), "--curve", "[]"]


@pytest.mark.integration
def test_a_stopped_run_ends_as_an_unbroken_one(arguments, tmp_path, monkeypatch):
    stopped, unbroken = str(tmp_path / "stopped"), str(tmp_path / "unbroken")
    more = ["--compare", "none"]
    read, calls = StreamedRows.__getitem__, [0]

    def breaks_off(rows, number):
        calls[0] += 1
        if calls[0] == 27:
            raise KeyboardInterrupt
        return read(rows, number)

    with monkeypatch.context() as patched:
        patched.setattr(StreamedRows, "__getitem__", breaks_off)
        assert fit([*arguments, *more, "--run_dir", stopped]) == 130
    assert fit([*arguments, *more, "--run_dir", stopped, "--existing", "resume"]) == 0
    assert fit([*arguments, *more, "--run_dir", unbroken]) == 0
    one, other = (torch.load(f"{run}/checkpoints/final.ckpt")["state_dict"] for run in (stopped, unbroken))
    for name, value in one.items():
        if torch.is_tensor(value):
            assert torch.equal(value, other[name]), name
