"""A campaign of faults: damaged files, odd commands and data, kills.

Its cases are seeded and cheap. At its end it prints how many there were of each class of fault and how they ended.
``CONTRIBUTING.md`` says how to hold a longer one.
"""

import csv
import gzip
import io
import json
import shutil
import zlib
from dataclasses import fields, is_dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from gates import load_pruned
from gates.surgery.masks import load_mask
from tests.training.campaign import CLEAR, SURVIVED, TIMES, TRACEBACK, Ended, Tally, chances, files_of, held, in_a_process
from tests.training.faults import ANY, GONE, JSON, TEXT, damages
from tests.training.runs import write_config
from tests.training.stops import LONGEST
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


@pytest.fixture(scope="module")
def tally(request):
    """Counts of all tests of this file, shown at their end."""
    counts = Tally()
    yield counts
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{counts.table()}")


@pytest.fixture(autouse=True)
def no_defect(tally, monkeypatch):
    """A test fails with all the defects that its cases have found."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    before = len(tally.defects)
    yield
    assert not tally.defects[before:], "\n".join(tally.defects[before:])


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
    """A copy of the run, beside its configuration."""
    return shutil.copytree(original / "run", tmp_path / "run")


def compared(run):
    return pd.read_csv(run / "comparison.csv").drop(columns=MEASURED)


def damaged_files(run, pattern, *name):
    """A file of a run that a pattern finds, in every way damaged: the name of the damage, while the file has it."""
    path = next(path for path in sorted(run.glob(pattern)) if path.is_file())
    content = path.read_bytes()
    for round_ in range(TIMES):
        for damage, change in damages(path.suffix).items():
            changed = None if change is None else change(content, chances(*name, pattern, damage, round_))
            if changed == content:
                continue
            path.unlink()
            if changed is not None:
                path.write_bytes(changed)
            yield path, damage
            path.write_bytes(content)


def names_of(path):
    """What a sentence about a damaged file has to say of it; of an experiment's, the folder, which is made anew as a whole."""
    return [path.parent.name if path.parent.parent.name == "experiments" else path.name]


def hold_damaged(tally, kind, folder, patterns, name, work, right, *, optional=()):
    """Do some work with each file that patterns find damaged in every way. ``right`` judges the result of work that ends well.

    Files in ``optional`` may be missing.
    """
    for pattern in patterns:
        for path, damage in damaged_files(folder, pattern, name):
            if damage != GONE or pattern not in optional:
                ended = held(work)
                outcome = ended.outcome(partial(right, ended, damage), names_of(path))
                tally.add(f"damaged files: {kind}", outcome, f"{pattern}, {damage}", ended)


# -- damaged files of a run, and the commands that read them ------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "files"), [(["--metric", "test_accuracy"], ["metrics.json", "comparison.csv"]), (["--verdict"], ["verdict.md"])]
)
def test_summaries_of_damaged_tables(more, files, run, tally):
    command = partial(run_command, "summary", [str(run), *more])
    expected = held(command).out
    hold_damaged(tally, "summary", run, files, "summary", command, lambda ended, _: ended.out == expected)


