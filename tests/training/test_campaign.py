"""A fault campaign: damaged files, odd commands and data, kills. ``CONTRIBUTING.md`` says how to hold a longer one."""

import csv
import gzip
import io
import json
import shutil
from dataclasses import fields, is_dataclass

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from gates import load_pruned
from tests.training.campaign import LONGEST, TIMES, chances, files_of, held, in_a_process
from tests.training.faults import ANY, GONE, JSON, TEXT, damages
from tests.training.runs import write_config
from training.commands.report import damaged_runs_refused
from training.commands.table import run_command
from training.config import ComparisonOptions, Setup, group_of
from training.config.yaml_text import read_yaml
from training.data.files import read_table
from training.report.reading import read_contents

pytestmark = pytest.mark.nightly
MEASURED = ["seconds", "peak_memory_mb"]
SMALL = ["--data.train_rows", "96", "--data.select_rows", "32", "--data.test_rows", "32", "--data.score_rows", "32"]
COMPARED = [*SMALL, "--compare", "full", "--retrained", "[his]", "--curve", "[0.5]", "--save_every", "6"]


@pytest.fixture
def judge(monkeypatch):
    """A function that judges a case. The test fails at its end with all defects."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    defects = []

    def judge(case, ended, right, named=()):
        if defect := ended.defect(right, named):
            defects.append(f"{case}: {defect}")

    yield judge
    assert not defects, "\n".join(defects)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with a finished run and its configuration."""
    folder = tmp_path_factory.mktemp("campaign")
    ended = held(lambda: run_command("fit", fit_arguments(folder)), 300)
    assert ended.code == 0, ended
    return folder


def fit_arguments(folder, *more):
    return ["--config", write_config(folder), *COMPARED, "--run_dir", str(folder / "run"), *more]


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original / "run", tmp_path / "run")


def compared(run):
    return pd.read_csv(run / "comparison.csv").drop(columns=MEASURED)


def first_file(run, pattern):
    return next(path for path in sorted(run.glob(pattern)) if path.is_file())


def hold_damaged(judge, folder, patterns, work, right, *, optional=()):
    """Do some work with each file that patterns find, damaged in every way.

    Args:
        right: A function of the end and the damage that judges the result of work that ends well.
        optional: The patterns of files that may be missing.
    """
    for pattern in patterns:
        path = first_file(folder, pattern)
        content = path.read_bytes()
        for number in range(TIMES):
            for damage, change in damages(path.suffix).items():
                changed = None if change is None else change(content, chances(pattern, damage, number))
                if changed == content or (damage == GONE and pattern in optional):
                    continue
                path.unlink(missing_ok=True)
                if changed is not None:
                    path.write_bytes(changed)
                ended = held(work)
                judge(f"{pattern}, {damage}", ended, lambda: right(ended, damage), [path.name])  # noqa: B023
        path.write_bytes(content)


# -- damaged files of a run, and the commands that read them ------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "files"), [(["--metric", "test_accuracy"], ["metrics.json", "comparison.csv"]), (["--verdict"], ["verdict.md"])]
)
def test_summaries_of_damaged_tables(more, files, run, judge):
    def work():
        return run_command("summary", [str(run), *more])

    expected = held(work).out
    hold_damaged(judge, run, files, work, lambda ended, _: ended.out == expected)


