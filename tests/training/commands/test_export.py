import json
import shutil

import huggingface_hub
import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file

from gates.attention.sites import find_attention
from gates.export import hub
from gates.export.checkpoint import load_pruned
from gates.gating.head_gates import HeadGates
from gates.gating.latency import LatencyTable, SiteTimes
from gates.model import GatedModel
from gates.surgery.masks import load_mask
from tests.training.runs import write_config
from training.analysis import model
from training.commands.table import run_command
from training.fit import main as fit
from training.setup import open_data

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]
CLOSE = {"atol": 5e-6, "rtol": 2e-5}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of a family that has a stock form, with every ranking scored."""
    folder = tmp_path_factory.mktemp("runs")
    more = ("--model.from_scratch.model_type", "nomic_bert", "--model.minimum_per_layer", "1")
    assert fit(["--config", write_config(folder), "--run_dir", str(folder / "run"), "--compare", "posthoc", *more]) == 0
    return folder / "run"


def dense(run, checkpoint="final"):
    """The dense model, put together by hand."""
    config = transformers.AutoConfig.from_pretrained(run / "export").to_dict()
    for name in ("pruned_attention", "auto_map"):
        del config[name]
    model = transformers.NomicBertForSequenceClassification(transformers.NomicBertConfig.from_dict(config))
    state = torch.load(run / "checkpoints" / f"{checkpoint}.ckpt", weights_only=True)["state_dict"]
    model.load_state_dict({name.removeprefix("backbone."): t for name, t in state.items() if name.startswith("backbone.")})
    return model.eval()


def batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 60, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model, mask=None):
    gates = HeadGates(model)
    with gates.attached(), gates.use(torch.ones(gates.heads) if mask is None else mask), torch.no_grad():
        return model(**batch()).logits


def kept(run, path):
    """The mask in a mask file of this run's model."""
    return load_mask(path, find_attention(dense(run)))


def test_any_budget_refitted_without_training(run, tmp_path, capsys):
    """The dense weights, changed behind the heads alone, and nearer to what the dense model says than without a refit."""
    for name, more in (("plain", []), ("refitted", ["--refit"])):
        source = run / "checkpoints" / "dense.ckpt" if name == "plain" else run
        options = ["--format", "masked", "--budget", "2", "--output", str(tmp_path / name), "--measure", "[]", *more]
        assert run_command("export", [str(source), *options]) == 0
        said = capsys.readouterr().out
        assert (" on this machine" in said) == (name == "refitted")  # the expected time
    assert "dense weights refitted to 2 heads of learned: " in said
    assert "masked: 2 of 8 heads" in said
    plain, refitted = (
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / name).eval()
        for name in ("plain", "refitted")
    )
    expected = logits(dense(run, "dense"))
    assert (logits(refitted) - expected).square().sum() < (logits(plain) - expected).square().sum()
    own = dense(run, "dense").state_dict()
    changed = {name for name, tensor in refitted.state_dict().items() if not torch.equal(tensor, plain.state_dict()[name])}
    assert changed
    behind = ("out_proj.weight", "o_proj.weight", "fc2.weight", "down_proj.weight")
    assert all(name.endswith(behind) for name in changed), changed
    assert own.keys() == refitted.state_dict().keys()
    assert "refitted to this mask by least squares, without training" in (tmp_path / "refitted" / "README.md").read_text()


def test_weights_that_were_trained_on_are_not_refitted(run, tmp_path, capsys):
    path = run / "checkpoints" / "final.ckpt"
    assert run_command("export", [str(path), "--format", "masked", "--output", str(tmp_path / "out"), "--refit"]) == 2
    assert "--refit starts from the dense weights of a run" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def learned(run):
    return kept(run, run / "masks" / "learned.json")


def written(run, folder):
    return kept(run, folder / "mask.json")


def call(run, out, *arguments):
    return run_command("export", [str(run), "--output", str(out), "--measure", "[]", *arguments])


