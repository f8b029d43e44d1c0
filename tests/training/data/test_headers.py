"""Header lines: read where files have one, and never taken for an example."""

from dataclasses import replace

import pytest

from gates.errors import GateError
from training.config.data import ParallelText, Text
from training.data.text import TextData
from training.data.translation import ParallelTextData

HEADERS = [("sentence", "label"), ("Text", "Gold"), ("review", "sentiment"), ('"sentence"', '"label"')]
CLASSES = {"two numbers": ["0", "1"], "two words": ["no", "yes"], "thirty words": [f"intent {n}" for n in range(30)]}
NAMED = {"columns": ["sentence", "label"]}
PAIRS = {"text_column": "premise", "pair_column": "hypothesis", "label_column": "gold"}


def written(folder, train, test=None):
    """Files of lines for training and for test, as options."""
    for split, lines in (("train", train), ("test", train if test is None else test)):
        (folder / f"{split}.tsv").write_text("".join(f"{line}\n" for line in lines))
    return {f"{split}_file": str(folder / f"{split}.tsv") for split in ("train", "test")}


def splits(folder, train, test=None, **options):
    return TextData(Text(**written(folder, train, test), **options)).load_splits()


@pytest.mark.parametrize("classes", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("header", [None, *HEADERS], ids=["no header", *map(" ".join, HEADERS)])
@pytest.mark.parametrize("options", [{}, NAMED, PAIRS], ids=["header", "columns", "pairs"])
def test_a_header_is_no_example_and_an_example_no_header(options, header, classes, tmp_path):
    first = list(PAIRS.values()) if header and options is PAIRS else header
    pair = ["the fox"] * (options is PAIRS)
    lines = [["{split} " + str(n), *pair, label] for n, label in enumerate(classes * 4)]
    texts = ["\t".join(line) for line in ([first] if first else []) + lines]
    both = ([text.format(split=split) for text in texts] for split in ("train", "test"))
    if options is NAMED and header:
        message = r"the first line of '.*train.tsv' looks like a header \("
    elif options is not NAMED and header is None:
        message = r"it is not clear which one is|has no column"
    elif not options and header in HEADERS[2:]:
        message = "it is not clear which one is"
    else:
        found = splits(tmp_path, *both, **options)
        assert found["train"].num_rows + found["select"].num_rows == 4 * len(classes)
        assert {*found["train"]["label"]} <= {*classes}
        return
    with pytest.raises(GateError, match=message):
        splits(tmp_path, *both, **options)


def test_a_header_is_found_by_a_second_file_with_it(tmp_path):
    """Other classes that occur once hide it in one file."""
    rows = [f"example {n}\t{label}" for n, label in enumerate(["a", "b", "b", "rare", "a", "odd", "a"])]
    with pytest.raises(GateError, match="looks like a header"):
        splits(tmp_path, ["review\tsentiment", "more\ta", *rows], ["review\tsentiment", *rows], **NAMED)


def test_examples_at_the_beginning_are_no_header(tmp_path):
    """A test file may be the beginning of the training file, and a class may have the name of a column."""
    rows = [f"example {n}\t{'ab'[n % 2]}" for n in range(30)]
    splits(tmp_path, rows, rows[:4], **NAMED)
    file = written(tmp_path, rows)["train_file"]
    TextData(Text(train_file=file, test_file=file, **NAMED)).load_splits()
    rows = [f"example {n}\t{('text', 'image')[n % 2]}" for n in range(10)]
    splits(tmp_path, rows, ["another\timage", *rows], **NAMED)


def test_parallel_text_has_no_header_in_its_pairs_either(tmp_path):
    pairs = [f"the fox {n}\tder Fuchs {n}" for n in range(30)]
    for header, is_one in (("source\ttarget", True), ("the source\tdie Quelle", False)):
        data = ParallelTextData(ParallelText(**written(tmp_path, [header, *pairs]), columns=["source", "target"]))
        if is_one:
            with pytest.raises(GateError, match="looks like a header"):
                data.load_pairs()
        else:
            assert len(data.load_pairs()["test"].source) == 31


def test_a_first_line_that_looks_like_a_header_can_be_an_example(tmp_path):
    lines = ["Label\tno", *["a text\tyes", "another\tno"] * 4]
    options = Text(**written(tmp_path, lines), columns=["text", "label"])
    with pytest.raises(GateError, match=r"looks like a header \('Label', 'no'\).* --data.check_header false"):
        TextData(options).load_splits()
    options = replace(options, check_header=False)
    assert TextData(options).load_splits()["test"]["text"][:2] == ["Label", "a text"]
