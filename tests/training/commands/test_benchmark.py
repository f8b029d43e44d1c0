import json
import shutil
from pathlib import Path

import pytest
import torch

from training.__main__ import main
from training.benchmark import record
from training.benchmark.parts import PARTS
from training.commands import benchmark_parser
from training.commands.benchmark import shown_command
from training.commands.documents import tables_of

ROOT = Path(__file__).parents[3]


def run(*arguments):
    return main(["benchmark", *map(str, arguments)])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A directory with the part that is measured quickest."""
    folder = tmp_path_factory.mktemp("benchmark") / "cpu"
    assert run("--quick", "--parts", "scores", "--device", "cpu", "--threads", 1, "--run_dir", folder) == 0
    return folder


@pytest.fixture
def copied(measured, tmp_path):
    shutil.copytree(measured, tmp_path / "cpu")
    return tmp_path / "cpu"


def test_the_file_says_what_was_measured_on_what(measured):
    content = json.loads((measured / "benchmark.json").read_text())
    assert content["versions"]["torch"] == torch.__version__
    assert content["machine"]["hardware"].endswith("1 thread")
    assert content["setting"] | {"shape": "tiny", "device": "cpu", "threads": 1, "sizes": ["2 x 16"]} == content["setting"]
    assert content["command"].endswith("--run_dir cpu")
    assert str(measured.parent) not in (measured / "benchmark.json").read_text()
    row, of_decoder = content["parts"]["scores"]
    assert (row["model"], of_decoder["model"]) == ("encoder", "decoder")
    assert set(row) <= PARTS["scores"].columns.keys()
    assert row["his_ms"]["low"] <= row["his_ms"]["median"] <= row["his_ms"]["high"]
    assert [path.name for path in measured.iterdir()] == ["benchmark.json"]


def test_the_same_command_goes_on(copied, capsys):
    """The part that is there stays to the digit, and another joins it."""
    before = json.loads((copied / "benchmark.json").read_text())["parts"]["scores"]
    common = ["--quick", "--device", "cpu", "--threads", 1, "--run_dir", copied]
    assert run(*common, "--parts", "scores") == 0
    assert PARTS["scores"].title in capsys.readouterr().out
    assert json.loads((copied / "benchmark.json").read_text())["parts"] == {"scores": before}
    assert run(*common, "--sizes", "1x8") == 2
    assert "measured with sizes ['2 x 16'], and now it is ['1 x 8']" in capsys.readouterr().err


def test_parts_of_other_code_do_not_stand_beside_each_other(copied, capsys, monkeypatch):
    monkeypatch.setattr(record, "code", lambda: "0123456789abcdef")
    assert run("--quick", "--device", "cpu", "--threads", 1, "--run_dir", copied, "--parts", "scores") == 2
    error = capsys.readouterr().err
    assert "and now it is '0123456789abcdef'; give another --run_dir" in error


def test_code_is_known_by_the_library_and_what_measures_it(tmp_path, monkeypatch):
    before = record.code()
    for place in ("gates", "training/benchmark"):
        shutil.copytree(ROOT / place, tmp_path / place)
    monkeypatch.setattr(record.gates, "__file__", str(tmp_path / "gates" / "__init__.py"))
    monkeypatch.setattr(record, "__file__", str(tmp_path / "training" / "benchmark" / "record.py"))
    assert record.code() == before
    for file in ("gates/budget.py", "training/benchmark/size.py"):
        (tmp_path / file).write_text((tmp_path / file).read_text() + "\n")
        assert record.code() != before
        before = record.code()


def test_a_directory_is_shown_as_markdown(copied, capsys):
    """A quick look is told as one, and no goal is judged by it."""
    assert run(copied, "--parts", "scores,goals") == 0
    out = capsys.readouterr().out
    assert "| model | batch x tokens | forward and backward, ms |" in out
    assert "| encoder | 2 x 16 |" in out
    assert "a quick look, no measurement" in out
    assert "| time of exact HIS" not in out
    file = copied / "benchmark.json"
    file.write_text(file.read_text().replace('"quick": true', '"quick": false'))
    assert run(copied, "--parts", "scores,goals") == 0
    out = capsys.readouterr().out
    assert "| time of exact HIS over a plain forward and backward pass | at most 0.75 |" in out


def test_a_document_gets_its_tables(copied, capsys):
    document = copied.parent / "page.md"
    block = "<!-- python -m training benchmark cpu --parts scores -->\nold\n<!-- end -->"
    document.write_text(f"# Costs\n\n{block}\n\nText in between.\n\n{block.replace('scores', 'goals')}\n")
    assert run("--update", document) == 0
    first = document.read_text()
    assert "old" not in first
    assert "Text in between." in first
    assert first.count("| 2 x 16 |") == 2  # of the encoder and the decoder
    assert run("--update", document) == 0
    assert document.read_text() == first


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("no table", "has no table to make anew"),
        ("<!-- python -m training benchmark none --parts step -->\n<!-- end -->", "has no benchmark.json"),
        ("<!-- python -m training benchmark cpu --parts speed -->\n<!-- end -->", "--parts has 'speed'; expected some of step"),
        ("<!-- python -m training benchmark cpu --quick -->\n<!-- end -->", "--quick is given, but a table in a document"),
        ("<!-- python -m training benchmark 'cpu -->\n<!-- end -->", "which cannot be read"),
    ],
)
def test_documents_with_mistakes_stay_as_they_are(document, said, copied, capsys):
    page = copied.parent / "page.md"
    page.write_text(document)
    assert run("--update", page) == 2
    assert said in capsys.readouterr().err
    assert page.read_text() == document


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "--run_dir is missing"),
        (["--run_dir", "{new}", "--parts", "step,speed"], "--parts has 'speed'; expected some of step, precision"),
        (["--run_dir", "{new}", "--parts", "goals"], "--parts is 'goals', which are of parts that are measured"),
        (["--run_dir", "{new}", "--sizes", "8"], "--sizes has '8'; expected a batch size and a length"),
        (["--run_dir", "{new}", "--sizes", "8x513"], "the model has 512 positions"),
        (["--run_dir", "{new}", "--threads", "0"], "--threads is 0; expected at least 1"),
        (["--run_dir", "{new}", "--device", "tpu"], "--device is tpu"),
        (["--run_dir", "{new}", "--model", "{new}"], "is no folder with a config.json"),
        (["--run_dir", "{notes}"], "is not empty and holds no benchmark"),
        (["{notes}"], "has no benchmark.json"),
        (["{measured}", "--run_dir", "{new}"], "--run_dir is given, but a directory to be shown does not use it"),
        (["{measured}", "--update", "a.md"], "--update does not use it"),
        (["--update", "{notes}/a.txt", "--quick"], "--quick is given, but --update does not use it"),
        (["--update", "{notes}"], "cannot read"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(line, said, measured, tmp_path, capsys):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("notes of a year")
    places = {"new": tmp_path / "new", "notes": notes, "measured": measured}
    assert run(*(argument.format(**places) for argument in line)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert [path.name for path in notes.iterdir()] == ["a.txt"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path, capsys):
    assert run("--device", "cuda", "--run_dir", tmp_path / "new") == 2
    assert "PyTorch sees no GPU here" in capsys.readouterr().err


def test_a_gpu_has_times_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run("--device", "cuda", "--processor_time", "--run_dir", tmp_path / "new") == 2
    assert "a GPU has times of its own" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"parts": {}}'])
def test_damaged_files_are_told(text, copied, capsys):
    (copied / "benchmark.json").write_text(text)
    assert run(copied) == 2
    assert "benchmark.json" in capsys.readouterr().err


def test_rows_of_a_part_that_is_none_are_told(copied, capsys):
    content = json.loads((copied / "benchmark.json").read_text())
    (copied / "benchmark.json").write_text(json.dumps({**content, "parts": {"speed": []}}))
    assert run(copied) == 2
    assert "is not as this command writes it" in capsys.readouterr().err


def test_commands_are_written_without_folders_of_this_machine():
    given = ["--model", "/home/me/bert", "--quick", "--run_dir=/home/me/runs/cpu"]
    assert shown_command(given) == "python -m training benchmark --model bert --quick --run_dir=cpu"


def test_help_names_every_part():
    assert (*PARTS, "goals") == benchmark_parser.PARTS


@pytest.mark.skipif(not (ROOT / "docs" / "benchmarks.md").is_file(), reason="there is no page")
def test_the_page_is_that_of_the_files(tmp_path):
    page = ROOT / "docs" / "benchmarks.md"
    assert tables_of("benchmark").search(page.read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    copy = Path(shutil.copy(page, tmp_path / "docs"))
    assert run("--update", copy) == 0
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