def plain(value):
    """What a report is drawn from, in a form that compares."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.name != "path"}
    if isinstance(value, pd.DataFrame | pd.Series):
        return value.to_csv()
    if isinstance(value, np.ndarray):
        return repr(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(part) for part in value]
    return repr(value)


def test_reports_of_damaged_tables(run, tally):
    """What the page is drawn from; that something is missing is said on it."""
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
    hold_damaged(tally, "report", run, files, "report", read, right, optional=("metrics.csv", "verdict.md"))


OF_RANKING = ["export/config.json", "export/tokenizer.json", "scores.csv", "checkpoints/final.ckpt"]
AS_IT_WAS = ["masks/learned.json", "metrics.json", "export/mask.json", "export/tokenizer_config.json"]
EXPORT, ANALYZE = ["export", "--format", "masked", "--output"], ["analyze", "--experiments", "ablate", "--run_dir"]


@pytest.mark.parametrize(
    ("kind", "line", "more", "files"),
    [
        ("export", EXPORT, ["--budget", "2"], OF_RANKING),
        ("export", EXPORT, [], AS_IT_WAS),
        ("analyze", ANALYZE, [], ["checkpoints/dense.ckpt", "config.yaml"]),
    ],
)
def test_outputs_of_damaged_runs(kind, line, more, files, run, tally, tmp_path):
    output = tmp_path / "output"

    def work():
        shutil.rmtree(output, ignore_errors=True)
        return run_command(line[0], [str(run), *line[1:], str(output), *more])

    def result():
        return files_of(output) if kind == "export" else (output / "ablate.csv").read_bytes()

    assert work() == 0
    expected = result()
    hold_damaged(tally, kind, run, files, kind, work, lambda *_: result() == expected)


RESUMED = ["finished.json", "metrics.csv", "config.yaml", "run_inputs.json", "checkpoints/final.ckpt", "checkpoints/dense.ckpt",
           "experiments/*/result.json", "experiments/*/predictions.npz", "experiments/*/gates_over_time.csv",
           "experiments/*/checksums.json", "experiments/scores-*/his.json", "experiments/*/weights.ckpt"]  # fmt: skip


@pytest.mark.parametrize("pattern", RESUMED)
def test_resuming_from_damaged_files(pattern, original, tmp_path, tally):
    """One case that does all the work is enough for a file."""
    expected, survived = compared(original / "run"), False
    for damage in ("bits", "digit", "a leaf", GONE) if TIMES == 1 else [GONE, *ANY, *TEXT, *JSON]:
        if survived and TIMES == 1:
            break
        folder = tmp_path / damage
        run = shutil.copytree(original / "run", folder / "run")
        path = next(path for path in sorted(run.glob(pattern)) if path.is_file())
        if damage not in damages(path.suffix):
            continue
        if pattern != "finished.json":
            (run / "finished.json").unlink()
        change, content = damages(path.suffix)[damage], path.read_bytes()
        path.unlink()
        if change is not None:
            path.write_bytes(change(content, chances(pattern, damage)))
        ended = held(lambda: run_command("fit", fit_arguments(folder, "--existing", "resume")), 2 * LONGEST)  # noqa: B023
        outcome = ended.outcome(lambda: compared(run).equals(expected), names_of(path))  # noqa: B023
        survived |= outcome == SURVIVED
        tally.add("damaged files: resume", outcome, f"{pattern}, {damage}", ended)
        shutil.rmtree(folder)


# -- damaged files that the library reads -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "mask.json", "checksums.json", "modeling_pruned.py"])
def test_pruned_models_with_damaged_files(name, run, tally):
    """A model that is loaded computes what the undamaged one does."""
    folder, ids = run / "export", torch.arange(8)[None]
    with torch.no_grad():
        expected, found = load_pruned(folder).eval()(input_ids=ids).logits, {}
        hold_damaged(
            tally, "load_pruned", folder, [name], "load_pruned", lambda: found.update(model=load_pruned(folder)),
            lambda *_: torch.equal(found["model"].eval()(input_ids=ids).logits, expected),
        )  # fmt: skip


def stated_mask(content, sites):
    """What JSON says of the heads that are kept, read on its own."""
    kept = {row["name"]: row["kept"] for row in json.loads(content)["sites"]}
    return [float(head in kept[site.name]) for site in sites for head in range(site.heads)]


def test_damaged_masks(run, tally):
    """A person may edit them, so that another digit is another mask; what is read is what stands there."""
    path = run / "masks" / "learned.json"
    content = path.read_bytes()
    sites = tuple(SimpleNamespace(**row) for row in json.loads(content)["sites"])
    assert load_mask(path, sites).tolist() == stated_mask(content, sites)
    for number in range(20 * TIMES):
        for damage, change in (ANY | TEXT | JSON).items():
            path.write_bytes(change(content, chances("mask", damage, number)))
            found = {}
            ended = held(lambda: found.update(mask=load_mask(path, sites)))  # noqa: B023

            def right():
                return found["mask"].tolist() == stated_mask(path.read_bytes(), sites)  # noqa: B023

            tally.add("damaged files: load_mask", ended.outcome(right, [str(path)]), f"{damage} {number}", ended)


def test_damaged_configurations(run, tally):
    """A person writes them, so that another digit is another value; what is read is what stands there."""
    for path, damage in damaged_files(run, "config.yaml", "configuration"):
        found = {}
        ended = held(lambda: found.update(content=read_yaml(path, "the configuration")))  # noqa: B023
        if ended.raised and "yaml." in ended.raised:  # which the callers make a sentence of
            ended = Ended(2, err=f"error: {path.name}")

        def right():
            return found["content"] == yaml.safe_load(path.read_text())  # noqa: B023

        tally.add("damaged files: configurations", ended.outcome(right), damage, ended)


# -- what a user types --------------------------------------------------------------------------------------------

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
NO_NUMBERS = ["\uff13", "x", "", "nan", "inf", "-inf", "1e999", "[", "{a", "3 4", "3,4", "\u0663", "\u00b2", "0x1g", "3\n4"]
ODD = ["", " ", "-", "--", "null", "[]", "{}", "\x00", "\udce9", "x" * 5000, "../../x", "*a", "&a [*a]",
       "!!python/name:os.system", "[" * 3000,
       "true", "1e-320", "-1", "0", "99999999999999999999", "~", "#", "\u202e", "%s", "$(ls)"]  # fmt: skip


def misspelt(name, draw):
    place = draw.randrange(3, len(name) - 1)
    kind = draw.randrange(3)
    if kind == 0:
        return name[:place] + name[place + 1 :]
    if kind == 1:
        return name[:place] + draw.choice("qxz") + name[place:]
    return name[: draw.randrange(max(3, len(name) - 4), len(name))]  # abbreviated


def is_number(text):
    return text.replace(".", "").isdigit()


def odd_lines(command, draw, number):
    """A line, and whether it is to be refused."""
    line = list(LINES[command])
    options = [place for place, part in enumerate(line) if part.startswith("--")]
    numbers = [place + 1 for place in options if place + 1 < len(line) and is_number(line[place + 1])]
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


def check(command, line):
    """What a command that trains asks of its options before it begins."""
    if command in ("fit", "compare"):
        Setup.of(line.options)
    if command == "compare":
        group_of(ComparisonOptions, line.options)


@pytest.mark.parametrize("command", LINES)
def test_odd_lines(command, tally, monkeypatch, tmp_path):
    """They are read and their values checked; no work is done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training.commands.table.work_on", lambda name, line: check(command, line))
    assert held(lambda: run_command(command, LINES[command])).code == 0
    for number in range((20 if command in ("fit", "compare") else 25) * TIMES):
        line, refused = odd_lines(command, chances("line", command, number), number)
        ended = held(lambda: run_command(command, line))  # noqa: B023
        tally.add("odd commands", ended.outcome(lambda: not refused), f"{command} {line!r:.400}", ended)  # noqa: B023


