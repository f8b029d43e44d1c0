"""The command, from its arguments to the files it leaves."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
import yaml

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.surgery.masks import load_mask
from tests.training import stops
from tests.training.data.test_images import save_vit, write_images
from tests.training.runs import last_checkpoint, make_data, make_pruner, make_setup, run_fit, write_config
from tests.training.stops import Moment
from training.cli.command_line import build_parser
from training.comparison.methods import RIVALS
from training.fit import main
from training.pruner.callbacks import Predictions
from training.pruner.module import evaluate
from training.report.captions import outcome
from training.setup import make_trainer

CONFIGS = Path(__file__).parents[2] / "configs"
SHAPE = {
    "config.yaml", "metrics.json", "metrics.csv", "comparison.csv", "summary.csv", "statistics.csv", "agreement.csv",
    "scores.csv", "gates_over_time.csv", "masks.json", "sites.json", "verdict.md", "curve.csv", "masks", "plots", "checkpoints",
    "experiments", "export",
}  # fmt: skip
METHODS = ("learned", *RIVALS)
MEASURED = ["seconds", "peak_memory_mb"]
STEP = "training.pruner.module:HeadPruner.optimizer_step"

REPRODUCE = """
import json, sys, torch, transformers
sys.modules["gates"] = sys.modules["training"] = None
from transformers import AutoModelForSequenceClassification, AutoTokenizer
rows = json.load(open(sys.argv[2]))
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
with torch.no_grad():
    predicted = model(**batch).logits.argmax(-1).tolist()
