"""All model types: what each row says is so, the sweep ends what hangs, and goes on where it stopped."""

import json
import random

import pytest

from gates.errors import GateError
from training.coverage import every_type
from training.coverage.every_type import REMOVED, TypeRow, check_type
from training.coverage.page import page
from training.coverage.sweep import counts, read_results, shard, sweep
from training.coverage.types import model_types
from training.runs.own_code import folders_fingerprint

USED = (
    *("qwen3_next", "qwen2_vl", "qwen3_vl", "internvl", "glm4v", "siglip", "sam", "detr"),
    *("mpt", "dbrx", "modernbert-decoder", "openai-gpt", "ctrl", "videomae", "yolos", "vilt", "dpt", "wav2vec2-bert"),
    *("qwen3_5", "blip-2", "deberta", "funnel", "gpt_bigcode"),
)
"""Families that a row of the table came for, all of whose heads can be removed."""
GATED = ("convbert", "wavlm")
"""Families whose heads have gates and scores, and cannot be removed."""


def test_there_are_all_types_of_transformers():
    assert {"bert", "qwen3_next", "siglip_vision_model", "timm_wrapper"} <= set(model_types())
    assert len(model_types()) > 700


@pytest.mark.parametrize(
    ("name", "group", "reason"),
    [
        ("distilbert", REMOVED, ""),
        ("siglip_vision_model", REMOVED, ""),  # PyTorch's own attention
        ("udop", REMOVED, ""),  # whose last token is padding
        ("eomt", REMOVED, ""),  # which PyTorch computes wrongly in float64
        ("ibert", "gated", ""),  # its projections are none of PyTorch's
        ("zaya", "gated", ""),  # by a probe
        ("xlnet", "refused", "XLNetRelativeAttention"),
        ("convnext", "no attention", "the tiny model made of its defaults has no attention"),
        ("decision_transformer", "no inputs", "DecisionTransformerModel"),
        ("sam_mask_decoder", "not built", "no class of models"),
    ],
)
def test_every_outcome(name, group, reason):
    row = check_type(name)
    assert (row.group, row.outcome == "gated") == (group, group in (REMOVED, "gated"))
    assert reason in row.reason
    assert "\n" not in row.reason


def test_a_wrong_gate_is_a_failure(monkeypatch):
    monkeypatch.setattr("gates.head_gates.scale_heads", lambda heads, values: heads)
    row = check_type("distilbert")
    assert row.outcome == "FAILED"


def test_a_wrong_removal_is_a_failure(monkeypatch):
    monkeypatch.setattr(every_type, "load_pruned", lambda folder, model_class: model_class.from_pretrained("nowhere"))
    assert check_type("distilbert").outcome == "FAILED"


def test_code_of_a_model_card_that_fails_is_a_failure(monkeypatch):
    monkeypatch.setattr(every_type, "prediction", lambda *_: ["print(model())"])
    row = check_type("distilbert")
    assert row.outcome == "FAILED"
    assert row.reason.startswith("AssertionError: the code of its model card fails: ValueError: ")


@pytest.mark.slow
@pytest.mark.parametrize("name", USED)
def test_what_people_use_is_gated_removed_and_reloaded(name):
    assert check_type(name).group == REMOVED


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
def test_what_people_use_and_cannot_be_cut_is_gated_and_says_so(name):
    row = check_type(name)
    assert row.group == "gated"
    assert row.removed.startswith("no: heads of ")


@pytest.mark.slow
def test_no_type_of_a_sample_fails(tmp_path):
    rows = sweep(random.Random(18).sample(model_types(), 8), tmp_path / "results.jsonl")
    assert [row for row in rows if row.outcome == "FAILED"] == []
    assert read_results(tmp_path / "results.jsonl") == rows


@pytest.mark.slow
def test_a_type_that_takes_too_long_is_ended_and_tried_again(tmp_path):
    results = tmp_path / "results.jsonl"
    (row,) = sweep(["distilbert"], results, seconds=0.01)
    assert row.outcome == "stopped"
    (row,) = sweep(["distilbert"], results)
    assert row.group == REMOVED


