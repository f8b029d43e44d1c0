import gzip
import json

import pytest

from gates.errors import GateError
from training.data.parallel_text import ParallelTextData, read_lines, set_aside
from training.data.translation import Pairs

KINDS = [(a, b) for a in (("old", "alte"), ("grey", "graue"), ("tall", "große")) for b in "abcdefgh"]
SOURCE = [f"the {a} {b} sees {n} birds" for n, ((a, _), b) in enumerate(KINDS)]
TARGET = [f"die {a} {b} sieht {n} Vögel" for n, ((_, a), b) in enumerate(KINDS)]
OTHER = {"vocab_size": 100, "max_length": 60}


@pytest.fixture
def files(tmp_path):
    def write(name, lines):
        path = tmp_path / name
        content = "".join(f"{line}\n" for line in lines).encode("utf-8")
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return write


def aligned(files, source=SOURCE, target=TARGET, **more):
    settings = {
        "train_source": files("train.en.gz", source), "train_target": files("train.de", target),
        "test_source": files("test.en", SOURCE[:5]), "test_target": files("test.de", TARGET[:5]),
    }  # fmt: skip
    return ParallelTextData(**(settings | OTHER | more))


def test_aligned_files_are_read_line_by_line(files):
    data = aligned(files, select_source=files("dev.en", SOURCE[5:9]), select_target=files("dev.de", TARGET[5:9]))
    data.build(None)
    assert data.texts["train"] == Pairs(SOURCE, TARGET)
    assert data.texts["select"] == Pairs(SOURCE[5:9], TARGET[5:9])
    row = data.splits["train"][3]
    assert data.tokenizer.decode(row["source"], skip_special_tokens=True) == SOURCE[3]
    assert data.tokenizer.decode(row["target"], skip_special_tokens=True) == TARGET[3]


def test_batches_are_padded_and_the_padding_has_no_label(files):
    data = aligned(files)
    data.build(None)
    batch = next(iter(data.test_dataloader()))
    mask, pad = batch["attention_mask"].bool(), data.tokenizer.pad_token_id
    assert (batch["input_ids"][~mask] == pad).all()
    assert (batch["input_ids"][mask] != pad).all()
    for row, labels, reference in zip(batch["row"].tolist(), batch["labels"], batch["reference"], strict=True):
        assert reference == TARGET[row]
        assert labels[labels != -100].tolist() == data.splits["test"][row]["target"]
        assert ((labels == -100).int().diff() >= 0).all()  # at the end only


@pytest.mark.parametrize("ending", ["tsv", "csv.gz", "jsonl"])
def test_files_with_columns(ending, files):
    rows = list(zip(SOURCE, TARGET, strict=True))
    if ending == "jsonl":
        lines = [json.dumps({"en": source, "de": target}) for source, target in rows]
    else:
        comma = "\t" if ending == "tsv" else ","
        lines = [f"en{comma}de", *(f"{source}{comma}{target}" for source, target in rows)]
    file = files(f"all.{ending}", lines)
    data = ParallelTextData(train_file=file, test_file=file, source_column="en", target_column="de", **OTHER)
    data.build(None)
    assert data.texts["test"] == Pairs(SOURCE, TARGET)
    assert len(data.texts["train"].source) + len(data.texts["select"].source) == 24


def test_other_line_ends_of_unicode_stay_within_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\u2028two\r\nthree\x85\n\nlast".encode())
    assert read_lines(str(path)) == ["one\u2028two", "three", "", "last"]


def test_sentences_with_the_same_source_are_set_aside_together():
    pairs = Pairs([f"s{n // 3}" for n in range(60)], [f"t{n}" for n in range(60)])
    train, select = set_aside(pairs, 0.1)
    assert len(select.source) == 6
    assert not {*train.source} & {*select.source}


def test_pairs_that_do_not_fit_are_left_out_of_training_only(files):
    data = aligned(files, [*SOURCE, "long " * 30], [*TARGET, "kurz"], max_ratio=2.0)
    data.build(None)
    assert data.left_out == 1
    assert data.splits["train"].num_rows == len(data.texts["train"].source) - 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": TARGET[:-1]}, "has 24 lines and .* has 23"),
        ({"source": ["", *SOURCE[1:]]}, r"the source of pair 1 of the train split is empty \(1 in all\).*skip_empty"),
        ({"target": [*TARGET[:-1], " "]}, "the target of pair 24 of the train split is empty"),
        ({"max_length": 4}, "pair .* of the (select|test) split has .* tokens, more than 4"),
        ({"batch_tokens": 40}, "max_length is 60 and batch_tokens 40"),
        ({"vocab_size": 10}, "vocab_size is 10"),
        ({"test_source": None}, "test_target is given but --data.test_source is not"),
        ({"train_source": "nowhere.en"}, "'nowhere.en' does not exist"),
        ({"train_file": "x.tsv"}, "both given"),
        ({"max_ratio": 0.5}, "max_ratio is 0.5"),
        ({"beam_splits": ["train"]}, "beam_splits names 'train'"),
    ],
)
def test_bad_input_is_named_in_one_sentence(change, said, files):
    with pytest.raises(GateError, match=said):
        aligned(files, **change).build(None)


def test_a_wrong_encoding_is_named(files, tmp_path):
    (tmp_path / "latin.de").write_bytes("\n".join(TARGET).encode("latin-1"))
    with pytest.raises(GateError, match=r"latin.de' is not UTF-8 \(line 1\)"):
        aligned(files, train_target=str(tmp_path / "latin.de")).build(None)


def test_lines_that_do_not_belong_together_are_noticed(files):
    with pytest.raises(GateError, match="24 of 24 training pairs"):
        aligned(files, target=["x"] * 24, select_source=files("d.en", ["a"]), select_target=files("d.de", ["a"])).build(None)


def test_empty_pairs_can_be_left_out(files):
    data = aligned(files, target=["", *TARGET[1:]], skip_empty=True)
    assert data.load_pairs()["train"].source.count(SOURCE[0]) == 0
