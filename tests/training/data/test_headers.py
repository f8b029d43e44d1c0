"""Header lines under every shipped configuration: read where files have one, and never taken for an example."""

from dataclasses import replace
from pathlib import Path

import pytest

from gates.errors import GateError
from training.cli.command_line import build_comparison_parser, build_parser
from training.config.data import ParallelText, Text
from training.config.setup import data_of
from training.data.text import TextData
from training.data.translation import ParallelTextData

CONFIGS = Path(__file__).parents[3] / "configs"
HEADERS = [("sentence", "label"), ("Text", "Gold"), ("review", "sentiment"), ('"sentence"', '"label"')]
CLASSES = {"two numbers": ["0", "1"], "two words": ["no", "yes"], "thirty words": [f"intent {n}" for n in range(30)]}


def local_text_configurations():
    """The shipped configurations for local files with a class on each line, with the data that they configure."""
    for path in sorted(CONFIGS.glob("*.yaml")):
        files = ["--data.train_file", "train.tsv", "--data.test_file", "test.tsv"]
        config = build_comparison_parser().parse_args(["--config", str(path)])
        if config.data.class_path.endswith(".Text") and config.data.init_args.dataset is None:
            yield path.stem, data_of(build_parser().parse_args(["--config", str(path), *files]).data)


LOCAL = dict(local_text_configurations())
CONFIGURED = {(str(found.columns), found.pair_column): found for found in LOCAL.values()}
"""One of each kind: with and without names of the columns, and with pairs."""


def written(folder, options, header, classes):
    """Files of four examples of each class for a configuration, which then names them."""
    pair = ["the fox"] if options.pair_column else []
    own = [options.text_column, options.pair_column, options.label_column] if pair else header
    files = {}
    for split in ("train", "test"):
        lines = [*([own] if header else []), *([f"{split} {n}", *pair, label] for n, label in enumerate(classes * 4))]
        files[f"{split}_file"] = str(folder / f"{split}.tsv")
        Path(files[f"{split}_file"]).write_text("".join("\t".join(line) + "\n" for line in lines))
    return replace(options, **files)


def test_there_are_configurations_of_both_kinds():
    assert LOCAL.keys() >= {"sst2_minilm_local", "sick_minilm_local", "text", "decoder_local", "agreement_minilm_local"}
    assert {options.columns is None for options in CONFIGURED.values()} == {True, False}


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("header", [None, *HEADERS], ids=["no header", *map(" ".join, HEADERS)])
@pytest.mark.parametrize("name", CONFIGURED, ids=str)
def test_a_header_is_no_example_and_an_example_no_header(name, header, classes, tmp_path):
    options = written(tmp_path, CONFIGURED[name], header, CLASSES[classes])
    if options.columns is not None and header is not None:
        message = r"the first line of '.*train.tsv' looks like a header \("
    elif options.columns is None and header is None:
        message = r"it is not clear which one is|has no column"
    elif options.columns is None and options.pair_column is None and header in HEADERS[2:]:
        message = "it is not clear which one is"
    else:
        splits = TextData(options).load_splits()
        assert splits["train"].num_rows + splits["select"].num_rows == 4 * len(CLASSES[classes])
        assert {*splits["train"]["label"]} <= {*CLASSES[classes]}
        return
    with pytest.raises(GateError, match=message):
        TextData(options).load_splits()


def test_a_header_is_told_by_a_second_file_with_it(tmp_path):
    """Other classes that occur once hide it in one file."""
    rows = "".join(f"example {n}\t{label}\n" for n, label in enumerate(["a", "b", "b", "rare", "a", "odd", "a"]))
    for split in ("train", "test"):
        (tmp_path / f"{split}.tsv").write_text(f"review\tsentiment\n{split} {rows}")
    files = {"train_file": str(tmp_path / "train.tsv"), "test_file": str(tmp_path / "test.tsv")}
    with pytest.raises(GateError, match="looks like a header"):
        TextData(Text(**files, columns=["sentence", "label"])).load_splits()


def test_files_that_begin_with_the_same_example_are_no_mistake(tmp_path):
    """As where the test file is the beginning of the training file."""
    rows = "".join(f"example {n}\t{'ab'[n % 2]}\n" for n in range(30))
    (tmp_path / "train.tsv").write_text(rows)
    (tmp_path / "test.tsv").write_text("".join(rows.splitlines(keepends=True)[:4]))
    files = {"train_file": str(tmp_path / "train.tsv"), "test_file": str(tmp_path / "test.tsv")}
    TextData(Text(**files, columns=["sentence", "label"])).load_splits()
    TextData(Text(train_file=files["train_file"], test_file=files["train_file"], columns=["sentence", "label"])).load_splits()


@pytest.mark.parametrize("header", ["source\ttarget", "Target\tSource"])
def test_parallel_text_has_no_header_in_its_pairs_either(header, tmp_path):
    file = tmp_path / "train.tsv"
    file.write_text(f"{header}\n" + "".join(f"the fox {n}\tder Fuchs {n}\n" for n in range(30)))
    options = ParallelText(train_file=str(file), test_file=str(file), columns=["source", "target"])
    if header == "Target\tSource":
        file.write_text(file.read_text().replace(header, "the source\tdie Quelle"))
        assert len(ParallelTextData(options).load_pairs()["test"].source) == 31
        return
    with pytest.raises(GateError, match="looks like a header"):
        ParallelTextData(options).load_pairs()


def test_a_class_that_is_called_as_columns_are_is_a_class(tmp_path):
    rows = "".join(f"example {n}\t{('text', 'image')[n % 2]}\n" for n in range(10))
    for split in ("train", "test"):
        (tmp_path / f"{split}.tsv").write_text(f"{split} {rows}")
    files = {"train_file": str(tmp_path / "train.tsv"), "test_file": str(tmp_path / "test.tsv")}
    TextData(Text(**files, columns=["sentence", "label"])).load_splits()


def test_a_first_line_that_looks_like_a_header_can_be_an_example(tmp_path):
    files = {}
    for split in ("train", "test"):
        files[f"{split}_file"] = str(tmp_path / f"{split}.tsv")
        Path(files[f"{split}_file"]).write_text("Label\tno\n" + f"a {split}\tyes\nanother\tno\n" * 4)
    options = Text(**files, columns=["text", "label"])
    with pytest.raises(GateError, match=r"looks like a header \('Label', 'no'\).* --data.check_header false"):
        TextData(options).load_splits()
    options = replace(options, check_header=False)
    assert TextData(options).load_splits()["test"]["text"][:2] == ["Label", "a test"]