def written(path, *rows):
    from training.coverage.sweep import _versions

    path.write_text("".join(json.dumps({"versions": _versions(), **vars(row)}) + "\n" for row in rows))


def test_what_was_seen_is_not_run_again(tmp_path, monkeypatch):
    rows = [TypeRow("bert", "gated", "", "BertModel", {"encoder": 8}, "example", "yes"), TypeRow("x", "refused", "so")]
    written(tmp_path / "results.jsonl", *rows)
    monkeypatch.setattr("training.coverage.sweep._in_process", lambda *_: pytest.fail("run again"))
    assert sweep(["bert", "x"], tmp_path / "results.jsonl") == rows


def test_results_of_other_code_do_not_count_and_it_is_said(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.jsonl"
    written(path, TypeRow("bert", "gated"), TypeRow("x", "refused", "so"))
    of_this_code = path.read_text()
    older = json.loads(of_this_code.splitlines()[0])
    older["versions"]["code"] = "0123"
    path.write_text(json.dumps(older) + "\n" + of_this_code.splitlines()[1] + "\n")
    again = TypeRow("bert", "gated", "", "BertModel")
    monkeypatch.setattr("training.coverage.sweep._in_process", lambda server, name, seconds: again)
    assert sweep(["bert", "x"], path) == [again, TypeRow("x", "refused", "so")]
    assert f"1 results in '{path}' are of other versions or other code, and are not used" in capsys.readouterr().err
    assert sweep(["bert", "x"], path) == [again, TypeRow("x", "refused", "so")]


def test_code_is_known_by_its_modules(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name / "package" / "within").mkdir(parents=True)
        (tmp_path / name / "package" / "within" / "module.py").write_text("x = 1\n")
    one, other = (folders_fingerprint(tmp_path / name / "package") for name in ("one", "other"))
    assert one == other
    (tmp_path / "other" / "package" / "within" / "module.py").write_text("x = 2\n")
    assert folders_fingerprint(tmp_path / "other" / "package") != one


def test_results_of_other_versions_do_not_count_and_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "results.jsonl"
    written(path, TypeRow("bert", "gated"))
    whole = path.read_text()
    other = json.dumps({"versions": {"transformers": "4"}, "model_type": "x", "outcome": "gated"})
    path.write_text(f'{other}\n{whole}{{"ver')
    assert read_results(path) == [TypeRow("bert", "gated")]
    path.write_text("what is this\n" + whole)
    with pytest.raises(GateError, match=r"line 1 of .* is no result of a model type"):
        read_results(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(GateError, match="is no file of results"):
        read_results(path)


@pytest.mark.parametrize("part", ["", "3/2", "0/2", "1", "a/b", "1/2/3", "٣/٤"])
def test_a_shard_that_is_none_is_one_sentence(part):
    with pytest.raises(GateError, match="expected k/n"):
        shard(["a"], part)


def test_shards_are_everything_once():
    names = [str(number) for number in range(11)]
    assert sorted(name for part in range(1, 5) for name in shard(names, f"{part}/4")) == sorted(names)


def test_the_page_has_counts_and_each_type_once():
    rows = [
        TypeRow("bert", "gated", "", "BertModel", {"encoder": 8}, "example", "yes"),
        TypeRow("led", "gated", "", "LEDModel", {"encoder": 8}, "example", "no: sparse | so"),
        TypeRow("odd", "refused", "unknown " * 60, "OddModel"),
        TypeRow("resnet", "no attention", "none"),
    ]
    text = page(rows)
    assert counts(rows) == {REMOVED: 1, "gated": 1, "refused": 1, "no attention": 1}
    assert "| gated and removed | 1 |" in text
    assert "| encoder (1) | bert |" in text
    assert "| led | LEDModel | sparse / so |" in text
    assert all(text.count(f" {row.model_type}") == 1 for row in rows[1:3])
    assert "may differ by 0.0001 of the largest output, or by 0.0001 itself where that is below 1" in text
    assert "Slopes are sampled" in text
    assert max(map(len, text.splitlines()[8:])) < 260
