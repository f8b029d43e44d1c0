"""Roles through training: of tables made by hand, of a run that is trained once more, and of checkpoints."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import BertConfig, BertModel

from gates.roles.roles import RULES
from tests.training.analysis.test_roles import WORDS, call, texts_of, write_treebank
from tests.training.runs import make_data, write_config
from training.analysis.closing import Closing
from training.analysis.dynamics import appearances, dynamics_of, heads_over_time
from training.analysis.looks import Course, Look
from training.data.word_tokenizer import word_tokenizer
from training.fit import main as fit

HEADS = 4


def table(*, kept=range(HEADS), **roles):
    """A table of roles of the kept heads; ``roles`` has the heads with each role."""
    held = {head: [rule.name for rule in RULES if head in roles.get(rule.name, ())] for head in kept}
    rows = pd.DataFrame({"site": "encoder.0", "kind": "encoder", "layer": 0, "head": list(kept)})
    rows["roles"] = [", ".join(names) or "none" for names in held.values()]
    rows["specialised"] = [any(rule.specialised and rule.name in names for rule in RULES) for names in held.values()]
    for rule in RULES:
        rows[f"{rule.name}_has"] = [rule.name in names for names in held.values()]
        rows[f"{rule.name}_strength"] = 0.5
    return rows


def course():
    """Head 0 is positional from the start, head 1 syntactic from epoch 1 on until it is pruned, head 2 positional at epoch 1
    alone, and head 3 positional at the beginning and at the end."""
    opened = torch.ones(HEADS)
    pruned = torch.tensor([1.0, 0.0, 1.0, 1.0])
    looks = [
        Look(0, "start", table(positional=[0, 3]), opened),
        Look(1, "finetune", table(positional=[0, 2], syntactic=[1]), opened),
        Look(2, "prune", table(positional=[0, 2], syntactic=[1]), pruned),
        Look(3, "retrain", table(kept=[0, 2, 3], positional=[0, 3]), pruned),
    ]
    times = np.array([[np.inf, 0.25, np.inf, np.inf]])
    return Course(looks, "epoch", Closing("learned", 3, (("encoder.0", HEADS),), times), True)


def test_when_roles_appear_for_good_and_for_a_while():
    found = appearances(heads_over_time(course())).set_index(["role", "head"])
    assert found.loc[("positional", 0), ["first", "for_good", "looks"]].tolist() == [0, 0, 4]
    assert found.loc[("syntactic", 1), ["first", "for_good", "looks"]].tolist() == [1, 1, 2]  # up to its pruning
    assert found.loc[("positional", 2), "first"] == 1
    assert np.isnan(found.loc[("positional", 2), "for_good"])
    assert found.loc[("positional", 3), ["first", "for_good", "looks"]].tolist() == [0, 3, 2]
    assert len(found.loc["specialised"]) == 4


def test_heads_with_each_role_at_every_look():
    finding = dynamics_of(course())
    rows = finding.tables["dynamics"].set_index(["role", "time"])
    positional = rows.loc["positional"]
    assert positional["with_role"].tolist() == [2, 2, 2, 2]
    assert positional["heads"].tolist() == [4, 4, 4, 3]
    assert positional["new"].tolist() == [0, 1, 0, 1]
    assert positional["lost"].tolist() == [0, 1, 0, 1]
    assert rows.loc["syntactic", "with_role"].tolist() == [0, 1, 1, 0]
    assert rows.loc["syntactic", "lost"].tolist() == [0, 0, 0, 0]  # it was pruned
    assert rows.loc["specialised", "open"].tolist() == [2, 3, 2, 2]
    assert ((rows["low"] <= rows["share"]) & (rows["share"] <= rows["high"])).all()
    closing = finding.tables["dynamics_closing"].set_index("role")
    assert closing.loc["syntactic", ["heads", "closed", "median_time", "later"]].tolist() == [1, 1, 0.25, 0]
    told = " ".join(finding.sentences)
    assert "is the run's to the last bit" in told
    assert "positional: 2 of 4 heads at first, 2 of 3 at the end; of the 2 heads that kept it to the end" in told
    assert "1 (50%, 95 % interval 1% to 99%) had it from the first look on" in told
    assert "By when the middle head has its role for good: syntactic (epoch 1) and positional (epoch 1.5)." in told


def test_the_last_look_of_fine_tuning_is_the_dense_model_of_the_run(tmp_path, capsys):
    config = write_config(tmp_path)
    assert fit(["--config", config, "--run_dir", str(tmp_path / "run"), "--trainer.log_every_n_steps", "1"]) == 0
    trees = write_treebank(tmp_path, texts_of(make_data()))
    out = tmp_path / "out"
    assert call(tmp_path / "run", out, "--experiments", "dynamics,roles,closing", "--conllu", trees) == 0
    assert "The model at the end of fine-tuning is the run's to the last bit." in capsys.readouterr().out
    heads = pd.read_csv(out / "dynamics_heads.csv")
    assert heads.groupby("time", sort=False)["phase"].first().to_dict() == {
        0.0: "start", 1.0: "finetune", 2.0: "prune", 3.0: "retrain",
    }  # fmt: skip
    assert len(heads) == 4 * 8
    tuned, dense = heads[heads["time"] == 1].reset_index(drop=True), pd.read_csv(out / "roles.csv")
    names = [f"{rule.name}_strength" for rule in RULES]
    np.testing.assert_allclose(tuned[names].to_numpy(), dense[names].to_numpy(), rtol=1e-9)
    assert not np.allclose(heads[heads["time"] == 0]["syntactic_strength"], dense["syntactic_strength"])
    last = heads[heads["time"] == 3]
    assert (last["roles"] != "pruned").sum() == 3 == (last["gate"] > 0).sum()
    assert (out / "plots" / "dynamics.png").exists()
    own, logged = (pd.read_csv(out / f"{name}.csv") for name in ("dynamics_closing", "closing"))
    assert own["budget"].unique().tolist() == [3]
    columns = ["role", "heads", "closed", "later", "low", "high"]
    pd.testing.assert_frame_equal(own[columns], logged[columns])  # of gates that the run logged at every step
    assert json.loads((out / "metrics.json").read_text())["experiments"]["dynamics"]["numbers"]["same_weights"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints, of which the later one has another attention."""
    folder = tmp_path_factory.mktemp("trained")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 60}
    for number in (1000, 20):
        torch.manual_seed(number)
        path = folder / f"checkpoint-{number}"
        BertModel(BertConfig(max_position_embeddings=12, initializer_range=0.5, **size)).save_pretrained(path)
        word_tokenizer(WORDS, max_length=12).save_pretrained(path)
    return folder