@pytest.mark.parametrize(("format", "remote"), [("pruned", True), ("masked", False)])
def test_a_run_in_both_forms_that_take_any_mask(run, tmp_path, capsys, format, remote):
    assert call(run, tmp_path / "out", "--format", format) == 0
    assert f"{format}: 3 of 8 heads" in capsys.readouterr().out
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", trust_remote_code=remote)
    torch.testing.assert_close(logits(loaded.eval()), logits(dense(run), learned(run)), **CLOSE)
    assert torch.equal(written(run, tmp_path / "out"), learned(run))
    if format == "pruned":  # the same weights as the run's own export
        ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", run / "export"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_vocab() == transformers.AutoTokenizer.from_pretrained(run / "export").get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_stock_form_at_a_budget_that_is_the_same_in_every_layer(run, tmp_path, capsys):
    assert call(run, tmp_path / "out", "--format", "stock", "--budget", "2") == 0
    mask = written(run, tmp_path / "out")
    assert mask.view(2, 4).sum(1).tolist() == [1, 1]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(loaded), logits(dense(run), mask), **CLOSE)
    capsys.readouterr()
    assert call(run, tmp_path / "uneven", "--format", "stock", "--budget", "3") == 2
    assert "error: NomicBertForSequenceClassification has one num_attention_heads for all its layers" in capsys.readouterr().err
    assert not (tmp_path / "uneven").exists()


def test_the_stock_form_padded_with_heads_of_zeros(run, tmp_path, capsys):
    assert call(run, tmp_path / "out", "--format", "stock", "--budget", "3", "--pad_heads") == 0
    mask = written(run, tmp_path / "out")
    assert sorted(mask.view(2, 4).sum(1).tolist()) == [1, 2]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert [site.heads for site in find_attention(loaded)] == [2, 2]
    torch.testing.assert_close(logits(loaded), logits(dense(run), mask), **CLOSE)
    assert "- Padded: 1 heads of zeros (`--pad_heads`)" in (tmp_path / "out" / "README.md").read_text()
    assert "dense / pruned" in capsys.readouterr().out


def test_the_stock_form_padded_to_the_fastest_number_of_heads(run, tmp_path):
    sites = [SiteTimes(f"encoder.{layer}", [0.0, 1.0, 3.0, 3.0, 3.0], [0.0, 1.0, 4.0, 2.0, 4.0]) for layer in range(2)]
    LatencyTable(1.0, sites).write(run / "latency.json")
    try:
        assert call(run, tmp_path / "out", "--format", "stock", "--budget", "3", "--pad_heads", "fastest") == 0
    finally:
        (run / "latency.json").unlink()
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert [site.heads for site in find_attention(loaded)] == [3, 3]


def test_an_export_is_uploaded_once_it_is_written(run, tmp_path, capsys, monkeypatch):
    uploaded = {}

    class Api:
        def create_repo(self, repo_id, private=None, exist_ok=False):
            uploaded[repo_id] = private

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            assert (folder_path / "README.md").is_file()
            return f"https://hub/{repo_id}/commit/1"

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token_of_this_test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for format in ("pruned", "gates"):
        assert call(run, tmp_path / format, "--format", format, "--push_to_hub", f"someone/{format}", "--private") == 0
        assert f"uploaded to https://hub/someone/{format}/commit/1" in capsys.readouterr().out
    assert uploaded == {"someone/pruned": True, "someone/gates": True}


def test_onnx_with_what_goes_with_it(run, tmp_path):
    assert call(run, tmp_path / "out", "--format", "onnx") == 0
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    (found,) = session.run(["logits"], {name: tensor.numpy() for name, tensor in batch().items()})
    torch.testing.assert_close(torch.from_numpy(found), logits(dense(run), learned(run)), atol=2e-5, rtol=1e-4)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"README.md", "config.json", "mask.json", "tokenizer.json"}
    assert "outputs = model.run(" in (tmp_path / "out" / "README.md").read_text()


