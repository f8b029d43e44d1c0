"""``python -m tools.coverage``: every outcome of a model type, failures that are seen, and a page that agrees with its data."""

import pytest
import transformers as t

from tests.gates import architecture_checks
from tools.coverage import __main__ as coverage
from tools.coverage import architectures as zoo
from tools.coverage import every_type
from tools.coverage.every_type import REMOVED, check_type
from tools.coverage.tiny import HEAD_SIZE, HEADS, VOCABULARY, WIDTH, model_types, tiny_config


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("distilbert", REMOVED, ""),
        ("siglip_vision_model", REMOVED, ""),  # PyTorch's own attention
        ("udop", REMOVED, ""),  # its last token is padding
        ("eomt", REMOVED, ""),  # PyTorch computes it wrongly in float64
        ("ibert", "gated", "heads of "),  # its projections are none of PyTorch's
        ("zaya", "gated", "found by a probe"),
        ("xlnet", "refused", "XLNetRelativeAttention"),
        ("convnext", "no attention", "the tiny model made of its defaults has no attention"),
        ("decision_transformer", "no inputs", "DecisionTransformerModel"),
        ("sam_mask_decoder", "not built", "no class of models"),
        *((name, REMOVED, "") for name in ("qwen2_vl", "openai-gpt", "funnel")),
        *(pytest.param(name, "gated", "heads of ", marks=pytest.mark.nightly) for name in ("convbert", "wavlm")),
    ],
)
def test_every_outcome(name, outcome, reason):
    row = check_type(name)
    assert (row.outcome, reason in row.reason, "\n" in row.reason) == (outcome, True, False)


def test_wrong_gates_removals_and_code_are_failures(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("gates.gating.head_gates.scale_heads", lambda heads, values: heads)
        assert check_type("distilbert").outcome == "FAILED"
    with monkeypatch.context() as patch:
        patch.setattr("tools.coverage.checks.load_pruned", lambda folder, model_class: model_class.from_pretrained("nowhere"))
        assert check_type("distilbert").outcome == "FAILED"
    monkeypatch.setattr(every_type, "prediction", lambda *_: ["print(model())"])
    assert "the code of its model card fails: ValueError: " in check_type("distilbert").reason


def test_a_failed_check_is_shown_and_fails_the_program(monkeypatch, capsys):
    monkeypatch.setattr(architecture_checks, "remove_heads_", lambda model, mask, values=None: model)
    monkeypatch.setattr(architecture_checks, "refit_", lambda *_: [])
    monkeypatch.setattr(coverage, "COLUMNS", ("entropy", "refit", "prune"))
    assert coverage.main(["Albert"]) == 1
    name, entropy, refit, prune = capsys.readouterr().out.splitlines()[0].split("\t")
    assert (name, entropy) == ("Albert", "fast")
    assert refit.startswith("FAILED: AssertionError: no projection is refitted")
    assert prune.startswith("FAILED: AssertionError: removing heads: ")
    with pytest.raises(SystemExit, match="2"):
        coverage.main(["Bort"])


@pytest.mark.integration
def test_types_run_in_processes_that_end_in_time():
    (row,) = coverage.check_types(["sam_mask_decoder"])
    assert row.outcome == "not built"
    (row,) = coverage.check_types(["distilbert"], seconds=0.01)
    assert (row.outcome, row.reason) == ("stopped", "it took more than 0 seconds")


def test_the_page_has_the_counts_of_its_data(tmp_path, monkeypatch):
    types = coverage.read(coverage.TYPES)
    assert [row["architecture"] for row in coverage.read(coverage.ARCHITECTURES)] == list(zoo.BY_NAME)
    assert [row["model_type"] for row in types] == model_types()
    assert {row["outcome"] for row in types} <= coverage.MEANINGS.keys()
    page = coverage.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(coverage, "PAGE", tmp_path / "page.md")
    coverage.PAGE.write_text(page, encoding="utf-8")
    coverage.write_counts()
    assert coverage.PAGE.read_text(encoding="utf-8") == page


@pytest.mark.parametrize("name", ["Bert", "Llama", "T5", "ViT", "CLIP", "Whisper", "Swin", "Qwen2VL", "Gemma3", "DeepseekV3"])
def test_a_tiny_config_is_small_everywhere_and_a_fixed_point_of_its_class(name):
    config = tiny_config(getattr(t, f"{name}Config")())
    for part in (config, *(value for value in vars(config).values() if isinstance(value, t.PreTrainedConfig))):
        assert max(getattr(part, field, 0) for field in ("hidden_size", "d_model", "embed_dim")) <= 8 * WIDTH
        assert getattr(part, "vocab_size", 0) <= VOCABULARY
        assert getattr(part, "num_hidden_layers", 0) <= 6
    assert type(config)(**config.to_dict()).to_dict() == config.to_dict()


def test_parts_of_a_tiny_config_fit():
    configs = t.LlamaConfig(num_key_value_heads=8), t.Qwen3NextConfig(), t.Qwen2VLConfig()
    llama, layers, vision = map(tiny_config, configs)
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim) == (HEADS, HEADS // 2, HEAD_SIZE)
    assert layers.layer_types == ["linear_attention", "full_attention"]
    tokens = {name: value for name, value in vars(vision).items() if name.endswith("token_id") and isinstance(value, int)}
    assert max(tokens.values()) < VOCABULARY
    assert tokens["image_token_id"] != tokens["video_token_id"]
    assert sum(vision.text_config.rope_parameters["mrope_section"]) == HEAD_SIZE // 2
