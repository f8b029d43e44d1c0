"""Only pictures that a report has drawn are replaced or removed."""

import io

import pytest
from matplotlib.figure import Figure
from PIL import Image

from gates.errors import GateError
from training.report.figures import MARK, check_own_folder, picture_files, remove_pictures, write_pictures
from training.runs.directory import LOOKED_AT

OWN = f"<svg><!-- {MARK} --></svg>".encode()


def a_figure():
    figure = Figure()
    figure.add_subplot().imshow([[0, 1]])
    return figure


def test_every_picture_says_that_a_report_has_drawn_it():
    files = picture_files(a_figure(), "a")
    assert set(files) == {"a.png", "a.svg"}
    for content in files.values():
        assert MARK.encode() in content[:LOOKED_AT]
    with Image.open(io.BytesIO(files["a.png"])) as picture:
        assert picture.text["Software"] == MARK


def test_own_pictures_are_written_again_and_others_are_not(tmp_path):
    own, foreign = tmp_path / "figures" / "a.svg", tmp_path / "figures" / "b.svg"
    write_pictures({own: OWN})
    foreign.write_bytes(b"<svg>mine</svg>")
    new = OWN + b" "
    with pytest.raises(GateError, match=rf"'{foreign}' is there and is no picture of a report, so it is not replaced"):
        write_pictures({own: new, foreign: new})
    assert (own.read_bytes(), foreign.read_bytes()) == (OWN, b"<svg>mine</svg>")  # all or none
    write_pictures({own: new})
    assert own.read_bytes() == new


def test_others_stay_where_pictures_are_removed(tmp_path):
    write_pictures({tmp_path / "a.svg": OWN})
    kept = tmp_path / "mine.png"
    kept.write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.svg").symlink_to(tmp_path / "mine.png")
    remove_pictures(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.png", "folder", "link.svg"}


def test_a_folder_of_pictures_that_holds_something_else_is_refused(tmp_path):
    folder = tmp_path / "figures"
    check_own_folder(folder)
    write_pictures({folder / "a.svg": OWN})
    check_own_folder(folder)
    (folder / "mine.png").write_bytes(b"mine")
    with pytest.raises(GateError, match=rf"'{folder / 'mine.png'}' was not drawn by this version of this command"):
        check_own_folder(folder)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GateError, match="is no folder of its own for pictures"):
        check_own_folder(folder)