right = [model.config.id2label[p] == row["label"] for p, row in zip(predicted, rows)]
print(sum(right) / len(right))
"""


def test_the_run_directory_has_the_documented_shape(full_run):
    run, _ = full_run
    assert {path.name for path in run.iterdir()} >= SHAPE | {"wandb"}
    assert {path.stem for path in (run / "masks").iterdir()} == {"dense", *METHODS}
    assert {path.stem for path in (run / "plots").iterdir()} >= {"mask", "gates", "quality_by_budget", "agreement"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"dense.ckpt", "final.ckpt"}
    assert not [path for path in run.rglob("*") if "partial" in path.name or path.name.startswith(".")]
    assert pd.read_csv(run / "comparison.csv").columns[:5].tolist() == ["seed", "method", "stage", "budget", "heads"]
    counted = ["forward_examples", "backward_examples", "selection_forward_examples", "selection_backward_examples"]
    last = ["steps", *MEASURED, *counted, "closed_by_gates", "experiment"]
    assert pd.read_csv(run / "comparison.csv").columns[-9:].tolist() == last


def test_the_comparison_has_every_method_at_the_same_budget_and_cost(full_run):
    """And what is told of the run is what the table has."""
    table, metrics = pd.read_csv(full_run[0] / "comparison.csv"), json.loads((full_run[0] / "metrics.json").read_text())
    for stage in ("post hoc", "retrained"):
        rows = table[table["stage"] == stage].set_index("method")
        assert rows["heads"].to_dict() == {"dense": 8} | dict.fromkeys(METHODS, 3)
    assert set(table[table["stage"] == "retrained"]["steps"]) == {32}
    post_hoc = table[table["stage"] == "post hoc"].set_index("method")["steps"]
    assert post_hoc["learned"] == 16  # in which the gates were learned
    assert set(post_hoc.drop("learned")) == {0}
    assert table["test_accuracy"].between(0, 1).all()
    own, learned = metrics["run"], table[(table["method"] == "learned") & (table["stage"] == "retrained")].iloc[0]
    assert own["method"] == "learned"
    assert own["result"]["test_accuracy"] == pytest.approx(learned["test_accuracy"], abs=1e-9)
    assert own["dense"]["post hoc"]["test_loss"] == table.iloc[0]["test_loss"]
    lost = learned["test_accuracy"] - own["dense"]["retrained"]["test_accuracy"]  # of a dense model that trained as long
    assert own["against_dense"]["difference"] == pytest.approx(lost)
    assert "; against the retrained dense model " in outcome(own, "accuracy")["quality"]
    assert own["kept"] == 3 == sum(own["by_site"].values())
    assert (metrics["budgets"], metrics["seeds"], metrics["methods"]) == ([3], [0], ["dense", *METHODS])
    assert metrics["heads"] == metrics["gates"] == 8
    assert metrics["versions"]["torch"] == torch.__version__


def test_equal_masks_have_equal_results(full_run):
    """Rows agree with the mask files: methods with the same mask have the same post hoc and retrained numbers."""
    run, _ = full_run
    sites = find_attention(make_pruner().backbone)
    masks = {method: tuple(load_mask(run / "masks" / f"{method}.json", sites).tolist()) for method in METHODS}
    table = pd.read_csv(run / "comparison.csv")
    for stage in ("post hoc", "retrained"):
        rows = table[table["stage"] == stage].set_index("method")["test_loss"]
        rivals = [method for method in METHODS if method != "learned" or stage == "post hoc"]
        for first in rivals:
            for second in rivals:
                if masks[first] == masks[second]:
                    assert rows[first] == pytest.approx(rows[second], abs=1e-6)


def test_scores_and_rankings_agree_with_the_masks(full_run):
    run, _ = full_run
    scores = pd.read_csv(run / "scores.csv")
    assert len(scores) == 8
    assert scores["gate"].tolist() == list(range(8))
    masks = {entry["method"]: np.array(entry["mask"]) == 1 for entry in json.loads((run / "masks.json").read_text())}
    assert set(masks) == {"dense", *METHODS}
    for method in METHODS:
        kept, ranking = masks[method], scores[f"ranking:{method}"]
        assert kept.sum() == 3
        assert ranking[kept].min() >= ranking[~kept].max()
    assert (scores["his"] > 0).all()
    assert scores["entropy"].between(0, 1).all()
    final = torch.load(run / "checkpoints" / "final.ckpt", weights_only=True)["state_dict"]
    assert scores["ranking:learned"].tolist() == pytest.approx(final["gates.learned.log_alpha"].tolist())


@pytest.mark.integration
def test_the_export_reproduces_the_logged_test_accuracy_without_this_project(full_run, tmp_path):
    run, _ = full_run
    from training.data.synthetic import generate

    rows = [{"text": row["text"], "label": row["label"]} for row in generate(96, seed=2)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command = [sys.executable, "-c", REPRODUCE, str(run / "export"), str(tmp_path / "rows.json")]
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    logged = json.loads((run / "metrics.json").read_text())["run"]["result"]["test_accuracy"]
    assert float(done.stdout) == pytest.approx(logged, abs=1e-6)


def wandb_records(log: bytes) -> list[bytes]:
    """W&B's transaction log: LevelDB's log format (blocks of 32 KiB, headers of checksum, length and type) after 7 bytes."""
    records, parts, at = [], b"", 7
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        parts += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(parts)
            parts = b""
    return records


def test_the_offline_wandb_run_holds_metrics_table_and_pictures(full_run):
    """Read back from W&B's own transaction log."""
    run, _ = full_run
    from wandb.proto import wandb_internal_pb2

    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    keys, config, summary, artifacts, notes = set(), set(), set(), set(), ""
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            keys |= {item.key or item.nested_key[0] for item in record.history.item}
        elif kind == "run":
            config |= {item.key for item in record.run.config.update}
            notes = record.run.notes or notes
        elif kind == "config":
            config |= {item.key for item in record.config.update}
        elif kind == "summary":
            summary |= {item.key or "/".join(item.nested_key) for item in record.summary.update}
        elif kind == "artifact":
            artifacts.add(record.artifact.type)
    assert keys >= {
        "train/task_loss",
        "heads/open",
        "comparison",
        *(f"plots/{name}" for name in ("mask", "gates", "agreement")),
        "epoch",
        "train/phase",
    }
    assert config >= {"model", "data", "code"}
    assert notes == (run / "verdict.md").read_text()
    assert summary >= {
        "test/accuracy/learned", "test/accuracy/dense", "test/accuracy/drop", "test/accuracy/majority_class",
        "post_hoc/test/accuracy/his", "select/accuracy", "heads/kept", "heads/all", "heads/kept/encoder.0", "cost/seconds",
    }  # fmt: skip
    assert artifacts == {"model", "masks", "results", "run_table"}  # the last are W&B's own, of Tables


