"""What tells a table that was written so from one of which a digit has changed."""

import pytest

from gates.errors import GateError
from training.runs.stored import CHECKSUMS, read_json, read_table, read_text, remove_checksums, write_checksums


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
    [
        ("comparison.csv", read_table),
        ("verdict.md", read_text),
        ("masks/his.json", lambda path: read_json(path, dict)),
    ],
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


def test_a_file_of_which_nothing_is_stated_is_read(folder):
    (folder / "new.csv").write_text("seed\n1\n")
    assert len(read_table(folder / "new.csv")) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 20_000])
def test_damaged_checksums_are_named(text, folder):
    (folder / CHECKSUMS).write_text(text)
    with pytest.raises(GateError, match=rf"cannot read '{folder / CHECKSUMS}' as .*: it is damaged .*; delete it"):
        read_text(folder / "verdict.md")
