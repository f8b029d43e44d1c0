"""Files that are complete or not there, whatever happens to the process that writes them."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from gates.errors import GateError
from gates.files import FULL, naming, replacing, written_whole

KILLED = """
import os, signal, sys
from pathlib import Path
from gates.files import FULL, naming, replacing, written_whole
with {how}(Path(sys.argv[1])) as partial:
    {writes}
    os.kill(os.getpid(), signal.SIGKILL)
"""
WRITES = {"replacing": "partial.write_text('half')", "written_whole": "(partial / 'part').write_text('half')"}


def killed_while_writing(how, path):
    program = KILLED.format(how=how, writes=WRITES[how])
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -signal.SIGKILL


def write(how, path):
    if how == "replacing":
        with replacing(path) as partial:
            partial.write_text("whole")
    else:
        with written_whole(path) as partial:
            (partial / "part").write_text("whole")


@pytest.mark.parametrize("how", WRITES)
def test_what_killed_processes_left_goes_when_the_name_is_written_again(how, tmp_path):
    target = tmp_path / "name [1]*"
    for _ in range(2):
        killed_while_writing(how, target)
    assert not target.exists()
    assert len(list(tmp_path.iterdir())) == 1  # the second has removed what the first left
    others = [f".name [1]*.partial-{os.getppid()}", ".name 1.partial-999999999", ".name [1]*.partial-x", "name [1]*.partial-9"]
    for name in others:
        (tmp_path / name).write_text("of a process that lives, or of another name")
    write(how, target)
    assert {path.name for path in tmp_path.iterdir()} == {target.name, *others}


@pytest.mark.parametrize("how", WRITES)
def test_nothing_has_its_name_before_it_is_on_the_disk(how, tmp_path, monkeypatch):
    """All that is written is brought to the disk, then it gets its name, then the folder that says so is."""
    target, calls, fsync = tmp_path / "target", [], os.fsync

    def recorded(number):
        calls.append((os.path.basename(os.readlink(f"/proc/self/fd/{number}")), target.exists()))
        fsync(number)

    monkeypatch.setattr(os, "fsync", recorded)
    write(how, target)
    partial = f".target.partial-{os.getpid()}"
    staged = [partial] if how == "replacing" else ["part", partial]
    assert calls == [*((name, False) for name in staged), (tmp_path.name, True)]


def test_a_disk_that_turns_out_to_be_full_is_named_and_the_old_file_stays(tmp_path, monkeypatch):
    """Some file systems say so only when the file is brought to the disk."""
    target = tmp_path / "table.csv"
    target.write_text("old")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*table\.csv"), replacing(target) as partial:
        partial.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
    assert target.read_text() == "old"


def chained(error, reason):
    """What a library makes of an error of the system."""
    error.__context__ = reason
    return error


FULL_DISKS = {
    "a write": OSError(errno.ENOSPC, "No space left on device"),
    "safetensors": RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    "PyTorch": chained(RuntimeError("unexpected pos 640 vs 534"), OSError(errno.ENOSPC, "No space left on device")),
    "a quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "a limit of the process": OSError(errno.EFBIG, "File too large"),
}


@pytest.mark.parametrize("said", FULL_DISKS.values(), ids=FULL_DISKS.keys())
@pytest.mark.parametrize("writing", [replacing, written_whole])
def test_a_disk_that_is_full_is_told_with_the_name_that_is_asked_for(said, writing, tmp_path):
    path = tmp_path / "table.csv"
    with pytest.raises(OSError, match=r"\[Errno \d+\]") as told, writing(path):
        raise said
    assert told.value.filename == str(path)
    assert told.value.errno in FULL
    assert not list(tmp_path.iterdir())


def test_a_temporary_name_is_nobodys_business(tmp_path):
    path = tmp_path / "export"
    with pytest.raises(OSError, match="No space") as told, written_whole(path) as partial:
        raise OSError(errno.ENOSPC, "No space left on device", str(partial / "config.json"))
    assert told.value.filename == str(path)


def test_a_file_that_an_error_names_keeps_its_name(tmp_path):
    with pytest.raises(OSError, match="No space") as told, naming(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "metrics.csv"))
    assert told.value.filename == str(tmp_path / "metrics.csv")


@pytest.mark.parametrize("error", [ValueError("a mistake"), FileNotFoundError(2, "No such file"), OSError("no connection")])
def test_other_errors_stay_what_they_are(error, tmp_path):
    with pytest.raises(type(error)) as told, naming(tmp_path):
        raise error
    assert told.value is error


def write_text(path, text="new"):
    with replacing(path) as partial:
        partial.write_text(text)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError), replacing(path) as partial:
        partial.write_text("half \udce9", encoding="utf-8")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_a_symbolic_link_stays_one(tmp_path):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "a.txt", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link)
    assert link.is_symlink()
    assert target.read_text() == "new"
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "far" / "b.txt")
    write_text(dangling)
    assert (tmp_path / "far" / "b.txt").read_text() == "new"


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
    path = tmp_path / "there"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(os.devnull)
    before = os.stat(path)
    with pytest.raises(GateError, match="a directory" if kind == "directory" else "no regular file"):
        write_text(path)
    assert os.stat(path) == before or os.stat(path).st_mode == before.st_mode
    assert [file.name for file in tmp_path.iterdir()] == ["there"]
