"""``python -m training compare`` on translation: the same experiments and tables, with BLEU."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import sacrebleu

from tests.training.translation_runs import make_data, write_config
from training.commands.table import run_command

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
