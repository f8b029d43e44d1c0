import json

import pytest

import training.data.translation
import training.runs.hashing
from gates.errors import GateError
from tests.training.data.texts import write
from training.config.data import ParallelText
from training.data.translation import Pairs, ParallelTextData, read_lines, set_aside

KINDS = [(a, b) for a in (("old", "alte"), ("grey", "graue"), ("tall", "große")) for b in "abcdefgh"]
SOURCE = [f"the {a} {b} sees {n} birds" for n, ((a, _), b) in enumerate(KINDS)]
TARGET = [f"die {a} {b} sieht {n} Vögel" for n, ((_, a), b) in enumerate(KINDS)]
OTHER = {"vocab_size": 100, "max_length": 60}


@pytest.fixture
def files(tmp_path):
    def write_lines(name, lines):
        return write(tmp_path / name, "".join(f"{line}\n" for line in lines))

    return write_lines


def aligned(files, source=SOURCE, target=TARGET, **more):
    settings = {
        "train_source": files("train.en.gz", source), "train_target": files("train.de", target),
        "test_source": files("test.en", SOURCE[:5]), "test_target": files("test.de", TARGET[:5]),
    }  # fmt: skip
    return ParallelTextData(ParallelText(**(settings | OTHER | more)))


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
    data = ParallelTextData(ParallelText(train_file=file, test_file=file, source_column="en", target_column="de", **OTHER))
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": TARGET[:-1]}, "has 24 lines and .* has 23"),
        ({"source": ["", *SOURCE[1:]]}, r"the source of pair 1 of the train split is empty \(1 in all\).*skip_empty"),
        ({"target": [*TARGET[:-1], " "]}, "the target of pair 24 of the train split is empty"),
        ({"max_length": 4}, "training pairs have over 4 tokens on a side"),  # those set aside are training pairs
        ({"batch_tokens": 40}, "max_length is 60; expected at most batch_tokens .40"),
        ({"vocab_size": 10}, "vocab_size is 10"),
        ({"test_source": None}, "test_target is given without --data.test_source"),
        ({"train_source": "nowhere.en"}, "'nowhere.en' does not exist"),
        ({"train_file": "x.tsv"}, "both given"),
        ({"max_ratio": 0.5}, "max_ratio is 0.5"),
    ],
)
def test_bad_input_is_named_in_one_sentence(change, said, files):
    with pytest.raises(GateError, match=said):
        aligned(files, **change).build(None)


LONG = "word " * 80


@pytest.mark.parametrize("side", ["source", "target"])
def test_test_pairs_that_are_too_long_on_either_side_are_refused_or_left_out(side, files):
    texts = {"source": [*SOURCE[:3], "x"], "target": [*TARGET[:3], "y"]}
    texts[side][3] = LONG
    more = {f"test_{name}": files(f"long.{name}", lines) for name, lines in texts.items()}
    with pytest.raises(GateError, match=f"the {side} of pair 4 of the test split has .*--data.skip_unfit_pairs true"):
        aligned(files, **more).build(None)
    data = aligned(files, **more, skip_unfit_pairs=True)
    data.build(None)
    assert data.texts["test"] == Pairs(SOURCE[:3], TARGET[:3])
    assert data.splits["test"]["row"][:] == [0, 1, 2]
    assert "1 of 4 test pairs are left out: a side has more than 60 tokens" in data.notices
    assert data.describe().endswith(" select (set aside from training), 3 test pairs")
    assert {text for batch in data.test_dataloader() for text in batch["reference"]} == {*TARGET[:3]}


def test_empty_test_pairs_are_left_out_if_asked_for(files):
    more = {"test_source": files("e.en", SOURCE[:3]), "test_target": files("e.de", [TARGET[0], "", TARGET[2]])}
    with pytest.raises(GateError, match=r"set --data\.skip_unfit_pairs true"):
        aligned(files, **more).build(None)
    data = aligned(files, **more, skip_unfit_pairs=True)
    data.build(None)
    assert data.texts["test"].source == [SOURCE[0], SOURCE[2]]
    assert data.notices == ["1 of 3 test pairs are left out: a side is empty"]


def from_file(path):
    return ParallelTextData(ParallelText(train_file=path, test_file=path, **OTHER)).load_pairs()


