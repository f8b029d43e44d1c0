import copy
import json

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from gates.errors import GateError
from tests.training import causal_runs, translation_runs
from tests.training.analysis.models import BART, make_decoder, make_dense, make_translator
from tests.training.runs import make_data
from training.analysis.analyze import EXPERIMENTS, WITHOUT_TREES
from training.analysis.heads import ablate_each, across_domains, by_kind, one_per_layer
from training.analysis.model import AnalysisResult, Outcomes, gate_columns, head_importance, load_run, outcomes
from training.commands.table import run_command
from training.stats.significance import holm, mcnemar


@pytest.fixture(scope="module")
def dense():
    return make_dense()


def without(dense, heads):
    """A copy of the model whose output projections have zeros for some heads, and no gates."""
    dense.gates.detach()
    model = copy.deepcopy(dense.backbone).eval()
    dense.gates.attach()
    for head in heads:
        row = gate_columns(dense.gates).iloc[head]
        attention = model.bert.encoder.layer[row["layer"]].attention
        size = attention.self.attention_head_size
        attention.output.dense.weight.data[:, row["head"] * size : (row["head"] + 1) * size] = 0
    return model


def by_hand(dense, heads, split="test"):
    """Losses and predictions of the model without some heads."""
    model, losses, predictions = without(dense, heads), [], []
    loader = {"test": dense.data.test_dataloader, "select": dense.data.val_dataloader}[split]()
    for batch in loader:
        with torch.no_grad():
            logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
        losses.append(torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none"))
        predictions.append(logits.argmax(-1) == batch["labels"])
    return torch.cat(losses).numpy(), torch.cat(predictions).numpy()


def test_outcomes_are_those_of_a_model_without_the_heads(dense):
    mask = torch.ones(8)
    mask[[1, 6]] = 0
    found = outcomes(dense, torch.stack([torch.ones(8), mask]), "test")
    for row, heads in enumerate(([], [1, 6])):
        losses, correct = by_hand(dense, heads)
        np.testing.assert_allclose(found.losses[row], losses, rtol=1e-4, atol=1e-5)
        assert ((found.predictions[row] == found.targets) == correct).all()
    assert found.values[0] != found.values[1]


def test_passes_start_at_the_first_layer_with_a_closed_head(dense, monkeypatch):
    second_layer = torch.cat([torch.ones(12, 4), (torch.rand(12, 4) < 0.5).float()], dim=1)
    masks, ran = torch.cat([torch.eye(8), second_layer, torch.eye(8)]), []
    handle = dense.backbone.bert.encoder.layer[0].intermediate.register_forward_hook(lambda *_: ran.append(1))
    found, few = outcomes(dense, masks, "test"), len(ran)
    monkeypatch.setattr("training.analysis.model.find_writers", lambda *_: ([], False))
    full = outcomes(dense, masks, "test")
    handle.remove()
    assert few < 0.8 * (len(ran) - few)
    assert np.array_equal(found.losses, full.losses)
    assert np.array_equal(found.predictions, full.predictions)


def test_each_head_alone_with_mcnemars_test(dense):
    finding = ablate_each(dense)
    table = finding.tables["ablate"]
    base_losses, base = by_hand(dense, [])
    p = []
    for head in range(8):
        losses, correct = by_hand(dense, [head])
        p.append(mcnemar(correct, base))
        assert table.loc[head, "change"] == pytest.approx(correct.mean() - base.mean())
        assert table.loc[head, "loss_change"] == pytest.approx((losses - base_losses).mean(), abs=1e-4)
    np.testing.assert_allclose(table["p"], p)
    np.testing.assert_allclose(table["p_holm"], holm(p))
    assert (table["low"] <= table["change"] + 1e-9).all()
    assert finding.numbers["significantly_worse"] == int(((holm(p) < 0.05) & (table["change"] < 0)).sum())
    assert "removing one alone lowers it significantly" in finding.sentences[0]
    assert len(set(table["change"])) > 3  # or the test would show nothing


def test_the_best_head_of_each_layer_is_chosen_on_the_selection_split(dense):
    table = one_per_layer(dense).tables["one_per_layer"]
    assert list(table["site"]) == ["encoder.0", "encoder.1"]
    for layer in range(2):
        heads = range(4 * layer, 4 * layer + 4)
        without_others = {head: [other for other in heads if other != head] for head in heads}
        quality = {}
        for head, others in without_others.items():
            losses, correct = by_hand(dense, others, "select")
            quality[head] = (correct.mean(), -losses.mean())
        best = max(quality, key=quality.get)
        assert table.loc[layer, "best_head"] == best - 4 * layer
        assert table.loc[layer, "metric"] == pytest.approx(by_hand(dense, without_others[best])[1].mean())


@pytest.mark.integration
def test_kinds_are_pruned_one_at_a_time_and_together():
    dense = make_dense(BART)
    finding = by_kind(dense)
    table = finding.tables["by_kind"]
    sizes = {str(kind): int(rows["left"].max()) for kind, rows in table.groupby("kind")}
    assert sizes == {"all": 6, "encoder": 2, "decoder": 2, "cross": 2}
    whole = table[(table["pruned"] == 0)]["metric"]
    assert whole.nunique() == 1
    cross = table[(table["kind"] == "cross") & (table["pruned"] == 2)]["loss"]
    mask = (dense.gates.kind_index() != 2).float()  # KINDS is encoder, decoder, cross
    np.testing.assert_allclose(cross, outcomes(dense, mask.unsqueeze(0), "test").losses.mean(), rtol=1e-5)
    assert len(finding.sentences) == 8


def test_the_same_data_correlate_perfectly_and_others_less(dense):
    finding = across_domains(dense, make_data(test_rows=120))
    for name in ("his", "loss_change"):
        assert finding.numbers[name]["pearson"] == pytest.approx(1)
        assert finding.numbers[name]["spearman"] == pytest.approx(1)
    other = across_domains(dense, make_data(test_rows=90, max_distractors=0))
    assert other.numbers["loss_change"]["pearson"] < 0.9999
    assert other.numbers["his"]["pearson_low"] <= other.numbers["his"]["pearson"] <= other.numbers["his"]["pearson_high"]


def test_a_change_of_the_loss_has_students_paired_test():
    losses = np.random.default_rng(0).normal(size=(3, 20))
    losses[2] = losses[0]
    changed, equal = Outcomes(losses).against_first()
    expected = stats.ttest_rel(losses[1], losses[0])
    assert (changed.p, changed.low, changed.high) == pytest.approx((expected.pvalue, *expected.confidence_interval()))
    assert (equal.difference, equal.p) == (0, 1)


def test_other_data_must_be_of_the_same_task(dense):
    other = make_data()
    other.labels = ["no", "perhaps"]
    with pytest.raises(GateError, match=r"the classes \['no', 'perhaps'\] and the run has \['no', 'yes'\]"):
        across_domains(dense, other)
    other = make_data()
    other.tokenizer = copy.deepcopy(other.tokenizer)
    other.tokenizer.add_tokens(["maybe"])
    with pytest.raises(GateError, match="another tokenizer"):
        across_domains(dense, other)


# -- the command -----------------------------------------------------------------------------------------------


def call(run, out, *arguments):
    return run_command("analyze", [str(run), "--run_dir", str(out), *arguments])


@pytest.mark.integration
def test_an_analysis_names_its_experiments_and_their_time_first(run, tmp_path, capsys, monkeypatch):
    """Every forward pass takes a second here, whatever its batch. A mask costs half a pass in the first two experiments."""
    monkeypatch.setattr("training.comparison.estimate._forward", lambda subject, batch, half: 1.0)
    monkeypatch.setattr("training.comparison.estimate.duration", str)
    for name in WITHOUT_TREES:
        monkeypatch.setitem(EXPERIMENTS, name, lambda dense: AnalysisResult({}, {}, [], {}))
    assert call(run, tmp_path / "out") == 0
    said = capsys.readouterr().out
    titles = "Each head removed alone; One head per layer; Quality against budget, by kind of attention"
    assert f"3 experiments: {titles}\n" in said
    dense = load_run(str(run))
    select, test = len(dense.data.val_dataloader()), len(dense.data.test_dataloader())
    scoring = (1 + 10) * 3 * 64 / len(next(iter(dense.data.val_dataloader()))["labels"])  # once, and before each of ten steps
    seconds = 8 / 2 * test + (8 / 2 * select + 2 / 2 * test) + (scoring + 2 * 10 * test)
    assert f"about {seconds} on this machine" in said


@pytest.mark.integration
def test_the_finetune_is_repeated_to_the_last_bit_and_seen_at_every_epoch(run, tmp_path, capsys):
    assert call(run, tmp_path / "out", "--experiments", "through-training") == 0
    table = pd.read_csv(tmp_path / "out" / "through_training.csv")
    assert list(table["epoch"].unique()) == [1, 1.5]
    assert list(table["step"].unique()) == [16, 24]
    assert list(table["pruned"].unique()) == list(range(9))
    scores = pd.read_csv(tmp_path / "out" / "through_training_scores.csv")
    assert len(scores) == 2 * 8
    assert scores["entropy"].between(0, 1).all()
    assert "The retrained model is the run's to the last bit." in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())["experiments"]["through-training"]["numbers"]
    assert found["same_weights"]
    assert found["epochs"][-1]["his_spearman_with_last"] == pytest.approx(1)
    dense = load_run(str(run))
    np.testing.assert_allclose(scores["his"][8:], head_importance(dense), rtol=1e-5)
    whole = outcomes(dense, torch.ones(1, 8), "test")
    assert table.loc[table["pruned"].eq(0) & table["epoch"].eq(1.5), "loss"].item() == pytest.approx(whole.losses.mean())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experiments", "ablat"], "unknown experiment 'ablat'; expected some of ablate, one-per-layer"),
        (["--experiments", ","], "--experiments is empty"),
        (["--experiments", "domains"], "the experiment domains needs other data"),
        (["--other_data.max_distractors", "1"], "(--other_data.max_distractors) and nothing uses them; add"),
        (["--experiments", "survival", "--parser", "y"], "--parser is given and nothing uses it"),
        (["--experiments", "ablate", "--weights", "pruned"], "--weights pruned is for the experiment roles alone"),
        (["--experiments", "ablate", "--conllu", "x"], "--conllu is given and nothing uses it"),
        (["--experiments", "roles"], "the experiment roles needs a treebank; give one with --conllu FILE"),
        (["--conllu", "x", "--parser", "y", "--text", "z"], "--conllu and --parser are both given; expected one of them"),
        (["--parser", "en_core_web_sm"], "--parser en_core_web_sm has nothing to parse; give texts, one on each line, with"),
        (["--experiments", "roles", "--conllu", "x", "--roles", "y"], "--roles is given and nothing uses it"),
        (["--experiments", "roles", "--conllu", "x", "--sentences", "0"], "--sentences is 0; expected 1 or more"),
    ],
)
def test_bad_options_are_one_sentence(tmp_path, capsys, arguments, message):
    assert call(tmp_path / "nowhere", tmp_path / "out", *arguments) == 2
    first, error = capsys.readouterr().err.split("\n", 1)
    assert first.endswith(": loading libraries")
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_directories_that_do_not_fit(tmp_path, capsys):
    run, taken = tmp_path / "nothing", tmp_path / "taken"
    taken.mkdir()
    (taken / "letter.txt").write_text("keep me")
    assert call(run, taken) == 2
    assert "is not empty and holds no analysis" in capsys.readouterr().err
    assert call(run, taken / "letter.txt") == 2
    assert "is or lies in a file" in capsys.readouterr().err
    (taken / "metrics.json").write_text(json.dumps({"analysed_run": "another", "experiments": {}}))
    assert call(run, taken) == 2
    assert "holds the analysis of 'another'" in capsys.readouterr().err
    assert call(run, tmp_path / "out") == 2
    assert "does not exist" in capsys.readouterr().err


