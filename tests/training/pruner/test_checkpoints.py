"""Checkpoints are written whole or not at all, and read only if no bit of them has changed."""

import random
import resource

import pytest
import torch

from gates.errors import GateError
from tests.training.runs import make_data, make_pruner, make_setup
from training.pruner.callbacks import LastGoodCheckpoint
from training.pruner.checkpoints import read_checkpoint, write_checkpoint
from training.setup import make_trainer

CONTENT = {
    "state_dict": {"weight": torch.linspace(-1, 1, 300), "steps": torch.arange(7)},
    "loops": {"fit_loop": {"epoch": 1}},
    "optimizer_states": [{"state": {0: {"exp_avg": torch.linspace(0, 1, 300)}}}],
}


def same(one, other):
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_no_bit_changes_unseen(tmp_path):
    """Of a few hundred changed bits: either the content is what it was, since a bit belongs to nothing, or the checkpoint is
    refused. PyTorch alone reads other weights."""
    path, draw = tmp_path / "last.ckpt", random.Random(0)
    write_checkpoint(CONTENT, path)
    whole, refused, silent = path.read_bytes(), 0, 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 3])):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            found = read_checkpoint(path)
        except GateError:
            found = None
        if found is not None:
            assert same(found, CONTENT)
        else:
            refused += 1
            try:
                silent += not same(torch.load(path, weights_only=True), CONTENT)
            except Exception:
                continue
    assert refused > 150
    assert silent > 50


@pytest.mark.parametrize("damage", [lambda whole: whole[:-1], lambda whole: whole[: len(whole) // 2], lambda whole: b""])
def test_a_shortened_checkpoint_is_refused(damage, tmp_path):
    write_checkpoint(CONTENT, tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").write_bytes(damage((tmp_path / "last.ckpt").read_bytes()))
    with pytest.raises(GateError, match="is corrupt"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_a_full_disk_is_named_and_the_old_checkpoint_stays(tmp_path):
    path = tmp_path / "last.ckpt"
    write_checkpoint(CONTENT, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"last\.ckpt") as failure:
            write_checkpoint(CONTENT | {"more": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failure.value.filename == str(path)
    assert same(read_checkpoint(path), CONTENT)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def fitted(*callbacks, **overrides):
    trainer = make_trainer(make_setup(), *callbacks, limit_val_batches=0, **overrides)
    trainer.fit(make_pruner(), make_data())
    return trainer


def test_training_does_not_go_on_from_a_damaged_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    trainer = fitted(max_steps=2)
    trainer.save_checkpoint(path)
    whole = path.read_bytes()
    weights = trainer.lightning_module.backbone.classifier.weight.detach().numpy().tobytes()
    at = whole.index(weights)
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert len(torch.load(path, weights_only=True)) > 1  # PyTorch sees nothing
    with pytest.raises(GateError, match="checksum"):
        make_trainer(make_setup()).fit(make_pruner(), make_data(), ckpt_path=path, weights_only=True)


def test_a_checkpoint_that_the_disk_has_spoilt_does_not_replace_the_last_good_one(tmp_path):
    class Spoils(LastGoodCheckpoint):
        """At the second checkpoint."""

        def on_train_batch_end(self, trainer, *args):
            super().on_train_batch_end(trainer, *args)
            if trainer.global_step == 4:
                whole = self.pending.read_bytes()
                self.pending.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])

    with pytest.raises(GateError, match="the one before is kept"):
        fitted(Spoils(tmp_path / "last.ckpt", every=2), max_steps=8)
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2


def test_what_another_process_left_unchecked_is_never_the_last_good_one(tmp_path):
    (tmp_path / ".last.ckpt.pending").write_text("half a checkpoint")
    (tmp_path / "last.ckpt").write_text("the good one")
    fitted(LastGoodCheckpoint(tmp_path / "last.ckpt", every=100), max_steps=2)
    assert (tmp_path / "last.ckpt").read_text() == "the good one"
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