def test_the_gates_alone_belong_to_the_dense_weights(run, tmp_path, capsys):
    assert call(run, tmp_path / "gates", "--format", "gates", "--budget", "4") == 0
    hint = capsys.readouterr().out
    assert "--format masked --budget 8" in hint
    assert sum(path.stat().st_size for path in (tmp_path / "gates").iterdir()) < 20_000
    assert call(run, tmp_path / "dense", "--format", "masked", "--budget", "8") == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(logits(model), logits(dense(run)), **CLOSE)
    gated = GatedModel.from_pretrained(model, tmp_path / "gates")
    assert torch.equal(gated.mask(), written(run, tmp_path / "gates"))
    assert int(gated.mask().sum()) == 4
    final = torch.load(run / "checkpoints" / "final.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(gated.gates.log_alpha.detach(), final["gates.learned.log_alpha"])


@pytest.mark.parametrize(
    ("ranking", "budget", "count"), [("his", "5", 5), ("entropy(keep=high)", "0.5", 4), ("learned", "6", 6)]
)
def test_any_budget_of_any_ranking(run, tmp_path, ranking, budget, count):
    assert call(run, tmp_path / "out", "--format", "masked", "--ranking", ranking, "--budget", budget) == 0
    scores = pd.read_csv(run / "scores.csv")[f"ranking:{ranking}"].to_numpy()
    best = {layer * 4 + int(np.argmax(scores[layer * 4 : layer * 4 + 4])) for layer in (0, 1)}  # one in each layer stays
    rest = [head for head in np.argsort(-scores, kind="stable") if head not in best]
    expected = np.zeros(8)
    expected[[*best, *rest[: count - 2]]] = 1.0
    assert written(run, tmp_path / "out").tolist() == expected.tolist()


def test_a_ranking_without_a_budget_keeps_the_runs_own_mask_of_it(run, tmp_path):
    assert call(run, tmp_path / "out", "--format", "masked", "--ranking", "random") == 0
    assert torch.equal(written(run, tmp_path / "out"), kept(run, run / "masks" / "random.json"))


def test_a_score_that_no_run_compares_is_computed_from_the_dense_model(run, tmp_path, monkeypatch, capsys):
    """As a comparison computes it, from the weights at the end of fine-tuning; the data are read once for it and the refit."""
    opened = []
    monkeypatch.setattr(model, "open_data", lambda *told: opened.append(told) or open_data(*told))
    assert call(run, tmp_path / "out", "--format", "masked", "--ranking", "obs", "--budget", "5", "--refit") == 0
    asked = ["--config", str(run / "config.yaml"), "--methods", "obs", "--budgets", "5", "--seeds", "0", "--stages", "post hoc"]
    assert len(opened) == 1
    experiments = ["--experiments", str(run / "experiments"), "--run_dir", str(tmp_path / "comparison")]
    assert run_command("compare", [*asked, *experiments]) == 0
    masks = json.loads((tmp_path / "comparison" / "masks.json").read_text())
    (of_comparison,) = [one["mask"] for one in masks if one["method"] == "obs"]
    assert written(run, tmp_path / "out").tolist() == of_comparison
    assert call(tmp_path / "comparison", tmp_path / "none", "--format", "masked") == 2
    assert "holds a comparison or other results, not a run; give a directory that fit wrote" in capsys.readouterr().err


def test_a_minimum_per_layer_of_ones_own(run, tmp_path):
    assert call(run, tmp_path / "out", "--format", "stock", "--budget", "4", "--minimum_per_layer", "2") == 0
    assert written(run, tmp_path / "out").view(2, 4).sum(1).tolist() == [2, 2]


def test_the_weights_of_another_checkpoint(run, tmp_path):
    assert call(run / "checkpoints" / "dense.ckpt", tmp_path / "out", "--format", "masked") == 0
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(loaded), logits(dense(run, "dense"), learned(run)), **CLOSE)
    assert not torch.allclose(logits(loaded), logits(dense(run), learned(run)), **CLOSE)
    assert "accuracy" not in (tmp_path / "out" / "README.md").read_text()  # the run's results are of other weights


