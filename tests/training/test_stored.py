"""What commands have written, read again: what is damaged or changed is named, and never taken for something else."""

import errno
import os

import numpy as np
import pandas as pd
import pytest

from gates.errors import GateError
from gates.surgery.masks import read_mask
from training.runs.stored import read_arrays, read_json, read_table, read_text, remove_checksums, write_checksums

TABLE = "seed,method,budget,test_accuracy\n0,learned,3,0.5\n1,his,3,0.25\n"


def named(path, reason):
    return rf"^cannot read '{path}' as .*: it is damaged \(.*{reason}.*\); start the command that wrote it again$"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text.replace("budget", "buhget"), "it has no column 'budget'"),
        (lambda text: text[:-3], "its last line is cut off"),
        (lambda text: text.replace("1,his", "1,his,his,his,his"), "Expected 4 fields in line 3"),
        (lambda text: "", "it is empty"),
        (lambda text: text.replace("his", "h\udce9s"), "codec can't decode byte 0xe9"),
    ],
)
def test_a_damaged_table_is_told_with_the_place(damage, reason, tmp_path):
    path = tmp_path / "comparison.csv"
    path.write_text(TABLE)
    pd.testing.assert_frame_equal(read_table(path, needed=("budget",)), pd.read_csv(path))
    path.write_text(damage(TABLE), errors="surrogateescape")
    with pytest.raises(GateError, match=named(path, reason)):
        read_table(path, needed=("budget",))


@pytest.mark.parametrize("text", ["", "{", "[" * 20_000, "[]", "null", "5", '{"a": 1} x'])
def test_damaged_json_is_named(text, tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text(text)
    with pytest.raises(GateError, match=named(path, "")):
        read_json(path, dict)


def test_damaged_arrays_are_named(tmp_path):
    path = tmp_path / "predictions.npz"
    np.savez_compressed(path, test_prediction=np.arange(200), test_target=np.arange(200))
    content = path.read_bytes()
    assert read_arrays(path)["test_target"].tolist() == list(range(200))
    draw, sentences = np.random.default_rng(0), []
    for _ in range(200):
        place = int(draw.integers(len(content)))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << int(draw.integers(8))]) + content[place + 1 :])
        try:
            found = read_arrays(path)
        except GateError as error:
            sentences.append(str(error))
        else:  # the bit belongs to nothing, such as a date
            assert all(array.tolist() == list(range(200)) for array in found.values())
    assert len(sentences) > 100
    assert all(str(path) in sentence for sentence in sentences)
    for damaged in (b"", content[:100], b"\0" * 300):
        path.write_bytes(damaged)
        with pytest.raises(GateError, match=named(path, "")):
            read_arrays(path)


def test_an_array_of_objects_is_not_read(tmp_path):
    """Reading it could run code."""
    path = tmp_path / "predictions.npz"
    np.savez_compressed(path, test_prediction=np.array([{}], dtype=object))
    with pytest.raises(GateError, match="allow_pickle"):
        read_arrays(path)


def test_what_is_not_there_or_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    for read in (read_text, lambda path: read_json(path, dict), read_table):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none")

    def forbidden(*arguments, **more):
        raise PermissionError(errno.EACCES, "Permission denied", "file")

    monkeypatch.setattr("pathlib.Path.read_text", forbidden)
    with pytest.raises(PermissionError):
        read_json(tmp_path, dict)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.json")
    with pytest.raises(GateError, match="is no regular file"):
        read_json(tmp_path / "metrics.json", dict)
    with pytest.raises(GateError, match="is not a regular file"):
        read_mask(tmp_path / "metrics.json")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "his.json").write_text('{"0": [1]}\n')
    (tmp_path / "comparison.csv").write_text("seed,test_accuracy\n0,0.5\n")
    (tmp_path / "verdict.md").write_text("Level.\n")
    write_checksums(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "read"),
    [("comparison.csv", read_table), ("verdict.md", read_text), ("masks/his.json", lambda path: read_json(path, dict))],
)
def test_every_reader_notices_another_digit(name, read, folder):
    path = folder / name
    text = path.read_text()
    read(path)
    path.write_text(text.replace("5", "6").replace("L", "M").replace("1", "2"))
    with pytest.raises(GateError, match=rf"^'{path}' has changed since it was written"):
        read(path)
    path.write_bytes(text.replace("\n", "\r\n").encode())  # as another system ends lines
    read(path)
    path.write_text("another\n1\n" if path.suffix == ".csv" else "{}")
    remove_checksums(folder)
    read(path)
