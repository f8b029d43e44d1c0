"""Gates alone on a backbone whose weights stay in half precision and as they are."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from gates.errors import GateError
from gates.export.checkpoint import load_pruned
from tests.training.causal_runs import GROUPED, ROWS, make_data
from training.config import PrunerOptions
from training.data.synthetic_documents import build_document_tokenizer
from training.fit import main
from training.pruner.module import HeadPruner

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
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


def run(backbone, folder, dtype, *more):
    init = json.dumps(ROWS)
    path = folder / "half.yaml"
    path.write_text(
        f"model: {{backbone: {backbone}, dtype: {dtype}, budget: 3, finetune: 0, prune: 1, retrain: 0}}\n"
        f"data: {{class_path: SyntheticDocuments, init_args: {init}}}\n"
        "trainer: {accelerator: cpu, enable_progress_bar: false}\nwandb: {mode: disabled}\ncompare: none\n"
    )
    assert main(["--config", str(path), "--run_dir", str(folder / "run"), *more]) == 0
    return folder / "run"


@pytest.mark.parametrize("dtype", TYPES)
def test_gates_are_learned_and_weights_stay_as_they_were(backbone, tmp_path, dtype):
    folder = run(backbone, tmp_path, dtype)
    checkpoint = torch.load(folder / "checkpoints" / "final.ckpt", weights_only=True)["state_dict"]
    stored = load_file(f"{backbone}/model.safetensors")
    assert checkpoint["gates.learned.log_alpha"].dtype == torch.float32
    assert checkpoint["gates.learned.log_alpha"].unique().numel() > 1
    for name, weight in stored.items():
        assert torch.equal(checkpoint[f"backbone.{name}"], weight.to(TYPES[dtype])), name
    export = AutoModelForCausalLM.from_pretrained(folder / "export", trust_remote_code=True)
    assert export.dtype == TYPES[dtype]
    kept = stored["model.embed_tokens.weight"].to(TYPES[dtype])
    assert torch.equal(export.get_input_embeddings().weight, kept)


def test_numbers_are_those_of_the_pruned_model_in_double_precision(backbone, tmp_path):
    """Nothing is summed in half precision: what differs is what the weights and activations of one pass lack."""
    folder, data = run(backbone, tmp_path, "bfloat16"), make_data()
    model = load_pruned(folder / "export").double().eval()
    surprise, tokens = 0.0, 0
    with torch.no_grad():
        for batch in data.test_dataloader():
            own, counted = data.task.predictions(data.task.losses(model, batch)[1], batch)
            surprise, tokens = surprise + float(own.sum()), tokens + int(counted.sum())
    found = float(
        pd.read_csv(folder / "comparison.csv").set_index(["method", "stage"]).loc[("learned", "retrained"), "test_loss"]
    )
    assert found == pytest.approx(surprise / tokens, rel=2e-3)
    assert torch.tensor(found).to(torch.bfloat16) != torch.tensor(found)


def test_gates_of_both_types_agree(backbone):
    """The expected number of open gates follows the same schedule, and the first gradients point the same way."""
    data, felt = make_data(), {}
    for dtype in ("float32", "bfloat16"):
        options = PrunerOptions(backbone=backbone, dtype=dtype, freeze=[".*"], **ALONE)
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
        ({"refit": True}, "refit changes all weights behind the heads, but freeze"),
    ],
)
def test_what_would_change_weights_is_refused(change, message):
    with pytest.raises(GateError, match=message):
        PrunerOptions(**({"backbone": "folder", "dtype": "bfloat16"} | ALONE | change))
