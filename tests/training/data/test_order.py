"""The order of training batches."""

import torch

from training.config.data import Synthetic
from training.data.synthetic import SyntheticData


def test_the_seed_of_a_run_changes_the_order_as_the_datas_own_does():
    def built(seed, of_run):
        data = SyntheticData(Synthetic(train_rows=48, select_rows=3, test_rows=3, batch_size=8, score_rows=16, seed=seed))
        data.order_by(of_run)
        data.build(None)
        return data

    def seen(data):
        return [batch["input_ids"] for loader in (data.train_dataloader(), data.score_dataloader()) for batch in loader]

    one, other, neither = built(1, 4), built(5, 0), built(1, 0)
    assert all(torch.equal(a, b) for a, b in zip(seen(one), seen(other), strict=True))
    assert one.fingerprint() == other.fingerprint() != neither.fingerprint()
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(seen(one), seen(neither), strict=True))
