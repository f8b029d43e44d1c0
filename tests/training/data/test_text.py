import gzip
import json

import pandas as pd
import pytest
from datasets import Dataset
from transformers import BertConfig

from gates.errors import GateError
from tests.training.data import texts
from training.config.data import Text
from training.data.synthetic import build_tokenizer
from training.data.text import TextData, read_file, set_aside

CONFIG = {"vocab_size": 90, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
ROWS = [("the fox sees the basil", "1"), ("a \"quoted, word' here", "0"), ("NA", "1"), ("null and 12", "0")] * 5


def write(path, rows=ROWS, header=("sentence", "label"), separator="\t"):
    return texts.write(path, "".join(f"{separator.join(row)}\n" for row in (header, *rows)))


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data module for a train and a test file; the tokenizer is the synthetic one."""

    def make(train="train.tsv", test="test.tsv", **more):
        module = TextData(Text(train_file=str(tmp_path / train), test_file=str(tmp_path / test), **more))
        monkeypatch.setattr(module, "load_tokenizer", lambda backbone: build_tokenizer())
        return module

    return make


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.txt", "a.csv", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_every_format_reads_the_same(tmp_path, name):
    path = tmp_path / name
    frame = pd.DataFrame(ROWS, columns=["sentence", "label"])
    if ".jsonl" in name:
        text = "".join(json.dumps(row) + "\n" for row in frame.to_dict("records"))
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    elif name.endswith(".parquet"):
        frame.to_parquet(path)
    elif name.endswith(".csv"):
        frame.to_csv(path, index=False)
    else:
        write(path)
    table = read_file(str(path))
    assert [(str(row["sentence"]), str(row["label"])) for row in table] == ROWS


def test_splits_pairs_and_labels(tmp_path, data):
    rows = [("the fox", "the king", label) for label in ("no", "yes", "maybe")] * 10
    for name in ("train.tsv", "test.tsv"):
        write(tmp_path / name, rows, header=("a", "b", "gold"))
    module = data(text_column="a", pair_column="b", label_column="gold", select_fraction=0.2)
    module.build(None)
    assert module.labels == ["maybe", "no", "yes"]
    assert {name: split.num_rows for name, split in module.splits.items()} == {"train": 24, "select": 6, "test": 30}
    batch = next(iter(module.test_dataloader()))
    assert set(batch) >= {"input_ids", "attention_mask", "labels"}
    ids = batch["input_ids"][0].tolist()
    tokenizer = build_tokenizer()
    assert ids == tokenizer("the fox", "the king")["input_ids"]


def test_one_line_describes_the_data(tmp_path, data):
    for name in ("train.tsv", "test.tsv"):
        write(tmp_path / name, [("the fox", "no"), ("the fox sees the king", "yes")] * 10)
    module = data(select_fraction=0.2, max_length=5)
    module.build(None)
    assert module.describe() == (
        "data: 16 train, 4 select (set aside from training), 20 test examples; 2 classes (no, yes); "
        "columns 'sentence', 'label'; 20 of 40 texts fill 5 tokens, where longer ones are cut (--data.max_length)"
    )
    module.labels, module.set_aside = [f"class {n}" for n in range(7)], False
    assert "16 train, 4 select, 20 test examples; 7 classes (class 0, class 1, " in module.describe()
    assert "class 4, and 2 more)" in module.describe()


BAD = {
    "missing": (None, "does not exist"),
    "empty": ("", "is empty"),
    "blank": ("\n \n", "is empty"),
    "no label column": (
        "sentence\tid\tgold\nx\t1\t1\n",
        "not clear which one is the class; give --data.label_column, .* or --data.unlabelled true",
    ),
    "empty label": ("sentence\tlabel\n" + "x\t1\n\ny\t\n" * 10, r"line 4 of '.*train\.tsv' has an empty label.*'label'"),
    "semicolons": ("sentence;label\n" + "x;1\ny;0\n" * 10, "'sentence;label', with semicolons .* expected tabs in a .tsv file"),
    "commas": ("sentence,label\n" + "x,1\ny,0\n" * 10, "with commas .* expected tabs"),
    "numbers": ("sentence\tlabel\n" + "".join(f"x\t0.{i}\n" for i in range(40)), "expected classes"),
    "one row": ("sentence\tlabel\nx\t1\n", "one example"),
    "one class": ("sentence\tlabel\n" + "x\t1\n" * 20, "at least two classes"),
    "ragged": ("sentence\tlabel\nx\t1\ny\t0\tz\tz\n", r"line 3 of .* has 4 fields and the file 2 columns"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(tmp_path, data, case):
    content, message = BAD[case]
    write(tmp_path / "test.tsv")
    if content is not None:
        (tmp_path / "train.tsv").write_text(content)
    with pytest.raises(GateError, match=message):
        data().build(None)


@pytest.mark.parametrize("is_cut", [True, False])
def test_damaged_gzip(tmp_path, data, is_cut):
    write(tmp_path / "test.tsv")
    packed = bytearray(gzip.compress(("sentence\tlabel\n" + "x\t1\n" * 900).encode()))
    packed[20:30] = b"\xff" * 10
    (tmp_path / "train.tsv.gz").write_bytes(packed[:40] if is_cut else packed)
    with pytest.raises(GateError, match="not a complete gzip"):
        data(train="train.tsv.gz").build(None)


def test_a_label_outside_the_classes(tmp_path, data):
    write(tmp_path / "train.tsv")
    write(tmp_path / "test.tsv", [*ROWS, ("x", "7")])
    with pytest.raises(GateError, match=r"'7' \(example 21\).*'0', '1'"):
        data().build(None)


def test_further_test_files_are_splits_of_their_own(tmp_path, data):
    rows = [("the fox sees the basil", "1"), ("the king", "0"), ("the basil", "1")] * 4
    for name, part in {"train": rows, "test": rows[:3], "other": rows[2:]}.items():
        write(tmp_path / f"{name}.tsv", part)
    one = data(test="test.tsv", more_tests={"other": str(tmp_path / "other.tsv")})
    two, alone = data(test="other.tsv"), data(test="test.tsv")
    for made in (one, two, alone):
        made.build(None)
    assert (one.more_tests, alone.more_tests) == (["test_other"], [])
    assert one.splits["test_other"][:] == two.splits["test"][:]
    assert next(iter(one.more_test_dataloader("test_other")))["labels"].shape == (10,)
    assert one.fingerprint() != alone.fingerprint()
    write(tmp_path / "other.tsv", [("the fox", "neither")])
    with pytest.raises(GateError, match="the test_other split has the label 'neither'"):
        data(test="test.tsv", more_tests={"other": str(tmp_path / "other.tsv")}).build(None)


def test_further_splits_of_a_data_set(tmp_path):
    for name in ("train", "validation", "test"):
        write(
            tmp_path / f"{name}.csv", [("the fox", "1"), ("the king", "0")] * (4 if name == "validation" else 10), separator=","
        )
    read = TextData(Text(dataset=str(tmp_path), more_tests={"other": "validation"})).load_splits()
    assert (read["test"].num_rows, read["test_other"].num_rows) == (20, 8)
    with pytest.raises(GateError, match="has no split 'mismatched' for test_other; it has train, validation, test"):
        TextData(Text(dataset=str(tmp_path), more_tests={"other": "mismatched"})).load_splits()


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path):
    """Transformers would make one that knows nothing."""
    BertConfig(**CONFIG).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    write(tmp_path / "train.tsv")
    options = Text(train_file=str(tmp_path / "train.tsv"), test_file=str(tmp_path / "train.tsv"), tokenizer=str(tmp_path))
    with pytest.raises(GateError, match="special tokens, so its files may be missing"):
        TextData(options).build(None)


@pytest.mark.parametrize(("rows", "share"), [(10, 0.1), (11, 0.1), (7, 0.5), (3, 0.01)])
def test_examples_set_aside_are_those_of_the_library(rows, share):
    split = Dataset.from_dict({"text": [f"text {row}" for row in range(rows)], "label": ["0"] * rows})
    known = split.train_test_split(share, seed=0)
    found = set_aside(split, share)
    assert found["train"].to_dict() == known["train"].to_dict()
    assert found["select"].to_dict() == known["test"].to_dict()


@pytest.mark.parametrize(("pair", "texts"), [(None, 1), ("other", 2)])
def test_a_length_that_leaves_nothing_of_a_text_is_refused(tmp_path, data, pair, texts):
    rows = [("the fox sees the basil", label, "the king") for label in "0101"]
    special = build_tokenizer().num_special_tokens_to_add(pair=pair is not None)
    named = {"train": "train.jsonl", "test": "train.jsonl", "pair_column": pair}
    pd.DataFrame(rows, columns=["sentence", "label", "other"]).to_json(tmp_path / "train.jsonl", orient="records", lines=True)
    said = rf"max_length is {special + texts - 1}, and the tokenizer adds {special} special tokens; expected at least"
    with pytest.raises(GateError, match=said):
        data(**named, max_length=special + texts - 1).build(None)
    data(**named, max_length=special + texts).build(None)


def test_the_sentence_is_no_second_sentence(tmp_path, data):
    write(tmp_path / "train.tsv")
    with pytest.raises(GateError, match="one column in two roles"):
        data(test="train.tsv", text_column="sentence", pair_column="sentence").build(None)
