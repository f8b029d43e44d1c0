"""A small run of a language model on a text file, whose vocabulary is trained on it."""

from __future__ import annotations

from pathlib import Path

from tests.training import causal_runs
from training.fit import main as fit


def write_texts(folder: Path, name: str, words: str) -> Path:
    path = folder / f"{name}.txt"
    path.write_text(f"{words}.\n\n" * 20)
    return path


def make_run(folder: Path) -> Path:
    """A finished run on ``own.txt`` of the folder."""
    texts = write_texts(folder, "own", "one two three")
    before, after = causal_runs.CONFIG.split("data:")[0], causal_runs.CONFIG[causal_runs.CONFIG.index("trainer:") :]
    files = ", ".join(f"{split}_file: {texts}" for split in ("train", "select", "test"))
    data = f"{{class_path: Documents, init_args: {{{files}, vocab_size: 300, max_length: 24, score_rows: 8, batch_size: 2}}}}"
    config = folder / "local.yaml"
    config.write_text(f"{before}data: {data}\n{after}")
    assert fit(["--config", str(config), "--run_dir", str(folder / "run")]) == 0
    return folder / "run"