def test_checkpoints_are_looked_at_in_the_order_of_their_numbers(checkpoints, tmp_path, capsys):
    trees = write_treebank(tmp_path, WORDS)
    assert call(checkpoints, tmp_path / "out", "--conllu", trees) == 0  # dynamics is what is done with checkpoints
    heads = pd.read_csv(tmp_path / "out" / "dynamics_heads.csv")
    assert heads["time"].unique().tolist() == [20, 1000]
    assert "Roles at 2 looks, from checkpoint 20 to checkpoint 1000." in capsys.readouterr().out
    assert call(checkpoints / "checkpoint-1000", tmp_path / "one", "--conllu", trees) == 0
    one = pd.read_csv(tmp_path / "one" / "roles.csv")
    np.testing.assert_allclose(heads["positional_strength"][4:], one["positional_strength"])
    assert not (tmp_path / "out" / "dynamics_closing.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the experiment dynamics needs a treebank; give one with --conllu FILE"),
        (
            ["--experiments", "roles", "--conllu", "x"],
            "is a folder with checkpoints and no run, so there is nothing to do roles",
        ),
    ],
)
def test_what_checkpoints_cannot_be_asked(checkpoints, tmp_path, capsys, arguments, message):
    assert call(checkpoints, tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err
    assert call(checkpoints / "checkpoint-20", tmp_path / "out", "--experiments", "dynamics", "--conllu", "x") == 2
    assert "is a folder with one model, and the experiment dynamics looks at several" in capsys.readouterr().err


def test_checkpoints_of_two_models_are_refused(checkpoints, tmp_path, capsys):
    for number, heads in ((1, 2), (2, 4)):
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": heads, "intermediate_size": 16}
        BertModel(BertConfig(max_position_embeddings=12, vocab_size=60, **size)).save_pretrained(tmp_path / f"step-{number}")
        word_tokenizer(WORDS, max_length=12).save_pretrained(tmp_path / f"step-{number}")
    assert call(tmp_path, tmp_path / "out", "--conllu", write_treebank(tmp_path, WORDS)) == 2
    assert "has other heads than the checkpoint before" in capsys.readouterr().err