# -- data files ---------------------------------------------------------------------------------------------------

TEXTS = ["the fox", "NA", "null", "None", "nan", "1.0", "007", "1e5", "a 'word'", "\u05e9\u05dc", "\U0001f98a fox", "", " x ",
         'say "yes"', "true", "-", "#", "\u00a0", "a\\tb", "=1+1", "2024-01-01", "caf\u00e9", "\ufeffx", "0x10"]  # fmt: skip
READ = {
    ".tsv": lambda text: [line.split("\t") for line in text.split("\n")],
    ".csv": lambda text: list(csv.reader(io.StringIO(text, newline=""))),
    ".jsonl": lambda text: [list(json.loads(line).values()) for line in text.splitlines() if line.strip()],
}


def data_file(ending, draw):
    rows = [(draw.choice(TEXTS), str(draw.randrange(2))) for _ in range(12)]
    if ending == ".jsonl":
        return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    out = io.StringIO()
    if ending == ".csv":
        csv.writer(out, lineterminator="\n").writerows([("text", "label"), *rows])
        return out.getvalue()
    return "".join("\t".join(row) + "\n" for row in [("text", "label"), *rows])


def rows_of(ending, content):
    """The rows of a file as another reader finds them; None if that cannot."""
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        rows = READ[ending](text)
    except (ValueError, csv.Error, AttributeError):
        return None
    rows = [[str(cell) for cell in row] for row in rows if any(str(cell).strip() for cell in row)]
    return rows if ending == ".jsonl" else rows[1:]


