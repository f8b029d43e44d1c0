"""Memory does not grow with the data: roles of ten times as many sentences, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from tests.training.analysis.test_roles import WORDS
from training.data.synthetic import word_tokenizer

LENGTH, LAYERS, HEADS, FEW, MANY = 40, 2, 8, 100, 1000
ROOT = Path(__file__).parents[3]


def write_long_trees(path):
    generator = np.random.default_rng(0)
    with path.open("w") as stream:
        for _ in range(MANY):
            for word in range(LENGTH):
                head = 0 if word == 0 else int(generator.integers(1, word + 1))
                row = [str(word + 1), WORDS[int(generator.integers(len(WORDS)))], *"____", str(head), "dep" if word else "root"]
                stream.write("\t".join([*row, "_", "_"]) + "\n")
            stream.write("\n")
    return str(path)


@pytest.mark.nightly
def test_ten_times_the_sentences_take_no_more_memory(tmp_path):
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 32}
    BertModel(BertConfig(max_position_embeddings=64, vocab_size=60, **size)).save_pretrained(tmp_path / "model")
    word_tokenizer(WORDS, max_length=64).save_pretrained(tmp_path / "model")
    trees, peaks = write_long_trees(tmp_path / "trees.conllu"), {}
    for sentences in (FEW, MANY):
        out = tmp_path / f"out{sentences}"
        arguments = ["--conllu", trees, "--relations", "dep", "--sentences", str(sentences), "--run_dir", str(out)]
        command = [sys.executable, "-m", "training", "analyze", str(tmp_path / "model"), *arguments]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        found = json.loads((out / "metrics.json").read_text())["experiments"]["roles"]
        peaks[sentences] = found["peak_memory_mb"]
    if peaks[FEW] is None:
        pytest.skip("this system does not tell a process's peak memory")
    kept = (MANY - FEW) * LAYERS * HEADS * (LENGTH + 2) ** 2 * 4 / 2**20  # MB, if attention were kept
    print(peaks, kept)
    assert peaks[MANY] - peaks[FEW] < kept / 3
