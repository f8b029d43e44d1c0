from functools import partial

import pytest

from gates.errors import GateError
from training.cli.ending import PIPED_WIDTH, finish, stdout
from training.commands.table import run_command

benchmark = partial(run_command, "benchmark")


def ends(work, capsys):
    code = finish(lambda: "options", work, when_stopped="start again")
    return code, capsys.readouterr().err


def raising(error):
    def work(options):
        assert options == "options"
        raise error

    return work


def test_a_command_that_ends_says_nothing(capsys):
    assert ends(lambda options: options, capsys) == (0, "")


def test_bad_input_is_one_sentence(capsys):
    assert ends(raising(GateError("the budget is 99")), capsys) == (2, "error: the budget is 99\n")


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(1)])  # Lightning makes the second of the first
def test_ctrl_c_says_how_to_go_on(capsys, stop):
    assert ends(raising(stop), capsys) == (130, "stopped; start again\n")


def test_a_file_that_cannot_be_written_is_named(capsys, tmp_path):
    code, said = ends(lambda options: (tmp_path / "none" / "file").write_text("text"), capsys)
    assert code == 2
    assert said == f"error: {str(tmp_path / 'none' / 'file')!r} cannot be read or written: No such file or directory\n"


def test_other_failures_are_not_hidden(capsys):
    for error in (OSError("no connection"), ValueError("a mistake of ours")):
        with pytest.raises(type(error)):
            ends(raising(error), capsys)


def test_help_ends_as_the_parser_says():
    with pytest.raises(SystemExit) as end:
        benchmark(["--help"])
    assert end.value.code == 0


def test_tables_that_are_piped_are_not_cut(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert stdout().width == PIPED_WIDTH
    stdout().print("x" * PIPED_WIDTH)
    assert capsys.readouterr().out == "x" * PIPED_WIDTH + "\n"
    monkeypatch.setenv("COLUMNS", "40")
    assert stdout().width == 40