# Models without classes, which are judged by their loss.


TASKS = {"language model": (causal_runs, make_decoder), "translator": (translation_runs, make_translator)}


@pytest.mark.parametrize("task", ["language model", pytest.param("translator", marks=pytest.mark.integration)])
def test_heads_on_other_data_of_the_same_task(task):
    task_runs, make = TASKS[task]
    dense = make()
    whole = outcomes(dense, torch.ones(1, dense.gates.size), "test").losses.mean()
    same = across_domains(dense, task_runs.make_data())
    assert same.numbers["dense"] == same.numbers["dense_other"] == pytest.approx(whole)
    for name in ("his", "loss_change"):
        assert same.numbers[name]["pearson"] == pytest.approx(1)
        assert same.tables["domains"][name].nunique() > 3  # or the correlation would show nothing
    assert same.sentences[0] == f"Test loss is {whole:.3f} on the run's data and {whole:.3f} on the other data."
    other = task_runs.make_data(test_rows=9)
    other.tokenizer = dense.data.tokenizer
    found = across_domains(dense, other)
    assert found.numbers["dense_other"] == pytest.approx(
        outcomes(dense, torch.ones(1, dense.gates.size), "test", data=other).losses.mean()
    )
    assert found.numbers["loss_change"]["pearson"] < 0.9999