@pytest.mark.parametrize(
    ("name", "lines", "said"),
    [
        ("a.tsv", ["source\ttarget", "a\tb\tc", "d\te"], "line 2 of .* has 3 fields and the file 2 columns"),
        ("a.csv", ["source,target", "a,b, c", "d,e"], "line 2 of .* has 3 fields"),
        ("a.tsv", ["source\ttarget", "a\tb", "", "d\te"], "line 3 of .* is blank"),
        ("a.tsv.gz", ["source\ttarget", "a\tb", "  ", "d\te"], "line 3 of .* is blank"),
        (
            "a.jsonl",
            ['{"source": "a", "target": ["b", "c"]}'],
            r"'target' of pair 1 of the train split is \['b', 'c'\]; expected a sentence",
        ),
        ("a.jsonl", ['{"source": "a", "target": "b"}', '{"source": "a", "target": ["c"]}'], "cannot be read as json"),
        ("a.jsonl", ['{"translation": null}'], "no column 'source' for the source; it has 'translation'"),
        ("a.jsonl", ['{"translation": null}', '{"translation": {"source": "a", "target": "b"}}'], "pair 1 .* is empty"),
    ],
)
def test_damaged_rows_are_named(name, lines, said, files):
    with pytest.raises(GateError, match=said):
        from_file(files(name, lines))


def test_what_is_no_damage_is_read(files):
    tsv = ["source\ttarget", *(f"{source}\t{target}\t" for source, target in zip(SOURCE, TARGET, strict=True)), "", ""]
    assert from_file(files("a.tsv", tsv))["test"] == Pairs(SOURCE, TARGET)  # empty fields and lines at the ends
    csv = ["source,target", '"two', "", 'lines",b', *(f"{s},{t}" for s, t in zip(SOURCE, TARGET, strict=True))]
    assert from_file(files("a.csv", csv))["test"].source[0] == "two\n\nlines"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_not_taken_for_utf_8(encoding, files, tmp_path):
    (tmp_path / "wide.en").write_bytes("\n".join(text.replace("ß", "ss") for text in SOURCE).encode(encoding))
    with pytest.raises(GateError, match=r"wide.en' has NUL characters \(line 1\)"):
        aligned(files, train_source=str(tmp_path / "wide.en")).build(None)


def test_names_of_special_tokens_within_texts_are_text(files):
    odd = "close the </s> tag, or <pad> it"
    select = {"select_source": files("d.en", SOURCE[:2]), "select_target": files("d.de", TARGET[:2])}
    data = aligned(files, [odd, *SOURCE], [odd, *TARGET], vocab_size=120, **select)
    data.build(None)
    special = {data.tokenizer.pad_token_id, data.tokenizer.eos_token_id}
    for ids in (data.splits["train"][0]["source"], data.splits["train"][0]["target"]):
        assert [token for token in ids if token in special] == [data.tokenizer.eos_token_id] == ids[-1:]
        assert data.tokenizer.decode(ids, skip_special_tokens=True) == odd
    assert data.splits["train"]["source"][1:] == data.tokenizer(SOURCE)["input_ids"]


def test_pairs_set_aside_are_filtered_as_training_pairs_are(files):
    """They are training pairs: no file of the user's has them as its selection split."""
    long = [f"{'long ' * 30}{n}" for n in range(8)]
    data = aligned(files, [*SOURCE, *long], [*TARGET, *(f"kurz {n}" for n in range(8))], select_fraction=0.5, max_ratio=2.0)
    data.build(None)
    assert "training pairs are left out: a side has more than" in data.notices[0]
    assert 0 < len(data.texts["select"].source) == data.splits["select"].num_rows < 16
    assert {*data.texts["select"].source} <= {*SOURCE}
    assert list(data.splits["select"]["row"]) == list(range(len(data.texts["select"].target)))


def test_parts_of_a_split_are_encoded_as_the_whole(files, monkeypatch):
    whole, parts = aligned(files), aligned(files)
    whole.build(None)
    monkeypatch.setattr(training.data.translation, "ENCODED_AT_ONCE", 7)
    monkeypatch.setattr(training.runs.hashing, "ROWS", 3)
    parts.build(None)
    assert parts.splits["train"][:] == whole.splits["train"][:]
    assert parts.fingerprint() == whole.fingerprint()


def test_bleu_has_the_tokenizer_that_the_language_needs(files):
    data, plain = aligned(files, bleu_tokenize="zh"), aligned(files)
    data.build(None)
    plain.build(None)
    assert {metric.tokenize for metric in data.task.metrics("test").values()} == {"zh"}
    assert plain.fingerprint() != data.fingerprint()


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_tokenizer_that_does_not_know_a_language_is_refused(side, files, tmp_path):
    known = aligned(files)
    known.build(None)
    known.tokenizer.save_pretrained(tmp_path / "tokenizer")
    lines = {"source": SOURCE, "target": TARGET} | {
        side: [f"\u043b\u0438\u0441\u0430 \u0432\u0438\u0434\u0438\u0442 {n}" for n in range(24)]
    }
    data = aligned(files, lines["source"], lines["target"], tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(GateError, match=r"tokenizer' does not know the texts: \d+ % of their tokens are <unk>"):
        data.build(None)