def test_the_card_states_costs_and_results_only_where_they_hold(run, tmp_path, capsys, monkeypatch):
    notes = ["- it is slow", "- it is worse"]
    monkeypatch.setattr("training.commands.export.card_notes", lambda metrics: notes)
    measured = ["--format", "pruned", "--output", str(tmp_path / "own"), "--measure", "[1,2]"]
    assert run_command("export", [str(run), *measured]) == 0
    shown = capsys.readouterr().out
    text = (tmp_path / "own" / "README.md").read_text()
    for part in ("parameters", "FLOPs of one example", "ms at batch size 1", "ms at batch size 2"):
        assert part in text
        assert part in shown
    said = json.loads((run / "metrics.json").read_text())["run"]
    before, after = said["dense"]["post hoc"]["test_accuracy"], said["result"]["test_accuracy"]  # none was trained on dense
    for card in (text, (run / "export" / "README.md").read_text()):  # the run's own gets them after the comparison
        assert f"| accuracy | {before:.4g} | {after:.4g} |" in card
    assert [line for line in text.splitlines() if line.startswith("- it is")] == notes
    assert "quality: not measured" not in shown
    data = huggingface_hub.ModelCard.load(tmp_path / "own" / "README.md").data
    result = data.eval_results[0]
    assert (result.metric_type, result.metric_value) == ("accuracy", after)
    assert result.dataset_name.startswith("Synthetic")
    assert "weights retrained with the mask" in text
    assert transformers.__version__ in text
    assert call(run, tmp_path / "other", "--format", "pruned", "--budget", "6") == 0
    text = (tmp_path / "other" / "README.md").read_text()
    assert "accuracy" not in text
    assert "not trained on with this mask" in text
    assert "quality: not measured with these heads and weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "9"], "expected a whole number from 0 to 8"),
        (["--budget", "1"], "minimum of 1 heads in each layer"),
        (["--budget", "{cross: 2}"], "'cross'"),
        (["--ranking", "astrology"], "no ranking 'astrology'; expected one of learned, his"),
        (["--minimum_per_layer", "1"], "give --budget too"),
        (["--measure", "[0]"], "batch sizes of at least 1"),
        (["--length", "1"], "--length is 1; expected at least 2"),
        (["--pad_heads"], "--pad_heads is for --format stock, and the format is masked"),
        (["--format", "stock", "--pad_heads", "fastest"], "--pad_heads fastest needs the measured times in"),
        (["--private"], "give --push_to_hub USER/NAME as well"),
        (["--push_to_hub", "a/b"], "there is no token for an upload to 'a/b'"),
        (["--format", "gates", "--refit"], "the format gates holds none"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(run, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert run_command("export", [str(run), "--format", "masked", "--output", str(tmp_path / "out"), *arguments]) == 2
    first, error = capsys.readouterr().err.split("\n", 1)
    assert first.endswith(": loading libraries")
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_a_form_and_a_directory_it_is_the_pruned_form_beside_the_run(run, tmp_path, capsys, monkeypatch):
    mine = shutil.copytree(run, tmp_path / "runs" / "mine")
    arguments = [str(mine), "--budget", "2", "--measure", "[]"]
    assert run_command("export", arguments) == 0
    (written,) = set((tmp_path / "runs").iterdir()) - {mine}
    assert written.name == "mine-pruned-2"
    assert load_pruned(written).config.pruned_attention
    assert run_command("export", arguments) == 2
    assert "mine-pruned-2' exists already" in capsys.readouterr().err
    monkeypatch.chdir(mine)
    for own, name in ((".", "mine"), ("../mine/checkpoints/dense.ckpt", "mine-dense")):
        (tmp_path / "runs" / f"{name}-pruned-2").mkdir(exist_ok=True)
        (tmp_path / "runs" / f"{name}-pruned-2" / "file").touch()
        assert run_command("export", [own, *arguments[1:]]) == 2
        assert f"/{name}-pruned-2' exists already" in capsys.readouterr().err