def unpacked(content):
    """Of a packed file; nothing if it is damaged."""
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return b""


@pytest.mark.parametrize("ending", [".tsv", ".csv", ".jsonl", ".tsv.gz", ".parquet"])
def test_odd_data_files(ending, tally, tmp_path):
    """What is read is what another reader finds, row by row."""
    for number in range(40 * TIMES):
        draw = chances("data", ending, number)
        path, kind = tmp_path / f"{number}{ending}", ending.removesuffix(".gz")
        if ending == ".parquet":
            pd.DataFrame([(draw.choice(TEXTS), "1") for _ in range(12)], columns=["text", "label"]).to_parquet(path)
            content, whole = path.read_bytes(), None
            known = pd.read_parquet(path).to_numpy().tolist()
        else:
            content = whole = data_file(kind, draw).encode()
            content = gzip.compress(content) if ending.endswith("gz") else content
            known = rows_of(kind, whole)
        changes = {"nothing": lambda content, draw: content} | (ANY | TEXT if ending == kind != ".parquet" else ANY)
        if whole is None:  # whose bits nobody checks
            changes = {name: change for name, change in changes.items() if "bit" not in name and "lost" not in name}
        damage = list(changes)[number % len(changes)]
        path.write_bytes(changed := changes[damage](content, draw))
        found = {}
        ended = held(lambda: found.update(table=read_table(str(path))))  # noqa: B023
        if whole is not None:
            known = rows_of(kind, changed if ending == kind else unpacked(changed))

        def right():
            rows = [[str(cell) for cell in row] for row in found["table"].to_numpy().tolist()]  # noqa: B023
            rows = [row for row in rows if any(cell.strip() for cell in row)]
            padded = [[*row, *[""] * (len(rows[0]) - len(row))][: len(rows[0])] for row in known or []] if rows else []  # noqa: B023
            return rows == padded

        tally.add("odd data files", ended.outcome(right, [path.name]), f"{path.name}, {damage}", ended)


# -- processes that are killed -------------------------------------------------------------------------------------------


def test_runs_that_are_killed_while_they_write(original, tmp_path, tally):
    """Again and again, at chosen changes to their files; each time they go on, and end with the same tables."""
    expected, most = compared(original / "run"), 16 * TIMES
    kills, number = 0, 0
    while kills < most:
        run, more, chain = tmp_path / "run", [], []
        while True:
            kill_at = int(10 ** chances("fit", number).uniform(0, 2.3)) if kills + len(chain) < most else 0
            number += 1
            ended = in_a_process(tmp_path, ["fit", *fit_arguments(tmp_path, *more)], kill_at=kill_at)
            if ended is not None:
                break
            chain.append(kill_at)
            more = ["--existing", "resume"] if (run / "config.yaml").is_file() else []
        outcome = ended.outcome(lambda: compared(run).equals(expected))  # noqa: B023
        for _ in chain:
            tally.add("kill -9", outcome if outcome != CLEAR else TRACEBACK, f"fit at the changes {chain}", ended)
        kills += max(1, len(chain))
        shutil.rmtree(run)
