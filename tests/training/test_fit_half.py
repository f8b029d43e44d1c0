"""Gates alone on a backbone whose weights stay in half precision and as they are."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSeq2SeqLM, LlamaConfig

from gates.errors import GateError
from gates.export.checkpoint import load_pruned
from tests.training.causal_runs import GROUPED, ROWS, make_data
from tools.coverage import architectures as zoo
from training.commands.export import load_trained
from training.commands.table import run_command
from training.config import PrunerOptions, Source
from training.data.synthetic_text import build_document_tokenizer
from training.fit import main
from training.pruner.module import HeadPruner
from training.tasks.causal_lm import CausalLM
from training.tasks.classification import ImageClassification
from training.tasks.loading import load_pretrained

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]
ALONE = {"finetune": 0.0, "prune": 1.0, "retrain": 0.0, "budget": 3}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A Llama in float32, as Transformers saves it."""
    folder, tokenizer = tmp_path_factory.mktemp("half") / "llama", build_document_tokenizer()
    fields = {name: value for name, value in GROUPED.items() if name != "model_type"}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**fields, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(backbone, tmp_path_factory):
    """A run that learns gates alone in bfloat16."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "half.yaml"
    path.write_text(
        f"model: {{backbone: {backbone}, dtype: bfloat16, budget: 3, finetune: 0, prune: 1, retrain: 0, min_steps: 0}}\n"
        f"data: {{class_path: SyntheticDocuments, init_args: {json.dumps(ROWS)}}}\n"
        "trainer: {accelerator: cpu, enable_progress_bar: false}\nwandb: {mode: disabled}\ncompare: none\n"
    )
    assert main(["--config", str(path), "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


def test_gates_are_learned_and_weights_stay_as_they_were(run, backbone):
    checkpoint = torch.load(run / "checkpoints" / "final.ckpt", weights_only=True)["state_dict"]
    stored = load_file(f"{backbone}/model.safetensors")
    assert checkpoint["gates.learned.log_alpha"].dtype == torch.float32
    assert checkpoint["gates.learned.log_alpha"].unique().numel() > 1
    for name, weight in stored.items():
        assert torch.equal(checkpoint[f"backbone.{name}"], weight.to(torch.bfloat16)), name
    export = AutoModelForCausalLM.from_pretrained(run / "export", trust_remote_code=True)
    assert export.dtype == torch.bfloat16
    kept = stored["model.embed_tokens.weight"].to(torch.bfloat16)
    assert torch.equal(export.get_input_embeddings().weight, kept)


def test_numbers_are_those_of_the_pruned_model_in_double_precision(run):
    """Nothing is summed in half precision: the difference is the rounding of weights and activations of one pass."""
    data, model = make_data(), load_pruned(run / "export").double().eval()
    surprise, tokens = 0.0, 0
    with torch.no_grad():
        for batch in data.test_dataloader():
            own, counted = data.task.predictions(data.task.losses(model, batch)[1], batch)
            surprise, tokens = surprise + float(own.sum()), tokens + int(counted.sum())
    table = pd.read_csv(run / "comparison.csv").set_index(["method", "stage"])
    found = float(table.loc[("learned", "post hoc"), "test_loss"])
    assert found == pytest.approx(surprise / tokens, rel=2e-3)
    assert torch.tensor(found).to(torch.bfloat16) != torch.tensor(found)


def test_gates_of_both_types_agree(backbone):
    """The first gradients that they feel point the same way."""
    data, felt = make_data(), {}
    for dtype in ("float32", "bfloat16"):
        options = PrunerOptions(backbone=backbone, dtype=dtype, freeze=None if dtype == "bfloat16" else [".*"], **ALONE)
        pruner = HeadPruner(options)
        pruner.build(data.task, data.tokenizer)
        assert not any(p.requires_grad for p in pruner.backbone.parameters())
        pruner.gates.mode = "stochastic"
        torch.manual_seed(1)
        batch = next(iter(data.score_dataloader()))
        losses, _ = data.task.losses(pruner.backbone.eval(), batch)
        losses.mean().backward()
        felt[dtype] = pruner.gates.log_alpha.grad
    assert torch.cosine_similarity(felt["float32"], felt["bfloat16"], dim=0) > 0.99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finetune": 1.0}, r"dtype is bfloat16, in which weights are fixed, but finetune is 1 epochs; set it to 0"),
        ({"retrain": 0.5}, r"dtype is bfloat16, in which weights are fixed, but retrain is 0.5 epochs"),
        ({"backbone": None, "from_scratch": GROUPED}, "dtype is bfloat16, whose weights are fixed, but the model is new"),
    ],
)
def test_what_would_change_weights_is_refused(change, message):
    with pytest.raises(GateError, match=message):
        PrunerOptions(**({"backbone": "folder", "dtype": "bfloat16"} | ALONE | change))


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_what_transformers_keeps_in_float32_stays_so(tmp_path, name):
    """Frequencies of rotary positions first of all, which rounded would turn long texts into others."""
    zoo.build(zoo.BY_NAME[name]).save_pretrained(tmp_path)
    stock = (AutoModelForSeq2SeqLM if name == "T5" else AutoModelForCausalLM).from_pretrained(tmp_path, dtype=torch.bfloat16)
    config, auto = stock.config, AutoModelForSeq2SeqLM if name == "T5" else AutoModelForCausalLM
    ours = load_pretrained(auto, Source(str(tmp_path), dtype="bfloat16"), config, what="a model")
    expected = {n: t for part in (stock.named_parameters(), stock.named_buffers()) for n, t in part}
    found = {n: t for part in (ours.named_parameters(), ours.named_buffers()) for n, t in part}
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert {t.dtype for t in found.values()} == ({torch.bfloat16, torch.float32} if name == "Llama" else {torch.bfloat16})


@pytest.mark.parametrize(
    ("architecture", "packing", "message"),
    [
        ("Bert", False, "sees tokens that come later"),
        ("XGLM", True, "does not keep the documents of a block apart"),
        ("Bloom", True, "does not keep the documents of a block apart"),
    ],
)
def test_a_model_that_sees_what_it_must_not_is_refused_in_half_precision(tmp_path, architecture, packing, message):
    """Also one whose weights are small, as those of a new model are."""
    tokenizer = build_document_tokenizer()
    config = zoo.build(zoo.BY_NAME[architecture]).config
    config.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(GateError, match=message):
        CausalLM(packing=packing, max_length=12).build(Source(str(tmp_path), dtype="bfloat16"), tokenizer)


def test_the_runs_model_comes_back_in_its_type(run, tmp_path):
    assert {parameter.dtype for parameter in load_trained(str(run)).model.parameters()} == {torch.bfloat16}
    assert "weights as they were, in bfloat16" in (run / "export" / "README.md").read_text()
    more = ["--format", "pruned", "--output", str(tmp_path / "again"), "--budget", "2"]
    assert run_command("export", [str(run), *more]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "again" / "model.safetensors").values()} == {torch.bfloat16}


def test_images_are_of_the_type_that_the_model_computes_with(tmp_path):
    zoo.build(zoo.BY_NAME["ViT"]).save_pretrained(tmp_path)
    model = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    pixels = {"pixel_values": torch.zeros(1, 3, 8, 8), "labels": torch.tensor([0])}
    found = ImageClassification(["no", "yes"]).model_inputs(model, pixels)
    assert {name: tensor.dtype for name, tensor in found.items()} == {"pixel_values": torch.bfloat16}


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("compare", ["--stages", "retrained"], "dtype is bfloat16, in which weights are fixed, but --stages has 'retrained'"),
        ("compare", ["--stages", "post hoc", "--methods", "relevance"], "but relevance needs weights in float32"),
        ("fit", ["--compare", "full"], "nothing can be trained on; give --compare posthoc"),
    ],
)
def test_what_fixed_weights_cannot_do_is_refused(backbone, tmp_path, capsys, command, more, said):
    budget = ["--budgets" if command == "compare" else "--model.budget", "3"]
    own = ["--data", "SyntheticDocuments", "--model.from_scratch", "null", "--model.backbone", backbone, *budget]
    alone = ["--model.dtype", "bfloat16", "--model.finetune", "0", "--model.retrain", "0", "--run_dir", str(tmp_path / "run")]
    assert run_command(command, [*own, *alone, *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert command == "compare" or not (tmp_path / "run").exists()
