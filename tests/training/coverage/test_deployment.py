from pathlib import Path

import pytest

from training.commands.table import run_command
from training.coverage import deployment, routes
from training.coverage.runtimes import RUNTIMES, subjects
from training.coverage.vllm_process import Vllm
from training.coverage.writers import ways

PAGE = Path(__file__).parents[3] / "docs" / "deployment.md"


def test_the_page(tmp_path, capsys):
    page = tmp_path / "page.md"
    assert run_command("deployment", ["--tables", "[routes]", "--only", "[T5]", "--output", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(deployment.HEADING)
    assert "T5" in text.splitlines()[-1]
    assert text.splitlines()[0] in capsys.readouterr().out
    assert run_command("deployment", ["--tables", "[routes]", "--only", "[NomicBert]", "--output", str(page)]) == 0  # again


def test_the_published_page_has_the_rows_and_columns_of_this_program():
    sections = {text.split("\n")[0]: text for text in PAGE.read_text(encoding="utf-8").split("\n## ")}
    rows = [line.split(" | ")[0].removeprefix("| ") for line in sections["Runtimes"].splitlines() if line.startswith("| ")]
    assert rows[2:] == [runtime.name for runtime in RUNTIMES]
    assert f"|  | {' | '.join(subjects())} |" in sections["Runtimes"]
    for way in ways(Vllm(None)):
        assert f"\n| {way.name} | " in sections["Speed and cache"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "[Perceptron]"], "--only names 'Perceptron', which is part of no architecture's name"),
        (["--tables", "[]"], "--tables is empty"),
        (
            ["--tables", "[speeds]"],
            "--tables is speeds, which it does not take; expected a list of routes, runtimes, gguf",
        ),
        (["--batch_sizes", "[]"], "--batch_sizes is empty"),
        (["--batch_sizes", "[0]"], "a batch size is 0"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--output", "no/such/folder/page.md"], "its folder does not exist or is read-only"),
    ],
)
def test_a_line_that_makes_no_sense(capsys, arguments, message):
    assert run_command("deployment", arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_other_files_are_not_written_over(tmp_path, capsys):
    (tmp_path / "notes.md").write_text("mine\n")
    assert run_command("deployment", ["--tables", "[routes]", "--only", "[Bert]", "--output", str(tmp_path / "notes.md")]) == 2
    assert (tmp_path / "notes.md").read_text() == "mine\n"


def test_other_outputs_end_with_an_error_once_the_page_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(routes, "routes_of", lambda row: {route.name: "FAILED: differs by 1" for route in routes.ROUTES})
    arguments = ["--tables", "[routes]", "--only", "[Llama]", "--output", str(tmp_path / "page.md")]
    assert run_command("deployment", arguments) == 2
    assert "FAILED" in (tmp_path / "page.md").read_text()
