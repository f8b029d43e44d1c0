import json
import subprocess
import sys
from functools import partial

import pytest

from gates.errors import GateError
from gates.recovery.refit import Refitted
from training.commands.table import run_command
from training.coverage import architectures as zoo
from training.coverage import coverage
from training.coverage.coverage import Check, Row, markdown

main = partial(run_command, "coverage")


def run(*arguments):
    return main([*arguments, "--onnx", "false", "--types", "false"])


def test_rows_go_to_the_terminal_and_to_files(tmp_path, capsys):
    assert run("--only", "[T5,BigBird]", "--json", str(tmp_path / "rows.json"), "--output", str(tmp_path / "rows.md")) == 0
    rows = {row["architecture"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert rows.keys() == {"T5", "MT5", "UMT5", "BigBird"}
    assert rows["T5"] == {
        "architecture": "T5", "gate": "yes", "his": "yes", "entropy": "explicit", "refit": "yes",
        "prune": "yes", "generate": "dynamic, static", "reload": "yes", "onnx": "not run",
    }  # fmt: skip
    assert rows["BigBird"]["gate"] == "yes"
    assert rows["BigBird"]["prune"].startswith("no: its block-sparse")
    assert "UMT5" in capsys.readouterr().out
    assert (
        "[1] its block-sparse" in (tmp_path / "rows.md").read_text()
        or "[2] its block-sparse" in (tmp_path / "rows.md").read_text()
    )


def test_a_check_that_fails_is_shown_and_fails_the_command(monkeypatch):
    """Heads that are not removed: the outputs of masked and unpruned models differ."""
    monkeypatch.setattr(coverage, "remove_heads_", lambda model, mask: model)
    row = coverage.coverage([zoo.BY_NAME["Bert"]], onnx=False)[0]
    assert row.gate == "yes"
    assert row.prune.startswith("FAILED: AssertionError: differs by")
    assert row.failed
    assert run("--only", "[Albert]") == 2


def test_a_refusal_where_none_is_expected_is_a_failure(monkeypatch):
    def refuse(*arguments, **more):
        raise GateError("not today")

    def crash(*arguments, **more):
        raise RuntimeError("boom")

    monkeypatch.setattr(coverage, "save_pruned", refuse)
    monkeypatch.setattr(coverage, "observe_entropy", crash)
    row = coverage.coverage([zoo.BY_NAME["Albert"]], onnx=False)[0]
    assert row.reload == "FAILED: GateError: not today"
    assert row.entropy == "FAILED: RuntimeError: boom"
    assert row.prune == "yes"
    assert row.failed


def test_a_refit_that_does_nothing_or_harm_is_a_failure(monkeypatch):
    def harm(gates, *arguments):
        gates.sites[0].output.weight.data.neg_()
        return [Refitted("some.projection", 1.0, 0.5)]

    for refit, seen in ((lambda *arguments: [], "refitted 0 projections"), (harm, "times as far")):
        monkeypatch.setattr(coverage, "refit_", refit)
        row = coverage.coverage([zoo.BY_NAME["Albert"]], onnx=False)[0]
        assert row.refit.startswith("FAILED: AssertionError: ")
        assert seen in row.refit


def test_equality_is_not_taken_for_granted(monkeypatch):
    check = Check(zoo.BY_NAME["Bert"])
    monkeypatch.setattr(coverage, "head_gradients", lambda gates, losses: losses()[:, None].float().detach().cumsum(0))
    with pytest.raises(AssertionError):
        check.his()


def test_bad_input_is_one_sentence(tmp_path, capsys):
    assert run("--only", "[Bort]") == 2
    assert "'Bort', which is part of no architecture's name" in capsys.readouterr().err
    assert run("--only", "[Bert]", "--json", str(tmp_path / "no" / "rows.json")) == 2
    assert "its folder does not exist" in capsys.readouterr().err


def test_notes_are_numbered_once():
    row = Row("A", "yes", "yes", "no: reason", "yes", "no: reason", "-", "-", "no: other")
    text = markdown([row])
    assert "| A | yes | yes | no [1] | yes | no [1] | - | - | no [2] |" in text
    assert text.count("[1] reason") == 1


def test_the_zoo_has_every_architecture_that_the_table_promises():
    promised = (
        "Bert Roberta Electra XLMRoberta Camembert Ernie Esm MegatronBert RoFormer LayoutLM RemBert Data2VecText DebertaV2 "
        "Albert DistilBert XLM Flaubert MPNet ModernBert NomicBert EuroBert GPT2 GPTNeo GPTJ GPTNeoX CodeGen OPT Bloom Falcon "
        "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Phi Phi3 Olmo2 SmolLM3 Granite Starcoder2 StableLm Cohere Mixtral "
        "Qwen3Moe GptOss T5 MT5 UMT5 SwitchTransformers Bart MBart Marian Pegasus M2M100 Blenderbot Whisper Wav2Vec2 ViT DeiT "
        "Dinov2 CLIP BioGpt XGLM DeepseekV3 Longformer BigBird LED Splinter NllbMoe SeamlessM4T SeamlessM4Tv2 HYV4 "
        "GPTNeoXJapanese Doge Lilt"
    )
    assert {architecture.model for architecture in zoo.ARCHITECTURES} == set(promised.split())
    assert len(zoo.BY_NAME) == len(zoo.ARCHITECTURES)


@pytest.mark.slow
def test_the_command_itself(tmp_path):
    command = [
        sys.executable,
        "-m",
        "training",
        "coverage",
        "--only",
        "[Llama,DistilBert]",
        "--types",
        "false",
        "--json",
        str(tmp_path / "rows.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["onnx"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["yes", "yes"]
