"""``python -m training compare`` on translation: the same experiments and tables, with BLEU."""

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import sacrebleu

from tests.training.translation_runs import make_data, write_config
from training.commands.table import run_command
from training.fit import main as fit

main = partial(run_command, "compare")

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("undrawn")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare_translation")
    more = ["--methods", "learned,his,random", "--budgets", "{encoder: 3}", "--seeds", "0,1"]
    more += ["--stages", "post hoc,retrained,from scratch"]
    run = folder / "run"
    assert main(["--config", write_config(folder), "--run_dir", str(run), *more]) == 0
    return run


def test_rows_state_the_bleu_of_their_translations(finished):
    references = make_data().texts["test"].target
    table = pd.read_csv(finished / "comparison.csv")
    assert len(table) == 2 * (3 + 3 + 2 + 2)  # dense; learned; his and random, which are not trained from scratch
    for row in table.itertuples():
        kept = np.load(finished / "experiments" / row.experiment / "predictions.npz")
        assert kept["test_target"].tolist() == references
        assert sacrebleu.corpus_bleu(kept["test_prediction"].tolist(), [references]).score == pytest.approx(
            row.test_bleu, abs=1e-4
        )


def test_samples_are_the_translations_of_the_first_seed(finished):
    pairs = make_data().texts["test"]
    samples = pd.read_csv(finished / "samples.tsv", sep="\t", dtype=str, keep_default_na=False)
    assert samples["source"].tolist() == pairs.source[:20]
    assert samples["reference"].tolist() == pairs.target[:20]
    rows = pd.read_csv(finished / "comparison.csv").query("seed == 0")
    assert set(samples.columns[2:]) == {f"{row.method}.{row.stage}.{row.budget}" for row in rows.itertuples()}
    for row in rows.itertuples():
        kept = np.load(finished / "experiments" / row.experiment / "predictions.npz")["test_prediction"]
        assert samples[f"{row.method}.{row.stage}.{row.budget}"].tolist() == kept[:20].tolist()


def test_all_methods_pay_the_same_and_are_tested_in_bleu(finished):
    retrained = pd.read_csv(finished / "comparison.csv").query("stage == 'retrained'")
    assert retrained["steps"].nunique() == 1
    statistics = pd.read_csv(finished / "statistics.csv")
    table = pd.read_csv(finished / "comparison.csv")
    means = table.groupby(["stage", "method"])["test_bleu"].mean()
    for row in statistics.itertuples():
        assert row.difference == pytest.approx(means[row.stage, row.method] - means[row.stage, row.rival], abs=1e-3)


def test_a_run_with_a_budget_per_kind_finds_the_same(finished, tmp_path):
    """All metrics of greedy and beam search, masks, steps and translations, of the first seed."""
    more = ["--compare", "full", "--retrained", "[learned,his]", "--from_scratch", "[learned]", "--curve", "[]"]
    assert fit(["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run"), *more]) == 0
    ours, theirs = (
        pd.read_csv(folder / "comparison.csv").query("seed == 0").set_index(["method", "stage"])
        for folder in (tmp_path / "run", finished)
    )
    both = [key for key in ours.index if key in theirs.index]
    assert len(both) == 4 + 2 + 1
    measured = ["seconds", "peak_memory_mb"]
    ours, theirs = (table.loc[both].drop(columns=measured) for table in (ours, theirs))
    pd.testing.assert_frame_equal(ours, theirs[ours.columns], check_exact=True)
    assert {"test_beam_bleu", "select_bleu", "steps", "heads", "experiment"} <= set(ours)
    masks = [
        {entry["method"]: entry["mask"] for entry in json.loads((folder / "masks.json").read_text()) if entry["seed"] == 0}
        for folder in (tmp_path / "run", finished)
    ]
    assert all(masks[0][method] == masks[1][method] for method in ("dense", "learned", "his", "random"))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["budgets_by_kind"] == json.loads((finished / "metrics.json").read_text())["budgets_by_kind"]
    samples = [pd.read_csv(folder / "samples.tsv", sep="\t", dtype=str) for folder in (tmp_path / "run", finished)]
    pd.testing.assert_series_equal(*(table["learned.retrained.11"] for table in samples))
