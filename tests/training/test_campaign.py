"""A fault campaign: damaged files, odd commands and data, kills. ``CONTRIBUTING.md`` says how to hold a longer one."""

import csv
import gzip
import io
import json
import shutil

import pandas as pd
import pytest
import torch

from gates import load_pruned
from tests.training.campaign import LONGEST, TIMES, chances, files_of, held, in_a_process
from tests.training.faults import ANY, GONE, JSON, TEXT, damages
from tests.training.runs import write_config
from training.commands.table import run_command
from training.data.files import read_table

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
           "experiments/*/checksums.json", "experiments/*/weights.ckpt"]  # fmt: skip


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