def plain(value):
    """Return what a report is drawn from in a form that compares."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.name != "path"}
    if isinstance(value, pd.DataFrame | pd.Series):
        return value.to_csv()
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | np.ndarray):
        return [plain(part) for part in value]
    return repr(value)


def test_reports_of_damaged_tables(run, judge):
    """A missing optional file is named on the page."""
    files = ["metrics.json", "masks.json", "sites.json", "agreement.csv", "comparison.csv", "scores.csv", "summary.csv",
             "statistics.csv", "curve.csv", "gates_over_time.csv", "metrics.csv", "verdict.md", "config.yaml"]  # fmt: skip
    found = {}

    def read():
        with damaged_runs_refused([str(run)]):
            found["contents"] = read_contents(run)

    def right(ended, damage):
        return plain(found["contents"]) == expected or (damage == GONE and found["contents"].missing)

    read()
    expected = plain(found["contents"])
    hold_damaged(judge, run, files, read, right, optional=("metrics.csv", "verdict.md"))


OF_RANKING = ["export/config.json", "export/tokenizer.json", "scores.csv", "checkpoints/final.ckpt"]
AS_IT_WAS = ["masks/learned.json", "metrics.json", "export/mask.json", "export/tokenizer_config.json"]
EXPORT, ANALYZE = ["export", "--format", "masked", "--output"], ["analyze", "--experiments", "ablate", "--run_dir"]


@pytest.mark.parametrize(
    ("line", "more", "files"),
    [
        (EXPORT, ["--budget", "2"], OF_RANKING),
        (EXPORT, [], AS_IT_WAS),
        (ANALYZE, [], ["checkpoints/dense.ckpt", "config.yaml"]),
    ],
)
def test_outputs_of_damaged_runs(line, more, files, run, judge, tmp_path):
    output = tmp_path / "output"

    def work():
        shutil.rmtree(output, ignore_errors=True)
        return run_command(line[0], [str(run), *line[1:], str(output), *more])

    def result():
        return files_of(output) if line is EXPORT else (output / "ablate.csv").read_bytes()

    assert work() == 0
    expected = result()
    hold_damaged(judge, run, files, work, lambda *_: result() == expected)


RESUMED = ["finished.json", "metrics.csv", "config.yaml", "run_inputs.json", "checkpoints/final.ckpt", "checkpoints/dense.ckpt",
           "experiments/*/result.json", "experiments/*/predictions.npz", "experiments/*/gates_over_time.csv",
           "experiments/*/checksums.json", "experiments/scores-*/his.json", "experiments/*/weights.ckpt"]  # fmt: skip


@pytest.mark.parametrize("pattern", RESUMED)
def test_resuming_from_damaged_files(pattern, original, tmp_path, judge):
    """One case that does all the work is enough for a file. An experiment is made anew as a whole, so its folder is named."""
    expected = compared(original / "run")
    for damage in ("bits", "digit", "a leaf", GONE) if TIMES == 1 else [GONE, *ANY, *TEXT, *JSON]:
        run = shutil.copytree(original / "run", tmp_path / damage / "run")
        path = first_file(run, pattern)
        if damage not in damages(path.suffix):
            continue
        if pattern != "finished.json":
            (run / "finished.json").unlink()
        change, content = damages(path.suffix)[damage], path.read_bytes()
        path.unlink()
        if change is not None:
            path.write_bytes(change(content, chances(pattern, damage)))
        ended = held(lambda: run_command("fit", fit_arguments(run.parent, "--existing", "resume")), 2 * LONGEST)  # noqa: B023
        named = path.parent.name if path.parent.parent.name == "experiments" else path.name
        judge(f"{pattern}, {damage}", ended, lambda: compared(run).equals(expected), [named])  # noqa: B023
        shutil.rmtree(run)
        if ended.code == 0 and TIMES == 1:
            break


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "mask.json", "checksums.json", "modeling_pruned.py"])
def test_pruned_models_with_damaged_files(name, run, judge):
    """A model that is loaded computes what the undamaged one does."""
    folder, ids, found = run / "export", torch.arange(8)[None], {}
    with torch.no_grad():
        expected = load_pruned(folder).eval()(input_ids=ids).logits
        hold_damaged(
            judge, folder, [name], lambda: found.update(model=load_pruned(folder)),
            lambda *_: torch.equal(found["model"].eval()(input_ids=ids).logits, expected),
        )  # fmt: skip


def test_damaged_configurations(run, judge):
    """A person writes them, so another digit is another value."""
    path, found = run / "config.yaml", {}

    def read():
        try:
            found["content"] = read_yaml(path, "the configuration")
        except yaml.YAMLError as error:  # the callers make a sentence of it
            raise SystemExit(0) from error

    def right(*_):
        return "content" not in found or found.pop("content") == yaml.safe_load(path.read_text())

    hold_damaged(judge, run, ["config.yaml"], read, right)


# -- odd command lines --------------------------------------------------------------------------------------------

LINES = {
    "fit": ["--config", "default.yaml", "--model.budget", "8", "--seed", "3", "--data.batch_size", "16", "--save_every", "50",
            "--model.learning_rate", "0.001", "--trainer.log_every_n_steps", "5"],
    "compare": ["--config", "default.yaml", "--methods", "learned,his", "--budgets", "8", "--seeds", "0,1", "--seed", "3"],
    "report": ["runs/a", "--output", "out.html"],
    "summary": ["runs/a", "--metric", "test_accuracy", "--stage", "post hoc"],
    "analyze": ["runs/a", "--experiments", "ablate", "--run_dir", "out"],
    "sweep": ["sweep.yaml", "--trials", "4", "--jobs", "2", "--seed", "1"],
    "export": ["runs/a", "--format", "masked", "--output", "out", "--length", "64"],
    "convert": ["old", "--output", "out"],
    "translate": ["a", "b", "--source", "x.txt", "--beams", "4", "--batch_size", "8", "--length_penalty", "1.0"],
}  # fmt: skip
NO_NUMBERS = ["\uff13", "x", "", "nan", "inf", "-inf", "1e999", "[", "{a", "3 4", "3,4", "x3", "\u00b2", "0x1g", "3\n4"]
ODD = ["", " ", "-", "--", "null", "[]", "{}", "\x00", "\udce9", "x" * 5000, "../../x", "*a", "&a [*a]",
       "!!python/name:os.system", "[" * 3000,
       "true", "1e-320", "-1", "0", "99999999999999999999", "~", "#", "\u202e", "%s", "$(ls)"]  # fmt: skip


def misspelt(name, draw):
    place = draw.randrange(3, len(name) - 1)
    return draw.choice(
        [
            name[:place] + name[place + 1 :],
            name[:place] + draw.choice("qxz") + name[place:],
            name[: draw.randrange(max(3, len(name) - 4), len(name))],
        ]
    )


def odd_line(command, draw, number):
    """Return a line, and whether it has to be refused."""
    line = list(LINES[command])
    options = [place for place, part in enumerate(line) if part.startswith("--")]
    numbers = [place + 1 for place in options if line[place + 1 : place + 2] and line[place + 1].replace(".", "").isdigit()]
    kind = number % 5
    if kind == 0:
        place = draw.choice(options)
        line[place] = misspelt(line[place], draw)
        return line, line[place] not in LINES[command]
    if kind == 1 and numbers:
        line[draw.choice(numbers)] = draw.choice(NO_NUMBERS)
        return line, True
    if kind == 2:
        line[draw.randrange(len(line))] = draw.choice(ODD)
    elif kind == 3:
        del line[draw.randrange(len(line))]
    elif draw.random() < 0.5:
        draw.shuffle(line)
    else:
        line.insert(draw.randrange(len(line)), draw.choice(ODD))
    return line, False


@pytest.mark.parametrize("command", LINES)
def test_odd_lines(command, judge, monkeypatch, tmp_path):
    """Lines are read and their values checked; no work is done."""

    def check(name, line):
        if command in ("fit", "compare"):
            Setup.of(line.options)
        if command == "compare":
            group_of(ComparisonOptions, line.options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training.commands.table.work_on", check)
    assert held(lambda: run_command(command, LINES[command])).code == 0
    for number in range(20 * TIMES):
        line, refused = odd_line(command, chances("line", command, number), number)
        judge(f"{line!r:.400}", held(lambda: run_command(command, line)), lambda: not refused)  # noqa: B023


# -- data files ---------------------------------------------------------------------------------------------------

TEXTS = ["the fox", "NA", "null", "None", "nan", "1.0", "007", "1e5", "a 'word'", "\u05e9\u05dc", "\U0001f98a fox", "", " x ",
         'say "yes"', "true", "-", "#", "\u00a0", "a\\tb", "=1+1", "2024-01-01", "caf\u00e9", "\ufeffx", "0x10"]  # fmt: skip
READ = {
    ".tsv": lambda text: [line.split("\t") for line in text.split("\n")][1:],
    ".csv": lambda text: list(csv.reader(io.StringIO(text, newline="")))[1:],
    ".jsonl": lambda text: [list(json.loads(line).values()) for line in text.splitlines() if line.strip()],
}


def data_file(ending, draw):
    rows = [(draw.choice(TEXTS), str(draw.randrange(2))) for _ in range(12)]
    if ending == ".jsonl":
        return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows).encode()
    out = io.StringIO()
    if ending == ".csv":
        csv.writer(out, lineterminator="\n").writerows([("text", "label"), *rows])
    else:
        out.write("".join("\t".join(row) + "\n" for row in [("text", "label"), *rows]))
    return out.getvalue().encode()


def cells(rows):
    """Return rows as texts, without empty rows."""
    rows = [[str(cell) for cell in row] for row in rows]
    return [row for row in rows if any(cell.strip() for cell in row)]


def rows_of(ending, content):
    """Return the rows of a file as another reader finds them; none if it cannot read the file."""
    try:
        if ending.endswith(".gz"):
            ending, content = ending.removesuffix(".gz"), gzip.decompress(content)
        return cells(READ[ending](content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")))
    except Exception:
        return []


@pytest.mark.parametrize("ending", [".tsv", ".csv", ".jsonl", ".tsv.gz"])
def test_odd_data_files(ending, judge, tmp_path):
    """What is read is what another reader finds, row by row."""
    packed = ending.endswith(".gz")
    changes = {"nothing": lambda content, draw: content} | (ANY if packed else ANY | TEXT)
    if ending == ".jsonl":  # a flipped bit may make another name of a column, which other readers do not mind
        changes = {name: change for name, change in changes.items() if "bit" not in name}
    for number in range(40 * TIMES):
        draw, path, found = chances("data", ending, number), tmp_path / f"{number}{ending}", {}
        content = data_file(ending.removesuffix(".gz"), draw)
        damage = list(changes)[number % len(changes)]
        changed = changes[damage](gzip.compress(content) if packed else content, draw)
        path.write_bytes(changed)
        ended = held(lambda: found.update(table=read_table(str(path))))  # noqa: B023

        def right():
            rows = cells(found["table"].to_numpy().tolist())  # noqa: B023
            expected = rows_of(ending, changed) if rows else []  # noqa: B023
            return rows == [[*row, *[""] * (len(rows[0]) - len(row))][: len(rows[0])] for row in expected]

        judge(f"{path.name}, {damage}", ended, right, [path.name])


# -- processes that are killed ------------------------------------------------------------------------------------


def test_runs_that_are_killed_while_they_write(original, tmp_path):
    """Runs are killed at drawn changes to their files and resumed, until they end with the same tables."""
    expected, kills, number = compared(original / "run"), 0, 0
    while kills < 16 * TIMES:
        run, more, chain, ended = tmp_path / "run", [], [], None
        while ended is None:
            kill_at = int(10 ** chances("fit", number).uniform(0, 2.3)) if kills + len(chain) < 16 * TIMES else 0
            number += 1
            ended = in_a_process(tmp_path, ["fit", *fit_arguments(tmp_path, *more)], kill_at=kill_at)
            chain += [kill_at] if ended is None else []
            more = ["--existing", "resume"] if (run / "config.yaml").is_file() else []
        assert ended.code == 0, (chain, ended)
        pd.testing.assert_frame_equal(compared(run), expected)
        kills += max(1, len(chain))
        shutil.rmtree(run)