@pytest.mark.integration
def test_killed_and_resumed_equals_unbroken(tmp_path, full_run):
    """It also stays one run in W&B."""
    given = ["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run"), "--wandb.mode", "offline"]
    assert stops.fit(given, tmp_path, Moment(STEP, 20))[0] == -signal.SIGKILL
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert main([*given, "--existing", "resume"]) == 0
    identifiers = {path.name.split("-")[-1] for path in (tmp_path / "run" / "wandb").glob("offline-run-*")}
    assert identifiers == {(tmp_path / "run" / "wandb" / "run_id.txt").read_text().strip()}
    assert_same_weights(tmp_path / "run", full_run[0])


def assert_same_weights(run, other, name="final"):
    ours, theirs = (torch.load(one / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"] for one in (run, other))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items() if torch.is_tensor(tensor))


def count_trainings(monkeypatch):
    """What every training starts from, in a list that grows."""
    started, fitted = [], pl.Trainer.fit

    def fit(trainer, *args, ckpt_path=None, **more):
        started.append(ckpt_path)
        return fitted(trainer, *args, ckpt_path=ckpt_path, **more)

    monkeypatch.setattr(pl.Trainer, "fit", fit)
    return started


def assert_same_tables(run, other):
    for name in ("comparison.csv", "curve.csv", "scores.csv", "agreement.csv", "gates_over_time.csv", "summary.csv"):
        ours, theirs = (pd.read_csv(folder / name) for folder in (run, other))
        ours, theirs = (table.drop(columns=MEASURED, errors="ignore") for table in (ours, theirs))
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True, obj=name)
    assert (run / "masks.json").read_text() == (other / "masks.json").read_text()


@pytest.mark.integration
def test_a_finished_run_that_is_resumed_trains_nothing(tmp_path, full_run, monkeypatch):
    """Lost tables are written again, the log stays, and with other options the run is not continued."""
    run = shutil.copytree(full_run[0], tmp_path / "run")
    logged = (run / "metrics.csv").read_text()
    arguments = ["--config", str(run / "config.yaml"), "--run_dir", str(run), "--wandb.mode", "disabled"]
    arguments += ["--existing", "resume"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    for lost in ("comparison.csv", "masks.json", "scores.csv", "gates_over_time.csv", "metrics.json", "verdict.md"):
        (run / lost).unlink()
    shutil.rmtree(run / "export")
    started = count_trainings(monkeypatch)
    assert main(arguments) == 0
    assert_same_tables(run, full_run[0])
    json.loads((run / "metrics.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    states = [(folder / "export" / "model.safetensors").read_bytes() for folder in (run, full_run[0])]
    assert states[0] == states[1]
    assert main([*arguments, "--data.train_rows", "128"]) == 2
    assert main([*arguments, "--compare", "none"]) == 2  # the longer comparison would be lost
    assert_same_tables(run, full_run[0])
    assert main([*arguments, "--curve", "[]", "--retrained", "[his]"]) == 0
    assert "curve.csv" not in {path.name for path in run.iterdir()}
    rows = pd.read_csv(run / "comparison.csv").query("stage == 'retrained'")
    assert set(rows["method"]) == {"learned", "his"}
    assert started == []
    assert (run / "metrics.csv").read_text() == logged


@pytest.mark.integration
def test_limits_of_batches_hold_from_one_end_of_a_run_to_the_other(tmp_path, capsys):
    given = ["--config", write_config(tmp_path), "--compare", "none", "--trainer.log_every_n_steps", "1"]
    limits = ["--trainer.limit_train_batches", "6", "--trainer.limit_val_batches", "2", "--trainer.limit_test_batches", "0.5"]
    own = ["--data.eval_batch_size", "16", "--save_every", "100", "--run_dir", str(tmp_path / "run")]
    assert main([*given, *limits, *own, "--trainer.val_check_interval", "7"]) == 2
    assert "--trainer.val_check_interval is 7, more than the 6 batches of the run" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*given, *limits, *own, "--trainer.val_check_interval", "3"]) == 0
    log = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert log["step"].max() == 5
    assert log["select/loss"].notna().sum() == 2
    row = pd.read_csv(tmp_path / "run" / "comparison.csv").iloc[-1]
    for split, examples in (("select", 32), ("test", 48)):
        right = row[f"{split}_accuracy"] * examples
        assert right == pytest.approx(round(right), abs=1e-4), split


@pytest.mark.integration
def test_another_budget_from_the_dense_checkpoint_of_a_run(full_run, tmp_path):
    arguments = ["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run"), "--model.budget", "5"]
    assert main([*arguments, "--ckpt_path", str(full_run[0] / "checkpoints" / "dense.ckpt")]) == 0
    assert_same_weights(tmp_path / "run", full_run[0], "dense")
    assert pd.read_csv(tmp_path / "run" / "comparison.csv")["heads"].tolist() == [8, 5, 5]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """A run of two processes, on splits that are not of equal parts."""
    folder = tmp_path_factory.mktemp("two")
    uneven = ["--data.select_rows", "45", "--data.test_rows", "51", "--compare", "full", "--retrained", "[his]"]
    devices = ["--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.strategy", "ddp"]
    more = ["--curve", "[0.5]", "--from_scratch", "[]", *uneven, *devices]
    done = run_fit("--config", write_config(folder), "--run_dir", "run", *more, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


@pytest.mark.integration
def test_two_processes_end_with_complete_tables(two_processes):
    table = pd.read_csv(two_processes / "comparison.csv")
    assert set(zip(table["method"], table["stage"], strict=True)) == {
        *((method, "post hoc") for method in ("dense", *METHODS)), ("learned", "retrained"), ("his", "retrained"),
    }  # fmt: skip
    assert not table.drop(columns=["peak_memory_mb", "closed_by_gates"]).isna().any(axis=None)
    assert table["closed_by_gates"].notna().tolist() == (table["method"] == "learned").tolist()
    assert {path.name for path in two_processes.iterdir()} >= SHAPE
    assert set(table[table["stage"] == "retrained"]["steps"]) == {16}  # two batches at a time
    assert not list((two_processes / "experiments").glob(".*"))


@pytest.mark.integration
def test_predictions_of_two_processes_are_those_of_one_in_their_order(two_processes):
    """Of the same checkpoint, which one process evaluates here."""
    data = make_data(select_rows=45, test_rows=51)
    pruner, predictions = make_pruner(budget=3), Predictions()
    pruner.load_state_dict(torch.load(two_processes / "checkpoints" / "final.ckpt", weights_only=True)["state_dict"])
    metrics = evaluate(make_trainer(make_setup(), predictions), pruner, data)
    row = pd.read_csv(two_processes / "comparison.csv").query("method == 'learned' and stage == 'retrained'").iloc[0]
    kept, arrays = np.load(two_processes / "experiments" / row["experiment"] / "predictions.npz"), predictions.arrays()
    assert set(kept) == set(arrays)
    assert {name: len(array) for name, array in arrays.items()} == {
        "select_prediction": 45, "select_target": 45, "test_prediction": 51, "test_target": 51,
    }  # fmt: skip
    for name, array in arrays.items():
        np.testing.assert_array_equal(kept[name], array, err_msg=name)
    for name, value in metrics.items():
        assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-6)


@pytest.mark.nightly
def test_two_processes_equal_one(tmp_path):
    no_dropout = [f"--model.from_scratch.{name}_dropout_prob=0.0" for name in ("hidden", "attention_probs")]
    more = ["--model.draw_per", "batch", "--compare", "posthoc", "--curve", "[0.5]"]
    halves = ["--data.batch_size", "8", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    for name, given in (("one", []), ("two", [*halves, "--trainer.enable_progress_bar", "true"])):
        common = ["--config", write_config(tmp_path), *no_dropout, *more]
        done = run_fit(*common, *given, "--run_dir", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.splitlines().count("retraining, 3 heads") == 1  # by the first process
    tables = [pd.read_csv(tmp_path / name / "comparison.csv") for name in ("one", "two")]
    for column in ("method", "stage", "heads", "steps"):
        assert tables[0][column].tolist() == tables[1][column].tolist()
    for column in ("test_accuracy", "select_loss", "test_loss"):
        pd.testing.assert_series_equal(tables[0][column], tables[1][column], rtol=2e-3, atol=2e-3)
    scores = [pd.read_csv(tmp_path / name / "scores.csv") for name in ("one", "two")]
    for column in ("his", "his_standard_error", "fisher", "entropy"):
        pd.testing.assert_series_equal(scores[0][column], scores[1][column], rtol=5e-3)


def text_file(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


HUB = ["--model.from_scratch", "null", "--model.backbone"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([*HUB, "nobody/nothing"], "'nobody/nothing'"),
        ([*HUB, "FOLDER"], "cannot load a model from"),
        (["--model.from_scratch", "{model_type: xlnet, d_model: 16, n_head: 2, n_layer: 2}"], "XLNetRelativeAttention"),
        (["--model.budget", "null"], "--model.price is not given; give a price such as 0.01"),
        (["--model.freeze", "['.*']", "--compare", "none"], "fixes all weights, but retrain is"),
        (["--ckpt_path", "FOLDER/text.ckpt"], "text.ckpt"),
        (["--ckpt_path", "RUN/checkpoints/final.ckpt"], "weights only"),
        (["--ckpt_path", "RUN/checkpoints/dense.ckpt", "--model.from_scratch.num_hidden_layers", "1"], "8 gates"),
        (["--trainer.accelerator", "tpu"], "--trainer"),
        (["--run_dir", "FOLDER/text.ckpt/run"], "text.ckpt"),
        (["--existing", "resume"], "nothing to resume"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, expected, tmp_path, full_run, capsys):
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    given = [part.replace("FOLDER", str(tmp_path)).replace("RUN", str(full_run[0])) for part in arguments]
    assert main(["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run"), *given]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
def test_a_dense_model_alone_has_one_row(tmp_path, monkeypatch):
    started = count_trainings(monkeypatch)
    alone = ["--model.prune", "0", "--model.retrain", "0", "--model.budget", "null", "--compare", "full"]
    run = tmp_path / "run"
    arguments = ["--config", write_config(tmp_path), "--run_dir", str(run), *alone]
    assert main(arguments) == 0
    table = pd.read_csv(run / "comparison.csv")
    assert table[["method", "stage", "heads", "steps"]].to_numpy().tolist() == [["dense", "post hoc", 8, 0]]
    own = json.loads((run / "metrics.json").read_text())["run"]
    assert (own["method"], own["kept"]) == ("dense", 8)
    assert own["result"]["test_loss"] == table["test_loss"][0]
    dense, final = (
        torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"] for name in ("dense", "final")
    )
    assert all(torch.equal(final[name], tensor) for name, tensor in dense.items() if name != "gates._extra_state")
    curve = pd.read_csv(run / "curve.csv")
    assert (set(curve["method"]), set(curve["heads"])) == (set(RIVALS), {6, 4, 2, 1})
    assert {f"ranking:{name}" for name in RIVALS} <= set(pd.read_csv(run / "scores.csv"))
    assert main([*arguments, "--existing", "resume"]) == 0
    assert len(started) == 1
    pd.testing.assert_frame_equal(pd.read_csv(run / "comparison.csv"), table)


@pytest.mark.integration
def test_nan_keeps_the_last_good_checkpoint(tmp_path, capsys, monkeypatch):
    arguments = ["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run"), "--save_every", "1"]
    ruinous = ["--model.learning_rate", "1e30", "--model.lr_warm_up", "0", "--trainer.gradient_clip_val", "0"]

    def stop(loss, trainer):
        if trainer.global_step == 6:
            raise GateError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("training.pruner.module.check_finite", stop)
        assert main(arguments) == 2
    last = last_checkpoint(tmp_path / "run")
    assert torch.load(last)["global_step"] == 5
    begun = ["--run_dir", str(tmp_path / "ruined"), "--ckpt_path", str(last)]
    assert main([*arguments, *begun, *ruinous]) == 2
    assert "the loss is nan" in capsys.readouterr().err
    for saved in (tmp_path / "ruined" / "experiments").rglob("*.ckpt"):
        assert torch.load(saved)["state_dict"]["backbone.classifier.weight"].abs().max() < 10
    assert main([*arguments, "--existing", "resume"]) == 0


def test_an_old_run_survives_settings_that_cannot_start(full_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(full_run[0], run)
    arguments = ["--config", write_config(tmp_path), "--run_dir", str(run), "--existing", "overwrite"]
    assert main([*arguments, "--trainer.accelerator", "tpu"]) == 2
    assert "--trainer" in capsys.readouterr().err
    assert main([*arguments, "--ckpt_path", str(run / "checkpoints" / "dense.ckpt")]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert (run / "export" / "model.safetensors").is_file()


QUICK = {"default", "sst2_minilm_local", "multi30k_scratch", "opus_mt_en_ru", "sst2_bert"}
"""One of each kind: new weights, local files, new translators, models on the hub."""


@pytest.mark.integration
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else pytest.mark.nightly)
        for path in sorted(CONFIGS.glob("*.yaml"))
        if "methods" not in yaml.safe_load(path.read_text())  # those that say what is compared are for the command compare
    ],
)
def test_every_shipped_configuration_runs_as_far_as_it_can_offline(path, tmp_path, capsys):
    """Configurations of local files end on a tiny model, and those of the hub stop with one sentence."""
    assert path.read_text().startswith("# ")
    config = build_parser().parse_args(["--config", str(path)])
    common = ["--config", str(path), "--run_dir", str(tmp_path / "run"), "--wandb.mode", "disabled", "--curve", "[]"]
    small = [*(f"--model.{phase}=1" for phase in ("finetune", "prune", "retrain")), "--model.budget=2"]
    kind, is_new = config.data.class_path.rpartition(".")[2], config.model.from_scratch is not None
    sizes, files, model = {}, {}, []
    if kind == "ParallelText" and config.model.backbone is None:
        lines = "".join(f"{word} one {word} two\n" for word in ("fox", "king", "river", "poet") * 10)
        files = {f"{split}_{side}": lines for split in ("train", "select", "test") for side in ("source", "target")}
        sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
        model = ["--model.budget", "{encoder: 2}"]
    elif kind == "Documents":
        stories = "\n".join(f"{word} sees the {word} near the lake and likes it" for word in ("fox", "king", "river") * 20)
        files = {f"{split}_file": stories for split in ("train", "select", "test")}
        model = ["--data.max_length=16", "--data.score_rows=8"]
        if is_new:
            sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
            model += ["--data.vocab_size=300"]
        else:
            model += ["--model.backbone", tiny_backbone(tmp_path, decoder=True)]
    elif is_new:
        model = ["--data.train_rows=128", "--data.select_rows=64", "--data.test_rows=64"]
    elif kind == "Images":
        model = [f"--data.{split}_folder={write_images(tmp_path / split, rows=40)}" for split in ("train", "test")]
        model += ["--model.backbone", save_vit(tmp_path / "vit")]
    elif config.model.backbone is None:
        rows = "the\tDET\nfox\tNOUN\n\n" * 40 if kind == "Tags" else lines_for(config.data.init_args)
        files = {f"{split}_file": rows for split in ("train", "test")}
        model = ["--model.backbone", tiny_backbone(tmp_path, decoder="decoder" in path.stem)]
    else:
        assert main(common) == 2
        assert repr(config.model.backbone) in capsys.readouterr().err
        return
    ending = ".conll" if kind == "Tags" else ".tsv" if kind not in ("Documents", "ParallelText") else ".txt"
    given = [f"--data.{name}={text_file(tmp_path, name + ending, text)}" for name, text in files.items()]
    tiny = [f"--model.from_scratch.{name}={size}" for name, size in sizes.items()]
    assert main([*common, *small, *given, *tiny, *model]) == 0
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


def lines_for(data) -> str:
    """A small file as a configuration's data have it: with a header or without, with pairs or without."""
    pair = [data.pair_column] if data.pair_column else []
    names = [data.text_column or "sentence", *pair, data.label_column or "label"]
    lines = ["\t".join([*["the fox", "the king"][: len(names) - 1], label]) for label in ("0", "1")] * 40
    header = [] if data.columns else ["\t".join(names)]
    return "\n".join([*header, *lines]) + "\n"


def tiny_backbone(folder: Path, *, decoder: bool) -> str:
    """A pretrained-looking local folder: an encoder, or a decoder with grouped queries, and its tokenizer."""
    import transformers as t

    from training.data.synthetic import build_tokenizer

    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    more = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "pad_token_id": 0}
    encoder = t.BertModel(t.BertConfig(**sizes, **more))
    model = t.LlamaForCausalLM(t.LlamaConfig(num_key_value_heads=2, **sizes, **more)) if decoder else encoder
    model.save_pretrained(folder / "backbone")
    tokenizer.save_pretrained(folder / "backbone")
    return str(folder / "backbone")


def check_log_of_a_refitted_run(run):
    """The training of the gates and then that of the weights, in one line of steps: of 16, 16 and 32."""
    log = pd.read_csv(run / "metrics.csv")
    assert log["step"].is_monotonic_increasing
    trained = log.dropna(subset=["train/phase"]).set_index("step")
    assert trained["train/phase"].to_dict() == {step: min(step // 16, 2) for step in range(1, 64, 2)}
    assert trained.loc[33:, "heads/open"].nunique() == 1 < trained["heads/open"].nunique()
    assert log["select/loss"].notna().sum() == 4


@pytest.mark.integration
@pytest.mark.parametrize("keep", ["best", "learned"])
def test_a_refitted_run_keeps_the_best_heads_on_the_selection_split(tmp_path, monkeypatch, keep):
    monkeypatch.setattr("training.report.captions.warnings", lambda metrics: iter(["it is slow"]))
    run = tmp_path / "run"
    given = ["--config", write_config(tmp_path), "--run_dir", str(run), "--compare", "none", "--curve", "[]"]
    assert main([*given, "--model.refit", "true", "--model.keep", keep, "--model.min_steps", "12"]) == 0
    described = json.loads((run / "metrics.json").read_text())["run"]
    rows = pd.read_csv(run / "comparison.csv").set_index(["method", "stage"])
    if keep == "learned":
        assert (described["method"], described["selection"]) == ("learned+refit", {})
    else:
        reached = described["selection"]
        assert sorted(reached) == ["his+refit", "learned+refit", "obs+refit"]
        assert list(reached.values()) == sorted(reached.values(), reverse=True)
        assert described["method"] == next(iter(reached))
        assert {name: rows.loc[(name, "post hoc"), "select_accuracy"] for name in reached} == pytest.approx(reached)
        assert f"Kept 3 heads, those of {described['method']}: " in (run / "verdict.md").read_text()
        second = described["lead"]["second"]
        assert described["lead"]["difference"] == pytest.approx(reached[described["method"]] - reached[second])
        assert reached[second] == sorted(reached.values())[1]
    final = rows.loc[(described["method"], "retrained from dense")]
    assert final["steps"] - rows.loc[(described["method"], "post hoc"), "steps"] == 32  # of two epochs, whoever chose the heads
    found = described["against_dense"]
    assert found["value"] == pytest.approx(final["test_accuracy"])
    assert found["difference"] == pytest.approx(final["test_accuracy"] - rows.loc[("dense", "post hoc"), "test_accuracy"])
    assert found["low"] <= found["value"] <= found["high"]
    card = (run / "export" / "README.md").read_text()
    assert "\n- **warning:** it is slow\n" in card
    assert f"\n- {outcome(described, 'accuracy')['quality']}\n" in card
    masks = [json.loads((run / folder).read_text()) for folder in ("export/mask.json", f"masks/{described['method']}.json")]
    assert masks[0]["heads"] == masks[1]["heads"]
    check_log_of_a_refitted_run(run)
